"""Videos for tests, made by ffmpeg on the spot, and the frames that ffmpeg takes of them."""

from __future__ import annotations

import subprocess
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from datacache.imports.videos.sampling import parse_sampling
from datacache.imports.videos.video import OpenVideo

RATE, LENGTH_S = 25, 6
_SOURCE = ("-f", "lavfi", "-i", f"testsrc2=s=160x90:r={RATE}:d={LENGTH_S}")


def ffmpeg(*arguments: str) -> bytes:
    return subprocess.run(["ffmpeg", "-v", "error", "-y", *arguments], check=True, capture_output=True).stdout


def make_film(path: Path, *options: str) -> Path:
    """Make a video of six seconds whose every frame is another."""
    ffmpeg(*_SOURCE, "-pix_fmt", "yuv420p", *options, str(path))
    return path


def pixels_of(frame: Any) -> bytes:
    """Return the planes of a frame of 8 bits, without padding."""
    planes = []
    for plane in frame.planes:
        rows = np.frombuffer(plane, np.uint8)[: plane.height * plane.line_size]
        planes.append(rows.reshape(plane.height, plane.line_size)[:, : plane.width].tobytes())
    return b"".join(planes)


def our_frames(path: Path, frames: str) -> list[bytes]:
    """Return the pixels of the frames that we take, stretch by stretch."""
    found: dict[int, bytes] = {}
    sampling = parse_sampling(frames)
    start: int | None = None
    number, stretches = 0, 1
    while number < stretches:
        with open(path, "rb") as file, closing(OpenVideo(file, sampling)) as video:
            if start is None:
                stretches = video.stretches()
            else:
                video.start = start
            for shown in video.shown(number, stretches):
                found |= dict.fromkeys(shown.numbers or [shown.ticks], pixels_of(shown.frame))
            start = video.start
        number += 1
    return [found[key] for key in sorted(found)]


def ffmpeg_frames(path: Path, choose: str, format: str = "yuv420p", size: tuple[int, int] = (160, 90)) -> list[bytes]:
    """Return the pixels of the frames that a filter of ffmpeg chooses."""
    arguments = ("-i", str(path), "-vf", f"setpts=PTS-STARTPTS,{choose}", "-fps_mode", "passthrough")
    raw = ffmpeg(*arguments, "-f", "rawvideo", "-pix_fmt", format, "-")
    one = size[0] * size[1] * 3 // 2
    assert len(raw) % one == 0
    return [raw[at : at + one] for at in range(0, len(raw), one)]
