"""Test what is pending survives the process, and what nothing refers to any more goes only when that is durable."""

from __future__ import annotations

import os
import shutil
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from datacache.core.errors import StagingBusyError, StagingError, StagingFullError
from datacache.settings import Settings
from datacache.writeback import engine as engine_module
from datacache.writeback.draft import INLINE_BYTES, Draft
from datacache.writeback.journal.journal import Journal
from datacache.writeback.model import (
    LONGEST_XATTRS,
    WRITER,
    Attributes,
    Logged,
    Pending,
    Staged,
    Stored,
    decode_pending,
    decode_xattrs,
    encode_pending,
    encode_xattrs,
    read_attributes,
)
from datacache.writeback.remote import memory as memory_module
from datacache.writeback.staging import area as area_module
from tests.promises import promise
from tests.writeback.upload_rig import FILE, FOLDER, PREFIX, SMALL_BYTES, Rig, until

LARGE = os.urandom(INLINE_BYTES * 3)


@pytest.fixture
def open_rig(tmp_path: Path, settings: Settings) -> Iterator[Callable[[], Rig]]:
    """Opens the staging area; a second call is the next process."""
    opened: list[Rig] = []

    def make() -> Rig:
        if opened:
            opened.pop().close()
        opened.append(Rig(tmp_path / "staging", "file://", settings))
        return opened[-1]

    yield make
    for rig in opened:
        rig.close()


def test_what_was_committed_is_pending_in_the_next_process_with_its_bytes(open_rig):
    rig = open_rig()
    rig.put("a", b"small")
    rig.put("b/c", LARGE)
    rig.mkdir("d/")
    before = {pending.key: pending for pending in rig.engine.pendings()}
    rig = open_rig()
    after = {pending.key: pending for pending in rig.engine.pendings()}
    assert after.keys() == before.keys()
    for key, pending in after.items():
        assert pending.touched  # whether the process before tried to upload it is not known
        assert pending._replace(touched=False, since=0) == before[key]._replace(since=0)
    claim = rig.claims.begin("a")
    assert bytes(rig.claims.open_content(claim).read(0, 9)) == b"small"
    claim = rig.claims.begin("b/c")
    assert bytes(rig.claims.open_content(claim).read(0, len(LARGE))) == LARGE


def test_versions_grow_over_processes_even_when_nothing_is_pending(open_rig):
    rig = open_rig()
    first = rig.put("a", b"1")
    rig.remove("a")
    assert rig.engine.pendings() == []
    rig = open_rig()
    assert rig.put("a", b"1") > first


def test_versions_grow_over_processes_although_the_clock_was_set_back(open_rig, monkeypatch):
    rig = open_rig()
    first = rig.put("a", b"1")
    monkeypatch.setattr(engine_module.time, "time_ns", lambda: 0)
    rig = open_rig()
    assert rig.put("b", b"1") > first


@pytest.mark.parametrize("size", [1000, len(LARGE) + 1000])
def test_a_file_whose_size_changed_before_a_kill_is_uploaded_as_it_is(open_rig, size):
    rig = open_rig()
    version = rig.put("a", LARGE)
    path = rig.files.path(rig.engine.get("a").content.file)
    os.truncate(path, size)  # by a program that was not at its next close or fsync
    rig = open_rig()
    assert rig.engine.get("a").version > version
    claim = rig.claims.begin("a")
    reader = rig.claims.open_content(claim)
    assert bytes(reader.read(0, reader.size_bytes)) == path.read_bytes()
    assert reader.size_bytes == size


@promise("A process that lost an area to another node records and uploads nothing more")
def test_a_former_owner_of_the_area_records_nothing_more(open_rig, monkeypatch):
    monkeypatch.setattr(area_module, "_CHECK_EVERY_S", 0.0)
    rig = open_rig()
    owner, (log,) = rig.area.folder / "owner.json", rig.area.journal_folder.glob("*.log")
    ours, recorded = owner.read_text(), log.read_bytes()
    owner.write_text(ours.replace(rig.area.owner.token, "of another"))
    with pytest.raises(StagingError, match="taken over"):
        rig.put("a", b"1")
    assert log.read_bytes() == recorded
    owner.write_text(ours)


def test_a_file_that_was_never_uploaded_and_is_deleted_leaves_nothing(open_rig):
    rig = open_rig()
    rig.put("a", LARGE)
    (content,) = [pending.content for pending in rig.engine.pendings()]
    rig.remove("a")
    assert rig.engine.pendings() == []
    assert not rig.files.path(content.file).exists()


