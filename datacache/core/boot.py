"""Telling one boot of the machine, and one process, from another without a clock. No state; any thread."""

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


def stat_of(pid: int | str) -> list[str]:
    """Return the fields of proc_pid_stat(5) from the state on; none if the process has ended or is in another
    container."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(") ")[2].split()
    except OSError:
        return []


def born(pid: int) -> int:
    """Return when a process started, in clock ticks after the boot; 0 if it does not run any more.

    Together with its id that names it, also among processes of other PID namespaces.
    """
    fields = stat_of(pid)
    return 0 if not fields or fields[0] in "ZX" else int(fields[19])
