"""A snapshot of frames of the videos under a URL: every video is tried, and those that can be decoded are committed.

Used by `api.import_frames`. Worker processes decode stretches of videos (`video`) and store the images themselves, as
content-addressed objects; the first stretch of a video says how many there are. What is done is noted (`imports.
journal`) a stretch at a time, so that an import that was killed decodes no more than the stretches that were under way
again. An image that was stored too long ago for garbage collection to spare it is not taken as there.

A video that is broken, encrypted, or none, is left out whole, and reported. Where the store does not give a video,
nothing is committed: the next run may get it.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from operator import attrgetter
from typing import Any, NamedTuple

from datacache.catalog.base import Catalog
from datacache.catalog.commit import commit_manifest
from datacache.catalog.objects import REFRESH_AFTER_S, NewFiles, ObjectWriter, Stored
from datacache.core.concurrency import PerProcess
from datacache.core.cores import cores
from datacache.core.counters import count
from datacache.core.errors import ImportFailedError, ObjectNotFoundError, StoreError, UsageError
from datacache.core.parallel import ordered_map
from datacache.imports.failures import code_of
from datacache.imports.journal import RecordFile, origin_of
from datacache.imports.places import check_import, unusable
from datacache.imports.videos.ranges import RangeFile
from datacache.imports.videos.sampling import Sampling, parse_sampling, time_name
from datacache.imports.videos.video import EXTENSIONS, OpenVideo, ShownFrame, VideoError, VideoTraits
from datacache.manifest.builder import ManifestBuilder, Sorter
from datacache.manifest.model import Entry, Lineage, Naming, SnapshotRecord
from datacache.settings import Settings
from datacache.store.base import ObjectInfo, ObjectStore
from datacache.store.open import open_store
from datacache.store.urls import join_url, split_object_url, split_url

COMMAND = "import-frames"
VIDEOS = "videos.jsonl"
"""The file of the snapshot that says of each video where it is from."""
QUALITY = 90
_WRITES = 8
_UNSTORED = 32
"""Images of a process that wait to be stored."""
_by_path = attrgetter("path")


@dataclass(frozen=True, kw_only=True)
class FramesOptions:
    """Say which frames of videos are taken, and how their images are made."""

    frames: str
    """`every=1s`, `fps=2`, `scene`; see `sampling`."""
    max_side: int = 0
    """The most pixels of an image's longer side; 0 for no limit. Nothing is made larger."""
    quality: int = QUALITY
    """Of JPEGs, 1 to 100."""
    objects: str = ""
    """URL of the storage for images, in place of the setting."""
    processes: int | None = None


class FramesProgress(NamedTuple):
    """How far an import of videos is."""

    done: int
    """Stretches of videos that are done, of `total`."""
    total: int
    """Grows, as the first stretch of a video tells how many there are."""
    failed: int
    """Videos."""
    images: int


class FailedVideo(NamedTuple):
    """A video of which no frames are taken."""

    video: str
    """Its path below the URL."""
    url: str
    code: str
    """The kind of failure, for machines: `format`, `no-video`, `encrypted`, `damaged`, `times`, `too-large`, `path`;
    or of the store: `not-found`, `access`, `changed`, `unavailable`, `store`."""
    reason: str
    """The failure in a sentence."""

    def as_json(self) -> dict[str, Any]:
        """Return a line of a report."""
        return self._asdict()


class ImportedFrames(NamedTuple):
    """The result of an import."""

    record: SnapshotRecord
    videos: int
    """All that were tried."""
    left_out: int
    images: int
    resumed: int
    """Stretches that an earlier run had done."""


Progress = Callable[[FramesProgress], None]
_STORE_CODES = frozenset(["not-found", "access", "changed", "unavailable", "store"])


class _Image(NamedTuple):
    name: str
    size_bytes: int
    hex: str
    key: str


class _Stretch(NamedTuple):
    """A stretch to decode."""

    info: ObjectInfo
    number: int
    stretches: int
    """0 for the first stretch, which finds out how many there are."""
    start: int
    """When the video's first frame begins; said by the first stretch."""
    threads: int


class _Result(NamedTuple):
    """A stretch that is done, as the journal has it, but for when."""

    stretches: int
    start: int
    images: list[_Image]
    traits: VideoTraits | None
    """Of the first stretch."""


class _Failed(NamedTuple):
    code: str
    reason: str


