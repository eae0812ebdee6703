"""When a key is due, and what waits for what."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest

from datacache.core.errors import StoreUnavailableError
from datacache.store.local.bucket import LocalBucket
from datacache.store.s3.bucket import S3Bucket
from datacache.writeback.claims import ContentReader
from datacache.writeback.model import Claim, Logged, Pending
from datacache.writeback.upload.board import UploadBoard
from datacache.writeback.upload.queue import IN_A_ROW, StoreHealth, UploadQueue, Wait
from datacache.writeback.upload.upload import Outcome
from datacache.writeback.upload.ways import PartsUpload, part_size
from tests.promises import promise
from tests.writeback.upload_rig import FILE, MIB


def drained(queue: UploadQueue, now: float) -> list[str]:
    found = []
    while (key := queue.pop(now)) is not None:
        found.append(key)
    return found


@promise("What keeps changing is uploaded every `--upload-every` seconds (30) at the latest")
def test_a_key_is_due_a_while_after_its_last_change_and_some_time_after_its_first_at_the_latest() -> None:
    queue = UploadQueue(delay_s=1.0, every_s=5.0)
    now = 0.0
    while now < 4.9:
        queue.note_change("log", now)
        assert queue.pop(now) is None
        now += 0.5
    assert queue.pop(5.0) == "log"
    queue.note_change("log", 5.5)  # while it is uploaded
    queue.end("log", 6.0)
    assert queue.pop(6.9) is None
    assert queue.pop(7.0) == "log"


@promise(
    "While programs change more than 64 files a second, what is due waits until they pause, for 10 seconds at most"
)
def test_what_is_due_waits_while_programs_change_many_files() -> None:
    queue = UploadQueue(delay_s=1.0, every_s=30.0)

    def change(first: int, last: int) -> float:
        for number in range(first, last):
            queue.note_change(f"file-{number}", number / 100)
        return last / 100

    now = change(0, 500)
    assert queue.pop(now) == "file-0"  # as while somebody flushes
    assert queue.pop(now, patient=True) is None
    assert queue.make_due("file-400", now)  # others wait for it
    assert queue.pop(now, patient=True) == "file-400"
    assert queue.park("file-400", "file-0")
    queue.end("file-0", now)
    assert queue.pop(now, patient=True) == "file-400"
    due = queue.next_due(now, patient=True)
    assert due is not None
    assert now < due <= now + 0.5
    assert queue.pop(due, patient=True) == "file-1"  # they have paused
    now = change(500, 1200)
    assert queue.pop(now, patient=True) == "file-2"  # it was due 10 s before
    queue.hurry = True
    assert queue.pop(now, patient=True) == "file-3"


def test_hurrying_helps_what_waits_to_be_quiet_but_not_what_failed() -> None:
    queue = UploadQueue(delay_s=10.0, every_s=30.0)
    queue.note_change("failing", 0.0)
    queue.make_due("failing", 0.0)
    assert queue.pop(0.0) == "failing"
    queue.retry("failing", 60.0)
    queue.note_change("new", 0.0)
    queue.hasten(1.0)
    assert drained(queue, 1.0) == ["new"]
    queue.hasten(2.0, retries=True)
    assert drained(queue, 2.0) == ["failing"]


def test_while_the_store_is_thought_to_be_away_another_key_is_tried_each_time() -> None:
    queue = UploadQueue(delay_s=0.0, every_s=1.0)
    for number in range(100):
        queue.note_change(f"bad-{number}", 0.0)
    queue.note_change("good", 0.0)
    found = []
    for now in range(1, 102):
        key = queue.pop_any(float(now))
        assert key is not None
        found.append(key)
        queue.retry(key, float(now))
    assert len(set(found)) == 101
    assert len(queue) == 101
    assert queue.pop_any(200.0) == found[0]


def test_a_key_waits_for_another_and_a_circle_is_told() -> None:
    queue = UploadQueue(delay_s=0.0, every_s=1.0)
    for key in ("a", "b", "c"):
        queue.note_change(key, 0.0)
    assert drained(queue, 0.0) == ["a", "b", "c"]
    assert queue.park("a", "b")
    assert queue.park("b", "c")
    assert not queue.park("c", "a")
    assert queue.blocker("a") == "c"
    queue.end("c", 1.0)
    assert drained(queue, 1.0) == ["b"]
    queue.end("b", 1.0)
    assert drained(queue, 1.0) == ["a"]


def test_a_hundred_thousand_keys_take_little_memory() -> None:
    keys = [f"folder/file-{number}" for number in range(100_000)]
    queue = UploadQueue(delay_s=1.0, every_s=30.0)
    tracemalloc.start()
    try:
        for number, key in enumerate(keys):
            queue.note_change(key, number / 1000)
        assert tracemalloc.get_traced_memory()[0] < 20 * 2**20
    finally:
        tracemalloc.stop()


def test_a_store_that_is_away_is_tried_by_one_at_a_time_and_less_and_less_often() -> None:
    health = StoreHealth()
    now, waits = 0.0, []
    for _ in range(IN_A_ROW - 1):
        assert not health.note_silence(now, "down")
    assert health.wait_s(now) == 0.0
    assert health.note_silence(now, "down")
    for _ in range(8):
        wait_s = health.wait_s(now)
        assert wait_s is not None
        waits.append(wait_s)
        now += wait_s
        assert health.wait_s(now) == 0.0
        assert health.begin()
        assert health.wait_s(now) is None  # until that one is over
        health.note_silence(now, "down")
        health.end()
    assert waits[0] <= 1.0
    assert 15.0 <= waits[-1] <= 30.0
    assert health.note_answer()
    assert health.wait_s(now) == 0.0


def test_who_waits_for_a_file_that_is_written_to_all_the_time_is_told() -> None:
    now = 0.0
    board = UploadBoard(delay_s=0.0, every_s=1.0, threads=1, clock=lambda: now)
    wait = Wait([Pending("log", FILE, Logged(3), "", 1, 0.0)])
    board.add_wait(wait, all_at_once=True)
    for _ in range(3):
        assert not board.is_hopeless_locked(wait)
        assert board.take(0) == ("log", False)
        board.end("log", Outcome(torn=True), None)
        now += 10.0
    assert board.is_hopeless_locked(wait)
    assert "written to all the time" in str(wait.error("", board.reason_of_locked))
    assert board.take(0) == ("log", False)
    board.end("log", Outcome(2), None)
    assert not wait


def test_an_upload_that_was_stopped_has_no_work_for_others(tmp_path: Path) -> None:
    bucket, key, data = LocalBucket(), f"{tmp_path}/a"[1:], bytes(20 * MIB)
    superseded = False
    parts = PartsUpload(
        bucket, key, bucket.begin_upload(key, {}), part_bytes=bucket.part_bytes, reader=ContentReader(len(data), data),
        claim=Claim(Pending("a", FILE, Logged(len(data)), "", 1, 0.0)), kept=(),
        sent=lambda _size, _now: None, stopped=lambda: superseded,
    )  # fmt: skip
    assert parts.help()
    assert parts.has_work
    superseded = True
    assert not parts.help()
    assert not parts.has_work
    assert parts.run() is None


def test_parts_are_larger_only_where_there_may_not_be_enough_of_them() -> None:
    local, s3 = LocalBucket(), S3Bucket("s3://b", lambda: pytest.fail("no request is made"))
    for size in (MIB, 10**12):
        assert part_size(size, local) == local.part_bytes
    assert part_size(s3.part_bytes * s3.max_parts, s3) == s3.part_bytes
    larger = part_size(10**12, s3)
    assert larger % MIB == 0
    assert 10**12 / larger <= s3.max_parts


def test_who_waits_for_a_key_that_alone_is_never_answered_is_told() -> None:
    now = 0.0
    board = UploadBoard(delay_s=0.0, every_s=1.0, threads=1, clock=lambda: now)
    wait = Wait([Pending("bad", FILE, Logged(3), "", 1, 0.0)])
    board.add_wait(wait, all_at_once=False)
    for tries in range(1, 6):
        assert not board.is_hopeless_locked(wait)
        assert board.take(0) == ("bad", False)
        board.fail("bad", StoreUnavailableError("HTTP 500", url="s3://b/bad"))
        if tries < 5:  # others are uploaded
            board.note_change("good", at_once=True)
            while (taken := board.take(0)) != ("good", False):
                assert taken is not None
                board.fail("bad", StoreUnavailableError("HTTP 500", url="s3://b/bad"))
            board.end("good", Outcome(1), None)
        now += 100.0
    assert board.is_hopeless_locked(wait)


def test_no_byte_of_another_version_is_sent(tmp_path: Path) -> None:
    """The store would list the part, and who goes on with the upload after a crash would take it for one of its own."""
    claim = Claim(Pending("a", FILE, Logged(20 * MIB), "", 1, 0.0))

    class Overwritten:
        size_bytes, reads = 20 * MIB, 0

        def read_into(self, buffer: memoryview, _start: int) -> int:
            self.reads += 1
            if self.reads == 3:
                claim.torn = True  # by who is about to change them
            return len(buffer)

    bucket, key, reader = LocalBucket(), f"{tmp_path}/a"[1:], Overwritten()
    upload = bucket.begin_upload(key, {})
    parts = PartsUpload(
        bucket, key, upload, part_bytes=bucket.part_bytes, reader=reader, claim=claim, kept=(),
        sent=lambda _size, _now: pytest.fail("a part of another version"), stopped=lambda: False,
    )  # fmt: skip
    assert parts.run() is None
    assert reader.reads == 3
    assert bucket.list_parts(key, upload) == []
