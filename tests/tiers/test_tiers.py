"""Tiers: what is put is read back, sizes are hard limits, policies, pins, and what happens when a disk fails."""

from __future__ import annotations

import dataclasses
import gc
import os
import random
import shutil
import threading
from pathlib import Path

import pytest

from datacache.core.errors import CacheError
from datacache.core.ids import BLOCK_BYTES, BlockId, block_id
from datacache.tiers import layout
from datacache.tiers import writer as writer_module
from datacache.tiers.local import LocalBlocks
from datacache.tiers.memory import memory_dir
from datacache.tiers.recovery import open_tiers
from datacache.tiers.tier import Block
from datacache.tiers.writer import TierWriter, write_pins
from tests.promises import promise

MIB = 2**20


def make_block(seed: int, size: int = 10_000, *, dataset="mask", object_bytes: int = 0, number: int = 0) -> Block:
    data = random.Random(seed * 1000 + number).randbytes(size)
    obj = seed.to_bytes(16, "big")
    return Block(id=block_id(obj, number), object_bytes=object_bytes or size, number=number, data=data, dataset=dataset)


def put(writer, *blocks: Block) -> list[bool]:
    kept: list[bool] = []
    for block in blocks:
        writer.put(block, kept.append)
    writer.call(lambda: None).result(30)
    return kept


def read(settings, block: Block) -> bytes | None:
    found = LocalBlocks(settings.home, settings.ram_dir).view(block.id, 0, len(block.data))
    return None if found is None else bytes(found)