def import_frames(
    catalog: Catalog,
    settings: Settings,
    url: str,
    naming: Naming,
    *,
    options: FramesOptions,
    progress: Progress | None = None,
    on_failure: Callable[[FailedVideo], None] | None = None,
) -> ImportedFrames:
    """Import frames of the videos under `url`, or of the one there, and commit them as the snapshot `naming` names.

    `on_failure` is called for each video that is left out, in the order of their paths, once all were tried. Raise
    `ImportFailedError` where no video is left, or the store did not give one; `UsageError`, `ObjectNotFoundError` where
    there is no video, `TagExistsError`, the errors of the storage.
    """
    sampling = parse_sampling(options.frames)
    if not 1 <= options.quality <= 100 or options.max_side < 0:
        raise UsageError("the quality of JPEGs is 1 to 100, and the longest side of images a number of pixels")
    parameters: dict[str, Any] = {"from": url, "frames": sampling.text, "quality": options.quality}
    if options.max_side:
        parameters["max_side"] = options.max_side
    with ExitStack() as stack:
        store_url, prefix, single = _place(url)
        store = stack.enter_context(closing(open_store(store_url, settings)))
        origin = parameters["from"] = join_url(store_url, prefix + single)
        videos = sorted(_listed(store, prefix, single, origin), key=lambda info: info.key.encode("utf-8", "replace"))
        parameters["content"] = origin_of(json.dumps([(i.key, i.size_bytes, i.etag) for i in videos]))
        check_import(catalog, naming, Lineage(COMMAND, parameters))
        objects = stack.enter_context(closing(ObjectWriter(catalog, settings, url=options.objects)))
        identity = {
            "dataset": naming.name,
            "from": origin,
            "frames": sampling._replace(text="")._asdict() | {"step_s": str(sampling.step_s)},
            "images": [options.max_side, options.quality],
            "objects": objects.source,
        }
        journal = stack.enter_context(closing(RecordFile(settings.home / "imports", identity)))
        run = _FramesRun(
            store,
            prefix,
            objects=objects,
            journal=journal,
            sampling=sampling,
            options=options,
            progress=progress,
        )
        run.decode_all(videos)
        parameters["objects"] = join_url(objects.source.store, objects.source.prefix)
        failed = [
            FailedVideo(info.key[len(prefix) :], join_url(store_url, info.key), *run.failed[info.key])
            for info in videos
            if info.key in run.failed
        ]
        if on_failure is not None:
            for failure in failed:
                on_failure(failure)
        _expect_enough(failed, len(videos))
        record = _commit(catalog, objects, run, videos, naming=naming, parameters=parameters, failed=failed)
        journal.remove()
        images = sum(len(run.images_of(info)) for info in videos if info.key not in run.failed)
        return ImportedFrames(record, len(videos), len(failed), images, run.resumed)


def _place(url: str) -> tuple[str, str, str]:
    """Return the store of a URL, the prefix below which videos are looked for, and the name of the video where the URL
    names one."""
    store_url, key = split_object_url(url)
    if _is_video(key):
        folder, slash, name = key.rpartition("/")
        return store_url, folder + slash, name
    return *split_url(url), ""


def _is_video(key: str) -> bool:
    return key.lower().endswith(EXTENSIONS)


def _listed(store: ObjectStore, prefix: str, single: str, origin: str) -> list[ObjectInfo]:
    if single:
        try:
            return [store.head(prefix + single)]
        except ObjectNotFoundError:
            pass  # a folder may be called so
    below = f"{prefix}{single}/" if single else prefix
    found = [info for page in store.list(below) for info in page if _is_video(info.key) and info.size_bytes]
    if not found:
        known = ", ".join(EXTENSIONS)
        raise ObjectNotFoundError(f"there is no video under {origin}", url=origin, hint=f"Videos are: {known}.")
    return found


def _expect_enough(failed: list[FailedVideo], videos: int) -> None:
    unread = [failure for failure in failed if failure.code in _STORE_CODES]
    if unread:
        raise ImportFailedError(
            f"{count(len(unread), 'video')} could not be read, so nothing was made: {unread[0].reason}",
            failures=len(failed),
            hint="What was decoded is kept: run it again once the store gives the videos.",
        )
    if len(failed) == videos:
        raise ImportFailedError(
            f"no frames can be taken of any video: {failed[0].video}: {failed[0].reason}", failures=len(failed)
        )


