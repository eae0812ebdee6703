"""The journal's files: segments made, opened, checked and read; the ballast. Used by `journal` only.

A segment is made under another name, written and fsynced, then renamed, and its folder fsynced: one that has its name
has a whole header. Works on what any file system gives: no mmap, no O_DIRECT, no locks. Calls may come from any thread;
what writes to the same file must be kept apart by the caller.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

from datacache.core.disk import sync_folder, take_place, write_all
from datacache.core.errors import StagingError, StagingFullError
from datacache.writeback.journal import format as fmt

FULL = (errno.ENOSPC, errno.EDQUOT)
BALLAST = "ballast"
_BALLAST_SHARE = 16
_LEAST_BALLAST_BYTES = 512 << 10
"""Drops are some hundred bytes each, but a file of 256 KiB may wait in front of them."""
_NAME = re.compile(r"(\d{8,10})\.log")
_CHUNK_BYTES = 1 << 20
_ZEROS_BYTES = 1 << 20
_SMALL_BYTES = 64 << 10
"""A batch of up to so many bytes has zeros written behind it."""


class Segment:
    """One segment file, open. Closed with its last reference: readers may go on after it was unlinked."""

    def __init__(self, path: Path, fd: int, header: fmt.SegmentHeader) -> None:
        self.path = path
        self.fd = fd
        self.header = header
        self.size_bytes = fmt.HEADER_BYTES
        """Where its durable frames end."""
        self.live_bytes = 0
        """Bytes of records here that are the newest of their keys."""

    @property
    def number(self) -> int:
        """Return the segment's number."""
        return self.header.number

    def __del__(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self.fd)


def damaged(path: Path, offset: int, what: str) -> StagingError:
    """Return the error that says where the journal is damaged."""
    return StagingError(
        f"the staging journal is damaged: {path}, byte {offset}: {what}",
        hint=f"bring the file back from a copy of the staging area (check the disk, too); or move {path.parent.parent} "
        "away and mount again: what was not uploaded yet stays there and is not in the bucket",
    )


def failed(path: Path, exc: OSError) -> StagingError:
    """Return the error for what the file system refused."""
    reason = exc.strerror or str(exc)
    if exc.errno in FULL:
        return StagingFullError(
            f"the staging journal in {path} cannot grow: {reason}",
            hint="make room on its file system or raise its quota; what was to be written is kept and tried again",
        )
    error = StagingError(
        f"the staging journal in {path} cannot be read or written: {reason}",
        hint="see to it that the folder is there, writable, and its disk sound; the kernel's log may say more",
    )
    error.errno = exc.errno
    return error


def make_segment(folder: Path, previous: Segment | None, *, first: int, sequence: int) -> Segment:
    """Make a durable segment behind the previous one. What that has behind its `size_bytes` counts no more."""
    number = previous.number + 1 if previous else 1
    journal = previous.header.journal if previous else secrets.randbits(64)
    end = previous.size_bytes if previous else 0
    header = fmt.SegmentHeader(number, first, journal, secrets.randbits(64), sequence, end)
    path = folder / f"{number:08d}.log"
    making = folder / f"{path.name}.new"
    fd = os.open(making, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    segment = Segment(path, fd, header)
    try:
        write_all(fd, header.encode(), 0)
        os.fsync(fd)
        take_place(making, path)
    except OSError:
        with contextlib.suppress(OSError):
            making.unlink()
        raise
    return segment


def open_segments(folder: Path) -> list[Segment]:
    """Return the segments that count, oldest first, each with its end; remove left-overs. [] for a new journal.

    StagingError if one is missing, or damaged anywhere but at the newest one's torn tail, which is cut off. Frames that
    the newest one has are made durable: after a failed fsync the page cache may hold what the disk does not.
    """
    for making in folder.glob("*.log.new"):
        making.unlink()
    found = {int(match[1]): path for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))}
    if not found:
        return []
    newest = _open(found[max(found)])
    first = _find_end(newest)
    segments = []
    following = newest
    for number in range(newest.number - 1, first - 1, -1):
        path = folder / f"{number:08d}.log"
        if number not in found:
            raise damaged(path, 0, "the file is missing")
        segment = _open(path)
        if segment.header.journal != newest.header.journal:
            raise damaged(path, 24, "the file belongs to another journal")
        segment.size_bytes = following.header.previous_end
        segments.append(segment)
        following = segment
    for number, path in found.items():
        if number < first:
            path.unlink()
    return [*reversed(segments), newest]


