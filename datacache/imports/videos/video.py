"""One video: which of its frames are shown at which times, decoded with as little work as that takes.

Used by `frames`, in its worker processes. A video is cut into *stretches* of about `STRETCH_S`, which begin at key
frames; where they are follows from the file alone, so whoever decodes a stretch comes to the same frames. Only MP4 and
Matroska are cut, whose index leads to key frames, and codecs whose key frames need nothing before them.

Inside of a stretch, from one key frame to the next, the packets tell which frames are wanted before anything is
decoded: what comes after the last of these is not decoded, nor are H.264's frames between that no other frame needs.
Where the packets do not tell, all is decoded, and the frames say it (`_plain`).

What videos are is never trusted: only known containers are opened, none of which leads to other files, the size of a
frame is bounded, and any error is a `VideoError`. One thread; each video is opened in the process that decodes it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import IO, Any, NamedTuple

from datacache.core.errors import DatacacheError, StoreError, UsageError
from datacache.imports.videos.sampling import Sampling, numbers_shown

STRETCH_S = 30
MAX_PIXELS = 8192 * 4352
"""8K. A decoder holds some twenty frames."""
MAX_IMAGES = 1_000_000
"""The most images of one video."""
MAX_STRETCHES = 10_000
"""Three days and a half: a Matroska file of a few bytes may claim a million years."""
EXTENSIONS = (
    *(".mp4", ".m4v", ".mov", ".qt", ".3gp", ".3g2", ".mkv", ".webm", ".avi", ".ts", ".mts", ".m2ts", ".mpg", ".mpeg"),
    *(".vob", ".flv", ".f4v", ".wmv", ".asf", ".ogv", ".mxf", ".mjpeg", ".gif", ".h264", ".264", ".h265", ".hevc"),
)
_CONTAINERS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpegts,mpeg,flv,asf,ogg,mxf,mjpeg,gif,h264,hevc"
"""Open these alone. Playlists (HLS, DASH, concat) are not among them: they name other files."""
_INDEXED = frozenset(["mov,mp4,m4a,3gp,3g2,mj2", "matroska,webm"])
_COUNTED = frozenset(["avi", "h264", "hevc", "mjpeg"])
"""Containers that give packets their place in the order of decoding alone: frames come at these times, in turn."""
_STANDALONE_KEYS = frozenset(["h264", "hevc", "vp8", "vp9", "av1", "libdav1d", "mjpeg"])
_BUFFER_BYTES = 1 << 18
_GROUP_PACKETS, _GROUP_BYTES = 1000, 64 << 20
"""Between two key frames; where there is more, it is decoded as it comes."""
_IDR = 5  # nal_unit_type, ITU-T H.264 table 7-1


class VideoError(DatacacheError):
    """A video of which no frames can be taken."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        """`format`, `no-video`, `encrypted`, `damaged`, `times`, `too-large`."""

    def __reduce__(self) -> tuple[object, ...]:
        return (VideoError, (self.code, self.message))


class VideoTraits(NamedTuple):
    """A video, as `videos.jsonl` describes it."""

    codec: str
    width: int
    height: int
    rotation: int
    """By how many degrees counterclockwise its frames are turned to be displayed."""
    duration_s: float | None


class ShownFrame(NamedTuple):
    """A frame, and the times at which it is shown."""

    frame: Any
    numbers: range
    """Of the times; empty for the first frame of a scene."""
    ticks: int
    """When it begins, in the video's time base, counted from its first frame."""


class _TellsTooLittleError(Exception):
    """The packets of a stretch do not tell which frames are wanted."""