class _FramesRun:
    """Decodes all stretches that are not done, in processes, and notes them."""

    def __init__(
        self,
        store: ObjectStore,
        prefix: str,
        *,
        objects: ObjectWriter,
        journal: RecordFile,
        sampling: Sampling,
        options: FramesOptions,
        progress: Progress | None,
    ) -> None:
        self._journal, self._progress, self.prefix = journal, progress, prefix
        self.store_url = store.url
        self._processes = options.processes or cores()
        self._worker = _StretchWorker(store, objects, sampling, options)
        self._total = self._done = 0
        self.failed: dict[str, _Failed] = {}
        self.results: dict[str, dict[int, _Result]] = {}
        """By the video's key and the number of the stretch."""
        self.resumed = 0
        self._images = 0

    def images_of(self, info: ObjectInfo) -> list[_Image]:
        """Return the images of a video, whose stretches were all decoded, by name."""
        stretches = self.results[info.key]
        return [image for number in sorted(stretches) for image in stretches[number].images]

    def decode_all(self, videos: list[ObjectInfo]) -> None:
        """Decode the first stretch of each video, then all others."""
        before = self._before({info.key: origin_of(f"{info.size_bytes} {info.etag} {info.key}") for info in videos})
        self._total = len(videos)
        usable = []
        for info in videos:
            if words := unusable(info.key[len(self.prefix) :]):
                self._fail(info, _Failed("path", words))
            else:
                usable.append(info)
        self._decode((info, 0, 0, 0) for info in usable if not self._take(info, 0, before))
        later = []
        for info in usable:
            first = self.results[info.key].get(0) if info.key in self.results else None
            if first is not None:
                later += [(info, number, first.stretches, first.start) for number in range(1, first.stretches)]
        self._total += len(later)
        self._decode(task for task in later if not self._take(task[0], task[1], before))
        for info in usable:
            if info.key not in self.failed and not _ascends([image.name for image in self.images_of(info)]):
                self.failed[info.key] = _Failed("times", "its index leads to the same frames from different times")

    def _before(self, origins: dict[str, str]) -> dict[tuple[str, int], _Result]:
        """Return what earlier runs did of videos that are still the same, and not too long ago."""
        self._origins = origins
        found = {}
        for key, origin, number, at_s, stretches, start, images, traits in self._journal.rows():
            if origins.get(key) == origin and 0 <= time.time() - at_s < REFRESH_AFTER_S:
                done = _Result(stretches, start, [_Image(*image) for image in images], traits and VideoTraits(*traits))
                found[key, number] = done
        return found

    def _take(self, info: ObjectInfo, number: int, before: dict[tuple[str, int], _Result]) -> bool:
        result = before.get((info.key, number))
        if result is None:
            return False
        self.resumed += 1
        self._keep(info, number, result)
        return True

    def _decode(self, stretches: Iterable[tuple[ObjectInfo, int, int, int]]) -> None:
        todo = list(stretches)
        # Where there is less to do than cores to do it, each decoder may use several.
        threads = max(1, self._processes // len(todo)) if todo else 1
        for (info, number, _, _), result in zip(
            todo,
            ordered_map(self._worker, (_Stretch(*each, threads) for each in todo), processes=self._processes),
            strict=True,
        ):
            if isinstance(result, _Failed):
                self._fail(info, result)
                continue
            self._journal.append([info.key, self._origins[info.key], number, int(time.time()), *result])
            self._keep(info, number, result)

    def _keep(self, info: ObjectInfo, number: int, result: _Result) -> None:
        self.results.setdefault(info.key, {})[number] = result
        self._images += len(result.images)
        self._report()

    def _fail(self, info: ObjectInfo, failed: _Failed) -> None:
        self.failed.setdefault(info.key, failed)
        self._report()

    def _report(self) -> None:
        self._done += 1
        if self._progress is not None:
            self._progress(FramesProgress(self._done, self._total, len(self.failed), self._images))


def _new_threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_WRITES, "store")


