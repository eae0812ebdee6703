"""Batches on their way from a DataLoader's worker to the training: in shared memory that is used again and again.

PyTorch hands over every tensor in a new piece of shared memory, whose pages the kernel fills with zeros, maps twice and
takes back: for a batch of 7 MB that costs more than reading it. Here a worker has a few segments (memfd_create(2)), the
training maps each of them once, and a segment is free again when the last tensor in it is gone, on both sides. Small
tensors go along by value, which saves a file descriptor each (boxes of a batch of 64 images are 128 tensors).

Used by `packed`, in DataLoader workers alone; needs PyTorch. Any thread. The protocol is in docs/CONCURRENCY.md.
"""

from __future__ import annotations

import ctypes
import functools
import math
import mmap
import os
import secrets
import threading
import time
import weakref
from contextlib import suppress
from multiprocessing.reduction import DupFd, ForkingPickler
from pathlib import Path
from typing import Any, cast

import torch
from torch.multiprocessing.reductions import reduce_tensor

from datacache.core.concurrency import PerProcess

_HEADER_BYTES = 4096
_SENT, _RELEASED, _MAPPED, _GIVEN_UP, _GONE, _WORDS = range(6)
"""Words of the header, each written by one side alone. The worker: how often it has sent the segment, and whether it is
done with it for good. The training: how often it was done with what it got, whether it has the segment mapped, and
whether the worker may not use it again. It is free when it was released as often as it was sent."""
_TOKEN = slice(64, 80)
_MAX_SEGMENTS = 8
_ROUND_BYTES = 2**20
_SMALL_BYTES = 2**14
_PRUNE_EVERY_S = 1.0

_Name = tuple[int, bytes, int]
"""The worker's pid, the segment's token, and its capacity."""


def empty_shared(shape: tuple[int, ...], dtype: Any) -> Any:
    """Return an empty tensor for a batch, in a segment; in ordinary shared memory if all are in use. In a worker."""
    tensor = torch.empty(0, dtype=dtype)
    count = math.prod(shape)
    size_bytes = count * tensor.element_size()
    lease = _pool.get().take(size_bytes) if size_bytes else None
    if lease is not None:
        return torch.frombuffer(lease, dtype=dtype, count=count).view(shape)
    storage = torch.UntypedStorage._new_shared(max(1, size_bytes))  # noqa: SLF001 - as torch's own default_collate does
    return tensor.set_(storage, 0, shape)


def hand_over_segments() -> None:
    """Have this process, a DataLoader's worker, send tensors as the module says from now on."""
    _pool.get()


# --- in the worker ---------------------------------------------------------------------------------------------------