def _open(path: Path) -> Segment:
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    data = os.pread(fd, fmt.HEADER_BYTES, 0)
    header = fmt.decode_header(data)
    if isinstance(header, fmt.SegmentHeader) and f"{header.number:08d}.log" == path.name:
        return Segment(path, fd, header)
    os.close(fd)
    if isinstance(header, int):
        raise StagingError(
            f"{path} has version {header} of the journal's format, this release knows {fmt.VERSION}",
            hint="mount with the release that wrote it, and flush it there",
        )
    raise damaged(path, 0, "no header of this segment")


def _find_end(newest: Segment) -> int:
    """Find where the newest segment ends, cut off what is behind; return the oldest segment that is needed."""
    first, sequence = newest.header.first, newest.header.sequence
    starts: deque[tuple[int, int]] = deque()  # (sequence number, offset) of frames that are not known to be durable
    with newest.path.open("rb", buffering=_CHUNK_BYTES) as file:
        for offset, head, payload in read_frames(file, newest):
            newest.size_bytes = offset + fmt.FRAME_BYTES + len(payload)
            first, sequence = head.first, head.sequence + 1
            starts.append((head.sequence, offset))
            while starts and starts[0][0] <= head.synced:
                starts.popleft()
        _check_tail(file, newest, sequence)
    end = newest.size_bytes
    offset = starts[0][1] if starts else end
    while offset < end:  # the same bytes over themselves: pages that a failed fsync left clean are written once more
        data = os.pread(newest.fd, min(_CHUNK_BYTES, end - offset), offset)
        write_all(newest.fd, data, offset)
        offset += len(data)
    os.ftruncate(newest.fd, end)
    os.fsync(newest.fd)
    return first


def _check_tail(file: BinaryIO, newest: Segment, sequence: int) -> None:
    """Raise StagingError if what follows the last whole frame was durable once: that is no torn tail."""
    file.seek(newest.size_bytes)
    tail = file.read()
    at = tail.find(fmt.FRAME_MAGIC)
    while at >= 0:
        data = tail[at : at + fmt.FRAME_BYTES]
        head = fmt.decode_frame(data)
        if head and head.synced >= sequence:
            payload = tail[at + fmt.FRAME_BYTES : at + fmt.FRAME_BYTES + head.payload_bytes]
            seed = newest.header.nonce + newest.size_bytes + at
            if len(payload) == head.payload_bytes and fmt.frame_is_whole(data, payload, seed):
                raise damaged(newest.path, newest.size_bytes, f"group {sequence} is broken, later ones are whole")
        at = tail.find(fmt.FRAME_MAGIC, at + 1)


def read_frames(file: BinaryIO, segment: Segment, end: int | None = None) -> Iterator[tuple[int, fmt.FrameHead, bytes]]:
    """Yield offset, head and records of a segment's frames up to the end, or to the first that is not whole."""
    limit = os.fstat(file.fileno()).st_size if end is None else end
    offset, sequence = fmt.HEADER_BYTES, segment.header.sequence
    file.seek(offset)
    while offset + fmt.FRAME_BYTES <= limit:
        data = file.read(fmt.FRAME_BYTES)
        head = fmt.decode_frame(data)
        if head is None or head.sequence != sequence or offset + fmt.FRAME_BYTES + head.payload_bytes > limit:
            return
        payload = file.read(head.payload_bytes)
        if len(payload) != head.payload_bytes or not fmt.frame_is_whole(data, payload, segment.header.nonce + offset):
            return
        yield offset, head, payload
        offset += fmt.FRAME_BYTES + len(payload)
        sequence += 1


def replay(segments: list[Segment]) -> Iterator[tuple[Segment, int, fmt.FrameHead, bytes]]:
    """Yield segment, offset of its records, head and records of every group, in order. StagingError where one is
    damaged."""
    for index, segment in enumerate(segments):
        reached, sequence = fmt.HEADER_BYTES, segment.header.sequence
        with segment.path.open("rb", buffering=_CHUNK_BYTES) as file:
            for offset, head, payload in read_frames(file, segment, segment.size_bytes):
                yield segment, offset + fmt.FRAME_BYTES, head, payload
                reached, sequence = offset + fmt.FRAME_BYTES + len(payload), head.sequence + 1
        if reached != segment.size_bytes:
            raise damaged(segment.path, reached, f"group {sequence} is broken or cut off")
        if index + 1 < len(segments) and segments[index + 1].header.sequence != sequence:
            raise damaged(segments[index + 1].path, 40, f"does not go on with group {sequence}")


