"""Check a shard set at a URL: every byte of every shard, every sidecar, and that none is missing or another's.

Used by `api.verify_shards`. It reads shards past the cache, some at a time and some MiB of each. One thread, which has
others at work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from xxhash import xxh3_64, xxh3_128, xxh3_128_hexdigest

from datacache.core.concurrency import map_in_threads
from datacache.core.errors import ObjectChangedError, ObjectNotFoundError, ShardError
from datacache.shards.build import OURS, UNFINISHED, set_files
from datacache.shards.index import SHARDS_JSON, Member, ShardIndex, ShardInfo, ShardSet, index_name
from datacache.shards.place import Place
from datacache.store.base import ObjectInfo

THREADS = 4
_READ_BYTES = 8 * 2**20
_NAMED = 3


class ShardProblem(NamedTuple):
    """A file that is not as the set describes it."""

    shard: str
    message: str


def read_set(place: Place) -> ShardSet:
    """Read the list of the set at a place. Raise `ShardError` if it is missing or damaged, or the set not finished."""
    there = place.files()
    if SHARDS_JSON not in there:
        unfinished = "the shard set there is not finished" if UNFINISHED in there else f"it has no {SHARDS_JSON}"
        raise ShardError(
            f"there is no shard set at {place.url}: {unfinished}",
            shard=SHARDS_JSON,
            hint="Make one, or finish it: dsctl shard REF --to URL",
        )
    return ShardSet.decode(place.read(there[SHARDS_JSON]), place.url)


def verify(
    place: Place, found: ShardSet, *, progress: Callable[[int, int], None] = lambda _done, _total: None
) -> Iterator[ShardProblem]:
    """Yield what is wrong, in the order of the shards. `progress(done, total)` counts shards. Raise the store's errors
    where it cannot be asked."""
    there = place.files()
    by_digest = {shard.digest: shard.name for shard in found.shards}
    looked = map_in_threads(
        lambda shard: list(_verify_shard(place, shard, there, by_digest)), found.shards, threads=THREADS
    )
    for done, problems in enumerate(looked, 1):
        yield from problems
        progress(done, len(found.shards))
    for name in sorted(there.keys() - set(set_files(found))):
        if OURS.fullmatch(name):
            yield ShardProblem(name, "does not belong to the set")
    if UNFINISHED in there:
        yield ShardProblem(UNFINISHED, "says that the set is being written, or that this was broken off")


def _verify_shard(
    place: Place, shard: ShardInfo, there: dict[str, ObjectInfo], by_digest: dict[str, str]
) -> Iterator[ShardProblem]:
    index, wrong = None, "is missing"
    if (info := there.get(index_name(shard.name))) is not None:
        raw = place.read(info)
        try:
            index, wrong = ShardIndex.decode(raw, shard.name), ""
        except ShardError as exc:
            wrong = f"cannot be used: {exc.message}"
        if index is not None and (xxh3_128_hexdigest(raw) != shard.index_digest or index.digest != shard.digest):
            index, wrong = None, f"is of another {shard.name}"
    if wrong:
        yield ShardProblem(index_name(shard.name), wrong)
    info = there.get(shard.name)
    if info is None:
        yield ShardProblem(shard.name, "is missing")
        return
    if info.size_bytes < shard.size_bytes:
        yield ShardProblem(shard.name, f"is cut short: it has {info.size_bytes:,} of {shard.size_bytes:,} bytes")
        return
    try:
        digest, damaged = _read(place, info, index)
    except (ObjectChangedError, ObjectNotFoundError) as exc:
        yield ShardProblem(shard.name, f"changed while it was read: {exc.message}")
        return
    if digest == shard.digest:
        return
    other = by_digest.get(digest)
    if other is not None:
        yield ShardProblem(shard.name, f"is not itself: it has the bytes of {other}")
    elif info.size_bytes != shard.size_bytes:
        yield ShardProblem(shard.name, f"has {info.size_bytes:,} bytes and should have {shard.size_bytes:,}")
    elif damaged:
        more = f" and {len(damaged) - _NAMED:,} more" if len(damaged) > _NAMED else ""
        yield ShardProblem(shard.name, f"is damaged: the bytes of {', '.join(damaged[:_NAMED])}{more} are wrong")
    else:
        yield ShardProblem(shard.name, "is damaged, between its samples" if index is not None else "is damaged")


def _read(place: Place, info: ObjectInfo, index: ShardIndex | None) -> tuple[str, list[str]]:
    """Return the hash of a shard, and the members whose bytes differ from the index."""
    whole, damaged = xxh3_128(), []
    coming = _in_order(index)
    now = next(coming, None)
    hash = xxh3_64()
    ref = info.ref(place.store.url)
    for start in range(0, info.size_bytes, _READ_BYTES):
        stop = min(start + _READ_BYTES, info.size_bytes)
        data = memoryview(place.store.read(ref, start, stop))
        whole.update(data)
        while now is not None:  # members while they go by
            name, member = now
            end = member.offset + member.size_bytes
            if member.offset >= stop and member.size_bytes:
                break
            hash.update(data[max(0, member.offset - start) : max(0, end - start)])
            if end > stop:
                break
            if hash.intdigest() != member.digest:
                damaged.append(name)
            hash = xxh3_64()
            now = next(coming, None)
    return whole.hexdigest(), damaged


def _in_order(index: ShardIndex | None) -> Iterator[tuple[str, Member]]:
    for sample in range(len(index) if index is not None else 0):
        assert index is not None
        key = index.key(sample)
        for member in index.members(sample):
            yield f"{key}.{member.extension}", member
