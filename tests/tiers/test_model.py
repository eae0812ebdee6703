"""The tiers against a model: whatever happens to them and however they end, blocks that are kept stay and are right."""

from __future__ import annotations

import dataclasses
import random
import shutil
from pathlib import Path

import pytest

from datacache.core.ids import BLOCK_BYTES
from datacache.tiers import layout
from datacache.tiers.containers import open_region_size
from datacache.tiers.local import LocalBlocks
from datacache.tiers.memory import memory_dir
from datacache.tiers.recovery import open_tiers
from datacache.tiers.tier import Block
from datacache.tiers.writer import TierWriter
from tests.promises import promise
from tests.tiers.test_tiers import MIB, disk_usage, make_block, put

OBJECT_BYTES = BLOCK_BYTES + 200_001
DATASETS = ("first", "second")


class Model:
    """A cache with room for all that is put, and the blocks that must be in it."""

    def __init__(self, settings, rng: random.Random) -> None:
        self.settings, self.rng = settings, rng
        self.here: dict[bytes, Block] = {}
        self.gone: dict[bytes, Block] = {}
        self.pins: dict[str, str] = {}
        self.reader = LocalBlocks(settings.home, settings.ram_dir)
        """One that lives as long as the model, so it has mapped what changes."""
        self.seeds = iter(range(10_000))

    def blocks_of(self, dataset: str) -> list[Block]:
        return [block for block in self.here.values() if block.dataset == dataset]

    def put(self, writer: TierWriter) -> None:
        dataset, lane = self.rng.choice(DATASETS), self.rng.randrange(2)
        new = [make_block(next(self.seeds), self.rng.randrange(1, 300_000), dataset=dataset) for _ in range(8)]
        new = [dataclasses.replace(block, lane=lane) for block in new]
        if self.rng.random() < 0.3:
            seed = next(self.seeds)
            new += [self.large(seed, dataset, number) for number in self.rng.sample((0, 1), 2)]
        again = self.rng.sample(sorted(self.gone), min(3, len(self.gone)))
        new += [self.gone.pop(id) for id in again]
        assert all(put(writer, *new))
        self.here.update((block.id, block) for block in new)

    def large(self, seed: int, dataset: str, number: int) -> Block:
        size = min(BLOCK_BYTES, OBJECT_BYTES - number * BLOCK_BYTES)
        return make_block(seed, size, dataset=dataset, object_bytes=OBJECT_BYTES, number=number)

    def drop(self, writer: TierWriter) -> None:
        for id in self.rng.sample(sorted(self.here), min(4, len(self.here))):
            writer.call(lambda id=id: writer.drop(id)).result(10)  # type: ignore[misc]
            self.gone[id] = self.here.pop(id)

    def pin(self, writer: TierWriter) -> None:
        ref, dataset = f"ref{self.rng.randrange(3)}", self.rng.choice(DATASETS)
        objects = [block.object_id for block in self.blocks_of(dataset)]
        if ref not in self.pins:
            writer.call(lambda: writer.pin(ref, dataset, objects)).result(10)
            self.pins[ref] = dataset

    def unpin(self, writer: TierWriter) -> None:
        ref = f"ref{self.rng.randrange(3)}"
        known = writer.call(lambda: writer.unpin(ref)).result(10)
        assert known == (self.pins.pop(ref, None) is not None)

    def evict(self, writer: TierWriter) -> None:
        dataset = self.rng.choice((*DATASETS, None))
        writer.call(lambda: writer.evict(dataset)).result(10)
        for block in list(self.here.values()):
            if dataset in (None, block.dataset) and block.dataset not in self.pins.values():
                self.gone[block.id] = self.here.pop(block.id)
        self.reader.sweep()

    def check(self, writer: TierWriter, *, revived: bool = False) -> None:
        """`revived`: records of dropped blocks may have come back with the index made of them."""
        self.reader.refresh()
        fresh = LocalBlocks(self.settings.home, self.settings.ram_dir)
        for local in (self.reader, fresh):
            assert not [id for id, block in self.here.items() if not self.right(local, block)]
        assert fresh.missing(list(self.here)) == []
        for id, block in self.gone.items():
            assert fresh.copy(id) == (block.data if revived and fresh.has(id) else None)
        assert writer.pins() == self.pins
        for tier in writer.tiers:
            blocks = sum(len(some) for some in writer.entries(tier.name))
            assert blocks == writer.count_blocks(tier.name)
            assert revived or blocks <= len(self.here)
            files = {path.name for path in tier.folder.iterdir() if layout.container_of(path.name) is not None}
            assert files == {layout.container_name(id) for id in tier.containers}
            held = disk_usage_of(tier.folder, files)
            # A block in memory is a page at least; on the disk, a region takes room for its head before it is written.
            assert tier._container_bytes == sum(container.disk_bytes for container in tier.containers.values())
            # A dropped block of an object file that comes again after a restart counts twice until the next one.
            assert held <= tier._container_bytes
            if not any(id & layout.OBJECT_FILE for id in tier.containers):
                assert tier._container_bytes <= held + 4096 * len(files)
            for id, container in tier.containers.items():
                assert id & layout.OBJECT_FILE or container.disk_bytes <= open_region_size(tier.budget_bytes)
                wanted = {ref for ref, dataset in self.pins.items() if dataset == container.dataset}
                assert set(container.pinned_by) <= wanted

    def right(self, local: LocalBlocks, block: Block) -> bool:
        size = len(block.data)
        start, stop = sorted(self.rng.sample(range(size + 1), 2))
        out = bytearray(size)
        return (
            local.present(block.id)
            and local.copy(block.id) == block.data
            and local.copy_into(block.id, memoryview(out))
            and out == block.data
            and bytes(local.view(block.id, start, stop) or b"") == block.data[start:stop]
            and bytes(local.peek(block.id, start, stop) or b"") == block.data[start:stop]
        )