class _Segment:
    """A worker's piece of shared memory. `OSError` where there is none to be had."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.token = secrets.token_bytes(_TOKEN.stop - _TOKEN.start)
        self.fd = os.memfd_create("datacache-batch", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.fd, _HEADER_BYTES + capacity)
            self._map = mmap.mmap(self.fd, _HEADER_BYTES + capacity)
        except BaseException:
            os.close(self.fd)
            raise
        self._map[_TOKEN] = self.token
        self.words = memoryview(self._map)[: 8 * _WORDS].cast("Q")
        self._lease: weakref.ref[Any] | None = None

    def free(self) -> bool:
        """Tell whether nobody has a tensor in it."""
        held = self._lease is not None and self._lease() is not None
        return not held and self.words[_SENT] == self.words[_RELEASED]

    def lease(self) -> Any:
        """Return what a tensor is made of: the segment is in use for as long as this lives."""
        lease = _lease_type(self.capacity).from_buffer(self._map, _HEADER_BYTES)
        self._lease = weakref.ref(lease)
        return lease

    def close(self) -> None:
        """Give it up. The training may have it mapped still."""
        self.words[_GONE] = 1
        os.close(self.fd)


class _Pool:
    """The segments of a worker."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()  # guards the segments and their counts of what was sent
        self._segments: dict[int, _Segment] = {}  # by the address of their data
        ForkingPickler.register(torch.Tensor, self._reduce)

    def take(self, size_bytes: int) -> Any | None:
        """Return a lease of at least so many bytes, or None if all segments are in use or none can be made."""
        with self._lock:
            for address, segment in list(self._segments.items()):
                if segment.words[_GIVEN_UP]:
                    self._drop(address)
            free = {address: segment for address, segment in self._segments.items() if segment.free()}
            fitting = [segment for segment in free.values() if segment.capacity >= size_bytes]
            if fitting:
                return min(fitting, key=lambda segment: segment.capacity).lease()
            if len(self._segments) >= _MAX_SEGMENTS:
                if not free:
                    return None
                self._drop(min(free, key=lambda address: free[address].capacity))
            # A quarter more: batches of files differ in size, and a segment that is too small is of no use.
            try:
                segment = _Segment(-(-size_bytes * 5 // 4 // _ROUND_BYTES) * _ROUND_BYTES)
            except OSError:
                return None
            lease = segment.lease()
            self._segments[ctypes.addressof(lease)] = segment
            return lease

    def leave_all(self) -> None:
        """Use none of the segments again: a child that is about to be forked has copies of what lies in them."""
        with self._lock:
            for address in list(self._segments):
                self._drop(address)

    def _drop(self, address: int) -> None:
        self._segments.pop(address).close()

    def _reduce(self, tensor: Any) -> tuple[Any, ...]:
        """Say how a tensor is pickled for the training."""
        try:
            reduced = self._place(tensor) if os.getpid() == self._pid and _plain(tensor) else None
        except Exception:  # noqa: BLE001 - a kind of tensor that nobody thought of: as PyTorch knows it
            reduced = None
        return cast("tuple[Any, ...]", reduce_tensor(tensor)) if reduced is None else reduced

    def _place(self, tensor: Any) -> tuple[Any, ...] | None:
        if tensor.nbytes <= _SMALL_BYTES and tensor.is_contiguous():
            return _small, (tensor.view(-1).view(torch.uint8).numpy().tobytes(), tensor.dtype, tuple(tensor.shape))
        with self._lock:
            segment = self._segments.get(tensor.untyped_storage().data_ptr())
            if segment is None:
                return None
            # The training has no other way to a file without a name; once it has mapped it, it needs none.
            fd = None if segment.words[_MAPPED] else DupFd(segment.fd)
            segment.words[_SENT] += 1
        name = (self._pid, segment.token, segment.capacity)
        return _arrived, (name, fd, tensor.dtype, (tuple(tensor.shape), tensor.stride(), tensor.storage_offset()))


def _plain(tensor: Any) -> bool:
    return (
        type(tensor) is torch.Tensor
        and tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and not (tensor.requires_grad or tensor.is_nested or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    )


# --- in the training -------------------------------------------------------------------------------------------------


class _Mapping:
    """A worker's segment, as the training has it. `OSError` if it is not there any more."""

    def __init__(self, name: _Name, fd: int) -> None:
        self.worker, token, self.capacity = name
        self._map = mmap.mmap(fd, _HEADER_BYTES + self.capacity)
        if self._map[_TOKEN] != token:
            raise OSError(f"the memory of a batch of worker {self.worker} is another one")
        self.words = memoryview(self._map)[: 8 * _WORDS].cast("Q")
        self.words[_MAPPED] = 1
        self.leases = 0

    def lease(self) -> Any:
        """Return what a tensor is made of; when it goes, the worker may use the segment again."""
        lease = _lease_type(self.capacity).from_buffer(self._map, _HEADER_BYTES)
        lease.mapping, lease.pid = self, os.getpid()
        self.leases += 1
        return lease


class _Mapped:
    """All that this process has mapped."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards _mappings
        self._mappings: dict[_Name, _Mapping] = {}
        self._prune_at_s = 0.0

    def get(self, name: _Name, shared: Any | None) -> _Mapping:
        """Return the mapping of a segment; `shared` is its descriptor, if the worker has sent it along."""
        try:
            fd = None if shared is None else shared.detach()
        except (OSError, EOFError) as exc:  # in PyTorch's words, which loaders and users know
            raise RuntimeError(f"DataLoader worker (pid {name[0]}) ended before its batch had arrived") from exc
        try:
            with self._lock:
                mapping = self._mappings.get(name)
                if mapping is None:
                    if fd is None:
                        raise OSError(f"the memory of a batch of worker {name[0]} is gone")
                    mapping = self._mappings[name] = _Mapping(name, fd)
                mapping.leases += 1  # until its tensor is made: it must not be pruned in between
        finally:
            if fd is not None:
                os.close(fd)
        self.prune_soon()
        return mapping

    def prune_soon(self) -> None:
        """Call `prune`, but not more than once a second."""
        now_s = time.monotonic()
        if now_s >= self._prune_at_s and self._lock.acquire(blocking=False):  # a tensor may go while the lock is held
            self._lock.release()
            self.prune()

    def prune(self) -> None:
        """Let go of what its worker is done with, and of what belonged to workers that ended."""
        self._prune_at_s = time.monotonic() + _PRUNE_EVERY_S
        with self._lock:
            unused = [(name, each) for name, each in self._mappings.items() if each.leases <= 0]
        for name, mapping in unused:
            if mapping.words[_GONE] or not Path(f"/proc/{mapping.worker}").exists():
                with self._lock:
                    if mapping.leases <= 0:
                        self._mappings.pop(name, None)

    def give_up_held(self) -> None:
        """Have workers use no segment again in which a tensor lies: a child that is about to be forked has copies."""
        with self._lock:
            for mapping in self._mappings.values():
                if mapping.leases > 0:
                    mapping.words[_GIVEN_UP] = 1


@functools.cache
def _lease_type(capacity: int) -> Any:
    """Make a type of memory of this size that tells when it goes. Sizes are rounded, so there are few."""

    def gone(lease: Any) -> None:
        # A child made by fork() has copies of its parent's, which say nothing.
        if getattr(lease, "pid", 0) == os.getpid():
            mapping: _Mapping = lease.mapping
            mapping.words[_RELEASED] += 1
            mapping.leases -= 1
            mapped = _mapped.peek()
            if mapped is not None:
                mapped.prune_soon()

    return type("Lease", (ctypes.c_ubyte * capacity,), {"__del__": gone})


def _arrived(name: _Name, shared: Any | None, dtype: Any, place: tuple[Any, ...]) -> Any:
    """Make a tensor of a worker's segment, in the training: `place` is its shape, strides and offset there."""
    mapping = _mapped.get().get(name, shared)
    try:
        whole = torch.frombuffer(mapping.lease(), dtype=dtype)
    finally:
        mapping.leases -= 1
    return whole.as_strided(*place)


def _small(data: bytes, dtype: Any, shape: tuple[int, ...]) -> Any:
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).view(shape)


def _before_fork() -> None:
    pool, mapped = _pool.peek(), _mapped.peek()
    with suppress(Exception):  # whatever it is, it must not keep anybody from forking
        if pool is not None:
            pool.leave_all()
        if mapped is not None:
            mapped.give_up_held()


_pool: PerProcess[_Pool] = PerProcess(_Pool)
_mapped: PerProcess[_Mapped] = PerProcess(_Mapped)
os.register_at_fork(before=_before_fork)
