"""The frames that are taken of videos are those that ffmpeg takes, whatever is decoded for them."""

from __future__ import annotations

import struct
from contextlib import closing
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import simplejpeg

from datacache.core.errors import UsageError
from datacache.imports.videos import video
from datacache.imports.videos.jpeg import displayed_planes, encode_frame, fitted
from datacache.imports.videos.sampling import numbers_shown, parse_sampling, time_name
from datacache.imports.videos.video import OpenVideo, VideoError
from tests.imports.videos.films import ffmpeg, ffmpeg_frames, make_film, our_frames
from tests.promises import promise

_X264 = ("-c:v", "libx264", "-preset", "ultrafast", "-bf", "3", "-g", "20")
FILMS = {
    "b-frames.mp4": (*_X264,),
    "long-groups.mkv": ("-c:v", "libx264", "-bf", "3", "-g", "200"),
    "open-groups.mkv": ("-c:v", "libx265", "-x265-params", "keyint=20:log-level=0", "-preset", "ultrafast"),
    "refreshed.mkv": ("-c:v", "libx264", "-preset", "ultrafast", "-intra-refresh", "1", "-g", "20"),
    "rates.mp4": ("-vf", "select='not(mod(floor(n*n/7),3))'", "-fps_mode", "vfr", *_X264),
    "late.mkv": ("-output_ts_offset", "7.3", *_X264),
    "vp9.webm": ("-c:v", "libvpx-vp9", "-g", "20", "-cpu-used", "8", "-deadline", "realtime"),
    "frames-without-times.avi": (*_X264,),
    "stream.ts": (*_X264,),
    "mpeg2.mpg": ("-c:v", "mpeg2video", "-bf", "2"),
    "raw.h264": (*_X264,),
}


