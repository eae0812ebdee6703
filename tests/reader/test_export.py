"""Exports: a snapshot as a plain folder, from real folders and a real S3, on real file systems."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from datacache import create_snapshot, export_snapshot, open_snapshot, verify_snapshot
from datacache.core.errors import ExportError, ObjectChangedError, UsageError
from datacache.core.ids import BLOCK_BYTES
from datacache.reader.export import folder as export_folder
from datacache.reader.export.folder import Folder
from tests.conformance.faults import Fault, FaultProxy
from tests.promises import promise

ROOT = Path(__file__).resolve().parents[2]
FILES = {
    "a.bin": b"hello",
    "empty": b"",
    "dir/with space/ünï ☃.txt": b"snow",
    "dir/b.bin": bytes(range(256)) * 100,
    "dir/deep/er/c.bin": b"c" * 70_000,
    "large.bin": random.Random(1).randbytes(2 * BLOCK_BYTES + 12345),
}


@pytest.fixture
def bucket(tmp_path: Path) -> Path:
    root = tmp_path / "bucket"
    fill(root)
    return root


def fill(root: Path) -> None:
    for number, (name, data) in enumerate(FILES.items()):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        os.utime(path, ns=(0, 1_600_000_000_123_456_789 + number))
    (root / "hollow" / "inside").mkdir(parents=True)


NOTE = ".datacache-exported"


def contents(folder: Path) -> dict[str, bytes]:
    """Without the note of what it is."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.is_symlink() and path.name != NOTE
    }


def inodes(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_ino for path in folder.rglob("*") if path.is_file() and path.name != NOTE}


