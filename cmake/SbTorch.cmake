# Creates the imported target megatron_sb::torch from the torch of a Python interpreter, or from SB_TORCH_ROOT. This
# build and the installed CMake package both use this file.
#
# It replaces find_package(Torch), which fails without nvcc for a CUDA build of torch, and with CUDA 13 adds
# architectures that nvcc no longer knows.
#
#   SB_TORCH_ROOT   folder with include/ and lib/ of a LibTorch; if empty, Python is asked
#
# Sets SB_TORCH_ROOT, SB_TORCH_VERSION (such as 2.9.0a0+git-nv25.09), SB_TORCH_MINOR (2.9) and SB_TORCH_CUDA_VERSION
# (empty for a CPU build of torch, "unknown" for a CUDA build of LibTorch without version.py).
#
# Without a torch, this build stops. The CMake package is then not found, which is no error for a project that can do
# without it: megatron_sb_FOUND is false, and megatron_sb_NOT_FOUND_MESSAGE has the reason.

set(SB_TORCH_ROOT "" CACHE PATH
    "Folder with LibTorch's include/ and lib/; if empty, the torch of the Python interpreter is used")

# sb_torch_failed(<text>...) keeps the reason why there is no torch. The functions below return after it.
function(sb_torch_failed)
    string(CONCAT text ${ARGV})
    set_property(GLOBAL PROPERTY SB_TORCH_ERROR "${text}")
endfunction()

function(sb_ask_python_for_torch)
    if(NOT Python_EXECUTABLE)
        find_package(Python 3.10 ${sb_torch_required} COMPONENTS Interpreter)
        if(NOT Python_Interpreter_FOUND)
            sb_torch_failed("there is no Python 3.10 or later, and SB_TORCH_ROOT is not set.")
            return()
        endif()
    endif()
    string(CONCAT question "import os, torch\n"
           "print(';'.join([os.path.dirname(torch.__file__), torch.__version__, torch.version.cuda or '', "
           "str(int(torch.compiled_with_cxx11_abi()))]))")
    # pip's build isolation hides installed packages through environment variables. The second attempt ignores these
    # variables with -E. (-I ignores them too, but also hides the packages of pip install --user.)
    foreach(isolation "" "-E")
        execute_process(COMMAND ${Python_EXECUTABLE} ${isolation} -c "${question}" OUTPUT_VARIABLE answer
                        ERROR_VARIABLE error RESULT_VARIABLE status OUTPUT_STRIP_TRAILING_WHITESPACE)
        if(status EQUAL 0)
            break()
        endif()
    endforeach()
    if(NOT status EQUAL 0)
        sb_torch_failed("${Python_EXECUTABLE} has no torch, and SB_TORCH_ROOT is not set. Run pip install torch first, "
                        "or set Python_EXECUTABLE to a Python that has torch. If torch is found only through "
                        "PYTHONPATH, use pip install --no-build-isolation.\n${error}")
        return()
    endif()
    string(REGEX MATCH "[^\n]*$" answer "${answer}")  # a module may print something when it is imported
    list(GET answer 0 root)
    list(GET answer 1 version)
    list(GET answer 2 cuda)
    list(GET answer 3 abi)
    set(SB_TORCH_ROOT "${root}" PARENT_SCOPE)
    set(SB_TORCH_VERSION "${version}" PARENT_SCOPE)
    set(SB_TORCH_CUDA_VERSION "${cuda}" PARENT_SCOPE)
    set(SB_TORCH_CXX11_ABI "${abi}" PARENT_SCOPE)
endfunction()

# Sets SB_TORCH_VERSION from the headers in SB_TORCH_ROOT, and SB_TORCH_CUDA_VERSION.
function(sb_read_torch_version)
    set(header "${SB_TORCH_ROOT}/include/torch/headeronly/version.h")
    if(NOT EXISTS "${header}")
        set(header "${SB_TORCH_ROOT}/include/torch/csrc/api/include/torch/version.h")  # torch 2.8 and 2.9
    endif()
    if(NOT EXISTS "${header}")
        sb_torch_failed("SB_TORCH_ROOT must be the folder with include/ and lib/ of LibTorch, got ${SB_TORCH_ROOT}, "
                        "which has no include/torch/headeronly/version.h.")
        return()
    endif()
    file(READ "${header}" text)
    set(numbers "")
    foreach(part MAJOR MINOR PATCH)
        string(REGEX MATCH "define TORCH_VERSION_${part}[ \t]+([0-9]+)" found "${text}")
        list(APPEND numbers "${CMAKE_MATCH_1}")
    endforeach()
    list(JOIN numbers "." version)
    set(SB_TORCH_VERSION "${version}" PARENT_SCOPE)

    set(cuda "")
    if(EXISTS "${SB_TORCH_ROOT}/lib/libtorch_cuda.so")
        set(cuda "unknown")
        if(EXISTS "${SB_TORCH_ROOT}/version.py")  # in a wheel
            file(STRINGS "${SB_TORCH_ROOT}/version.py" line REGEX "^cuda")
            if(line MATCHES "'([0-9.]+)'")
                set(cuda "${CMAKE_MATCH_1}")
            endif()
        endif()
    endif()
    set(SB_TORCH_CUDA_VERSION "${cuda}" PARENT_SCOPE)
endfunction()

set_property(GLOBAL PROPERTY SB_TORCH_ERROR "")
set(sb_torch_required REQUIRED)
if(CMAKE_FIND_PACKAGE_NAME STREQUAL "megatron_sb")
    set(sb_torch_required QUIET)
endif()
if(SB_TORCH_ROOT)
    sb_read_torch_version()
    set(SB_TORCH_CXX11_ABI 1)
else()
    sb_ask_python_for_torch()
endif()
get_property(sb_torch_error GLOBAL PROPERTY SB_TORCH_ERROR)
if(sb_torch_error AND sb_torch_required STREQUAL "REQUIRED")
    message(FATAL_ERROR "megatron_sb: ${sb_torch_error}")
elseif(sb_torch_error)
    set(megatron_sb_FOUND FALSE)
    set(megatron_sb_NOT_FOUND_MESSAGE "${sb_torch_error}")
    return()
endif()
string(REGEX MATCH "^[0-9]+\\.[0-9]+" SB_TORCH_MINOR "${SB_TORCH_VERSION}")

if(NOT TARGET megatron_sb::torch)
    add_library(megatron_sb::torch INTERFACE IMPORTED)
    target_include_directories(megatron_sb::torch SYSTEM INTERFACE
        "${SB_TORCH_ROOT}/include" "${SB_TORCH_ROOT}/include/torch/csrc/api/include")
    target_compile_definitions(megatron_sb::torch INTERFACE _GLIBCXX_USE_CXX11_ABI=${SB_TORCH_CXX11_ABI})
    target_link_libraries(megatron_sb::torch INTERFACE
        "${SB_TORCH_ROOT}/lib/libtorch_cpu.so" "${SB_TORCH_ROOT}/lib/libc10.so")
    target_link_options(megatron_sb::torch INTERFACE "LINKER:-rpath-link,${SB_TORCH_ROOT}/lib")
endif()
