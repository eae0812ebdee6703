"""Paths below a folder that must not lead out of it, with openat2 and without."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from datacache.core import paths as beneath
from datacache.core.paths import open_beneath


@pytest.fixture
def root(tmp_path: Path) -> Iterator[int]:
    """A folder with `in/file`, `in/link` to it and `in/out`, a link that leads out; `secret` lies beside it."""
    (tmp_path / "root" / "in").mkdir(parents=True)
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "root" / "in" / "file").write_text("file")
    (tmp_path / "root" / "in" / "link").symlink_to("file")
    (tmp_path / "root" / "in" / "out").symlink_to("../../secret")
    fd = os.open(tmp_path / "root", os.O_PATH)
    yield fd
    os.close(fd)


@pytest.fixture
def unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that does not know openat2."""
    monkeypatch.setattr(beneath, "_is_known", lambda: False)


def content(root: int, path: str) -> bytes:
    fd = open_beneath(root, path, os.O_RDONLY)
    try:
        return os.read(fd, 100)
    finally:
        os.close(fd)


def test_what_lies_below_is_opened_and_what_leads_out_is_not(root: int) -> None:
    assert content(root, "in/file") == content(root, "in/link") == b"file"
    for path in ("in/out", "../secret", "in/../../secret", ".."):
        with pytest.raises(OSError, match=os.strerror(errno.EXDEV)):
            open_beneath(root, path, os.O_PATH)


@pytest.mark.usefixtures("unknown")
def test_without_the_kernels_help_no_link_is_followed_and_every_part_is_checked(root: int) -> None:
    assert content(root, "in/file") == b"file"
    for path in ("..", "in/..", "in/.", "in/", ".", "", "../secret", "in//file", "/etc"):
        with pytest.raises(OSError, match=os.strerror(errno.EXDEV)):
            open_beneath(root, path, os.O_PATH)
    with pytest.raises(OSError, match=os.strerror(errno.ELOOP)):
        open_beneath(root, "in/link", os.O_RDONLY)
    os.symlink("in", "folder", dir_fd=root)
    with pytest.raises(OSError, match=os.strerror(errno.ELOOP)):
        open_beneath(root, "folder/file", os.O_RDONLY)


def test_a_file_that_may_not_be_opened_says_nothing_of_the_next(root: int, monkeypatch: pytest.MonkeyPatch) -> None:
    call = beneath._syscall

    def refuse_one(number: int, root: int, path: bytes, how: bytes, size: int) -> int:
        if path != b"in/file":
            return int(call(number, root, path, how, size))
        ctypes.set_errno(errno.EPERM)
        return -1

    monkeypatch.setattr(beneath, "_syscall", refuse_one)
    with pytest.raises(PermissionError):
        open_beneath(root, "in/file", os.O_RDONLY)
    assert content(root, "in/link") == b"file"  # followed, as only the kernel's call does


def test_too_few_descriptors_at_first_say_nothing_of_the_kernel(root: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    beneath._is_known.cache_clear()
    with monkeypatch.context() as short:
        short.setattr(beneath, "_openat2", full)
        with pytest.raises(OSError, match=os.strerror(errno.EMFILE)):
            content(root, "in/link")
    assert content(root, "in/link") == b"file"


@pytest.mark.parametrize("known", [True, False])
def test_no_descriptor_is_left_and_none_goes_to_children(
    root: int, monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    monkeypatch.setattr(beneath, "_is_known", lambda: known)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        fd = open_beneath(root, "in/file", os.O_RDONLY)
        assert not os.get_inheritable(fd)
        os.close(fd)
        for wrong in ("in/out", "in/missing", "in/file/x", "in/../.."):
            with contextlib.suppress(OSError):
                open_beneath(root, wrong, os.O_RDONLY)
    assert len(os.listdir("/proc/self/fd")) - before < 20