def disk_usage(folder: Path) -> int:
    return sum(path.lstat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


def test_a_full_batch_and_what_is_no_block_wait_for_nothing(settings, monkeypatch):
    monkeypatch.setattr(writer_module, "_LINGER_S", 3600.0)
    stored, begun, wait_for_more = threading.Semaphore(0), threading.Event(), TierWriter._batch

    def begin(writer, first):
        begun.set()
        return wait_for_more(writer, first)

    def put_batch(*blocks):
        begun.clear()
        for block in blocks:
            writer.put(block, lambda _: stored.release())
            assert begun.wait(30)  # a batch of which the first is still in the queue is taken for full by one too few
        assert all(stored.acquire(timeout=30) for _ in blocks)

    monkeypatch.setattr(TierWriter, "_batch", begin)
    with open_tiers(settings) as writer:
        put_batch(*(make_block(number) for number in range(64)))
        put_batch(*(make_block(number, BLOCK_BYTES, object_bytes=2 * BLOCK_BYTES) for number in range(4)))
        writer.put(make_block(100), lambda _: stored.release())
        assert writer.call(lambda: stored.acquire(timeout=0)).result(30)
        writer.put(make_block(101), lambda _: stored.release())
    assert stored.acquire(timeout=0)


@pytest.fixture
def small(settings):
    return dataclasses.replace(settings, ram_bytes=0, ssd_bytes=8 * MIB)


@pytest.mark.parametrize("size", [1, 100, 10_000, 131_072, 131_073, BLOCK_BYTES])
def test_a_block_is_read_back_from_every_tier_whole_and_in_parts(settings, size):
    block = make_block(1, size)
    with open_tiers(settings) as writer:
        assert put(writer, block) == [True]
        local = LocalBlocks(settings.home, settings.ram_dir)
        for start, stop in ((0, size), (size // 2, size), (0, size // 2), (size // 3, size // 2)):
            if start < stop:
                assert bytes(local.view(block.id, start, stop)) == bytes(block.data[start:stop])
                assert local._spots[block.id].tier == 0
        (settings_ram,) = [t for t in writer.tiers if t.name == "ram"]
        writer.call(lambda: settings_ram.evict(list(settings_ram.containers))).result(10)
        local = LocalBlocks(settings.home, settings.ram_dir)
        assert bytes(local.view(block.id, 0, size)) == block.data
        assert local._spots[block.id].tier == 1


def test_blocks_of_a_large_object_lie_in_one_file_at_their_own_offsets(settings):
    size = 2 * BLOCK_BYTES + 1000
    blocks = [make_block(7, min(BLOCK_BYTES, size - n * BLOCK_BYTES), object_bytes=size, number=n) for n in (2, 0)]
    with open_tiers(settings) as writer:
        assert put(writer, *blocks) == [True, True]
        for block in blocks:
            assert read(settings, block) == block.data
        files = [p for p in layout.ssd_dir(settings.home).iterdir() if p.name.startswith("o-")]
        assert len(files) == 1
        assert files[0].stat().st_size == size
        assert disk_usage(layout.ssd_dir(settings.home)) < 2 * BLOCK_BYTES  # block 1 is a hole
    assert read(settings, blocks[0]) == blocks[0].data


def test_what_was_put_is_there_after_a_clean_restart(settings):
    blocks = [make_block(n) for n in range(300)]
    with open_tiers(settings) as writer:
        put(writer, *blocks)
    with open_tiers(settings) as writer:
        assert all(read(settings, block) == block.data for block in blocks)
        assert put(writer, make_block(1000)) == [True]


@promise("A tier's size, its index counted, is a hard limit; a lowered one is reached at the next start")
@pytest.mark.parametrize("policy", ["keep", "lru", "ttl"])
def test_the_size_is_never_exceeded_and_nearly_used(small, policy):
    settings = dataclasses.replace(small, eviction=policy)
    sizes = random.Random(3)
    with open_tiers(settings) as writer:
        for batch in range(40):
            put(writer, *(make_block(batch * 100 + n, sizes.randrange(1, 60_000)) for n in range(20)))
            assert disk_usage(layout.cache_dir(settings.home)) <= settings.ssd_bytes
        assert writer.tiers[1].used_bytes <= settings.ssd_bytes
        if policy == "keep":
            assert disk_usage(layout.ssd_dir(settings.home)) > 0.9 * settings.ssd_bytes


@promise("`keep` admits until the tier is full and then keeps what is there")
def test_keep_admits_until_full_and_then_keeps_what_is_there(small):
    blocks = [make_block(n, 50_000) for n in range(400)]
    with open_tiers(small) as writer:
        kept = put(writer, *blocks)
        assert 0.8 * small.ssd_bytes < 50_000 * sum(kept) <= small.ssd_bytes
        assert [read(small, b) is not None for b in blocks] == kept
        assert put(writer, *(make_block(1000 + n, 50_000) for n in range(50))) == [False] * 50
        assert [read(small, b) is not None for b in blocks] == kept


def test_keep_gives_up_what_nobody_read_for_the_time_to_live(small):
    settings = dataclasses.replace(small, ttl_s=1e-9)
    with open_tiers(settings) as writer:
        put(writer, *(make_block(n, 50_000, dataset="old") for n in range(400)))
        fresh = [make_block(1000 + n, 50_000, dataset="new") for n in range(20)]
        assert all(put(writer, *fresh))


def test_lru_lets_the_least_recently_read_go(small):
    settings = dataclasses.replace(small, eviction="lru")
    with open_tiers(settings) as writer:
        old = [make_block(n, 50_000, dataset="old") for n in range(40)]
        put(writer, *old)
        others = [make_block(100 + n, 50_000, dataset="other") for n in range(40)]
        put(writer, *others)
        assert all(read(settings, block) for block in old)  # read now: more recent than the others
        put(writer, *(make_block(1000 + n, 50_000, dataset="new") for n in range(100)))
        assert sum(read(settings, b) is not None for b in old) > sum(read(settings, b) is not None for b in others)


@promise("What is pinned stays when another data set is scanned")
def test_a_pinned_data_set_survives_a_scan_of_another(small):
    settings = dataclasses.replace(small, eviction="lru")
    with open_tiers(settings) as writer:
        precious = [make_block(n, 50_000, dataset="precious") for n in range(40)]
        put(writer, *precious[:20])
        writer.call(lambda: writer.pin("precious@1", "precious", [b.object_id for b in precious])).result(10)
        put(writer, *precious[20:])
        put(writer, *(make_block(1000 + n, 50_000, dataset="scan") for n in range(500)))
        assert all(read(settings, block) == block.data for block in precious)
    with open_tiers(settings) as writer:  # pins are kept over a restart
        assert writer.pins() == {"precious@1": "precious"}
        put(writer, *(make_block(3000 + n, 50_000, dataset="scan") for n in range(500)))
        assert all(read(settings, block) == block.data for block in precious)
        assert writer.call(lambda: writer.unpin("precious@1")).result(10)
        put(writer, *(make_block(5000 + n, 50_000, dataset="scan") for n in range(500)))
        assert not any(read(settings, block) for block in precious)


def test_an_unpinning_that_was_cut_off_is_finished_at_the_next_start(settings):
    block = make_block(1)
    with open_tiers(settings) as writer:
        put(writer, block)
        writer.call(lambda: writer.pin("mask@1", "mask", [block.object_id])).result(10)
    write_pins(layout.pins_file(settings.home), {})  # the first step of it
    with open_tiers(settings) as writer:
        assert read(settings, block) == block.data
        assert writer.call(lambda: writer.evict("mask")).result(10)
        assert read(settings, block) is None


def test_what_was_fetched_ahead_goes_into_memory_only_where_the_ssd_has_no_room(settings):
    ahead = [dataclasses.replace(make_block(n, 50_000), ahead=True) for n in range(100)]
    with open_tiers(dataclasses.replace(settings, ssd_bytes=2 * MIB)) as writer:
        assert all(put(writer, *ahead))
        on_ssd = writer.count_blocks("ssd")
        assert 0 < on_ssd < len(ahead)
        assert writer.count_blocks("ram") == len(ahead) - on_ssd
        assert all(read(settings, block) == block.data for block in ahead)


def test_what_a_restart_of_the_machine_left_counts_as_used_when_it_was_written(small):
    with open_tiers(small) as writer:
        put(writer, make_block(1))
    shutil.rmtree(memory_dir(small.home, small.ram_dir))
    (region,) = layout.ssd_dir(small.home).iterdir()
    os.utime(region, (1e9, 1e9))
    with open_tiers(small) as writer:
        (id,) = writer.tiers[1].containers
        assert writer.tiers[1].last_used(id) == 1e9


def test_ttl_drops_what_nobody_read(small):
    settings = dataclasses.replace(small, eviction="ttl", ttl_s=1e-9)
    with open_tiers(settings) as writer:
        put(writer, make_block(1))
        writer.tiers[1].seal()
        writer.call(writer.tiers[1].evict_expired).result(10)
        assert read(settings, make_block(1)) is None


@promise("A tier's size, its index counted, is a hard limit; a lowered one is reached at the next start")
def test_a_size_set_lower_is_reached_at_the_next_start(small):
    with open_tiers(small) as writer:
        put(writer, *(make_block(n, 50_000) for n in range(200)))
    less = dataclasses.replace(small, ssd_bytes=3 * MIB)
    with open_tiers(less):
        assert disk_usage(layout.cache_dir(less.home)) <= less.ssd_bytes


@promise("Evicting, opening and closing containers disturbs no reader")
def test_an_evicted_region_stays_readable_for_whoever_has_it_open(small):
    block = make_block(1)
    with open_tiers(small) as writer:
        put(writer, block)
        local = LocalBlocks(small.home, small.ram_dir)
        view = local.view(block.id, 0, len(block.data))
        writer.call(lambda: writer.evict(None)).result(10)
        assert bytes(view) == block.data
        assert local.copy(block.id) in (block.data, None)  # until it is let go of
        assert read(small, block) is None
        local.sweep()
        assert local.copy(block.id) is None
        assert not list(layout.ssd_dir(small.home).iterdir())


def test_a_child_process_reads_after_a_fork(settings):
    block = make_block(1)
    with open_tiers(settings) as writer:
        put(writer, block)
        local = LocalBlocks(settings.home, settings.ram_dir)
        assert local.view(block.id, 0, 10) is not None
        pid = os.fork()
        if pid == 0:
            view = local.view(block.id, 0, len(block.data))
            os._exit(0 if view is not None and bytes(view) == block.data else 1)
        assert os.waitpid(pid, 0)[1] == 0
        assert read(settings, block) == block.data


def test_a_cache_of_another_version_is_left_alone_and_says_so(settings):
    with open_tiers(settings):
        pass
    (layout.cache_dir(settings.home) / "FORMAT").write_text("99")
    with pytest.raises(CacheError, match="99") as caught, open_tiers(settings):
        pass
    assert "DATACACHE_HOME" in caught.value.hint


@promise("After a clean stop nothing on disk is lost along with what was in memory")
def test_a_folder_in_memory_that_vanished_is_an_empty_ram_tier_and_costs_nothing_on_disk(settings):
    block, large = make_block(1), make_block(2, BLOCK_BYTES, object_bytes=2 * BLOCK_BYTES)
    with open_tiers(settings) as writer:
        put(writer, block, large)
    shutil.rmtree(memory_dir(settings.home, settings.ram_dir))
    with open_tiers(settings) as writer:
        assert not writer.tiers[0].containers
        assert read(settings, block) == block.data
        assert read(settings, large) == large.data


@promise("A full or failing disk is read around and costs speed, not bytes")
def test_a_full_disk_suspends_the_tier_and_loses_nothing(settings, tmp_path):
    """A small tmpfs as the SSD's folder runs full under the budget."""
    import subprocess

    small = dataclasses.replace(settings, ram_bytes=0)
    folder = layout.cache_dir(small.home)
    folder.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", folder], check=True)
    try:
        blocks = [make_block(n, 50_000) for n in range(200)]
        with open_tiers(small) as writer:
            kept = put(writer, *blocks)
            assert not all(kept)
            assert any(kept)
            assert "No space left" in writer.tiers[1].problem
            for block, is_kept in zip(blocks, kept, strict=True):
                assert read(small, block) == (block.data if is_kept else None)
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def test_a_limit_that_the_index_alone_exceeds_is_told(settings):
    with open_tiers(dataclasses.replace(settings, ssd_bytes=200_000)) as writer:
        assert "below the " in writer.tiers[1].problem
        assert "DATACACHE_SSD_BYTES" in writer.tiers[1].problem
        assert not writer.tiers[0].problem
    for enough in (0, 100 * 2**20):
        with open_tiers(dataclasses.replace(settings, ssd_bytes=enough)) as writer:
            assert not writer.tiers[1].problem


def test_an_unwritable_home_is_an_error_with_a_way_out(settings):
    blocked = dataclasses.replace(settings, home=Path("/proc/nowhere"))
    with pytest.raises(CacheError) as caught, open_tiers(blocked):
        pass
    assert "DATACACHE_HOME" in caught.value.hint


def test_ids_are_twenty_bytes():
    assert len(BlockId(make_block(1).id)) == 20


def test_a_ram_folder_that_does_not_exist_is_an_error_not_made(settings, tmp_path):
    wrong = dataclasses.replace(settings, ram_dir=tmp_path / "nowhere")
    with pytest.raises(CacheError, match="nowhere") as caught, open_tiers(wrong):
        pass
    assert "DATACACHE_RAM_DIR" in caught.value.hint
    assert not (tmp_path / "nowhere").exists()


@promise("Evicting, opening and closing containers disturbs no reader")
def test_containers_that_are_opened_while_others_are_closed_disturb_nobody(settings, tmp_path):
    """Python's collector may run finalizers, and so other threads, in the middle of going through a dictionary."""
    with open_tiers(settings) as writer:
        blocks = [make_block(n, 500_000, dataset=f"set{n}") for n in range(8)]
        assert all(put(writer, *blocks))
        local = LocalBlocks(settings.home, settings.ram_dir)
        assert all(local.copy(block.id) for block in blocks)
        maps = local.tiers[0]._maps
        before = dict(maps)

        class OpensAnother:
            def __init__(self):
                self.me = self  # only the collector ends it

            def __del__(self):
                if going_on:
                    maps[len(maps) + 1_000_000] = next(iter(before.values()))
                    OpensAnother()  # for the next collection

        going_on, thresholds = [True], gc.get_threshold()
        gc.freeze()  # what other tests have imported is not gone through each time: PyTorch alone takes seconds
        try:
            OpensAnother()
            gc.set_threshold(1)
            for _ in range(20):
                gc.collect()  # frees the tuples that Python keeps for the next ones, so that new ones are made
                local.sweep()
                local.unmap_pages()
        finally:
            going_on.clear()
            gc.set_threshold(*thresholds)
            gc.unfreeze()
        assert len(maps) > len(before)
        assert all(local.copy(block.id) == block.data for block in blocks)
