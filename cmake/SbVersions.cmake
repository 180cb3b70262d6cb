# The supported versions of torch, and the checks of versions that stop a build before anything is compiled.

set(SB_TORCH_OLDEST 2.8)  # docs/installation.md has the results of the tests
set(SB_TORCH_NEWEST_TESTED 2.15)
set(SB_CUDA_OLDEST 12.5)  # CUDA 12.4 does not have cudaGetDriverEntryPointByVersion
set(SB_CUDA_FAST_HOPPER 12.6)  # ptxas of CUDA 12.5 waits after each wgmma of most Hopper kernels ("serialized")

# sb_check_torch() compares SB_TORCH_MINOR, which SbTorch.cmake sets, with the supported versions.
function(sb_check_torch)
    if(SB_TORCH_MINOR VERSION_LESS SB_TORCH_OLDEST)
        message(FATAL_ERROR "megatron_sb needs torch ${SB_TORCH_OLDEST} or later and found ${SB_TORCH_VERSION} in "
                "${SB_TORCH_ROOT}. Install a newer torch in this environment, then build again.")
    elseif(SB_TORCH_MINOR VERSION_GREATER SB_TORCH_NEWEST_TESTED)
        message(WARNING "megatron_sb was tested with torch up to ${SB_TORCH_NEWEST_TESTED} and found "
                "${SB_TORCH_VERSION}. The build continues. Run 'megatron-sb check' after it.")
    endif()
endfunction()

# sb_check_cuda(<nvcc's version> <torch's CUDA version>) refuses an old nvcc, and compares the major versions. One
# process cannot use two CUDA runtimes on the same tensors. The CUDA version of a LibTorch in SB_TORCH_ROOT may be
# "unknown": it is not compared.
function(sb_check_cuda nvcc_version torch_version)
    if(nvcc_version VERSION_LESS SB_CUDA_OLDEST)
        message(FATAL_ERROR "megatron_sb: the kernels need nvcc ${SB_CUDA_OLDEST} or later and found ${nvcc_version}. "
                "Set CUDACXX to a newer nvcc, or build without GPU kernels with SB_WITH_CUDA=OFF.")
    endif()
    string(REGEX MATCH "^[0-9]+" nvcc_major "${nvcc_version}")
    string(REGEX MATCH "^[0-9]+" torch_major "${torch_version}")
    if(torch_major AND NOT nvcc_major EQUAL torch_major)
        message(FATAL_ERROR "megatron_sb: nvcc is CUDA ${nvcc_version}, but torch ${SB_TORCH_VERSION} was built for "
                "CUDA ${torch_version}. The major versions must be equal. Set CUDACXX to the nvcc of CUDA "
                "${torch_major}, install a torch for CUDA ${nvcc_major}, or build without GPU kernels with "
                "SB_WITH_CUDA=OFF.")
    endif()
endfunction()

# sb_warn_of_slow_hopper_kernels(<nvcc's version> <architectures>) warns if nvcc makes slow code for sm_90.
function(sb_warn_of_slow_hopper_kernels nvcc_version architectures)
    list(FIND architectures 90 hopper)
    if(nvcc_version VERSION_LESS SB_CUDA_FAST_HOPPER AND hopper GREATER -1)
        message(WARNING "megatron_sb: nvcc ${nvcc_version} makes slow kernels for H100 and H200, because it waits after "
                "each matrix product. For these GPUs set CUDACXX to nvcc ${SB_CUDA_FAST_HOPPER} or later.")
    endif()
endfunction()

# sb_local_version(<result> <nvcc's version, empty for a CPU build> <minor version of torch>) returns the local part of
# the package's version, such as cu13.torch2.11 or cpu.torch2.11.
function(sb_local_version result nvcc_version torch_minor)
    set(device cpu)
    if(nvcc_version)
        string(REGEX MATCH "^[0-9]+" major "${nvcc_version}")
        set(device "cu${major}")
    endif()
    set(${result} "${device}.torch${torch_minor}" PARENT_SCOPE)
endfunction()
