# Installs these files in the prefix or, for a wheel, in the folder of the package:
#   lib/libmegatron_sb_ops.so   include/megatron_sb/*.h   lib/cmake/megatron_sb/   _C.*.so
include(CMakePackageConfigHelpers)

set(sb_prefix ".")
if(SKBUILD)
    set(sb_prefix "megatron_sb")
endif()

# pip installs torch, NCCL and the CUDA runtime next to the package. These paths lead to them from the package's lib/.
# The wheels of CUDA 13 are in nvidia/cu13, the runtime of CUDA 12 is in nvidia/cuda_runtime.
set(sb_rpath "$ORIGIN" "$ORIGIN/../../torch/lib" "$ORIGIN/../../nvidia/nccl/lib" "$ORIGIN/../../nvidia/cu13/lib"
    "$ORIGIN/../../nvidia/cuda_runtime/lib")
if(NOT SKBUILD)
    list(APPEND sb_rpath "${SB_TORCH_ROOT}/lib")
endif()
set_target_properties(megatron_sb_ops PROPERTIES INSTALL_RPATH "${sb_rpath}")
target_include_directories(megatron_sb_ops PUBLIC $<INSTALL_INTERFACE:${sb_prefix}/include>)
install(TARGETS megatron_sb_ops EXPORT megatron_sb_targets LIBRARY DESTINATION "${sb_prefix}/lib")
install(DIRECTORY csrc/include/ DESTINATION "${sb_prefix}/include")
if(SB_BUILD_PYTHON)
    install(TARGETS _C LIBRARY DESTINATION "${sb_prefix}" COMPONENT python)
endif()

set_target_properties(megatron_sb_ops PROPERTIES EXPORT_NAME ops)
# Without a leading "./", which CMake would count as a folder between the prefix and this one.
cmake_path(SET sb_cmake_dir NORMALIZE "${sb_prefix}/lib/cmake/megatron_sb")
install(EXPORT megatron_sb_targets NAMESPACE megatron_sb:: DESTINATION "${sb_cmake_dir}")
configure_package_config_file(cmake/megatron_sbConfig.cmake.in "${CMAKE_CURRENT_BINARY_DIR}/megatron_sbConfig.cmake"
                              INSTALL_DESTINATION "${sb_cmake_dir}")
write_basic_package_version_file("${CMAKE_CURRENT_BINARY_DIR}/megatron_sbConfigVersion.cmake"
                                 COMPATIBILITY SameMinorVersion)
install(FILES "${CMAKE_CURRENT_BINARY_DIR}/megatron_sbConfig.cmake"
              "${CMAKE_CURRENT_BINARY_DIR}/megatron_sbConfigVersion.cmake"
              cmake/SbTorch.cmake DESTINATION "${sb_cmake_dir}")