class OpenVideo:
    """A video that can be decoded. Close it. `UsageError` where PyAV is not installed, `VideoError`, the store's
    errors."""

    def __init__(self, file: IO[bytes] | Any, sampling: Sampling, *, threads: int = 1) -> None:
        try:
            import av
        except ImportError as exc:
            raise UsageError(
                "frames of videos need PyAV, which is not installed", hint="pip install 'dsctl[video]'"
            ) from exc
        av.logging.set_level(None)
        self._sampling = sampling
        self._failure: type[Exception] = av.FFmpegError
        options = {"format_whitelist": _CONTAINERS, "protocol_whitelist": "none", "max_pixels": str(MAX_PIXELS)}
        self._container = self._checked(
            "format", lambda: av.open(file, "r", options=options, metadata_errors="replace", buffer_size=_BUFFER_BYTES)
        )
        try:
            self._stream = self._find_stream()
        except BaseException:
            self._container.close()
            raise
        context = self._stream.codec_context
        context.options = {"max_pixels": str(MAX_PIXELS)}
        context.thread_count = threads
        context.thread_type = "AUTO"
        self._tick_s = Fraction(self._stream.time_base)
        rate = self._stream.guessed_rate or self._stream.average_rate or Fraction(25)
        self._frame_ticks = max(1, round(1 / rate / self._tick_s))
        self._start: int | None = None
        self._seams: dict[int, int | None] = {}
        self._skips = context.name == "h264"
        self._nal_length = _nal_length(context.extradata) if context.name == "h264" else 0
        self.rotation = 0

    def close(self) -> None:
        """Free the decoder."""
        self._container.close()

    # --- what it is ---

    @property
    def tick_s(self) -> Fraction:
        """Return the unit of `ShownFrame.ticks`."""
        return self._tick_s

    @property
    def start(self) -> int:
        """Return when the first frame begins, in ticks: known once stretch 0 was begun, or from who did that."""
        assert self._start is not None, "stretch 0 comes first"
        return self._start

    @start.setter
    def start(self, ticks: int) -> None:
        self._start = ticks

    def traits(self) -> VideoTraits:
        """Return what the video says of itself; its rotation is known once a frame was decoded."""
        context, duration = self._stream.codec_context, self._duration_s()
        shown_s = None if duration is None else round(float(duration), 3)
        return VideoTraits(context.name, context.width, context.height, self.rotation, shown_s)

    def _find_stream(self) -> Any:
        from av.stream import Discard

        streams = [stream for stream in self._container.streams.video if not _is_picture(stream)]
        if not streams:
            raise VideoError("no-video", "there is no video in it")
        best = self._container.streams.best("video")
        stream = best if best in streams else streams[0]
        for other in self._container.streams:
            if other is not stream:
                other.discard = Discard.all
        context = stream.codec_context
        if context is None:
            raise VideoError("format", "its codec is not known")
        if context.codec_tag in ("encv", "drmi"):
            raise VideoError("encrypted", "it is encrypted")
        if context.width * context.height > MAX_PIXELS:
            size = f"{context.width:,} x {context.height:,}"
            raise VideoError("too-large", f"its frames have {size} pixels, more than {MAX_PIXELS:,}")
        if not stream.time_base:
            raise VideoError("times", "it has no unit of time")
        return stream

    def _duration_s(self) -> Fraction | None:
        if self._stream.duration is not None:
            return Fraction(self._stream.duration * self._tick_s)
        duration = self._container.duration
        return None if duration is None else Fraction(duration, 1_000_000)

    # --- stretches ---

    def stretches(self) -> int:
        """Return into how many stretches the video is cut; 1 where it cannot be, or claims to be longer than any."""
        duration_s = self._duration_s()
        if self._sampling.step_s is None or not self._is_foretelling():
            return 1
        if duration_s is None or duration_s < 2 * STRETCH_S or self._found_seam(1) is None:
            return 1
        count = math.ceil(duration_s / STRETCH_S)
        return count if count <= MAX_STRETCHES else 1

    def _is_foretelling(self) -> bool:
        """Tell whether packets tell which frames are wanted, and where decoding can begin."""
        name = self._stream.codec_context.name
        known = self._container.format.name in _INDEXED and name in _STANDALONE_KEYS
        return known and (name != "h264" or self._nal_length > 0)

    def shown(self, number: int, count: int) -> Iterator[ShownFrame]:
        """Yield the frames of a stretch that are asked for, in order. Raise `VideoError`, and the store's errors.

        Where it raises in the middle, or has yielded frames again from the first one on (their numbers tell), the later
        ones count."""
        first = self._seam(number, count) if number else None
        stop = self._seam(number + 1, count) if number + 1 < count else None
        if (number and first is None) or (first is not None and stop is not None and first >= stop):
            return
        if self._sampling.step_s is None:
            yield from self._scenes()
            return
        try:
            if not self._is_foretelling():
                raise _TellsTooLittleError
            yield from self._foretold(first, stop)
        except _TellsTooLittleError:
            yield from self._plain(first, stop)

    def _seam(self, number: int, count: int) -> int | None:
        """Return where a stretch begins, or the next one that begins at a key frame; None for the end."""
        return next((seam for n in range(number, count) if (seam := self._found_seam(n)) is not None), None)

    def _found_seam(self, number: int) -> int | None:
        """Return the time of the first key frame that is found from a time on; None where there is none before the
        next such time."""
        if number not in self._seams:
            length = round(STRETCH_S / self._tick_s)
            begin = (self._stream.start_time or 0) + number * length
            self._seams[number] = None
            for packet in self._packets(begin):
                if packet.dts is not None and packet.dts >= begin + length:
                    break
                if self._is_key(packet):
                    self._seams[number] = packet.pts
                    break
        return self._seams[number]

    # --- packets ---

    def _packets(self, seek_to: int | None) -> Iterator[Any]:
        """Yield the packets from a key frame before a time on; None for all."""
        at = (self._stream.start_time or 0) if seek_to is None else seek_to
        if seek_to is not None or self._container.format.name in _INDEXED:
            self._checked("damaged", lambda: self._container.seek(at, stream=self._stream, backward=True))
        packets = self._container.demux(self._stream)
        while True:
            packet = self._checked("damaged", lambda: next(packets, None))
            if packet is None or (packet.size == 0 and packet.dts is None):
                return
            if packet.has_sidedata("encryption_info"):
                raise VideoError("encrypted", "it is encrypted")
            if packet.is_corrupt:
                raise VideoError("damaged", f"it is cut off or damaged at {self._time(packet.dts)}")
            yield packet

    def _is_key(self, packet: Any) -> bool:
        """Tell whether a packet is a frame that is shown, and that nothing before is needed for."""
        if not packet.is_keyframe or packet.is_discard or packet.pts is None:
            return False
        return not self._nal_length or _IDR in _nal_types(bytes(packet), self._nal_length)

    def _from(self, first: int | None) -> Iterator[Any]:
        """Yield the packets from the key frame of a time on, without those that are shown before it."""
        if first is None:
            yield from self._packets(None)
            return
        begun = False
        for packet in self._packets(first):
            begun = begun or (packet.pts == first and self._is_key(packet))
            if begun and (packet.pts is None or packet.pts >= first):
                yield packet

    def _groups(self, first: int | None, stop: int | None) -> Iterator[tuple[list[Any], int | None]]:
        """Yield the packets from one key frame to the next, with the time of the next; None at the end.

        Those that come after the next key frame and are shown before it belong to them, and so does that frame."""
        group: list[Any] = []
        following: Any = None
        size = 0
        for packet in self._from(first):
            if packet.pts is None or (not group and not self._is_key(packet)):
                raise _TellsTooLittleError
            size += packet.size
            if following is not None:
                if packet.pts < following.pts:
                    group.append(packet)
                    continue
                yield group, following.pts
                if following.pts == stop:
                    return
                group, following, size = [following], None, following.size + packet.size
            if group and self._is_key(packet):
                following = packet
            group.append(packet)
            if len(group) > _GROUP_PACKETS or size > _GROUP_BYTES:
                raise _TellsTooLittleError
        if following is not None:
            yield group, following.pts
            if following.pts == stop:
                return
            group = [following]
        if group:
            yield group, None

    # --- frames ---

    def _foretold(self, first: int | None, stop: int | None) -> Iterator[ShownFrame]:
        """Yield the wanted frames of a stretch, and decode little else."""
        context = self._stream.codec_context
        context.flush_buffers()
        before = -1 << 63
        for group, following in self._groups(first, stop):
            key = group[0].pts
            durations = {p.pts: p.duration for p in group if not p.is_discard}
            times = sorted(time for time in durations if following is None or time < following)
            if len(times) + sum(p.is_discard or p.pts == following for p in group) != len(group) or key <= before:
                raise _TellsTooLittleError  # times that are there twice, or go back
            if not times or times[0] < key:
                raise _TellsTooLittleError
            before = times[-1]
            if self._start is None:
                self._start = times[0]
            end_of_last = self._end(before, durations[before]) if following is None else following
            wanted = {
                time: numbers
                for time, end in zip(times, [*times[1:], end_of_last], strict=True)
                if (numbers := self._numbers(time, end))
            }
            for frame in self._decoded(group, wanted):
                yield ShownFrame(frame, wanted.pop(frame.pts), frame.pts - self._start)
            if wanted:
                raise _TellsTooLittleError

    def _decoded(self, group: list[Any], wanted: dict[int, range]) -> Iterator[Any]:
        """Yield the wanted frames of a group, in order."""
        if not wanted:
            return
        context = self._stream.codec_context
        last = max(number for number, packet in enumerate(group) if packet.pts in wanted)
        for packet in [*group[: last + 1], None]:
            if self._skips:
                context.skip_frame = "DEFAULT" if packet is None or packet.pts in wanted else "NONREF"
            for frame in self._frames(packet):
                if frame.pts in wanted:
                    yield frame
        context.flush_buffers()

    def _plain(self, first: int | None, stop: int | None) -> Iterator[ShownFrame]:
        """Yield the wanted frames of a stretch, and decode all of it."""
        held: Any = None
        for frame in self._all(first, stop):
            if held is not None:
                yield from self._shown_until(held, frame.pts)
            held = frame
        if held is not None:
            yield from self._shown_until(held, self._end(held.pts, held.duration) if stop is None else stop)

    def _end(self, last: int, duration: int | None) -> int:
        """Return when the last frame ends. A packet's duration may be the time to the next in the order of decoding."""
        end = last + (duration or self._frame_ticks)
        known = self._container.format.name in _INDEXED  # others guess it
        if not known or self._stream.duration is None or self._stream.start_time is None:
            return end
        return max(last + 1, min(end, int(self._stream.start_time + self._stream.duration)))

    def _shown_until(self, frame: Any, end: int) -> Iterator[ShownFrame]:
        if numbers := self._numbers(frame.pts, end):
            yield ShownFrame(frame, numbers, frame.pts - self.start)

    def _scenes(self) -> Iterator[ShownFrame]:
        """Yield the first frame of each scene, by the score of ffmpeg's filter `select`."""
        import av

        graph: Any = None
        size: Any = None
        for frame in self._all(None, None):
            if graph is None or size != (frame.width, frame.height, frame.format.name):
                size = (frame.width, frame.height, frame.format.name)
                graph = av.filter.Graph()
                choose = f"eq(n\\,0)+gt(scene\\,{self._sampling.threshold:g})"
                graph.link_nodes(
                    graph.add_buffer(template=self._stream, width=size[0], height=size[1], format=frame.format),
                    graph.add("select", choose),
                    graph.add("buffersink"),
                ).configure()
            graph.vpush(frame)
            while True:
                try:
                    chosen = graph.vpull()
                except (av.error.BlockingIOError, av.error.EOFError):
                    break
                yield ShownFrame(chosen, range(0), chosen.pts - self.start)

    def _all(self, first: int | None, stop: int | None) -> Iterator[Any]:
        """Yield all frames of a stretch that are shown, in order, with times that do not go back."""
        context = self._stream.codec_context
        context.flush_buffers()
        context.skip_frame = "DEFAULT"
        counted: deque[int] | None = deque() if self._container.format.name in _COUNTED else None
        last = None
        for packet in self._with_end(self._from(first)):
            if packet is not None and packet.pts is None and counted is None:
                raise VideoError("times", f"a frame has no time, after {self._time(last)}")
            if packet is not None and packet.size and packet.dts is not None and counted is not None:
                counted.append(packet.dts)
            for frame in self._frames(packet):
                if counted is not None:
                    frame.pts = counted.popleft() if counted else 0 if last is None else last + self._frame_ticks
                if self._start is None:
                    self._start = frame.pts
                if last is not None and frame.pts < last:
                    raise VideoError("times", f"its times go back after {self._time(last)}")
                last = frame.pts
                if stop is not None and last >= stop:
                    context.flush_buffers()
                    return
                yield frame
        context.flush_buffers()
        if last is None:
            raise VideoError("damaged", "there is no frame in it that can be decoded")

    def _with_end(self, packets: Iterator[Any]) -> Iterator[Any]:
        yield from packets
        yield None

    def _frames(self, packet: Any) -> Iterator[Any]:
        """Decode a packet; None for what the decoder still holds."""
        for frame in self._checked("damaged", lambda: self._stream.codec_context.decode(packet)):
            if frame.is_corrupt:
                raise VideoError("damaged", f"it is damaged at {self._time(frame.pts)}")
            self.rotation = rotation_of(frame)
            yield frame

    # --- odds and ends ---

    def _numbers(self, begin: int, end: int) -> range:
        assert self._sampling.step_s is not None
        step = self._sampling.step_s / self._tick_s
        numbers = numbers_shown(begin - self.start, end - self.start, step)
        if numbers.stop > MAX_IMAGES:
            raise VideoError("too-large", f"it would be more than {MAX_IMAGES:,} images")
        return numbers

    def _time(self, ticks: int | None) -> str:
        return "its begin" if ticks is None else f"{float((ticks - (self._start or 0)) * self._tick_s):.3f} s"

    def _checked(self, code: str, call: Callable[[], Any]) -> Any:
        """Call the library; its errors are ours."""
        try:
            return call()
        except (StoreError, VideoError):
            raise
        except self._failure as exc:
            words = getattr(exc, "strerror", None) or type(exc).__name__
            raise VideoError(code, f"it cannot be read as a video: {words}") from exc


def rotation_of(frame: Any) -> int:
    """Return by how many degrees counterclockwise a frame is turned to be displayed; 0 where its matrix turns nothing
    into a picture."""
    turned = int(frame.rotation)
    return turned if -360 <= turned <= 360 else 0  # of such a matrix it is no number, of which C makes the least one


def _is_picture(stream: Any) -> bool:
    """Tell whether a stream is a cover of sound, not a video."""
    from av.stream import Disposition

    return bool(stream.disposition & (Disposition.attached_pic | Disposition.timed_thumbnails))


def _nal_length(extradata: bytes | None) -> int:
    """Return the bytes of a NAL unit's length, as the `avcC` of an MP4 or Matroska file says it; 0 without one."""
    return (extradata[4] & 3) + 1 if extradata is not None and len(extradata) > 6 and extradata[0] == 1 else 0


def _nal_types(data: bytes, length_bytes: int) -> Iterator[int]:
    at = 0
    while at + length_bytes < len(data):
        size = int.from_bytes(data[at : at + length_bytes], "big")
        yield data[at + length_bytes] & 31
        at += length_bytes + size
