"""Hand over to other nodes what they lack, when this one drains; tell the nodes of a list when it begins to serve.

Each new owner is asked which of its blocks it lacks, and is sent those. It checks and stores them before it answers, so
what a drained node has left behind is counted. Blocks are known by their ids here: nobody asks the store. Of a node
with several parts the first hands over what all have; whichever is handed something gives each part what is its own.

    lacks   ids, of 20 bytes each           → a byte for each: 1 where the block is not on disk there
    keep    length of the list, a list as JSON of [id, data set, bytes of the object, bytes, checksum, object or null],
            the blocks                      → {"kept": [true or false, …]}

`HandOver` is the end that drains, with one thread; `Receiver` the other one, which any thread may call. `warmer` asks
nodes what they lack, too.
"""

from __future__ import annotations

import json
import logging
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from datacache.cluster.members import DRAINED, DRAINING, Member
from datacache.cluster.peer import NodeConnection
from datacache.cluster.peers import Peers
from datacache.core.errors import DatacacheError, UsageError
from datacache.core.ids import BLOCK_BYTES, MAX_READABLE_BYTES, BlockId, ObjectId, block_count, block_length
from datacache.daemon.fetcher import Fetcher
from datacache.daemon.parts import OtherParts
from datacache.exchange.client import Connection
from datacache.exchange.frames import Buffer
from datacache.exchange.wire import MOST_BLOCKS, checksum_of, decode_ref, encode_ref, expect_text
from datacache.tiers.layout import OBJECT_FILE, container_name, unpack_location
from datacache.tiers.tier import Block, Tier
from datacache.tiers.writer import TierWriter

log = logging.getLogger(__name__)
_ID_BYTES = 20
_LENGTH = struct.Struct("<I")
_MOST_AT_A_TIME_BYTES = BLOCK_BYTES
_TELL_EVERY_S = 2.0
_TELL_AGAIN_S = 5.0
_TRIES, _TRY_AGAIN_S = 3, 1.0
"""Of giving blocks, when no other node takes any."""
_PASSED_OVER_S = 60.0
_STORED_S = 50.0
_Held = tuple[BlockId, str, int]
"""A block of this node, with its data set and the size of its object."""


