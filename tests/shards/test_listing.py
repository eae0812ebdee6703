"""`shards.json`."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datacache.core.errors import ShardError
from datacache.shards.index import ShardInfo, ShardSet

SET = ShardSet(
    "webdataset",
    ("with_mask", "\udcff", 'a"b'),
    "faces@0123",
    {"max_size": 100, "shuffle": True, "seed": 3},
    tuple(ShardInfo(f"shard-{n:06d}.tar", 10 * n, f"{n:032x}", n + 1, "cd" * 16) for n in range(4)),
    plan="ef" * 16,
)
RAW = SET.encode()


def test_what_was_encoded_is_decoded() -> None:
    found = ShardSet.decode(RAW)
    assert found == SET
    assert (found.samples, found.size_bytes) == (10, 60)
    assert json.loads(RAW)["samples"] == 10


@given(st.integers(0, len(RAW) - 1), st.sampled_from(b'0123456789az ",:{}[]'))
def test_every_change_is_noticed_or_means_the_same(at: int, byte: int) -> None:
    raw = RAW[:at] + bytes([byte]) + RAW[at + 1 :]
    try:
        found = ShardSet.decode(raw, "s3://b/x")
    except ShardError as exc:
        assert "s3://b/x/shards.json" in str(exc)  # noqa: PT017
    else:
        assert found == SET


@given(st.integers(0, len(RAW) - 3))
def test_every_cut_is_noticed(length: int) -> None:
    with pytest.raises(ShardError):
        ShardSet.decode(RAW[:length])


@pytest.mark.parametrize("raw", [b"", b"[]", b"null", b'{"version": 1}', b'{"version": 2}', b"\xff", b"[" * 100_000])
def test_something_else_is_refused(raw: bytes) -> None:
    with pytest.raises(ShardError):
        ShardSet.decode(raw)


def test_a_shard_elsewhere_is_refused() -> None:
    info = ShardInfo("../shard-000000.tar", 1, "a", 1, "b")
    with pytest.raises(ShardError):
        ShardSet.decode(ShardSet("webdataset", (), "a@1", {}, (info,)).encode())
