"""A flipped byte, a truncated or deleted region, a torn index, a killed writer: every read is right or a miss."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys

import pytest

from datacache.core.ids import BLOCK_BYTES, ObjectRef, block_id, block_length, object_id
from datacache.tiers import layout
from datacache.tiers.local import LocalBlocks
from datacache.tiers.memory import memory_dir
from datacache.tiers.recovery import open_tiers
from datacache.tiers.tier import Block
from datacache.tiers.writer import TierWriter
from tests.promises import promise
from tests.tiers.test_tiers import make_block, put, read

BLOCKS = [make_block(n, 20_000) for n in range(200)]


@pytest.fixture
def filled(settings):
    """A closed cache with BLOCKS on the SSD and nothing in RAM."""
    import dataclasses

    settings = dataclasses.replace(settings, ram_bytes=0)
    with open_tiers(settings) as writer:
        assert all(put(writer, *BLOCKS))
    return settings


def region(settings):
    return max(layout.ssd_dir(settings.home).iterdir(), key=lambda path: path.stat().st_size)


def assert_right_or_missing(settings) -> int:
    """How many blocks are still there; none has other bytes."""
    found = [read(settings, block) for block in BLOCKS]
    assert all(data is None or data == block.data for data, block in zip(found, BLOCKS, strict=True))
    return sum(data is not None for data in found)


def test_a_flipped_byte_is_a_miss_and_the_neighbours_are_read(filled):
    path = region(filled)
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 1]))
    with open_tiers(filled):
        assert assert_right_or_missing(filled) in (len(BLOCKS) - 1, len(BLOCKS))


@promise("Rotten bytes of the disk are never returned")
def test_every_flipped_byte_of_a_block_is_found(filled):
    local = LocalBlocks(filled.home, filled.ram_dir)
    with open_tiers(filled):
        block = BLOCKS[3]
        assert local.view(block.id, 0, 10) is not None  # from now on it is read without asking the index
        ((_, value),) = local._values(block.id)
        location = layout.unpack_location(value)
        with (layout.ssd_dir(filled.home) / layout.container_name(location.container)).open("r+b") as file:
            for at in (0, 1, location.length // 2, location.length - 1):
                file.seek(location.offset + at)
                file.write(bytes([block.data[at] ^ 0x80]))
                file.flush()
                assert local.copy(block.id) is None
                assert local.view(block.id, 0, len(block.data)) is None
                file.seek(location.offset + at)
                file.write(bytes([block.data[at]]))
                file.flush()
                assert local.copy(block.id) == block.data
                assert local.copy(block.id) == block.data


@promise("A lost or torn index is made again")
@pytest.mark.parametrize("while_open", [False, True])
def test_a_truncated_region_is_a_miss_not_a_crash(filled, while_open):
    with open_tiers(filled) as writer:
        if while_open:  # a reader that has mapped the region before
            local = LocalBlocks(filled.home, filled.ram_dir)
            assert all(local.copy(block.id) for block in BLOCKS)
        os.truncate(region(filled), region(filled).stat().st_size // 2)
        assert 0 < assert_right_or_missing(filled) < len(BLOCKS)
        if while_open:
            assert all(
                found is None or bytes(found) == block.data
                for block in BLOCKS
                for found in (local.copy(block.id), local.view(block.id, 0, len(block.data)))
            )
        # What a reader then does: have it dropped, and put again.
        missing = [block for block in BLOCKS if read(filled, block) is None]
        for block in missing:
            writer.call(lambda block=block: writer.drop(block.id)).result(10)
        assert all(put(writer, *missing))
        assert assert_right_or_missing(filled) == len(BLOCKS)


def test_a_deleted_region_is_forgotten(filled):
    region(filled).unlink()
    assert_right_or_missing(filled)
    with open_tiers(filled) as writer:
        missing = [block for block in BLOCKS if read(filled, block) is None]
        assert missing
        assert all(put(writer, *missing))
        assert assert_right_or_missing(filled) == len(BLOCKS)


def tear(path, how: str) -> None:
    size = path.stat().st_size
    with path.open("r+b") as file:
        if how == "truncated":
            file.truncate(size // 2)
        elif how == "emptied":
            file.truncate(0)
        elif how == "noise":
            file.write(random.Random(1).randbytes(size))
        elif how == "half noise":
            file.seek(size // 2 // 4096 * 4096)
            file.write(random.Random(1).randbytes(size // 2))
        elif how == "zeros":
            file.seek(8192)
            file.write(bytes(size - 8192))


@promise("A lost or torn index is made again")
@pytest.mark.parametrize("how", ["truncated", "emptied", "noise", "half noise", "zeros"])
def test_a_torn_index_is_made_again_from_the_regions(filled, how):
    tear(layout.index_dir(memory_dir(filled.home, filled.ram_dir)) / "data.mdb", how)
    with open_tiers(filled) as writer:
        assert assert_right_or_missing(filled) == len(BLOCKS)
        assert put(writer, make_block(1000)) == [True]


def test_an_index_whose_reader_was_killed_is_read_once_more(settings, tmp_path, monkeypatch):
    block = make_block(1, BLOCK_BYTES, object_bytes=2 * BLOCK_BYTES)  # of a file of its own, which no region tells
    with open_tiers(settings) as writer:
        assert put(writer, block) == [True]
    (layout.cache_dir(settings.home) / "CLEAN").unlink()
    killed, program = tmp_path / "killed", tmp_path / "program"
    program.write_text(f'#!/bin/sh\n[ -e {killed} ] || {{ : >{killed}; kill -9 $$; }}\nexec {sys.executable} "$@"\n')
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    with open_tiers(settings):
        assert killed.exists()
        assert read(settings, block) == block.data


def test_a_lost_index_is_made_again_from_the_regions(filled):
    shutil.rmtree(layout.index_dir(memory_dir(filled.home, filled.ram_dir)))
    with open_tiers(filled):
        assert assert_right_or_missing(filled) == len(BLOCKS)


_READER = """
import sys
from pathlib import Path
from datacache.tiers.local import LocalBlocks
local = LocalBlocks(Path(sys.argv[1]), Path(sys.argv[2]))
block, known = bytes.fromhex(sys.argv[3]), bytes.fromhex(sys.argv[4])
data = local.copy(known)
assert data
print("ready", flush=True)
sys.stdin.readline()
"""


def start_reader(settings, then: str, *blocks: Block) -> subprocess.Popen[str]:
    """Start a process that has read the second block. It runs `then` when it is told to go on."""
    reader = subprocess.Popen(
        [sys.executable, "-c", _READER + then, settings.home, settings.ram_dir, *(block.id.hex() for block in blocks)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert reader.stdout.readline() == "ready\n"
    return reader


def test_an_index_truncated_under_an_open_reader_is_a_miss(filled):
    with open_tiers(filled):
        then = "assert local.view(block, 0, 10) is None\nassert local.copy(known) == data\n"
        reader = start_reader(filled, then, *BLOCKS[:2])
        path = layout.index_dir(memory_dir(filled.home, filled.ram_dir)) / "data.mdb"
        backup = path.read_bytes()
        os.truncate(path, 4096)
        reader.communicate("go\n", timeout=30)
        path.write_bytes(backup)
        assert reader.returncode == 0


@pytest.mark.parametrize("how", ["torn", "lost"])
def test_a_process_that_read_before_finds_the_index_that_was_made_again_after_a_miss(filled, how):
    later = make_block(1000)
    then = "assert local.view(block, 0, 10) is None\nlocal.refresh()\nassert local.view(block, 0, 10)\n"
    with open_tiers(filled):
        reader = start_reader(filled, then, later, BLOCKS[1])
    folder = layout.index_dir(memory_dir(filled.home, filled.ram_dir))
    if how == "lost":
        shutil.rmtree(folder)
    else:
        (folder / "data.mdb").rename(folder / "away.mdb")  # the reader keeps the file
        (folder / "data.mdb").write_bytes(b"torn")
    with open_tiers(filled) as writer:
        assert put(writer, later) == [True]
        reader.communicate("go\n", timeout=30)
        assert reader.returncode == 0


_WRITER = """
import random, sys
from datacache.settings import load_settings
from datacache.tiers.recovery import open_tiers
from tests.tiers.test_tiers import make_block
with open_tiers(load_settings()) as writer:
    print("ready", flush=True)
    for n in range(100_000):
        writer.put(make_block(n % 5000, 20_000), lambda kept, n=n: print(n, int(kept), flush=True))
