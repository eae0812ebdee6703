"""Test what a mount that is killed at a chosen moment, with all that holds it, leaves to the next one, while nothing
can be uploaded."""

from __future__ import annotations

import errno
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from datacache.settings import Settings
from tests.conformance.faults import Fault, FaultProxy
from tests.fuse_mount.bucket_mount import BucketMount
from tests.fuse_mount.mount_processes import waiting_for_the_end_of
from tests.promises import promise
from tests.servers import RcloneS3

LARGE = 300_000
"""More than goes into the journal."""
SIZES = (5, LARGE)

_numbers = itertools.count()


@pytest.fixture
def proxy(writable_rclone: RcloneS3) -> Iterator[FaultProxy]:
    with FaultProxy(writable_rclone.endpoint) as proxy:
        yield proxy


@pytest.fixture
def mount(
    writable_rclone: RcloneS3, proxy: FaultProxy, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> BucketMount:
    """A mount of an empty bucket behind the proxy."""
    for name, value in (writable_rclone.env() | {"AWS_ENDPOINT_URL": proxy.url}).items():
        monkeypatch.setenv(name, value)
    bucket = f"recovered-{next(_numbers)}"
    writable_rclone.client().create_bucket(Bucket=bucket)
    mount = BucketMount(writable_rclone, bucket, tmp_path / "mnt", settings, ttl_s=1.0)
    mount.mount()
    return mount


def stop_uploads(proxy: FaultProxy) -> None:
    """Nothing can be changed in the store, but all be read."""
    proxy.always(Fault(status=503, code="SlowDown", only=lambda method, _path: method in ("PUT", "POST", "DELETE")))


def die(mount: BucketMount) -> None:
    mount.kill_all()
    mount.revive()


def lose(handle: int) -> None:
    """Close a file of a mount that is gone."""
    with pytest.raises(OSError, match="Transport endpoint"):
        os.close(handle)


def sync_folder(path: Path) -> None:
    """Have all changes of names so far durable."""
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def end(mount: BucketMount, proxy: FaultProxy) -> dict[str, bytes]:
    """Everything uploaded: what the bucket has."""
    proxy.heal()
    proxy.accept()
    mount.flush()
    return {key: data for key, data in mount.objects("").items() if not key.endswith("/")}


@promise("A deletion stays one where the store forgot whose object it is, or a new file of the name is never closed")
def test_a_deletion_survives_a_new_file_of_the_name_that_was_cut_off(mount: BucketMount, proxy: FaultProxy) -> None:
    cases = list(itertools.product(("unlink", "rename"), SIZES))
    for how, size in cases:
        (mount.mountpoint / f"{how}-{size}").write_bytes(b"o" * size)
    mount.flush()
    stop_uploads(proxy)
    handles = []
    for how, size in cases:
        path = mount.mountpoint / f"{how}-{size}"
        if how == "unlink":
            path.unlink()
        else:
            path.rename(mount.mountpoint / f"other-{size}")
        handles.append(os.open(path, os.O_WRONLY | os.O_CREAT))
        os.write(handles[-1], b"n" * size)
    sync_folder(mount.mountpoint)
    die(mount)
    for handle in handles:
        lose(handle)
    found = end(mount, proxy)
    assert {f"{how}-{size}" for how, size in cases if found.get(f"{how}-{size}", b"")[:1] == b"o"} == set()
    others = {name: data for name, data in found.items() if name.startswith("other")}
    assert others == {f"other-{size}": b"o" * size for size in SIZES}


@promise("The next server of the same boot knows what the former one knew, also while the store is away")
def test_what_a_flush_has_uploaded_is_known_to_the_next_server_in_an_outage(
    mount: BucketMount, proxy: FaultProxy
) -> None:
    changed, deleted = mount.mountpoint / "changed", mount.mountpoint / "deleted"
    changed.write_bytes(b"old")
    deleted.write_bytes(b"old")
    assert len(os.listdir(mount.mountpoint)) == 2
    mount.flush()
    sync_folder(mount.mountpoint)  # nothing is left to be done for either, by the journal
    proxy.refuse()
    die(mount)
    changed.write_bytes(b"new")
    deleted.unlink()
    assert end(mount, proxy) == {"changed": b"new"}


@promise("`O_TRUNC` begins a new version")
def test_a_truncated_file_is_as_it_was_until_the_new_bytes_are_acknowledged(
    mount: BucketMount, proxy: FaultProxy
) -> None:
    cases = {mount.mountpoint / f"{uploaded}-{size}": size for uploaded in (True, False) for size in SIZES}
    for path, size in cases.items():
        if path.name == f"False-{SIZES[0]}":  # what comes before it is uploaded
            mount.flush()
            stop_uploads(proxy)
        path.write_bytes(b"o" * size)
    handles = [os.open(path, os.O_WRONLY | os.O_TRUNC) for path in cases]
    for handle, size in zip(handles, cases.values(), strict=True):
        os.write(handle, b"n" * (size + 1))
    sync_folder(mount.mountpoint)
    die(mount)
    for handle in handles:
        lose(handle)
    for path, size in cases.items():
        assert path.read_bytes() == b"o" * size
    assert end(mount, proxy) == {path.name: b"o" * size for path, size in cases.items()}


@pytest.mark.parametrize("killed", [False, True])
def test_a_file_that_is_truncated_by_opening_it_to_read_is_empty_when_it_is_closed(
    mount: BucketMount, proxy: FaultProxy, killed: bool
) -> None:
    paths = {size: mount.mountpoint / str(size) for size in SIZES}
    for size, path in paths.items():
        path.write_bytes(b"x" * size)
    mount.flush()
    for path in paths.values():
        os.close(os.open(path, os.O_RDONLY | os.O_TRUNC))
    if killed:
        die(mount)
    assert [path.read_bytes() for path in paths.values()] == [b"", b""]
    assert end(mount, proxy) == dict.fromkeys(map(str, SIZES), b"")


def test_attributes_and_bytes_of_an_open_file_change_after_its_upload(mount: BucketMount, proxy: FaultProxy) -> None:
    cases = list(itertools.product(("chmod", "utime"), SIZES))
    paths = [mount.mountpoint / f"{how}-{size}" for how, size in cases]
    handles = [os.open(path, os.O_WRONLY | os.O_CREAT) for path in paths]
    for handle, (_, size) in zip(handles, cases, strict=True):
        os.write(handle, b"x" * size)
        os.fsync(handle)
    mount.flush()
    for path, handle, (how, size) in zip(paths, handles, cases, strict=True):
        if how == "chmod":
            os.fchmod(handle, 0o600)
        else:
            os.utime(path, ns=(0, 10**18))
        os.pwrite(handle, b"y", size)
        os.close(handle)
    expected = {path.name: b"x" * size + b"y" for path, (_, size) in zip(paths, cases, strict=True)}
    assert {path.name: path.read_bytes() for path in paths} == expected
    assert end(mount, proxy) == expected


@promise("`close`, `fsync` and `fdatasync` make all that was written durable, with attributes")
def test_what_was_synced_survives_and_is_continued(mount: BucketMount, proxy: FaultProxy) -> None:
    stop_uploads(proxy)
    for mark in (b"1", b"2"):
        handles = {}
        for size in SIZES:
            handles[size] = os.open(mount.mountpoint / str(size), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.write(handles[size], mark * size)
            os.fsync(handles[size])
        die(mount)
        for handle in handles.values():
            lose(handle)
    assert end(mount, proxy) == {str(size): b"1" * size + b"2" * size for size in SIZES}


@promise("`rename`, `unlink`, `mkdir`, `rmdir`, `symlink` and `truncate` of a path are durable without `fsync`")
def test_a_renamed_folder_is_renamed_whole(mount: BucketMount, proxy: FaultProxy) -> None:
    folder = mount.mountpoint / "new"
    folder.mkdir()
    for number in range(20):
        (folder / str(number)).write_bytes(b"%d" % number)
    mount.flush()
    stop_uploads(proxy)
    for number in range(10, 30):
        (folder / str(number)).write_bytes(b"again %d" % number)
    folder.rename(mount.mountpoint / "run")
    die(mount)
    expected = {f"run/{n}": (b"again %d" if n >= 10 else b"%d") % n for n in range(30)}
    assert sorted(os.listdir(mount.mountpoint)) == ["run"]
    assert end(mount, proxy) == expected


@promise("`rename`, `unlink`, `mkdir`, `rmdir`, `symlink` and `truncate` of a path are durable without `fsync`")
def test_truncate_rmdir_and_symlink_survive(mount: BucketMount, proxy: FaultProxy) -> None:
    file, large, folder, link = (mount.mountpoint / name for name in ("file", "large", "folder", "link"))
    file.write_bytes(b"f" * 10)
    large.write_bytes(b"l" * LARGE)
    folder.mkdir()
    mount.flush()
    stop_uploads(proxy)
    os.truncate(file, 3)
    os.truncate(large, LARGE + 1)
    folder.rmdir()
    link.symlink_to("file")
    die(mount)
    assert file.read_bytes() == b"fff"
    assert large.read_bytes() == b"l" * LARGE + b"\0"
    assert (folder.exists(), os.readlink(link)) == (False, "file")
    assert end(mount, proxy) == {"file": b"fff", "large": b"l" * LARGE + b"\0", "link": b"file"}


# --- acknowledged when it is in the bucket ---


@pytest.fixture
def uploading(mount: BucketMount, monkeypatch: pytest.MonkeyPatch) -> BucketMount:
    """The same mount, with `ack=uploaded` and little patience; something was uploaded."""
    mount.unmount()
    mount.options["ack"] = "uploaded"
    mount.settings = replace(mount.settings, staging_wait_s=3.0)
    mount.mount()
    (mount.mountpoint / "before").write_bytes(b"before")
    assert os.listdir(mount.mountpoint) == ["before"]  # what was not asked for is an error in an outage
    return mount


def closing(path: Path) -> subprocess.Popen[str]:
    """A program that writes a file and waits for its close; what it says has the errno, or 0."""
    script = (
        "import os, sys\n"
        "handle = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT)\n"
        "os.write(handle, b'new')\n"
        "print('written', flush=True)\n"
        "try:\n"
        "    os.close(handle)\n"
        "    print(0)\n"
        "except OSError as exc:\n"
        "    print(exc.errno)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script, path], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "written\n"
    return process


@promise("With `--ack uploaded`, `close` and `fsync` return when the bytes are in the bucket")
def test_with_ack_uploaded_close_waits_in_an_outage_and_then_says_so(uploading: BucketMount, proxy: FaultProxy) -> None:
    proxy.refuse()
    program = closing(uploading.mountpoint / "another")
    proxy.accept()
    assert program.communicate(timeout=60)[0] == "0\n"
    assert uploading.objects("")["another"] == b"new"
    proxy.refuse()
    program = closing(uploading.mountpoint / "new")
    assert program.communicate(timeout=60)[0] == f"{errno.EIO}\n"
    assert "the store has not answered for" in uploading.info().log.read_text()
    assert end(uploading, proxy) == {"before": b"before", "new": b"new", "another": b"new"}


@promise("With `--ack uploaded`, `close` and `fsync` return when the bytes are in the bucket")
def test_with_ack_uploaded_who_waits_is_told_when_the_mount_ends(uploading: BucketMount, proxy: FaultProxy) -> None:
    info = uploading.info()
    stop_uploads(proxy)
    program = closing(uploading.mountpoint / "new")
    with waiting_for_the_end_of(info.supervisor):
        for number in (signal.SIGTERM, signal.SIGINT):  # the second one gives the last uploads up
            os.kill(info.pid, number)
    assert program.communicate(timeout=60)[0] in (f"{errno.EIO}\n", f"{errno.ENOTCONN}\n", f"{errno.ECONNABORTED}\n")
    proxy.heal()
    uploading.mount()
    assert end(uploading, proxy) == {"before": b"before", "new": b"new"}
