"""Recipes of docs/OPERATIONS.md do what they say: their commands run as they are written."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from datacache import create_snapshot, open_snapshot
from tests.cli.conftest import ROOT
from tests.servers import RcloneS3

COMMIT, NEXT = "c7a632d74f46c5a1f2b8", "d81e5a0b9c2f7e63a4d0"


def section(title: str) -> str:
    text = (ROOT / "docs" / "OPERATIONS.md").read_text(encoding="utf-8")
    return text.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def blocks(title: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", section(title), re.MULTILINE | re.DOTALL)


def test_a_copy_of_a_sqlite_catalog_that_is_being_written_is_whole(home: Path, tmp_path: Path) -> None:
    (tmp_path / "bucket").mkdir()
    (tmp_path / "bucket" / "a").write_bytes(b"a")
    create_snapshot("mask", (tmp_path / "bucket").as_uri(), tags=["v1"])
    done = threading.Event()

    def write() -> None:
        n = 0
        while not done.is_set():
            create_snapshot(f"other-{n}", (tmp_path / "bucket").as_uri())
            n += 1

    writer = threading.Thread(target=write)
    writer.start()
    [command] = blocks("Backup", "sh")[:1]
    command = command.replace("~/.local/share/datacache/catalog.db", shlex.quote(str(home / "catalog.db")))
    try:
        subprocess.run(["bash", "-euc", command], cwd=tmp_path, check=True, timeout=60)
    finally:
        done.set()
        writer.join()
    program = "import datacache; print(datacache.open_snapshot('mask@v1').read('a'))"
    environment = os.environ | {
        "DATACACHE_CATALOG": f"sqlite:///{tmp_path / 'catalog-backup.db'}",
        "PYTHONPATH": str(ROOT),
    }
    read = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert read.stdout == "b'a'\n", read.stderr


@pytest.fixture
def lakefs(rclone_s3: RcloneS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: Path) -> Iterator[Path]:
    """A bucket that lies as lakeFS' gateway shows a repository, with two commits; `lakectl` names the first."""
    repository = rclone_s3.make_bucket("cells")
    for commit, changed in ((COMMIT, b"two"), (NEXT, b"changed")):
        for name, data in {"1.jpg": b"one", "2.jpg": changed}.items():
            path = repository / commit / "images" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
    [config] = blocks("lakeFS", "toml")
    config = config.replace("https://lakefs.example", rclone_s3.endpoint)
    for name, value in (("access_key_id", rclone_s3.access_key), ("secret_access_key", rclone_s3.secret_key)):
        config = re.sub(rf'^{name} = "…"', f'{name} = "{value}"', config, flags=re.MULTILINE)
    (tmp_path / "config.toml").write_text(config, encoding="utf-8")
    (tmp_path / "config.toml").chmod(0o600)
    monkeypatch.setenv("DATACACHE_CONFIG", str(tmp_path / "config.toml"))
    programs = {"dsctl": f'exec {sys.executable} -m dataset_cli "$@"', "lakectl": f"echo 'ID:            {COMMIT}'"}
    for name, line in programs.items():
        (tmp_path / "bin" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    yield repository
    shutil.rmtree(repository)


@pytest.mark.skipif(not os.path.exists("/dev/fuse"), reason="there is no /dev/fuse here")
def test_a_commit_of_lakefs_is_a_snapshot_by_the_recipe(lakefs: Path, tmp_path: Path) -> None:
    def bash(lines: str) -> str:
        done = subprocess.run(["bash", "-euc", lines], capture_output=True, text=True, check=False, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout

    (tmp_path / "mnt").mkdir()
    [recipe] = blocks("lakeFS", "sh")
    bash(recipe.replace("/mnt/cells", str(tmp_path / "mnt")))
    assert (tmp_path / "mnt" / "2.jpg").read_bytes() == b"two"
    assert "not held" in bash("dsctl snapshot list cells")
    [following] = re.findall(r"`(dsctl snapshot create cells [^`]*--replace)`", section("lakeFS").replace("\n  ", " "))
    bash(f"next={NEXT}; {following}")
    changed = bash(f"dsctl snapshot diff cells@lakefs-{COMMIT[:12]} cells@latest")
    assert "2.jpg" in changed
    assert "1.jpg" not in changed
    shutil.rmtree(lakefs / COMMIT)  # warm or not, the version of the next commit needs nothing of the first
    with open_snapshot("cells@latest") as snapshot:
        assert {path: snapshot.read(path) for path in snapshot.paths()} == {"1.jpg": b"one", "2.jpg": b"changed"}
