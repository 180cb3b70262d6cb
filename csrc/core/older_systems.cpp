// Definitions of functions that g++ 12 and Debian 12 have, but systems with glibc 2.28 do not.
// cmake/SbOlderSystems.cmake explains why.
#include <new>
#include <sstream>
#include <string>

// Whether the process has one thread only (glibc 2.32). libstdc++ reads it to count references without atomic
// instructions. 0 is always right.
extern "C" {
extern char __libc_single_threaded;
char __libc_single_threaded = 0;
}

namespace std {

template ostringstream::basic_ostringstream();  // GLIBCXX_3.4.26
template string stringbuf::str() const&;        // GLIBCXX_3.4.29
void __throw_bad_array_new_length() {           // GLIBCXX_3.4.29
    throw bad_array_new_length();
}

}  // namespace std
