"""Folders as live buckets, beyond the conformance suite: links, hidden files, uploads after a restart."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from datacache.core.errors import ObjectChangedError, ObjectNotFoundError, StoreError
from datacache.store.local.bucket import LocalBucket
from tests.promises import promise


@pytest.fixture
def base(tmp_path: Path) -> str:
    return f"{str(tmp_path)[1:]}/"


def names(base: str) -> list[str]:
    found = []
    for page in LocalBucket().list_folder(base):
        found += [info.key.removeprefix(base) for info in page.objects] + [f.removeprefix(base) for f in page.folders]
    return found


@promise("`file://` folders follow no links and replace none")
def test_links_are_not_followed_and_not_replaced(tmp_path: Path, base: str) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"1")
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / "link").symlink_to(outside / "secret")
    (inside / "folder").symlink_to(outside)
    bucket = LocalBucket()
    assert names(f"{base}inside/") == [""]
    for name in ("link", "folder"):
        assert bucket.find(f"{base}inside/{name}") == (None, False)
        with pytest.raises(ObjectNotFoundError):
            bucket.look(f"{base}inside/{name}")
        with pytest.raises(ObjectChangedError):
            bucket.write(f"{base}inside/{name}", b"2", {}, expect="")
    assert list(bucket.list_folder(f"{base}inside/folder/")) == []
    assert (outside / "secret").read_bytes() == b"1"


@pytest.mark.parametrize("call", ["write", "marker", "upload"])
def test_a_file_in_the_place_of_a_folder_is_named(tmp_path: Path, base: str, call: str) -> None:
    (tmp_path / "run").write_bytes(b"a file")
    bucket = LocalBucket()
    calls = {
        "write": lambda: bucket.write(f"{base}run/inner/a", b"1", {}, expect=None),
        "marker": lambda: bucket.write(f"{base}run/inner/", b"", {}, expect=None),
        "upload": lambda: bucket.begin_upload(f"{base}run/a", {}),
    }
    with pytest.raises(StoreError, match=f"^file://{tmp_path}/run is a file, ") as caught:
        calls[call]()
    assert (caught.value.url, type(caught.value)) == (f"file://{tmp_path}/run", StoreError)


def test_an_upload_goes_on_in_another_process_and_is_not_to_be_seen(base: str) -> None:
    key, data = f"{base}d/a", os.urandom(LocalBucket.part_bytes)
    upload = LocalBucket().begin_upload(key, {"mode": "1"})
    first = LocalBucket().put_part(key, upload, 1, data)
    assert names(f"{base}d/") == [""]
    assert [info.key for page in LocalBucket().list(f"{base}d/") for info in page] == []
    bucket = LocalBucket()
    assert bucket.list_parts(key, upload) == [first]
    parts = [first, bucket.put_part(key, upload, 2, b"end")]
    info = bucket.complete_upload(key, upload, parts, {"mode": "2"}, expect="")
    assert (info.size_bytes, bucket.look(key).metadata) == (len(data) + 3, {"mode": "2"})
    assert names(f"{base}d/") == ["", "a"]
    assert os.listdir(f"/{base}d") == ["a"]


def test_parts_that_do_not_make_up_the_object_are_refused(base: str) -> None:
    bucket, key = LocalBucket(), f"{base}a"
    upload = bucket.begin_upload(key, {})
    short, last = bucket.put_part(key, upload, 1, b"short"), bucket.put_part(key, upload, 2, b"last")
    for parts in ([short, last], [last], [short._replace(etag="0")]):
        with pytest.raises(StoreError, match="parts"):
            bucket.complete_upload(key, upload, parts, {}, expect=None)
    with pytest.raises(StoreError, match="part"):
        bucket.put_part(key, upload, 1, bytes(bucket.part_bytes + 1))
    with pytest.raises(ObjectNotFoundError):
        bucket.put_part(key, "../../etc", 1, b"")
    bucket.abort_upload(key, upload)
    assert os.listdir(f"/{base}") == []


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, base: str) -> None:
    bucket = LocalBucket()
    bucket.write(f"{base}a", b"1", {}, expect="")
    with pytest.raises(ObjectChangedError):
        bucket.write(f"{base}a", b"2", {"mode": "1"}, expect="")
    with pytest.raises(StoreError):
        bucket.write(f"{base}b", b"2", {"mode": "x" * 100_000}, expect="")
    with pytest.raises(StoreError):
        bucket.write(f"{base}a/b", b"2", {}, expect="")
    assert os.listdir(tmp_path) == ["a"]


def test_the_marker_of_a_folder_with_files_goes_and_the_folder_stays(base: str) -> None:
    bucket = LocalBucket()
    marker = bucket.write(f"{base}d/", b"", {"mode": "1"}, expect="")
    bucket.write(f"{base}d/a", b"1", {}, expect="")
    bucket.remove(marker.key, expect=marker.etag)
    assert bucket.find(f"{base}d") == (None, True)


def test_a_file_of_somebody_else_has_no_metadata(tmp_path: Path, base: str) -> None:
    (tmp_path / "a").write_bytes(b"1")
    os.setxattr(tmp_path / "a", "user.datacache.metadata", b"{ damaged")
    assert LocalBucket().look(f"{base}a").metadata == {}


def test_metadata_say_nothing_of_bytes_that_somebody_edited_in_place(tmp_path: Path, base: str) -> None:
    bucket, metadata = LocalBucket(), {"mode": "33152", "mtime": "1.5", "datacache-writer": "us-7-x"}
    upload = bucket.begin_upload(f"{base}large", metadata)
    parts = [bucket.put_part(f"{base}large", upload, 1, b"parts")]
    found = [
        bucket.write(f"{base}small", b"whole", metadata, expect=""),
        bucket.complete_upload(f"{base}large", upload, parts, metadata, expect=""),
    ]
    found.append(bucket.copy(found[0].ref("file://"), f"{base}copy", metadata, expect=""))
    for info in found:
        assert bucket.look(info.key).metadata == metadata
        with open(f"/{info.key}", "r+b") as file:
            file.write(b"edited")
        assert bucket.look(info.key).metadata == {"mode": "33152"}
        changed = bucket.copy(bucket.head(info.key).ref("file://"), info.key, metadata, expect=None)
        assert bucket.look(info.key) == (changed, metadata)
