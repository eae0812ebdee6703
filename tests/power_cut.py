"""A disk whose power is cut: ext2, without a journal of its own, on a loop device over an image in memory.

The kernel writes to the image what is synced, and all else only seconds later or under pressure. So a copy of the image
is what a power cut leaves: bytes and names that were not synced are missing. (Linux's driver syncs a file's new name
along with the file, so a folder that is not synced is noticed only where a name changed after the file's last sync.)
"""

from __future__ import annotations

import contextlib
import itertools
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

_SIZE_BYTES = 64 << 20


class CutDisk:
    """The mounted disk, and copies of what its power cuts left."""

    def __init__(self, folder: Path, image: Path) -> None:
        self.folder, self._image = folder, image
        self._numbers = itertools.count()

    def cut(self) -> Path:
        """Return an image of what a power cut would leave now."""
        copy = self._image.with_name(f"cut-{next(self._numbers)}")
        subprocess.run(["cp", "--sparse=always", self._image, copy], check=True)
        return copy

    def sync(self) -> None:
        """Bring to the disk whatever was written."""
        subprocess.run(["sync", "--file-system", self.folder], check=True)

    @contextlib.contextmanager
    def after(self, cut: Path) -> Iterator[Path]:
        """Mount what a power cut left where the disk was. The disk itself is lost, and so is the image afterwards."""
        if self.folder.is_mount():
            subprocess.run(["umount", self.folder], check=True)
        checked = subprocess.run(["e2fsck", "-fy", cut], check=False, capture_output=True, text=True)
        assert checked.returncode < 4, checked.stdout
        subprocess.run(["mount", "-o", "loop", cut, self.folder], check=True)
        try:
            yield self.folder
        finally:
            subprocess.run(["umount", self.folder], check=True)
            cut.unlink()


@contextlib.contextmanager
def cut_disk(tmp_path: Path) -> Iterator[CutDisk]:
    """Mount one below `tmp_path`. Skips the test where that is not permitted."""
    folder, below = tmp_path / "disk", tmp_path / "below"
    for path in (folder, below):
        path.mkdir()
    mount = ["mount", "-t", "tmpfs", "tmpfs", below]
    done = subprocess.run(mount, check=False, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"cannot mount here: {done.stderr.strip()}")
    image = below / "image"
    try:
        with image.open("wb") as file:
            file.truncate(_SIZE_BYTES)
        subprocess.run(["mkfs.ext2", "-q", "-b", "4096", "-N", "2048", "-m", "0", image], check=True)
        done = subprocess.run(["mount", "-o", "loop", image, folder], check=False, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"cannot mount a loop device here: {done.stderr.strip()}")
        yield CutDisk(folder, image)
    finally:
        if folder.is_mount():
            subprocess.run(["umount", folder], check=True)
        subprocess.run(["umount", below], check=True)
