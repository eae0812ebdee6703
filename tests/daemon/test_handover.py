"""Hand blocks over to a node: it takes whole ones with their checksums, and no others."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
from collections.abc import Callable, Generator, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lmdb
import pytest

from datacache.cluster.members import DRAINED, DRAINING, Member, StaticMembers
from datacache.cluster.peers import Peers
from datacache.core.errors import DaemonError, UsageError
from datacache.core.ids import BLOCK_BYTES, block_id, object_id
from datacache.daemon import handover
from datacache.daemon.fetcher import Fetcher
from datacache.daemon.handover import HandOver, Receiver
from datacache.daemon.nodes import NodeRequests
from datacache.daemon.parts import OtherParts
from datacache.exchange.auth import Identity, welcome
from datacache.exchange.frames import Frame, Kind
from datacache.exchange.server import Answer, FrameServer
from datacache.exchange.wire import checksum_of
from datacache.tiers.layout import Location, pack_location
from datacache.tiers.parts import Part
from tests.daemon.test_fetcher import LARGE, Store, Tiers, small, until
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


class HeldTiers(LackingTiers):
    """Some blocks that are to be handed over."""

    tiers = (SimpleNamespace(name="ram", folder=Path()), SimpleNamespace(name="ssd", folder=Path()))
    broken: Exception | None = None

    def count_blocks(self, tier: str) -> int:
        return len(self.here)

    def entries(self, tier: str) -> Iterator[list[tuple[bytes, bytes]]]:
        if self.broken is not None:
            raise self.broken
        place = pack_location(Location(1, 0, len(DATA), bytes(8)))
        yield [(id, place) for id in self.here]

    def datasets(self, tier: str, containers: Iterable[int]) -> dict[int, str]:
        return dict.fromkeys(containers, "d")

    def unchecked_ref(self, id: bytes) -> None:
        return None


@contextlib.contextmanager
def leaving(
    monkeypatch: pytest.MonkeyPatch, answers: Callable[[Frame], bytes], *more: Member
) -> Iterator[tuple[Peers, HeldTiers, list[bytes]]]:
    """The node that drains, what it has, and what another one is asked, which answers so."""
    monkeypatch.setattr(handover, "_TRY_AGAIN_S", 0.0)
    asked: list[bytes] = []

    def answer(frame: Frame) -> Generator[Answer, None, None]:
        asked.append(frame.head)
        yield Answer(Kind.OK, body=b"{}" if frame.head == b"state" else answers(frame))

    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        members = (Member("leaves", "127.0.0.1:1", 1.0), Member("stays", address, 1.0), *more)
        me, other = (Identity("lab", member.id, b"0123456789abcdef") for member in members[:2])
        server = FrameServer(answer, most_bytes=2**20, welcome=lambda frames: welcome(frames, other))
        server.listen(listener)
        peers = Peers(StaticMembers("leaves", members), me, members[0].address, "", lambda _: "share")
        tiers = HeldTiers()
        tiers.here = {block_id(object_id(small(number)), 0): DATA for number in range(3)}
        yield peers, tiers, asked
        peers.close()
        server.close()


@pytest.mark.parametrize("fault", ["the disk fails", "a node answers nonsense"])
def test_draining_ends_and_tells_what_is_left_whatever_goes_wrong(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with leaving(monkeypatch, lambda _: b"") as (peers, tiers, asked):
        tiers.broken = lmdb.Error("Input/output error") if fault == "the disk fails" else None
        assert left_of_draining(peers, tiers) == 3
        assert asked.count(b"lacks") == (0 if fault == "the disk fails" else 3)


@promise("A node that drains owns nothing any more, and hands over what only it has")
def test_what_a_dead_node_would_own_goes_to_the_next_in_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[bytes] = []

    def answers(frame: Frame) -> bytes:
        if frame.head == b"lacks":
            return bytes([1]) * (len(frame.body) // len(ID))
        items = json.loads(bytes(frame.body[4 : 4 + struct.unpack_from("<I", frame.body)[0]]))
        kept.extend(bytes.fromhex(item[0]) for item in items)
        return json.dumps({"kept": [True] * len(items)}).encode()

    with leaving(monkeypatch, answers, Member("dead", "127.0.0.1:2", 1.0)) as (peers, tiers, _):
        assert len(peers.owners(list(tiers.here), without=[peers.address])) == 2
        assert left_of_draining(peers, tiers) == 0
        assert sorted(kept) == sorted(tiers.here)


def left_of_draining(peers: Peers, tiers: HeldTiers) -> int:
    """Return how many blocks no other node took."""
    hand_over = HandOver(peers, tiers, Fetcher(tiers, tiers, lambda _: Store(), 8))  # type: ignore[arg-type]
    peers.drain("")

    def leaves() -> Member:
        return next(member for member in peers.members.view.members if member.id == "leaves")

    until(lambda: leaves().state == DRAINED)
    hand_over.stop()
    return leaves().left


def test_a_node_takes_nothing_over_once_it_leaves_whichever_of_its_processes_is_asked(tiers: LackingTiers) -> None:
    members = StaticMembers("a", (Member("a", "127.0.0.1:1", 1.0), Member("b", "127.0.0.1:2", 1.0)))
    me = Identity("lab", "a", b"0123456789abcdef")
    peers = Peers(members, me, "127.0.0.1:1", "", lambda _: "share")
    asked = NodeRequests(peers, Fetcher(tiers, tiers, lambda _: Store(), 8), OtherParts(Path(), Part()))  # type: ignore[arg-type]
    assert asked.call(b"lacks", memoryview(ID)) == b"\1"
    members.set_state(DRAINING)  # as another process of the node shows it
    for op, sent in ((b"lacks", memoryview(ID)), (b"keep", body(item()))):
        with pytest.raises(DaemonError, match="drains"):
            asked.call(op, sent)
    assert not tiers.here


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
