"""The containers of a node for tests: processes that are killed with everything they started, and started again."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType

from tests.fuse_mount.test_session import ended


class Container:
    """One process and its descendants."""

    def __init__(self, arguments: list[str], log: Path) -> None:
        self._command = [sys.executable, "-m", *arguments]
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """As the kubelet does."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=Path(__file__).parents[2],
            )

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def kill(self) -> None:
        """SIGKILL to all of it, as when a container ends that shares the node's process ids."""
        assert self._process is not None
        stopped = {self.pid}
        self._process.send_signal(signal.SIGSTOP)
        while found := _children_of(stopped) - stopped:  # none is to react to the death of another one
            for pid in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)
            stopped |= found
        for pid in stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()
        for pid in stopped:
            assert ended(pid)

    def kill_first(self) -> None:
        """SIGKILL to its first process alone."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def stop(self, timeout_s: float = 60.0) -> int:
        """SIGTERM, and its exit code."""
        assert self._process is not None
        self._process.terminate()
        return self._process.wait(timeout_s)

    def __enter__(self) -> Container:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def _children_of(parents: set[int]) -> set[int]:
    return {int(name) for name in os.listdir("/proc") if name.isdigit() and parent_of(int(name)) in parents}


def parent_of(pid: int) -> int:
    """Its parent's id; 0 where there is no such process."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0
