"""Files and names that survive a power loss, as far as that can be seen without one."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from datacache.core import disk


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "record.json"
    disk.replace_file(path, b"old")
    assert path.stat().st_mode & 0o777 == 0o600

    def fill_up(fd: int, data: bytes, offset: int) -> None:
        os.pwrite(fd, data[:1], offset)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as full:
        full.setattr(disk, "write_all", fill_up)
        with pytest.raises(OSError, match="No space"):
            disk.replace_file(path, b"newer")
    assert path.read_bytes() == b"old"
    disk.replace_file(path, b"new")
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["record.json"]
