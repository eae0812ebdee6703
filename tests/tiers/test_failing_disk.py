"""A disk that fails is an error to read around: no process dies of it, and memory and the store go on."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys

import pytest

from datacache.tiers import health, layout
from datacache.tiers.local import LocalBlocks
from datacache.tiers.memory import memory_dir
from datacache.tiers.recovery import open_tiers
from tests.failing_disk import failing_disk
from tests.promises import promise
from tests.tiers.test_tiers import make_block, put, read
from tests.writeback.test_journal_disk import mounted

BLOCKS = [make_block(n, 50_000 + n) for n in range(40)]

READER = """
import sys
from pathlib import Path
from datacache.tiers.local import LocalBlocks
local = LocalBlocks(Path(sys.argv[1]), Path(sys.argv[2]))
ids = [bytes.fromhex(id) for id in sys.argv[3:]]
print(sum(local.view(id, 0, None) is not None for id in ids), flush=True)
for _ in sys.stdin:
    out = bytearray(100_000)
    found = 0
    for id in ids:
        found += local.copy(id) is not None
        local.view(id, 10, 20), local.peek(id, 10, 20), local.copy_into(id, memoryview(out)[: len(out)])
    print(found, flush=True)
"""


@pytest.fixture
def disk(settings, tmp_path):
    folder = layout.cache_dir(settings.home)
    folder.mkdir(parents=True)
    with failing_disk(folder, tmp_path) as disk:
        yield disk


@pytest.fixture
def on_ssd(settings):
    return dataclasses.replace(settings, ram_bytes=0)


def reader(settings, blocks):
    ids = [block.id.hex() for block in blocks]
    command = [sys.executable, "-c", READER, settings.home, settings.ram_dir, *ids]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def ask(process):
    process.stdin.write("\n")
    process.stdin.flush()
    return int(process.stdout.readline() or "-1")


@promise("A disk that failed is tried now and then, and used again when it is mended")
@promise("A full or failing disk is read around and costs speed, not bytes")
def test_no_reader_dies_of_a_disk_that_fails_and_it_is_not_asked_each_time(disk, on_ssd):
    half = len(BLOCKS) // 2
    with open_tiers(on_ssd) as writer:
        assert all(put(writer, *BLOCKS))
        with reader(on_ssd, BLOCKS[:half]) as process:
            assert process.stdout.readline() == f"{half}\n"
            disk.fail("reads")
            assert ask(process) in range(half + 1)  # what is mapped may be there still
            process.stdin.close()
            assert process.wait(30) == 0
        disk.drop_pages()
        with reader(on_ssd, BLOCKS) as process:
            assert process.stdout.readline() == "0\n"
            assert ask(process) == 0
            process.stdin.close()
            assert process.wait(30) == 0
        local = LocalBlocks(on_ssd.home, on_ssd.ram_dir)
        tier = local.tiers[1]
        assert all(local.copy(block.id) is None for block in BLOCKS)
        assert tier.health._failures == 1  # one asked the disk, the others did not
        assert not local.has(BLOCKS[0].id)
        assert local.missing([block.id for block in BLOCKS]) == list(range(len(BLOCKS)))
        assert "Input/output error" in writer.tiers[1].problem
        assert put(writer, make_block(1000)) == [False]


@promise("A disk that failed is tried now and then, and used again when it is mended")
def test_a_disk_that_is_mended_is_read_again(disk, on_ssd, monkeypatch):
    monkeypatch.setattr(health, "_FIRST_PAUSE_S", 0.0)
    with open_tiers(on_ssd) as writer:
        assert all(put(writer, *BLOCKS))
        disk.fail("reads")
        assert read(on_ssd, BLOCKS[0]) is None
        assert writer.tiers[1].problem
        disk.mend()
        assert all(read(on_ssd, block) == block.data for block in BLOCKS)
        assert not writer.tiers[1].problem


def test_a_block_that_alone_cannot_be_read_is_told_as_failed(disk, on_ssd, monkeypatch):
    monkeypatch.setattr(health, "_FIRST_PAUSE_S", 0.0)
    with open_tiers(on_ssd) as writer:
        assert all(put(writer, *BLOCKS))
        local = LocalBlocks(on_ssd.home, on_ssd.ram_dir)
        disk.fail("reads")
        assert local.copy(BLOCKS[0].id) is None
        disk.mend()
        assert local.failed(BLOCKS[0].id)
        assert not local.failed(BLOCKS[0].id)
        assert not local.failed(BLOCKS[1].id)


@promise("A full or failing disk is read around and costs speed, not bytes")
def test_what_is_in_memory_is_read_while_the_disk_fails(disk, settings):
    with open_tiers(settings) as writer:
        assert all(put(writer, *BLOCKS))
        disk.fail("reads", "writes")
        assert all(read(settings, block) == block.data for block in BLOCKS)
        late = make_block(1000)
        assert put(writer, late) == [True]
        assert read(settings, late) == late.data
    assert os.listdir(memory_dir(settings.home, settings.ram_dir))


@promise("A full or failing disk is read around and costs speed, not bytes")
def test_a_daemon_that_starts_on_a_full_disk_has_room_for_its_own_files(on_ssd):
    with mounted(on_ssd.home, "-t", "tmpfs", "-o", "size=4m", "tmpfs") as disk:
        with open_tiers(on_ssd) as writer:
            assert all(put(writer, *BLOCKS))
        with pytest.raises(OSError, match="No space"):
            (disk / "others").write_bytes(bytes(2**23))
        with open_tiers(on_ssd):
            (disk / "run").write_bytes(bytes(2**18))
