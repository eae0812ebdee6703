"""The sidecar: what goes in comes out, and anything else is refused."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from datacache.core.errors import ShardError
from datacache.shards.index import NO_CLASS, IndexWriter, Member, ShardIndex, index_name

SHARD = "shard-000003.tar"
SIZE = 2**40


def an_index(count: int = 5, *, far: int = 0) -> ShardIndex:
    writer = IndexWriter()
    for number in range(count):
        first = far + 1000 * number
        members = [Member("jpg" if number % 2 else "png", first, 700 + number, 2**64 - 1 - number)]
        members += [Member("json", first + 800, 40, number)] * (number % 3 > 0)
        members += [Member("seg.png", first + 900, 0, 7)] * (number % 3 > 1)
        writer.add(f"ordner/ü{number}", members, number if number % 2 else NO_CLASS)
    return writer.finish(SHARD, size_bytes=SIZE, digest="ab" * 16, format="webdataset", plan="p")


@pytest.mark.parametrize("far", [0, 2**33])
@pytest.mark.parametrize("count", [0, 1, 5, 70_000])
def test_what_was_encoded_is_decoded(count: int, far: int) -> None:
    index = an_index(count, far=far)
    raw = index.encode()
    found = ShardIndex.decode(raw, SHARD)
    assert found.encode() == raw == an_index(count, far=far).encode()
    assert (len(found), found.shard, found.size_bytes, found.digest) == (count, SHARD, SIZE, "ab" * 16)
    assert (found.format, found.plan) == ("webdataset", "p")
    for sample in range(0, count, max(1, count // 50)):
        assert found.key(sample) == f"ordner/ü{sample}"
        members = found.members(sample)
        assert members == index.members(sample)
        assert members[0] == (
            "jpg" if sample % 2 else "png",
            far + 1000 * sample,
            700 + sample,
            2**64 - 1 - sample,
        )
        first = (found.offsets[sample], found.sizes[sample], found.digests[sample])
        assert first == members[0][1:]
    assert found.offsets.dtype == found.digests.dtype == np.uint64
    assert found.classes.tolist() == [n if n % 2 else NO_CLASS for n in range(count)]


def test_a_sample_that_is_not_there_is_an_index_error() -> None:
    for sample in (-1, 5):
        with pytest.raises(IndexError):
            an_index().key(sample)


def test_a_sidecar_is_called_like_its_shard() -> None:
    assert index_name("shard-000001.tar") == "shard-000001.index" == index_name("shard-000001.tfrecord")


RAW = an_index().encode()


@given(st.integers(0, len(RAW) - 1), st.integers(1, 255))
def test_every_changed_byte_is_noticed(at: int, change: int) -> None:
    raw = bytearray(RAW)
    raw[at] ^= change
    with pytest.raises(ShardError) as caught:
        ShardIndex.decode(bytes(raw), SHARD)
    assert caught.value.shard == SHARD
    assert SHARD in str(caught.value)


@given(st.integers(0, len(RAW) - 1))
def test_every_cut_is_noticed(length: int) -> None:
    with pytest.raises(ShardError, match=SHARD):
        ShardIndex.decode(RAW[:length], SHARD)


@given(st.binary(max_size=200))
def test_something_else_is_refused(raw: bytes) -> None:
    for data in (raw, RAW[:8] + raw, RAW + raw[:1] + b"x"):
        with pytest.raises(ShardError, match=SHARD):
            ShardIndex.decode(data, SHARD)


def test_the_sidecar_of_another_shard_is_refused() -> None:
    with pytest.raises(ShardError, match=r"is the one of shard-000003\.tar"):
        ShardIndex.decode(RAW, "shard-000004.tar")


def test_columns_that_lie_are_refused_though_their_hash_is_right() -> None:
    for wrong in ({"size_bytes": 100}, {"extensions": ["jpg"]}, {"format": "zip"}, {"size_bytes": -1}):
        index = an_index()
        for name, value in wrong.items():
            setattr(index, name, value)
        with pytest.raises(ShardError, match="cannot be understood"):
            ShardIndex.decode(index.encode(), SHARD)


def test_an_index_is_used_in_place() -> None:
    raw = RAW
    found = ShardIndex.decode(raw, SHARD)
    assert not found.offsets.flags.owndata
    assert not found.offsets.flags.writeable


def test_an_index_on_shared_columns_says_the_same_and_lets_go_of_the_sidecar() -> None:
    count = 20_000
    raw = an_index(count).encode()
    tracemalloc.start()
    index = ShardIndex.decode(bytes(bytearray(raw)), "shard-000003.tar")
    offsets, sizes = index.offsets.astype(np.int64), index.sizes.astype(np.int64)
    digests, classes = index.digests.copy(), index.classes.copy()
    before = tracemalloc.get_traced_memory()[0]
    shared = index.sharing(offsets, sizes, digests, classes)
    samples = range(0, count, 999)
    expected = [(index.key(sample), index.members(sample)) for sample in samples]
    assert [(shared.key(sample), shared.members(sample)) for sample in samples] == expected
    assert (len(shared), shared.extensions, shared.digest) == (count, index.extensions, index.digest)
    del index, expected
    assert tracemalloc.get_traced_memory()[0] < before - 20 * count
    tracemalloc.stop()
