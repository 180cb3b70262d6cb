"""A folder that looks like LibTorch to CMake: it has the header with the version, and no code."""

from pathlib import Path


def write_libtorch(folder: Path, version: str, header: str = "headeronly/version.h", cuda: str | None = None) -> Path:
    """Write the files that cmake/SbTorch.cmake reads.

    Args:
        folder: folder to create.
        version: three numbers, such as 2.9.1.
        header: where the header is below include/torch. It depends on the version of torch.
        cuda: what version.py of a wheel says. None for a LibTorch archive, which has no version.py.

    Returns:
        The folder.
    """
    path = folder / "include" / "torch" / header
    path.parent.mkdir(parents=True)
    (folder / "include/torch/csrc/api/include").mkdir(parents=True, exist_ok=True)
    numbers = zip(("MAJOR", "MINOR", "PATCH"), version.split("."), strict=True)
    path.write_text("".join(f"#define TORCH_VERSION_{name} {number}\n" for name, number in numbers))
    (folder / "lib").mkdir()
    (folder / "lib" / "libtorch_cuda.so").touch()
    if cuda is not None:
        (folder / "version.py").write_text(f"cuda: Optional[str] = '{cuda}'\n")
    return folder
