# The GPU architectures that get machine code. This file only defines functions, so that a test can call them.

# What SB_CUDA_ARCHITECTURES=all means: the architectures of server and desktop GPUs. A GPU runs the machine code of an
# older architecture with the same major number: sm_103 runs the code of sm_100, sm_121 that of sm_120.
set(SB_ALL_CUDA_ARCHITECTURES 80 86 89 90 100 120)

# sb_known_architectures(<result> <nvcc>) lists the architectures from sm_80 on that nvcc compiles, such as 80;86;90.
function(sb_known_architectures result nvcc)
    execute_process(COMMAND "${nvcc}" --list-gpu-code OUTPUT_VARIABLE text ERROR_VARIABLE error RESULT_VARIABLE status)
    if(NOT status EQUAL 0)
        message(FATAL_ERROR "megatron_sb: ${nvcc} --list-gpu-code failed: ${error}")
    endif()
    set(known)
    string(REGEX MATCHALL "sm_[0-9]+" names "${text}")
    foreach(name ${names})
        string(REPLACE "sm_" "" architecture "${name}")
        if(architecture GREATER_EQUAL 80)
            list(APPEND known ${architecture})
        endif()
    endforeach()
    list(SORT known COMPARE NATURAL)
    set(${result} "${known}" PARENT_SCOPE)
endfunction()

# sb_choose_architectures(<result> <requested> <known> <nvcc's version>) checks SB_CUDA_ARCHITECTURES against the
# architectures that nvcc compiles. The result is sorted. `all` leaves out what nvcc does not compile.
function(sb_choose_architectures result requested known version)
    set(chosen)
    if(requested STREQUAL "all")
        foreach(architecture ${SB_ALL_CUDA_ARCHITECTURES})
            if(architecture IN_LIST known)
                list(APPEND chosen ${architecture})
            endif()
        endforeach()
    else()
        foreach(architecture ${requested})
            if(NOT architecture MATCHES "^[0-9][0-9][0-9]?$")
                message(FATAL_ERROR "megatron_sb: SB_CUDA_ARCHITECTURES must be all or a list of numbers such as "
                        "\"80;90\" (90 for sm_90), got \"${architecture}\" in \"${requested}\".")
            elseif(architecture LESS 80)
                message(FATAL_ERROR "megatron_sb: SB_CUDA_ARCHITECTURES has ${architecture}, but the kernels need "
                        "sm_80 or later. Use all or some of \"${known}\".")
            elseif(NOT architecture IN_LIST known)
                message(FATAL_ERROR "megatron_sb: SB_CUDA_ARCHITECTURES has ${architecture}, but nvcc ${version} "
                        "compiles only \"${known}\". Use some of these, or set CUDACXX to an nvcc that compiles "
                        "sm_${architecture}. A GPU without machine code still works: the driver compiles PTX for it.")
            endif()
            list(APPEND chosen ${architecture})
        endforeach()
        list(REMOVE_DUPLICATES chosen)
        list(SORT chosen COMPARE NATURAL)
    endif()
    if(NOT chosen)
        message(FATAL_ERROR "megatron_sb: SB_CUDA_ARCHITECTURES is empty. Use all or some of \"${known}\".")
    endif()
    set(${result} "${chosen}" PARENT_SCOPE)
endfunction()

# sb_portable_gencode(<result> <architecture>...) returns the value of -gencode for kernels that use only features of
# sm_80. One front-end pass serves the machine code of all architectures. The PTX of compute_80 serves all other GPUs
# from sm_80 on: the driver compiles it.
function(sb_portable_gencode result)
    list(TRANSFORM ARGN PREPEND "sm_" OUTPUT_VARIABLE codes)
    list(JOIN codes "," codes)
    set(${result} "arch=compute_80,code=[${codes},compute_80]" PARENT_SCOPE)
endfunction()