def test_a_file_whose_upload_was_tried_leaves_a_deletion(open_rig):
    rig = open_rig()
    rig.put("a", b"1")
    rig.claims.abandon(rig.claims.begin("a"))
    rig.remove("a")
    (pending,) = rig.engine.pendings()
    assert (pending.attributes, pending.touched) == (None, True)


def test_a_staged_file_is_deleted_only_when_it_is_durable_that_nothing_refers_to_it(open_rig):
    rig = open_rig()
    rig.put("a", LARGE)
    (content,) = [pending.content for pending in rig.engine.pendings()]
    with rig.engine.lock:  # the thread that commits in the background waits for it
        gone, drop = rig.engine.plan_deletion("a", base="")
        ticket = rig.engine.record(gone, drop=drop)
        assert rig.files.path(content.file).exists()
    rig.engine.commit(ticket)
    assert not rig.files.path(content.file).exists()


def test_a_renamed_file_keeps_its_staged_file(open_rig):
    rig = open_rig()
    rig.put("a", LARGE)
    rig.rename(("a", "b"))
    (pending,) = rig.engine.pendings()
    assert pending.key == "b"
    assert rig.files.path(pending.content.file).read_bytes() == LARGE
    rig = open_rig()
    assert rig.files.path(pending.content.file).read_bytes() == LARGE


@promise("What was just uploaded is read from its copy here")
def test_an_uploaded_file_is_a_clean_copy_until_the_process_ends(open_rig, tmp_path):
    rig = open_rig()
    rig.put("a", LARGE)
    claim = rig.claims.begin("a")
    info = rig.bucket.write(f"{tmp_path}/x"[1:], LARGE, {}, expect=None)
    rig.claims.finish(claim, info)
    rig.engine.commit()
    assert rig.engine.pendings() == []
    assert rig.files.clean(PREFIX + "a", info.etag) == claim.pending.content.file
    rig = open_rig()
    assert not rig.files.path(claim.pending.content.file).exists()


def test_a_file_that_changed_while_it_was_uploaded_stays_pending_above_what_was_uploaded(open_rig):
    rig = open_rig()
    rig.put("a", b"1")
    claim = rig.claims.begin("a")
    rig.put("a", b"22")
    rig.claims.finish(claim, info=_info("etag-1"))
    (pending,) = rig.engine.pendings()
    assert (pending.base, pending.content) == ("etag-1", Logged(2))


def test_a_deletion_while_the_file_was_uploaded_deletes_what_was_uploaded(open_rig):
    rig = open_rig()
    rig.put("a", b"1")
    claim = rig.claims.begin("a")
    rig.remove("a")
    rig.claims.finish(claim, info=_info("etag-1"))
    (pending,) = rig.engine.pendings()
    assert (pending.base, pending.attributes) == ("etag-1", None)


@promise("Versions of one key arrive whole, in their order, one at a time")
def test_bytes_that_are_overwritten_while_they_are_uploaded_tear_the_upload_and_appended_ones_do_not(open_rig):
    rig = open_rig()
    rig.put("a", LARGE)
    content = rig.engine.get("a").content
    claim = rig.claims.begin("a")
    rig.engine.tear(content.file, len(LARGE))
    assert not claim.torn
    rig.engine.tear(content.file, len(LARGE) - 1)
    assert claim.torn


def test_a_claimed_file_that_was_replaced_before_it_was_read_is_torn(open_rig):
    rig = open_rig()
    rig.put("a", LARGE)
    claim = rig.claims.begin("a")
    rig.put("a", LARGE[::-1])
    assert rig.claims.open_content(claim).read(0, 1) == b""
    assert claim.torn


def test_a_file_that_a_draft_has_open_is_no_clean_copy(open_rig):
    rig = open_rig()
    rig.put("a", LARGE)
    content = rig.engine.get("a").content
    draft = Draft.of_staged(rig.engine, FILE, content.file)
    rig.claims.finish(rig.claims.begin("a"), info=_info("etag-1", len(LARGE)))
    rig.engine.commit()
    draft.write(0, b"other bytes")
    assert rig.files.clean(PREFIX + "a", "etag-1") is None
    assert rig.files.path(content.file).exists()
    draft.close()
    rig.engine.commit()
    assert not rig.files.path(content.file).exists()


