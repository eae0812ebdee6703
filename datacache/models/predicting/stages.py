"""Decode images in processes of their own, and run a model on them as they come.

The decoders are the workers of a DataLoader. A batch lies in one shared segment (`loaders.segments`), so that handing
it over copies nothing, and a bounded number of batches waits. Needs PyTorch. `run_model` runs in the main thread of a
model's process, or in the thread of a caller who has the model already.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader

from datacache.annotations.image_header import read_header
from datacache.annotations.model import Problem, unforeseen
from datacache.conversion.operations import MAX_PIXELS
from datacache.core.errors import AnnotationError, BrokenImageError, DatacacheError, PredictError
from datacache.core.parallel import end_with
from datacache.loaders.decode import Size, decode_rgb
from datacache.loaders.packed import empty
from datacache.loaders.processes import keep_freed_memory, worker_context
from datacache.loaders.segments import hand_over_segments
from datacache.loaders.source import Read, SnapshotSource, is_skippable
from datacache.loaders.tuning.autotune import shut_down
from datacache.models.detectors import Detector
from datacache.models.predicting.results import BatchOutcome, PredictedImage

_AHEAD = 3
"""Batches in flight for each decoder."""
PART_BYTES = 256 * 2**20
"""Pixels of images in sizes of their own, after which the rest of a batch is decoded as a batch of its own."""
_READ_AT_ONCE = 16
_WORKER = "DataLoader worker"
"""In what PyTorch says when one is gone."""
_NAMED = 8
"""Images that an error names."""


def device_for(model: object) -> str:
    """Return the device to predict on where none is named: that of a module of PyTorch, else a GPU if there is one."""
    if isinstance(model, torch.nn.Module) and (first := next(model.parameters(), None)) is not None:
        return str(first.device)
    return "cuda" if torch.cuda.is_available() else "cpu"


def run_model(
    detector: Detector, source: SnapshotSource, batches: Iterable[range], *, decoders: int
) -> Iterator[BatchOutcome]:
    """Yield the outcome of each batch of images, as it is complete. `batches` is asked ahead.

    A batch of large images is decoded, and given to the model, in parts. Where it is parted depends on its images
    alone: in another batch a model may give an image other last digits.

    `PredictError` where the model fails, with the names of the images that it was given, and where a decoder was
    killed; the store's errors that are not of single images.
    """
    images = _Decoding(source, detector.size)
    workers: dict[str, Any] = {}
    if decoders:
        begin = partial(_begin_decoder, os.getpid())
        workers = {
            "prefetch_factor": _AHEAD,
            "worker_init_fn": begin,
            "multiprocessing_context": worker_context("fork"),
        }
    parts = _Parts(batches)
    loader = DataLoader(images, batch_sampler=parts, collate_fn=_as_it_is, num_workers=decoders, **workers)
    iterator = iter(loader)
    try:
        while True:
            try:
                batch: _DecodedBatch | DatacacheError | None = next(iterator, None)
            except RuntimeError as exc:
                if _WORKER not in str(exc):
                    raise
                raise _killed(exc) from exc
            if batch is None and parts.left:
                batch = images.__getitems__(parts.left.popleft())  # of the last ones, when the decoders have ended
            if batch is None:
                return
            if isinstance(batch, DatacacheError):
                raise batch
            began = time.perf_counter()
            found = _call(detector, batch, source)
            outcome = BatchOutcome(batch.start, found, batch.problems, time.perf_counter() - began)
            rest = batch.rest
            del batch, found  # the segment is free again
            yield from parts.joined(outcome, rest)
    finally:
        shut_down(iterator)


class _Parts:
    """Batches to decode, and the rest of each one that is decoded in parts."""

    def __init__(self, batches: Iterable[range]) -> None:
        self._batches = batches
        self.left: deque[range] = deque()
        self._begun: dict[int, BatchOutcome] = {}  # by the end of the batch

    def __iter__(self) -> Iterator[range]:
        for batch in self._batches:
            while self.left:
                yield self.left.popleft()
            yield batch

    def joined(self, outcome: BatchOutcome, rest: range) -> Iterator[BatchOutcome]:
        """Yield the outcome of the whole batch with that of its last part; until then have the rest decoded."""
        if (before := self._begun.pop(rest.stop, None)) is not None:
            predicted, problems = before.predicted + outcome.predicted, before.problems + outcome.problems
            outcome = BatchOutcome(before.start, predicted, problems, before.busy_s + outcome.busy_s)
        if rest:
            self._begun[rest.stop] = outcome
            self.left.append(rest)
        else:
            yield outcome


def _call(detector: Detector, batch: _DecodedBatch, source: SnapshotSource) -> list[PredictedImage]:
    images = batch.images()
    if not images:
        return []
    try:
        found = detector(images)
    except Exception as exc:
        if isinstance(exc, RuntimeError) and _WORKER in str(exc):  # PyTorch's handler of SIGCHLD
            raise _killed(exc) from exc
        names = [source.path(image) for image in batch.numbers]
        more = f" and {len(names) - _NAMED:,} more" if len(names) > _NAMED else ""
        of = f"{', '.join(names[:_NAMED])}{more}"
        said = exc.message if isinstance(exc, DatacacheError) else f"{type(exc).__name__}: {exc}"
        raise PredictError(
            f"the model failed at the images {of}: {said}",
            images=names,
            hint=getattr(exc, "hint", "") or "What was predicted before is kept: once this is mended, run it again.",
        ) from exc
    sizes = [(image.shape[0], image.shape[1]) for image in images]
    return [PredictedImage(*each) for each in zip(batch.numbers, batch.own, sizes, found, strict=True)]


def _killed(error: RuntimeError) -> PredictError:
    return PredictError(
        f"a decoder, a child of process {os.getpid()}, ended before its time: {error}",
        hint="Was memory short? (dmesg) Fewer at once take less: --batch, --decoders. What is done stays done: run it "
        "again.",
    )


# --- in the decoders ------------------------------------------------------------------------------------------------


class _DecodedBatch(NamedTuple):
    """Decoded images, one after another in one tensor of bytes."""

    start: int
    numbers: list[int]
    own: list[Size]
    sizes: list[Size]
    pixels: Any
    problems: list[Problem]
    rest: range
    """Images of the batch that are not decoded, as these are large; it ends where the batch does."""

    def images(self) -> list[NDArray[np.uint8]]:
        """Return them as arrays of height x width x 3, which share the tensor's memory."""
        flat, at, found = self.pixels.numpy(), 0, []
        for height, width in self.sizes:
            end = at + 3 * height * width
            found.append(flat[at:end].reshape(height, width, 3))
            at = end
        return found


