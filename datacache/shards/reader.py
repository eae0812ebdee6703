"""`Shards`: the samples of a shard set by number, each verified by the checksum in its index.

Used by the datasets, also of TensorFlow, and by the task queue. It knows nothing of PyTorch. Any thread, after
`fork()`, and picklable. A sample takes 37 bytes of memory, its key, and 17 bytes for each of its files after the first
(21 in shards of more than 4 GiB)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest, xxh3_128_hexdigest

from datacache.core.concurrency import map_in_threads
from datacache.core.counters import count
from datacache.core.errors import DatacacheError, ObjectChangedError, ObjectNotFoundError, ShardError
from datacache.shards.index import NO_CLASS, SHARDS_JSON, Member, ShardIndex, ShardInfo, ShardSet, index_name
from datacache.shards.source import ShardFiles, cut_short, missing

_OPEN_THREADS = 16


class Shards:
    """An open shard set. Samples are numbered over the whole set.

    Opening looks at every shard's size and at every sidecar, and raises `ShardError` for the first that is missing, cut
    short or another's. With `lenient`, reading a sample of such a shard raises it instead; in a shard that is cut
    short, only for samples that are lost."""

    def __init__(self, files: ShardFiles, *, lenient: bool = False) -> None:
        self.files = files
        self._lenient = lenient
        raw = files.small(SHARDS_JSON)
        if raw is None:
            raise ShardError(
                f"{files.where} is no shard set: it has no {SHARDS_JSON}",
                shard=SHARDS_JSON,
                hint="Make one: dsctl shard REF --to URL. One that was interrupted is finished by the same command.",
            )
        self.set = ShardSet.decode(raw, files.where)
        names = [shard.name for shard in self.set.shards]
        files.use(names)
        opened = list(map_in_threads(self._open, range(len(names)), threads=_OPEN_THREADS))
        self.broken: dict[int, ShardError] = {}
        """Shards that cannot be used, by number."""
        indexes: list[ShardIndex | None] = []
        for number, found in enumerate(opened):
            if isinstance(found, ShardError):
                if not lenient:
                    raise found
                self.broken[number] = found
            indexes.append(found if isinstance(found, ShardIndex) else None)
        counts = [shard.samples for shard in self.set.shards]
        self.starts: NDArray[np.int64] = np.concatenate(([0], np.cumsum(counts, dtype=np.int64)))
        """The number of each shard's first sample, and the number of all samples."""
        self.offsets = self._column(indexes, "offsets", np.int64)
        self.sizes = self._column(indexes, "sizes", np.int64)
        self.digests = self._column(indexes, "digests", np.uint64)
        self.classes = self._column(indexes, "classes", np.int32, NO_CLASS)
        columns = self.offsets, self.sizes, self.digests, self.classes
        for number, index in enumerate(indexes):  # the indexes share the columns of the set
            mine = slice(int(self.starts[number]), int(self.starts[number + 1]))
            indexes[number] = None if index is None else index.sharing(*(column[mine] for column in columns))
        self._indexes = indexes

    def __len__(self) -> int:
        """Return the number of samples."""
        return int(self.starts[-1])

    def __repr__(self) -> str:
        return f"<Shards of {self.files.where}: {count(len(self), 'sample')} in {count(len(self.set.shards), 'shard')}>"

    def indexes(self) -> list[ShardIndex]:
        """Return the sidecars of the usable shards."""
        return [index for index in self._indexes if index is not None]

    def shards_of(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the numbers of the shards in which these samples lie."""
        return np.searchsorted(self.starts, samples, side="right").astype(np.int64) - 1

    def name(self, sample: int) -> tuple[str, str]:
        """Return the shard's name and the sample's key ('' where the sidecar is lost)."""
        shard, local = self._locate(sample)
        index = self._indexes[shard]
        return self.set.shards[shard].name, "" if index is None else index.key(local)

    def members(self, sample: int) -> list[Member]:
        """Return the files of a sample; the first one is the image, if it has one."""
        shard, local = self._locate(sample)
        return self._index(shard).members(local)

    def copy_here(self, samples: NDArray[np.int64], out: memoryview, starts: Sequence[int]) -> list[int]:
        """Copy the first members of these samples, as far as they are on this node, to `starts` in `out`, and verify
        the copies. Return the positions (in `samples`) of those that were not here or not right: read them by
        `read_first`."""
        here, left = self.files.here, []
        shards, offsets = self.shards_of(samples).tolist(), self.offsets[samples].tolist()
        sizes, digests = self.sizes[samples].tolist(), self.digests[samples].tolist()
        for at, (shard, offset, size, digest, start) in enumerate(
            zip(shards, offsets, sizes, digests, starts, strict=True)
        ):
            if not size:
                if self.broken:
                    left.append(at)
                continue
            parts = here(shard, offset, offset + size)
            if parts is None:
                left.append(at)
                continue
            copy = out[start : start + size]
            if len(parts) == 1:
                copy[:] = parts[0]
            else:
                end = 0
                for part in parts:
                    copy[end : end + len(part)] = part
                    end += len(part)
            if xxh3_64_intdigest(copy) != digest:
                left.append(at)
        return left

    def read_first(self, samples: Sequence[int]) -> list[bytes | memoryview | DatacacheError]:
        """Read the first members of these samples, wherever they are, all at once. An error takes the place of a member
        that cannot be read: `ShardError` that names shard and sample, or the store's. A block with several samples is
        fetched once."""
        found = self.files.read_all([self._place(sample) for sample in samples])
        return [self._verified(sample, data) for sample, data in zip(samples, found, strict=True)]

    def _verified(self, sample: int, data: bytes | memoryview | DatacacheError) -> bytes | memoryview | DatacacheError:
        """Return a first member, or the error about it."""
        shard, local = self._locate(sample)
        if shard in self.broken:
            return self.broken[shard]
        if isinstance(data, DatacacheError):
            return self._named(sample, data)
        if xxh3_64_intdigest(data) == int(self.digests[sample]):
            return data
        try:  # what lies here may be broken: `read` has it verified, and fetched again
            return self.read(sample, self._index(shard).members(local)[0])
        except DatacacheError as exc:
            return exc

    def _place(self, sample: int) -> tuple[int, int, int]:
        """Return the shard of a sample's first member, and where in it the member begins and ends."""
        offset = int(self.offsets[sample])
        return self._locate(sample)[0], offset, offset + int(self.sizes[sample])

    def first_here(self, sample: int) -> bytes | memoryview | None:
        """Return the first member, verified, if it is on this node, without a copy where it lies in one block. The
        caller must not keep it for long."""
        place = self._place(sample)
        parts = self.files.here(*place) if place[1] < place[2] else None
        if parts is None:
            return None
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        return data if xxh3_64_intdigest(data) == int(self.digests[sample]) else None

    def read(self, sample: int, member: Member) -> bytes | memoryview:
        """Read a member, verified."""
        shard, _ = self._locate(sample)
        if not member.size_bytes:
            return b""
        start, stop = member.offset, member.offset + member.size_bytes
        parts = self.files.here(shard, start, stop)
        if parts is not None:
            data = bytes(parts[0]) if len(parts) == 1 else b"".join(parts)
            if xxh3_64_intdigest(data) == member.digest:
                return data
        try:
            found = self.files.read(shard, start, stop)
        except DatacacheError as exc:
            raise self._named(sample, exc) from exc
        if xxh3_64_intdigest(found) != member.digest:
            shard_name, where = self.set.shards[shard].name, self.files.where
            message = f"the bytes of {shard_name} in {where} are not those that were written"
            hint = "The shard was damaged, or replaced by another one: copy it again, or see dsctl shard --check."
            raise self._of_sample(sample, message, hint)
        return found

    def _named(self, sample: int, error: DatacacheError) -> DatacacheError:
        """Return an error about a shard as one about a sample of it. Outages are of no sample."""
        if isinstance(error, ShardError | ObjectNotFoundError | ObjectChangedError):
            return self._of_sample(sample, str(error), error.hint)
        return error

    def _of_sample(self, sample: int, message: str, hint: str) -> ShardError:
        shard, key = self.name(sample)
        return ShardError(f"sample {key!r} of {shard} cannot be read: {message}", shard=shard, sample=key, hint=hint)

    def _locate(self, sample: int) -> tuple[int, int]:
        if not 0 <= sample < len(self):
            raise IndexError(f"{self.files.where} has {len(self):,} samples, and no sample {sample}")
        shard = int(np.searchsorted(self.starts, sample, side="right")) - 1
        return shard, sample - int(self.starts[shard])

    def _index(self, shard: int) -> ShardIndex:
        index = self._indexes[shard]
        if index is None:
            raise self.broken[shard]
        return index

    def _open(self, number: int) -> ShardIndex | ShardError:
        try:
            return self._checked(self.set.shards[number])
        except ShardError as exc:
            return exc

    def _checked(self, info: ShardInfo) -> ShardIndex:
        where = self.files.where
        raw = self.files.small(index_name(info.name))
        if raw is None:
            raise missing(where, index_name(info.name))
        index = ShardIndex.decode(raw, info.name)
        if xxh3_128_hexdigest(raw) != info.index_digest or len(index) != info.samples or index.digest != info.digest:
            raise ShardError(
                f"the sidecar {index_name(info.name)} in {where} is of another set",
                shard=info.name,
                hint="Copy the whole set again.",
            )
        size = self.files.size(info.name)
        if size is None:
            raise missing(where, info.name)
        if size < info.size_bytes and not self._lenient:
            error = cut_short(where, info.name, size, info.size_bytes)
            ends = index.offsets.astype(np.int64) + index.sizes.astype(np.int64)
            lost = np.flatnonzero(ends > size)
            if len(lost):
                error.sample = index.key(int(lost[0]))
                error.message += f"; sample {error.sample!r} is the first that is lost, of {len(lost):,}"
            raise error
        if size > info.size_bytes:
            raise ShardError(
                f"the shard {info.name} in {where} is another file: it has {size:,} bytes instead of "
                f"{info.size_bytes:,}",
                shard=info.name,
                hint="Copy it there again.",
            )
        return index

    def _column(self, indexes: Sequence[ShardIndex | None], name: str, dtype: Any, lost: int = 0) -> NDArray[Any]:
        """Return a column over all shards; `lost` stands for samples of unusable shards."""
        parts = [
            np.full(info.samples, lost, dtype) if index is None else getattr(index, name).astype(dtype)
            for info, index in zip(self.set.shards, indexes, strict=True)
        ]
        return np.concatenate(parts) if parts else np.zeros(0, dtype)