@promise("`O_TRUNC` begins a new version")
def test_a_draft_that_began_with_nothing_leaves_what_was_acknowledged_alone(open_rig):
    rig = open_rig()
    rig.put("a", LARGE)
    draft = Draft.of_staged(rig.engine, FILE, rig.engine.get("a").content.file)
    draft.empty()
    draft.write(0, b"new" * INLINE_BYTES)
    draft.close()
    rig = open_rig()
    claim = rig.claims.begin("a")
    assert bytes(rig.claims.open_content(claim).read(0, len(LARGE) + 1)) == LARGE


def test_drafts_read_what_was_written_small_and_large_with_gaps(open_rig):
    engine = open_rig().engine
    draft = Draft.of_bytes(engine, FILE)
    expected = bytearray()
    for offset, data in [(5, b"abc"), (0, b"xy"), (INLINE_BYTES - 1, b"over the limit"), (200_000, b"far")]:
        expected.extend(bytes(max(0, offset + len(data) - len(expected))))
        expected[offset : offset + len(data)] = data
        draft.write(offset, data)
        assert draft.read(0, 300_000) == bytes(expected)
    draft.truncate(7)
    draft.truncate(12)
    assert draft.read(0, 100) == bytes(expected[:7]) + bytes(5)
    draft.close()


@promise("An object that was changed in the bucket is never overwritten in silence")
def test_a_conflict_moves_ours_aside_with_its_bytes(open_rig):
    rig = open_rig()
    rig.put("runs/a.pt", b"ours")
    conflict = rig.claims.conflict(rig.claims.begin("runs/a.pt"), _info("theirs"), "somebody wrote it")
    assert conflict.kept_as.startswith("runs/a.pt.conflict-")
    assert conflict.kept_as.endswith("Z-test-host")
    (pending,) = rig.engine.pendings()
    assert (pending.key, pending.base) == (conflict.kept_as, "")
    rig = open_rig()
    assert (list(rig.engine.conflict_log.unsettled()), rig.engine.conflict_log.count) == ([conflict], 1)
    claim = rig.claims.begin(conflict.kept_as)
    assert bytes(rig.claims.open_content(claim).read(0, 9)) == b"ours"


@promise("An object that a rename still has to copy is neither overwritten nor deleted")
def test_what_must_be_copied_from_blocks_what_would_overwrite_it(open_rig):
    rig = open_rig()
    rig.known["a"] = _info("e1")
    rig.rename(("a", "b"))
    assert rig.claims.blockers("a") == ["b"]
    assert rig.claims.blockers("b") == []


@promise("An object that a rename still has to copy is neither overwritten nor deleted")
def test_a_key_that_is_to_be_copied_follows_its_object_when_that_gets_new_attributes(open_rig):
    rig = open_rig()
    rig.known["a"] = _info("e1")
    rig.chmod("a", FILE._replace(mode=stat.S_IFREG | 0o600))
    claim = rig.claims.begin("a")
    rig.rename(("a", "b"))
    rig.claims.finish(claim, _info("e2"))
    assert rig.engine.get("b").content == Stored("a", 1, "e2")


def test_all_that_is_recorded_is_durable_before_an_object_may_be_deleted(open_rig):
    rig = open_rig()
    with rig.engine.lock:
        gone, _ = rig.engine.plan_deletion("a", base="e1")
        ticket = rig.engine.record([*gone, rig.engine.plan_change("b", FILE, Logged(1), base="")], blobs={"b": b"1"})
        assert not rig.engine.is_durable(ticket)
    assert rig.claims.begin("a") is not None
    assert rig.engine.is_durable(ticket)


def test_a_commit_in_the_middle_of_a_section_does_not_count_its_changes_as_durable(open_rig, tmp_path, monkeypatch):
    rig, was_called = open_rig(), threading.Event()
    commit = rig.journal.commit

    def tell(ticket: int | None = None) -> int:
        try:
            return commit(ticket)
        finally:
            was_called.set()

    monkeypatch.setattr(rig.journal, "commit", tell)
    with rig.engine.lock:
        ticket = rig.engine.record([rig.engine.plan_change("a", FILE, Logged(5), base="")], blobs={"a": b"small"})
        assert was_called.wait(30)  # by the thread that commits what nobody waits for
    until(lambda: rig.engine.is_durable(ticket))
    copy = shutil.copytree(rig.area.journal_folder, tmp_path / "copy")
    assert Journal(copy).read("a") == b"small"


