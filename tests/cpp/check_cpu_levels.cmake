# Fails if an object of the CPU kernels of instruction set LEVEL shares a function with other objects: if it defines a
# symbol outside of the namespace of the level. The linker keeps one definition of such a function. It may use
# instructions that an older CPU does not have.
#
#   cmake -D NM=nm -D LEVEL=avx2 -D "OBJECTS=fwd.o,bwd.o" -P check_cpu_levels.cmake
string(REPLACE "," ";" objects "${OBJECTS}")
foreach(object IN LISTS objects)
    execute_process(COMMAND "${NM}" -C --defined-only --extern-only "${object}" OUTPUT_VARIABLE symbols
                    COMMAND_ERROR_IS_FATAL ANY)
    string(REGEX REPLACE "\\[|\\]|;" "_" symbols "${symbols}")  # these characters have a meaning in lists
    string(REGEX MATCHALL "[^\n]+" lines "${symbols}")
    foreach(line IN LISTS lines)
        if(line MATCHES " [TWVui] " AND NOT line MATCHES "megatron_sb::cpu::${LEVEL}::"
           AND NOT line MATCHES "DW\\.ref\\.__gxx_personality_v0")  # a pointer to the handler of exceptions
            message(SEND_ERROR "${object} defines a symbol outside of megatron_sb::cpu::${LEVEL}:\n  ${line}")
        endif()
    endforeach()
endforeach()
