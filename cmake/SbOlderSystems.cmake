# Lets libraries that are built here load on systems with an older glibc and an older libstdc++, such as RHEL 8 (glibc
# 2.28), on which torch's wheels (manylinux_2_28) run, too.
#
# A library requires the system that its newest symbol comes from. Headers of a new compiler refer to a few symbols that
# older systems lack: functions that libstdc++ added, such as the constructor of std::ostringstream without arguments.
# The compilers of the manylinux containers link libstdc++_nonshared.a for this reason. It defines these functions
# inside of each library. csrc/core/older_systems.cpp does the same for other compilers. All of libstdc++ is still the
# shared library of the process, and the linker hides the functions: no other library of the process can find them.
#
# This is part of every build, so the tests run with what is in the wheels. In the containers it has no effect.
# tests/python/package/test_older_systems.py finds a new symbol. If possible, avoid it in the sources; else define it.

add_library(sb_older_systems STATIC csrc/core/older_systems.cpp)

# Conversions of fp16 are functions on CPUs without instructions for them. libgcc_s.so has them since GCC 12. libgcc.a,
# which comes first here, has them too, hidden. Its unwinder is in another archive, so there is still one in a process.
execute_process(COMMAND ${CMAKE_CXX_COMPILER} -print-libgcc-file-name OUTPUT_VARIABLE sb_libgcc
                OUTPUT_STRIP_TRAILING_WHITESPACE)
if(NOT EXISTS "${sb_libgcc}")
    set(sb_libgcc "")
endif()

# sb_support_older_systems(<target>) must come before other libraries of the target.
function(sb_support_older_systems target)
    target_link_libraries(${target} PRIVATE $<BUILD_INTERFACE:sb_older_systems> ${sb_libgcc})
    target_link_options(${target} PRIVATE LINKER:--exclude-libs,libsb_older_systems.a)
endfunction()
