"""A node with 0.1 becomes one with this version while programs read and write, as docs/UPGRADING.md says.

0.1 is taken out of the repository's history, and runs with the packages of today. A clone without that history, as of
an archive or a shallow one, skips this.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.fuse_mount.test_crashes import Readers

ROOT = Path(__file__).resolve().parents[1]
LAST_OF_0_1 = "d102a0f40e09b4d66eb3d4038011d863b90144f1"
pytestmark = pytest.mark.long

WRITER = """
import os, sys, time
folder, acknowledged = sys.argv[1:]
log = open(acknowledged, "a", buffering=1)
n = troubles = 0
print("ready", flush=True)
while not os.path.exists(acknowledged + ".end"):
    data = f"{n}\\n".encode() * 500
    try:
        with open(f"{folder}/{n:05d}.txt", "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        print(n, file=log)
    except OSError as exc:
        troubles += 1
        print(exc, flush=True)
        time.sleep(0.05)
    n += 1
    time.sleep(0.01)
"""

"""Write files into a folder one after the other, and note those that were acknowledged."""
PYTHON_READER = """
import os, sys, time
import datacache
source, end = sys.argv[1:]
reads, log = 0, open(end + ".reads", "a", buffering=1)
with datacache.open_snapshot("cold@v1") as snapshot:
    paths = sorted(snapshot.paths())
    print("ready", datacache.__version__, flush=True)
    while not os.path.exists(end):
        path = paths[reads % len(paths)]
        assert snapshot.read(path) == open(f"{source}/{path}", "rb").read(), path
        reads += 1
        print(reads, file=log)
        time.sleep(0.01)
print(reads)
"""
"""Read a snapshot, which is on no node yet, with the package of a version, and compare every byte."""


def until(ready: Callable[[], Any], what: str) -> None:
    """Wait until several processes have come to something, which has no one event."""
    deadline = time.monotonic() + 90
    while not ready():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The code of the last 0.1."""
    archive = subprocess.run(["git", "archive", LAST_OF_0_1], cwd=ROOT, capture_output=True, check=False)
    if archive.returncode:
        pytest.skip("this clone does not have the history in which 0.1 is")
    folder = tmp_path_factory.mktemp("0.1")
    with tarfile.open(fileobj=BytesIO(archive.stdout)) as tar:
        tar.extractall(folder, filter="data")
    return folder


class Version:
    """The programs of one version, on the home of the test."""

    def __init__(self, code: Path, logs: Path) -> None:
        self.code, self.logs = code, logs
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, *arguments: str) -> None:
        with (self.logs / f"{name}.log").open("wb") as log:
            self.running[name] = subprocess.Popen(
                [sys.executable, "-m", *arguments], stdout=log, stderr=log, cwd=self.code, env=self._environment()
            )

    def end(self, name: str) -> None:
        """As a node's container is ended: SIGTERM, and patience."""
        self.running[name].send_signal(signal.SIGTERM)
        self.running[name].wait(60)

    def dsctl(self, *arguments: str, ok: bool = True) -> SimpleNamespace:
        done = subprocess.run(
            [sys.executable, "-m", "dataset_cli", *arguments],
            capture_output=True, text=True, cwd=self.code, env=self._environment(), timeout=120, check=False,
        )  # fmt: skip
        assert not ok or done.returncode == 0, done.stdout + done.stderr
        return SimpleNamespace(code=done.returncode, out=done.stdout, err=done.stderr)

    def popen(self, program: str, *arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", program, *arguments]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, cwd=self.code, env=self._environment())

    def _environment(self) -> dict[str, str]:
        return os.environ | {"PYTHONPATH": str(self.code)}


@pytest.fixture
def node(home: Path, old: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """A node with 0.1: a daemon, a mount host, a snapshot that is mounted, and a bucket mounted to be written."""
    monkeypatch.setenv("DATACACHE_DAEMON", "external")
    monkeypatch.setenv("DATACACHE_PREFETCH", "0")
    monkeypatch.setenv("DATACACHE_MOUNT_HOST", str(home / "run" / "mounts.sock"))
    monkeypatch.setenv("DATACACHE_SOURCES", f"file://{tmp_path}/")
    for name in ("images", "cold", "runs", "mnt", "rw", "logs"):
        (tmp_path / name).mkdir()
    dice = random.Random(7)
    for n in range(200):
        path = tmp_path / "images" / f"d{n % 5}" / f"{n:03d}.jpg"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(dice.randbytes(20_000))
    (tmp_path / "images" / "large.bin").write_bytes(b"large")  # which readers leave out
    one, two = Version(old, tmp_path / "logs"), Version(ROOT, tmp_path / "logs")
    one.start("daemon-1", "datacache.daemon", "--wait")
    one.start("host-1", "fuse_mount", "--host", "--ready-file", str(tmp_path / "ready-1"))
    until((tmp_path / "ready-1").exists, "the old host is not ready")
    one.dsctl("snapshot", "create", "mask", "--from", (tmp_path / "images").as_uri(), "--tag", "v1")
    for n in range(400):
        (tmp_path / "cold" / f"{n:03d}.jpg").write_bytes(dice.randbytes(20_000))
    one.dsctl("snapshot", "create", "cold", "--from", (tmp_path / "cold").as_uri(), "--tag", "v1")
    one.dsctl("warm", "mask@v1", "--wait")
    one.dsctl("mount", "mask@v1", str(tmp_path / "mnt"))
    one.dsctl("mount", "--rw", (tmp_path / "runs").as_uri(), str(tmp_path / "rw"))
    yield SimpleNamespace(home=home, one=one, two=two, folder=tmp_path)
    for version in (one, two):
        for process in version.running.values():
            process.kill()
            process.wait()


def test_readers_notice_nothing_and_what_was_written_is_in_the_bucket(node: SimpleNamespace) -> None:
    folder = node.folder
    readers = Readers(SimpleNamespace(mountpoint=folder / "mnt"), folder / "images", 2)  # type: ignore[arg-type]
    acknowledged, end = folder / "acknowledged", folder / "acknowledged.end"
    command = [sys.executable, "-c", WRITER, str(folder / "rw"), str(acknowledged)]
    writer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    in_python = node.one.popen(PYTHON_READER, str(folder / "cold"), str(end))
    try:
        assert in_python.stdout.readline() == "ready 0.1.0\n"
        until(lambda: lines_of(acknowledged) > 20, "nothing is written")
        node.two.start("daemon-2", "datacache.daemon", "--wait")
        node.two.start("host-2", "fuse_mount", "--host", "--ready-file", str(folder / "ready-2"))
        until((folder / "ready-2").exists, "the new host is not ready")
        node.one.end("host-1")
        node.one.end("daemon-1")
        noted = folder / "acknowledged.end.reads"
        before, read_before = lines_of(acknowledged), lines_of(noted)
        until(lambda: lines_of(acknowledged) > before + 20, "nothing is written any more")
        until(lambda: lines_of(noted) > read_before + 100, "a reader in Python does not go on")
    finally:
        end.touch()
        said = writer.communicate(timeout=60)[0].splitlines()[1:]
        reads, errors, wrong = readers.finish()
        read_in_python, trouble = in_python.communicate(timeout=60)
    assert in_python.returncode == 0, trouble
    assert (errors, wrong) == (0, 0)
    assert reads > 100
    assert {line.partition("]")[0] for line in said} <= {"[Errno 107", "[Errno 103"}, said[:3]
    node.two.dsctl("flush", str(folder / "rw"))
    numbers = acknowledged.read_text().split()
    lost = [n for n in numbers if content(folder / "runs" / f"{int(n):05d}.txt") != f"{n}\n".encode() * 500]
    assert not lost
    mounts = json.loads(node.two.dsctl("status", "--json").out)["mounts"]
    assert [each["mountpoint"] for each in mounts] == [str(folder / "mnt")]
    found = f"{reads} reads, {read_in_python.strip()} in Python, {len(numbers)} files acknowledged"
    print(f"{found}, {len(said)} attempts to write failed")


def test_catalog_cache_and_staged_writes_are_taken_over_and_the_way_back_is_open(node: SimpleNamespace) -> None:
    folder, one, two = node.folder, node.one, node.two
    for n in range(50):
        (folder / "rw" / f"{n}.txt").write_bytes(f"{n}".encode() * 3000)
    one.dsctl("umount", "--no-wait", str(folder / "rw"))
    one.dsctl("umount", str(folder / "mnt"))
    one.end("host-1")
    one.end("daemon-1")
    staged = len(list((folder / "runs").glob("*.txt")))
    assert staged < 50, "nothing is left for the new version to upload"

    two.start("daemon-2", "datacache.daemon", "--wait")
    two.start("host-2", "fuse_mount", "--host", "--ready-file", str(folder / "ready-2"))
    until((folder / "ready-2").exists, "the new host is not ready")
    two.dsctl("mount", "--rw", (folder / "runs").as_uri(), str(folder / "rw"))
    two.dsctl("flush", str(folder / "rw"))
    assert {path.name: path.read_bytes() for path in (folder / "runs").glob("*.txt")} == {
        f"{n}.txt": f"{n}".encode() * 3000 for n in range(50)
    }
    (folder / "images").rename(folder / "away")  # what is read now was cached by 0.1
    two.dsctl("mount", "mask@v1", str(folder / "mnt"))
    for path in (folder / "away").rglob("*.jpg"):
        assert (folder / "mnt" / path.relative_to(folder / "away")).read_bytes() == path.read_bytes()
    (folder / "away").rename(folder / "images")
    (folder / "images" / "new.jpg").write_bytes(b"new")
    two.dsctl("snapshot", "create", "mask", "--from", (folder / "images").as_uri(), "--tag", "v2")
    two.dsctl("snapshot", "verify", "mask@v1", "--read")

    two.dsctl("umount", str(folder / "rw"))
    two.dsctl("umount", str(folder / "mnt"))
    two.end("host-2")
    two.end("daemon-2")
    one.start("daemon-3", "datacache.daemon", "--wait")
    one.start("host-3", "fuse_mount", "--host", "--ready-file", str(folder / "ready-3"))
    until((folder / "ready-3").exists, "the old host is not ready again")
    one.dsctl("mount", "mask@v2", str(folder / "mnt"))
    assert (folder / "mnt" / "new.jpg").read_bytes() == b"new"


def lines_of(path: Path) -> int:
    return path.read_text().count("\n") if path.exists() else 0


def content(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None
