"""`Snapshot.rows.read_rows` on a real daemon: many files that are not on this node, asked for together."""

from __future__ import annotations

import os
import select

import pytest

from datacache import connect, create_snapshot, open_snapshot
from datacache.core.errors import DaemonUnavailableError, ObjectChangedError, ObjectNotFoundError
from datacache.core.ids import BLOCK_BYTES
from datacache.daemon.client import DaemonClient
from datacache.exchange.wire import MOST_BLOCKS
from datacache.tiers import layout
from datacache.tiers.memory import memory_dir

FILES = {f"{number:03d}.bin": bytes([number]) * (number * 1000) for number in range(2 * MOST_BLOCKS + 5)}
FILES |= {"large.bin": b"l" * (BLOCK_BYTES + 5), "whole.bin": b"w" * BLOCK_BYTES}


@pytest.fixture
def bucket(tmp_path):
    folder = tmp_path / "bucket"
    folder.mkdir()
    for name, data in FILES.items():
        (folder / name).write_bytes(data)
    return folder


@pytest.fixture
def reader(settings, bucket, monkeypatch):
    monkeypatch.setenv("DATACACHE_PREFETCH", "0")
    create_snapshot("mask", str(bucket))
    with open_snapshot("mask@latest") as snapshot:
        yield snapshot


@pytest.fixture
def asked(monkeypatch):
    """How many blocks each request names."""
    found = []
    ask = DaemonClient._ask_until

    def counted(self, request):
        found.append(len(request.blocks))
        return ask(self, request)

    monkeypatch.setattr(DaemonClient, "_ask_until", counted)
    return found


def read(reader):
    names = sorted(FILES)
    return names, reader.rows.read_rows([reader.rows.manifest.find(name.encode()) for name in names])


def test_files_that_are_not_here_come_in_as_few_requests_as_there_can_be(reader, asked):
    names, found = read(reader)
    assert [bytes(data) for data in found] == [FILES[name] for name in names]
    # The two blocks of the large one by themselves; the second, read ahead, is here already, perhaps.
    assert sorted(asked) in ([1, 1, 5, MOST_BLOCKS, MOST_BLOCKS], [1, 5, MOST_BLOCKS, MOST_BLOCKS])
    connect().cache_status()  # is told once all that came is in the tiers
    requests = len(asked)
    names, found = read(reader)
    assert [bytes(data) for data in found] == [FILES[name] for name in names]
    assert len(asked) == requests


def test_an_object_that_is_gone_or_changed_is_an_error_in_its_place(reader, bucket):
    (bucket / "010.bin").unlink()
    (bucket / "020.bin").write_bytes(b"other")
    names, found = read(reader)
    failed = {name: data for name, data in zip(names, found, strict=True) if isinstance(data, Exception)}
    assert sorted(failed) == ["010.bin", "020.bin"]
    assert isinstance(failed["010.bin"], ObjectNotFoundError)
    assert isinstance(failed["020.bin"], ObjectChangedError)
    whole = {name: bytes(data) for name, data in zip(names, found, strict=True) if name not in failed}
    assert whole == {name: data for name, data in FILES.items() if name not in failed}


def break_the_cache(settings):
    """Change bytes of all blocks in both tiers behind the back of the daemon, which starts anew."""
    connect().stop()
    for folder in (layout.ssd_dir(settings.home), memory_dir(settings.home, settings.ram_dir)):
        for path in (path for path in folder.iterdir() if layout.container_of(path.name) is not None):
            with path.open("r+b") as file:
                data = bytearray(file.read())
                data[4096::4096] = bytes(byte ^ 1 for byte in data[4096::4096])
                file.seek(0)
                file.write(data)
                os.fsync(file.fileno())


def test_a_block_that_is_broken_here_is_fetched_again(reader, settings):
    read(reader)
    break_the_cache(settings)
    names, found = read(reader)
    assert [bytes(data) for data in found] == [FILES[name] for name in names]


def test_without_a_daemon_the_store_gives_them(reader, monkeypatch):
    def away(*_, **__):
        raise DaemonUnavailableError("none can be started")

    monkeypatch.setattr(DaemonClient, "_ask", away)
    names, found = read(reader)
    assert [bytes(data) for data in found] == [FILES[name] for name in names]


def came_of(reader, name, start, stop):
    """Look for bytes on this node, ask for them and wait: None where nobody can be asked like that."""
    row = reader.rows.manifest.find(name.encode())
    assert reader.rows.read_local(row, start, stop) is None
    asked = reader.rows.ask_row(row, start, stop)
    if asked is None:
        return None
    assert select.select([asked], [], [], 20)[0] == [asked]
    return bytes(asked.take())


def test_bytes_are_asked_for_without_waiting_once_a_connection_is_known(reader):
    assert came_of(reader, "010.bin", 0, 10_000) is None  # there is no daemon
    reader.read("020.bin")
    assert came_of(reader, "010.bin", 5, 9_000) == FILES["010.bin"][5:9_000]
    assert came_of(reader, "whole.bin", 0, BLOCK_BYTES) == FILES["whole.bin"]
    assert came_of(reader, "large.bin", 7, 1000) == FILES["large.bin"][7:1000]
    assert came_of(reader, "large.bin", 0, BLOCK_BYTES + 5) is None  # two blocks


def test_what_is_broken_here_is_not_asked_for_without_waiting(reader, settings):
    read(reader)
    break_the_cache(settings)
    assert reader.read("020.bin") == FILES["020.bin"]  # over a connection that is free from then on
    assert came_of(reader, "100.bin", 0, 100_000) is None
    assert reader.read("100.bin") == FILES["100.bin"]


def test_what_the_daemon_sends_lands_in_the_reader_s_buffer(reader):
    row = reader.rows.manifest.find(b"large.bin")
    whole, rest = bytearray(BLOCK_BYTES), bytearray(4)
    sent = reader.rows.read_row(row, 0, BLOCK_BYTES, memoryview(whole))
    assert sent.obj is whole
    assert whole == FILES["large.bin"][:BLOCK_BYTES]
    sent = reader.rows.read_row(row, BLOCK_BYTES + 1, BLOCK_BYTES + 5, memoryview(rest))
    assert bytes(sent) == b"llll"
    other = memoryview(bytearray(BLOCK_BYTES))
    assert reader.rows.read_row(row, 0, BLOCK_BYTES, other) == whole  # from the tiers, or sent again


def test_an_error_of_a_read_into_a_buffer_is_the_error_and_no_bytes(reader, bucket):
    (bucket / "large.bin").write_bytes(b"other")
    with pytest.raises(ObjectChangedError):
        reader.rows.read_row(
            reader.rows.manifest.find(b"large.bin"), 0, BLOCK_BYTES, memoryview(bytearray(BLOCK_BYTES))
        )
