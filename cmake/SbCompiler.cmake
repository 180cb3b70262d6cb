# The checks of the C++ compiler that stop a build before anything is compiled.
include(CheckCXXSourceCompiles)

# The library must use the same libstdc++ as torch. With a second, static copy, the first C++ stream that is passed
# between the two crashes.
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    execute_process(COMMAND ${CMAKE_CXX_COMPILER} -print-file-name=libstdc++.so OUTPUT_VARIABLE sb_libstdcxx
                    OUTPUT_STRIP_TRAILING_WHITESPACE)
    if(NOT EXISTS "${sb_libstdcxx}")
        message(FATAL_ERROR "megatron_sb: ${CMAKE_CXX_COMPILER} has no shared libstdc++ and would link it statically. "
                "Set CXX and CUDAHOSTCXX to a compiler with a shared libstdc++.")
    endif()
endif()

# The CPU kernels read fp16 with the type _Float16. On aarch64, g++ 12 and older have the same numbers as __fp16 only.
# clang++ 14 has __fp16 for x86-64, too, but functions there cannot have arguments of this type.
set(sb_float16_options)
check_cxx_source_compiles("int main() { return int(float(_Float16{})); }" SB_HAS_FLOAT16)
if(NOT SB_HAS_FLOAT16)
    check_cxx_source_compiles("int main() { return int(float(__fp16{})); }" SB_HAS_FP16)
    if(NOT SB_HAS_FP16 OR CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
        message(FATAL_ERROR "megatron_sb: ${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION} does not have the "
                "type _Float16. Use g++ 12 or later, or clang++ 15 or later: set CXX, and CUDAHOSTCXX for nvcc.")
    endif()
    set(sb_float16_options -D_Float16=__fp16)
endif()
