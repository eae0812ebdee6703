"""The daemon's files under a home. Sockets have mode 0600; `core.ipc` reaches them however long the home's path is."""

from __future__ import annotations

from pathlib import Path


def socket_path(home: Path, part: int = 0) -> Path:
    """Name the Unix socket of the daemon, or of the process that serves another part."""
    return home / "run" / (f"daemon-{part}.sock" if part else "daemon.sock")


def parts_path(home: Path) -> Path:
    """Name the file with the number of parts; there is none for a single one."""
    return home / "run" / "parts"


def members_path(home: Path) -> Path:
    """Name the file with the members of the cluster, which the daemon shows to the processes of other parts."""
    return home / "run" / "members"


def keeper_socket_path(home: Path) -> Path:
    """Name the socket that takes descriptors to be kept (`keeper`)."""
    return home / "run" / "keeper.sock"


def mount_host_path(home: Path) -> Path:
    """Name the socket of the mount host (`fuse_mount.lifecycle.host`), unless the settings name another place."""
    return home / "run" / "mounts.sock"


def lock_path(home: Path) -> Path:
    """Name the lock (flock(2)) that a daemon holds for life, with its pid."""
    return home / "run" / "daemon.lock"


def start_failure_path(home: Path) -> Path:
    """Name the file with the reason of the last start of a daemon, if it failed."""
    return home / "run" / "start.failure"


def log_path(home: Path) -> Path:
    """Name the daemon's log."""
    return home / "log" / "daemon.log"


def files_dir(home: Path) -> Path:
    """Name the folder for those of processes that have local files (`reader.local_file`)."""
    return home / "run" / "files"
