# Installs these files in the prefix or, for a wheel, in the folder of the package:
#   lib/libmegatron_sb_kernels.so   lib/torch2.11/libmegatron_sb_ops.so   include/megatron_sb/*.h
#   lib/cmake/megatron_sb/   lib/cmake/megatron_sb/torch2.11/   _C.abi3.so
# Only the files in the folders of a version of torch depend on torch. So the union of installations for several
# versions is an installation for all of them (cmake/make_wheels.py). The folder of the build has the same layout.
include(CMakePackageConfigHelpers)
if(POLICY CMP0177)  # the paths below may have "./", which newer versions of CMake warn of
    cmake_policy(SET CMP0177 NEW)
endif()

set(sb_prefix ".")
if(SKBUILD)
    set(sb_prefix "megatron_sb")
endif()

# pip installs torch, NCCL and the CUDA runtime next to the package. These paths lead from the package's lib/ to them.
# The wheels of CUDA 13 are in nvidia/cu13, the runtime of CUDA 12 is in nvidia/cuda_runtime.
set(sb_neighbours torch/lib nvidia/nccl/lib nvidia/cu13/lib nvidia/cuda_runtime/lib)

# sb_install_library(<target> <name in CMake> <folder below lib/> <path from there to lib/>)
function(sb_install_library target name folder up)
    list(TRANSFORM sb_neighbours PREPEND "${up}/../../" OUTPUT_VARIABLE rpath)
    if(NOT SKBUILD)
        list(APPEND rpath "${SB_TORCH_ROOT}/lib")
    endif()
    set_target_properties(${target} PROPERTIES
        EXPORT_NAME ${name} INSTALL_RPATH "${up};${rpath}" BUILD_RPATH_USE_ORIGIN ON
        LIBRARY_OUTPUT_DIRECTORY "${CMAKE_CURRENT_BINARY_DIR}/lib/${folder}")
    install(TARGETS ${target} EXPORT megatron_sb_targets LIBRARY DESTINATION "${sb_prefix}/lib/${folder}")
endfunction()
set(sb_torch_folder "torch${SB_TORCH_MINOR}")
sb_install_library(megatron_sb_kernels kernels "" "$ORIGIN")
sb_install_library(megatron_sb_ops ops "${sb_torch_folder}" "$ORIGIN/..")
target_include_directories(megatron_sb_ops PUBLIC $<INSTALL_INTERFACE:${sb_prefix}/include>)
install(DIRECTORY csrc/include/ DESTINATION "${sb_prefix}/include")
if(SB_BUILD_PYTHON)
    install(TARGETS _C LIBRARY DESTINATION "${sb_prefix}" COMPONENT python)
endif()

# Without a leading "./", which CMake would count as a folder between the prefix and this one.
cmake_path(SET sb_cmake_dir NORMALIZE "${sb_prefix}/lib/cmake/megatron_sb")
install(EXPORT megatron_sb_targets NAMESPACE megatron_sb:: DESTINATION "${sb_cmake_dir}/${sb_torch_folder}")
set(sb_cuda_version "")
if(SB_CUDA)
    set(sb_cuda_version "${CMAKE_CUDA_COMPILER_VERSION}")
endif()
configure_package_config_file(cmake/megatron_sbConfig.cmake.in "${CMAKE_CURRENT_BINARY_DIR}/megatron_sbConfig.cmake"
                              INSTALL_DESTINATION "${sb_cmake_dir}")
write_basic_package_version_file("${CMAKE_CURRENT_BINARY_DIR}/megatron_sbConfigVersion.cmake"
                                 COMPATIBILITY SameMinorVersion)
install(FILES "${CMAKE_CURRENT_BINARY_DIR}/megatron_sbConfig.cmake"
              "${CMAKE_CURRENT_BINARY_DIR}/megatron_sbConfigVersion.cmake"
              cmake/SbTorch.cmake DESTINATION "${sb_cmake_dir}")
