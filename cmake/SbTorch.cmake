# Makes the imported target megatron_sb::torch from the torch that a Python interpreter has, or from SB_TORCH_ROOT.
#
# find_package(Torch) is not used: without nvcc it fails for a CUDA build of torch, and with CUDA 13 it adds
# architectures that nvcc no longer knows. Used by this build and by the installed CMake package alike.
#
#   SB_TORCH_ROOT   folder with include/ and lib/ of a LibTorch; empty: ask Python
# Sets SB_TORCH_VERSION, SB_TORCH_CUDA_VERSION (empty for a CPU torch) and SB_TORCH_ROOT.

set(SB_TORCH_ROOT "" CACHE PATH "Folder with LibTorch's include/ and lib/; empty: the torch of the Python interpreter")

function(sb_ask_python_for_torch)
    if(NOT Python_EXECUTABLE)
        find_package(Python 3.10 REQUIRED COMPONENTS Interpreter)
    endif()
    set(question "import os, torch\nprint(';'.join([os.path.dirname(torch.__file__), torch.__version__, torch.version.cuda or '', str(int(torch.compiled_with_cxx11_abi()))]))")
    # The second way leaves pip's build isolation: -E ignores the variables that hide the installed packages (-I would
    # too, and hide the user's own, from pip install --user, itself).
    foreach(isolation "" "-E")
        execute_process(COMMAND ${Python_EXECUTABLE} ${isolation} -c "${question}"
                        OUTPUT_VARIABLE answer ERROR_VARIABLE error RESULT_VARIABLE status OUTPUT_STRIP_TRAILING_WHITESPACE)
        if(status EQUAL 0)
            break()
        endif()
    endforeach()
    if(NOT status EQUAL 0)
        message(FATAL_ERROR "megatron_sb: ${Python_EXECUTABLE} has no torch (pip install 'torch==2.11.*' first; one that only PYTHONPATH leads to needs pip install --no-build-isolation), and SB_TORCH_ROOT is not set.\n${error}")
    endif()
    list(GET answer 0 root)
    list(GET answer 1 version)
    list(GET answer 2 cuda)
    list(GET answer 3 abi)
    set(SB_TORCH_ROOT "${root}" PARENT_SCOPE)
    set(SB_TORCH_VERSION "${version}" PARENT_SCOPE)
    set(SB_TORCH_CUDA_VERSION "${cuda}" PARENT_SCOPE)
    set(SB_TORCH_CXX11_ABI "${abi}" PARENT_SCOPE)
endfunction()

if(SB_TORCH_ROOT)
    file(STRINGS "${SB_TORCH_ROOT}/include/torch/csrc/api/include/torch/version.h" version_line REGEX "define TORCH_VERSION \"")
    string(REGEX REPLACE ".*\"(.*)\".*" "\\1" SB_TORCH_VERSION "${version_line}")
    set(SB_TORCH_CXX11_ABI 1)
    if(EXISTS "${SB_TORCH_ROOT}/lib/libtorch_cuda.so")
        set(SB_TORCH_CUDA_VERSION "unknown")
    else()
        set(SB_TORCH_CUDA_VERSION "")
    endif()
else()
    sb_ask_python_for_torch()
endif()

if(NOT TARGET megatron_sb::torch)
    add_library(megatron_sb::torch INTERFACE IMPORTED)
    target_include_directories(megatron_sb::torch SYSTEM INTERFACE
        "${SB_TORCH_ROOT}/include" "${SB_TORCH_ROOT}/include/torch/csrc/api/include")
    target_compile_definitions(megatron_sb::torch INTERFACE _GLIBCXX_USE_CXX11_ABI=${SB_TORCH_CXX11_ABI})
    target_link_libraries(megatron_sb::torch INTERFACE
        "${SB_TORCH_ROOT}/lib/libtorch_cpu.so" "${SB_TORCH_ROOT}/lib/libc10.so")
    target_link_options(megatron_sb::torch INTERFACE "LINKER:-rpath-link,${SB_TORCH_ROOT}/lib")
endif()
