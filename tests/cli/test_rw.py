"""`dsctl mount --rw`, `flush`, `status` and `umount` of read-write mounts, on a real S3 server and the real kernel."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from datacache.settings import StoreOptions, load_settings
from dataset_cli.commands import doctor
from dataset_cli.commands.writes import error_lines
from tests import leftovers
from tests.cli.conftest import ROOT, Dsctl
from tests.conformance.faults import Fault, FaultProxy
from tests.promises import promise
from tests.servers import RcloneS3


@pytest.fixture
def store(rclone_s3: RcloneS3, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    """Yield what stands between the commands and the S3 server, and can refuse."""
    with FaultProxy(rclone_s3.endpoint) as proxy:
        for name, value in (rclone_s3.env() | {"AWS_ENDPOINT_URL": proxy.url}).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("DATACACHE_STORE_TIMEOUT_S", "2")
        yield proxy


@pytest.fixture
def place(rclone_s3: RcloneS3) -> Path:
    """A bucket, as the folder that the server keeps it in."""
    return rclone_s3.make_bucket(f"cli-{uuid.uuid4().hex[:12]}")


@pytest.fixture
def url(store: FaultProxy, place: Path) -> str:
    return f"s3://{place.name}/run"


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """The mount point."""
    target = tmp_path / "mnt"
    target.mkdir()
    yield target
    leftovers.unmount_under(tmp_path)


def test_a_bucket_is_mounted_written_flushed_and_unmounted(dsctl: Dsctl, url: str, place: Path, folder: Path) -> None:
    mounted = dsctl("mount", "--rw", url, folder)
    assert mounted.code == 0, mounted.err
    assert f"{url}/ is mounted at {folder}, to read and write; staged in " in mounted.out
    (folder / "a.pt").write_bytes(b"x" * 10_000)
    flushed = dsctl("flush", folder)
    assert flushed.code == 0, flushed.err
    assert flushed.out == f"everything written to {folder} is in {url}/\n"
    assert (place / "run" / "a.pt").read_bytes() == b"x" * 10_000
    (folder / "b.pt").write_bytes(b"y" * 10_000)
    gone = dsctl("umount", folder)
    assert (gone.code, gone.out) == (0, f"{folder} is unmounted\n"), gone.err
    assert (place / "run" / "b.pt").read_bytes() == b"y" * 10_000
    assert dsctl("umount", folder).code == 1
    assert dsctl("flush").out == "nothing is waiting to be uploaded\n"


def test_status_says_that_nobody_else_keeps_a_mount(dsctl: Dsctl, url: str, folder: Path) -> None:
    assert dsctl("mount", "--rw", url, folder).code == 0
    assert dsctl("daemon", "stop").code == 0
    assert "daemon   not running; a mount whose processes all die now is lost" in dsctl("status").out
    assert dsctl("umount", folder).code == 0
    assert "daemon   not running; it starts when it is needed" in dsctl("status").out


def test_a_mount_that_waits_for_a_former_one_says_so(dsctl: Dsctl, url: str, folder: Path) -> None:
    assert dsctl("mount", "--rw", url, folder).code == 0
    with (folder / "open.log").open("w"):
        assert dsctl("umount", "--lazy", folder).code == 0
        command = [sys.executable, "-m", "dataset_cli", "mount", "--rw", url, str(folder)]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT)
        assert process.stderr is not None
        assert process.stderr.readline().startswith(f"warning: {url} is not mounted yet: ")
    with process:
        assert process.wait(60) == 0


@promise("A busy mount stays, and the message names its users")
def test_a_shell_in_the_mount_is_named_and_the_command_that_it_started_is_not(
    dsctl: Dsctl, url: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert dsctl("mount", "--rw", url, folder).code == 0
    with monkeypatch.context() as shell:
        shell.chdir(folder)
        refused = dsctl("umount", ".")
    assert refused.code == 1
    assert re.search(rf"is busy: used by {os.getpid()} \(.*\)\n", refused.err), refused.err
    # The directory of this command is in the mount, and no shell's is.
    command = [sys.executable, "-m", "dataset_cli", "umount", "."]
    done = subprocess.run(command, cwd=folder, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=False)
    assert done.returncode == 0
    assert not os.path.ismount(folder)


def test_doctor_asks_each_store_of_a_mount_once_and_none_for_long(
    dsctl: Dsctl, url: str, place: Path, folder: Path, rclone_s3: RcloneS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = rclone_s3.make_bucket(f"cli-{uuid.uuid4().hex[:12]}")
    (other / "a").write_bytes(b"1")
    snapshot = folder.with_name("snapshot")
    snapshot.mkdir()
    assert dsctl("snapshot", "create", "mask", "--from", f"s3://{other.name}").code == 0
    assert dsctl("mount", "mask", snapshot).code == 0
    assert dsctl("snapshot", "rm", "mask@latest", "--yes").code == 0
    assert dsctl("mount", "--rw", url, folder).code == 0
    told = [check for check in dsctl("doctor", "--json").json["checks"] if check["name"] == "store"]
    assert [(check["state"], check["message"].split()[0].rstrip("/")) for check in told] == [
        ("ok", url),
        ("ok", f"s3://{other.name}"),
    ]
    settings = load_settings()
    monkeypatch.setattr(doctor, "_ANSWER_S", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        hangs = StoreOptions(
            name="silent", url="s3://silent", endpoint_url=f"http://127.0.0.1:{silent.getsockname()[1]}"
        )
        both = replace(settings, stores=(*settings.stores, hangs), store_timeout_s=60.0)
        found = list(doctor.stores({"s3://silent/a": both, "s3://silent/b": both, url: both}))
    assert [(check.state, check.message.split()[0]) for check in found] == [("fail", "s3://silent/a"), ("ok", url)]
    assert "has not answered" in found[0].message


def test_status_and_metrics_show_a_mount(dsctl: Dsctl, url: str, folder: Path) -> None:
    mounted = dsctl("mount", "--rw", url, folder, "--ack", "uploaded", "--ttl", "1", "--upload-every", "5", "--json")
    assert mounted.code == 0, mounted.err
    names = {"mountpoint", "url", "ack", "staging", "pid", "supervisor", "restarts", "notes", "log"}
    assert set(mounted.json) == names
    (folder / "a.pt").write_bytes(b"x" * 10_000)
    state = dsctl("status", "--json").json
    assert state["mounts"] == []
    assert state["staged"] == []
    (shown,) = state["read_write"]
    assert {name: shown[name] for name in names} == mounted.json
    live = shown["live"]
    assert (live["dirty_files"], live["dirty_bytes"], live["uploaded_bytes"]) == (0, 0, 10_000)
    assert (live["failures"], live["conflicts"], shown["error"]) == ([], [], None)
    text = dsctl("status").out
    assert f"rw mount {folder}  {url}/" in text
    assert "everything is uploaded" in text
    metrics = dsctl("status", "--metrics").out
    labels = rf'\{{mount="[0-9a-f]{{12}}",mountpoint="{folder}",url="{url}/"\}}'
    assert re.search(rf"^datacache_write_dirty_files{labels} 0$", metrics, re.MULTILINE)
    assert re.search(rf"^datacache_write_uploaded_bytes_total{labels} 10000$", metrics, re.MULTILINE)


@promise("`dsctl status` has the last errors of each mount")
def test_status_tells_the_last_errors_of_a_read_write_mount(
    dsctl: Dsctl, store: FaultProxy, url: str, place: Path, folder: Path
) -> None:
    (place / "run").mkdir(exist_ok=True)
    (place / "run" / "b.bin").write_bytes(b"x" * 10_000)
    assert dsctl("mount", "--rw", url, folder).code == 0
    assert os.listdir(folder) == ["b.bin"]
    store.always(Fault(status=403, code="AccessDenied", only=lambda _method, path: "b.bin" in path))
    with pytest.raises(OSError, match="Permission denied"):
        (folder / "b.bin").read_bytes()
    (shown,) = dsctl("status", "--json").json["read_write"]
    error = shown["live"]["errors"][0]
    assert "b.bin" in error["path"]
    assert error["errno"] == "EACCES"
    assert error["hint"]
    assert f"error    {error['path']}: {error['reason']}" in dsctl("status").out


@promise("What is written to an open file that others replaced goes on beside it as a whole file")
@promise("`status` and `flush` tell of a conflict until its copy is deleted or renamed")
@pytest.mark.parametrize("seen_to", ["deleted", "renamed"])
def test_an_append_to_what_somebody_else_changed_meanwhile_goes_on_beside_it_until_somebody_sees_to_it(
    dsctl: Dsctl, url: str, place: Path, folder: Path, seen_to: str
) -> None:
    assert dsctl("mount", "--rw", url, folder).code == 0
    (folder / "e.log").write_bytes(b"first\n")
    assert dsctl("flush", folder).code == 0
    fd = os.open(folder / "e.log", os.O_WRONLY | os.O_APPEND)
    (place / "run" / "e.log").write_bytes(b"foreign\n")
    assert os.write(fd, b"mine\n") == 5
    os.close(fd)
    assert dsctl("flush", folder).code == 0
    found = {path.name: path.read_bytes() for path in (place / "run").iterdir()}
    (kept,) = [name for name in found if name.startswith("e.log.conflict-")]
    assert found == {"e.log": b"foreign\n", kept: b"first\nmine\n"}
    assert sorted(os.listdir(folder)) == ["e.log", kept]
    (shown,) = dsctl("status", "--json").json["read_write"]
    assert (shown["live"]["errors"], shown["live"]["losses"]) == ([], [])
    for command in (("status",), ("flush", folder)):
        assert f"ours is {kept}" in dsctl(*command).out
    assert [conflict["kept_as"] for conflict in dsctl("flush", folder, "--json").json[0]["conflicts"]] == [kept]
    if seen_to == "deleted":
        (folder / kept).unlink()
    else:
        (folder / kept).rename(folder / "e.log")
    for command in (("flush", folder), ("status",)):
        assert "conflict" not in dsctl(*command).out
    assert (place / "run" / "e.log").read_bytes() == (b"foreign\n" if seen_to == "deleted" else b"first\nmine\n")


def _lose_4096_bytes(dsctl: Dsctl, url: str, place: Path, folder: Path) -> None:
    """Mount `folder`, and write to its `weights` what cannot be kept, as somebody else replaces it meanwhile."""
    (place / "run").mkdir(exist_ok=True)
    (place / "run" / "weights").write_bytes(b"x" * 500_000)
    assert dsctl("mount", "--rw", url, folder).code == 0
    fd = os.open(folder / "weights", os.O_RDWR)
    (place / "run" / "weights").write_bytes(b"foreign")
    assert os.pwrite(fd, b"y" * 4096, 8192) == 4096
    with pytest.raises(OSError, match="Input/output error"):
        os.close(fd)


@promise("What is lost after a program was told it is written is told until somebody has seen it")
def test_what_is_lost_is_told_by_status_and_flush_until_somebody_has_seen_it(
    dsctl: Dsctl, url: str, place: Path, folder: Path
) -> None:
    _lose_4096_bytes(dsctl, url, place, folder)
    (shown,) = dsctl("status", "--json").json["read_write"]
    (loss,) = shown["live"]["losses"]
    assert (loss["key"], loss["size_bytes"]) == ("weights", 4096)
    (error,) = shown["live"]["errors"]
    assert (error["path"], error["errno"]) == ("write weights", "EIO")
    assert "snapshot" not in error["hint"]
    told = "up to 4,096 bytes written to weights were lost at "
    assert f"lost     {told}" in dsctl("status").out
    flushed = dsctl("flush", folder)
    assert flushed.code == 1
    assert told in flushed.err
    assert f"dsctl flush --forget-lost {folder}" in flushed.err
    assert f"everything else written to {folder} is in " in flushed.out
    assert dsctl("flush").code == 1
    unmounted = dsctl("umount", folder)
    assert unmounted.code == 0
    assert told in unmounted.err
    assert told in dsctl("status").out
    assert dsctl("flush").code == 1
    assert dsctl("mount", "--rw", url, folder).code == 0
    forgotten = dsctl("flush", "--forget-lost", folder)
    assert forgotten.code == 0
    name, else_ = forgotten.out.splitlines()
    assert name.startswith(f"forgotten: {told}")
    assert else_ == f"everything else written to {folder} is in {url}/"
    assert dsctl("flush", "--forget-lost", folder).out == f"everything written to {folder} is in {url}/\n"
    assert dsctl("flush", folder).code == 0
    assert "lost     " not in dsctl("status").out


@promise("What is lost after a program was told it is written is told until somebody has seen it")
def test_what_is_forgotten_of_a_mount_that_was_ended_is_named(
    dsctl: Dsctl, url: str, place: Path, folder: Path
) -> None:
    _lose_4096_bytes(dsctl, url, place, folder)
    assert dsctl("umount", folder).code == 0
    (shown,) = dsctl("flush", "--json").json
    assert (shown["forgotten"], len(shown["losses"])) == (False, 1)
    forgotten = dsctl("flush", "--forget-lost")
    assert forgotten.code == 0
    assert "forgotten: up to 4,096 bytes written to weights were lost at " in forgotten.out
    assert "everything else that was staged in " in forgotten.out
    assert dsctl("flush").out == "nothing is waiting to be uploaded\n"


@promise("What is lost after a program was told it is written is told until somebody has seen it")
def test_a_change_of_an_open_file_that_was_replaced_is_told_by_status_as_its_program_was(
    dsctl: Dsctl, url: str, place: Path, folder: Path
) -> None:
    (place / "run").mkdir(exist_ok=True)
    (place / "run" / "weights").write_bytes(b"x" * 500_000)
    assert dsctl("mount", "--rw", "--ttl", "0.5", url, folder).code == 0
    fd = os.open(folder / "weights", os.O_RDWR)
    (place / "run" / "weights").write_bytes(b"foreign")

    pause = threading.Event()
    for _ in range(600):
        if (folder / "weights").stat().st_size == 7:
            break
        pause.wait(0.05)
    try:
        with pytest.raises(OSError, match="Stale file handle"):
            os.ftruncate(fd, 10)
    finally:
        os.close(fd)
    (shown,) = dsctl("status", "--json").json["read_write"]
    assert [(error["path"], error["errno"]) for error in shown["live"]["errors"]] == [("setattr weights", "ESTALE")]


@promise("`dsctl umount` takes away no mount of another home, and names that home; of several mounts it tries each")
def test_a_mount_of_another_home_is_not_unmounted_from_here(
    dsctl: Dsctl, url: str, folder: Path, tmp_path: Path
) -> None:
    assert dsctl("mount", "--rw", url, folder).code == 0
    refused = dsctl("umount", folder, DATACACHE_HOME=str(tmp_path / "other"))
    assert refused.code == 1
    assert f"DATACACHE_HOME={os.environ['DATACACHE_HOME']} dsctl umount {folder}" in refused.err
    assert os.path.ismount(folder)
    assert dsctl("umount", "--all").out == f"{folder} is unmounted\n"


@promise("A program that opens a file to change a part of it changes what is there now")
def test_status_tells_no_error_that_the_kernel_kept_from_the_program(
    dsctl: Dsctl, url: str, place: Path, folder: Path
) -> None:
    (place / "run").mkdir(exist_ok=True)
    (place / "run" / "train.log").write_bytes(b"1\n")
    assert dsctl("mount", "--rw", url, folder, "--ttl", "60").code == 0
    assert (folder / "train.log").read_bytes() == b"1\n"
    (place / "run" / "train.log").write_bytes(b"other\n")
    with open(folder / "train.log", "ab") as file:
        file.write(b"mine\n")
    assert dsctl("flush", folder).code == 0
    assert (place / "run" / "train.log").read_bytes() == b"other\nmine\n"
    (shown,) = dsctl("status", "--json").json["read_write"]
    assert shown["live"]["errors"] == []


@promise("An unmount uploads first, or says what is left and how it gets to the bucket")
def test_what_cannot_be_uploaded_is_said_with_its_reason_and_kept(
    dsctl: Dsctl, store: FaultProxy, url: str, place: Path, folder: Path
) -> None:
    assert dsctl("mount", "--rw", url, folder).code == 0
    assert os.listdir(folder) == []
    store.refuse()
    (folder / "a.pt").write_bytes(b"x" * 10_000)
    flushed = dsctl("flush", folder, "--timeout", "1", "--json")
    assert flushed.code == 1
    assert flushed.error["type"] == "UploadError"
    assert "a.pt" in flushed.error["message"]
    text = dsctl("status").out
    assert "1 file, 10.0 KB to upload" in text
    assert "failed   a.pt: " in text or "the store has not answered for " in text
    waited = dsctl("umount", folder, "--timeout", "1")
    assert waited.code == 1
    assert f"dsctl umount --no-wait {folder}" in waited.err
    assert os.path.ismount(folder)
    left = dsctl("umount", folder, "--no-wait")
    assert left.code == 0, left.err
    assert "Not uploaded yet: 1 file, 10.0 KB" in left.out
    assert f"dsctl mount --rw {url}/ {folder}" in left.out
    assert not os.path.ismount(folder)
    (area,) = dsctl("status", "--json").json["staged"]
    assert (area["url"], area["files"], area["bytes"]) == (f"{url}/", 1, 10_000)
    assert "1 file, 10.0 KB wait here, and no mount uploads them: dsctl flush" in dsctl("status").out
    failed = dsctl("flush", "--timeout", "1")
    assert failed.code == 1
    assert "a.pt" in failed.err
    store.accept()
    done = dsctl("flush", "--json")
    assert done.code == 0, done.err
    (result,) = done.json
    assert (result["url"], result["mountpoint"], result["error"]) == (f"{url}/", None, None)
    assert (result["uploaded_files"], result["uploaded_bytes"]) == (1, 10_000)
    assert (place / "run" / "a.pt").read_bytes() == b"x" * 10_000
    assert dsctl("status", "--json").json["staged"] == []


@pytest.mark.parametrize("command", ["flush", "umount"])
def test_a_wait_without_a_terminal_says_now_and_then_what_it_waits_for(
    dsctl: Dsctl, store: FaultProxy, url: str, folder: Path, command: str
) -> None:
    assert dsctl("mount", "--rw", url, folder).code == 0
    (folder / "a.pt").write_bytes(b"x" * 10_000)
    store.refuse()
    # In a process of its own, with another interval: the default would make the test last as long.
    program = "from dataset_cli import main, output; output.EVERY_S = 0.5; main.main()"
    arguments = [sys.executable, "-c", program, command, "--timeout", "4", str(folder)]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    waits = [line for line in done.stderr.splitlines() if line.startswith(f"uploading to {url}/: 1 file, 10.0 KB left")]
    assert 2 <= len(waits) <= 9, done.stderr
    assert "the store does not answer" in waits[-1]
    assert json.loads(dsctl("status", "--json").out)["read_write"][0]["mounted"]
    store.accept()
    assert dsctl("umount", folder).code == 0


def test_a_folder_that_the_store_cannot_keep_is_kept_here_and_waits_for_nothing(
    dsctl: Dsctl, url: str, place: Path, folder: Path
) -> None:
    """rclone's server has no objects whose keys end in a slash."""
    assert dsctl("mount", "--rw", url, folder).code == 0
    (folder / "empty").mkdir()
    (folder / "gone").mkdir()
    assert dsctl("flush", folder).code == 0
    assert dsctl("umount", folder).code == 0
    mounted = dsctl("mount", "--rw", url, folder)
    assert "written earlier" not in mounted.out, mounted.out
    assert sorted(os.listdir(folder)) == ["empty", "gone"]
    (folder / "gone").rmdir()
    assert dsctl("umount", folder).code == 0
    assert "written earlier" not in dsctl("mount", "--rw", url, folder).out
    assert os.listdir(folder) == ["empty"]