def test_a_key_is_not_claimed_in_a_version_whose_blockers_nobody_looked_at(open_rig):
    rig = open_rig()
    rig.known["a"] = _info("e1")
    rig.chmod("a", FILE._replace(mode=stat.S_IFREG | 0o600))
    version = rig.engine.get("a").version
    rig.rename(("a", "b"))  # the deletion of `a` has to wait for `b` now
    assert rig.claims.begin("a", version) is None
    assert rig.claims.begin("a", rig.engine.get("a").version) is not None


def test_a_deletion_outlives_a_crash_when_an_earlier_upload_ends_after_it(open_rig):
    rig = open_rig()
    rig.put("a", b"1")
    claim = rig.claims.begin("a")
    rig.remove("a")
    with rig.engine.lock:  # the name is made anew, and its file is open
        rig.engine.record([rig.engine.plan_change("a", FILE, Logged(0), base="", ready=False)])
    rig.claims.finish(claim, info=_info("etag-1"))
    rig = open_rig()
    (pending,) = rig.engine.pendings()
    assert (pending.key, pending.attributes) == ("a", None)
    assert rig.engine.own_version({WRITER: rig.engine.writer_of(claim.pending)}, pending) == claim.pending.version


def test_only_versions_since_a_key_began_to_differ_are_ours(open_rig):
    rig = open_rig()
    rig.put("a", b"1")
    first = rig.claims.begin("a")
    mark = {WRITER: rig.engine.writer_of(first.pending)}
    rig.put("a", b"2")
    assert rig.engine.own_version(mark, rig.engine.get("a")) == first.pending.version
    rig.claims.finish(first, info=_info("etag-1"))
    assert rig.engine.own_version(mark, rig.engine.get("a")) is None  # its ETag is known: who has another has edited it
    rig = open_rig()
    assert rig.engine.own_version(mark, rig.engine.get("a")) is None
    second = rig.claims.begin("a")
    rig.put("a", b"3")
    rig.claims.abandon(second)
    rig.claims.rebase(rig.claims.begin("a"), "etag-2", second.pending.version)
    assert rig.engine.own_version({WRITER: rig.engine.writer_of(second.pending)}, rig.engine.get("a")) is None


def test_a_file_that_is_gone_goes_before_a_folder_of_its_name_and_the_other_way_round(open_rig):
    rig = open_rig()
    rig.known["a"] = _info("e1")
    rig.remove("a")
    rig.mkdir("a/")
    rig.put("a/b/c", b"1")
    assert rig.claims.blockers("a/") == rig.claims.blockers("a/b/c") == ["a"]
    assert rig.claims.blockers("a") == []
    rig.known |= {"d/": _info("e2"), "d/x": _info("e3")}
    rig.remove("d/x")
    rig.remove("d/")
    rig.put("d", b"1")
    assert rig.claims.blockers("d") == ["d/", "d/x"]


def test_a_deleted_folder_waits_for_what_is_below_it(open_rig):
    rig = open_rig()
    rig.known |= {"d/": _info("marker"), "d/x": _info("e1")}
    rig.remove("d/x")
    rig.remove("d/")
    assert rig.claims.blockers("d/") == ["d/x"]


def test_others_go_on_while_what_is_known_of_the_bucket_is_written_down(open_rig, monkeypatch):
    rig = open_rig()
    replace_file, written = memory_module.replace_file, []

    def watched(path: Path, data: bytes, **options: bool) -> None:
        other = threading.Thread(target=rig.engine.get, args=("a",), daemon=True)
        other.start()
        other.join(10)
        assert not other.is_alive(), path
        written.append(path.name)
        replace_file(path, data, **options)

    monkeypatch.setattr(memory_module, "replace_file", watched)
    with rig.engine.lock:
        rig.engine.apply_own_locked("a", _info("e1"), FILE)
    rig.engine.memory.remember(rig.engine.known, rig.engine.lock)
    assert written == ["known.json", "known.log"]


def test_a_second_process_is_refused_and_told_who_has_the_area(open_rig, tmp_path, settings):
    open_rig()
    with pytest.raises(StagingBusyError, match=str(os.getpid())):
        Rig(tmp_path / "staging", "file://", settings)


def test_a_full_disk_is_an_error_that_loses_nothing(settings, disk):
    small = disk("size=3m")
    with Rig(small, "file://", settings) as rig:
        rig.put("a", b"acknowledged")
        filler = small / "filler"
        with pytest.raises(OSError, match="No space"):
            _fill(filler)
        with pytest.raises(StagingFullError):
            _put_many(rig)
        filler.unlink()
        rig.engine.commit()
    with Rig(small, "file://", settings) as rig:
        assert rig.engine.get("a") is not None