class Ballast:
    """A file of zeros that is given up when the disk is full, so that what frees room can still be written down."""

    def __init__(self, path: Path, limit_bytes: int) -> None:
        self.path = path
        self._limit_bytes = limit_bytes
        self.size_bytes = path.stat().st_size if path.exists() else 0
        """How large it is; 0 while there is none."""

    def give_up(self) -> bool:
        """Remove it; False if there was none."""
        there = self.size_bytes > 0
        self.size_bytes = 0
        try:
            self.path.unlink(missing_ok=True)
            sync_folder(self.path.parent)
        except OSError:
            return False
        return there

    def make(self) -> None:
        """Make it as large as it may be, or as a small part of the room there is; a small one again, once it can be
        twice as large. A failure is no error: the next call tries again."""
        if not self.is_small:
            return
        with contextlib.suppress(OSError):
            room = os.statvfs(self.path.parent)
            size_bytes = min(self._limit_bytes, room.f_bavail * room.f_frsize // _BALLAST_SHARE)
            if size_bytes < max(2 * self.size_bytes, min(_LEAST_BALLAST_BYTES, self._limit_bytes)):
                return
            fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                for offset in range(0, size_bytes, _CHUNK_BYTES):
                    write_all(fd, bytes(min(_CHUNK_BYTES, size_bytes - offset)), offset)
                os.fsync(fd)
            except OSError:
                self.path.unlink()
                self.size_bytes = 0
                raise
            finally:
                os.close(fd)
            self.size_bytes = size_bytes

    @property
    def is_small(self) -> bool:
        """Return whether it might be larger."""
        return self.size_bytes < self._limit_bytes


class Group(NamedTuple):
    """A group that is not durable yet. Its frame says the same wherever and however often it is written."""

    sequence: int
    synced: int
    first: int
    keys: list[str]
    records: list[bytes]
    size_bytes: int
    has_drop: bool


class Log:
    """The end of the journal, where groups become frames of the newest segment. One thread at a time."""

    def __init__(self, folder: Path, segment_bytes: int, active: Segment | None) -> None:
        self._folder = folder
        self._segment_bytes = segment_bytes
        self._active = active
        self._zeros_end = 0
        """Where the zeros end that were written behind the newest frame."""

    @property
    def needs_segment(self) -> bool:
        """Return whether `rotate` comes before `write`: after a start, a failure, or when the segment is large."""
        return self._active is None or self._active.size_bytes >= self._segment_bytes

    def rotate(self, previous: Segment, *, first: int, sequence: int) -> Segment:
        """Go on in a new segment, durable. `first` and all that is said to be needed by it must be durable, too."""
        self.close()
        self._active = make_segment(self._folder, previous, first=first, sequence=sequence)
        return self._active

    def write(self, groups: Sequence[Group]) -> tuple[Segment, list[int], int]:
        """Make groups durable; return segment, offsets of the frames, bytes. The caller moves the segment's end. After
        an OSError the same groups must be written before all others: in a new segment unless only room was missing."""
        segment = self._active
        assert segment is not None
        start = at = segment.size_bytes
        offsets, parts = [], []
        for group in groups:
            head = fmt.FrameHead(group.size_bytes, len(group.records), group.first, group.sequence, group.synced)
            parts.append(fmt.encode_frame(head, group.records, segment.header.nonce + at))
            parts += group.records
            offsets.append(at)
            at += fmt.FRAME_BYTES + group.size_bytes
        self._active = None  # whatever fails now: never write to it again
        try:
            write_all(segment.fd, b"".join(parts), start)
        except OSError as exc:
            if exc.errno in FULL:  # no page was lost: what was written goes, and the same frames may come there again
                os.ftruncate(segment.fd, start)
                self._active, self._zeros_end = segment, 0
            raise
        if at > self._zeros_end:
            self._zeros_end = at
            if at - start <= _SMALL_BYTES:
                self._write_zeros(segment)
        os.fdatasync(segment.fd)
        self._active = segment
        return segment, offsets, at - start

    def _write_zeros(self, segment: Segment) -> None:
        """Write zeros for the next frames to be written over. To sync a file that grows, a file system syncs its own
        journal as well: with ext4 it takes twice as long (`benchmarks/disk_limits.py`)."""
        n_bytes = max(0, min(_ZEROS_BYTES, self._segment_bytes - self._zeros_end))
        with contextlib.suppress(OSError):  # a full disk: it grows, as long as it can
            write_all(segment.fd, bytes(n_bytes), self._zeros_end)
            self._zeros_end += n_bytes

    def close(self) -> None:
        """Let go of the segment, and of zeros behind its frames."""
        if self._active is not None:
            with contextlib.suppress(OSError):
                os.ftruncate(self._active.fd, self._active.size_bytes)
        self._active, self._zeros_end = None, 0
