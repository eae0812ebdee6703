"""The comparison itself: it accepts a faithful directory and finds what is planted in an unfaithful one."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.fuse_mount.posix_model import Comparison, PlainSubject, Side, Subject, expected_objects

_QUICK = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    database=None,
    derandomize=True,
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate],
)


def compare(
    subject: Subject, plain: Path, prepare: Callable[[Comparison], None] = lambda _: None, *, examples: int = 60
) -> None:
    """Run the state machine, with a new folder for each sequence."""
    numbers = itertools.count()

    class Machine(Comparison):
        def __init__(self) -> None:
            super().__init__()
            prepare(self)

        def setting(self) -> tuple[Subject, Path]:
            return subject, plain / f"case-{next(numbers)}"

    run_state_machine_as_test(Machine, settings=settings(_QUICK, max_examples=examples))  # type: ignore[no-untyped-call]


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """An empty plain folder, and one for the other side."""
    plain, other = tmp_path / "plain", tmp_path / "other"
    plain.mkdir()
    other.mkdir()
    return plain, other


def refusing(machine: Comparison) -> None:
    """The other side refuses hard links too, as a mount of an object store does."""
    machine.other.refuses = True
    method = machine.other.link

    def quietly(path: str, to: str) -> None:
        restore = machine.other.parent_times(to)
        try:
            method(path, to)
        finally:
            restore()

    machine.other.link = quietly  # type: ignore[method-assign]


def lose_bytes(method: Callable[..., Any], *arguments: Any) -> Any:
    *rest, data = arguments
    method(*rest, data[:-1] + b"!" if len(data) > 4095 else data)
    return len(data)


def forget_a_truncation(method: Callable[..., Any], slot: int, size: int) -> Any:
    return None if size else method(slot, size)


def forget_mode(method: Callable[..., Any], path: str, mode: int) -> Any:
    return None if mode == 0o700 else method(path, mode)


def forget_nanoseconds(method: Callable[..., Any], path: str, mtime_ns: int) -> Any:
    return method(path, mtime_ns // 1000 * 1000)


def keep_what_was_unlinked(method: Callable[..., Any], path: str) -> Any:
    content = Path(method.__self__.path(path))
    data = content.read_bytes() if content.is_file() and not content.is_symlink() else b""
    method(path)
    if len(data) > 4096:
        content.write_bytes(data)


def remove_what_is_not_empty(method: Callable[..., Any], path: str) -> Any:
    folder = method.__self__.path(path)
    if os.path.isdir(folder) and not os.path.islink(folder):
        for name in os.listdir(folder):
            if not os.path.isdir(f"{folder}/{name}"):
                os.unlink(f"{folder}/{name}")
    return method(path)


@pytest.mark.parametrize(
    ("operation", "wrong"),
    [
        ("append", lose_bytes),
        ("write", lose_bytes),
        ("ftruncate", forget_a_truncation),
        ("chmod", forget_mode),
        ("utimens", forget_nanoseconds),
        ("unlink", keep_what_was_unlinked),
        ("rmdir", remove_what_is_not_empty),
    ],
)
def test_an_operation_that_does_something_else_is_found(
    folders: tuple[Path, Path], operation: str, wrong: Callable[..., Any]
) -> None:
    def plant(machine: Comparison) -> None:
        refusing(machine)
        method = getattr(machine.other, operation)
        setattr(machine.other, operation, lambda *arguments: wrong(method, *arguments))

    plain, other = folders
    with pytest.raises((AssertionError, OSError)):
        compare(PlainSubject(other), plain, plant, examples=1500)


class _Forgetful(PlainSubject):
    """Its remount loses the last byte of every file."""

    def remount(self) -> None:
        for path in self.folder().rglob("*"):
            if path.is_file() and not path.is_symlink() and path.stat().st_size:
                os.truncate(path, path.stat().st_size - 1)


def test_what_a_remount_loses_is_found(folders: tuple[Path, Path]) -> None:
    plain, other = folders
    with pytest.raises((AssertionError, OSError)):
        compare(_Forgetful(other), plain, refusing, examples=1500)


class _Bucket(PlainSubject):
    """A directory that says what its bucket holds: what is there, as somebody changes it."""

    def __init__(self, folder: Path, change: Callable[[dict[str, bytes]], None]) -> None:
        super().__init__(folder)
        self._change = change

    def objects(self, prefix: str) -> Mapping[str, bytes]:
        objects, _, empty = expected_objects(self.folder() / prefix)
        self._change(objects)
        return objects | dict.fromkeys(empty, b"")


def stale(objects: dict[str, bytes]) -> None:
    for key, data in list(objects.items())[:1]:
        objects[key] = data + b"x"


def resurrected(objects: dict[str, bytes]) -> None:
    objects["deleted long ago"] = b""


def lost(objects: dict[str, bytes]) -> None:
    for key in list(objects)[:1]:
        del objects[key]


def test_a_bucket_with_the_same_objects_is_accepted(folders: tuple[Path, Path]) -> None:
    plain, other = folders
    compare(_Bucket(other, lambda _: None), plain, refusing)


@pytest.mark.parametrize("change", [stale, resurrected, lost])
def test_a_bucket_with_other_objects_is_found(
    folders: tuple[Path, Path], change: Callable[[dict[str, bytes]], None]
) -> None:
    plain, other = folders
    with pytest.raises((AssertionError, OSError)):
        compare(_Bucket(other, change), plain, refusing, examples=1500)


def test_a_side_says_what_went_wrong_by_its_name(tmp_path: Path) -> None:
    side = Side(tmp_path, refuses=False)
    assert side.attempt("unlink", "nothing") == ("ENOENT",)