attributes = Attributes(stat.S_IFREG | 0o4755, 1, 2, -1_500_000_000)


@pytest.mark.parametrize("content", [Logged(3), Staged(7, 2**40), Stored("x/ü", 5, "e"), None])
def test_a_record_says_all_of_what_is_pending(content):
    extended = attributes._replace(atime_ns=7, xattrs=encode_xattrs({"user.a": b"\0"}))
    for kept in (attributes, extended, attributes._replace(mode=stat.S_IFCHR | 0o600, rdev=2**31 + 7), None):
        pending = Pending("k", kept, content, "base", 9, 1.5, touched=True)
        assert decode_pending("k", encode_pending(pending), 3) == pending


@promise("What other tools wrote as attributes is read, and nonsense is not believed")
def test_attributes_are_read_again_from_metadata_and_nonsense_is_not_believed():
    def read(metadata, default=FILE, size_bytes=1):
        return read_attributes(metadata, default, size_bytes)

    assert read(attributes.to_metadata("w-1")) == attributes
    assert read({"mtime": "1500000000.25"}).mtime_ns == 1_500_000_000_250_000_000  # rclone's
    assert read({"mode": str(stat.S_IFDIR | 0o755)}).mode == stat.S_IFREG | 0o755
    assert read({"mode": str(stat.S_IFREG | 0o755)}, FOLDER).mode == stat.S_IFDIR | 0o755
    assert read({"mode": "rw", "uid": "-1", "mtime": "NaN", "gid": "9" * 40}) == FILE
    assert read({"mode": "9" * 11, "uid": str(2**32 - 1), "gid": str(2**32), "rdev": "7"}) == FILE
    assert read({"mtime": "1e400"}) == FILE
    assert read({"mtime": f"{2**34}"}).mtime_ns == 2**34 * 10**9  # in the year 2514
    device = attributes._replace(mode=stat.S_IFBLK | 0o660, rdev=2**31 + 7)
    assert read(device.to_metadata(), size_bytes=0) == device
    assert read(device.to_metadata()) == device._replace(mode=stat.S_IFREG | 0o660, rdev=0)  # its bytes can be read


@promise("Extended attributes that s3fs-fuse wrote are read, and it reads ours")
def test_extended_attributes_are_encoded_as_s3fs_does_it_and_nonsense_is_not_believed():
    xattrs = {"user.b": b"\0\xff", "user.a": b"", "user.ü\udcff": b"xx"}
    text = encode_xattrs(xattrs)
    assert text == "%7B%22user.a%22%3A%22%22%2C%22user.b%22%3A%22AP8%3D%22%2C%22user.%C3%BC%FF%22%3A%22eHg%3D%22%7D"
    assert decode_xattrs(text) == xattrs
    assert read_attributes({"xattr": "%7B%22user.a%22:%22AP8=%22%7D"}, FILE, 1).xattrs == encode_xattrs(
        {"user.a": b"\0\xff"}
    )
    for nonsense in ("", "{}", "[1]", "{", '{"user.a":1}', '{"user.a":"?"}', "%FF", "7"):
        assert read_attributes({"xattr": nonsense}, FILE, 1) == FILE


def test_the_metadata_of_an_object_never_take_more_than_s3_has_for_them():
    longest = Attributes(2**32 - 2, 2**32 - 2, 2**32 - 2, -(2**63), 2**32 - 2, -(2**63), "x" * LONGEST_XATTRS)
    metadata = longest.to_metadata(f"{'f' * 16}-{2**63}-{'f' * 16}")
    assert sum(len(f"x-amz-meta-{name}{value}") for name, value in metadata.items()) <= 2048


def test_a_record_of_before_devices_had_numbers_is_read():
    header = b'[[33188,1,2,3],["l"],"base",9,1.5,0]'
    assert decode_pending("k", header, 3).attributes == Attributes(33188, 1, 2, 3)


def _fill(path: Path) -> None:
    with open(path, "wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def _put_many(rig: Rig) -> None:
    for number in range(64):
        rig.put(f"b{number}", b"x" * SMALL_BYTES)


def _info(etag: str, size_bytes: int = 1):
    from datacache.store.base import ObjectInfo

    return ObjectInfo("x", size_bytes, 0, etag)