@promise("What an earlier mount left is uploaded by the next, or by `dsctl flush` without one")
def test_a_mount_says_what_was_written_earlier(
    dsctl: Dsctl, store: FaultProxy, url: str, place: Path, folder: Path
) -> None:
    assert dsctl("mount", "--rw", url, folder).code == 0
    assert os.listdir(folder) == []
    store.refuse()
    for number in range(3):
        (folder / f"{number}.pt").write_bytes(b"x" * 400_000)
    assert dsctl("umount", folder, "--lazy").code == 0
    store.accept()
    # A lazy unmount waits for nothing: the first server may be there for a moment yet.
    again = dsctl("mount", "--rw", url, folder)
    assert again.code == 0, again.err
    assert "3 files, 1.2 MB written earlier are being uploaded" in again.out
    assert (folder / "0.pt").read_bytes() == b"x" * 400_000
    assert dsctl("umount", folder).code == 0
    assert sorted(path.name for path in (place / "run").iterdir()) == ["0.pt", "1.pt", "2.pt"]


def test_a_bucket_needs_rw_and_a_snapshot_must_not_have_it(dsctl: Dsctl, folder: Path) -> None:
    snapshot = dsctl("mount", "--rw", "mask@v1", folder, "--json")
    assert snapshot.code == 2
    assert "names a snapshot" in snapshot.error["message"]
    assert f"dsctl mount mask@v1 {folder}" in snapshot.error["hint"]
    bucket = dsctl("mount", "s3://bucket/run", folder, "--json")
    assert bucket.code == 2
    assert f"dsctl mount --rw s3://bucket/run {folder}" in bucket.error["hint"]
    for name, value in {"--ack": "staged", "--staging": "x", "--ttl": "1", "--upload-every": "1"}.items():
        refused = dsctl("mount", "mask@v1", folder, name, value)
        assert refused.code == 2
        assert f"{name} is for read-write mounts" in refused.err
    refused = dsctl("mount", "--rw", "s3://bucket/run", folder, "--workers", "2")
    assert refused.code == 2
    assert "--workers is for snapshots" in refused.err
    refused = dsctl("mount", "--rw", "s3://bucket/run", folder, "--large-files")
    assert refused.code == 2
    assert "--large-files is for snapshots" in refused.err


