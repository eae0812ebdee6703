"""Weights in the safetensors format, read at the speed of the disk: header, checks, and the bytes as tensors.

A file is read by one of two ways (`Backend`). "mmap": tensors are views of the cached file, mapped by this process
alone; every byte was verified first, none is copied, and processes that load the same weights share their pages.
"pread": all bytes go into memory of this process, several blocks at a time, verified on their way. For a GPU they go
through a few pinned buffers, and memory of the host is not needed besides these.

The format: https://huggingface.co/docs/safetensors. What a header may say is what the library of that name allows, and
no name twice. `datacache.api` and `datacache.safetensors` use this. PyTorch is imported when tensors are made. Any
thread.
"""

from __future__ import annotations

import itertools
import json
import mmap
import os
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeGuard

import numpy as np

from datacache.core.concurrency import map_in_threads
from datacache.core.errors import UsageError, WeightsError
from datacache.core.ids import BLOCK_BYTES
from datacache.reader.snapshot import Snapshot

if TYPE_CHECKING:
    import torch

Backend = Literal["mmap", "pread"]
MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors library."""
_METADATA = "__metadata__"
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_READERS = 8
"""Blocks that are read at a time: of a store that is far away as many are on their way."""
_READS_MAPPED = 8
_MOST_DIMENSIONS = 64
"""PyTorch's limit."""
_UINT64 = 2**64

DTYPES = {
    "BOOL": ("bool", 8), "U8": ("uint8", 8), "I8": ("int8", 8), "U16": ("uint16", 16), "I16": ("int16", 16),
    "U32": ("uint32", 32), "I32": ("int32", 32), "U64": ("uint64", 64), "I64": ("int64", 64),
    "F4": ("float4_e2m1fn_x2", 4), "F8_E4M3": ("float8_e4m3fn", 8), "F8_E5M2": ("float8_e5m2", 8),
    "F8_E4M3FNUZ": ("float8_e4m3fnuz", 8), "F8_E5M2FNUZ": ("float8_e5m2fnuz", 8), "F8_E8M0": ("float8_e8m0fnu", 8),
    "F16": ("float16", 16), "BF16": ("bfloat16", 16), "F32": ("float32", 32), "F64": ("float64", 64),
    "C64": ("complex64", 64),
}  # fmt: skip
"""Names of the format: PyTorch's name, and the bits of a number."""


class WeightsFile(Protocol):
    """A file to load from. Several threads may read."""

    name: str
    """How messages call it."""
    size_bytes: int

    def read_into(self, start: int, out: memoryview) -> None:
        """Fill `out` with the bytes from `start`, all of which lie in one block."""
        ...

    def map(self) -> mmap.mmap | None:
        """Return all bytes as a mapping that its holder may write to; None where only `read_into` can give them."""
        ...


class SnapshotWeights:
    """A file of a snapshot, or of a listing of a URL: each byte is verified."""

    def __init__(self, snapshot: Snapshot, path: str, *, name: str = "") -> None:
        """`PathNotFoundError` if the snapshot has no such file."""
        self._rows, self._row = snapshot.rows, snapshot.row_of(path)
        self.name = name or f"{snapshot.ref}/{path}"
        self.size_bytes = self._rows.object_at(self._row)[1]
        self._reads = itertools.count(1)

    def read_into(self, start: int, out: memoryview) -> None:
        """See `WeightsFile`. Raises the store's errors."""
        data = memoryview(self._rows.read_row(self._row, start, start + len(out), out))
        if data.obj is not out.obj:
            # numpy's copy lets other threads run.
            np.copyto(np.frombuffer(out, np.uint8), np.frombuffer(data, np.uint8))
        if next(self._reads) % _READS_MAPPED == 0:
            self._rows.unmap_pages()  # else the process has the cached file in its memory, too

    def map(self) -> mmap.mmap | None:
        """See `WeightsFile`."""
        return self._rows.map_row(self._row)


