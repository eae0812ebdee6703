"""`dsctl mount`, `umount`, `warm`, `cache`, `daemon`, `status`, `doctor` and `demo` with the real daemon and
kernel.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from datacache.settings import Settings
from datacache.testing.faces import draw_faces
from dataset_cli.commands import doctor
from tests.cli.conftest import ROOT, Dsctl


@pytest.fixture
def ref(dsctl: Dsctl, bucket: Path) -> str:
    assert dsctl("snapshot", "create", "mask", "--from", bucket, "--tag", "v1").code == 0
    return "mask@v1"


def test_a_mount_shows_the_bucket_until_it_is_unmounted(dsctl: Dsctl, ref: str, bucket: Path, tmp_path: Path) -> None:
    folder = tmp_path / "mnt"
    missing = dsctl("mount", ref, folder, "--json")
    assert missing.code == 1
    assert missing.error["hint"] == f"mkdir -p {folder}"
    folder.mkdir()
    mounted = dsctl("mount", ref, folder, "--umask", "077", "--uid", "1234", "--workers", "1", "--json")
    assert mounted.code == 0, mounted.err
    assert set(mounted.json) == {"mountpoint", "ref", "files", "bytes", "pid", "workers", "log"}
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


def test_warm_fails_when_the_objects_are_gone(dsctl: Dsctl, ref: str, bucket: Path) -> None:
    (bucket / "labels.txt").unlink()
    result = dsctl("warm", ref)
    assert result.code == 1
    assert "not warm" in result.err


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
    assert away.code == 0
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
        "pyfuse3",
        "staging",
        "catalog",
        "store",
        "daemon",
    }
    for name in ("home", "memory", "pyfuse3", "staging", "catalog", "store", "daemon"):
        assert checks[name]["state"] == "ok", checks[name]
    assert result.code == (0 if result.json["ok"] else 1)
    assert "0 failed" in dsctl("doctor").out or not result.json["ok"]


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
    for path in (shown["preview"], training["predictions"]):
        with Image.open(path) as picture:
            assert picture.format == "PNG"
            assert picture.width > 400
    assert not any(Path(tier["folder"]).exists() for tier in shown["tiers"])
    assert dsctl("snapshot", "list", "--json").json == []


def test_a_demo_that_is_kept_can_be_looked_at(dsctl: Dsctl, tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    assert "Try next" in dsctl("demo", "--count", "5", "--train", "0", "--dir", folder, "--keep").out
    assert dsctl("snapshot", "show", "mask@v1", DATACACHE_HOME=str(folder / "home")).code == 0
    assert dsctl("snapshot", "show", "mask-yolo@v1", DATACACHE_HOME=str(folder / "home")).code == 0
    assert (folder / "preview.png").stat().st_size > 10_000
    assert dsctl("demo", "--count", "3", "--train", "0", "--dir", folder).code == 0
    (folder / "mine").touch()
    assert dsctl("demo", "--dir", folder).code == 2


def test_a_demo_says_why_it_trains_nothing(dsctl: Dsctl, tmp_path: Path) -> None:
    few = dsctl("demo", "--count", "1", "--dir", tmp_path / "1")
    assert "training  left out: with so few images" in few.out, few.err
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['torch'] = None\n")
    without = dsctl("demo", "--count", "20", "--dir", tmp_path / "2", PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert "training  left out: it needs PyTorch (pip install 'datacache[torch]')" in without.out, without.err
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
