// The pybind11 module: how this package was built. Python reads it before it loads the operators. The module does not
// depend on Torch, so it is the same for all versions of torch and can be imported, and a mismatch reported, with any.
#include <pybind11/pybind11.h>

namespace py = pybind11;

PYBIND11_MODULE(_C, m) {
    m.def("build_info", [] {
        py::dict info;
        py::list architectures;  // with machine code, as numbers: 90 for sm_90
        info["version"] = SB_VERSION;
        info["compiler"] = SB_COMPILER;
#if defined(SB_WITH_CUDA)
        info["cuda"] = SB_CUDA_VERSION;
        for (const int architecture : {SB_CUDA_ARCHITECTURES}) architectures.append(architecture);
#else
        info["cuda"] = py::none();
#endif
        info["cuda_architectures"] = architectures;
        return info;
    });
}
