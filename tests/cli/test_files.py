"""`dsctl ls`, `cat`, `cp` and `log` as a user meets them."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from tests.cli.conftest import Dsctl

NAMES = ("images/a.jpg", "images/deep/b.jpg", "images/\x1b[2J.jpg", "notes.txt")


@pytest.fixture
def mask(tmp_path: Path, dsctl: Dsctl) -> Path:
    folder = tmp_path / "mask"
    for name in NAMES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(name.encode() * 3)
        os.utime(folder / name, ns=(10**18, 10**18))
    done = dsctl("snapshot", "create", "lab/mask", "--from", folder, "--tag", "v1")
    assert done.code == 0, done.err
    return folder


def test_ls_shows_datasets_folders_and_files(mask: Path, dsctl: Dsctl) -> None:
    assert "lab/mask" in dsctl("ls").out
    assert dsctl("ls", "lab/mask").out.splitlines() == ["images/", "notes.txt"]
    assert dsctl("ls", "lab/mask@v1/images/").out.splitlines() == ["\\x1b[2J.jpg", "a.jpg", "deep/"]
    assert dsctl("ls", "-R", "lab/mask@v1/images/deep").out.splitlines() == ["b.jpg"]
    assert dsctl("ls", "-l", "lab/mask@v1/notes.txt").out.split() == ["27", "2001-09-09", "01:46", "notes.txt"]
    found = dsctl("ls", "lab/mask@v1", "--recursive", "--json").json
    assert [(each["path"], each["bytes"], each["is_dir"]) for each in found] == [
        (name, 3 * len(name), False) for name in sorted(NAMES)
    ]


def test_ls_of_what_is_not_there_says_what_to_ask(mask: Path, dsctl: Dsctl) -> None:
    done = dsctl("ls", "lab/mask@v1/pictures", "--json")
    assert (done.code, done.error["type"]) == (1, "PathNotFoundError")
    assert done.error["hint"].startswith("See its files: dsctl ls")


def test_cat_writes_the_bytes(mask: Path, dsctl: Dsctl) -> None:
    done = dsctl("cat", "lab/mask@v1/notes.txt", "lab/mask@latest/images/a.jpg")
    assert (done.code, done.out) == (0, "notes.txt" * 3 + "images/a.jpg" * 3)
    assert "is a folder" in dsctl("cat", "lab/mask@v1/images").err


def test_cp_copies_files_and_folders(mask: Path, dsctl: Dsctl, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert dsctl("cp", "lab/mask@v1/notes.txt", out).code == 0
    assert out.read_bytes() == (mask / "notes.txt").read_bytes()
    assert out.stat().st_mtime_ns == 10**18
    assert stat.S_IMODE(out.stat().st_mode) & 0o444, "not the mode of a temporary file"
    into = tmp_path / "into"
    into.mkdir()
    done = dsctl("cp", "-r", "lab/mask@v1/images", "lab/mask@v1/notes.txt", into, "--json")
    assert (done.code, done.json["files"]) == (0, 4)
    copied = {str(path.relative_to(into)): path.read_bytes() for path in into.rglob("*") if path.is_file()}
    assert copied == {name: (mask / name).read_bytes() for name in NAMES}
    assert dsctl("cp", "-r", "lab/mask", tmp_path / "whole").code == 0
    assert (tmp_path / "whole" / "images" / "deep" / "b.jpg").is_file()


def test_cp_replaces_only_what_it_may(mask: Path, dsctl: Dsctl, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.write_text("mine")
    refused = dsctl("cp", "lab/mask@v1/notes.txt", out)
    assert (refused.code, out.read_text()) == (2, "mine")
    assert "is there already" in refused.err
    assert "is a folder" in dsctl("cp", "lab/mask@v1/images", tmp_path / "images").err
    assert "is no folder" in dsctl("cp", "lab/mask@v1/notes.txt", "lab/mask@v1/images/a.jpg", tmp_path / "no").err
    assert "cannot be written" in dsctl("cp", "lab/mask@v1/notes.txt", out / "below").err
    assert dsctl("cp", "-f", "lab/mask@v1/notes.txt", out).code == 0
    assert out.read_text() == "notes.txt" * 3
    assert not list(tmp_path.glob(".dsctl-*"))


def test_log_goes_back_to_the_first_snapshot(mask: Path, dsctl: Dsctl) -> None:
    (mask / "more.txt").write_text("more")
    made = dsctl("snapshot", "create", "lab/mask", "--from", mask, "--message", "more\nnotes")
    assert made.code == 0, made.err
    lines = dsctl("log", "lab/mask").out.splitlines()
    assert lines[0].endswith("  (latest)")
    assert lines[3] == "    more\\nnotes"
    assert lines[5].endswith("  (v1)")
    shown = dsctl("log", "lab/mask", "--json").json
    assert [(each["files"], each["tags"]) for each in shown] == [(5, []), (4, ["v1"])]
    assert len(dsctl("log", "lab/mask", "-n", "1", "--json").json) == 1


def test_the_shell_completes_paths(mask: Path, dsctl: Dsctl) -> None:
    words = {"_DSCTL_COMPLETE": "bash_complete", "COMP_WORDS": "dsctl ls lab/mask@v1/images/d", "COMP_CWORD": "2"}
    assert dsctl(**words).out.split(",")[-1].strip() == "lab/mask@v1/images/deep/"


def test_patterns_mean_what_fits_and_a_name_goes_before(dsctl: Dsctl, tmp_path: Path) -> None:
    folder = tmp_path / "set"
    for name in ("a/1.txt", "a/2.txt", "a/[1].txt", "b/deep/3.txt", "top.txt", "top.jpg"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    assert dsctl("snapshot", "create", "set", "--from", folder).code == 0
    assert dsctl("ls", "set@latest/a/[12].txt").out.splitlines() == ["a/1.txt", "a/2.txt"]
    assert dsctl("ls", "set@latest/a/[1].txt").out.splitlines() == ["a/[1].txt"]
    assert sorted(dsctl("ls", "set@latest/**/*.txt").out.splitlines()) == sorted(
        name for name in ("a/1.txt", "a/2.txt", "a/[1].txt", "b/deep/3.txt", "top.txt")
    )
    assert dsctl("ls", "set@latest/**/deep/*").out.splitlines() == ["b/deep/3.txt"]
    assert dsctl("ls", "set@latest/**/**/deep/**/3*").out.splitlines() == ["b/deep/3.txt"]
    assert dsctl("ls", "set@latest/**/?/**/*/**/3*").out.splitlines() == ["b/deep/3.txt"]
    assert sorted(dsctl("ls", "set@latest/**/**/top*").out.splitlines()) == ["top.jpg", "top.txt"]
    assert dsctl("ls", "set@latest/**/*/**/[!12]*.txt").out.splitlines().count("b/deep/3.txt") == 1
    assert dsctl("ls", "set@latest/?").out.splitlines() == ["a/", "b/"]
    assert dsctl("ls", "-R", "set@latest/?/d*").out.splitlines() == ["b/deep/3.txt"]
    assert dsctl("cat", "set@latest/a/[12].txt").out == "a/1.txta/2.txt"
    assert dsctl("ls", "set@latest/*.png", "--json").error["type"] == "PathNotFoundError"
    refused = dsctl("cp", "set@latest/a/*", tmp_path / "new")
    assert (refused.code, "is no folder" in refused.err) == (2, True)
    done = dsctl("cp", "set@latest/a/[12].txt", f"{tmp_path}/new/")
    assert (done.code, sorted(os.listdir(tmp_path / "new"))) == (0, ["1.txt", "2.txt"])


def test_cp_makes_folders_and_takes_no_url_and_no_name_twice(dsctl: Dsctl, tmp_path: Path) -> None:
    folder = tmp_path / "set"
    (folder / "nothing").mkdir(parents=True)
    for name in ("a", "b"):
        (folder / name).mkdir()
        (folder / name / "x.txt").write_text(name)
    assert dsctl("snapshot", "create", "set", "--from", folder).code == 0
    assert dsctl("cp", "-r", "set", tmp_path / "copy").code == 0
    assert sorted(path.name for path in (tmp_path / "copy").iterdir()) == ["a", "b", "nothing"]
    refused = dsctl("cp", "set@latest/a/x.txt", "s3://bucket/x.txt")
    assert (refused.code, "no path of this machine" in refused.err) == (2, True)
    twice = dsctl("cp", "-f", "set@latest/a/x.txt", "set@latest/b/x.txt", f"{tmp_path}/one/")
    assert (twice.code, (tmp_path / "one" / "x.txt").read_text()) == (2, "a")
    assert "was just written" in twice.err


def test_what_is_in_no_snapshot_is_said_so(mask: Path, dsctl: Dsctl, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "dsctl snapshot create NAME --from s3://bucket/x" in dsctl("ls", "s3://bucket/x").err
    monkeypatch.chdir(mask)
    assert "of this machine is in no snapshot" in dsctl("cp", "notes.txt", "lab/mask").err
    assert dsctl("ls", "lab/mask/").out.splitlines() == ["images/", "notes.txt"]


def test_ls_shows_where_links_lead(dsctl: Dsctl, tmp_path: Path) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "a.txt").write_text("a")
    (folder / "link.txt").symlink_to("a.txt")
    assert dsctl("snapshot", "create", "set", "--from", folder).code == 0
    assert dsctl("ls", "-l", "set").out.splitlines()[1].endswith("link.txt -> a.txt")
    assert [each["target"] for each in dsctl("ls", "set", "--json").json] == [None, "a.txt"]
