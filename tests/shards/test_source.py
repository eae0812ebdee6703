"""Shard files in a folder: mapped, so many at a time as descriptors allow, and read where they cannot be; and
in a snapshot, of which the bytes that are wanted are asked for."""

from __future__ import annotations

import gc
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from datacache import api
from datacache.core.errors import ShardError
from datacache.core.ids import BLOCK_BYTES
from datacache.daemon.client import DaemonClient
from datacache.exchange.wire import BlocksRequest
from datacache.settings import Settings
from datacache.shards import source
from datacache.shards.source import FolderFiles, SnapshotFiles
from tests.leftovers import descriptors_below


@pytest.fixture
def few_descriptors() -> Iterator[int]:
    """A soft limit that is soon met, whatever else this process has open: the limit."""
    gc.collect()  # shards that earlier tests' cycles still hold are counted with those here
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = 256 + 2 * max(int(name) for name in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    yield limit
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def _folder(folder: Path, count: int) -> FolderFiles:
    folder.mkdir()
    names = [f"shard-{number:06d}.tar" for number in range(count)]
    for number, name in enumerate(names):
        (folder / name).write_bytes(b"%06d" % number)
    files = FolderFiles(folder)
    files.use(names)
    return files


def _expect_all(files: FolderFiles, count: int) -> None:
    for number in range(count):
        parts = files.here(number, 0, 6)
        assert parts is not None
        assert bytes(parts[0]) == b"%06d" % number


def test_so_many_shards_are_mapped_as_take_half_of_the_descriptors(tmp_path: Path, few_descriptors: int) -> None:
    fits = few_descriptors // 2 - 8 - len(source._open)  # what other tests' loaders have open counts as well
    files = _folder(tmp_path / "some", fits)
    for _ in range(2):
        _expect_all(files, fits)
        assert descriptors_below(tmp_path) == fits  # all stay mapped, one descriptor each


def test_folders_together_leave_half_of_the_descriptors(tmp_path: Path, few_descriptors: int) -> None:
    count = few_descriptors // 2
    first, second = _folder(tmp_path / "first", count), _folder(tmp_path / "second", count)
    for files in (first, second, first, second):
        _expect_all(files, count)
        assert descriptors_below(tmp_path) <= few_descriptors // 2 + 16
    view = first.here(0, 0, 6)
    assert view is not None
    del first, files
    assert bytes(view[0]) == b"000000"  # as long as the view is held
    del view, second
    assert descriptors_below(tmp_path) == 0


def test_a_mapped_shard_that_was_cut_short_is_not_touched(tmp_path: Path) -> None:
    files = _folder(tmp_path / "cut", 1)
    assert files.here(0, 0, 6) is not None
    os.truncate(tmp_path / "cut" / "shard-000000.tar", 3)
    assert files.here(0, 0, 6) is None
    with pytest.raises(ShardError, match="cut short"):
        files.read(0, 0, 6)


def test_reads_of_more_than_the_kernel_gives_at_once_are_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = _folder(tmp_path / "large", 1)
    content = os.urandom(10_100)
    (tmp_path / "large" / "shard-000000.tar").write_bytes(content)
    preadv = os.preadv  # really at most 0x7ffff000 bytes
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: preadv(fd, [buffers[0][:1000]], at))
    assert bytes(files.read(0, 0, len(content))) == content
    assert bytes(files.read(0, 50, 5_050)) == content[50:5_050]


def test_of_a_block_that_is_not_here_what_its_places_span_is_asked_for(
    make: Callable[..., str], settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATACACHE_PREFETCH", "0")
    data = Random(0).randbytes(2 * BLOCK_BYTES + 1000)
    asked, ask = [], DaemonClient._ask_until

    def noted(self: DaemonClient, request: BlocksRequest) -> Any:
        asked.extend((number, *span) for (_, number), span in zip(request.blocks, request.spans, strict=True))
        return ask(self, request)

    with api.open_snapshot(make({"shard.tar": data}), settings) as snapshot:
        files = SnapshotFiles(snapshot)
        files.use(["shard.tar"])
        places = [(900, 1000), (5, 10), (BLOCK_BYTES - 3, BLOCK_BYTES + 4), (2 * BLOCK_BYTES + 1, 2 * BLOCK_BYTES + 9)]
        monkeypatch.setattr(DaemonClient, "_ask_until", noted)
        found = files.read_all([(0, *place) for place in places])
    assert [bytes(part) for part in found if not isinstance(part, Exception)] == [data[slice(*at)] for at in places]
    assert sorted(asked) == [(0, 5, BLOCK_BYTES), (1, 0, 4), (2, 1, 9)]
