// The extension module: how this package was built. Python reads it before it loads the operators. The module does not
// depend on Torch, so it is the same for all versions of torch and can be imported, and a mismatch reported, with any.
// It uses the stable part of Python's C API, so it is also the same for all versions of Python. The headers of pybind11
// use other parts, and functions that older systems lack (cmake/SbOlderSystems.cmake).
#include <Python.h>

#include <initializer_list>

namespace {

// Returns the GPU architectures with machine code, as numbers: 90 for sm_90.
PyObject* architectures() {
    PyObject* list = PyList_New(0);
    for (const long number : std::initializer_list<long>{SB_CUDA_ARCHITECTURES}) {
        PyObject* item = PyLong_FromLong(number);
        if (list && (!item || PyList_Append(list, item) != 0)) Py_CLEAR(list);
        Py_XDECREF(item);
    }
    return list;
}

PyObject* build_info(PyObject*, PyObject*) {
#if defined(SB_WITH_CUDA)
    const char* cuda = SB_CUDA_VERSION;
#else
    const char* cuda = nullptr;  // None
#endif
    return Py_BuildValue("{s:s, s:s, s:z, s:N, s:N}", "version", SB_VERSION, "compiler", SB_COMPILER, "cuda", cuda,
                         "cuda_architectures", architectures(), "fast_compile", PyBool_FromLong(SB_FAST_COMPILE));
}

PyMethodDef functions[] = {{"build_info", build_info, METH_NOARGS, "Return how this package was built."}, {}};
PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_C", nullptr, 0, functions, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__C() {
    return PyModule_Create(&definition);
}
