"""Hand blocks over to a node: it takes whole ones with their checksums, and no others."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from datacache.core.errors import UsageError
from datacache.core.ids import BLOCK_BYTES, block_id, object_id
from datacache.daemon.fetcher import Fetcher
from datacache.daemon.handover import Receiver
from datacache.daemon.parts import OtherParts
from datacache.exchange.wire import checksum_of
from datacache.tiers.parts import Part
from tests.daemon.test_fetcher import LARGE, Store, Tiers, small
from tests.promises import promise

DATA = b"0123456789"
ID = block_id(object_id(small(0)), 0)


class LackingTiers(Tiers):
    """RAM and a disk."""

    def __init__(self) -> None:
        super().__init__()
        self.in_ram: set[bytes] = set()

    def missing(self, ids, *, on_disk=False):
        return [at for at, id in enumerate(ids) if id not in self.here and (on_disk or id not in self.in_ram)]


@pytest.fixture
def tiers() -> LackingTiers:
    return LackingTiers()


@pytest.fixture
def receiver(tiers: LackingTiers) -> Receiver:
    return Receiver(Fetcher(tiers, tiers, lambda _: Store(), 8), OtherParts(Path(), Part()))


def body(*items: list[Any], data: bytes = DATA) -> memoryview:
    listed = json.dumps(items).encode()
    return memoryview(struct.pack("<I", len(listed)) + listed + data)


def item(*, id: bytes = ID, size: object = len(DATA), length: object = len(DATA), sum: bytes = b"") -> list[Any]:
    return [id.hex(), "d", size, length, (sum or checksum_of(DATA)).hex(), None]


@promise("A node that drains owns nothing any more, and hands over what only it has")
def test_a_block_that_is_lacking_is_kept(receiver: Receiver, tiers: LackingTiers) -> None:
    tiers.here[block_id(object_id(small(1)), 0)] = DATA
    tiers.in_ram.add(ID)  # which ends with RAM
    assert receiver.lacks(memoryview(b"".join([ID, *tiers.here]))) == bytes([1, 0])
    assert json.loads(receiver.keep(body(item()))) == {"kept": [True]}
    assert tiers.here[ID] == DATA
    tiers.keep = False
    assert json.loads(receiver.keep(body(item()))) == {"kept": [False]}


WRONG = {
    "a flipped bit": body(item(), data=b"1" + DATA[1:]),
    "another checksum": body(item(sum=bytes(8))),
    "too short an id": body(item(id=ID[:-1])),
    "a block that the object has not": body(item(id=ID[:16] + b"\0\0\0\1")),
    "fewer bytes than the block has": body(item(size=11)),
    "more bytes than the frame has": body(item(size=20, length=20)),
    "a size that is no number": body(item(size="10")),
    "an object without bytes": body(item(size=0)),
    "bytes of no block": body(item(), data=DATA + b"x"),
    "a part of a large block": body(item(id=block_id(object_id(LARGE), 1), size=2 * BLOCK_BYTES)),
    "no list": memoryview(b"\1\0\0\0{"),
    "nothing": memoryview(b""),
    "an item without fields": body([]),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=list(WRONG))
def test_nothing_is_kept_of_what_is_wrong(receiver: Receiver, tiers: LackingTiers, wrong: memoryview) -> None:
    with pytest.raises(UsageError, match="bad request"):
        receiver.keep(wrong)
    assert not tiers.here


def test_ids_have_a_length(receiver: Receiver) -> None:
    with pytest.raises(UsageError, match="no ids"):
        receiver.lacks(memoryview(b"x" * 21))
