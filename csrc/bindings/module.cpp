// The pybind11 module: how this package was built. Python reads it before it loads the operators. The module does not
// link Torch, so it can be imported, and a mismatch reported, with any installed torch.
#include <pybind11/pybind11.h>

namespace py = pybind11;

PYBIND11_MODULE(_C, m) {
    m.def("build_info", [] {
        py::dict info;
        info["version"] = SB_VERSION;
        info["torch"] = SB_TORCH_VERSION;
        info["compiler"] = SB_COMPILER;
#if defined(SB_WITH_CUDA)
        info["cuda"] = SB_CUDA_VERSION;
#else
        info["cuda"] = py::none();
#endif
        return info;
    });
}
