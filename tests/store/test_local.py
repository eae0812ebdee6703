"""Folders as stores: byte order, links, odd entries, files that change under a reader."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from datacache.core.errors import ObjectChangedError, ObjectNotFoundError, StoreAccessError
from datacache.core.ids import ObjectRef
from datacache.store.base import ObjectInfo
from datacache.store.local.store import LocalStore
from datacache.store.local.walk import Links
from tests.promises import promise


@pytest.fixture
def store() -> LocalStore:
    return LocalStore()


def listed(store: LocalStore, folder: Path) -> list[str]:
    prefix = f"{str(folder)[1:]}/"
    return [info.key.removeprefix(prefix) for page in store.list(prefix) for info in page]


def write(path: Path, data: bytes = b"x") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def info_of(store: LocalStore, path: Path) -> ObjectInfo:
    return store.head(str(path)[1:])


@contextmanager
def unprivileged() -> Iterator[None]:
    """Root reads everything; be somebody else for a while."""
    if os.geteuid():
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_folder_sorts_among_files_where_its_keys_do(store: LocalStore, tmp_path: Path) -> None:
    for name in ("a/x", "a-b", "a.b/y", "a0", "a!", "b/c/d", "b/c-d", "b/c0"):
        write(tmp_path / name)
    assert listed(store, tmp_path) == ["a!", "a-b", "a.b/y", "a/x", "a0", "b/c-d", "b/c/d", "b/c0"]


def test_names_that_are_no_utf8_sort_as_their_bytes(store: LocalStore, tmp_path: Path) -> None:
    names = [b"\xef\xbf\xbd", b"\xff", b"\xf0\x9f\x98\x80", b"a", b"\x80"]
    for name in names:
        with open(os.fsencode(tmp_path) + b"/" + name, "wb"):
            pass
    assert [key.encode("utf-8", "surrogateescape") for key in listed(store, tmp_path)] == sorted(names)


def test_an_empty_folder_is_a_marker(store: LocalStore, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    write(tmp_path / "full" / "a")
    (tmp_path / "full" / "empty").mkdir()
    (tmp_path / "bare").mkdir()
    assert listed(store, tmp_path) == ["bare/", "full/a", "full/empty/"]
    assert listed(store, tmp_path / "bare") == []


def test_links_out_of_the_folder_are_left_out_or_followed(
    store: LocalStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path / "elsewhere" / "data" / "x", b"12345")
    (tmp_path / "elsewhere" / "data" / "up").symlink_to("..")
    (tmp_path / "elsewhere" / "data" / "y").symlink_to("x")
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "file").symlink_to("../elsewhere/data/x")
    (tmp_path / "set" / "folder").symlink_to("../elsewhere/data")
    (tmp_path / "set" / "twice").symlink_to(tmp_path / "elsewhere" / "data")
    with caplog.at_level(logging.WARNING):
        assert listed(store, tmp_path / "set") == []
    assert "3 links" in caplog.text
    links = Links(follow=True)
    names = ["file", "folder/x", "folder/y", "twice/x", "twice/y"]
    followed = LocalStore(links=links)
    with caplog.at_level(logging.WARNING):
        assert [name for name in listed(followed, tmp_path / "set") if "up/" not in name] == names
    assert links.left_out == 0
    prefix = str(tmp_path / "set").lstrip("/") + "/"
    infos = {info.key: info for page in followed.list(prefix) for info in page}
    assert infos[f"{prefix}folder/y"].at == str(tmp_path / "elsewhere" / "data" / "x")[1:]
    ref = ObjectRef(store.url, infos[f"{prefix}folder/y"].at, 5, infos[f"{prefix}folder/y"].etag, root=0)
    assert store.read(ref, 1, 3) == b"23"


@promise("A link that stays inside of the folder is a link in snapshots, mounts and exports")
def test_links_inside_of_the_folder_are_links(store: LocalStore, tmp_path: Path) -> None:
    write(tmp_path / "a" / "b" / "x", b"12345")
    (tmp_path / "a" / "b" / "up").symlink_to(tmp_path / "a")
    (tmp_path / "a" / "b" / "up.jpg").symlink_to("../b/x")
    (tmp_path / "a" / "round").symlink_to("b/../b/x")
    (tmp_path / "self").symlink_to("self")
    prefix = str(tmp_path).lstrip("/") + "/"
    found = {info.key.removeprefix(prefix): info for page in store.list(prefix) for info in page}
    targets = {name: info.target for name, info in found.items()}
    assert targets == {"a/b/up": "..", "a/b/up.jpg": "../b/x", "a/b/x": "", "a/round": "b/x"}
    assert {name for name, info in found.items() if info.at == f"{prefix}a/b/x"} == {"a/b/up.jpg", "a/round"}
    assert found["a/round"].etag == found["a/b/x"].etag


def test_entries_that_are_no_files_are_counted_not_listed(
    store: LocalStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path / "a")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "dangling").symlink_to("nowhere")
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(tmp_path / "socket"))
        with caplog.at_level(logging.WARNING):
            assert listed(store, tmp_path) == ["a"]
    assert [r.getMessage() for r in caplog.records if "3 entries" in r.getMessage()]
    with pytest.raises(ObjectNotFoundError):
        info_of(store, tmp_path / "pipe")


def test_a_folder_that_cannot_be_read_is_named(store: LocalStore, tmp_path: Path) -> None:
    write(tmp_path / "set" / "a")
    closed = tmp_path / "set" / "closed"
    closed.mkdir(mode=0)
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == os.getuid() and folder != Path("/"):
            folder.chmod(folder.stat().st_mode | 0o055)
    try:
        with unprivileged(), pytest.raises(StoreAccessError) as caught:
            listed(store, tmp_path / "set")
    finally:
        closed.chmod(0o700)
    assert str(closed) in str(caught.value)


def test_a_folder_that_is_missing_or_a_file_says_so(store: LocalStore, tmp_path: Path) -> None:
    write(tmp_path / "a")
    with pytest.raises(ObjectNotFoundError, match="no folder"):
        listed(store, tmp_path / "missing")
    with pytest.raises(ObjectNotFoundError, match="is a file"):
        listed(store, tmp_path / "a")


def test_a_file_rewritten_or_replaced_has_changed(store: LocalStore, tmp_path: Path) -> None:
    path = write(tmp_path / "a", b"first")
    ref = info_of(store, path).ref(store.url)
    times = (path.stat().st_atime_ns, path.stat().st_mtime_ns)

    os.utime(path, ns=(times[0], times[1] + 1))
    with pytest.raises(ObjectChangedError):
        store.read(ref, 0, 5)
    os.utime(path, ns=times)
    assert store.read(ref, 0, 5) == b"first"

    other = write(tmp_path / "b", b"other")
    os.utime(other, ns=times)
    os.replace(other, path)
    with pytest.raises(ObjectChangedError):
        store.read(ref, 0, 5)


def test_a_file_written_to_while_it_is_read_has_changed(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a", b"0123456789")
    ref = info_of(store, path).ref(store.url)
    pread = os.pread

    def pread_beside_a_writer(fd: int, length: int, offset: int) -> bytes:
        with open(path, "r+b") as file:
            file.write(b"XX")
        os.utime(path, ns=(1, 1))
        return pread(fd, length, offset)

    monkeypatch.setattr(os, "pread", pread_beside_a_writer)
    with pytest.raises(ObjectChangedError):
        store.read(ref, 0, 10)


def test_a_folder_or_pipe_in_a_files_place_is_noticed(store: LocalStore, tmp_path: Path) -> None:
    path = write(tmp_path / "a", b"12345")
    ref = info_of(store, path).ref(store.url)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ObjectChangedError):
        store.read(ref, 0, 5)
    path.unlink()
    path.mkdir()
    with pytest.raises(ObjectChangedError):
        store.read(ref, 0, 5)


@pytest.mark.parametrize("key", ["tmp/../etc/passwd", "etc//passwd", "./etc/passwd", "/etc/passwd", "a\0b", "", ".."])
def test_a_key_that_is_no_exact_path_is_not_found(store: LocalStore, key: str) -> None:
    with pytest.raises(ObjectNotFoundError):
        store.head(key)
    with pytest.raises(ObjectNotFoundError):
        store.put(key, b"")


def test_a_put_is_whole_or_not_there(store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a", b"first")
    seen: list[list[str]] = []

    def failing(_from: object, _to: object) -> None:
        seen.append(listed(store, tmp_path))
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", failing)
    with pytest.raises(OSError, match="No space left"):
        store.put(str(path)[1:], b"second")
    assert seen == [["a"]]
    assert os.listdir(tmp_path) == ["a"]
    assert path.read_bytes() == b"first"