class LocalWeights:
    """A file of this machine, of which nothing is known that its bytes could be compared with. Close it."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """`OSError` if it cannot be opened."""
        self.name = os.fspath(path)
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.size_bytes = os.fstat(self._fd).st_size

    def read_into(self, start: int, out: memoryview) -> None:
        """See `WeightsFile`. `WeightsError` if the file became shorter."""
        while out:
            count = os.preadv(self._fd, [out], start)
            if not count:
                raise WeightsError(f"{self.name} ends at byte {start:,}: it was cut meanwhile", file=self.name)
            start, out = start + count, out[count:]

    def map(self) -> mmap.mmap | None:
        """See `WeightsFile`."""
        return mmap.mmap(self._fd, self.size_bytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)

    def close(self) -> None:
        """Give the descriptor back. Mappings stay."""
        os.close(self._fd)


class TensorInfo(NamedTuple):
    """A tensor in a file: `start` and `stop` count from the end of the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class WeightsHeader:
    """The checked contents of a header: tensors in the order of their bytes, which leave no gap and do not overlap."""

    tensors: tuple[TensorInfo, ...]
    metadata: dict[str, str]
    size_bytes: int
    """Where the bytes of tensors begin."""


def read_header(file: WeightsFile) -> WeightsHeader:
    """Read and check a file's header. `WeightsError` names the file and the place of what cannot be."""
    if file.size_bytes < 8:
        raise _wrong(file, f"has {file.size_bytes} bytes: a file of safetensors has at least 8")
    length = int.from_bytes(_read(file, 0, 8), "little")
    if length > MAX_HEADER_BYTES:
        most = f"the format allows {MAX_HEADER_BYTES:,}: is it a file of another format, as torch.save writes?"
        raise _wrong(file, f"names a header of {length:,} bytes; {most}")
    if 8 + length > file.size_bytes:
        raise _wrong(file, f"is cut short: {file.size_bytes:,} bytes, and the header alone would end at {8 + length:,}")
    found = _parse(file, _read(file, 8, 8 + length))
    metadata = found.pop(_METADATA, None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _wrong(file, f"has a {_METADATA} that is no map from text to text")
    infos = sorted(
        (_info(file, name, value) for name, value in found.items()), key=lambda info: (info.start, info.stop)
    )
    at = 0
    for info in infos:
        if info.start != at:
            what = "overlaps the one before" if info.start < at else "leaves a gap"
            raise _wrong(file, f"tensor {info.name!r} {what}: it begins at byte {info.start:,} of the data, not {at:,}")
        at = info.stop
    if 8 + length + at != file.size_bytes:
        what = "is cut short" if 8 + length + at > file.size_bytes else "has bytes that belong to no tensor"
        raise _wrong(file, f"{what}: {file.size_bytes:,} bytes, and the last tensor ends at {8 + length + at:,}")
    return WeightsHeader(tuple(infos), metadata, 8 + length)


def load_tensors(file: WeightsFile, device: Any = "cpu", backend: Backend = "mmap") -> dict[str, torch.Tensor]:
    """Return a file's tensors on a device, in the order of their bytes. Raises `WeightsError` and what reading does."""
    import torch

    if backend not in ("mmap", "pread"):
        raise UsageError(f"{backend!r} is no way to read weights", hint="It is 'mmap' or 'pread'.")
    target = torch.device(device)
    header = read_header(file)
    for info in header.tensors:
        if not hasattr(torch, DTYPES[info.dtype][0]):
            raise _wrong(file, f"tensor {info.name!r} is {info.dtype}, which PyTorch {torch.__version__} has not")
    data_bytes = file.size_bytes - header.size_bytes
    if target.type == "cpu":
        mapped = file.map() if backend == "mmap" and data_bytes else None
        if mapped is not None:
            data = torch.frombuffer(mapped, dtype=torch.uint8)[header.size_bytes :]
        else:
            memory = mmap.mmap(-1, max(1, data_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            _read_all(file, header.size_bytes, memoryview(memory)[:data_bytes])
            data = torch.frombuffer(memory, dtype=torch.uint8)[:data_bytes]
    else:
        data = torch.empty(data_bytes, dtype=torch.uint8, device=target)
        read_through_buffers(file, header.size_bytes, data)
    return {info.name: _tensor(data, info) for info in header.tensors}


def read_through_buffers(file: WeightsFile, start: int, out: torch.Tensor) -> None:
    """Fill a tensor of bytes on any device with a file's bytes from `start`, through one buffer a thread. Buffers for
    CUDA are pinned, and while one is copied others are read."""
    import torch

    local, cuda = threading.local(), out.device.type == "cuda"

    def read(piece: tuple[int, int]) -> None:
        if not hasattr(local, "buffer"):
            local.buffer = torch.empty(BLOCK_BYTES, dtype=torch.uint8, pin_memory=cuda)
            local.copied = torch.cuda.Event() if cuda else None
        elif cuda:
            local.copied.synchronize()
        at, stop = piece
        filled = local.buffer[: stop - at]
        file.read_into(at, memoryview(filled.numpy()))
        out[at - start : stop - start].copy_(filled, non_blocking=cuda)
        if cuda:
            local.copied.record(torch.cuda.current_stream(out.device))

    _in_threads(read, start, start + len(out))
    if cuda:
        torch.cuda.synchronize(out.device)


def _read_all(file: WeightsFile, start: int, out: memoryview) -> None:
    _in_threads(lambda at: file.read_into(at[0], out[at[0] - start : at[1] - start]), start, start + len(out))


def _in_threads(read: Callable[[tuple[int, int]], None], start: int, stop: int) -> None:
    for _ in map_in_threads(read, _pieces(start, stop), threads=_READERS):
        pass


def _pieces(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Cut a range of a file where its blocks end."""
    ends = [*range((start // BLOCK_BYTES + 1) * BLOCK_BYTES, stop, BLOCK_BYTES), stop]
    return itertools.pairwise([start, *ends]) if start < stop else iter(())


def _tensor(data: torch.Tensor, info: TensorInfo) -> torch.Tensor:
    import torch

    name, bits = DTYPES[info.dtype]
    dtype, shape = getattr(torch, name), info.shape
    if bits < 8:  # two numbers in one element
        shape = (*shape[:-1], shape[-1] * bits // 8)
    if info.start == info.stop:
        return torch.empty(shape, dtype=dtype, device=data.device)
    piece = data[info.start : info.stop]
    if piece.data_ptr() % dtype.itemsize or piece.storage_offset() % dtype.itemsize:
        piece = piece.clone()  # the format asks for no alignment, PyTorch does
    return piece.view(dtype).view(shape)


def _parse(file: WeightsFile, text: bytes) -> dict[str, Any]:
    # A header has fewer lists and objects than texts. What has more would take hundreds of times its size in memory.
    plain = _STRING.sub(b'"', text)
    if plain.count(b"[") + plain.count(b"{") > 2 + plain.count(b'"'):
        raise _wrong(file, "has a header that names no tensors")

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made: dict[str, Any] = {}
        for name, value in pairs:
            if name in made:
                raise ValueError(f"{name!r} is there twice")
            made[name] = value
        return made

    try:
        found = json.loads(text.decode(), object_pairs_hook=once)
    except (ValueError, RecursionError) as exc:  # of UTF-8, of JSON, of numbers with thousands of digits
        raise _wrong(file, f"has a header that cannot be read: {exc}") from exc
    if not isinstance(found, dict):
        raise _wrong(file, "has a header that is no map of names")
    return found


def _info(file: WeightsFile, name: str, value: object) -> TensorInfo:
    fields = value if isinstance(value, dict) else {}
    dtype, shape, offsets = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
    if not (isinstance(dtype, str) and _numbers(shape) and _numbers(offsets) and len(offsets) == 2):
        raise _wrong(file, f"tensor {name!r} needs a dtype, a shape and two data_offsets of whole numbers")
    if dtype not in DTYPES:
        raise _wrong(file, f"tensor {name!r} has the dtype {dtype!r}, which this version does not know")
    bits = DTYPES[dtype][1]
    size = prod(shape) * bits if len(shape) <= _MOST_DIMENSIONS else -1
    halved = bits < 8 and not (shape and shape[-1] * bits % 8 == 0)
    if size < 0 or prod(filter(None, shape)) * bits >= _UINT64 or halved:
        raise _wrong(file, f"tensor {name!r} of {dtype} cannot have the shape {shape}")
    start, stop = offsets
    if start + size // 8 != stop:
        raise _wrong(
            file,
            f"tensor {name!r} of {dtype} {shape} takes {size // 8:,} bytes, and its place is {start:,} to {stop:,}",
        )
    return TensorInfo(name, dtype, tuple(shape), start, stop)


def _numbers(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(number) is int and 0 <= number < _UINT64 for number in value)


def _read(file: WeightsFile, start: int, stop: int) -> bytes:
    out = bytearray(stop - start)
    _read_all(file, start, memoryview(out))
    return bytes(out)


def _wrong(file: WeightsFile, what: str) -> WeightsError:
    return WeightsError(
        f"{file.name}: {what}" if what.startswith("tensor") else f"{file.name} {what}",
        file=file.name,
        hint="Load another version of it, or write it anew with safetensors.",
    )
