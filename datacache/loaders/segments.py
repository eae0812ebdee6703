"""Batches on their way from a DataLoader's worker to the training: in shared memory that is used again and again.

PyTorch hands over every tensor in a new piece of shared memory, whose pages the kernel fills with zeros, maps twice and
takes back: for a batch of 7 MB that costs more than reading it. Here a worker has a few segments (memfd_create(2)), the
training maps each of them once, and a segment is free again when the last tensor in it is gone, on both sides. Small
tensors go along by value, which saves a file descriptor each (boxes of a batch of 64 images are 128 tensors).

Used by `packed`, in DataLoader workers alone; needs PyTorch. One worker's segments belong to its one thread. The
protocol is in docs/CONCURRENCY.md.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import secrets
import weakref
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.reductions import reduce_tensor

from datacache.core.concurrency import PerProcess

_HEADER_BYTES = 4096
_SENT, _RELEASED = 0, 1
"""Words of the header: how often the worker has sent the segment, how often the training was done with it. Each is
written by one process alone; a segment is free when they are equal."""
_MAX_SEGMENTS = 8
_ROUND_BYTES = 2**20
_SMALL_BYTES = 2**14


def empty_shared(shape: tuple[int, ...], dtype: Any) -> Any:
    """An empty tensor for a batch, in a segment; in ordinary shared memory if all are in use. In a worker."""
    tensor = torch.empty(0, dtype=dtype)
    count = 1
    for side in shape:
        count *= side
    size_bytes = count * tensor.element_size()
    lease = _pool.get().take(size_bytes) if size_bytes else None
    if lease is not None:
        return torch.frombuffer(lease, dtype=dtype, count=count).view(shape)
    storage = torch.UntypedStorage._new_shared(max(1, size_bytes))  # noqa: SLF001 - as torch's own default_collate does
    return tensor.set_(storage, 0, shape)


def hand_over_segments() -> None:
    """From now on this process, a DataLoader's worker, sends tensors as the module says."""
    _pool.get()


class _Segment:
    """A worker's piece of shared memory."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.token = secrets.token_hex(4)
        self.fd = os.memfd_create("datacache-batch", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, _HEADER_BYTES + capacity)
        self.map = mmap.mmap(self.fd, _HEADER_BYTES + capacity)
        self.words = memoryview(self.map)[:16].cast("Q")
        self._lease: weakref.ref[Any] | None = None

    def free(self) -> bool:
        """Whether nobody has a tensor in it."""
        held = self._lease is not None and self._lease() is not None
        return not held and self.words[_SENT] == self.words[_RELEASED]

    def lease(self) -> Any:
        """What a tensor is made of: the segment is in use for as long as this lives."""
        lease = _lease_type(self.capacity).from_buffer(self.map, _HEADER_BYTES)
        self._lease = weakref.ref(lease)
        return lease

    def close(self) -> None:
        """Give it up. The training may have it mapped still."""
        os.close(self.fd)


class _Pool:
    """The segments of a worker."""

    def __init__(self) -> None:
        self._segments: list[_Segment] = []
        self._by_address: dict[int, _Segment] = {}
        ForkingPickler.register(torch.Tensor, self._reduce)

    def take(self, size_bytes: int) -> Any | None:
        """A lease of at least so many bytes, or None if all segments are in use."""
        free = [segment for segment in self._segments if segment.free()]
        fitting = [segment for segment in free if segment.capacity >= size_bytes]
        if fitting:
            return min(fitting, key=lambda segment: segment.capacity).lease()
        if len(self._segments) >= _MAX_SEGMENTS:
            if not free:
                return None
            small = min(free, key=lambda segment: segment.capacity)
            self._segments.remove(small)
            self._by_address = {at: each for at, each in self._by_address.items() if each is not small}
            small.close()
        # A quarter more: batches of files differ in size, and a segment that is too small is of no use.
        capacity = -(-size_bytes * 5 // 4 // _ROUND_BYTES) * _ROUND_BYTES
        segment = _Segment(capacity)
        self._segments.append(segment)
        lease = segment.lease()
        self._by_address[ctypes.addressof(lease)] = segment
        return lease

    def _reduce(self, tensor: Any) -> tuple[Any, ...]:
        """How a tensor is pickled for the training."""
        plain = tensor.device.type == "cpu" and not tensor.requires_grad and tensor.layout == torch.strided
        if type(tensor) is not torch.Tensor or not plain or not tensor.is_contiguous():
            return _as_torch_does(tensor)
        if tensor.nbytes <= _SMALL_BYTES:
            return _small, (tensor.view(-1).view(torch.uint8).numpy().tobytes(), tensor.dtype, tuple(tensor.shape))
        segment = self._by_address.get(tensor.untyped_storage().data_ptr())
        if segment is None:
            return _as_torch_does(tensor)
        segment.words[_SENT] += 1
        place = tensor.storage_offset() * tensor.element_size()
        name = (os.getpid(), segment.fd, segment.token, segment.capacity)
        return _arrived, (name, place, tensor.dtype, tuple(tensor.shape))


class _Mapping:
    """A worker's segment, as the training has it."""

    def __init__(self, pid: int, fd: int, capacity: int) -> None:
        self.pid, self.capacity = pid, capacity
        file = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            self.map = mmap.mmap(file, _HEADER_BYTES + capacity)
        finally:
            os.close(file)
        self.words = memoryview(self.map)[:16].cast("Q")

    def lease(self) -> Any:
        """What a tensor is made of; when it goes, the worker may use the segment again."""
        lease = _lease_type(self.capacity).from_buffer(self.map, _HEADER_BYTES)
        lease.mapping, lease.pid = self, os.getpid()
        return lease


@functools.cache
def _lease_type(capacity: int) -> Any:
    """A type of memory of this size that tells when it goes. Sizes are rounded, so there are few."""

    def gone(lease: Any) -> None:
        # A child made by fork() has copies of its parent's, which say nothing.
        if getattr(lease, "pid", 0) == os.getpid():
            lease.mapping.words[_RELEASED] += 1

    return type("Lease", (ctypes.c_ubyte * capacity,), {"__del__": gone})


def _arrived(name: tuple[int, int, str, int], place: int, dtype: Any, shape: tuple[int, ...]) -> Any:
    """A tensor of a worker's segment, in the training."""
    mappings = _mappings.get()
    mapping = mappings.get(name)
    if mapping is None:
        for old in [old for old in mappings if not Path(f"/proc/{old[0]}").exists()]:
            del mappings[old]
        pid, fd, _, capacity = name
        mapping = mappings[name] = _Mapping(pid, fd, capacity)
    count = 1
    for side in shape:
        count *= side
    return torch.frombuffer(mapping.lease(), dtype=dtype, count=count, offset=place).view(shape)


def _small(data: bytes, dtype: Any, shape: tuple[int, ...]) -> Any:
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).view(shape)


def _as_torch_does(tensor: Any) -> tuple[Any, ...]:
    reduced: tuple[Any, ...] = reduce_tensor(tensor)
    return reduced


_pool: PerProcess[_Pool] = PerProcess(_Pool)
_mappings: PerProcess[dict[tuple[int, int, str, int], _Mapping]] = PerProcess(dict)
