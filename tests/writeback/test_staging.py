"""Staging areas: one owner each, whatever happens to it, and folders that cannot be used refused by name."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from datacache.core.errors import StagingBusyError, StagingError, UsageError
from datacache.writeback.staging import area as staging
from datacache.writeback.staging.area import StagingArea, areas, discard_clean
from tests.promises import promise
from tests.writeback.test_journal_disk import fill

URL = "s3://faces/checkpoints"
NOBODY = 65534
HOLD = """
import os, sys
from pathlib import Path
from datacache.writeback.staging.area import StagingArea
from datacache.core.errors import StagingError
if sys.argv[4:]:
    os.setgroups([])
    os.setresgid(*[int(sys.argv[4])] * 3)
    os.setresuid(*[int(sys.argv[4])] * 3)
try:
    area = StagingArea.open(Path(sys.argv[1]), sys.argv[2], who=sys.argv[3])
except StagingError as exc:
    print(type(exc).__name__, exc, flush=True)
else:
    print("holds", area.id, flush=True)
    sys.stdin.read()
    area.close()
"""


def process(root, url=URL, who="/mnt/there", user=()):
    """Another process that opens the area, says how that went, and holds it until its input ends."""
    command = [sys.executable, "-c", HOLD, str(root), url, who, *map(str, user)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_an_area_keeps_its_id_and_its_folders_are_private(tmp_path):
    with StagingArea.open(tmp_path / "root", URL, who="/mnt/a") as area:
        first = area.id
        assert area.journal_folder.is_dir()
        assert {mode(path) for path in (tmp_path / "root", area.folder, area.data_folder)} == {0o700}
        assert {mode(path) for path in area.folder.iterdir() if path.is_file()} == {0o600}
        area.check()
    with StagingArea.open(tmp_path / "root", URL + "/", who="/mnt/b") as again:
        assert (again.id, again.folder) == (first, area.folder)
    with StagingArea.open(tmp_path / "root", "s3://faces/logs", who="/mnt/b") as other:
        assert other.id != first
        assert other.folder.name.startswith("s3-faces-logs-")


@promise("An area has one owner at a time, on whatever node")
def test_two_processes_never_have_one_area(tmp_path):
    holder = process(tmp_path)
    try:
        assert holder.stdout.readline().startswith("holds")
        with pytest.raises(StagingBusyError) as caught:
            StagingArea.open(tmp_path, URL, who="/mnt/here")
        for word in ("/mnt/there", f"pid {holder.pid}", os.uname().nodename, "since 20"):
            assert word in str(caught.value)
        assert "dsctl umount /mnt/there" in caught.value.hint
        (found,) = areas(tmp_path)
        assert (found.bucket_url, found.locked, found.owner.pid) == (URL + "/", True, holder.pid)
    finally:
        holder.communicate()
    (found,) = areas(tmp_path)
    assert (found.owner, found.locked) == (None, False)
    StagingArea.open(tmp_path, URL, who="/mnt/here").close()


@promise("The area of a killed process is free at once")
def test_the_area_of_a_killed_process_is_free_at_once(tmp_path):
    holder = process(tmp_path)
    area_id = holder.stdout.readline().split()[1]
    holder.send_signal(signal.SIGKILL)
    holder.communicate()
    (found,) = areas(tmp_path)
    assert (found.owner.pid, found.locked) == (holder.pid, False)
    with StagingArea.open(tmp_path, URL, who="/mnt/here") as area:
        assert area.id == area_id
        (found,) = areas(tmp_path)
        assert (found.owner, found.locked) == (area.owner, True)


@promise("An area has one owner at a time, on whatever node")
def test_the_owner_on_another_node_is_named_with_what_to_do_if_that_is_dead(tmp_path):
    with StagingArea.open(tmp_path, URL, who="/mnt/a") as area:
        owner = area.owner._asdict() | {"host": "node7", "boot_id": "of node7"}
        (area.folder / "owner.json").write_text(json.dumps(owner))
        with pytest.raises(StagingBusyError, match="node7") as caught:
            StagingArea.open(tmp_path, URL, who="/mnt/b")
        assert caught.value.hint.startswith("Unmount on node7: dsctl umount /mnt/a. If node7 is dead, wait")


def test_the_hint_for_an_owner_that_is_no_mount_is_not_to_unmount_it(tmp_path):
    with StagingArea.open(tmp_path, URL, who="dsctl flush") as area:
        with pytest.raises(StagingBusyError, match="dsctl flush") as caught:
            StagingArea.open(tmp_path, URL, who="/mnt/b")
        assert caught.value.hint.endswith(f"end it there: kill {area.owner.pid}")


@pytest.mark.parametrize("text", [None, "", "{}", "[1", '{"host": 1}'])
def test_an_owner_that_does_not_say_who_it_is_is_busy_all_the_same(tmp_path, text):
    with StagingArea.open(tmp_path, URL, who="/mnt/a") as area:
        owner = area.folder / "owner.json"
        owner.unlink() if text is None else owner.write_text(text)
        with pytest.raises(StagingBusyError, match="does not say"):
            StagingArea.open(tmp_path, URL, who="/mnt/b")
    assert areas(tmp_path)[0].locked is False
    StagingArea.open(tmp_path, URL, who="/mnt/b").close()


@promise("A process that lost an area to another node records and uploads nothing more")
def test_who_lost_the_lock_to_another_is_told_and_leaves_it_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(staging, "_CHECK_EVERY_S", 0.0)
    former = StagingArea.open(tmp_path, URL, who="/mnt/a")
    former.check()
    fcntl.flock(former._lock, fcntl.LOCK_UN)  # what a file system does to a node it takes for dead
    with StagingArea.open(tmp_path, URL, who="/mnt/b") as area:
        with pytest.raises(StagingError, match=r"taken over by /mnt/b"):
            former.check()
        former.close()
        area.check()
        with pytest.raises(StagingBusyError):
            StagingArea.open(tmp_path, URL, who="/mnt/c")


@promise("An area that was moved away or deleted is noticed")
def test_an_area_that_was_moved_away_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(staging, "_CHECK_EVERY_S", 0.0)
    with StagingArea.open(tmp_path, URL, who="/mnt/a") as area:
        area.folder.rename(tmp_path / "elsewhere")
        with pytest.raises(StagingError, match="is gone"):
            area.check()
    with pytest.raises(StagingError, match="closed"):
        area.check()


@promise("An area that was moved away or deleted is noticed")
def test_an_area_whose_lock_is_another_file_by_now_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(staging, "_CHECK_EVERY_S", 0.0)
    with StagingArea.open(tmp_path, URL, who="/mnt/a") as area:
        (area.folder / "lock").rename(tmp_path / "elsewhere")
        (area.folder / "lock").touch()
        with pytest.raises(StagingError, match="replaced"):
            area.check()


def test_on_a_full_disk_the_next_owner_says_who_it_is_over_a_killed_one(disk):
    root = disk("size=64k")
    killed = StagingArea.open(root, URL, who=f"/mnt/{'a' * 1000}")
    os.close(killed._lock)  # as a kill does
    fill(root / "filler")
    with StagingArea.open(root, URL, who="/mnt/b") as area:
        assert [found.owner for found in areas(root)] == [area.owner]
        area.check()


def make_area(root):
    with StagingArea.open(root, URL, who="/mnt/a") as area:
        return area.folder


@promise("A damaged area is refused and left as it is")
@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"format": 1}', '{"format": 1, "bucket_url": 1, "id": "x"}', "\xff"]
)
def test_a_damaged_area_is_refused_and_stays_as_it_is(tmp_path, text):
    file = make_area(tmp_path) / "area.json"
    file.write_text(text, encoding="latin-1")
    with pytest.raises(StagingError, match="damaged") as caught:
        StagingArea.open(tmp_path, URL, who="/mnt/a")
    assert str(file) in caught.value.hint
    assert file.read_text(encoding="latin-1") == text
    assert "damaged" in areas(tmp_path)[0].problem


def test_an_area_with_a_journal_does_not_get_a_new_identity(tmp_path):
    folder = make_area(tmp_path)
    (folder / "journal" / "00000001.log").write_bytes(b"x")
    (folder / "area.json").unlink()
    with pytest.raises(StagingError, match="not there"):
        StagingArea.open(tmp_path, URL, who="/mnt/a")


@promise("One bucket name at two endpoints is two areas")
def test_one_bucket_name_at_two_endpoints_is_two_areas(tmp_path):
    found = []
    for endpoint in ("", "http://one", "http://two", "http://one", ""):
        with StagingArea.open(tmp_path, URL, who="/mnt/a", endpoint=endpoint) as area:
            found.append(area.id)
    assert (found[3], found[4]) == (found[1], found[0])
    assert len(set(found)) == 3
    assert {area.endpoint for area in areas(tmp_path)} == {"", "http://one", "http://two"}


@promise("One bucket name at two endpoints is two areas")
def test_an_area_from_before_endpoints_were_noted_is_that_of_the_first_that_opens_it(tmp_path):
    file = make_area(tmp_path) / "area.json"
    table = json.loads(file.read_text())
    del table["endpoint"]
    file.write_text(json.dumps(table))
    for endpoint, same in (("http://one", True), ("http://two", False), ("", False), ("http://one", True)):
        with StagingArea.open(tmp_path, URL, who="/mnt/a", endpoint=endpoint) as area:
            assert (area.id == table["id"]) is same


@promise("A damaged area is refused and left as it is")
def test_an_area_of_another_version_or_bucket_is_refused(tmp_path):
    file = make_area(tmp_path) / "area.json"
    table = json.loads(file.read_text())
    file.write_text(json.dumps(table | {"format": 2}))
    with pytest.raises(StagingError, match="format 2"):
        StagingArea.open(tmp_path, URL, who="/mnt/a")
    file.write_text(json.dumps(table | {"bucket_url": "s3://other/"}))
    with pytest.raises(StagingError, match="belongs to s3://other/"):
        StagingArea.open(tmp_path, URL, who="/mnt/a")


@pytest.mark.parametrize(
    ("root", "reason"),
    [
        ("missing/root", "No such file"),
        ("file", "Not a directory"),
        ("file/root", "Not a directory"),
        ("r" * 300, "too long"),
    ],
)
def test_a_root_that_cannot_be_used_is_named_with_the_setting(tmp_path, root, reason):
    (tmp_path / "file").write_text("")
    with pytest.raises(StagingError, match=reason) as caught:
        StagingArea.open(tmp_path / root, URL, who="/mnt/a")
    assert str(tmp_path / root) in str(caught.value)
    assert "DATACACHE_STAGING" in caught.value.hint


def test_a_root_that_is_not_there_has_no_areas(tmp_path):
    assert areas(tmp_path / "none") == []
    (tmp_path / "file").write_text("")
    with pytest.raises(StagingError, match="Not a directory"):
        areas(tmp_path / "file")


def test_a_read_only_file_system_is_refused(disk):
    folder = make_area(disk("size=1m"))
    subprocess.run(["mount", "-o", "remount,ro", str(folder.parent)], check=True)
    with pytest.raises(StagingError, match="Read-only"):
        StagingArea.open(folder.parent, URL, who="/mnt/a")


@pytest.mark.parametrize("options", ["nr_inodes=2", "nr_inodes=3", "nr_inodes=4", "size=4k"])
def test_a_full_file_system_is_refused_and_no_half_made_area_left(disk, options):
    root = disk(options)
    if "size" in options:
        (root / "all").write_bytes(bytes(4096))
    with pytest.raises(StagingError, match="No space"):
        StagingArea.open(root, URL, who="/mnt/a")
    assert [area.problem for area in areas(root) if area.problem] == []
    subprocess.run(["mount", "-o", "remount,size=1m,nr_inodes=100", str(root)], check=True)
    with StagingArea.open(root, URL, who="/mnt/a") as area:
        area.check()


def test_credentials_in_a_url_are_refused_and_not_repeated(tmp_path):
    with pytest.raises(UsageError) as caught:
        StagingArea.open(tmp_path, "s3://AKIA:hush@faces/x", who="/mnt/a")
    assert "hush" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@promise("Only its owner reads an area")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_can_neither_use_nor_read_an_area_in_a_shared_root():
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        root.chmod(0o1777)
        folder = make_area(root)
        answer, _ = process(root, user=[NOBODY]).communicate()
        assert answer.startswith("StagingError")
        assert "Permission denied" in answer
        root.chmod(0o755)
        answer, _ = process(root, "s3://other", user=[NOBODY]).communicate()
        assert "Permission denied" in answer
        folder.chmod(0o755)
        make_area(root)
        assert mode(folder) == 0o700


@promise("Only its owner reads an area")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make what is another user's")
@pytest.mark.parametrize("kind", ["area", "folder", "link"])
def test_what_another_user_put_in_the_place_of_an_area_is_neither_used_nor_changed(tmp_path, kind):
    root, elsewhere = tmp_path / "root", tmp_path / "elsewhere"
    for folder in (root, elsewhere):
        folder.mkdir(mode=0o755)
    place = make_area(root)
    root.chmod(0o1777)
    if kind != "area":
        shutil.rmtree(place)
        place.symlink_to(elsewhere) if kind == "link" else place.mkdir(mode=0o755)
    os.chown(place, NOBODY, NOBODY, follow_symlinks=False)
    if kind == "folder":
        os.mkfifo(place / "lock")
    before = mode(place), list(place.iterdir())
    assert ["another user" in area.problem for area in areas(root)] == [True]
    with pytest.raises(StagingError, match="another user"):
        StagingArea.open(root, URL, who="/mnt/a")
    assert (mode(place), list(place.iterdir())) == before


@promise("An unstaged bucket volume leaves no staging area on the node")
def test_an_area_is_deleted_only_where_its_owner_left_it_clean(tmp_path):
    def make(name):
        return StagingArea.open(tmp_path / "staging", f"s3://bucket/{name}", who="test")

    held = make("held")
    assert not discard_clean(held.folder)
    held.close()
    died = make("died")
    os.close(died._lock)  # as a kill does
    conflict = make("conflict")
    (conflict.folder / "conflicts.jsonl").write_text("1")
    conflict.close()
    loss = make("loss")
    (loss.folder / "losses.json").write_text("1")
    loss.close()
    for folder in (died.folder, conflict.folder, loss.folder, tmp_path / "nothing"):
        assert not discard_clean(folder)
    assert discard_clean(held.folder)
    assert not held.folder.exists()
    assert died.folder.exists()
    assert conflict.folder.exists()
    assert loss.folder.exists()