def test_options_that_wait_and_options_that_do_not_are_not_mixed(dsctl: Dsctl, url: str, folder: Path) -> None:
    assert dsctl("mount", "--rw", url, folder).code == 0
    mixed = dsctl("umount", folder, "--no-wait", "--timeout", "3")
    assert mixed.code == 2
    assert "wait for nothing" in mixed.err
    assert dsctl("flush", folder, "--staging", "x").code == 2
    elsewhere = dsctl("flush", folder.parent)
    assert elsewhere.code == 1
    assert "in no read-write mount" in elsewhere.err
    (folder / "a").touch()
    assert dsctl("flush", folder / "a").code == 0


def test_without_pyfuse3_it_is_said_what_to_install(dsctl: Dsctl, url: str, folder: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "sitecustomize.py").write_text("import sys\nsys.modules['pyfuse3'] = None\n")
    paths = f"{broken}{os.pathsep}{Path(__file__).parents[2]}"
    chosen = {"PYTHONPATH": paths, "DATACACHE_FUSE": "pyfuse3"}
    said = dsctl("mount", "--rw", url, folder, "--json", **chosen)
    assert said.code == 1
    assert "pyfuse3" in said.error["message"]
    assert "dsctl[rw]" in said.error["hint"]
    assert "libfuse3-dev" in said.error["hint"]
    checks = {check["name"]: check for check in dsctl("doctor", "--json", **chosen).json["checks"]}
    assert checks["pyfuse3"]["state"] == "fail"
    assert "libfuse3-dev" in checks["pyfuse3"]["hint"]


