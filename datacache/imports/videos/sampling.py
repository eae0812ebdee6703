"""Which frames of a video are taken: at times that are evenly spaced, or where a scene begins. Pure values.

Times are counted from the first frame that the video shows. The frame at a time is the one that is shown then: the last
that begins at that time or before. That is ffmpeg's `-vf setpts=PTS-STARTPTS,fps=RATE:round=up`.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction
from typing import NamedTuple

from datacache.core.errors import UsageError

SCENE_THRESHOLD = 0.3
MAX_RATE = 1000
"""Images a second: names have milliseconds."""
_HINT = "Write every=1s, every=500ms, every=2m, fps=2, fps=30000/1001, scene or scene=0.4."
_UNITS = {"ms": Fraction(1, 1000), "s": Fraction(1), "m": Fraction(60), "h": Fraction(3600)}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h)")
_RATE = re.compile(r"\d+(?:\.\d+)?|\d+/\d+")


class Sampling(NamedTuple):
    """The frames that are asked for."""

    text: str
    """As it was written."""
    step_s: Fraction | None
    """The time from one image to the next; None for scenes."""
    threshold: float = SCENE_THRESHOLD
    """The score above which a frame begins a scene."""


def parse_sampling(text: str) -> Sampling:
    """Return what `every=1s`, `fps=2` or `scene` means. `UsageError`."""
    word, equals, value = text.strip().partition("=")
    if word == "scene":
        threshold = _number(text, value) if equals else Fraction(SCENE_THRESHOLD)
        if not 0 < threshold < 1:
            raise UsageError(f"frames {text}: the score of a new scene lies between 0 and 1", hint=_HINT)
        return Sampling(text.strip(), None, float(threshold))
    if word == "every" and (match := _DURATION.fullmatch(value)):
        step = Fraction(match[1]) * _UNITS[match[2]]
    elif word == "fps":
        rate = _number(text, value)
        step = 1 / rate if rate else Fraction(0)
    else:
        raise UsageError(f"frames {text!r} cannot be understood", hint=_HINT)
    if not Fraction(1, MAX_RATE) <= step <= 1_000_000:
        raise UsageError(f"frames {text}: at most {MAX_RATE:,} images a second, and at least one in 1,000,000 seconds")
    return Sampling(text.strip(), step)


def _number(text: str, value: str) -> Fraction:
    try:
        if _RATE.fullmatch(value):
            return Fraction(value)
    except ZeroDivisionError:
        pass
    raise UsageError(f"frames {text!r} cannot be understood", hint=_HINT)


def numbers_shown(begin: int, end: int, step: Fraction) -> range:
    """Return the numbers of the times at which a frame is shown that begins at `begin` and ends before `end`. Both, and
    the step, in one unit, counted from the first frame; time number n is n steps after it."""
    return range(max(0, math.ceil(begin / step)), max(0, math.ceil(end / step)))


def time_name(time_s: Fraction) -> str:
    """Return the name of an image by its time: `000012.500.jpg`. Names sort by time."""
    milliseconds = math.floor(time_s * 1000)
    return f"{milliseconds // 1000:06d}.{milliseconds % 1000:03d}.jpg"
