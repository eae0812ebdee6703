"""The daemon's files under a home."""

from __future__ import annotations

from pathlib import Path


def socket_path(home: Path) -> Path:
    """The Unix socket, mode 0600. Connect through `/proc/self/fd`: a socket address holds 107 bytes only."""
    return home / "run" / "daemon.sock"


def keeper_socket_path(home: Path) -> Path:
    """The socket that takes descriptors to be kept (`keeper`), mode 0600."""
    return home / "run" / "keeper.sock"


def mount_host_path(home: Path) -> Path:
    """The socket of the mount host (`fuse_mount.lifecycle.host`), unless the settings name another place."""
    return home / "run" / "mounts.sock"


def lock_path(home: Path) -> Path:
    """A lock (flock(2)) that a daemon holds for life, with its pid."""
    return home / "run" / "daemon.lock"


def pulse_path(home: Path) -> Path:
    """The time when the daemon could last answer (`pulse`)."""
    return home / "run" / "daemon.pulse"


def start_lock_path(home: Path) -> Path:
    """A lock (flock(2)) of the process that is starting a daemon."""
    return home / "run" / "start.lock"


def start_failure_path(home: Path) -> Path:
    """The reason why a daemon could not be started a moment ago, for processes that would try again at once."""
    return home / "run" / "start.failure"


def log_path(home: Path) -> Path:
    """The daemon's log."""
    return home / "log" / "daemon.log"


def files_dir(home: Path) -> Path:
    """The folders of processes that have local files (`reader.local_file`)."""
    return home / "run" / "files"
