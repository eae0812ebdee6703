"""Exports of annotation tools become snapshots, alone and with the images of another one."""

from __future__ import annotations

import json
import os
import tarfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from datacache import api
from datacache.catalog.refs import resolve
from datacache.core.errors import (
    ImportFailedError,
    OtherKindError,
    SettingsError,
    SnapshotNotFoundError,
    TagExistsError,
    UsageError,
)
from datacache.imports.archives.members import UnpackLimits
from datacache.manifest.model import PACKS, Lineage
from datacache.manifest.reader import Manifest
from datacache.settings import Settings
from dataset_cli.demo.faces import draw_faces
from tests.imports.archives import Raw, make_tar, make_zip, raw_zip
from tests.imports.conftest import files_of
from tests.promises import promise
from tests.servers import Mongod, RcloneS3

SMALL, LARGE = b"\xff\xd8 small", b"\xff\xd8" + bytes(range(256)) * 200
VOC = {
    "Annotations/1.xml": b"<annotation>1</annotation>",
    "Annotations/2.xml": b"<annotation>2</annotation>",
    "ImageSets/Main/train.txt": b"1\n2\n",
    "JPEGImages/1.jpg": LARGE,
    "JPEGImages/2.jpg": SMALL,
}
Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a file, or a folder of files."""

    def put(name: str, content: bytes | Mapping[str, bytes]) -> Path:
        path = tmp_path / name
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            for file, data in content.items():
                (path / file).parent.mkdir(parents=True, exist_ok=True)
                (path / file).write_bytes(data)
        return path

    return put


def stored_in(settings: Settings, ref: str = "faces") -> dict[str, str]:
    """The store that each file of a snapshot lies in."""
    catalog = api.open_catalog(settings)
    manifest = Manifest.open(resolve(catalog, ref).id, catalog.get_blobs)
    found = {entry.path.decode(): manifest.root.sources[entry.source].store for entry in manifest.entries()}
    catalog.close()
    return found


@pytest.mark.parametrize("kind", ["zip", "tar", "tar.gz", "folder"])
def test_every_kind_of_export_has_the_same_files(write: Write, settings: Settings, kind: str) -> None:
    content: bytes | Mapping[str, bytes] = VOC
    if kind != "folder":
        content = make_zip(VOC) if kind == "zip" else make_tar(VOC, mode="w:gz" if kind == "tar.gz" else "w")
    made = api.import_export("faces", write(f"export.{kind}", content), settings=settings, tags=["v1"])
    assert (made.files, made.images, made.referenced, made.replaced, made.leading) == (5, 2, 0, 0, "")
    assert files_of(settings, "faces@v1") == VOC
    with api.open_snapshot("faces", settings) as opened:
        assert {path: opened.read(path) for path in opened.paths()} == VOC


def test_small_files_are_packed_and_images_are_objects(write: Write, settings: Settings) -> None:
    coco = b'{"images": []}' + b" " * (2 << 20)
    files = VOC | {"instances.json": coco, "huge.json": coco * 4, "video.mp4": b"v" * (2 << 20)}
    made = api.import_export("faces", write("a.zip", make_zip(files)), settings=settings)
    places = stored_in(settings)
    assert [path for path, store in places.items() if store == PACKS.store] == [
        "Annotations/1.xml",
        "Annotations/2.xml",
        "ImageSets/Main/train.txt",
        "JPEGImages/2.jpg",
        "instances.json",
    ]
    assert places["JPEGImages/1.jpg"] == places["huge.json"] == places["video.mp4"] == "file://"
    objects = [path for path in (settings.home / "objects").rglob("*") if path.is_file()]
    assert len(objects) == 3
    assert files_of(settings) == files
    assert made.record.lineage is not None
    assert made.record.lineage[0] == "import-export"


@promise("The same lines, in any order, and the same export give the same snapshot")
def test_the_same_export_gives_the_same_snapshot(write: Write, settings: Settings, tmp_path: Path) -> None:
    for name, content in [("a.zip", make_zip(VOC)), ("b.tar", make_tar(VOC)), ("folder", VOC)]:
        first = api.import_export("faces", write(name, content), settings=settings)
        again = api.import_export("faces", write(f"again-{name}", content), settings=settings)
        assert first.record.id == again.record.id, name
    for path in (tmp_path / "folder").rglob("*"):
        os.utime(path, (1e9, 1e9))
    assert api.import_export("faces", tmp_path / "folder", settings=settings).record.id == first.record.id


def test_a_coco_file_is_an_export(write: Write, settings: Settings) -> None:
    data = b"\xef\xbb\xbf" + json.dumps({"images": [], "annotations": [], "categories": []}).encode()
    made = api.import_export("faces", write("instances_default.json", data), settings=settings)
    assert files_of(settings) == {"instances_default.json": data}
    assert made.record.origin.endswith("/instances_default.json")


@promise("Annotations join the images of another snapshot without reading one of them")
def test_annotations_join_the_images_of_a_snapshot(
    write: Write, settings: Settings, rclone_s3: RcloneS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in rclone_s3.env().items():
        monkeypatch.setenv(name, value)
    bucket = rclone_s3.make_bucket("export-images")
    for name in ("JPEGImages/1.jpg", "JPEGImages/2.JPG", "JPEGImages/3.png", "Annotations/1.xml", "notes.txt"):
        path = bucket / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode())
    old = api.create_snapshot("raw", "s3://export-images", settings=settings)
    export = {"Annotations/2.xml": b"new", "Annotations/3.xml": b"new", "JPEGImages/1.jpg": LARGE}
    made = api.import_export("faces", write("a.zip", make_zip(export)), images="raw", settings=settings)
    assert (made.files, made.images, made.referenced, made.replaced) == (3, 1, 2, 1)
    assert files_of(settings) == export | {
        "JPEGImages/2.JPG": b"JPEGImages/2.JPG",
        "JPEGImages/3.png": b"JPEGImages/3.png",
    }
    assert stored_in(settings)["JPEGImages/2.JPG"] == "s3://export-images"
    assert made.record.lineage is not None
    assert made.record.lineage.inputs == (f"raw@{old.id}",)
    gets = rclone_s3.get_count("export-images")
    again = api.import_export("faces", write("a.zip", make_zip(export)), images=old.ref, settings=settings)
    assert again.record.id == made.record.id
    assert rclone_s3.get_count("export-images") == gets


def test_images_that_are_packed_can_be_joined_and_outlive_their_snapshot(write: Write, settings: Settings) -> None:
    first = api.import_export("raw", write("a.zip", make_zip(VOC)), settings=settings)
    second = api.import_export("faces", write("b.zip", make_zip({"Annotations/1.xml": b"new"})), images="raw",
                               settings=settings)  # fmt: skip
    assert (second.referenced, second.record.files) == (2, 3)
    catalog = api.open_catalog(settings)
    roots = [Manifest.open(made.record.id, catalog.get_blobs).root for made in (first, second)]
    assert set(roots[0].packs) < set(roots[1].packs)  # so that nothing is collected that the second needs
    catalog.remove_snapshot("raw", first.record.id)
    catalog.close()
    assert files_of(settings)["JPEGImages/2.jpg"] == SMALL


@promise("The same lines, in any order, and the same export give the same snapshot")
def test_two_exports_share_what_did_not_change(write: Write, settings: Settings) -> None:
    files = {f"Annotations/{n:05}.xml": b"<annotation>%d</annotation>" % n * 5 for n in range(3000)}
    api.import_export("faces", write("a.zip", make_zip(files)), settings=settings)
    files["Annotations/01500.xml"] = b"changed"
    api.import_export("faces", write("b.zip", make_zip(files)), settings=settings)
    catalog = api.open_catalog(settings)
    packs = [set(Manifest.open(record.id, catalog.get_blobs).root.packs) for record in catalog.snapshots("faces")]
    catalog.close()
    assert len(packs[0] - packs[1]) == 1
    assert len(packs[0]) > 10


@pytest.mark.parametrize(
    ("names", "leading"),
    [
        (["Annotations/1.xml", "JPEGImages/1.jpg"], ""),
        (["task 5/Annotations/1.xml", "task 5/JPEGImages/1.jpg"], "task 5/"),
        (["VOCdevkit/VOC2012/Annotations/1.xml", "VOCdevkit/VOC2012/JPEGImages/1.jpg"], "VOCdevkit/VOC2012/"),
        (["x/data.yaml", "x/train/images/1.jpg", "x/train/labels/1.txt"], "x/"),
        (["x/obj.names", "x/obj_train_data/1.txt"], "x/"),
        (["x/annotations/instances_default.json"], "x/"),
        (["train/1.jpg", "train/1.xml"], ""),
        (["faces/1.jpg", "faces/1.xml"], ""),
        (["a/Annotations/1.xml", "b/Annotations/1.xml"], ""),
        (["readme.txt", "x/Annotations/1.xml"], ""),
        (["a/b/c/d/Annotations/1.xml"], ""),
        (["labels/labels/1.txt"], ""),
    ],
)
def test_folders_around_a_known_layout_are_taken_off(
    write: Write, settings: Settings, names: list[str], leading: str
) -> None:
    made = api.import_export("faces", write("a.zip", make_zip(dict.fromkeys(names, b"x"))), settings=settings)
    assert made.leading == leading
    assert sorted(files_of(settings)) == sorted(name.removeprefix(leading) for name in names)


def test_leftovers_of_desktops_are_counted_and_hide_no_layout(write: Write, settings: Settings) -> None:
    files = {"x/Annotations/1.xml": b"1", "__MACOSX/x/._1.xml": b"2", "x/.DS_Store": b"3"}
    made = api.import_export("faces", write("a.zip", make_zip(files)), settings=settings)
    assert (made.files, made.passed_over, made.leading) == (1, 2, "x/")
    assert files_of(settings) == {"Annotations/1.xml": b"1"}
    with pytest.raises(ImportFailedError, match="holds no files"):
        api.import_export("faces", write("b.zip", make_zip({".DS_Store": b""})), settings=settings)


BAD = {
    "escape": raw_zip(Raw(b"a.xml", b"x"), Raw(b"../evil.xml", b"x")),
    "link": raw_zip(Raw(b"a.xml", b"x"), Raw(b"evil", b"/etc", mode=0o120777)),
    "crc": raw_zip(Raw(b"a.xml", b"x"), Raw(b"z.xml", b"y", crc=5)),
    "cut": make_zip(VOC)[:-1],
    "tar": make_tar(VOC, mode="w:gz")[:-10],
    "tar-escape": make_tar({"a": b"x", "../b": b"y"}, format=tarfile.GNU_FORMAT),
}


@promise("A hostile archive is refused as a whole")
@pytest.mark.parametrize("name", BAD)
def test_nothing_of_a_bad_export_is_committed_or_written_anywhere(
    write: Write, settings: Settings, tmp_path: Path, name: str
) -> None:
    path = write("bad", BAD[name])
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ImportFailedError):
        api.import_export("faces", path, settings=settings)
    assert sorted(tmp_path.rglob("*")) == before
    catalog = api.open_catalog(settings)
    assert catalog.datasets() == []
    catalog.close()


def test_limits_can_be_raised(write: Write, settings: Settings) -> None:
    path = write("a.zip", make_zip(VOC))
    with pytest.raises(ImportFailedError, match="more than 4 members"):
        api.import_export("faces", path, settings=settings, limits=UnpackLimits(members=4))
    assert api.import_export("faces", path, settings=settings, limits=UnpackLimits(members=5)).files == 5


def test_names_tags_and_images_are_checked_first(write: Write, settings: Settings) -> None:
    path = write("a.zip", make_zip(VOC))
    broken = write("broken.zip", BAD["crc"])
    api.import_export("faces", path, settings=settings, tags=["v1"])
    api.import_export("faces", path, settings=settings, tags=["v1"])
    with pytest.raises(UsageError, match="cannot name"):
        api.import_export("no good", broken, settings=settings)
    with pytest.raises(TagExistsError):
        api.import_export("faces", broken, settings=settings, tags=["v1"])
    with pytest.raises(SnapshotNotFoundError):
        api.import_export("others", broken, settings=settings, images="nobody")
    with pytest.raises(OtherKindError, match="faces is made by 'import-export', and this is 'import-export nobody'"):
        api.import_export("faces", broken, settings=settings, images="nobody")


def test_on_mongodb_images_need_a_place_and_labels_do_not(
    write: Write, settings: Settings, mongod: Mongod, tmp_path: Path
) -> None:
    shared = replace(settings, catalog=mongod.database_url(), objects="")
    labels = {name: data for name, data in VOC.items() if "JPEG" not in name}
    labels["annotations.json"] = b"[" + b" " * (8 << 20)
    with pytest.raises(SettingsError, match="new objects") as caught:
        api.import_export("labels", write("labels.zip", make_zip(labels)), settings=shared)
    assert "DATACACHE_OBJECTS" in caught.value.hint
    labels["annotations.json"] = b"[" + b" " * ((8 << 20) - 2) + b"]"
    api.import_export("labels", write("labels.zip", make_zip(labels)), settings=shared)
    assert files_of(shared, "labels") == labels
    path = write("a.zip", make_zip(VOC))
    with pytest.raises(SettingsError):
        api.import_export("faces", path, settings=shared)
    made = api.import_export("faces", path, settings=shared, objects=str(tmp_path / "objects"))
    assert files_of(shared) == VOC
    assert isinstance(made.record.lineage, Lineage)


def test_a_drawn_data_set_comes_back_byte_for_byte(tmp_path: Path, settings: Settings) -> None:
    draw_faces(tmp_path / "faces", count=20)
    files = {
        str(path.relative_to(tmp_path / "faces")): path.read_bytes()
        for path in (tmp_path / "faces").rglob("*")
        if path.is_file()
    }
    (tmp_path / "a.zip").write_bytes(make_zip({f"faces/{name}": data for name, data in files.items()}))
    seen: list[tuple[int, int, int]] = []
    made = api.import_export(
        "faces", tmp_path / "a.zip", settings=settings, progress=lambda *counts: seen.append(counts)
    )
    assert made.leading == "faces/"
    assert files_of(settings) == files
    assert seen[-1] == (len(files), len(files), sum(map(len, files.values())))