class _Decoding:
    """The dataset of the decoders: a batch is asked for by the range of its images' numbers."""

    def __init__(self, source: SnapshotSource, size: Size | None) -> None:
        self._source, self._size = source, size

    def __getitem__(self, number: int) -> Any:
        return self.__getitems__(range(number, number + 1))

    def __getitems__(self, numbers: range) -> _DecodedBatch | DatacacheError:
        """Return a batch, or the error that is of no single image: PyTorch would make another one of it."""
        try:
            return self._batch(numbers)
        except DatacacheError as exc:
            return exc

    def _batch(self, numbers: range) -> _DecodedBatch:
        decoded: list[tuple[int, NDArray[np.uint8], Size]] = []
        problems: list[Problem] = []
        rest, size_bytes = numbers[len(numbers) :], 0
        for number, data in self._read(numbers):
            try:
                if isinstance(data, DatacacheError):
                    raise data
                decoded.append((number, *self._decode(number, data)))
            except Exception as exc:  # noqa: BLE001 - one image must not end the prediction of all
                problems.append(_problem(exc, self._source.path(number)))
                continue
            size_bytes += decoded[-1][1].size
            if self._size is None and size_bytes >= PART_BYTES:
                rest = range(number + 1, numbers.stop)
                break
        pixels = empty((sum(image.size for _, image, _ in decoded),))
        flat, at = pixels.numpy(), 0
        for _, image, _ in decoded:
            flat[at : at + image.size] = image.reshape(-1)
            at += image.size
        sizes = [(image.shape[0], image.shape[1]) for _, image, _ in decoded]
        own = [size for _, _, size in decoded]
        return _DecodedBatch(numbers.start, [number for number, _, _ in decoded], own, sizes, pixels, problems, rest)

    def _read(self, numbers: range) -> Iterator[tuple[int, Read]]:
        step = _READ_AT_ONCE if self._size is None else len(numbers)  # what is not decoded will be read again
        for start in range(0, len(numbers), step):
            part = numbers[start : start + step]
            yield from zip(part, self._source.read_each(part), strict=True)

    def _decode(self, number: int, data: bytes | memoryview) -> tuple[NDArray[np.uint8], Size]:
        path = self._source.path(number)
        try:
            header = read_header(data)
        except BrokenImageError as exc:
            raise AnnotationError(exc.message, code="image-broken", file=path) from exc
        if header.width * header.height > MAX_PIXELS:
            message = f"the image has more than {MAX_PIXELS:,} pixels"
            raise AnnotationError(message, code="image-too-large", file=path)
        return decode_rgb(data, path, self._size)


def _problem(error: Exception, path: str) -> Problem:
    """Return the problem of an image. Raise `error` where it is of something else: of a store, or of memory."""
    if not isinstance(error, DatacacheError):
        return unforeseen(error, path, "it has no predictions and is")
    if not is_skippable(error):
        raise error
    code = getattr(error, "code", "") or "image-gone"
    message = error.message.removeprefix(f"{path}: ")
    return Problem(code, "skipped", path, 0, f"{message}; it is left out")


def _begin_decoder(parent: int, _worker: int) -> None:
    end_with(parent)
    keep_freed_memory()
    hand_over_segments()


def _as_it_is(batch: Any) -> Any:
    return batch
