# Sets SB_CUDA (ON or OFF) from SB_WITH_CUDA (ON, OFF or AUTO), and the list sb_architectures
# from SB_CUDA_ARCHITECTURES. Prints both. Defines sb_add_cuda_kernels, which creates one library.

include(SbArchitectures)

# CMake's own names of ON and OFF are valid too, in any case.
string(TOUPPER "${SB_WITH_CUDA}" sb_with_cuda)
if(NOT sb_with_cuda MATCHES "^(ON|1|YES|Y|TRUE|OFF|0|NO|N|FALSE|AUTO)$")
    message(FATAL_ERROR "megatron_sb: SB_WITH_CUDA must be ON, OFF or AUTO, got \"${SB_WITH_CUDA}\".")
elseif(sb_with_cuda MATCHES "^(OFF|0|NO|N|FALSE)$")
    set(SB_CUDA OFF)
    set(sb_why "SB_WITH_CUDA=OFF")
else()
    include(CheckLanguage)
    check_language(CUDA)
    if(NOT CMAKE_CUDA_COMPILER)
        set(sb_why "there is no nvcc (looked at PATH, CUDACXX and CMAKE_CUDA_COMPILER)")
    elseif(NOT SB_TORCH_CUDA_VERSION)
        set(sb_why "the torch at ${SB_TORCH_ROOT} is a CPU build")
    endif()
    if(NOT sb_why)
        set(SB_CUDA ON)
    elseif(sb_with_cuda STREQUAL "AUTO")
        set(SB_CUDA OFF)
    else()
        message(FATAL_ERROR "megatron_sb: SB_WITH_CUDA=${SB_WITH_CUDA}, but ${sb_why}")
    endif()
endif()

if(SB_CUDA)
    enable_language(CUDA)
    sb_check_cuda("${CMAKE_CUDA_COMPILER_VERSION}" "${SB_TORCH_CUDA_VERSION}")
    find_package(CUDAToolkit REQUIRED)
    sb_known_architectures(sb_known "${CMAKE_CUDA_COMPILER}")
    sb_choose_architectures(sb_architectures "${SB_CUDA_ARCHITECTURES}" "${sb_known}" "${CMAKE_CUDA_COMPILER_VERSION}")
    sb_warn_of_slow_hopper_kernels("${CMAKE_CUDA_COMPILER_VERSION}" "${sb_architectures}")
    list(JOIN sb_architectures ", sm_" sb_architecture_names)
    message(STATUS "megatron_sb: CUDA build, nvcc ${CMAKE_CUDA_COMPILER_VERSION}, "
            "torch for CUDA ${SB_TORCH_CUDA_VERSION}, machine code for sm_${sb_architecture_names}")
else()
    message(WARNING "megatron_sb: this is a CPU BUILD, because ${sb_why}. It has no GPU kernels.")
endif()

# sb_add_cuda_kernels(<object library> <gencode>...) creates a library without sources. Add them with target_sources.
# A host function that a function for host and device calls, also a constexpr one such as std::max, has no code on the
# device. There nvcc leaves the result undefined, with only a warning. So these warnings are errors.
function(sb_add_cuda_kernels name)
    add_library(${name} OBJECT)
    target_link_libraries(${name} PRIVATE sb_options CUDA::cudart)
    target_compile_options(${name} PRIVATE "$<$<COMPILE_LANGUAGE:CUDA>:-diag-error=20011,20013,20014,20015>")
    foreach(gencode ${ARGN})
        target_compile_options(${name} PRIVATE "$<$<COMPILE_LANGUAGE:CUDA>:-gencode=${gencode}>")
    endforeach()
endfunction()
