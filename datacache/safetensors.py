"""Load safetensors files at the speed of the disk, each byte verified.

    from datacache.safetensors import load_file

    tensors = load_file("llama@v1/model-00001-of-00004.safetensors", device="cuda")

In place of `safetensors.torch.load_file`. Needs PyTorch (`pip install 'dsctl[torch]'`).
"""

from __future__ import annotations

from os import PathLike
from typing import TYPE_CHECKING

from datacache.api.weights import open_weights
from datacache.models.weights import Backend, load_tensors
from datacache.settings import Settings

if TYPE_CHECKING:
    import torch

__all__ = ["load_file"]


def load_file(
    path_or_ref: str | PathLike[str],
    device: str | int | torch.device = "cpu",
    *,
    backend: Backend = "mmap",
    settings: Settings | None = None,
) -> dict[str, torch.Tensor]:
    """Return the tensors of a safetensors file by their names, as `safetensors.torch.load_file` does.

    The file is `NAME@REF/path`, `datacache://NAME@REF/path`, the URL of an object (`s3://bucket/key`, read through the
    cache), or a path; below a mount of a snapshot it is read without the mount. What is not on this node is fetched,
    several blocks at a time, and stays in the cache. Every byte of a snapshot or URL is verified by its checksum before
    a tensor is returned: then they are right, or there is an error. A local file is checked as far as its header says.

    With `backend="mmap"` tensors on the CPU are views of the cached file where this node has all of it: nothing is
    copied, processes share the pages, and writing to a tensor changes this process's copy alone. As long as a tensor is
    held so is the file's disk space, and the disk must keep working. With `"pread"`, and where the file has to be
    fetched, they lie in memory of this process, which takes the file's size and a few blocks. On a GPU they are one
    block of its memory, filled through pinned buffers.

    Raises `WeightsError` for a file that is cut short, damaged or contradicts itself, `SnapshotNotFoundError`,
    `PathNotFoundError`, the store's errors, `OSError`, `UsageError`.
    """
    try:
        import torch  # noqa: F401
    except ModuleNotFoundError as exc:
        if exc.name != "torch":
            raise
        raise ModuleNotFoundError(
            "datacache.safetensors needs PyTorch: pip install 'dsctl[torch]'", name="torch"
        ) from exc
    with open_weights(path_or_ref, settings) as file:
        return load_tensors(file, device, backend)
