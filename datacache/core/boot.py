"""Telling one boot of the machine from another without a clock. No state; any thread."""

from __future__ import annotations

import functools
from pathlib import Path


@functools.cache
def boot_id() -> str:
    """Name this boot of the machine; empty where nobody says. The same in all containers of a machine."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""