class HandOver:
    """See the module."""

    def __init__(
        self, peers: Peers, writer: TierWriter, fetcher: Fetcher, *, tell_parts: Callable[[], object] = lambda: None
    ) -> None:
        """Start a thread that waits for the time to drain. For a node that serves. `tell_parts` shows the other parts
        the newest view."""
        self._peers, self._writer, self._fetcher, self._tell_parts = peers, writer, fetcher, tell_parts
        self._stopping = threading.Event()
        self._left = self._refused = 0
        self._told_at = 0.0
        self._connections: dict[str, NodeConnection] = {}
        self._passed_over: dict[str, float] = {}
        """The addresses of nodes that failed, and until when."""
        self._thread = threading.Thread(target=self._run, name="hand-over", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread soon."""
        self._stopping.set()
        self._peers.draining.set()
        self._thread.join(_TELL_EVERY_S)

    def _run(self) -> None:
        self._tell_until(self._peers.draining)  # those that were told that it drains, before it was restarted
        try:
            if not self._stopping.is_set():
                self._give_all()
        except Exception:
            if not self._stopping.is_set():
                log.exception("%d blocks are not handed over", self._left)
                self._end(self._left + self._refused)
        self._tell_until(self._stopping)

    def _tell_until(self, end: threading.Event) -> None:
        """Tell the nodes of a list the state of this one, again and again those that do not answer."""
        untold = self._peers.tell()
        while not end.wait(_TELL_AGAIN_S):
            untold = self._peers.tell(untold) if untold else []

    def _give_all(self) -> None:
        *memory, disk = self._writer.tiers
        self._left = self._writer.count_blocks(disk.name)
        self._left += sum(len(some) for _, some in self._entries(memory))
        self._report()
        while self._peers.serves:  # by this node's own view, which may be some seconds old
            if self._stopping.wait(_TELL_EVERY_S / 10):
                return
        self._tell_parts()  # what they still get is got before the index is gone through
        for tier, some in self._entries(self._writer.tiers):
            self._give(self._held(tier, some))
            self._left = max(0, self._left - len(some))
            if self._stopping.is_set():
                return
            if time.monotonic() - self._told_at > _TELL_EVERY_S:
                self._report()
        self._end(self._refused)

    def _entries(self, tiers: Sequence[Tier]) -> Iterator[tuple[Tier, list[tuple[bytes, bytes]]]]:
        """Yield what the index has of some tiers, some at a time. What is in RAM and on disk counts as on disk."""
        for tier in tiers:
            for entries in self._writer.entries(tier.name):
                for at in range(0, len(entries), MOST_BLOCKS * 16):
                    some = entries[at : at + MOST_BLOCKS * 16]
                    if tier is not self._writer.tiers[-1]:
                        ids = [BlockId(id) for id, _ in some]
                        some = [some[nth] for nth in self._fetcher.local.missing(ids, on_disk=True)]
                    yield tier, some

    def _end(self, left: int) -> None:
        for connection in self._connections.values():
            connection.close()
        log.info("this node has drained; %d blocks were taken by no other", left)
        self._peers.report(DRAINED, left)

    def _report(self) -> None:
        self._told_at = time.monotonic()
        self._peers.report(DRAINING, self._left + self._refused)

    def _held(self, tier: Tier, entries: Sequence[tuple[bytes, bytes]]) -> list[_Held]:
        """Return the blocks of some entries of the index that other nodes may have."""
        places = [(BlockId(id), unpack_location(value)) for id, value in entries]
        datasets = self._writer.datasets(tier.name, {place.container for _, place in places})
        found = []
        for id, place in places:
            dataset = datasets.get(place.container)
            if dataset is not None and self._peers.shares(dataset):
                size_bytes = place.length
                if place.container & OBJECT_FILE:
                    try:
                        size_bytes = (tier.folder / container_name(place.container)).stat().st_size
                    except OSError:  # evicted meanwhile
                        continue
                found.append((id, dataset, size_bytes))
        return found

    def _give(self, held: list[_Held]) -> None:
        """Give some blocks to their new owners. What a node that fails would own goes to the next in rank."""
        tries = _TRIES
        while held and not self._stopping.is_set():
            by_owner = self._by_owner(held)
            if not by_owner:
                tries -= 1
                if not tries or self._stopping.wait(_TRY_AGAIN_S):
                    self._refused += len(held)
                    return
                self._passed_over.clear()
                continue
            failed: list[_Held] = []
            for owner, blocks in by_owner.items():
                try:
                    self._give_to(owner, blocks)
                except (OSError, ValueError, DatacacheError) as exc:
                    log.warning("the node %s takes no blocks now: %s", owner.id, exc)
                    self._passed_over[owner.address] = time.monotonic() + _PASSED_OVER_S
                    gone = self._connections.pop(owner.address, None)
                    if gone is not None:
                        gone.close()
                    failed += blocks
            held = failed

    def _by_owner(self, held: list[_Held]) -> dict[Member, list[_Held]]:
        """Return some blocks by the owner among the nodes that are not passed over; nothing if there is none."""
        now_s = time.monotonic()
        passed_over = {address for address, until_s in self._passed_over.items() if now_s < until_s}
        try:
            owners = self._peers.owners([id for id, _, _ in held], without=passed_over)
        except LookupError:
            return {}
        return {owner: [held[at] for at in positions] for owner, positions in owners.items()}

    def _give_to(self, owner: Member, blocks: list[_Held]) -> None:
        connection = self._connections.get(owner.address)
        if connection is None:
            connection = self._connections[owner.address] = self._peers.connect(owner)
        for some in self._portions([blocks[at] for at in lacked(connection, [id for id, _, _ in blocks])]):
            self._refused += _hand(connection, some).count(False)

    def _portions(self, blocks: list[_Held]) -> Iterator[list[Block]]:
        """Yield blocks with their bytes, as many as go in one frame. Those that are broken or gone are left out."""
        some: list[Block] = []
        for id, dataset, size_bytes in blocks:
            data = self._fetcher.local.view(id, 0, None)
            if data is None:
                continue
            if some and (
                len(some) == MOST_BLOCKS or sum(len(b.data) for b in some) + len(data) > _MOST_AT_A_TIME_BYTES
            ):
                yield some
                some = []
            some.append(
                Block(
                    id=id,
                    object_bytes=size_bytes,
                    number=int.from_bytes(id[16:], "big"),
                    data=data,
                    dataset=dataset,
                    unchecked=self._writer.unchecked_ref(ObjectId(id[:16])),
                )
            )
        if some:
            yield some


def lacked(connection: Connection, ids: Sequence[BlockId]) -> list[int]:
    """Return the positions of the blocks that the disk of a node has not got. `OSError`, `DatacacheError`."""
    answer = connection.call("lacks", b"".join(ids))
    return [at for at, lacking in zip(range(len(ids)), answer, strict=True) if lacking]


class Receiver:
    """Takes over what another node hands over. Any thread."""

    def __init__(self, fetcher: Fetcher, parts: OtherParts) -> None:
        self._fetcher, self._parts = fetcher, parts

    def lacks(self, body: memoryview) -> bytes:
        """Return a byte for each of some ids: 1 where the disk of this node has not got the block."""
        if len(body) % _ID_BYTES:
            raise UsageError("bad request: those are no ids")
        ids = [BlockId(bytes(body[at : at + _ID_BYTES])) for at in range(0, len(body), _ID_BYTES)]
        found = bytearray(len(ids))
        for part, positions in self._parts.divide(ids).items():
            some = [ids[at] for at in positions]
            if part == self._parts.part.number:
                lacking = self._fetcher.not_on_disk(some)
            else:
                with self._parts.connected(part, _STORED_S) as connection:
                    lacking = lacked(connection, some)
            for nth in lacking:
                found[positions[nth]] = 1
        return bytes(found)

    def keep(self, body: memoryview) -> bytes:
        """Store blocks; return which the tiers kept, as JSON."""
        try:
            blocks = _decode(body)
        except (KeyError, TypeError, ValueError, struct.error, RecursionError) as exc:
            raise UsageError(f"bad request: these blocks cannot be kept: {exc}") from exc
        kept: dict[int, bool] = {}
        by_part = self._parts.divide([block.id for block in blocks])
        futures = {at: self._fetcher.take_over(blocks[at]) for at in by_part.pop(self._parts.part.number, ())}
        for part, positions in by_part.items():
            with self._parts.connected(part, _STORED_S) as connection:
                kept |= zip(positions, _hand(connection, [blocks[at] for at in positions]), strict=True)
        kept |= {at: future.result(_STORED_S) for at, future in futures.items()}
        return json.dumps({"kept": [kept[at] for at in range(len(blocks))]}).encode()


def _hand(connection: Connection, blocks: Sequence[Block]) -> list[bool]:
    """Have whoever is at the other end store blocks; return which it keeps."""
    items = [
        [
            *(block.id.hex(), block.dataset, block.object_bytes, len(block.data), checksum_of(block.data).hex()),
            None if block.unchecked is None else encode_ref(block.unchecked),
        ]
        for block in blocks
    ]
    listed = json.dumps(items).encode()
    parts: list[Buffer] = [_LENGTH.pack(len(listed)), listed, *(block.data for block in blocks)]
    kept: list[bool] = json.loads(bytes(connection.upload("keep", sum(map(len, parts)), parts)))["kept"]
    return kept


def _decode(body: memoryview) -> list[Block]:
    """Return the blocks of a request; `ValueError` and others if something is wrong with one."""
    [length] = _LENGTH.unpack_from(body)
    items = json.loads(bytes(body[_LENGTH.size : _LENGTH.size + length]))
    at = _LENGTH.size + length
    found = []
    for hexed, dataset, object_bytes, size_bytes, checksum, unchecked in items:
        id, data = bytes.fromhex(hexed), body[at : at + size_bytes]
        at += size_bytes
        if len(id) != _ID_BYTES or type(object_bytes) is not int or not 0 < object_bytes <= MAX_READABLE_BYTES:
            raise ValueError("one has no id, or a wrong size")
        number = int.from_bytes(id[16:], "big")
        if number >= block_count(object_bytes) or len(data) != block_length(object_bytes, number):
            raise ValueError(f"block {number} of an object of {object_bytes:,} bytes has {len(data):,}")
        if checksum_of(data).hex() != checksum:
            raise ValueError("the checksum of one is wrong")
        found.append(
            Block(
                id=BlockId(id),
                object_bytes=object_bytes,
                number=number,
                data=data,
                dataset=expect_text(dataset),
                ahead=True,
                unchecked=None if unchecked is None else decode_ref(unchecked),
            )
        )
    if at != len(body):
        raise ValueError("there are more bytes than blocks")
    return found
