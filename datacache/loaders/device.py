"""The next batch on its way to the device while this one is computed on.

Used by training loops, around any loader. After NVIDIA's `data_prefetcher` (apex, examples/imagenet/main_amp.py): on a
GPU, a batch is copied from page-locked memory on a stream of its own, and the stream that computes waits for that copy
only. Needs PyTorch, which is imported when a prefetcher is made. One thread; not to be pickled while it is iterated.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any, Final

from datacache.core.errors import UsageError

_END: Final = object()
_UNKNOWN: Final = object()


class DevicePrefetcher:
    """Batches of `loader` on `device` ("cuda" where there is one, else "cpu"), one batch ahead of the training.

    Either `for batch in prefetcher`, or `prefetcher.next()` until it returns None; both begin the next epoch when they
    are used again. Tensors are moved wherever they are in dicts, lists, tuples and named tuples, and so is every object
    with `to(device)` (and `pin_memory()` and `record_stream(stream)`); everything else is passed through. Memory that
    the loader has not pinned is pinned here, at the price of a copy: `pin_memory=True` of the DataLoader does it in a
    thread.

    An error of the loader is raised where its batch would have come. On the CPU nothing is copied. There is no thread
    on any device: it is the loader's workers that make batches in the background.
    """

    def __init__(self, loader: Any, device: Any = None) -> None:
        import torch

        self.loader = loader
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self.device = torch.device(device)
        self._stream: Any = None
        """The stream for copies, where the device has streams."""
        if self.device.type == "cuda":
            index = self.device.index
            self.device = torch.device("cuda", torch.cuda.current_device() if index is None else index)
            self._stream = torch.cuda.Stream(self.device)
        self._epoch: _Epoch | None = None
        self._state: Any = _UNKNOWN  # the loader's, as it was when it gave the batch that was handed out last

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        """Yield an epoch from its beginning. One that is under way is given up."""
        epoch = self._epoch = _Epoch(iter(self.loader))
        try:
            while (batch := self._advance(epoch)) is not _END:
                yield batch
        finally:
            if self._epoch is epoch:
                self._epoch = None  # left in the middle: the loader's workers may go

    def next(self) -> Any:
        """Return the next batch, or None at the end of the epoch; the call after that begins another."""
        if self._epoch is None:
            self._epoch = _Epoch(iter(self.loader))
        batch = self._advance(self._epoch)
        if batch is _END:
            self._epoch = None
            return None
        return batch

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the loader, or else of its sampler. Between epochs only."""
        target = self.loader if hasattr(self.loader, "set_epoch") else getattr(self.loader, "sampler", None)
        if target is not None and hasattr(target, "set_epoch"):
            target.set_epoch(epoch)
            self._state = _UNKNOWN

    def state_dict(self) -> Any:
        """Return the loader's state when it had given the batch that the training got last: what was read ahead since
        does not count. To know it, the loader is asked for its state after every batch."""
        self._must_have("state_dict")
        return self.loader.state_dict() if self._state is _UNKNOWN else self._state

    def load_state_dict(self, state: Any) -> None:
        """Hand a state on to the loader. An epoch that is under way is given up."""
        self._must_have("load_state_dict")
        self._epoch = None
        self._state = _UNKNOWN
        self.loader.load_state_dict(state)

    def _must_have(self, method: str) -> None:
        if not hasattr(self.loader, method):
            raise UsageError(
                f"The loader of this prefetcher has no {method}().",
                hint="datacache.torch.loader() makes one that has; so does torchdata's StatefulDataLoader.",
            )

    def _advance(self, epoch: _Epoch) -> Any:
        """Return the batch whose turn it is; before it is returned, the one after it is read and its copy begins."""
        batch, state, error = epoch.ahead or self._read(epoch)
        epoch.ahead = None
        if epoch is self._epoch:
            self._state = _UNKNOWN if batch is _END else state
        if error is not None:
            raise error
        if batch is not _END:
            self._finish(batch)
            epoch.ahead = self._read(epoch)
        return batch

    def _read(self, epoch: _Epoch) -> _Ahead:
        """Return a batch as it will be on the device, the loader's state with it, and the error in its place."""
        batch, error = None, None
        try:
            batch = next(epoch.batches, _END)
            if batch is not _END:
                batch = self._start(batch)
        except Exception as exc:  # noqa: BLE001 - whatever it is, it is raised when this batch's turn comes
            error = exc
        return batch, self.loader.state_dict() if hasattr(self.loader, "state_dict") else None, error

    def _start(self, batch: Any) -> Any:
        import torch

        if self._stream is not None:
            with torch.cuda.stream(self._stream):
                return each_part(batch, lambda part: pinned(part).to(self.device, non_blocking=True))
        if self.device.type != "cpu":
            return each_part(batch, lambda part: part.to(self.device))
        return batch

    def _finish(self, batch: Any) -> None:
        """Let the stream that computes wait for the copy."""
        import torch

        if self._stream is None:
            return
        computing = torch.cuda.current_stream(self.device)
        computing.wait_stream(self._stream)
        # The memory belongs to the stream that copied, which may give it to another batch when nobody refers to it any
        # more: `record_stream` puts that off until the computing is done.
        each_part(batch, lambda part: record(part, computing))


_Ahead = tuple[Any, Any, Exception | None]


class _Epoch:
    """One pass over a loader, and what was read ahead."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self.batches = batches
        self.ahead: _Ahead | None = None


def each_part(batch: Any, change: Callable[[Any], Any]) -> Any:
    """Return the same structure, with everything in it that can be moved changed."""
    import torch

    if isinstance(batch, torch.Tensor):
        return change(batch)
    if isinstance(batch, MutableMapping) and not hasattr(batch, "to"):
        changed = copy.copy(batch)  # of the same class, with whatever else it has
        for key, value in batch.items():
            changed[key] = each_part(value, change)
        return changed
    if isinstance(batch, Mapping) and not hasattr(batch, "to"):
        return {key: each_part(value, change) for key, value in batch.items()}
    if isinstance(batch, tuple):
        values = [each_part(value, change) for value in batch]
        return type(batch)(*values) if hasattr(batch, "_fields") else tuple(values)
    if isinstance(batch, list):
        return [each_part(value, change) for value in batch]
    return change(batch) if hasattr(batch, "to") else batch


def pinned(part: Any) -> Any:
    """Return a part in page-locked memory, without which a copy holds up the thread that asks for it."""
    import torch

    if not isinstance(part, torch.Tensor):
        return part.pin_memory() if hasattr(part, "pin_memory") else part
    if part.device.type != "cpu" or part.layout != torch.strided or part.is_pinned():
        return part
    return part.pin_memory()


def record(part: Any, stream: Any) -> Any:
    """Tell the memory of a part, or of its attributes, that a stream uses it."""
    if hasattr(part, "record_stream"):
        if getattr(part, "is_cuda", True):  # a tensor that is not has no stream
            part.record_stream(stream)
    else:
        each_part(_attributes(part), lambda inner: record(inner, stream))
    return part


def _attributes(part: Any) -> list[Any]:
    values = list(getattr(part, "__dict__", {}).values())
    for kind in type(part).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        names = (slots,) if isinstance(slots, str) else slots
        values += [getattr(part, name, None) for name in names if name not in ("__dict__", "__weakref__")]
    return values
