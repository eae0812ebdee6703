"""`dsctl mount`, `umount`, `warm`, `cache`, `daemon`, `status`, `doctor` and `demo` with the real daemon and
kernel.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from urllib.request import HTTPCookieProcessor, build_opener

import pytest
from PIL import Image

from datacache.settings import Settings
from dataset_cli.commands import doctor
from dataset_cli.demo.faces import draw_faces
from tests.cli.conftest import ROOT, Dsctl
from tests.promises import promise
from tests.servers import RcloneS3


@pytest.fixture
def ref(dsctl: Dsctl, bucket: Path) -> str:
    assert dsctl("snapshot", "create", "mask", "--from", bucket, "--tag", "v1").code == 0
    return "mask@v1"


@promise("`dsctl status` has the last errors of each mount")
def test_status_tells_the_last_errors_of_a_mount_and_what_to_do(
    dsctl: Dsctl, ref: str, bucket: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "mnt"
    folder.mkdir()
    assert dsctl("mount", ref, folder).code == 0
    (bucket / "images" / "1.jpg").write_bytes(b"somebody wrote something else")
    with pytest.raises(OSError, match="Stale file handle"):
        (folder / "images" / "1.jpg").read_bytes()

    def told() -> list[dict[str, Any]]:
        return cast("list[dict[str, Any]]", dsctl("status", "--json").json["mounts"][0]["errors"])

    deadline = time.monotonic() + 60
    while not told():  # the state is written soon, not at once
        assert time.monotonic() < deadline
        time.sleep(0.05)
    [error] = told()
    assert (error["path"], error["errno"]) == ("images/1.jpg", "ESTALE")
    assert "ObjectChangedError" in error["reason"]
    assert error["hint"]
    assert abs(error["at"] - time.time()) < 3600
    said = dsctl("status").out
    assert "error    images/1.jpg: ObjectChangedError" in said
    assert f"→ {error['hint']}" in said


def test_a_mount_shows_the_bucket_until_it_is_unmounted(dsctl: Dsctl, ref: str, bucket: Path, tmp_path: Path) -> None:
    folder = tmp_path / "mnt"
    missing = dsctl("mount", ref, folder, "--json")
    assert missing.code == 1
    assert missing.error["hint"] == f"mkdir -p {folder}"
    folder.mkdir()
    no_key = {"DATACACHE_CLUSTER": "lab"}  # with which no daemon starts
    mounted = dsctl("mount", ref, folder, "--umask", "077", "--uid", "1234", "--workers", "1", "--json", **no_key)
    assert "cannot be started: the cluster 'lab' is set, and no key for it. Until it runs," in mounted.err
    assert "DATACACHE_CLUSTER_KEY_FILE" in mounted.err
    assert mounted.code == 0, mounted.err
    assert set(mounted.json) == {"mountpoint", "ref", "files", "bytes", "pid", "workers", "log", "errors"}
    assert mounted.json["files"] == 3
    file = folder / "images" / "1.jpg"
    assert file.read_bytes() == (bucket / "images" / "1.jpg").read_bytes()
    assert file.stat().st_mode & 0o777 == 0o400
    assert file.stat().st_uid == 1234
    state = dsctl("status", "--json").json
    assert [mount["mountpoint"] for mount in state["mounts"]] == [str(folder)]
    assert str(folder) in dsctl("status").out
    assert dsctl("umount", folder).code == 0
    assert not file.exists()
    again = dsctl("umount", folder)
    assert again.code == 1
    assert "nothing is mounted" in again.err
    both = dsctl("umount", folder, folder.parent)
    assert both.err.startswith(f"error: nothing is mounted at {folder}\n       nothing is mounted at {folder.parent}\n")


@promise("`dsctl umount` takes away no mount of another home, and names that home; of several mounts it tries each")
def test_several_mounts_are_unmounted_at_once_and_none_of_another_home(
    dsctl: Dsctl, ref: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [tmp_path / name for name in ("a", "b", "c", "d")]
    for folder in folders:
        folder.mkdir()
        assert dsctl("mount", ref, folder, "--workers", "1").code == 0
    first, second, *rest = folders
    other = tmp_path / "other home"
    refused = dsctl("umount", first, "--json", DATACACHE_HOME=str(other))
    assert refused.code == 1
    assert os.environ["DATACACHE_HOME"] in refused.error["message"]
    assert refused.error["hint"] == f"DATACACHE_HOME={os.environ['DATACACHE_HOME']} dsctl umount {first}"
    assert dsctl("umount", "--all", DATACACHE_HOME=str(other)).out == "nothing is mounted\n"
    assert dsctl("umount").code == 2
    assert dsctl("umount", first, "--all").code == 2
    monkeypatch.chdir(tmp_path)
    one = dsctl("umount", "a", "--json").json
    assert one == {"mountpoint": str(first), "unmounted": True}
    several = dsctl("umount", "a", "b", "--json")
    assert several.code == 1
    assert [(each["mountpoint"], each["unmounted"]) for each in several.json] == [
        (str(first), False),
        (str(second), True),
    ]
    everything = dsctl("umount", "--all", "--timeout", "30")
    assert everything.code == 0, everything.err
    assert sorted(everything.out.splitlines()) == [f"{folder} is unmounted" for folder in rest]
    assert dsctl("status", "--json").json["mounts"] == []


@promise("`dsctl warm` says done only when every byte is on the node")
def test_warm_waits_until_every_byte_is_here(dsctl: Dsctl, ref: str) -> None:
    job = dsctl("warm", ref, "--json")
    assert job.code == 0, job.err
    assert job.json["state"] == "done"
    assert job.json["bytes_done"] == job.json["bytes_total"] == 902
    assert "is warm" in dsctl("warm", ref).out
    assert dsctl("warm", ref, "--no-wait", "--json").json["ref"].startswith("mask@")
    missing = dsctl("warm", "mask@nothing", "--json")
    assert missing.code == 1
    assert missing.error["type"] == "SnapshotNotFoundError"


@promise("`dsctl warm` says done only when every byte is on the node")
def test_warm_fails_when_the_objects_are_gone(dsctl: Dsctl, ref: str, bucket: Path) -> None:
    gone = [path for path in sorted(bucket.rglob("*")) if path.is_file()][:3]
    for path in gone:
        path.unlink()
    result = dsctl("warm", ref)
    assert result.code == 1
    assert "not warm" in result.err
    assert ", and 2 more errors (" in result.err
    assert "dsctl snapshot verify NAME names all such files" in result.err


def test_the_cache_is_shown_pinned_and_evicted(dsctl: Dsctl, ref: str) -> None:
    dsctl("warm", ref)
    state = dsctl("cache", "status", "--json").json
    assert {tier["name"] for tier in state["tiers"]} == {"ram", "ssd"}
    assert "TIER" in dsctl("cache", "status").out
    assert dsctl("cache", "pin", ref, "--json").json["pinned"] is True
    assert "pinned: mask@" in dsctl("cache", "status").out
    refused = dsctl("cache", "evict", "mask")
    assert refused.code == 2
    assert "unpin" in refused.err
    assert dsctl("cache", "unpin", ref).out.startswith("unpinned mask@")
    unknown = dsctl("cache", "evict", "nosuch", "--json")
    assert (unknown.code, unknown.error["message"]) == (1, "there is no dataset 'nosuch'")
    assert unknown.error["hint"] == "This node has something of: mask."
    assert dsctl("cache", "evict", "mask", "--json").json["freed_bytes"] > 0
    assert dsctl("cache", "evict", "mask", "--json").json["freed_bytes"] == 0
    nothing = dsctl("cache", "evict")
    assert nothing.code == 2
    assert "--all" in nothing.err
    assert dsctl("cache", "evict", "mask", "--all").code == 2
    assert dsctl("cache", "evict", "--all").code == 0


def test_the_daemon_is_started_shown_and_stopped(dsctl: Dsctl) -> None:
    none = dsctl("daemon", "status", "--json")
    assert none.code == 1
    assert none.json == {"running": False}
    assert dsctl("daemon", "stop", "--json").json == {"stopped": False}
    started = dsctl("daemon", "start", "--json")
    assert started.json["started"] is True
    again = dsctl("daemon", "start", "--json").json
    assert again["started"] is False
    assert again["pid"] == started.json["pid"]
    assert dsctl("daemon", "status", "--json").json["running"] is True
    busy = dsctl("daemon", "start", "--foreground")
    assert busy.code == 1
    assert "already" in busy.err
    assert dsctl("daemon", "stop").out == "the daemon is stopped\n"
    assert dsctl("daemon", "status").code == 1


def test_status_starts_nothing_and_shows_a_catalog_that_is_away(dsctl: Dsctl) -> None:
    state = dsctl("status", "--json").json
    assert state["daemon"] is None
    assert state["catalog"]["datasets"] == 0
    away = dsctl("status", DATACACHE_CATALOG="mongodb://127.0.0.1:9/x?serverSelectionTimeoutMS=200")
    assert away.code == 1
    assert "does not answer" in away.out


def test_doctor_finds_a_well_node_well(dsctl: Dsctl, ref: str) -> None:
    result = dsctl("doctor", "--json")
    checks = {check["name"]: check for check in result.json["checks"]}
    assert set(checks) == {
        "FUSE",
        "fusermount3",
        "kernel",
        "open files",
        "home",
        "memory",
        "staging",
        "catalog",
        "store",
        "daemon",
    }
    for name in ("home", "memory", "staging", "catalog", "store", "daemon"):
        assert checks[name]["state"] == "ok", checks[name]
    assert result.code == (0 if result.json["ok"] else 1)
    assert "0 failed" in dsctl("doctor").out or not result.json["ok"]


def test_doctor_opens_the_fuse_device_once_and_starts_nothing(ref: str, bucket: Path) -> None:
    watched = """
