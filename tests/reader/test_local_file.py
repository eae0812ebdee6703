"""Local paths of a snapshot's files: links and copies, what holds them, and what is left when processes die."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from datacache import api
from datacache.core.errors import CacheError, ObjectChangedError, PathNotFoundError, StoreError
from datacache.core.ids import BLOCK_BYTES
from datacache.daemon import paths
from datacache.reader.local_file import LocalFiles
from datacache.settings import Settings, load_settings
from datacache.tiers import layout
from tests.promises import promise
from tests.servers import RcloneS3

LARGE = random.Random(7).randbytes(3 * BLOCK_BYTES + 54321)
FILES = {"small.bin": b"small" * 1000, "deep/large.tfrecord": LARGE, "empty": b"", "name with ünï ☃": b"snow"}


@pytest.fixture
def in_a_bucket(rclone_s3: RcloneS3, home: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Settings, Path]:
    """The files in a bucket of a real server: the settings, and the bucket's folder."""
    bucket = rclone_s3.make_bucket(f"local-{os.urandom(4).hex()}")
    for name, data in FILES.items():
        (bucket / name).parent.mkdir(exist_ok=True)
        (bucket / name).write_bytes(data)
    for name, value in rclone_s3.env().items():
        monkeypatch.setenv(name, value)
    return load_settings(), bucket


def _warm(settings: Settings, url: str) -> str:
    """A snapshot of it, all of which is on the SSD."""
    ref = api.create_snapshot("files", url, settings=settings).ref
    client = api.connect(settings)
    job = client.warm(ref)
    while client.job(job)["state"] == "running":
        time.sleep(0.01)
    return ref


def _links(path: Path) -> int:
    return path.stat().st_nlink


@promise("A local path has the version's bytes for as long as it is held")
def test_every_file_has_a_local_path_for_as_long_as_it_is_held(in_a_bucket: tuple[Settings, Path]) -> None:
    settings, bucket = in_a_bucket
    ref = api.create_snapshot("files", f"s3://{bucket.name}", settings=settings).ref
    files = LocalFiles(api.open_snapshot(ref, settings), settings)
    held = {name: files.open(name) for name in FILES}
    for name, file in held.items():
        assert file.path.read_bytes() == FILES[name]
        assert file.path.name.endswith(name.rpartition("/")[2])
        file.check()
    for file in held.values():
        file.close()
        file.close()
        assert not file.path.exists()
    with files.open("small.bin") as one, files.open("small.bin") as other:
        assert one.path != other.path


def test_a_large_object_that_is_cached_is_linked_and_costs_no_room(in_a_bucket: tuple[Settings, Path]) -> None:
    settings, bucket = in_a_bucket
    ref = _warm(settings, f"s3://{bucket.name}")
    (cached,) = layout.ssd_dir(settings.home).glob("o-*")
    with LocalFiles(api.open_snapshot(ref, settings), settings).open("deep/large.tfrecord") as file:
        assert file.path.samefile(cached)
        assert file.path.read_bytes() == LARGE
    assert _links(cached) == 1


@promise("A local path has the version's bytes for as long as it is held")
def test_a_path_that_is_held_outlives_the_eviction_of_its_object(in_a_bucket: tuple[Settings, Path]) -> None:
    settings, bucket = in_a_bucket
    ref = _warm(settings, f"s3://{bucket.name}")
    with LocalFiles(api.open_snapshot(ref, settings), settings).open("deep/large.tfrecord") as file:
        api.connect(settings).evict(None)
        assert list(layout.ssd_dir(settings.home).glob("o-*")) == []
        assert file.path.read_bytes() == LARGE


@promise("A cached file is linked to only if all its bytes match their checksums")
def test_a_cached_object_with_a_flipped_bit_is_never_linked_to(in_a_bucket: tuple[Settings, Path]) -> None:
    settings, bucket = in_a_bucket
    ref = _warm(settings, f"s3://{bucket.name}")
    (cached,) = layout.ssd_dir(settings.home).glob("o-*")
    with cached.open("r+b") as tampered:
        tampered.seek(2 * BLOCK_BYTES + 99)
        tampered.write(bytes([LARGE[2 * BLOCK_BYTES + 99] ^ 4]))
    files = LocalFiles(api.open_snapshot(ref, settings), settings)
    for _ in range(2):
        with files.open("deep/large.tfrecord") as file:
            assert file.path.read_bytes() == LARGE


@promise("A cached file is linked to only if all its bytes match their checksums")
def test_a_cached_object_that_was_cut_short_is_read_another_way(in_a_bucket: tuple[Settings, Path]) -> None:
    settings, bucket = in_a_bucket
    ref = _warm(settings, f"s3://{bucket.name}")
    (cached,) = layout.ssd_dir(settings.home).glob("o-*")
    os.truncate(cached, BLOCK_BYTES + 5)
    with LocalFiles(api.open_snapshot(ref, settings), settings).open("deep/large.tfrecord") as file:
        assert file.path.read_bytes() == LARGE


