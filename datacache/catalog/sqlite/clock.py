"""The clock of a SQLite catalog: within one boot of its node it counts elapsed seconds and follows no step ahead.

All users of the file are on one node, so they share a count of seconds that nobody can set (`elapsed_s`). The file
keeps the time of day at which this count began in this boot, as the first user saw it. A time of day that is set ahead
later makes nothing older: no lease ends early, and no grace period. One that is set back is taken over, which makes all
younger, so that stored times do not lie in the future for ever. Any thread and process."""

from __future__ import annotations

import contextlib
import json
import time

from datacache.catalog.base import Catalog
from datacache.core.boot import boot_id
from datacache.core.errors import CatalogError
from datacache.store.clock import elapsed_s

CLOCK = "clock"
"""The kind of the document, whose one key is `_KEY`."""
_KEY = "node"
_SLACK_S = 60.0
"""A time of day that is corrected by less counts as right."""


def now_s(catalog: Catalog) -> float:
    """Return Unix time for all that the catalog notes and compares. Must not be called within a transaction."""
    boot = boot_id()
    while boot:
        text = catalog.document(CLOCK, _KEY)
        wall_s, running_s = time.time(), elapsed_s()
        began_s = _began_s(text, boot)
        if began_s is not None and began_s + running_s <= wall_s + _SLACK_S:
            return began_s + running_s
        noted = json.dumps({"version": 1, "boot": boot, "began_s": wall_s - running_s})
        with contextlib.suppress(CatalogError):  # a file that cannot be written: the time is the same
            if not catalog.set_document(CLOCK, _KEY, noted, old=text):
                continue  # another process was first
        return wall_s
    return time.time()


def _began_s(text: str | None, boot: str) -> float | None:
    """Return when this boot began, by the clock as it was then; None where nobody has noted it."""
    try:
        found = json.loads(text or "")
        return float(found["began_s"]) if found["boot"] == boot else None
    except (ValueError, TypeError, KeyError):
        return None
