"""A disk that fails when it is told to: a loop device over a file that a FUSE server of ours serves, with ext4 on it.

`python -m tests.failing_disk MOUNTPOINT BACKING SWITCHES` serves one file, `disk`, out of BACKING. While there is a
file `reads` (or `writes`) in SWITCHES, reads (or writes) fail with EIO, which the kernel passes on as a real disk's.
"""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

_INODE = 2


class FailingDisk:
    """The mounted disk and its switches."""

    def __init__(self, folder: Path, switches: Path) -> None:
        self.folder, self._switches = folder, switches

    def fail(self, *what: str) -> None:
        """From now on `what` fails ("reads", "writes"). What the kernel has of it in memory goes, as far as it may."""
        self.drop_pages()
        for name in what:
            (self._switches / name).touch()

    def mend(self) -> None:
        """All is well again."""
        for path in self._switches.iterdir():
            path.unlink()

    def drop_pages(self) -> None:
        """Have the kernel let go of the files' pages that no process has mapped."""
        for path in self.folder.rglob("*"):
            with contextlib.suppress(OSError):
                fd = os.open(path, os.O_RDONLY)
                try:
                    os.fsync(fd)
                    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                finally:
                    os.close(fd)


@contextlib.contextmanager
def failing_disk(folder: Path, tmp_path: Path, *, size_bytes: int = 256 * 2**20) -> Iterator[FailingDisk]:
    """Mount one at `folder`. Skips the test where that cannot be had: root, loop devices, pyfuse3."""
    pytest.importorskip("pyfuse3", reason="the failing disk is served by pyfuse3")
    if os.geteuid() or not Path("/dev/loop-control").exists():
        pytest.skip("a disk that fails is made of a loop device, by root")
    served, backing, switches = (tmp_path / name for name in ("served", "backing", "switches"))
    served.mkdir()
    switches.mkdir()
    with backing.open("wb") as file:
        file.truncate(size_bytes)
    command = [sys.executable, "-m", "tests.failing_disk", served, backing, switches]
    server = subprocess.Popen(command, cwd=Path(__file__).parents[1])
    with contextlib.ExitStack() as stack:
        stack.callback(server.wait)
        stack.callback(server.terminate)
        stack.callback(subprocess.run, ["umount", "-l", served], check=False)
        _wait_for(lambda: (served / "disk").exists())
        found = subprocess.run(
            ["losetup", "--find", "--show", "--direct-io=on", served / "disk"],
            check=False,
            capture_output=True,
            text=True,
        )
        if found.returncode:
            pytest.skip(f"no loop device is to be had: {found.stderr.strip()}")
        device = found.stdout.strip()
        stack.callback(subprocess.run, ["losetup", "--detach", device], check=True)
        # No journal that ends the file system at the first failed write: that is another test's.
        make = ["mkfs.ext4", "-q", "-O", "^has_journal", "-E", "lazy_itable_init=0,nodiscard", device]
        subprocess.run(make, check=True, capture_output=True)
        subprocess.run(["mount", "-o", "errors=continue", device, folder], check=True)
        stack.callback(subprocess.run, ["umount", "-l", folder], check=True)
        disk = FailingDisk(folder, switches)
        stack.callback(disk.mend)
        yield disk


def _wait_for(done: object) -> None:
    deadline = time.monotonic() + 30
    while not done():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _serve(mountpoint: str, backing: str, switches: Path) -> None:
    import pyfuse3
    import trio

    fd = os.open(backing, os.O_RDWR)

    class OneFile(pyfuse3.Operations):
        """A root folder and the file in it."""

        async def getattr(self, inode, ctx=None):
            attributes = pyfuse3.EntryAttributes()
            attributes.st_ino = inode
            attributes.st_mode = 0o100600 if inode == _INODE else 0o040700
            attributes.st_size = os.fstat(fd).st_size if inode == _INODE else 0
            return attributes

        async def lookup(self, parent_inode, name, ctx=None):
            if name != b"disk":
                raise pyfuse3.FUSEError(errno.ENOENT)
            return await self.getattr(_INODE)

        async def open(self, inode, flags, ctx):
            return pyfuse3.FileInfo(fh=_INODE, direct_io=True)

        async def read(self, fh, off, size):
            if (switches / "reads").exists():
                raise pyfuse3.FUSEError(errno.EIO)
            return os.pread(fd, size, off)

        async def write(self, fh, off, buf):
            if (switches / "writes").exists():
                raise pyfuse3.FUSEError(errno.EIO)
            return os.pwrite(fd, buf, off)

        async def fsync(self, fh, datasync):
            if (switches / "writes").exists():
                raise pyfuse3.FUSEError(errno.EIO)

    pyfuse3.init(OneFile(), mountpoint, {*pyfuse3.default_options, "fsname=failing-disk"})
    try:
        trio.run(pyfuse3.main)
    finally:
        pyfuse3.close(unmount=False)


if __name__ == "__main__":
    _serve(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
