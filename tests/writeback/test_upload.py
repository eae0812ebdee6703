"""One key on its way to the bucket: somebody else's writes, answers that are lost, uploads that are cut off."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from contextlib import ExitStack
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from datacache.core.errors import UploadError
from datacache.settings import load_settings
from datacache.store.bucket import PROBE_PREFIX
from datacache.writeback.conflicts import conflict_key
from datacache.writeback.fetching import Fetching
from datacache.writeback.model import WRITER, UploadState
from datacache.writeback.remote.bucket import RemoteView
from datacache.writeback.sections import Load
from datacache.writeback.upload.uploader import Uploader, abort_old_uploads, remove_probes
from tests.conformance.faults import Answer, Fault, FaultProxy
from tests.conftest import ROOT
from tests.promises import promise
from tests.servers import RcloneS3
from tests.writeback.upload_rig import FILE, FOLDER, MIB, PREFIX, BucketOnCeph, Rig, only, until

pytestmark = pytest.mark.ceph


def lose(answer: Answer) -> None:
    """Do what was asked for, and yet answer that the store is out of order."""
    answer.status, answer.body = 503, b"<Error><Code>SlowDown</Code></Error>"


def kept_as(rig: Rig, key: str) -> str:
    """The name of our version after the one conflict there was."""
    assert [conflict.key for conflict in rig.engine.conflict_log.unsettled()] == [key]
    return rig.engine.conflict_log.unsettled()[0].kept_as


@promise("An object that was changed in the bucket is never overwritten in silence")
def test_somebody_elses_newer_object_keeps_its_name_and_ours_lies_beside_it(bucket: BucketOnCeph) -> None:
    rig = bucket.rig()
    rig.somebody_writes("model.pt", b"first")
    rig.learn("model.pt")
    rig.put("model.pt", b"ours")
    rig.somebody_writes("model.pt", b"theirs")
    rig.start()
    rig.uploader.flush(30)
    ours = kept_as(rig, "model.pt")
    assert ours.startswith("model.pt.conflict-")
    assert ours.endswith("-test-host")
    assert rig.objects() == {"model.pt": b"theirs", ours: b"ours"}
    assert rig.uploader.status()["conflicts"][0]["kept_as"] == ours
    assert rig.engine.pendings() == []


@promise("A conflict copy whose name is taken is tried again later, or gets another name of the original's")
@pytest.mark.parametrize("whose", ["a mount's", "nobody knows whose"])
def test_a_conflict_copy_whose_name_is_taken_is_tried_again_and_makes_no_row_of_conflicts(
    bucket: BucketOnCeph, monkeypatch: pytest.MonkeyPatch, whose: str
) -> None:
    def at_one_time(key: str, _at: float, *args: Any, **options: Any) -> str:
        return conflict_key(key, 1_700_000_000.0, *args, **options)

    monkeypatch.setattr("datacache.writeback.claims.conflict_key", at_one_time)
    ours = "notes.conflict-20231114T221320Z-test-host"
    rig = bucket.rig()
    rig.put("notes", b"ours")
    rig.somebody_writes("notes", b"theirs")
    is_mounts = whose == "a mount's"
    rig.bucket.write(PREFIX + ours, b"other", {WRITER: "another-1-2"} if is_mounts else {}, expect=None)
    rig.start()
    if is_mounts:
        rig.uploader.flush(30)
        assert rig.objects() == {"notes": b"theirs", ours: b"other", f"{ours}-2": b"ours"}
        return
    for _ in range(3):
        with pytest.raises(UploadError, match="has the name of this conflict copy"):
            rig.uploader.flush(30)
    assert rig.engine.conflict_log.count == 1
    rig.bucket.remove(PREFIX + ours, expect=None)
    rig.uploader.flush(30)
    assert rig.objects() == {"notes": b"theirs", ours: b"ours"}
    assert kept_as(rig, "notes") == ours


PAGES = {
    "200 with an ETag": Answer(200, [("Content-Type", "text/html"), ("ETag", '"5f2b"')], b"<html>Back soon</html>"),
    "404": Answer(404, [("Content-Type", "text/html")], b"<html>There is nothing here</html>"),
}


@promise("A web page in the store's place stores, deletes and changes nothing, and makes no conflict")
@pytest.mark.parametrize("page", PAGES.values(), ids=PAGES)
def test_what_is_written_while_a_web_page_answers_for_the_store_is_uploaded_later_and_is_no_conflict(
    bucket: BucketOnCeph, monkeypatch: pytest.MonkeyPatch, page: Answer
) -> None:
    rig = bucket.rig()
    for key in ("changed", "deleted", "renamed"):
        rig.put(key, b"old")
    rig.start()
    rig.uploader.flush(30)
    with monkeypatch.context() as patch:
        patch.setattr(bucket.proxy, "forward", lambda *_request: deepcopy(page))
        rig.put("changed", b"new")
        rig.put("small", b"new")
        rig.put("large", b"o" * (10 * MIB))
        rig.remove("deleted")
        rig.rename(("renamed", "moved"))
        for _ in range(2):
            with pytest.raises(UploadError):
                rig.uploader.flush(3)
    rig.uploader.flush(60)
    assert rig.objects() == {"changed": b"new", "small": b"new", "large": b"o" * (10 * MIB), "moved": b"old"}
    assert (rig.engine.conflict_log.count, rig.engine.losses.all()) == (0, [])


@promise("An object that was changed in the bucket is never overwritten in silence")
def test_a_new_file_does_not_replace_one_that_somebody_made_meanwhile(bucket: BucketOnCeph) -> None:
    rig = bucket.rig()
    rig.put("large", b"o" * (20 * MIB))
    rig.somebody_writes("large", b"theirs")
    rig.start()
    rig.uploader.flush(60)
    assert rig.objects() == {"large": b"theirs", kept_as(rig, "large"): b"o" * (20 * MIB)}
    assert bucket.uploads() == []


@promise("Objects written while a large file of ours is sent are not overwritten")
def test_what_somebody_writes_while_a_large_file_is_sent_is_not_overwritten(bucket: BucketOnCeph, rig: Rig) -> None:
    bucket.proxy.add(Fault(status=503, code="SlowDown", only=only("POST", "large", query="uploadId=")))
    rig.put("large", b"o" * (20 * MIB))
    until(lambda: rig.uploader.status()["failed_files"])
    rig.somebody_writes("large", b"theirs")
    rig.uploader.flush(60)
    assert rig.objects() == {"large": b"theirs", kept_as(rig, "large"): b"o" * (20 * MIB)}
    assert bucket.uploads() == []


@promise("Our own writes are no conflict, whatever answers were lost")
def test_the_same_bytes_written_by_somebody_else_are_no_conflict(bucket: BucketOnCeph) -> None:
    rig = bucket.rig()
    rig.put("notes", b"the same")
    rig.somebody_writes("notes", b"the same")
    rig.start()
    rig.uploader.flush(30)
    assert rig.objects() == {"notes": b"the same"}
    assert rig.metadata("notes")["mode"] == str(FILE.mode)
    assert rig.engine.conflict_log.count == 0


@promise("An object deleted there and changed here is written again")
def test_an_object_that_somebody_deleted_is_written_again(bucket: BucketOnCeph) -> None:
    rig = bucket.rig()
    rig.somebody_writes("notes", b"first")
    rig.learn("notes")
    rig.put("notes", b"ours")
    rig.bucket.remove(f"{PREFIX}notes", expect=None)
    rig.start()
    rig.uploader.flush(30)
    assert rig.objects() == {"notes": b"ours"}
    assert rig.engine.conflict_log.count == 0


@promise("Deleting or renaming what somebody changed takes nothing from them")
def test_a_deletion_of_what_somebody_changed_does_not_happen(bucket: BucketOnCeph) -> None:
    rig = bucket.rig()
    rig.somebody_writes("notes", b"first")
    rig.learn("notes")
    rig.remove("notes")
    rig.somebody_writes("notes", b"theirs")
    rig.start()
    rig.uploader.flush(30)
    assert kept_as(rig, "notes") == ""
    assert rig.objects() == {"notes": b"theirs"}


@promise("An object deleted there and changed here is written again")
def test_a_deletion_of_what_is_deleted_already_is_done(bucket: BucketOnCeph) -> None:
    rig = bucket.rig()
    rig.somebody_writes("notes", b"first")
    rig.learn("notes")
    rig.remove("notes")
    rig.bucket.remove(f"{PREFIX}notes", expect=None)
    rig.start()
    rig.uploader.flush(30)
    assert rig.engine.conflict_log.count == 0
    assert rig.engine.pendings() == []


@promise("Deleting or renaming what somebody changed takes nothing from them")
def test_a_rename_of_what_somebody_changed_takes_nothing_from_them(bucket: BucketOnCeph) -> None:
    rig = bucket.rig()
    rig.somebody_writes("old", b"first")
    rig.learn("old")
    rig.rename(("old", "new"))
    rig.somebody_writes("old", b"theirs")
    rig.start()
    rig.uploader.flush(30)
    assert rig.objects() == {"old": b"theirs"}
    assert [(loss.key, loss.size_bytes) for loss in rig.engine.losses.all()] == [("new", len(b"first"))]
    assert {conflict.key for conflict in rig.engine.conflict_log.unsettled()} == {"old"}


@promise("A renamed file whose source others took away is sent from this node's copy or cache, or told as lost")
def test_what_is_written_to_a_renamed_file_while_it_is_found_to_be_lost_is_kept(
    bucket: BucketOnCeph, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = bucket.rig()
    rig.somebody_writes("old", b"first")
    rig.learn("old")
    rig.rename(("old", "new"))
    rig.bucket.remove(f"{PREFIX}old", expect=None)
    save, written = rig.engine.losses.save, []

    def write_and_save() -> None:
        if not written:
            written.append(rig.put("new", b"ours"))
        save()

    monkeypatch.setattr(rig.engine.losses, "save", write_and_save)
    rig.start()
    rig.uploader.flush(30)
    assert written
    assert rig.objects() == {"new": b"ours"}
    assert (rig.engine.losses.all(), rig.engine.conflict_log.count) == ([], 0)


@promise("A renamed file whose source others took away is sent from this node's copy or cache, or told as lost")
def test_a_rename_of_what_somebody_changed_is_sent_from_here_where_its_bytes_are(bucket: BucketOnCeph) -> None:
    rig = bucket.rig()
    rig.put("old", b"o" * 100_000)
    rig.start()
    rig.uploader.flush(30)
    rig.engine.commit()  # what was uploaded is a clean copy now
    rig.uploader.stop(10)
    rig.rename(("old", "new"))
    rig.somebody_writes("old", b"theirs")
    again = Uploader(rig.engine, Fetching(rig.engine), delay_s=0.02)
    again.start()
    again.flush(30)
    again.stop(10)
    assert rig.objects() == {"old": b"theirs", "new": b"o" * 100_000}
    assert {conflict.key for conflict in rig.engine.conflict_log.unsettled()} == {"old"}


def test_keys_that_no_file_can_have_are_left_out_and_counted(
    bucket: BucketOnCeph, caplog: pytest.LogCaptureFixture
) -> None:
    rig = bucket.rig()
    for key in ("both", "both/inside", "a//b", "..", "fine", ".datacache-probe-0123456789abcdef"):
        rig.bucket.write(PREFIX + key, b"x", {}, expect=None)
    view = RemoteView(rig.engine, ttl_s=60.0, file_attributes=FILE, folder_attributes=FOLDER)
    for folder in ("", "a/"):
        for _ in range(3):
            try:
                with rig.engine.lock:
                    view.folder(folder)
            except Load as needs:
                needs.load()
    assert sorted(rig.engine.known.hidden()) == ["..", "a//", "both"]
    assert "2 objects in / cannot be shown as files" in caplog.text


@promise("Deleting or renaming what somebody changed takes nothing from them")
def test_a_rename_onto_what_somebody_made_keeps_both(bucket: BucketOnCeph) -> None:
    rig = bucket.rig()
    rig.somebody_writes("old", b"ours")
    rig.learn("old")
    rig.rename(("old", "new"))
    rig.somebody_writes("new", b"theirs")
    rig.start()
    rig.uploader.flush(30)
    assert rig.objects() == {"new": b"theirs", kept_as(rig, "new"): b"ours"}


@promise("Our own writes are no conflict, whatever answers were lost")
@pytest.mark.parametrize("size", [10, 100_000, 20 * MIB])
def test_an_answer_that_is_lost_after_the_write_is_no_conflict(bucket: BucketOnCeph, size: int) -> None:
    rig = bucket.rig()
    rig.bucket.conditional()
    last = only("POST", "file", query="uploadId=") if size > MIB else only("PUT", "file")
    bucket.proxy.add(Fault(change=lose, only=last))
    rig.put("file", b"o" * size)
    rig.start()
    rig.uploader.flush(60)
    assert rig.objects() == {"file": b"o" * size}
    assert rig.engine.conflict_log.count == 0
    assert rig.engine.pendings() == []
    assert bucket.uploads() == []
    rig.put("file", b"newer")  # and what is known of it is right
    rig.uploader.flush(30)
    assert rig.objects() == {"file": b"newer"}
    assert rig.engine.conflict_log.count == 0


@promise("A deletion stays one where the store forgot whose object it is, or a new file of the name is never closed")
@pytest.mark.parametrize("size", [10, 100_000, 5 * MIB])
def test_a_deletion_is_not_undone_by_a_store_that_forgot_whose_object_it_is(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """rclone's S3 server keeps metadata in memory: after its restart an object says no more that we wrote it."""
    root, staging = tmp_path / "buckets", tmp_path / "staging"
    (root / "runs").mkdir(parents=True)
    staging.mkdir()
    with ExitStack() as servers:
        first = servers.enter_context(RcloneS3(tmp_path / "first", root=root))
        proxy = servers.enter_context(FaultProxy(first.endpoint))
        for name, value in (first.env() | {"AWS_ENDPOINT_URL": proxy.url, "DATACACHE_STORE_TIMEOUT_S": "10"}).items():
            monkeypatch.setenv(name, value)
        rig = Rig(staging, "s3://runs", load_settings()).start()
        rig.bucket.conditional()

        def lose_and_go_away(answer: Answer) -> None:
            lose(answer)
            proxy.always(Fault(status=503, code="SlowDown", only=lambda _method, path: f"/{PREFIX}file" in path))

        proxy.add(Fault(change=lose_and_go_away, only=only("PUT", "file")))
        rig.put("file", b"o" * size)
        until(lambda: rig.uploader.status()["failed_files"])
        assert (root / "runs" / PREFIX / "file").stat().st_size == size
        rig.uploader.stop(10)
        rig.engine.close()  # the process that wrote it ends, and the next one knows what the journal says
        rig.bucket.close()
        first.close()  # killed, with what it had in memory
        proxy.pass_on_to(servers.enter_context(RcloneS3(tmp_path / "second", root=root)).endpoint)
        again = Rig(staging, "s3://runs", load_settings())
        try:
            again.remove("file")
            proxy.heal()
            again.start().uploader.flush(60)
            assert not (root / "runs" / PREFIX / "file").exists()
            assert again.engine.conflict_log.count == 0
        finally:
            again.close()


