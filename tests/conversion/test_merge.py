"""Merges: several data sets as one."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import datacache
from datacache.api.opening import open_catalog
from datacache.catalog.commit import commit_manifest
from datacache.conversion.contents import ImageContents
from datacache.conversion.index import Reading
from datacache.conversion.pipeline import Conversion
from datacache.core.errors import ConversionError, CorruptManifestError, UsageError
from datacache.core.ids import names_its_content
from datacache.manifest.builder import ManifestBuilder
from datacache.manifest.model import PACKS, Lineage, Naming
from datacache.reader.snapshot import Snapshot
from datacache.settings import Settings
from tests.promises import promise

Files = Callable[[str], dict[str, bytes]]
Merge = Callable[..., Conversion]


@pytest.fixture
def merge(settings: Settings) -> Merge:
    def run(*refs: str, name: str = "all", **options: object) -> Conversion:
        return datacache.merge(refs, name=name, settings=settings, **options)  # type: ignore[arg-type]

    return run


@pytest.fixture
def objects(settings: Settings) -> Callable[[str], dict[str, list[str]]]:
    """The labels of each image."""

    def read(ref: str) -> dict[str, list[str]]:
        with datacache.open_annotations(ref, settings=settings) as (_, table):
            return {row.path: [box.label for box in row.annotation.boxes] for row in table.rows() if row.annotation}

    return read


@promise("A merge copies no image, and has one that several data sets have once")
def test_images_come_by_reference_and_the_same_one_is_there_once_with_all_objects(
    data_set: Callable[..., str], merge: Merge, objects: Callable[..., object], opened: Callable[[str], Snapshot]
) -> None:
    first = data_set("one", {"a": (1, [("cat", 2)]), "b": (2, [("dog", 2)])})
    second = data_set("two", {"x": (2, [("dog", 2), ("cat", 30)]), "y": (3, [("cow", 5)])})
    done = merge(first, second)
    assert objects(done.record.ref) == {
        "JPEGImages/a.bmp": ["cat"],
        "JPEGImages/b.bmp": ["dog", "cat"],
        "JPEGImages/y.bmp": ["cow"],
    }
    assert done.report.counts == {"image-repeated": 1}
    assert done.report.problems[0].file == f"{second}/JPEGImages/x.bmp"
    with opened(first) as one, opened(second) as two, opened(done.record.ref) as result:
        assert result.object_ref("JPEGImages/b.bmp") == one.object_ref("JPEGImages/b.bmp")
        assert result.object_ref("JPEGImages/y.bmp") == two.object_ref("JPEGImages/y.bmp")
        assert result.record.lineage is not None
        assert result.record.lineage.command == "merge"
        assert result.record.lineage.inputs == (one.ref, two.ref)
        assert result.record.lineage.parameters == {
            "to": "voc",
            "classes": ["cat", "cow", "dog"],
            "keep_unannotated": True,
        }
    assert merge(first, second).record.ref == done.record.ref


def test_paths_that_collide_lie_below_the_name_of_their_data_set(
    data_set: Callable[..., str], merge: Merge, objects: Callable[..., object]
) -> None:
    sets = [data_set(name, {"a": (n, [(name, 2)])}) for n, name in enumerate(("one", "two", "three"))]
    done = merge(*sets)
    found = {"JPEGImages/a.bmp": ["one"], "JPEGImages/two/a.bmp": ["two"], "JPEGImages/three/a.bmp": ["three"]}
    assert objects(done.record.ref) == dict(sorted(found.items()))
    assert [problem[:3] for problem in done.report.problems] == [
        ("image-renamed", "noted", f"{ref}/JPEGImages/a.bmp") for ref in reversed(sets[1:])
    ]


def test_classes_are_brought_together_by_name_and_spelled_variants_are_listed(
    data_set: Callable[..., str], merge: Merge, files: Files, settings: Settings
) -> None:
    first = data_set("one", {"a": (1, [("no_mask", 2)]), "b": (2, [("mask", 2)])})
    second = data_set("two", {"c": (1, [("No mask", 2)]), "d": (3, [("mask", 2), ("hat", 20)])})
    yolo = datacache.convert(second, to="yolo", name="yolo", settings=settings).record.ref
    done = merge(first, yolo, to="yolo")
    assert [problem.message for problem in done.report.problems if problem.code == "class-spelling"] == [
        "the classes 'No mask', 'no_mask' differ in their spelling alone; --map makes them one"
    ]
    assert sorted(done.report.classes) == ["No mask", "hat", "mask", "no_mask"]
    done = merge(first, yolo, to="yolo", name="mapped", rename={"No mask": "no_mask"})
    got = files(done.record.ref)
    assert b"No mask" not in got["data.yaml"]
    assert len(got["labels/a.txt"].splitlines()) == 1, "the same object counts once where the map makes its class one"


def test_data_sets_of_several_formats_need_a_format(
    data_set: Callable[..., str], merge: Merge, settings: Settings, files: Files
) -> None:
    first = data_set("one", {"a": (1, [("cat", 2)])})
    coco = datacache.convert(data_set("two", {"b": (2, [("dog", 2)])}), to="coco", name="coco", settings=settings)
    with pytest.raises(UsageError, match=r"several formats \(coco, voc\)"):
        merge(first, coco.record.ref)
    found = json.loads(files(merge(first, coco.record.ref, to="coco").record.ref)["annotations/instances.json"])
    assert [image["file_name"] for image in found["images"]] == ["a.bmp", "b.bmp"]
    with pytest.raises(UsageError, match="fewer than two"):
        merge(first)


def test_splits_stay_where_all_have_some_and_are_dealt_anew_where_they_are_asked_for(
    data_set: Callable[..., str], merge: Merge
) -> None:
    first = data_set("one", {"a": (1, [("x", 2)]), "b": (2, [("x", 2)])}, {"train": "a", "val": "b"})
    second = data_set("two", {"c": (2, [("x", 9)]), "d": (3, [("x", 2)])}, {"train": "c d"})
    assert merge(first, second).report.splits == {"train": 2, "val": 1}, "an image in both is where the first has it"
    third = data_set("three", {"e": (4, [("x", 2)])})
    with pytest.raises(UsageError, match="has no splits, and others have train, val"):
        merge(first, third, name="more")
    assert sum(merge(first, third, name="more", split="train=0.5,val=0.5").report.splits.values()) == 3
    assert merge(first, third, name="more", split="none").report.splits == {}


def test_what_is_wrong_names_its_data_set_and_an_image_without_annotation_stays(
    data_set: Callable[..., str], merge: Merge, tmp_path: Path, settings: Settings
) -> None:
    first = data_set("one", {"a": (1, [("x", 2)])})
    data_set("two", {"b": (2, [("x", 2), ("x", 99)]), "c": (3, [])})
    (tmp_path / "two" / "Annotations" / "c.xml").unlink()
    second = datacache.create_snapshot("two", (tmp_path / "two").as_uri(), settings=settings).ref
    done = merge(first, second)
    assert [problem[:3] for problem in done.report.problems] == [
        ("box-outside", "skipped", f"{second}/Annotations/b.xml"),
        ("image-unannotated", "noted", f"{second}/JPEGImages/c.bmp"),
    ]
    with pytest.raises(ConversionError, match="--strict allows none"):
        merge(first, second, strict=True)


def test_classes_and_difficult_objects_are_chosen_as_in_a_conversion(
    data_set: Callable[..., str], merge: Merge, objects: Callable[..., object], tmp_path: Path, settings: Settings
) -> None:
    first = data_set("one", {"a": (1, [("cat", 2), ("dog", 20)])})
    data_set("two", {"x": (1, [("cow", 30)]), "y": (2, [("dog", 2), ("cat", 20)])})
    file = tmp_path / "two" / "Annotations" / "y.xml"
    file.write_text(file.read_text().replace("<name>cat</name>", "<name>cat</name><difficult>1</difficult>"))
    second = datacache.create_snapshot("two", (tmp_path / "two").as_uri(), settings=settings).ref
    done = merge(first, second, classes=["dog", "cat"], skip_difficult=True)
    assert objects(done.record.ref) == {"JPEGImages/a.bmp": ["cat", "dog"], "JPEGImages/y.bmp": ["dog"]}
    assert (done.report.difficult_left_out, [*done.report.classes]) == (1, ["cat", "dog"])
    left_out = [problem[:3] for problem in done.report.problems if problem.code == "class-left-out"]
    assert left_out == [("class-left-out", "skipped", f"{second}/Annotations/x.xml")], "of both, the one that says so"


def test_a_format_with_several_kinds_of_labels_keeps_the_kind(
    tmp_path: Path, merge: Merge, settings: Settings, files: Files
) -> None:
    refs = []
    for number, name in enumerate(("one", "two")):
        folder = tmp_path / name
        folder.mkdir()
        Image.new("RGB", (64, 48), (number, 0, 0)).save(folder / f"{name}.png")
        (folder / f"{name}.txt").write_text("0 0.1 0.1 0.5 0.1 0.5 0.5\n")
        refs.append(datacache.create_snapshot(name, folder.as_uri(), settings=settings).ref)
    done = merge(*refs)
    assert done.record.lineage is not None
    assert done.record.lineage.parameters["to"] == "yolo-segment"
    assert files(done.record.ref)["labels/one.txt"] == b"0 0.100000 0.100000 0.500000 0.100000 0.500000 0.500000\n"


def test_images_are_the_same_by_their_bytes_wherever_they_lie(
    tmp_path: Path, settings: Settings, opened: Callable[[str], Snapshot]
) -> None:
    folder = tmp_path / "some"
    folder.mkdir()
    for name, data in {"a": b"12345", "b": b"54321", "c": b"12345", "d": b"1234"}.items():
        (folder / f"{name}.jpg").write_bytes(data)
    plain = datacache.create_snapshot("plain", folder.as_uri(), settings=settings).ref
    copies = {"copy": True, "objects": (tmp_path / "objects").as_uri()}
    copy = datacache.create_snapshot("copy", folder.as_uri(), settings=settings, **copies).ref  # type: ignore[arg-type]
    with opened(plain) as one, opened(copy) as two:
        found = ImageContents([one, two])
        assert sorted(found.groups()) == [[(0, 0), (0, 2), (1, 0), (1, 2)], [(0, 1), (1, 1)], [(0, 3), (1, 3)]]
        assert found.same(1, 1) == [(0, 1), (1, 1)]


def test_skeletons_of_the_same_points_are_one_and_others_are_refused(
    tmp_path: Path, make: Callable[..., str], merge: Merge, files: Files
) -> None:
    def posed(name: str, points: str, **skeleton: object) -> str:
        folder = tmp_path / name
        folder.mkdir()
        Image.new("RGB", (64, 48), (len(name), 99, 200)).save(folder / f"{name}.bmp")
        object = {"id": 1, "image_id": 1, "category_id": 1, "bbox": [1, 1, 9, 9], "keypoints": [2, 2, 2, 5, 5, 2]}
        whole = {
            "images": [{"id": 1, "file_name": f"{name}.bmp", "width": 64, "height": 48}],
            "categories": [{"id": 1, "name": "cat", "keypoints": [*points], **skeleton}],
            "annotations": [object],
        }
        (folder / "instances.json").write_text(json.dumps(whole))
        return make(folder, name)

    loose, joined = posed("a", "hd"), posed("ab", "hd", skeleton=[[1, 2]])
    (text,) = (data for path, data in files(merge(loose, joined).record.ref).items() if path.endswith(".json"))
    assert json.loads(text)["categories"][0]["skeleton"] == [[1, 2]]
    with pytest.raises(UsageError, match="two skeletons: h, d; and h, t"):
        merge(joined, posed("abc", "ht"), name="others")


# --- manifests that anybody may have written ------------------------------------------------------------------------


@pytest.fixture
def written(tmp_path: Path, settings: Settings) -> Callable[..., str]:
    """Makes a data set of COCO of two images, which lie in files of the folder called `stored`, and of which the
    manifest says other things."""

    def make(stored: str, **fields: Any) -> str:
        folder = tmp_path / "some"
        for n in range(2):
            (folder / stored.format(n)).parent.mkdir(parents=True)
            Image.new("L", (8, 8), n).save(folder / stored.format(n), "BMP")
        images = [{"id": n, "file_name": f"{n}.bmp", "width": 8, "height": 8} for n in range(2)]
        boxes = [{"id": n + 1, "image_id": n, "category_id": 1, "bbox": [1, 1, 5, 5]} for n in range(2)]
        content = {"images": images, "annotations": boxes, "categories": [{"id": 1, "name": "x"}]}
        (folder / "a.json").write_text(json.dumps(content))
        ref = datacache.create_snapshot("some", folder.as_uri(), settings=settings).ref
        with datacache.open_snapshot(ref, settings) as snapshot, closing(open_catalog(settings)) as catalog:
            root = snapshot.manifest.root
            *entries, annotations = snapshot.manifest.entries()
            builder = ManifestBuilder([*root.sources, PACKS], catalog.put_blobs)
            for n, entry in enumerate(entries):
                key = root.sources[0].prefix.encode() + entry.path
                builder.add(entry._replace(path=b"%d.bmp" % n, key=key)._replace(**fields))
            builder.add(annotations)
            naming, lineage = Naming(name="written"), Lineage("test", {}, ())
            return commit_manifest(catalog, builder, naming, origin="test", lineage=lineage).ref

    return make


@pytest.mark.parametrize("etag", ["zz" * 16, "abcd", ""])
def test_packs_that_a_manifest_does_not_describe_are_an_error_of_the_manifest(
    etag: str, written: Callable[..., str], settings: Settings
) -> None:
    """With sizes that are trusted a conversion reads no image."""
    ref = written("{}/a.bmp", source=1, key=b"no place", etag=etag)
    with pytest.raises(CorruptManifestError, match=r"no place in a pack for .*0\.bmp'"):
        datacache.dedupe(ref, name="once", trust_sizes=True, settings=settings)
    with pytest.raises(CorruptManifestError, match=r"no place in a pack for .*0\.bmp'"):
        datacache.convert(ref, to="yolo", name="converted", trust_sizes=True, settings=settings)


def test_names_of_files_in_a_bucket_do_not_say_that_images_are_the_same(
    written: Callable[..., str], settings: Settings
) -> None:
    ref = written(f"{{}}/aa/{30 * 'b'}-1142")
    with datacache.open_snapshot(ref, settings) as snapshot:
        assert all(names_its_content(snapshot.object_ref(f"{n}.bmp")) for n in range(2))
    assert datacache.dedupe(ref, name="once", settings=settings)[1] == []


def test_a_table_of_another_snapshot_is_an_error(
    data_set: Callable[..., str], settings: Settings, merge: Merge
) -> None:
    one, other = (data_set(name, {name: (n, [("x", 2)])}) for n, name in enumerate("ab"))
    for ref in (one, other):
        with datacache.open_annotations(ref, settings=settings):
            pass
    with closing(open_catalog(settings)) as catalog:
        ids = [ref.partition("@")[2] for ref in (one, other)]
        records = [
            next(r for r in catalog.snapshots(n) if r.id.startswith(id)) for n, id in zip("ab", ids, strict=True)
        ]
        root = catalog.derived(records[1].id, Reading().name)
        assert root is not None
        catalog.set_derived(records[0].id, Reading().name, root, needs=[root])
    with pytest.raises(CorruptManifestError, match=r"'JPEGImages/b\.bmp', which the snapshot has not"):
        merge(one, other, to="coco")