@promise("The frame at a time is the one that ffmpeg shows then, pixel for pixel")
@pytest.mark.parametrize("name", FILMS)
def test_frames_are_those_of_ffmpeg_at_the_same_times(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(video, "STRETCH_S", 2)
    film = make_film(tmp_path / name, *FILMS[name])
    for frames, rate in (("every=1s", "1"), ("fps=7", "7"), ("fps=40", "40")):
        expected = ffmpeg_frames(film, f"fps={rate}:round=up")
        assert our_frames(film, frames) == expected, frames
        assert len(expected) >= 6
    score = "select='eq(n,0)+gt(scene,0.02)'"
    assert our_frames(film, "scene=0.02") == ffmpeg_frames(film, score)


def test_a_film_that_begins_between_key_frames_begins_at_its_first_shown_frame(tmp_path: Path) -> None:
    film = make_film(tmp_path / "whole.mp4", *_X264)
    cut = tmp_path / "cut.mp4"
    ffmpeg("-ss", "1.37", "-i", str(film), "-c", "copy", str(cut))  # an edit list: what is before is not shown
    assert our_frames(cut, "fps=7") == ffmpeg_frames(cut, "fps=7:round=up")


def test_few_frames_are_decoded_where_few_are_wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    film = make_film(tmp_path / "film.mp4", *_X264)
    decoded = []
    frames_of = OpenVideo._frames

    def count(self: OpenVideo, packet: object) -> list[object]:
        found = list(frames_of(self, packet))
        decoded.extend(found)
        return found

    monkeypatch.setattr(OpenVideo, "_frames", count)
    assert len(our_frames(film, "every=2s")) == 3
    assert len(decoded) < 50  # of 150


def test_stretches_begin_at_key_frames_and_share_no_frame(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    film = make_film(tmp_path / "film.mp4", *_X264)
    whole = our_frames(film, "fps=25")
    assert len(whole) == 150
    for length_s in (1, 2, 3):
        monkeypatch.setattr(video, "STRETCH_S", length_s)
        with open(film, "rb") as file, closing(OpenVideo(file, parse_sampling("fps=25"))) as opened:
            assert opened.stretches() == 6 // length_s
        assert our_frames(film, "fps=25") == whole


def test_images_are_turned_and_of_full_range_as_ffmpegs(tmp_path: Path) -> None:
    film, turned = make_film(tmp_path / "film.mp4", *_X264), tmp_path / "turned.mp4"
    ffmpeg("-i", str(film), "-metadata:s:v", "rotate=90", "-c", "copy", str(turned))
    of_ten_bits = make_film(tmp_path / "ten-bits.mp4", *_X264, "-pix_fmt", "yuv420p10le")
    for path, size in ((turned, (80, 45)), (of_ten_bits, (45, 80))):
        expected = ffmpeg_frames(path, "fps=1:round=up", "yuvj420p")
        with open(path, "rb") as file, closing(OpenVideo(file, parse_sampling("every=1s"))) as opened:
            shown = list(opened.shown(0, 1))
            assert len(shown) == len(expected) == 6
            for mine, theirs in zip(shown, expected, strict=True):
                planes = displayed_planes(mine.frame, max_side=0)
                ours = np.concatenate([plane.ravel() for plane in planes]).astype(int)
                assert np.abs(ours - np.frombuffer(theirs, np.uint8)).max() <= 1
            jpeg = encode_frame(shown[0].frame, max_side=80, quality=90)
            assert simplejpeg.decode_jpeg_header(jpeg)[:2] == size


def test_jpegs_look_like_ffmpegs(tmp_path: Path) -> None:
    film = make_film(tmp_path / "film.mp4", *_X264)
    ffmpeg("-i", str(film), "-vf", "fps=1:round=up", "-q:v", "2", str(tmp_path / "%d.jpg"))
    with open(film, "rb") as file, closing(OpenVideo(file, parse_sampling("every=1s"))) as opened:
        for number, shown in enumerate(opened.shown(0, 1), 1):
            ours = simplejpeg.decode_jpeg(encode_frame(shown.frame, max_side=0, quality=95)).astype(int)
            theirs = simplejpeg.decode_jpeg((tmp_path / f"{number}.jpg").read_bytes())
            assert np.abs(ours - theirs).mean() < 2


def refusal(path: Path, frames: str = "every=1s") -> str:
    """Return the code of the error that a video gives."""
    with pytest.raises(VideoError) as failed:
        our_frames(path, frames)
    return failed.value.code


@promise("A file that is no video leads nowhere: no list in it is followed, and no size it claims is believed")
def test_a_playlist_is_not_followed(tmp_path: Path) -> None:
    film = make_film(tmp_path / "film.ts", *_X264)
    playlist = tmp_path / "list.mp4"
    for text in (
        f"#EXTM3U\n#EXT-X-TARGETDURATION:6\n#EXTINF:6,\nfile://{film}\n#EXT-X-ENDLIST\n",
        f"ffconcat version 1.0\nfile '{film}'\n",
    ):
        playlist.write_text(text)
        assert refusal(playlist) == "format"


def test_sound_alone_and_covers_of_sound_are_no_video(tmp_path: Path) -> None:
    sound, picture, covered = (tmp_path / name for name in ("sound.mp4", "picture.jpg", "covered.mp4"))
    ffmpeg("-f", "lavfi", "-i", "sine=d=1", str(sound))
    ffmpeg("-f", "lavfi", "-i", "testsrc2=s=64x64:d=1", "-frames:v", "1", str(picture))
    cover = ("-map", "0", "-map", "1", "-c", "copy", "-disposition:v:0", "attached_pic")
    ffmpeg("-i", str(sound), "-i", str(picture), *cover, str(covered))
    assert [refusal(sound), refusal(covered)] == ["no-video", "no-video"]


def test_what_is_cut_off_encrypted_or_too_large_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    film = make_film(tmp_path / "film.mp4", *_X264, "-movflags", "faststart")
    short = tmp_path / "short.mp4"
    short.write_bytes(film.read_bytes()[: film.stat().st_size * 2 // 3])
    assert refusal(short) == "damaged"
    assert refusal(short, "scene") == "damaged"
    short.write_bytes(film.read_bytes()[:300])
    assert refusal(short) in ("format", "no-video")
    secret = tmp_path / "secret.mp4"
    key = ("-encryption_scheme", "cenc-aes-ctr", "-encryption_key", "00" * 16, "-encryption_kid", "11" * 16)
    make_film(secret, *_X264, *key)
    assert refusal(secret) == "encrypted"
    monkeypatch.setattr(video, "MAX_IMAGES", 100)
    assert refusal(film, "fps=25") == "too-large"
    monkeypatch.setattr(video, "MAX_PIXELS", 100 * 100)
    assert refusal(film) == "too-large"


def test_samplings_are_read_and_refused() -> None:
    read = {text: parse_sampling(text).step_s for text in ("every=1s", "every=250ms", "every=1.5m", "fps=2", "scene")}
    assert list(read.values()) == [1, Fraction(1, 4), 90, Fraction(1, 2), None]
    assert parse_sampling("fps=30000/1001").step_s == Fraction(1001, 30000)
    assert parse_sampling("scene=0.5").threshold == 0.5
    for text in ("", "every", "every=0s", "every=1", "fps=0", "fps=1/0", "fps=1e6", "fps=1001", "scene=1", "all"):
        with pytest.raises(UsageError):
            parse_sampling(text)


def test_each_time_has_one_frame_and_names_sort_by_time() -> None:
    step = Fraction(10, 3)
    assert [list(numbers_shown(begin, begin + 5, step)) for begin in (0, 5, 10)] == [[0, 1], [2], [3, 4]]
    names = [time_name(number * Fraction(1, 700)) for number in range(3000)]
    assert names == sorted(set(names))
    assert time_name(Fraction(25, 2)) == "000012.500.jpg"
    assert fitted(1280, 720, 640) == (640, 360)
    assert fitted(100, 2000, 640) == (32, 640)
    assert fitted(100, 200, 640) == (100, 200)


def test_a_length_that_cannot_be_is_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(video, "STRETCH_S", 2)
    film = make_film(tmp_path / "film.mkv", *_X264)
    data = bytearray(film.read_bytes())
    at = data.index(b"\x44\x89\x88") + 3  # Duration, of 8 bytes
    taken = our_frames(film, "every=1s")
    for length_s in (1_000.0, 1e9, 1e15):
        data[at : at + 8] = struct.pack(">d", length_s * 1_000)
        film.write_bytes(data)
        with film.open("rb") as file, closing(OpenVideo(file, parse_sampling("every=1s"))) as opened:
            assert opened.stretches() == (500 if length_s == 1_000 else 1)
        assert our_frames(film, "every=1s") == taken


def test_a_matrix_that_turns_nothing_into_a_picture_turns_nothing(tmp_path: Path) -> None:
    film = make_film(tmp_path / "film.mp4", *_X264)
    data = bytearray(film.read_bytes())
    at = data.index(b"tkhd") + 44  # its matrix: ISO/IEC 14496-12, 8.3.2
    data[at : at + 36] = bytes(36)
    film.write_bytes(data)
    with film.open("rb") as file, closing(OpenVideo(file, parse_sampling("every=1s"))) as opened:
        frame = next(opened.shown(0, 1)).frame
        assert simplejpeg.decode_jpeg(encode_frame(frame, max_side=0, quality=90)).shape == (90, 160, 3)
        assert opened.traits().rotation == 0