"""


@promise("A daemon killed at any point, again and again, leaves only right blocks")
@pytest.mark.slow
def test_a_writer_killed_at_any_point_leaves_only_right_blocks(settings):
    rng = random.Random(5)
    acknowledged: set[int] = set()
    for _ in range(10):
        process = subprocess.Popen([sys.executable, "-c", _WRITER], stdout=subprocess.PIPE, text=True, cwd=os.getcwd())
        lines = rng.randrange(1, 400)
        for line in process.stdout:
            if line != "ready\n":
                number, kept = map(int, line.split())
                if kept:
                    acknowledged.add(number % 5000)
                lines -= 1
                if not lines:
                    break
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
    with open_tiers(settings):
        for number in range(5000):
            block = make_block(number, 20_000)
            data = read(settings, block)
            assert data == block.data or (data is None and number not in acknowledged)


# --- which large objects are unchecked ---

LARGE = ObjectRef("s3://b", "large/\udcff", 2 * BLOCK_BYTES + 5, "e", "v", 3)


def large_blocks(*numbers: int) -> list[Block]:
    return [
        Block(
            id=block_id(object_id(LARGE), number),
            object_bytes=LARGE.size_bytes,
            number=number,
            data=bytes(block_length(LARGE.size_bytes, number)),
            dataset="mask",
            unchecked=LARGE,
        )
        for number in numbers
    ]


def unchecked(writer: TierWriter) -> set[ObjectRef]:
    found = {ref for some in writer.unchecked() for ref in some}
    assert writer.is_unchecked(object_id(LARGE)) == (LARGE in found)
    return found


def mark_checked(writer: TierWriter) -> None:
    writer.call(lambda: writer.mark_checked(object_id(LARGE))).result(10)


@promise("A check that breaks off is counted, logged once, and tried again")
def test_an_object_is_unchecked_from_its_first_block_on_until_it_is_checked_and_again_when_a_block_comes_again(
    settings,
):
    with open_tiers(settings) as writer:
        assert put(writer, *BLOCKS[:3]) == [True] * 3
        assert unchecked(writer) == set()
        assert put(writer, *large_blocks(0)) == [True]
        assert unchecked(writer) == {LARGE}
        mark_checked(writer)
        assert unchecked(writer) == set()
        (block,) = large_blocks(0)
        writer.call(lambda: writer.drop(block.id)).result(10)
        assert put(writer, block) == [True]
        assert unchecked(writer) == {LARGE}


@promise("A check that breaks off is counted, logged once, and tried again")
@pytest.mark.parametrize("end", ["closed", "machine restarted", "killed"])
def test_it_stays_unchecked_and_stays_checked_over_a_restart(settings, end):
    with open_tiers(settings) as writer:
        put(writer, *large_blocks(0, 1, 2))
        if end == "killed":
            index = layout.index_dir(memory_dir(settings.home, settings.ram_dir))
            as_it_was = shutil.copytree(index, settings.home / "as it was")
    if end == "killed":
        (layout.cache_dir(settings.home) / "CLEAN").unlink()
        shutil.rmtree(index)
        shutil.copytree(as_it_was, index)
    elif end == "machine restarted":
        shutil.rmtree(memory_dir(settings.home, settings.ram_dir))
    with open_tiers(settings) as writer:
        assert unchecked(writer) == {LARGE}
        assert all(read(settings, block) == block.data for block in large_blocks(0, 1, 2))
        mark_checked(writer)
    with open_tiers(settings) as writer:
        assert unchecked(writer) == set()


@promise("A check that breaks off is counted, logged once, and tried again")
@pytest.mark.parametrize("how", ["evicted", "dropped", "deleted"])
def test_an_object_that_is_gone_is_not_unchecked_any_more(settings, how):
    with open_tiers(settings) as writer:
        put(writer, *large_blocks(0, 1))
        if how == "evicted":
            writer.call(lambda: writer.evict(None)).result(10)
            assert unchecked(writer) == set()
        elif how == "dropped":
            writer.call(lambda: writer.drop_object([block.id for block in large_blocks(0, 1)])).result(10)
            assert unchecked(writer) == set()
    if how == "deleted":
        for tier in writer.tiers:
            for path in tier.folder.glob("o-*"):
                path.unlink()
    with open_tiers(settings) as writer:
        assert unchecked(writer) == set()


def test_it_stays_unchecked_while_one_tier_has_something_of_it(settings):
    with open_tiers(settings) as writer:
        put(writer, *large_blocks(0, 1))
        ram = writer.tiers[0]
        writer.call(lambda: ram.evict(list(ram.containers))).result(10)
        assert unchecked(writer) == {LARGE}


@promise("A check that breaks off is counted, logged once, and tried again")
def test_a_lost_index_leaves_no_block_of_an_unchecked_object(settings):
    """Their checksums were in it, so their files go."""
    with open_tiers(settings) as writer:
        put(writer, *large_blocks(0, 1, 2))
    shutil.rmtree(layout.index_dir(memory_dir(settings.home, settings.ram_dir)))
    layout.saved_index(settings.home).unlink()
    with open_tiers(settings) as writer:
        assert unchecked(writer) == set()
        assert all(read(settings, block) is None for block in large_blocks(0, 1, 2))
