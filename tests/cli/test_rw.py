"""`dsctl mount --rw`, `flush`, `status` and `umount` of read-write mounts, on a real S3 server and the real kernel."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from datacache.testing.faults import FaultProxy
from tests import leftovers
from tests.cli.conftest import Dsctl
from tests.servers import RcloneS3


@pytest.fixture
def store(rclone_s3: RcloneS3, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    """What stands between the commands and the S3 server, and can refuse."""
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
    labels = f'{{mountpoint="{folder}",url="{url}/"}}'
    assert f"datacache_write_dirty_files{labels} 0\n" in metrics
    assert f"datacache_write_uploaded_bytes_total{labels} 10000\n" in metrics


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
    said = dsctl("mount", "--rw", url, folder, "--json", PYTHONPATH=paths)
    assert said.code == 1
    assert "pyfuse3" in said.error["message"]
    assert "datacache[rw]" in said.error["hint"]
    assert "libfuse3-dev" in said.error["hint"]
    checks = {check["name"]: check for check in dsctl("doctor", "--json", PYTHONPATH=paths).json["checks"]}
    assert checks["pyfuse3"]["state"] == "warn"
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
