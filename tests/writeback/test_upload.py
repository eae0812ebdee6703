"""One key on its way to the bucket: somebody else's writes, answers that are lost, uploads that are cut off."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from datacache.store.bucket import PROBE_PREFIX
from datacache.testing.faults import Answer, Fault
from datacache.writeback import leftovers
from datacache.writeback.records import UploadState
from datacache.writeback.remote import Needs, RemoteView
from datacache.writeback.uploader import Uploader
from tests.conftest import ROOT
from tests.writeback.upload_rig import FILE, FOLDER, MIB, PREFIX, BucketOnCeph, Rig, only, until

pytestmark = pytest.mark.ceph


def lose(answer: Answer) -> None:
    """What was asked for is done, and yet the answer says that the store is out of order."""
    answer.status, answer.body = 503, b"<Error><Code>SlowDown</Code></Error>"


def kept_as(rig: Rig, key: str) -> str:
    """The name of our version after the one conflict there was."""
    assert [conflict.key for conflict in rig.engine.conflicts] == [key]
    return rig.engine.conflicts[0].kept_as


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


def test_a_new_file_does_not_replace_one_that_somebody_made_meanwhile(bucket: BucketOnCeph) -> None:
    rig = bucket.rig()
    rig.put("large", b"o" * (20 * MIB))
    rig.somebody_writes("large", b"theirs")
    rig.start()
    rig.uploader.flush(60)
    assert rig.objects() == {"large": b"theirs", kept_as(rig, "large"): b"o" * (20 * MIB)}
    assert bucket.uploads() == []


def test_what_somebody_writes_while_a_large_file_is_sent_is_not_overwritten(bucket: BucketOnCeph, rig: Rig) -> None:
    bucket.proxy.add(Fault(status=503, code="SlowDown", only=only("POST", "large", query="uploadId=")))
    rig.put("large", b"o" * (20 * MIB))
    until(lambda: rig.uploader.status()["failed_files"])
    rig.somebody_writes("large", b"theirs")
    rig.uploader.flush(60)
    assert rig.objects() == {"large": b"theirs", kept_as(rig, "large"): b"o" * (20 * MIB)}
    assert bucket.uploads() == []


def test_the_same_bytes_written_by_somebody_else_are_no_conflict(bucket: BucketOnCeph) -> None:
    rig = bucket.rig()
    rig.put("notes", b"the same")
    rig.somebody_writes("notes", b"the same")
    rig.start()
    rig.uploader.flush(30)
    assert rig.objects() == {"notes": b"the same"}
    assert rig.metadata("notes")["mode"] == str(FILE.mode)
    assert rig.engine.conflict_count == 0


def test_an_object_that_somebody_deleted_is_written_again(bucket: BucketOnCeph) -> None:
    rig = bucket.rig()
    rig.somebody_writes("notes", b"first")
    rig.learn("notes")
    rig.put("notes", b"ours")
    rig.bucket.remove(f"{PREFIX}notes", expect=None)
    rig.start()
    rig.uploader.flush(30)
    assert rig.objects() == {"notes": b"ours"}
    assert rig.engine.conflict_count == 0


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


def test_a_deletion_of_what_is_deleted_already_is_done(bucket: BucketOnCeph) -> None:
    rig = bucket.rig()
    rig.somebody_writes("notes", b"first")
    rig.learn("notes")
    rig.remove("notes")
    rig.bucket.remove(f"{PREFIX}notes", expect=None)
    rig.start()
    rig.uploader.flush(30)
    assert rig.engine.conflict_count == 0
    assert rig.engine.pendings() == []


def test_a_rename_of_what_somebody_changed_takes_nothing_from_them(bucket: BucketOnCeph) -> None:
    rig = bucket.rig()
    rig.somebody_writes("old", b"first")
    rig.learn("old")
    rig.rename(("old", "new"))
    rig.somebody_writes("old", b"theirs")
    rig.start()
    rig.uploader.flush(30)
    assert rig.objects() == {"old": b"theirs"}
    assert {conflict.key for conflict in rig.engine.conflicts} == {"old", "new"}


def test_a_rename_of_what_somebody_changed_is_sent_from_here_where_its_bytes_are(bucket: BucketOnCeph) -> None:
    rig = bucket.rig()
    rig.put("old", b"o" * 100_000)
    rig.start()
    rig.uploader.flush(30)
    rig.engine.commit()  # what was uploaded is a clean copy now
    rig.uploader.stop(10)
    rig.rename(("old", "new"))
    rig.somebody_writes("old", b"theirs")
    again = Uploader(rig.engine, delay_s=0.02)
    again.start()
    again.flush(30)
    again.stop(10)
    assert rig.objects() == {"old": b"theirs", "new": b"o" * 100_000}
    assert {conflict.key for conflict in rig.engine.conflicts} == {"old"}


def test_keys_that_no_file_can_have_are_left_out_and_counted(
    bucket: BucketOnCeph, caplog: pytest.LogCaptureFixture
) -> None:
    rig = bucket.rig()
    for key in ("both", "both/inside", "a//b", "..", "fine", ".datacache-probe-0123456789abcdef"):
        rig.bucket.write(PREFIX + key, b"x", {}, expect=None)
    view = RemoteView(
        rig.bucket,
        PREFIX,
        rig.engine.lock,
        ttl_s=60.0,
        file_attributes=FILE,
        folder_attributes=FOLDER,
        made_here=lambda _folder: False,
    )
    for folder in ("", "a/"):
        for _ in range(3):
            try:
                with rig.engine.lock:
                    view.folder(folder)
            except Needs as needs:
                needs.load()
    assert sorted(view.hidden()) == ["..", "a//", "both"]
    assert "2 objects in / cannot be shown as files" in caplog.text


def test_a_rename_onto_what_somebody_made_keeps_both(bucket: BucketOnCeph) -> None:
    rig = bucket.rig()
    rig.somebody_writes("old", b"ours")
    rig.learn("old")
    rig.rename(("old", "new"))
    rig.somebody_writes("new", b"theirs")
    rig.start()
    rig.uploader.flush(30)
    assert rig.objects() == {"new": b"theirs", kept_as(rig, "new"): b"ours"}


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
    assert rig.engine.conflict_count == 0
    assert rig.engine.pendings() == []
    assert bucket.uploads() == []
    rig.put("file", b"newer")  # and what is known of it is right
    rig.uploader.flush(30)
    assert rig.objects() == {"file": b"newer"}
    assert rig.engine.conflict_count == 0


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
    assert rig.engine.conflict_count == 0


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
    assert rig.engine.conflict_count == 0


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
    assert rig.engine.uploads_recorded() == {}


def test_an_upload_of_an_older_version_is_not_gone_on_with(bucket: BucketOnCeph, rig: Rig) -> None:
    bucket.proxy.add(Fault(status=503, code="SlowDown", only=only("PUT", "large", query="partNumber=2&")))
    rig.put("large", b"a" * (20 * MIB))
    until(lambda: rig.uploader.status()["failed_files"])
    rig.put("large", b"b" * (20 * MIB))
    rig.uploader.flush(60)
    assert rig.objects() == {"large": b"b" * (20 * MIB)}
    assert bucket.uploads() == []


def test_an_upload_whose_file_is_gone_is_taken_back(bucket: BucketOnCeph) -> None:
    rig = bucket.rig()
    upload = rig.bucket.begin_upload(f"{PREFIX}deleted", {})
    rig.bucket.put_part(f"{PREFIX}deleted", upload, 1, b"x" * 100)
    rig.engine.save_upload("deleted", UploadState(1, upload, 16 * MIB))
    rig.start()
    until(lambda: not rig.engine.uploads_recorded())
    assert bucket.uploads() == []


def test_unfinished_uploads_that_nobody_remembers_are_taken_back_when_they_are_old(bucket: BucketOnCeph) -> None:
    rig = bucket.rig()
    mine = rig.bucket.begin_upload(f"{PREFIX}mine", {})
    rig.bucket.begin_upload(f"{PREFIX}forgotten", {})
    rig.bucket.begin_upload("elsewhere", {})

    def clean(old_s: float) -> int:
        return leftovers.take_back_old(rig.bucket, PREFIX, lambda: {mine}, stopped=lambda: False, old_s=old_s)

    assert clean(60.0) == 0
    assert clean(-60.0) == 1
    assert sorted(upload["Key"] for upload in bucket.uploads()) == ["elsewhere", f"{PREFIX}mine"]


def test_only_objects_of_our_own_making_are_taken_for_what_a_store_was_tried_out_on(bucket: BucketOnCeph) -> None:
    rig = bucket.rig()
    ours = PROBE_PREFIX + "0123456789abcdef"
    theirs = [f"{PROBE_PREFIX}mine", f"{ours}.txt", f"{ours}/file", f"{PROBE_PREFIX}0123456789ABCDEF", f"{ours[:-1]}0"]
    for name in [ours, *theirs]:
        rig.somebody_writes(name, b"12345678" + b"9" * (name == theirs[-1]))
    leftovers.remove_probes(rig.bucket, PREFIX, old_s=-60)
    assert sorted(rig.objects()) == sorted(theirs)


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
    assert rig.engine.uploads_recorded() == {}


def test_a_bucket_that_lets_nobody_list_uploads_is_fine(bucket: BucketOnCeph) -> None:
    rig = bucket.rig()
    bucket.proxy.always(Fault(status=403, code="AccessDenied"))
    assert leftovers.take_back_old(rig.bucket, PREFIX, set, stopped=lambda: False) == 0


def test_who_edits_an_object_and_keeps_our_mark_loses_nothing(bucket: BucketOnCeph, rig: Rig) -> None:
    for key in ("notes", "deleted"):
        rig.put(key, b"ours, first")
    rig.uploader.flush(30)
    for key in ("notes", "deleted"):  # as s3fs-fuse does
        rig.bucket.write(PREFIX + key, b"theirs", rig.metadata(key), expect=None)
    rig.put("notes", b"ours, second")
    rig.remove("deleted")
    rig.uploader.flush(30)
    kept = {conflict.key: conflict.kept_as for conflict in rig.engine.conflicts}
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
    assert rig.engine.conflict_count == 0
