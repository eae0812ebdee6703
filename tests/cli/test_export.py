"""`dsctl export`."""

from __future__ import annotations

from pathlib import Path

import pytest

from datacache import create_snapshot
from datacache.settings import Settings
from datacache.store.open import open_store
from dataset_cli.main import run
from tests.cli.conftest import Dsctl
from tests.memory import serve_memory
from tests.servers import RcloneS3

Capture = pytest.CaptureFixture[str]
FILES = {"images/1.jpg": b"one" * 100, "images/2.jpg": b"two" * 200, "labels.txt": b"x\n"}


@pytest.fixture
def ref(dsctl: Dsctl, bucket: Path) -> str:
    made = dsctl("snapshot", "create", "mask", "--from", bucket, "--tag", "v1", "--json")
    assert made.code == 0, made.err
    return str(made.json["ref"])


def contents(folder: Path) -> dict[str, bytes]:
    """Without the note of what it is."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != ".datacache-exported")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_an_export_is_a_plain_folder_and_says_how_the_files_were_made(dsctl: Dsctl, ref: str, tmp_path: Path) -> None:
    done = dsctl("export", "mask@v1", tmp_path / "out", "--json")
    assert done.code == 0, done.err
    assert done.err == ""
    value = done.json
    assert set(value) == {
        "ref",
        "directory",
        "files",
        "bytes",
        "kept",
        "cloned",
        "linked",
        "copied",
        "left_out",
    }
    assert value["ref"].startswith(ref)
    assert (value["files"], value["bytes"], value["left_out"]) == (3, 902, [])
    assert value["directory"] == str(tmp_path / "out")
    assert contents(tmp_path / "out") == FILES
    again = dsctl("export", "mask@v1", tmp_path / "out")
    assert again.out == f"{ref} is in {tmp_path / 'out'}: 3 files, 902 B (3 there already)\n"
    linked = dsctl("export", "mask", tmp_path / "links", "--link", "hard")
    assert "3 hard links" in linked.out


def test_an_export_from_a_bucket(dsctl: Dsctl, rclone_s3: RcloneS3, tmp_path: Path) -> None:
    folder = rclone_s3.make_bucket("cli-export")
    for name, data in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)
    environment = rclone_s3.env()
    assert dsctl("snapshot", "create", "faces", "--from", "s3://cli-export", **environment).code == 0
    done = dsctl("export", "faces", tmp_path / "out", **environment)
    assert done.code == 0, done.err
    assert "(3 copied)" in done.out
    assert contents(tmp_path / "out") == FILES


def test_a_folder_with_other_things_and_a_wrong_link_are_wrong_usage(dsctl: Dsctl, ref: str, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("mine")
    refused = dsctl("export", ref, tmp_path / "out", "--json")
    assert refused.code == 2
    assert refused.error["type"] == "UsageError"
    assert "thesis.tex" in refused.error["message"]
    assert list(contents(tmp_path / "out")) == ["thesis.tex"]
    assert dsctl("export", ref, tmp_path / "new", "--link", "soft").code == 2
    missing = dsctl("export", "mask@v9", tmp_path / "new")
    assert missing.code == 1
    assert "v1" in missing.err
    assert not (tmp_path / "new").exists()


def test_what_no_folder_can_hold_is_a_warning(
    settings: Settings, tmp_path: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve_memory(monkeypatch)
    store = open_store("memory://cli-hidden", settings)  # other stores of this machine have no such keys
    store.put("good", b"1")
    store.put("a//b", b"2")
    create_snapshot("faces", "memory://cli-hidden")
    assert run(["export", "faces", str(tmp_path / "out")]) == 0
    said = capfd.readouterr()
    assert said.err == "warning: left out, because no folder can hold it: 'a//b'\n"
    assert "1 files, 1 B" in said.out
    assert contents(tmp_path / "out") == {"good": b"1"}