def test_without_the_cache_files_are_copies(in_a_bucket: tuple[Settings, Path]) -> None:
    settings, bucket = in_a_bucket
    ref = _warm(settings, f"s3://{bucket.name}")
    past = replace(settings, bypass_local=True)
    with LocalFiles(api.open_snapshot(ref, past), past).open("deep/large.tfrecord") as file:
        assert _links(file.path) == 1
        assert file.path.read_bytes() == LARGE


@pytest.fixture
def in_a_folder(settings: Settings, home: Path) -> tuple[Settings, Path]:
    """The files in a folder on the file system of the home."""
    folder = home / "source"
    for name, data in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return settings, folder


@promise("A replaced `file://` object is an error")
def test_a_file_of_this_machine_is_linked_and_a_change_in_place_is_found(in_a_folder: tuple[Settings, Path]) -> None:
    settings, folder = in_a_folder
    ref = api.create_snapshot("files", folder.as_uri(), settings=settings).ref
    with LocalFiles(api.open_snapshot(ref, settings), settings).open("small.bin") as file:
        assert file.path.samefile(folder / "small.bin")
        file.check()
        with (folder / "small.bin").open("r+b") as written:
            written.write(b"SMALL")
        os.utime(folder / "small.bin", ns=(0, 0))
        with pytest.raises(ObjectChangedError, match=r"small\.bin"):
            file.check()


@promise("A replaced `file://` object is an error")
def test_a_file_that_was_replaced_is_an_error_and_one_that_is_replaced_later_stays(
    in_a_folder: tuple[Settings, Path],
) -> None:
    settings, folder = in_a_folder
    ref = api.create_snapshot("files", folder.as_uri(), settings=settings).ref
    files = LocalFiles(api.open_snapshot(ref, settings), settings)
    with files.open("deep/large.tfrecord") as file:
        (folder / "new").write_bytes(b"other")
        os.replace(folder / "new", folder / "deep/large.tfrecord")
        assert file.path.read_bytes() == LARGE
    with pytest.raises(ObjectChangedError):
        files.open("deep/large.tfrecord")
    assert list(paths.files_dir(settings.home).glob("*/*")) == []


def test_what_has_no_file_is_an_error_that_says_so(in_a_folder: tuple[Settings, Path]) -> None:
    settings, folder = in_a_folder
    ref = api.create_snapshot("files", folder.as_uri(), settings=settings).ref
    files = LocalFiles(api.open_snapshot(ref, settings), settings)
    with pytest.raises(PathNotFoundError, match="nothing"):
        files.open("nothing")
    with pytest.raises(CacheError, match="folder"):
        files.open("deep")
    (folder / "small.bin").unlink()
    with pytest.raises(StoreError, match=r"small\.bin"):
        files.open("small.bin")


_HOLD = """
import sys
import time
from datacache import api
from datacache.settings import load_settings
from datacache.reader.local_file import LocalFiles
held = LocalFiles(api.open_snapshot("files"), load_settings()).open("small.bin")
print(held.path, flush=True)
sys.stdin.readline()
"""


@promise("The next process removes what killed ones left of local files")
def test_what_a_killed_process_left_is_removed_by_the_next_and_the_living_ones_stay(
    in_a_folder: tuple[Settings, Path],
) -> None:
    settings, folder = in_a_folder
    ref = api.create_snapshot("files", folder.as_uri(), settings=settings).ref
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=settings.home
        )
        for _ in range(3)
    ]
    held = []
    for process in processes:
        assert process.stdout is not None
        held.append(Path(process.stdout.readline().strip()))
    killed, living, ended = processes
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    ended.communicate("\n")
    assert [path.exists() for path in held] == [True, True, False]
    with LocalFiles(api.open_snapshot(ref, settings), settings).open("small.bin"):
        assert [path.parent.exists() for path in held] == [False, True, False]
        assert held[1].read_bytes() == FILES["small.bin"]
    living.communicate("\n")
    assert not held[1].parent.exists()


@promise("The next process removes what killed ones left of local files")
def test_a_child_of_a_fork_takes_nothing_from_its_parent(in_a_folder: tuple[Settings, Path]) -> None:
    settings, folder = in_a_folder
    ref = api.create_snapshot("files", folder.as_uri(), settings=settings).ref
    files = LocalFiles(api.open_snapshot(ref, settings), settings)
    with files.open("small.bin") as file:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                with files.open("deep/large.tfrecord") as own:
                    code = int(own.path.parent == file.path.parent or own.path.read_bytes() != LARGE)
                file.close()
            finally:
                os._exit(code)
        assert os.waitpid(pid, 0)[1] == 0
        assert file.path.read_bytes() == FILES["small.bin"]