@promise("An object that the store has kept in part is sent again, and its source stays until then")
@pytest.mark.parametrize("key", ["file", "odd//file"])
def test_an_object_that_the_store_kept_in_part_is_sent_again(
    bucket: BucketOnCeph, rig: Rig, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    rig.bucket.conditional()
    forward, tries = bucket.proxy.forward, list[str]()

    def cut_short(method: str, path: str, headers: list[tuple[str, str]], body: bytes) -> Answer:
        if method != "PUT" or not only("PUT", key)(method, path) or len(tries) == 2:
            return forward(method, path, headers, body)
        tries.append(path)
        found = {name.lower(): value for name, value in headers}
        metadata = {name[11:]: value for name, value in found.items() if name.startswith("x-amz-meta-")}
        bucket.server.client().put_object(Bucket=bucket.name, Key=PREFIX + key, Body=body[:3], Metadata=metadata)
        return Answer(503, [], b"<Error><Code>SlowDown</Code></Error>")

    monkeypatch.setattr(bucket.proxy, "forward", cut_short)
    rig.put(key, b"all of it")
    rig.uploader.flush(30)
    assert len(tries) == 2
    assert rig.objects() == {key: b"all of it"}
    assert rig.engine.conflict_log.count == 0


@promise("Our own writes are no conflict, whatever answers were lost")
def test_a_file_that_changed_after_an_answer_was_lost_replaces_our_own_object(bucket: BucketOnCeph, rig: Rig) -> None:
    rig.bucket.conditional()
    bucket.proxy.add(Fault(change=lose, only=only("PUT", "file")))
    bucket.proxy.always(Fault(status=503, code="SlowDown", only=only("PUT", "file")))
    rig.put("file", b"first")
    until(lambda: rig.uploader.status()["failed_files"])
    rig.put("file", b"second")
    bucket.proxy.heal()
    rig.uploader.flush(30)
    assert rig.objects() == {"file": b"second"}
    assert rig.engine.conflict_log.count == 0


@promise("Our own writes are no conflict, whatever answers were lost")
def test_lost_answers_to_copies_and_deletions_are_no_conflicts(bucket: BucketOnCeph, rig: Rig) -> None:
    rig.put("old", b"x" * 100_000)
    rig.put("mode", b"y" * 100_000)
    rig.uploader.flush(30)
    bucket.proxy.add(
        Fault(change=lose, only=only("PUT", "new")),
        Fault(change=lose, only=only("DELETE", "old")),
        Fault(change=lose, only=only("PUT", "mode")),
    )
    rig.rename(("old", "new"))
    rig.chmod("mode", FILE._replace(mode=0o100600))
    rig.uploader.flush(30)
    rig.chmod("mode", FILE._replace(mode=0o100640))
    rig.uploader.flush(30)
    assert rig.objects() == {"new": b"x" * 100_000, "mode": b"y" * 100_000}
    assert rig.metadata("mode")["mode"] == str(0o100640)
    assert rig.engine.conflict_log.count == 0


_CHILD = """
import os, sys
from pathlib import Path
from datacache.settings import load_settings
from tests.writeback.upload_rig import MIB, Rig
rig = Rig(Path(sys.argv[1]), sys.argv[2], load_settings())
rig.put("large", bytes(range(200)) * (60 * MIB // 200))
rig.start()
rig.uploader.flush(120)
"""


@promise("A renamed file whose source others took away is sent from this node's copy or cache, or told as lost")
def test_a_source_that_the_store_lists_and_does_not_find_for_a_while_is_not_lost(bucket: BucketOnCeph) -> None:
    rig = bucket.rig()
    rig.bucket.write(PREFIX + "old", b"bytes", {}, expect=None)
    rig.learn("old")
    rig.rename(("old", "new"))
    asked: list[str] = []

    def not_found(method: str, path: str) -> bool:
        found = (
            only("HEAD", "old")(method, path) or only("GET", "old")(method, path) or only("PUT", "new")(method, path)
        )
        asked.extend([method] * found)
        return found

    bucket.proxy.always(Fault(status=404, code="NoSuchKey", only=not_found))
    rig.start()
    until(lambda: rig.uploader.status()["failed_files"])
    assert {"PUT", "HEAD"} <= set(asked)
    bucket.proxy.heal()
    rig.uploader.flush(30)
    assert rig.objects() == {"new": b"bytes"}
    assert rig.engine.losses.all() == []


@promise("An interrupted upload in parts goes on if it is of the current version")
def test_an_upload_that_a_kill_cut_off_is_gone_on_with(bucket: BucketOnCeph) -> None:
    bucket.proxy.always(Fault(wait=bucket.never, only=only("PUT", "large", query="partNumber=4&")))
    child = subprocess.Popen([sys.executable, "-c", _CHILD, str(bucket.folder), bucket.url], cwd=ROOT, env=os.environ)
    try:
        until(lambda: bucket.parts("large") == [1, 2, 3], timeout_s=60)
    finally:
        child.kill()
        child.wait()
    bucket.proxy.heal()
    sent = len(bucket.proxy.requests)
    rig = bucket.rig().start()
    rig.uploader.flush(60)
    assert rig.objects() == {"large": bytes(range(200)) * (60 * MIB // 200)}
    again = [request for request in bucket.proxy.requests[sent:] if "partNumber=" in request]
    assert len(again) == 1
    assert "partNumber=4&" in again[0]
    assert bucket.uploads() == []
    assert rig.engine.upload_states() == {}


@promise("An interrupted upload in parts goes on if it is of the current version")
def test_an_upload_of_an_older_version_is_not_gone_on_with(bucket: BucketOnCeph, rig: Rig) -> None:
    bucket.proxy.add(Fault(status=503, code="SlowDown", only=only("PUT", "large", query="partNumber=2&")))
    rig.put("large", b"a" * (20 * MIB))
    until(lambda: rig.uploader.status()["failed_files"])
    rig.put("large", b"b" * (20 * MIB))
    rig.uploader.flush(60)
    assert rig.objects() == {"large": b"b" * (20 * MIB)}
    assert bucket.uploads() == []


@promise("An interrupted upload in parts goes on if it is of the current version")
def test_an_upload_whose_file_is_gone_is_taken_back(bucket: BucketOnCeph) -> None:
    rig = bucket.rig()
    upload = rig.bucket.begin_upload(f"{PREFIX}deleted", {})
    rig.bucket.put_part(f"{PREFIX}deleted", upload, 1, b"x" * 100)
    rig.engine.save_upload("deleted", UploadState(1, upload, 16 * MIB))
    rig.start()
    until(lambda: not rig.engine.upload_states())
    assert bucket.uploads() == []


@promise("Unfinished uploads of others and of nobody are taken back when they are a week old, not before")
def test_unfinished_uploads_that_nobody_remembers_are_taken_back_when_they_are_old(bucket: BucketOnCeph) -> None:
    rig = bucket.rig()
    mine = rig.bucket.begin_upload(f"{PREFIX}mine", {})
    rig.bucket.begin_upload(f"{PREFIX}forgotten", {})
    rig.bucket.begin_upload("elsewhere", {})

    def clean(old_s: float) -> int:
        return abort_old_uploads(rig.bucket, PREFIX, lambda: {mine}, stopped=lambda: False, old_s=old_s)

    assert clean(60.0) == 0
    assert clean(-60.0) == 1
    assert sorted(upload["Key"] for upload in bucket.uploads()) == ["elsewhere", f"{PREFIX}mine"]


def test_only_objects_of_our_own_making_are_taken_for_what_a_store_was_tried_out_on(bucket: BucketOnCeph) -> None:
    rig = bucket.rig()
    ours = PROBE_PREFIX + "0123456789abcdef"
    theirs = [f"{PROBE_PREFIX}mine", f"{ours}.txt", f"{ours}/file", f"{PROBE_PREFIX}0123456789ABCDEF", f"{ours[:-1]}0"]
    for name in [ours, *theirs]:
        rig.somebody_writes(name, b"12345678" + b"9" * (name == theirs[-1]))
    remove_probes(rig.bucket, PREFIX, old_s=-60)
    assert sorted(rig.objects()) == sorted(theirs)


@promise("Unfinished uploads of others and of nobody are taken back when they are a week old, not before")
@pytest.mark.parametrize("parts", [0, 1])
def test_another_writers_upload_of_the_same_key_is_left_alone(bucket: BucketOnCeph, parts: int) -> None:
    """Ours was cut off while it was begun; somebody else sends the same key, and its first part is on the way."""
    client = bucket.server.client()
    theirs = client.create_multipart_upload(Bucket=bucket.name, Key=f"{PREFIX}file")["UploadId"]
    for number in range(1, parts + 1):
        client.upload_part(
            Bucket=bucket.name, Key=f"{PREFIX}file", UploadId=theirs, PartNumber=number, Body=b"t" * 5 * MIB
        )
    bucket.proxy.always(Fault(wait=bucket.never, only=only("POST", "file", query="uploads")))
    child = subprocess.Popen(
        [sys.executable, "-c", _CHILD.replace('"large"', '"file"'), str(bucket.folder), bucket.url],
        cwd=ROOT,
        env=os.environ,
    )
    try:
        until(lambda: any(r.startswith("POST ") and "uploads" in r for r in bucket.proxy.requests), timeout_s=60)
    finally:
        child.kill()
        child.wait()
    bucket.proxy.heal()
    rig = bucket.rig().start()
    rig.uploader.flush(60)
    assert [upload["UploadId"] for upload in bucket.uploads()] == [theirs]
    assert rig.objects() == {"file": bytes(range(200)) * (60 * MIB // 200)}


@pytest.mark.parametrize("upload_id", ["", "lost"])
def test_who_may_not_take_uploads_back_can_upload_all_the_same(bucket: BucketOnCeph, rig: Rig, upload_id: str) -> None:
    rig.engine.save_upload("file", UploadState(1, upload_id, 16 * MIB))
    rig.bucket.conditional()
    refused = Fault(
        status=403, code="AccessDenied", only=lambda method, path: method == "DELETE" or path.partition("?")[2] != ""
    )
    bucket.proxy.always(refused)
    rig.put("file", b"small")
    rig.uploader.flush(30)
    bucket.proxy.heal()
    assert rig.objects() == {"file": b"small"}
    assert rig.engine.upload_states() == {}


def test_a_bucket_that_lets_nobody_list_uploads_is_fine(bucket: BucketOnCeph) -> None:
    rig = bucket.rig()
    bucket.proxy.always(Fault(status=403, code="AccessDenied"))
    assert abort_old_uploads(rig.bucket, PREFIX, set, stopped=lambda: False) == 0


def test_who_edits_an_object_and_keeps_our_mark_loses_nothing(bucket: BucketOnCeph, rig: Rig) -> None:
    for key in ("notes", "deleted"):
        rig.put(key, b"ours, first")
    rig.uploader.flush(30)
    for key in ("notes", "deleted"):  # as s3fs-fuse does
        rig.bucket.write(PREFIX + key, b"theirs", rig.metadata(key), expect=None)
    rig.put("notes", b"ours, second")
    rig.remove("deleted")
    rig.uploader.flush(30)
    kept = {conflict.key: conflict.kept_as for conflict in rig.engine.conflict_log.unsettled()}
    assert kept["deleted"] == ""
    assert rig.objects() == {"notes": b"theirs", kept["notes"]: b"ours, second", "deleted": b"theirs"}


def test_a_file_whose_attributes_are_being_changed_can_be_renamed(bucket: BucketOnCeph, rig: Rig) -> None:
    data = b"p" * (20 * MIB)  # of several parts: its copy has another ETag
    rig.put("large", data)
    rig.uploader.flush(60)
    gate = threading.Event()
    bucket.proxy.add(Fault(wait=gate, only=only("PUT", "large")))
    rig.chmod("large", FILE._replace(mode=0o100600))
    until(lambda: rig.uploader.status()["uploading"])
    rig.rename(("large", "renamed"))
    gate.set()
    rig.uploader.flush(60)
    assert rig.objects() == {"renamed": data}
    assert rig.engine.conflict_log.count == 0