def disk_usage_of(folder: Path, names: set[str]) -> int:
    return sum((folder / name).stat().st_blocks * 512 for name in names)


@promise("After a clean stop nothing on disk is lost along with what was in memory")
@promise("A lost or torn index is made again")
@pytest.mark.parametrize("seed", range(4))
def test_what_is_kept_is_read_right_and_the_rest_is_not_whatever_happens(settings, seed, tmp_path):
    rng = random.Random(seed)
    settings = dataclasses.replace(settings, ram_bytes=256 * MIB, ssd_bytes=256 * MIB)
    model, revived = Model(settings, rng), False
    actions = (model.put, model.put, model.drop, model.pin, model.unpin, model.evict)
    cache, memory = layout.cache_dir(settings.home), memory_dir(settings.home, settings.ram_dir)
    for end in rng.sample(["closed", "machine restarted", "killed", "power lost"], 4):
        with open_tiers(settings) as writer:
            model.check(writer, revived=revived)
            for _ in range(8):
                rng.choice(actions)(writer)
            model.check(writer, revived=revived)
            assert disk_usage(cache) <= settings.ssd_bytes
            if end in ("killed", "power lost"):  # what a process leaves that ends here
                kept = tmp_path / end
                shutil.copytree(cache, kept / "cache")
                shutil.copytree(memory, kept / "memory")
        if end in ("killed", "power lost"):
            for now, then in ((cache, kept / "cache"), (memory, kept / "memory")):
                shutil.rmtree(now)
                shutil.copytree(then, now)
        if end in ("machine restarted", "power lost"):
            shutil.rmtree(memory)
        if end == "power lost":  # the checksums of object files were in the index
            revived = True
            for block in [block for block in model.here.values() if block.in_object_file]:
                model.gone[block.id] = model.here.pop(block.id)
        model.reader = LocalBlocks(settings.home, settings.ram_dir)
    with open_tiers(settings) as writer:
        model.check(writer, revived=revived)


def test_a_new_home_at_the_path_of_another_reads_nothing_of_it(settings):
    block = make_block(1)
    with open_tiers(settings) as writer:
        put(writer, block)
    shutil.rmtree(layout.cache_dir(settings.home))
    with open_tiers(settings) as writer:
        assert LocalBlocks(settings.home, settings.ram_dir).copy(block.id) is None
        assert not any(tier.containers for tier in writer.tiers)


@promise("Rotten bytes of the disk are never returned")
@pytest.mark.parametrize("object_bytes", [0, 2 * BLOCK_BYTES])
def test_a_flipped_bit_is_a_miss_for_what_touches_its_granule_and_for_no_other_bytes(settings, object_bytes):
    granule = 128 * 1024
    size = BLOCK_BYTES if object_bytes else 3 * granule + 77
    block = make_block(1, size, object_bytes=object_bytes)
    settings = dataclasses.replace(settings, ram_bytes=0)
    with open_tiers(settings) as writer:
        assert put(writer, block) == [True]
        for at in (0, granule - 1, granule, 2 * granule + 5, size - 1):
            first = at // granule * granule
            last = min(first + granule, size)
            for local in (LocalBlocks(settings.home, settings.ram_dir) for _ in range(2)):
                ((_, value),) = local._values(block.id)
                location = layout.unpack_location(value)
                path = layout.ssd_dir(settings.home) / layout.container_name(location.container)
                with path.open("r+b", buffering=0) as file:
                    file.seek(location.offset + at)
                    file.write(bytes([block.data[at] ^ 1]))
                    assert local.copy(block.id) is None
                    assert not local.copy_into(block.id, memoryview(bytearray(size)))
                    for start, stop in ((0, first), (last, size)):
                        if start < stop:
                            assert local.view(block.id, start, stop) == block.data[start:stop]
                    for start, stop in ((first, first + 1), (last - 1, last), (max(0, first - 1), first + 1)):
                        assert local.view(block.id, start, stop) is None
                    file.seek(location.offset + at)
                    file.write(bytes([block.data[at]]))
                assert local.copy(block.id) == block.data