@contextmanager
def mounted(folder: Path, *options: str) -> Iterator[Path]:
    folder.mkdir()
    subprocess.run(["mount", *options, folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


# --- what is in the folder -----------------------------------------------------------------------------------------


@promise("An export has every file with its bytes and its time")
@pytest.mark.parametrize("link", ["auto", "hard", "none"])
def test_the_folder_has_every_file_with_its_bytes_and_time_and_a_note_of_what_it_is(settings, bucket, tmp_path, link):
    create_snapshot("mask", str(bucket))
    out = tmp_path / "a" / "out"
    done = export_snapshot("mask", out, link=link)
    assert contents(out) == FILES
    for name in FILES:
        assert (out / name).stat().st_mtime_ns == (bucket / name).stat().st_mtime_ns
    assert (out / "hollow" / "inside").is_dir()
    assert sorted(path.name for path in out.iterdir()) == [NOTE, "a.bin", "dir", "empty", "hollow", "large.bin"]
    assert (done.files, done.bytes, done.kept, done.left_out) == (len(FILES), sum(map(len, FILES.values())), 0, ())
    assert done.directory == out
    assert done.ref == f"mask@{create_snapshot('mask', str(bucket)).id}"
    assert json.loads((out / NOTE).read_bytes()) == {"ref": done.ref}


def test_files_and_folders_have_the_modes_of_new_ones(settings, bucket, tmp_path):
    create_snapshot("mask", str(bucket))
    umask = os.umask(0o027)
    try:
        export_snapshot("mask", tmp_path / "out", link="none")
    finally:
        os.umask(umask)
    assert stat.S_IMODE((tmp_path / "out" / "dir" / "b.bin").stat().st_mode) == 0o640
    assert stat.S_IMODE((tmp_path / "out" / "dir").stat().st_mode) == 0o750


def test_a_snapshot_of_a_bucket_is_exported_cold_and_warm(settings, rclone_s3, tmp_path, monkeypatch):
    for name, value in rclone_s3.env().items():
        monkeypatch.setenv(name, value)
    fill(rclone_s3.make_bucket("exported"))
    create_snapshot("mask", "s3://exported")
    cold = export_snapshot("mask", tmp_path / "cold")
    assert contents(tmp_path / "cold") == FILES
    assert (cold.copied, cold.cloned, cold.linked) == (len(FILES), 0, 0)
    gets = rclone_s3.get_count("exported")
    export_snapshot("mask", tmp_path / "warm", link="hard")
    assert contents(tmp_path / "warm") == FILES
    assert rclone_s3.get_count("exported") == gets
    with open_snapshot("mask") as snapshot:
        for name in FILES:
            assert (tmp_path / "warm" / name).stat().st_mtime_ns == snapshot.stat(name).mtime_ns


def test_a_cold_export_fetches_many_objects_at_a_time(settings, rclone_s3, tmp_path, monkeypatch):
    folder = rclone_s3.make_bucket("overlapped")
    for number in range(64):
        (folder / f"{number:03}").write_bytes(b"x" * 1000)
    enough = threading.Event()
    asked: set[str] = set()

    def is_get(method: str, path: str) -> bool:
        if method == "GET" and "?" not in path:
            asked.add(path)
            if len(asked) >= 4:
                enough.set()
            return True
        return False

    with FaultProxy(rclone_s3.endpoint) as proxy:
        for name, value in (rclone_s3.env() | {"AWS_ENDPOINT_URL": proxy.url, "DATACACHE_PREFETCH": "0"}).items():
            monkeypatch.setenv(name, value)
        create_snapshot("mask", "s3://overlapped")
        # None of the first four is answered before all four have been asked for.
        proxy.always(Fault(wait=enough, only=is_get))
        assert export_snapshot("mask", tmp_path / "out").copied == 64
    assert len(contents(tmp_path / "out")) == 64


def test_what_is_cached_is_exported_when_the_bucket_has_lost_it(settings, bucket, tmp_path):
    create_snapshot("mask", str(bucket))
    with open_snapshot("mask") as snapshot:
        for name in FILES:
            snapshot.read(name)
    shutil.rmtree(bucket)
    assert export_snapshot("mask", tmp_path / "out").copied == len(FILES)
    assert contents(tmp_path / "out") == FILES


@promise("An export of an object that changed in the bucket is an error")
@pytest.mark.parametrize("link", ["auto", "hard", "none"])
def test_a_changed_object_is_an_error_that_names_it_and_no_file_of_its_name_appears(settings, bucket, tmp_path, link):
    create_snapshot("mask", str(bucket))
    (bucket / "dir" / "b.bin").write_bytes(b"other")
    with pytest.raises(ObjectChangedError, match=r"b\.bin"):
        export_snapshot("mask", tmp_path / "out", link=link)
    found = contents(tmp_path / "out")
    assert "dir/b.bin" not in found
    assert {name: data for name, data in found.items() if name in FILES}.items() <= FILES.items()


def test_progress_ends_with_all_files_and_bytes(settings, bucket, tmp_path):
    create_snapshot("mask", str(bucket))
    seen: list[tuple[int, int]] = []
    export_snapshot("mask", tmp_path / "out", progress=lambda *now: seen.append(now))
    assert seen == sorted(seen)
    assert seen[-1] == (len(FILES), sum(map(len, FILES.values())))


# --- links ---------------------------------------------------------------------------------------------------------


def test_hard_links_are_the_buckets_files_and_are_kept_when_it_is_run_again(settings, bucket, tmp_path):
    create_snapshot("mask", str(bucket))
    done = export_snapshot("mask", tmp_path / "out", link="hard")
    assert (done.linked, done.copied) == (len(FILES), 0)
    for name in FILES:
        assert (tmp_path / "out" / name).samefile(bucket / name)
    assert export_snapshot("mask", tmp_path / "out", link="hard").kept == len(FILES)


@promise("Editing an export changes no snapshot with stored objects")
def test_stored_objects_are_never_hard_links_so_that_editing_the_folder_changes_no_snapshot(settings, bucket, tmp_path):
    create_snapshot("mask", str(bucket), pin=True, objects=str(tmp_path / "objects"))
    shutil.rmtree(bucket)
    done = export_snapshot("mask", tmp_path / "out", link="hard")
    assert (done.linked, done.cloned + done.copied) == (0, len(FILES))
    assert contents(tmp_path / "out") == FILES
    assert (tmp_path / "out" / "a.bin").stat().st_mtime_ns == 1_600_000_000_123_456_789
    assert export_snapshot("mask", tmp_path / "out").kept == len(FILES)
    with (tmp_path / "out" / "a.bin").open("r+b") as file:
        file.write(b"HELLO")
    assert list(verify_snapshot("mask", read=True)) == []


def test_hard_links_across_file_systems_become_copies_and_are_counted_as_such(settings, bucket, tmp_path):
    create_snapshot("mask", str(bucket))
    with mounted(tmp_path / "other", "-t", "tmpfs", "tmpfs") as other:
        done = export_snapshot("mask", other / "out", link="hard")
        assert (done.linked, done.copied) == (0, len(FILES))
        assert contents(other / "out") == FILES


@promise("Editing an export changes no snapshot with stored objects")
def test_clones_share_the_disk_blocks_of_the_bucket_and_are_files_of_their_own(settings, tmp_path):
    image = tmp_path / "xfs"
    with image.open("wb") as file:
        file.truncate(400 * 2**20)
    subprocess.run(["mkfs.xfs", "-q", "-m", "reflink=1", image], check=True)
    with mounted(tmp_path / "disk", "-o", "loop", str(image)) as disk:
        fill(disk / "bucket")
        create_snapshot("mask", str(disk / "bucket"))
        os.sync()
        before = os.statvfs(disk)
        done = export_snapshot("mask", disk / "out")
        os.sync()
        after = os.statvfs(disk)
        assert (done.cloned, done.copied) == (len(FILES), 0)
        assert contents(disk / "out") == FILES
        assert (before.f_bfree - after.f_bfree) * before.f_frsize < len(FILES["large.bin"]) / 4
        (disk / "out" / "a.bin").write_bytes(b"mine")
        assert (disk / "bucket" / "a.bin").read_bytes() == b"hello"
        copied = export_snapshot("mask", disk / "copies", link="none")
        assert copied.copied == len(FILES)
        assert contents(disk / "copies") == FILES


def test_another_way_of_linking_is_refused(settings, bucket, tmp_path):
    create_snapshot("mask", str(bucket))
    with pytest.raises(UsageError, match="soft"):
        export_snapshot("mask", tmp_path / "out", link="soft")
    assert not (tmp_path / "out").exists()


# --- going on ------------------------------------------------------------------------------------------------------


def test_running_it_again_writes_nothing(settings, bucket, tmp_path):
    create_snapshot("mask", str(bucket))
    export_snapshot("mask", tmp_path / "out")
    before = inodes(tmp_path / "out")
    again = export_snapshot("mask", tmp_path / "out")
    assert (again.kept, again.copied) == (len(FILES), 0)
    assert inodes(tmp_path / "out") == before


KILLED = """
import os, signal, sys
from datacache import export_snapshot
from datacache.reader import export
export._PROGRESS_EVERY_S = 0.001
def progress(files, size):
    if files >= int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
export_snapshot("mask", sys.argv[1], progress=progress)
"""


@promise("A file has its name only when it is whole")
def test_an_export_that_is_killed_has_whole_files_only_and_goes_on_when_run_again(settings, tmp_path):
    bucket = tmp_path / "bucket"
    rng = random.Random(2)
    files = {f"{n % 7}/{n:04}": rng.randbytes(rng.randrange(30_000)) for n in range(600)}
    for name, data in files.items():
        (bucket / name).parent.mkdir(parents=True, exist_ok=True)
        (bucket / name).write_bytes(data)
    create_snapshot("mask", str(bucket))
    out = tmp_path / "out"
    for kill_at in (1, 100, 250):
        command = [sys.executable, "-c", KILLED, str(out), str(kill_at)]
        done = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=False)
        assert done.returncode == -signal.SIGKILL
        found = contents(out)
        whole = {name: data for name, data in found.items() if not name.startswith(".datacache-export/")}
        assert whole.items() <= files.items()
        assert kill_at <= len(whole) < len(files)
    # What a power cut makes of a file that was not on the disk yet.
    (out / sorted(whole)[0]).write_bytes(b"")
    done = export_snapshot("mask", out)
    assert done.kept == len(whole) - (1 if files[sorted(whole)[0]] else 0)
    assert contents(out) == files


@promise("A file has its name only when it is whole")
def test_a_full_disk_is_an_error_with_a_way_out_and_what_is_there_stays(settings, bucket, tmp_path):
    create_snapshot("mask", str(bucket))
    with mounted(tmp_path / "small", "-t", "tmpfs", "-o", "size=1m", "tmpfs") as small:
        with pytest.raises(ExportError, match="No space left") as caught:
            export_snapshot("mask", small / "out")
        assert "run it again" in caught.value.hint
        assert "large.bin" in str(caught.value)
        found = contents(small / "out")
        found.pop(".datacache-export/snapshot")
        assert found.items() <= FILES.items()
        assert "large.bin" not in found
        subprocess.run(["mount", "-o", "remount,size=64m", small], check=True)
        again = export_snapshot("mask", small / "out")
        assert again.kept == len(found)
        assert contents(small / "out") == FILES


@promise("Two exports into one folder are kept apart")
def test_two_exports_into_one_folder_at_a_time_are_refused(settings, bucket, tmp_path):
    create_snapshot("mask", str(bucket))
    refused: list[str] = []

    def progress(_files: int, _bytes: int) -> None:
        if not refused:
            with pytest.raises(ExportError, match="under way") as caught:
                export_snapshot("mask", tmp_path / "out")
            refused.append(str(caught.value))

    export_snapshot("mask", tmp_path / "out", progress=progress)
    assert refused
    assert contents(tmp_path / "out") == FILES


@promise("An export refuses a folder that holds anything else, or another version")
def test_an_unfinished_export_of_another_snapshot_is_refused_naming_it(settings, bucket, tmp_path):
    first = create_snapshot("mask", str(bucket))

    def fail(_files: int, _bytes: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export_snapshot("mask", tmp_path / "out", progress=fail)
    (bucket / "new").write_bytes(b"new")
    create_snapshot("mask", str(bucket))
    with pytest.raises(UsageError, match=first.id) as caught:
        export_snapshot("mask", tmp_path / "out")
    assert first.id in caught.value.hint
    assert export_snapshot(f"mask@{first.id}", tmp_path / "out").files == len(FILES)


@promise("An export refuses a folder that holds anything else, or another version")
@pytest.mark.parametrize("pin", [False, True])
def test_a_version_is_never_taken_for_another_however_alike_their_files_are(settings, tmp_path, pin):
    bucket, out = tmp_path / "bucket", tmp_path / "out"
    bucket.mkdir()
    for label in (b"0 0.5 0.5 0.1 0.1", b"1 0.5 0.5 0.1 0.1"):
        (bucket / "new").write_bytes(label)
        os.utime(bucket / "new", ns=(0, 0))  # as what came from the web
        os.replace(bucket / "new", bucket / "label.txt")
        create_snapshot("mask", str(bucket), pin=pin)
        if not out.exists():
            first = export_snapshot("mask", out)
    with pytest.raises(UsageError, match=f"export of {first.ref}, not of mask@"):
        export_snapshot("mask", out)
    assert contents(out) == {"label.txt": b"0 0.5 0.5 0.1 0.1"}
    assert export_snapshot(first.ref, out).kept == 1
    (out / NOTE).unlink()
    for ref in (first.ref, "mask"):
        with pytest.raises(UsageError, match=r"holds 'label\.txt' and is not an export"):
            export_snapshot(ref, out)


@promise("Two exports into one folder are kept apart")
def test_an_export_that_ends_while_another_begins_is_not_mixed_with_it(settings, bucket, tmp_path, monkeypatch):
    first = create_snapshot("mask", str(bucket))
    (bucket / "new").write_bytes(b"new")
    create_snapshot("mask", str(bucket))
    lock, refs = export_folder._lock, [f"mask@{first.id}"]

    def lock_late(state: int, path: Path) -> None:
        if refs:
            os.rmdir(path / ".datacache-export")
            export_snapshot(refs.pop(), path)
        lock(state, path)

    monkeypatch.setattr(export_folder, "_lock", lock_late)
    with pytest.raises(ExportError, match="has just ended"):
        export_snapshot("mask", tmp_path / "out")
    assert contents(tmp_path / "out") == FILES


# --- folders that are not fit --------------------------------------------------------------------------------------


def add_file(out: Path) -> None:
    (out / "dir" / "mine.txt").write_text("mine")


def add_folder(out: Path) -> None:
    (out / "mine").mkdir(parents=True)


def change_file(out: Path) -> None:
    (out / "a.bin").write_bytes(b"HELLO")


def replace_by_link(out: Path) -> None:
    (out / "a.bin").unlink()
    (out / "a.bin").symlink_to("/etc/hostname")


def replace_folder_by_link(out: Path) -> None:
    shutil.move(out / "dir", out.parent / "elsewhere")
    (out / "dir").symlink_to(out.parent / "elsewhere")


def replace_by_folder(out: Path) -> None:
    (out / "a.bin").unlink()
    (out / "a.bin").mkdir()


@promise("An export refuses a folder that holds anything else, or another version")
@pytest.mark.parametrize(
    ("change", "named"),
    [
        (add_file, r"file 'dir/mine\.txt'"),
        (add_folder, "folder 'mine'"),
        (change_file, r"file 'a\.bin'.*size or time"),
        (replace_by_link, r"link 'a\.bin'"),
        (replace_folder_by_link, "link 'dir'"),
        (replace_by_folder, r"folder 'a\.bin'"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_folder_that_holds_anything_else_is_refused_and_left_alone(settings, bucket, tmp_path, change, named):
    create_snapshot("mask", str(bucket))
    out = tmp_path / "out"
    export_snapshot("mask", out)
    change(out)
    before = sorted(out.rglob("*")), contents(out)
    with pytest.raises(UsageError, match=named):
        export_snapshot("mask", out)
    assert (sorted(out.rglob("*")), contents(out)) == before


def test_an_empty_disks_lost_and_found_is_no_hindrance(settings, bucket, tmp_path):
    create_snapshot("mask", str(bucket))
    (tmp_path / "out" / "lost+found").mkdir(parents=True)
    assert export_snapshot("mask", tmp_path / "out").files == len(FILES)


def test_a_file_in_the_place_of_the_folder_is_refused(settings, bucket, tmp_path):
    create_snapshot("mask", str(bucket))
    (tmp_path / "out").write_text("a file")
    for out in (tmp_path / "out", tmp_path / "out" / "below"):
        with pytest.raises(UsageError, match="no folder"):
            export_snapshot("mask", out)
    with pytest.raises(ExportError, match="/proc/nowhere"):
        export_snapshot("mask", "/proc/nowhere")


def test_a_snapshot_of_an_export_is_exported_like_any_other(settings, bucket, tmp_path):
    create_snapshot("mask", str(bucket))
    first = export_snapshot("mask", tmp_path / "out")
    create_snapshot("again", str(tmp_path / "out"))
    export_snapshot("again", tmp_path / "second")
    export_snapshot("again", tmp_path / "second")
    assert json.loads((tmp_path / "second" / NOTE).read_bytes()) == {"ref": first.ref}
    assert json.loads((tmp_path / "second" / f"{NOTE}~").read_bytes())["ref"].startswith("again@")
    with pytest.raises(UsageError, match="not an export of again@"):
        export_snapshot("again", tmp_path / "out")


def test_a_snapshot_of_an_unfinished_export_is_exported_like_any_other(settings, bucket, tmp_path):
    fill(tmp_path / "again")
    (tmp_path / "again" / ".datacache-export").mkdir()
    (tmp_path / "again" / ".datacache-export" / "snapshot").write_text("{}")
    create_snapshot("mask", str(tmp_path / "again"))
    export_snapshot("mask", tmp_path / "out")
    found = contents(tmp_path / "out")
    assert json.loads(found.pop(f"{NOTE}~"))["ref"].startswith("mask@")
    assert found == FILES | {".datacache-export/snapshot": b"{}"}


# --- nothing outside of it -----------------------------------------------------------------------------------------


@promise("An export writes nothing outside of its folder")
def test_paths_that_lead_out_of_the_folder_are_left_out_and_reported(settings, tmp_path, monkeypatch):
    from datacache.store.open import open_store
    from tests.memory import serve_memory

    serve_memory(monkeypatch)
    store = open_store("memory://hostile", settings)
    bad = ["../escaped", "a/../../escaped", "/etc/escaped", "a//b", "a/./b", "nul\0byte", "x" * 256, "both", ".."]
    for key in [*bad, "good", "both/inside"]:
        store.put(f"p/{key}", key.encode())
    create_snapshot("hostile", "memory://hostile/p")
    done = export_snapshot("hostile", tmp_path / "deep" / "er" / "out")
    assert sorted(done.left_out) == sorted(bad)
    assert contents(tmp_path / "deep") == {"er/out/good": b"good", "er/out/both/inside": b"both/inside"}
    assert not list(tmp_path.rglob("*escaped*"))
    assert not Path("/etc/escaped").exists()


@promise("An export writes nothing outside of its folder")
def test_a_link_that_appears_in_the_folder_is_not_followed(settings, bucket, tmp_path):
    create_snapshot("mask", str(bucket))
    (tmp_path / "outside").mkdir()
    with open_snapshot("mask") as snapshot:
        folder = Folder(tmp_path / "out", snapshot.rows.tree, snapshot.ref, lambda _found, _entry: True)
        (tmp_path / "out" / "dir").symlink_to(tmp_path / "outside")
        for path in (b"dir/", b"dir/deep/er/"):
            with pytest.raises(ExportError, match="link"):
                folder.directory(path)
        folder.finish(complete=False)
    assert list((tmp_path / "outside").iterdir()) == []


def test_names_that_are_no_text_are_exported_as_they_are(settings, tmp_path):
    bucket = tmp_path / "bucket"
    bucket.mkdir()
    name = os.fsdecode(b"caf\xe9 \n\x1b[31m")
    (bucket / name).write_bytes(b"1")
    create_snapshot("mask", str(bucket))
    export_snapshot("mask", tmp_path / "out")
    assert contents(tmp_path / "out") == {name: b"1"}
