"""Test what checking a shard set finds."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from datacache import api
from datacache.core.errors import ShardError
from datacache.settings import Settings
from datacache.shards.build import Sharded
from datacache.shards.index import ShardIndex

pytestmark = pytest.mark.shared_home
ONE, TWO = "shard-000001.tar", "shard-000002.tar"


@pytest.fixture
def folder(make: Callable[..., str], shard: Callable[..., tuple[Path, Sharded]], drawn: Path) -> Path:
    """A whole set."""
    return shard(make(drawn))[0]


@pytest.fixture
def check(folder: Path, settings: Settings) -> Callable[[], dict[str, str]]:
    """Return what is wrong with it, by file."""
    return lambda: {p.shard: p.message for p in api.verify_shards(str(folder), settings=settings)[1]}


def test_a_whole_set_has_nothing_wrong(check: Callable[[], dict[str, str]]) -> None:
    assert check() == {}


def test_a_damaged_sample_is_named(folder: Path, check: Callable[[], dict[str, str]]) -> None:
    index = ShardIndex.decode((folder / "shard-000001.index").read_bytes(), ONE)
    for sample, member in ((1, 0), (2, 1)):
        found = index.members(sample)[member]
        raw = bytearray((folder / ONE).read_bytes())
        raw[found.offset + found.size_bytes - 1] ^= 4
        before = (folder / ONE).read_bytes()
        (folder / ONE).write_bytes(raw)
        assert check() == {ONE: f"is damaged: the bytes of {index.key(sample)}.{found.extension} are wrong"}
        (folder / ONE).write_bytes(before)


def test_damage_between_samples_is_found(folder: Path, check: Callable[[], dict[str, str]]) -> None:
    raw = bytearray((folder / ONE).read_bytes())
    raw[3] ^= 1
    (folder / ONE).write_bytes(raw)
    assert check() == {ONE: "is damaged, between its samples"}


def test_missing_cut_and_longer_shards_are_found(folder: Path, check: Callable[[], dict[str, str]]) -> None:
    (folder / "shard-000000.tar").unlink()
    raw = (folder / ONE).read_bytes()
    (folder / ONE).write_bytes(raw[:-512])
    (folder / TWO).write_bytes((folder / TWO).read_bytes() + bytes(512))
    found = check()
    assert found["shard-000000.tar"] == "is missing"
    assert "is cut short" in found[ONE]
    assert "should have" in found[TWO]


def test_swapped_shards_are_told_apart(folder: Path, check: Callable[[], dict[str, str]]) -> None:
    (folder / ONE).rename(folder / "x")
    (folder / TWO).rename(folder / ONE)
    (folder / "x").rename(folder / TWO)
    found = check()
    assert set(found) <= {ONE, TWO}
    assert all("cut short" in text or "it has the bytes of" in text for text in found.values())
    assert len(found) == 2


def test_swapped_lost_and_damaged_sidecars_are_found(folder: Path, check: Callable[[], dict[str, str]]) -> None:
    shutil.copy(folder / "shard-000001.index", folder / "shard-000002.index")
    (folder / "shard-000003.index").unlink()
    (folder / "shard-000004.index").write_bytes(b"x" * 100)
    found = check()
    assert "is the one of shard-000001.tar" in found["shard-000002.index"]
    assert found["shard-000003.index"] == "is missing"
    assert "no sidecar" in found["shard-000004.index"]
    assert len(found) == 3


def test_a_shard_too_many_is_found(folder: Path, check: Callable[[], dict[str, str]]) -> None:
    shutil.copy(folder / ONE, folder / "shard-000099.tar")
    assert check() == {"shard-000099.tar": "does not belong to the set"}


def test_where_there_is_no_set_it_says_so(tmp_path: Path, folder: Path, settings: Settings) -> None:
    with pytest.raises(ShardError, match="no shard set"):
        api.verify_shards(str(tmp_path / "nowhere"), settings=settings)
    (folder / "shards.json").write_bytes((folder / "shards.json").read_bytes().replace(b"webdataset", b"tfrecord", 1))
    with pytest.raises(ShardError, match=r"shards\.json is damaged"):
        api.verify_shards(str(folder), settings=settings)
