"""Counters on a full disk: they count for nobody, and no read dies of it."""

from __future__ import annotations

import errno
import os

from datacache.core import counters


def test_on_a_full_disk_counters_are_private_and_nothing_is_folded(tmp_path, monkeypatch):
    (tmp_path / "999999999").write_bytes(bytes(8 * len(counters.NAMES)))  # of a dead process

    def full(fd, offset, length):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    mine = counters.Counters(tmp_path)
    mine.miss(10)
    counters.fold(tmp_path)
    assert (tmp_path / "999999999").exists()
    assert counters.totals(tmp_path)["misses"] == 0


def test_a_counters_file_has_no_holes(tmp_path):
    counters.Counters(tmp_path).miss(10)
    assert (tmp_path / str(os.getpid())).stat().st_blocks > 0
    assert counters.totals(tmp_path)["misses"] == 1
