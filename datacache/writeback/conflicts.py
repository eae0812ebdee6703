"""Somebody else changed what we changed as well: when that is so, and what our version is called then.

The bucket's newer object keeps its name; ours goes on as `NAME.conflict-<UTC time>-<host>` beside it. The suffix is
behind the extension on purpose: `*.pt` does not match a loser. Used by the uploader (`standing`) and the engine
(`conflict_key`). Pure functions, any thread.
"""

from __future__ import annotations

import enum
import re
import time
from collections.abc import Callable

from datacache.store.bucket import LiveObject

CONFLICT_MARK = ".conflict-"
_SUFFIX = re.compile(rf"(?<=[^/]){re.escape(CONFLICT_MARK)}\d{{8}}T\d{{6}}Z-[A-Za-z0-9.-]+(?=/?\Z)")
_NAME_BYTES = 255  # the longest name that a directory shows
_KEY_BYTES = 1024  # the longest key that S3 has
_READABLE_BYTES = 16  # of a name, at least, or it goes where there is more room
_HOST_BYTES = 63


class Standing(enum.Enum):
    """How an object in the bucket stands to what is to be written or deleted under its key."""

    FREE = "no object has the key"
    SAME = "it is what is to be written: the answer to an earlier try was lost"
    EXPECTED = "it is the one that we changed"
    EARLIER = "it is an earlier version that we wrote ourselves"
    THEIRS = "somebody else wrote it"


def standing(found: LiveObject | None, *, base: str, version: int, ours: int | None) -> Standing:
    """Tell by the object that is there. `base` is the ETag that was expected ('' for none), `version` the one to be
    written, `ours` the version the object was made of where this staging area wrote it."""
    if found is None:
        return Standing.FREE
    if ours == version:
        return Standing.SAME
    if base and found.info.etag == base:
        return Standing.EXPECTED
    return Standing.EARLIER if ours is not None and ours < version else Standing.THEIRS


def is_conflict_copy(key: str) -> bool:
    """Tell by its name whether a key is a conflict's copy."""
    return _SUFFIX.search(key) is not None


def conflict_key(key: str, at: float, host: str, taken: Callable[[str], bool], *, prefix: str = "") -> str:
    """The key that our version of `key` goes on under; in the bucket it stands behind `prefix`. `at` in seconds since
    the epoch. The name is shortened where it would be longer than a name or a key can be, and numbered where `taken`
    says that there is one already. A conflict copy's own copy is named as another one of the original. Where the folder
    leaves no room for a name, it goes into the next one above."""
    folder, _, name = _SUFFIX.sub("", key.rstrip("/")).rpartition("/")
    when = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(at))
    where = re.sub(r"[^A-Za-z0-9.-]+", "-", host)[:_HOST_BYTES] or "unknown"
    number = 1
    while True:
        suffix = f"{CONFLICT_MARK}{when}-{where}" + (f"-{number}" if number > 1 else "") + "/" * key.endswith("/")
        while True:
            above = f"{folder}/" if folder else ""
            room = min(_NAME_BYTES, _KEY_BYTES - len(_bytes(prefix + above))) - len(suffix)
            if not folder or room >= min(_READABLE_BYTES, len(_bytes(name))):
                break
            folder = folder.rpartition("/")[0]
        found = above + _shortened(name, max(0, room)) + suffix
        if not taken(found):
            return found
        number += 1


def _shortened(name: str, size_bytes: int) -> str:
    """The first characters of a name, as many as have room."""
    data = _bytes(name)
    if len(data) <= size_bytes:
        return name
    while size_bytes and data[size_bytes] & 0xC0 == 0x80:  # never a part of a character
        size_bytes -= 1
    return data[:size_bytes].decode("utf-8", "surrogateescape")


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")
