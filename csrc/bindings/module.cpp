// The pybind11 module: what Python must know before it may load the operators. No Torch here, so that it imports, and
// can say what is wrong, whatever torch is installed.
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
