"""The uploader over real buckets: what is pending gets there, in order, once, and in bounded time."""

from __future__ import annotations

import threading

import pytest

from datacache.core.errors import ObjectNotFoundError, UploadError
from datacache.writeback.model import WRITER
from tests.conformance.faults import Fault
from tests.promises import promise
from tests.writeback.upload_rig import FILE, MIB, PREFIX, BucketOnCeph, Rig, only, until

pytestmark = pytest.mark.ceph


@promise("Modes, owners, times and symbolic links are kept in the bucket")
def test_files_links_and_folders_arrive_with_their_attributes(rig: Rig) -> None:
    rig.put("a/small.txt", b"hello")
    rig.put("a/large.bin", bytes(range(256)) * 1000)
    rig.put("empty", b"")
    rig.mkdir("a/")
    rig.uploader.flush(30)
    assert rig.objects() == {
        "a/": b"", "a/small.txt": b"hello", "a/large.bin": bytes(range(256)) * 1000, "empty": b"",
    }  # fmt: skip
    assert rig.metadata("a/small.txt")["mode"] == str(FILE.mode)
    assert rig.metadata("a/small.txt")["mtime"] == "1700000000.123456789"
    assert rig.metadata("a/small.txt")[WRITER].startswith(rig.area.id)
    assert rig.engine.pendings() == []