import os, sys
seen = []
def note(event, args):
    starts = event in ("subprocess.Popen", "os.posix_spawn", "os.fork")
    if starts or event == "open" and args[0] == "/dev/fuse":
        seen.append(event)
sys.addaudithook(note)
from dataset_cli.main import run
try:
    run(["doctor", "--json"])
finally:
    print(seen, file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", watched], capture_output=True, text=True, check=False, timeout=60)
    assert done.stderr.splitlines()[-1] == "['open']", done.stderr
    assert '"FUSE"' in done.stdout


def test_doctor_says_what_is_wrong_and_what_to_do(dsctl: Dsctl, ref: str, bucket: Path) -> None:
    result = dsctl(
        "doctor",
        "--json",
        DATACACHE_CATALOG="mongodb://127.0.0.1:9/x?serverSelectionTimeoutMS=200",
        DATACACHE_SSD_BYTES="900TB",
        DATACACHE_RAM_BYTES="900TB",
    )
    assert result.code == 1
    checks = {check["name"]: check for check in result.json["checks"]}
    assert {name: checks[name]["state"] for name in ("catalog", "home", "memory")} == {
        "catalog": "fail",
        "home": "warn",
        "memory": "warn",
    }
    assert all(check["hint"] for check in checks.values() if check["state"] != "ok")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a tmpfs")
def test_doctor_says_to_make_room_on_a_full_disk(settings: Settings, tmp_path: Path) -> None:
    full = tmp_path / "full"
    (full / "staging").mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", full], check=True)
    try:
        (full / "staging").mkdir()
        with contextlib.suppress(OSError), open(full / "all", "wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
        there = replace(settings, home=full, staging=full / "staging")
        assert doctor.home(there).hint == f"Make room: df -h {full}"
        assert doctor.staging(there).hint == f"Make room: df -h {full / 'staging'}"
    finally:
        subprocess.run(["umount", full], check=True)


def test_doctor_finds_variables_that_are_likely_misspelt_and_leaves_those_of_kubernetes_alone() -> None:
    wrong = {
        "DATACACHE_CATALOGUE": "DATACACHE_CATALOG",
        "DATACACHE_SSD": "DATACACHE_SSD_BYTES",
        "DATACACHE_STAGNG": "DATACACHE_STAGING",
        "DATACACHE_STORE_TIMEOUT": "DATACACHE_STORE_TIMEOUT_S",
        "DATACHE_HOME": "DATACACHE_HOME",
        "datacache_home": "DATACACHE_HOME",
    }
    right = ["DATACACHE_HOME", "DATACACHE_DEBUG", "DATACACHE_TEST_SEED", "DATACACHE_MYTHING", "HOME", "DATABASE_HOME"]
    right += ["DATACACHE_PORT", "DATACACHE_SERVICE_HOST", "DATACACHE_SERVICE_PORT", "DATACACHE_SERVICE_PORT_HTTP"]
    right += ["DATACACHE_PORT_80_TCP", "DATACACHE_PORT_80_TCP_ADDR", "DATACACHE_CATALOG_SERVICE_HOST"]
    right += ["DATACACHE_MONGODB_PORT", "DATACACHE_MONGODB_PORT_27017_TCP_PROTO", "DATACACHE_OBJECTS_PORT"]
    found = {check.message.split()[0]: check.hint for check in doctor.variables([*wrong, *right])}
    assert found == {name: f"Did you mean {meant}?" for name, meant in wrong.items()}


def test_doctor_knows_kernels(settings: Settings) -> None:
    assert [doctor.kernel(release).state for release in ("6.18.4-x", "6.9.0", "6.1.0-31-amd64", "5.0", "x")] == [
        "ok",
        "ok",
        "warn",
        "fail",
        "fail",
    ]
    assert doctor.home(replace(settings, home=Path("/proc/nowhere"))).state == "fail"
    assert doctor.ram(replace(settings, ram_dir=Path("/nowhere"))).state == "fail"


@promise("The demo leaves nothing behind but its picture")
def test_the_demo_goes_all_the_way_and_leaves_a_picture_alone(
    dsctl: Dsctl, tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    (here / "preview.png").write_bytes(b"mine")
    result = dsctl("demo", "--count", "20", "--train", "2", "--json", TMPDIR=str(tmp_path))
    assert result.code == 0, result.err
    shown = result.json
    assert shown["ok"] is True
    assert shown["compared_files"] == 44
    assert [epoch["files"] for epoch in shown["epochs"]] == [44, 44]
    assert list(tmp_path.glob("datacache-demo-*")) == []
    assert shown["converted"]["files"] == 20 + 20 + 1
    assert sorted(path.name for path in here.iterdir()) == ["predictions.png", "preview.png", "preview1.png"]
    assert (here / "preview.png").read_bytes() == b"mine"
    training = shown["training"]
    assert training["images"] + training["test_images"] == 20
    assert training["epochs"] >= 1
    assert 0 <= (training["map"] or 0) <= (training["map_50"] or 0) <= 1
    assert training["predicted"].startswith("mask-predicted@")
    assert re.fullmatch(r"/match/mask-predicted@v1\?with=mask-yolo-val@v1&score=[\d.e-]+", training["match"])
    for path in (shown["preview"], training["predictions"]):
        with Image.open(path) as picture:
            assert picture.format == "PNG"
            assert picture.width > 400
    assert not any(Path(tier["folder"]).exists() for tier in shown["tiers"])
    assert dsctl("snapshot", "list", "--json").json == []


def test_a_demo_that_is_kept_can_be_looked_at(dsctl: Dsctl, tmp_path: Path) -> None:
    folder = tmp_path / "the demo"
    lines = dsctl("demo", "--count", "5", "--train", "0", "--dir", folder, "--keep").out.splitlines()
    [command] = [line for line in lines if line.endswith(" dsctl ui")]
    with _running(["bash", "-c", f"{command.replace('dsctl ui', f'{PROGRAM} ui --port 0')}"], tmp_path) as page:
        assert b"mask-yolo" in _visit(page)
    assert dsctl("snapshot", "show", "mask@v1", DATACACHE_HOME=str(folder / "home")).code == 0
    assert dsctl("snapshot", "show", "mask-yolo@v1", DATACACHE_HOME=str(folder / "home")).code == 0
    assert (folder / "preview.png").stat().st_size > 10_000
    assert dsctl("demo", "--count", "3", "--train", "0", "--dir", folder).code == 0
    (folder / "mine").touch()
    assert dsctl("demo", "--dir", folder).code == 2


def test_a_demo_ends_with_its_page_and_then_cleans_up(home: Path, tmp_path: Path) -> None:
    words = ["demo", "--count", "3", "--train", "0", "--page"]
    with _running([sys.executable, "-m", "dataset_cli", *words], tmp_path) as page:
        assert b"mask-yolo" in _visit(page)
        page.send_signal(signal.SIGINT)
        out, _ = page.communicate(timeout=60)
        assert page.returncode == 0
        assert "Everything is cleaned up" in out
    assert [path.name for path in tmp_path.iterdir() if path != home] == ["preview.png"]


PROGRAM = f"env PYTHONPATH={ROOT} {sys.executable} -m dataset_cli"


@contextmanager
def _running(words: list[str], folder: Path) -> Iterator[subprocess.Popen[str]]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(folder)}
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment, cwd=folder) as process:
        try:
            yield process
        finally:
            process.kill()


def _visit(page: subprocess.Popen[str]) -> bytes:
    """Return the first page behind the link that `dsctl ui` prints."""
    assert page.stdout is not None
    link = next(line.strip() for line in page.stdout if line.startswith("http://"))
    browser = build_opener(HTTPCookieProcessor())
    browser.open(link, timeout=60).close()
    with browser.open(link.partition("?")[0], timeout=60) as answer:
        return answer.read()


def test_a_demo_says_why_it_trains_nothing(dsctl: Dsctl, tmp_path: Path) -> None:
    few = dsctl("demo", "--count", "1", "--dir", tmp_path / "1")
    assert "training  left out: with so few images" in few.out, few.err
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['torch'] = None\n")
    without = dsctl("demo", "--count", "20", "--dir", tmp_path / "2", PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert "training  left out: it needs PyTorch (pip install 'dsctl[torch]')" in without.out, without.err
    assert [path.name for path in (tmp_path / "2").iterdir()] == ["preview.png"]


def test_the_drawn_faces_are_the_same_for_the_same_seed_and_well_formed(tmp_path: Path) -> None:
    from xml.etree import ElementTree as ET

    one, two = draw_faces(tmp_path / "1", count=12, seed=3), draw_faces(tmp_path / "2", count=12, seed=3)
    files = sorted(path.relative_to(one.folder) for path in one.folder.rglob("*") if path.is_file())
    assert len(files) == 12 + 12 + 4
    for file in files:
        assert (one.folder / file).read_bytes() == (two.folder / file).read_bytes()
    boxes = 0
    for path in sorted((one.folder / "Annotations").iterdir()):
        tree = ET.parse(path)
        with Image.open(one.folder / "JPEGImages" / str(tree.findtext("filename"))) as image:
            assert image.format == "JPEG"
            width, height = image.size
        assert (tree.findtext("size/width"), tree.findtext("size/height")) == (str(width), str(height))
        for found in tree.iterfind("object"):
            boxes += 1
            assert found.findtext("name") in ("with_mask", "without_mask")
            xmin, ymin, xmax, ymax = (
                int(found.findtext(f"bndbox/{side}", "")) for side in ("xmin", "ymin", "xmax", "ymax")
            )
            assert 1 <= xmin < xmax <= width
            assert 1 <= ymin < ymax <= height
    assert boxes == one.masked + one.bare > 0
    splits = {path.stem: path.read_text().split() for path in (one.folder / "ImageSets" / "Main").iterdir()}
    assert sorted(splits["train"] + splits["val"]) == splits["trainval"]
    assert sorted(splits["trainval"] + splits["test"]) == [f"{number:06}" for number in range(1, 13)]


@promise("Logs and states of mounts are for their owner only")
@pytest.mark.parametrize(
    "text", ['catalog = "mongodb://me:hush@127.0.0.1:9/x"', "[stores.lab]\nurl = 's3://x'\nsecret_access_key = 'hush'"]
)
def test_doctor_reports_secrets_that_others_can_read(dsctl: Dsctl, home: Path, text: str) -> None:
    file = home / "config.toml"
    file.write_text(text)
    variables = {"DATACACHE_CATALOG": f"sqlite:///{home}/catalog.db"}
    for mode, state in ((0o644, "fail"), (0o640, "fail"), (0o600, "ok")):
        file.chmod(mode)
        result = dsctl("doctor", "--json", **variables)
        (check,) = [check for check in result.json["checks"] if check["name"] == "config"]
        assert check["state"] == state
        assert (state == "ok") == ("chmod 600" not in check["hint"])
        assert "hush" not in result.out + result.err
    file.write_text("ssd_bytes = '1GB'")
    file.chmod(0o644)  # of no interest to others
    (check,) = [check for check in dsctl("doctor", "--json").json["checks"] if check["name"] == "config"]
    assert check["state"] == "ok"


@promise("Logs and states of mounts are for their owner only")
def test_nothing_under_the_home_can_be_read_by_others(dsctl: Dsctl, ref: str, home: Path, tmp_path: Path) -> None:
    """The home itself may be a folder that was made before, for all to enter."""
    (home / "log").mkdir(exist_ok=True)
    (home / "log" / "daemon.log").touch(mode=0o644)  # of an earlier version
    (tmp_path / "mnt").mkdir()
    assert dsctl("mount", ref, tmp_path / "mnt").code == 0
    open_to_others = [
        path.relative_to(home)
        for folder in ("mounts", "log")
        for path in (home / folder).iterdir()
        if path.lstat().st_mode & 0o077
    ]
    assert open_to_others == []
    assert dsctl("umount", tmp_path / "mnt").code == 0


@promise("Settings of a shell that differ from the daemon's are named, with what to do")
def test_settings_that_are_not_the_daemons_are_named_by_doctor_and_status(dsctl: Dsctl) -> None:
    assert dsctl("daemon", "start").code == 0
    assert dsctl("status", "--json").json["differing"] == []
    other = {"DATACACHE_SSD_BYTES": "99MB", "DATACACHE_EVICTION": "lru"}
    checks = [check for check in dsctl("doctor", "--json", **other).json["checks"] if check["name"] == "settings"]
    assert [check["state"] for check in checks] == ["warn", "warn"]
    assert "DATACACHE_SSD_BYTES is 99000000 here, and the daemon runs with 536870912" in checks[0]["message"]
    assert "dsctl daemon stop" in checks[0]["hint"]
    assert "DATACACHE_EVICTION is lru here, and the daemon runs with keep" in checks[1]["message"]
    said = dsctl("status", "--json", **other)
    assert said.json["differing"][1] == {"name": "DATACACHE_EVICTION", "daemon": "keep", "shell": "lru"}
    assert "DATACACHE_EVICTION" in dsctl("status", **other).err
    assert "DATACACHE_EVICTION" in dsctl("daemon", "start", **other).err


@promise("Settings of a shell that differ from the daemon's are named, with what to do")
def test_no_password_of_the_catalog_is_in_what_is_compared(settings: Settings) -> None:
    with_password = replace(settings, catalog="mongodb://me:secret-4f@db/faces")
    assert with_password.of_the_daemon()["DATACACHE_CATALOG"] == "mongodb://db/faces"
    assert "secret-4f" not in str(with_password.of_the_daemon())


@promise("A lower limit evicts whole regions, read longest ago first")
def test_a_lower_limit_evicts_down_to_it_and_the_start_says_what_went(dsctl: Dsctl, tmp_path: Path) -> None:
    for name in ("old", "new"):
        folder = tmp_path / name
        folder.mkdir()
        for number in range(24):
            (folder / f"{number}.bin").write_bytes(bytes([number]) * 500_000)
        assert dsctl("snapshot", "create", name, "--from", folder).code == 0
        assert dsctl("warm", name).code == 0
    assert dsctl("daemon", "stop").code == 0
    started = dsctl("daemon", "start", DATACACHE_SSD_BYTES="20MB")
    assert "the limit of ssd is lower than what was cached" in started.err
    kept = {each["name"]: each["ssd_bytes"] for each in dsctl("cache", "status", "--json").json["datasets"]}
    assert kept["new"] >= 12_000_000


@promise("A misspelt `DATACACHE_` variable is named by every command")
@pytest.mark.parametrize("command", ["status", "warm"])
def test_a_variable_that_is_misspelt_is_named_by_every_command(dsctl: Dsctl, ref: str, command: str) -> None:
    words = ["warm", ref] if command == "warm" else [command]
    done = dsctl(*words, DATACACHE_SSDBYTES="1GB", DATACACHE_PORT="tcp://10.0.0.1:80")
    assert done.code == 0
    assert (
        done.err.count("warning: DATACACHE_SSDBYTES is set, and is no setting; did you mean DATACACHE_SSD_BYTES?") == 1
    )
    assert "DATACACHE_PORT" not in done.err


@promise("A misspelt `DATACACHE_` variable is named by every command")
def test_a_key_of_the_file_that_is_misspelt_is_an_error_that_says_what_was_meant(dsctl: Dsctl, home: Path) -> None:
    (home / "config.toml").write_text('ssdbytes = "1GB"\n')
    wrong = dsctl("status", "--json")
    assert (wrong.code, wrong.error["type"]) == (2, "SettingsError")
    assert "Did you mean ssd_bytes?" in wrong.error["hint"]


@pytest.fixture
def many(dsctl: Dsctl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a data set `many` whose store is away by then, and is asked again for a while."""
    monkeypatch.setenv("DATACACHE_STORE_TIMEOUT_S", "20")
    with RcloneS3(tmp_path / "s3") as server:
        for name, value in server.env().items():
            monkeypatch.setenv(name, value)
        (server.make_bucket("many") / "1.bin").write_bytes(b"1" * 1000)
        assert dsctl("snapshot", "create", "many", "--from", "s3://many").code == 0


@promise("An interrupted warm-up goes on in the daemon and says so; `dsctl jobs cancel ID` ends it")
@pytest.mark.usefixtures("many")
def test_a_warm_up_that_is_interrupted_goes_on_is_listed_and_cancelled(dsctl: Dsctl) -> None:
    assert dsctl("jobs").out == "no jobs\n"
    command = [sys.executable, "-m", "dataset_cli", "warm", "many"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as following:
        deadline = time.monotonic() + 120
        while not (found := dsctl("jobs", "--json").json["jobs"]):
            assert time.monotonic() < deadline
            time.sleep(0.2)
        [job] = found
        following.send_signal(signal.SIGINT)
        said = following.communicate(timeout=60)[1]
    assert following.returncode == 130
    # The daemon lists a job before its answer is there, and before that nobody can name it.
    assert f"dsctl jobs cancel {job['id']}" in said or "dsctl jobs lists it" in said
    for command in (("jobs",), ("status",), ("cache", "status")):
        while "s3://many has not answered the daemon for" not in (seen := dsctl(*command)).err:
            assert time.monotonic() < deadline, command
            time.sleep(0.2)
        assert "refuses connections" in seen.err
    assert job["id"] in dsctl("jobs").out
    assert dsctl("jobs", "cancel", job["id"], "--json").json["cancelled"] is True
    while dsctl("jobs", "--json").json["jobs"][0]["state"] != "cancelled":
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert dsctl("jobs", "cancel", job["id"]).out == f"{job['ref']} has ended already: cancelled\n"
    unknown = dsctl("jobs", "cancel", "nosuch", "--json")
    assert (unknown.code, unknown.error["type"]) == (1, "SnapshotNotFoundError")


def test_jobs_say_why_one_failed(dsctl: Dsctl, tmp_path: Path) -> None:
    folder = tmp_path / "photos"
    folder.mkdir()
    (folder / "1.jpg").write_bytes(b"1")
    assert dsctl("snapshot", "create", "photos", "--from", folder).code == 0
    (folder / "1.jpg").unlink()
    assert dsctl("warm", "photos").code == 1
    said = dsctl("jobs").out
    assert "failed" in said
    assert f"    {folder}/1.jpg" in said.replace("file://", "")


@pytest.mark.usefixtures("many")
def test_a_warm_up_is_waited_for_while_its_daemon_is_stopped(dsctl: Dsctl) -> None:
    command = [sys.executable, "-m", "dataset_cli", "warm", "many"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as following:
        deadline = time.monotonic() + 60
        while not (found := dsctl("jobs", "--json").json["jobs"]):
            assert time.monotonic() < deadline
            time.sleep(0.2)
        pid = dsctl("status", "--json").json["daemon"]["pid"]
        os.kill(pid, signal.SIGSTOP)
        try:
            assert following.stderr is not None
            warning = next(line for line in following.stderr if "the warm-up is waited for" in line)
        finally:
            os.kill(pid, signal.SIGCONT)
        while dsctl("jobs", "cancel", found[0]["id"]).code != 0:  # it counts as silent for a moment
            assert time.monotonic() < deadline
            time.sleep(0.2)
        said = following.communicate(timeout=60)[1]
    assert "has not answered for" in warning
    assert "is not warm: it was cancelled" in said, "it was waited for until then"