def test_doctor_looks_at_the_staging_folder(dsctl: Dsctl, tmp_path: Path) -> None:
    def staging(folder: Path) -> dict[str, str]:
        result = dsctl("doctor", "--json", DATACACHE_STAGING=str(folder))
        found: dict[str, str] = next(check for check in result.json["checks"] if check["name"] == "staging")
        return found

    assert staging(tmp_path)["state"] == "ok"
    assert staging(tmp_path / "new")["message"].endswith("will be made when something is mounted read-write")
    missing = staging(tmp_path / "no" / "such")
    assert missing["state"] == "fail"
    assert "DATACACHE_STAGING" in missing["hint"]
    in_memory = Path("/dev/shm")
    assert staging(in_memory)["state"] == "warn"


def test_what_is_no_url_is_said_with_the_one_that_was_meant(dsctl: Dsctl, folder: Path) -> None:
    for text, meant in (("s3:/runs/exp", "s3://runs/exp"), ("runs/exp", "s3://runs/exp")):
        said = dsctl("mount", "--rw", text, folder)
        assert said.code == 2
        assert "is no URL" in said.err
        assert meant in said.err


def test_what_is_left_is_uploaded_to_the_endpoint_it_was_written_for(
    dsctl: Dsctl, store: FaultProxy, url: str, place: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert dsctl("mount", "--rw", url, folder, "--quota", "1MiB").code == 0
    assert os.listdir(folder) == []
    store.refuse()
    (folder / "a.pt").write_bytes(b"x" * 10_000)
    assert "quota: 10.0 KB of 1.0 MB in use" in dsctl("status").out
    assert dsctl("umount", folder, "--no-wait").code == 0
    store.accept()
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    done = dsctl("flush", "--json")
    assert done.code == 0, done.err
    assert (place / "run" / "a.pt").read_bytes() == b"x" * 10_000


@promise("With full staging a writer waits, then gets ENOSPC")
def test_a_file_larger_than_the_staging_area_is_refused_at_once_and_told_once(
    dsctl: Dsctl, url: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATACACHE_STAGING_BYTES", "8 MiB")
    monkeypatch.setenv("DATACACHE_STAGING_WAIT_S", "100000")
    assert dsctl("mount", "--rw", url, folder).code == 0
    with pytest.raises(OSError, match="No space left"):
        (folder / "large.bin").write_bytes(bytes(24 << 20))
    (mount,) = dsctl("status", "--json").json["read_write"]
    (error,) = mount["live"]["errors"]
    assert (error["path"], error["errno"], error["count"]) == ("write large.bin", "ENOSPC", 1)
    assert "does not fit into the staging area" in error["reason"]
    assert "which may have 8.4 MB" in error["reason"]
    assert error["reason"] in Path(mount["log"]).read_text()
    assert len(mount["live"]["losses"]) == 1


@promise("With full staging a writer waits, then gets ENOSPC")
def test_a_file_that_room_does_not_come_for_is_told_once(
    dsctl: Dsctl, store: FaultProxy, url: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATACACHE_STAGING_BYTES", "8 MiB")
    monkeypatch.setenv("DATACACHE_STAGING_WAIT_S", "0.5")
    assert dsctl("mount", "--rw", url, folder).code == 0
    store.always(Fault(status=503, code="SlowDown", only=lambda method, _path: method == "PUT"))
    (folder / "waits.bin").write_bytes(bytes(5 << 20))
    with pytest.raises(OSError, match="No space left"):
        (folder / "large.bin").write_bytes(bytes(7 << 20))
    (mount,) = dsctl("status", "--json").json["read_write"]
    assert [(error["path"], error["count"]) for error in mount["live"]["errors"]] == [("write large.bin", 1)]
    store.heal()


def test_errors_with_one_way_out_are_told_as_one() -> None:
    at = time.time()
    away = [
        {"path": f"{n}.jpg", "reason": f"s3://b/{n}.jpg is away", "hint": "Wait.", "errno": "EIO"} for n in range(3)
    ]
    other = [{"path": "x", "reason": "it is full", "hint": "", "errno": "ENOSPC"}]
    said = list(error_lines([error | {"count": 1, "at": at} for error in (away[0], *other, *away[1:])]))
    assert [line.split("(")[0].strip() for line in said] == [
        "error    0.jpg: s3://b/0.jpg is away",
        "and 2 other files with such an error",
        "→ Wait.",
        "error    x: it is full",
    ]