@promise("An object is replaced as a whole")
def test_a_file_of_many_parts_is_whole_and_leaves_no_upload(bucket: BucketOnCeph, rig: Rig) -> None:
    data = bytes(range(251)) * (40 * MIB // 251)
    rig.put("large.bin", data)
    rig.uploader.flush(60)
    assert rig.objects() == {"large.bin": data}
    assert bucket.uploads() == []
    assert rig.engine.upload_states() == {}


@promise("What is deleted within a second never gets to the bucket")
def test_what_is_deleted_before_it_is_due_never_reaches_the_bucket(bucket: BucketOnCeph) -> None:
    rig = bucket.rig(delay_s=30.0).start()
    rig.put("model.pt.tmp", b"x" * 1000)
    rig.rename(("model.pt.tmp", "model.pt"))
    rig.put("scratch", b"y")
    rig.remove("scratch")
    rig.uploader.flush(30)
    assert rig.objects() == {"model.pt": b"x" * 1000}
    assert not bucket.requests("PUT", "model.pt.tmp")
    assert not bucket.requests("PUT", "scratch")


@promise("What keeps changing is uploaded every `--upload-every` seconds (30) at the latest")
def test_a_key_that_keeps_changing_is_uploaded_all_the_same(bucket: BucketOnCeph) -> None:
    rig = bucket.rig(delay_s=0.5, upload_every_s=1.0).start()
    over = threading.Event()

    def write() -> None:
        number = 0
        while not over.wait(0.02):
            number += 1
            rig.put("log.txt", b"line\n" * number)

    writer = threading.Thread(target=write)
    writer.start()
    until(lambda: bucket.requests("PUT", "log.txt") >= 2)
    over.set()
    writer.join()
    rig.uploader.flush(30)
    last = rig.objects()["log.txt"]
    assert len(last) % 5 == 0


@promise("Versions of one key arrive whole, in their order, one at a time")
def test_versions_of_a_key_arrive_in_order_and_never_two_at_a_time(bucket: BucketOnCeph, rig: Rig) -> None:
    gate = threading.Event()
    bucket.proxy.add(Fault(wait=gate, only=only("PUT", "key")))
    rig.put("key", b"first")
    until(lambda: bucket.requests("PUT", "key") == 1)
    version = rig.put("key", b"second")
    rig.put("other", b"x")
    until(lambda: rig.engine.get("other") is None)  # time enough for others
    assert bucket.requests("PUT", "key") == 1
    gate.set()
    rig.uploader.wait_for("key", version, 30)
    assert rig.objects()["key"] == b"second"
    assert rig.engine.conflict_log.count == 0


@promise("Neither a rename (a copy inside the bucket, then a deletion) nor new attributes send the content again")
def test_a_rename_in_the_bucket_is_a_copy_then_a_deletion(bucket: BucketOnCeph, rig: Rig) -> None:
    rig.put("old", b"content" * 20_000)
    rig.uploader.flush(30)
    sent = bucket.requests("PUT", "old")
    rig.rename(("old", "new"))
    rig.uploader.flush(30)
    assert rig.objects() == {"new": b"content" * 20_000}
    assert bucket.requests("PUT", "old") == sent


@promise("Neither a rename (a copy inside the bucket, then a deletion) nor new attributes send the content again")
def test_two_names_that_were_swapped_are_swapped_in_the_bucket(rig: Rig) -> None:
    rig.put("one", b"1" * 100_000)
    rig.put("two", b"2" * 100_000)
    rig.put("three", b"3")
    rig.uploader.flush(30)
    rig.rename(("one", "two"), ("two", "three"), ("three", "one"))
    rig.uploader.flush(30)
    assert rig.objects() == {"two": b"1" * 100_000, "three": b"2" * 100_000, "one": b"3"}
    assert rig.engine.conflict_log.count == 0


@promise("A folder is renamed in one step, with all that the bucket has in it")
def test_a_folder_that_is_gone_is_deleted_after_all_that_was_in_it(bucket: BucketOnCeph, rig: Rig) -> None:
    rig.mkdir("d/")
    for number in range(20):
        rig.put(f"d/{number}", b"x")
    rig.uploader.flush(30)
    rig.rename(*((f"d/{number}", f"e/{number}") for number in range(20)))
    rig.remove("d/")
    rig.uploader.flush(30)
    assert sorted(rig.objects()) == sorted(f"e/{number}" for number in range(20))
    deletes = [request for request in bucket.proxy.requests if request.startswith("DELETE")]
    assert deletes[-1].endswith("/d/")


@promise("Neither a rename (a copy inside the bucket, then a deletion) nor new attributes send the content again")
def test_new_attributes_do_not_send_the_content_again(bucket: BucketOnCeph, rig: Rig) -> None:
    rig.put("file", b"z" * 100_000)
    rig.uploader.flush(30)
    rig.chmod("file", FILE._replace(mode=0o100755))
    rig.uploader.flush(30)
    assert rig.metadata("file")["mode"] == str(0o100755)
    assert rig.objects() == {"file": b"z" * 100_000}
    assert max(int(headers.get("content-length", 0)) for headers in bucket.proxy.headers[-5:]) < 1000


@promise("One upload at a time asks a store that does not answer, less and less often")
def test_a_store_that_is_away_is_waited_for_and_asked_by_one_upload_at_a_time(bucket: BucketOnCeph) -> None:
    rig = bucket.rig()
    rig.bucket.conditional()
    bucket.proxy.always(Fault(status=503, code="SlowDown"))
    for number in range(200):
        rig.put(f"file-{number}", b"x")
    before = len(bucket.proxy.requests)
    rig.start()
    until(lambda: rig.uploader.status()["store_problem"])
    with pytest.raises(UploadError, match="the time is over") as caught:
        rig.uploader.flush(1.5)
    assert "503" in str(caught.value)
    assert len(bucket.proxy.requests) - before < 60
    bucket.proxy.heal()
    rig.uploader.flush(30)
    assert len(rig.objects()) == 200
    assert rig.uploader.status()["failed_files"] == 0
    assert not rig.uploader.status()["store_problem"]


def test_keys_that_the_store_never_answers_do_not_hold_up_the_others(bucket: BucketOnCeph, rig: Rig) -> None:
    rig.bucket.conditional()
    bad = [f"bad-{number}" for number in range(5)]
    bucket.proxy.always(Fault(status=500, code="InternalError", only=lambda _method, path: "/bad-" in path))
    for key in bad:
        rig.put(key, b"x")
    until(lambda: rig.uploader.status()["store_problem"])
    for number in range(20):
        rig.put(f"good-{number}", b"x")
        until(lambda number=number: rig.engine.get(f"good-{number}") is None)
    assert sum(bucket.requests("PUT", key) for key in bad) < 60
    assert not rig.uploader.status()["store_problem"]
    bucket.proxy.heal()
    rig.uploader.flush(60)
    assert len(rig.objects()) == 25


def test_who_waits_for_a_version_waits_although_a_later_one_is_pending(bucket: BucketOnCeph, rig: Rig) -> None:
    rig.bucket.conditional()
    bucket.proxy.always(Fault(status=503, code="SlowDown", only=only("PUT", "file")))
    version = rig.put("file", b"first")
    rig.put("file", b"second")
    with pytest.raises(UploadError):
        rig.uploader.wait_for("file", version, 0.3)
    bucket.proxy.heal()
    rig.uploader.wait_for("file", version, 30)
    assert rig.objects() == {"file": b"second"}


@promise("A bucket that is gone or refuses us loses nothing and makes no conflict")
@promise("`dsctl flush` returns when all that was acknowledged before is in the bucket, or fails with the reason")
def test_what_is_refused_ends_a_flush_with_the_reason_and_holds_up_nothing_else(bucket: BucketOnCeph, rig: Rig) -> None:
    rig.put("first", b"x")
    rig.uploader.flush(30)
    bucket.proxy.always(Fault(status=403, code="AccessDenied", only=lambda _method, path: "secret" in path))
    for number in range(5):
        rig.put(f"secret-{number}", b"x")
    rig.put("public", b"x")
    with pytest.raises(UploadError, match="access is denied") as caught:
        rig.uploader.flush(60)
    assert len(caught.value.failures) == 5
    assert "secret-0" in str(caught.value)
    assert caught.value.hint
    assert sorted(rig.objects()) == ["first", "public"]
    status = rig.uploader.status()
    assert status["dirty_files"] == status["failed_files"] == 5
    bucket.proxy.heal()
    rig.uploader.flush(30)
    assert len(rig.objects()) == 7


@promise("A bucket that is gone or refuses us loses nothing and makes no conflict")
def test_a_bucket_that_is_not_there_loses_nothing_and_makes_no_conflict(bucket: BucketOnCeph) -> None:
    rig = bucket.rig()
    rig.put("kept", b"x")
    rig.start()
    rig.uploader.flush(30)
    client = bucket.server.client()
    client.delete_object(Bucket=bucket.name, Key=f"{PREFIX}kept")
    client.delete_bucket(Bucket=bucket.name)
    rig.put("kept", b"newer")
    rig.put("more", b"y")
    rig.remove("kept")
    rig.put("kept", b"newest")
    with pytest.raises(UploadError, match="no bucket"):
        rig.uploader.flush(60)
    assert rig.engine.conflict_log.count == 0
    bucket.server.make_bucket(bucket.name)
    rig.uploader.flush(30)
    assert rig.objects() == {"kept": b"newest", "more": b"y"}


@promise("`dsctl flush` returns when all that was acknowledged before is in the bucket, or fails with the reason")
def test_flush_follows_what_is_renamed_and_gives_up_nothing_that_is_deleted(bucket: BucketOnCeph) -> None:
    rig = bucket.rig(delay_s=30.0).start()
    gate = threading.Event()
    bucket.proxy.always(Fault(wait=gate, only=only("PUT", "")))
    for number in range(20):
        rig.put(f"file-{number:02}", b"x")
    flushed = threading.Thread(target=rig.uploader.flush, args=(30,))
    flushed.start()
    until(lambda: rig.uploader.status()["uploading"])
    rig.rename(("file-19", "renamed"))
    rig.remove("file-18")
    bucket.proxy.heal()
    gate.set()
    flushed.join(30)
    assert not flushed.is_alive()
    assert sorted(rig.objects()) == [*(f"file-{number:02}" for number in range(18)), "renamed"]


@promise("Versions of one key arrive whole, in their order, one at a time")
def test_an_upload_whose_file_is_overwritten_meanwhile_is_begun_anew(bucket: BucketOnCeph, rig: Rig) -> None:
    data = b"a" * (40 * MIB)
    gate = threading.Event()
    bucket.proxy.add(Fault(wait=gate, only=only("PUT", "file", query="partNumber=2&")))
    rig.put("file", data)
    until(lambda: any("partNumber=2&" in request for request in bucket.proxy.requests))
    content = rig.engine.get("file").content  # type: ignore[union-attr]
    rig.engine.tear(content.file, 0)  # type: ignore[union-attr]
    with open(rig.files.path(content.file), "r+b") as file:  # type: ignore[union-attr]
        file.write(b"b" * 10)
    gate.set()
    rig.uploader.flush(60)
    assert rig.objects()["file"] == b"b" * 10 + data[10:]
    assert bucket.uploads() == []


@promise("What an earlier mount left is uploaded by the next, or by `dsctl flush` without one")
def test_stopping_keeps_what_is_pending_for_the_next_start(bucket: BucketOnCeph) -> None:
    rig = bucket.rig().start()
    bucket.proxy.always(Fault(status=503, code="SlowDown", only=only("PUT", "")))
    rig.put("a", b"1")
    rig.put("b", b"2" * 100_000)
    until(lambda: rig.uploader.status()["failed_files"] == 2)
    bucket.rigs.remove(rig)
    rig.close()
    bucket.proxy.heal()
    again = bucket.rig().start()
    again.uploader.flush(30)
    assert again.objects() == {"a": b"1", "b": b"2" * 100_000}
    assert again.engine.conflict_log.count == 0


@promise("A process that lost an area to another node records and uploads nothing more")
def test_a_staging_area_that_was_taken_over_uploads_nothing_more(bucket: BucketOnCeph, rig: Rig) -> None:
    rig.put("a", b"1")
    rig.uploader.flush(30)
    owner = rig.area.folder / "owner.json"
    owner.write_text(owner.read_text().replace(rig.area.owner.token, "somebody else"))
    until(lambda: rig.uploader.status()["halted"])
    with rig.engine.lock:
        rig.engine.record([rig.engine.plan_change("b", FILE, None, base="")])
    with pytest.raises(UploadError, match="taken over"):
        rig.uploader.flush(30)
    with pytest.raises(ObjectNotFoundError):
        rig.bucket.head(f"{PREFIX}b")
    owner.write_text(owner.read_text().replace("somebody else", rig.area.owner.token))
    until(lambda: not rig.uploader.status()["halted"])
