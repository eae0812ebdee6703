"""Tell models from one another: `checksum_of`.

Used by `predict`, and by processes elsewhere, which compare theirs with the client's. Any thread.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from xxhash import xxh3_128

from datacache.core.errors import UsageError

_LOCATION = re.compile(rb"\x0a\x08location\x12([\x01-\x7f])", re.DOTALL)


def checksum_of(model: str | Callable[..., Any]) -> str:
    """Return the checksum of a model's file, or of the module that it is in; of a module of PyTorch, that of its
    weights. '' where none can be had."""
    if isinstance(model, str):
        path = Path(model) if os.path.isfile(model) else _file_of(model.partition(":")[0])
        return "" if path is None else checksum_of_files(path, *(_data_of_onnx(path) if path.suffix == ".onnx" else ()))
    state = getattr(model, "state_dict", None)
    if state is None:
        return ""
    import torch

    digest = xxh3_128(repr(model).encode())
    for name, value in state().items():
        digest.update(name.encode())
        if isinstance(value, torch.Tensor):  # by their bytes: NumPy has no bfloat16
            digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return f"xxh3-128:{digest.hexdigest()}"


def _file_of(module: str) -> Path | None:
    """Return the file of a module, without importing it, nor the packages that it is in."""
    *folders, name = module.split(".")
    for place in (os.getcwd(), *sys.path):
        for path in (Path(place, *folders, f"{name}.py"), Path(place, *folders, name, "__init__.py")):
            if path.is_file():
                return path
    return None


def _data_of_onnx(path: Path) -> list[Path]:
    """Return the files beside a model of ONNX that have its weights, if they are not in itself: its tensors name them
    as `location` (onnx.proto, TensorProto.external_data)."""
    try:
        data = path.read_bytes()
    except OSError as exc:
        raise UsageError(f"{path} cannot be read: {exc.strerror}") from exc
    names = {data[found.end() : found.end() + found[1][0]] for found in _LOCATION.finditer(data)}
    beside = [path.parent / os.fsdecode(name) for name in sorted(names) if b"\0" not in name]
    return [file for file in beside if file.is_file()]


def checksum_of_files(*files: Path) -> str:
    """Return the checksum of files, one after another. `UsageError` where one cannot be read."""
    digest = xxh3_128()
    for path in files:
        try:
            with path.open("rb") as file:
                while piece := file.read(2**20):
                    digest.update(piece)
        except OSError as exc:
            raise UsageError(f"{path} cannot be read: {exc.strerror}") from exc
    return f"xxh3-128:{digest.hexdigest()}"