class _StretchWorker:
    """Decodes stretches, and stores their images. Made in the parent, used in each worker process."""

    def __init__(self, store: ObjectStore, objects: ObjectWriter, sampling: Sampling, options: FramesOptions) -> None:
        self._store, self._objects, self._sampling, self._options = store, objects, sampling, options
        # A store takes its time for each object (a folder waits for the disk): several are under way at once.
        self._threads = PerProcess(_new_threads)

    def work(self, task: _Stretch) -> _Result | _Failed:
        """Return the images of a stretch. The errors of the storage are raised, those of the video are the result."""
        storing: deque[tuple[list[str], Future[Stored]]] = deque()
        images: dict[str, _Image] = {}

        def settle(left: int) -> None:
            while len(storing) > left:
                names, future = storing.popleft()
                stored = future.result()
                images.update({name: _Image(name, stored.size_bytes, stored.hex, stored.key) for name in names})

        result = self._decoded(task, storing, settle)
        settle(0)
        return result if isinstance(result, _Failed) else result._replace(images=[images[n] for n in sorted(images)])

    def _decoded(
        self, task: _Stretch, storing: deque[tuple[list[str], Future[Stored]]], settle: Callable[[int], None]
    ) -> _Result | _Failed:
        shown = self._images(task)
        while True:
            try:
                found = next(shown)
            except StopIteration as end:
                done: _Result = end.value
                return done
            except StoreError as exc:
                return _Failed(code_of(exc), exc.message)
            except VideoError as exc:
                return _Failed(exc.code, exc.message)
            except UsageError:
                raise
            except Exception as exc:  # noqa: BLE001 - one video must not end the work on all
                return _Failed("damaged", f"it cannot be decoded ({type(exc).__name__}: {exc})")
            names, data = found
            storing.append((names, self._threads.get().submit(self._objects.put, data)))
            settle(_UNSTORED)

    def _images(self, task: _Stretch) -> Generator[tuple[list[str], bytes], None, _Result]:
        """Yield the images of a stretch with their names, and return its result, as yet without images."""
        from datacache.imports.videos.jpeg import encode_frame

        file = RangeFile(self._store, task.info.ref(self._store.url))
        with closing(OpenVideo(file, self._sampling, threads=task.threads)) as video:
            stretches = task.stretches or video.stretches()
            if task.number:
                video.start = task.start
            for shown in video.shown(task.number, stretches):
                data = encode_frame(shown.frame, max_side=self._options.max_side, quality=self._options.quality)
                yield [time_name(at_s) for at_s in self._times(shown, video.tick_s)], data
            return _Result(stretches, video.start, [], video.traits() if task.number == 0 else None)

    def _times(self, shown: ShownFrame, tick_s: Fraction) -> list[Fraction]:
        step = self._sampling.step_s
        return [shown.ticks * tick_s] if step is None else [number * step for number in shown.numbers]


def _commit(
    catalog: Catalog,
    objects: ObjectWriter,
    run: _FramesRun,
    videos: list[ObjectInfo],
    *,
    naming: Naming,
    parameters: dict[str, Any],
    failed: list[FailedVideo],
) -> SnapshotRecord:
    sources = [objects.source]
    files = NewFiles(sources, catalog.put_blobs, lambda: objects)
    builder = ManifestBuilder(sources, catalog.put_blobs)
    lines: list[str] = []
    with Sorter(_by_path) as entries:
        for info in videos:
            if info.key in run.failed:
                continue
            path = info.key[len(run.prefix) :]
            images = run.images_of(info)
            for image in images:
                raw = f"{path}/{image.name}".encode("utf-8", "surrogateescape")
                entries.add(Entry(raw, image.size_bytes, 0, image.hex, "", 0, image.key.encode()))
            lines.append(_line(info, path, run, len(images)))
        for entry in [*files.add(VIDEOS, "".join(lines).encode("utf-8", "surrogateescape"), 0), *files.end_pack()]:
            entries.add(entry)
        for entry in entries.sorted():
            builder.add(entry)
    shown = ", ".join(repr(failure.video) for failure in failed[:3])
    more = f" and {len(failed) - 3:,} more" if len(failed) > 3 else ""
    return commit_manifest(
        catalog,
        builder,
        naming,
        origin=parameters["from"],
        lineage=Lineage(COMMAND, parameters | {"videos": len(videos), "left_out": len(failed)}),
        packs=files.packs,
        objects=objects,
        warnings=[f"no frames were taken of {count(len(failed), 'video')}: {shown}{more}"] if failed else [],
    )


def _line(info: ObjectInfo, path: str, run: _FramesRun, images: int) -> str:
    """Return the line of a video in `videos.jsonl`."""
    traits, url = run.results[info.key][0].traits, join_url(run.store_url, info.key)
    about: dict[str, Any] = {"video": path, "url": url, "size_bytes": info.size_bytes, "etag": info.etag}
    about |= {"version": info.version} if info.version else {}
    about |= traits._asdict() if traits is not None else {}
    return json.dumps(about | {"images": images}, ensure_ascii=False) + "\n"


def _ascends(names: list[str]) -> bool:
    return all(name < following for name, following in pairwise(names))
