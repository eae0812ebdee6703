"""A power cut of the staging disk loses nothing that was acknowledged."""

from __future__ import annotations

import os
import random
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from datacache import api
from datacache.settings import Settings
from datacache.writeback.draft import INLINE_BYTES
from datacache.writeback.staging.files import StagedFiles
from fuse_mount.bucket.fs.names import Changes
from tests.fuse_mount.test_bucket_fs import Directory
from tests.power_cut import cut_disk
from tests.promises import promise

Tree = dict[str, bytes | None]
"""A folder has no bytes."""


@contextmanager
def opened(bucket: Path, settings: Settings, disk: Path) -> Iterator[Directory]:
    """Open a bucket that nothing is uploaded to; what is written is staged on the disk."""
    live = api.open_bucket(f"file://{bucket}", replace(settings, staging=disk / "staging"), who="test")
    live.uploader.stop(10)
    try:
        yield Directory(live)
    finally:
        live.close()


def tree(directory: Directory, folder: str = "") -> Tree:
    found: Tree = {}
    for name in directory.names(folder):
        path = f"{folder}/{name}" if folder else name
        if stat.S_ISDIR(directory.attr(path).mode):
            found |= {path: None} | tree(directory, path)
        else:
            found[path] = directory.read(path)
    return found


def write(directory: Directory, path: str, data: bytes, offset: int, flags: int = 0) -> None:
    handle = directory.open(path, os.O_WRONLY | flags)
    directory.do(directory.fs.handles.write, handle, offset, data)
    directory.close(handle)


def take_step(directory: Directory, draw: random.Random, before: Tree) -> Tree:
    """Change something: what there is then."""
    after = dict(before)
    files = [path for path, data in before.items() if data is not None]
    way = draw.choice(["write", "write", "change", "truncate", "rename", "unlink"]) if len(files) > 3 else "write"
    path = draw.choice(files) if way != "write" else f"d{draw.randrange(3)}/{draw.randrange(3)}"
    data = before.get(path) or b""
    if way == "write":
        after[path] = draw.randbytes(draw.choice([1, 3000, INLINE_BYTES + 1, 2 * INLINE_BYTES]))
        if path in before:
            write(directory, path, after[path] or b"", 0, os.O_TRUNC)
        elif (folder := path.partition("/")[0]) in before:
            directory.write(path, after[path] or b"")
        else:
            directory.mkdir(folder)
            after = before | {folder: None}
    elif way == "change":
        offset, new = draw.randint(0, len(data)), draw.randbytes(9000)
        write(directory, path, new, offset)
        after[path] = data[:offset] + new + data[offset + len(new) :]
    elif way == "truncate":
        after[path] = data[: len(data) // 2]
        directory.do(directory.fs.names.setattr, directory.attr(path).ino, Changes(size=len(data) // 2))
    elif way == "rename":
        new_path = draw.choice([*files, f"{path}-renamed"])
        directory.rename(path, new_path)
        after[new_path] = after.pop(path)
    else:
        directory.unlink(path)
        del after[path]
    return after


@promise("`close`, `fsync` and `fdatasync` make all that was written durable, with attributes")
@promise("`rename`, `unlink`, `mkdir`, `rmdir`, `symlink` and `truncate` of a path are durable without `fsync`")
def test_what_a_call_acknowledged_outlives_a_power_cut(
    tmp_path: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = tmp_path / "bucket"
    bucket.mkdir()
    draw = random.Random(4)
    expected: Tree = {}
    with cut_disk(tmp_path) as disk:
        cuts: list[tuple[Path, list[Tree]]] = []
        removed: list[Path] = []
        remove = StagedFiles.remove

        def remove_for_good(files: StagedFiles, number: int) -> None:
            remove(files, number)
            disk.sync()  # a file system may bring this to the disk before all that is only written
            removed.append(disk.cut())

        monkeypatch.setattr(StagedFiles, "remove", remove_for_good)
        with opened(bucket, settings, disk.folder) as directory:
            cuts.append((disk.cut(), [{}]))
            for _ in range(18):
                before, expected = expected, take_step(directory, draw, expected)
                while removed:  # by a thread of its own, at any moment
                    cuts.append((removed.pop(), [before, expected]))
                cuts.append((disk.cut(), [expected]))
        monkeypatch.undo()
        for cut, allowed in cuts:
            with disk.after(cut) as left, opened(bucket, settings, left) as directory:
                assert tree(directory) in allowed
