"""Commits of drafts: the marks are in the version, and all else is as it was."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from datacache import api
from datacache.annotations.model import Annotation, Box
from datacache.catalog import commit as catalog_commit
from datacache.catalog.base import Catalog
from datacache.core.errors import DraftConflictError, UsageError
from datacache.marking import commit as commit_module
from datacache.marking.drafts import Draft, MarkedObject
from datacache.settings import Settings
from tests.promises import promise

pytestmark = pytest.mark.shared_home

_numbers = itertools.count()
NEW = MarkedObject(-1, "bird", 5, 5, 15.5, 20)
VOC = """<annotation><filename>{}</filename><size><width>100</width><height>80</height><depth>3</depth></size>
<object><name>cat</name><pose>Left</pose><truncated>1</truncated><difficult>1</difficult><bndbox><xmin>10</xmin>
<ymin>10</ymin><xmax>40</xmax><ymax>30.5</ymax></bndbox></object></annotation>"""


@pytest.fixture
def name() -> str:
    return f"marks-{next(_numbers)}"


@pytest.fixture
def catalog(settings: Settings) -> Iterator[Catalog]:
    opened = api.open_catalog(settings)
    yield opened
    opened.close()


def draw(folder: Path, *paths: str) -> None:
    for n, path in enumerate(paths):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (100, 80), (n, len(path) * 7 % 250, sum(path.encode()) % 250)).save(folder / path)


def yolo(folder: Path) -> Path:
    """Two splits, an image without a file of labels, and numbers with more digits than are written."""
    draw(folder, *(f"images/{split}/{n}.png" for split in ("train", "val") for n in range(3)))
    for split, n in (("train", 0), ("train", 1), ("val", 0), ("val", 1)):
        (folder / f"labels/{split}").mkdir(parents=True, exist_ok=True)
        text = "1 0.1234567891 0.3 0.2 0.2\n0 0.5 0.5 0.1 0.1\n" if n == 0 else ""
        (folder / f"labels/{split}/{n}.txt").write_text(text)
    (folder / "data.yaml").write_text("train: images/train\nval: images/val\nnames: [dog, cat]\n")
    return folder


def voc(folder: Path) -> Path:
    """Two lists of splits, an image without XML, and one in no list."""
    draw(folder, *(f"JPEGImages/{n}.png" for n in range(6)))
    (folder / "Annotations").mkdir()
    for n in (0, 1, 3, 5):
        (folder / f"Annotations/{n}.xml").write_text(VOC.format(f"{n}.png"))
    (folder / "ImageSets/Main").mkdir(parents=True)
    (folder / "ImageSets/Main/train.txt").write_text("0\n1\n2\n")
    (folder / "ImageSets/Main/val.txt").write_text("3\n4\n")
    return folder


def coco(folder: Path) -> Path:
    """Two files of splits with polygons, and images that none of them names."""
    categories = [{"id": 1, "name": "dog"}, {"id": 2, "name": "cat"}]
    (folder / "annotations").mkdir(parents=True)
    for split in ("train", "val"):
        draw(folder, *(f"images/{split}/{n}.png" for n in range(3)))
        images = [{"id": n + 1, "file_name": f"{n}.png", "width": 100, "height": 80} for n in range(2)]
        ring = [10.125, 10, 30, 10.0625, 20, 30]
        outline = {"category_id": 1, "bbox": [10.125, 10, 19.875, 20], "segmentation": [ring], "area": 198.1}
        objects = [outline, {"category_id": 2, "bbox": [40, 40, 20, 10]}]
        entries = [{"id": n, "image_id": 1, "iscrowd": 0, **each} for n, each in enumerate(objects, 1)]
        content = {"images": images, "categories": categories, "annotations": entries}
        (folder / f"annotations/instances_{split}.json").write_text(json.dumps(content))
    return folder


def yolo_beside(folder: Path) -> Path:
    """The same, with labels in the folders of their images."""
    yolo(folder)
    for file in [*folder.rglob("labels/*/*.txt")]:
        file.rename(folder / "images" / file.relative_to(folder / "labels"))
    for split in ("train", "val"):
        (folder / "images" / split).rename(folder / split)
    (folder / "data.yaml").write_text("train: train\nval: val\nnames: [dog, cat]\n")
    return folder


def create(settings: Settings, name: str, folder: Path, **naming: Any) -> api.SnapshotRecord:
    return api.create_snapshot(name, folder.as_uri(), settings=settings, **naming)


def rows(settings: Settings, ref: str) -> dict[str, Annotation | None]:
    with api.open_annotations(ref, processes=1, settings=settings) as (_, table):
        return {row.path: row.annotation for row in table.rows()}


def splits(settings: Settings, ref: str) -> dict[str, str]:
    with api.open_browser(ref, processes=1, settings=settings) as (_, browser):
        names = browser.split_names or ()
        wanted = {split: browser.select(api.Filter(split=split)) for split in names}
        pages = {split: browser.page(each, size=1000).rows for split, each in wanted.items()}
        return {row.path: split for split, found in pages.items() for row in found}


def mark(
    catalog: Catalog, settings: Settings, record: api.SnapshotRecord, path: str, *objects: MarkedObject, **how: Any
) -> Draft:
    with api.open_annotations(f"{record.dataset}@{record.id}", processes=1, settings=settings) as (_, table):
        row = table.row(path)
    assert row is not None
    there = api.draft(catalog, record.dataset, path)
    how = {"author": "ann", "done": True, "rev": there.rev if there else ""} | how
    return api.save_draft(catalog, row, record, objects, **how)


def kept(annotation: Annotation) -> list[MarkedObject]:
    return [MarkedObject(n, *box[:5]) for n, box in enumerate(annotation.boxes)]


def commit(settings: Settings, name: str, **how: Any) -> api.Committed:
    return api.commit_marks(name, **{"message": "marked", "settings": settings, "processes": 1} | how)


def without_lines(annotation: Annotation | None) -> Annotation | None:
    return annotation and annotation._replace(boxes=tuple(box._replace(line=0) for box in annotation.boxes), source="")


@promise("What was saved as done is in the commit, and all else of the data set is as it was")
@pytest.mark.parametrize("format", [yolo, voc, coco])
def test_marks_are_in_the_next_version_and_all_else_is_as_it_was(
    settings: Settings, catalog: Catalog, tmp_path: Path, name: str, format: Any
) -> None:
    folder = format(tmp_path / "files")
    (folder / "LICENSE").write_text("free")
    (folder / "readme.md").write_text("cats")
    base = create(settings, name, folder)
    before, split_before = rows(settings, base.ref), splits(settings, base.ref)
    objects = {path: each for path, each in before.items() if each and each.boxes}
    bare = [path for path, each in before.items() if each and not each.source]
    assert objects
    assert len(bare) >= 2
    path, annotation = next(iter(objects.items()))
    moved = [kept(annotation)[-1]._replace(label="lion"), NEW]
    expected = {path: api.marked(_row(annotation), mark(catalog, settings, base, path, *moved)).boxes, bare[0]: ()}
    mark(catalog, settings, base, bare[0])

    made = commit(settings, name, tags=["v2"])

    assert (made.images, made.left) == (2, ())
    assert [each for each in made.problems if each.action != "noted"] == []
    after = rows(settings, f"{name}@v2")
    assert after.keys() == before.keys()
    assert splits(settings, made.record.ref) == split_before
    for each, now in after.items():
        then = before[each]
        assert now is not None
        assert then is not None
        if each in expected:
            assert now.source, each
            assert [_near(box) for box in now.boxes] == [_near(box) for box in expected[each]]
        else:
            assert bool(now.source) == bool(then.source), each
            assert [_near(box) for box in now.boxes] == [_near(box) for box in then.boxes]
            if format is not yolo:
                assert without_lines(now) == without_lines(then)
    with api.open_snapshot(made.record.ref, settings) as snapshot:
        assert (snapshot.read("LICENSE"), snapshot.read("readme.md")) == (b"free", b"cats")
    assert api.drafts(catalog, name) == []
    lineage = made.record.lineage
    assert lineage is not None
    assert (lineage.command, lineage.inputs) == ("mark", (f"{name}@{base.id}",))
    assert (lineage.parameters["authors"], lineage.parameters["images"]) == ({"ann": 2}, 2)
    assert (made.record.parent, made.record.message) == (base.id, "marked")


def _near(box: Box) -> Box:
    return Box(box.label, *(round(edge, 2) for edge in box[1:5]), *box[5:9], extra=box.extra)


def _row(annotation: Annotation) -> api.Row:
    return api.Row(annotation, annotation.path)


@promise("A commit of marks leaves each file that nobody marked byte for byte, where images have files of their own")
@pytest.mark.parametrize("format", [yolo, yolo_beside, voc])
def test_files_that_nobody_marked_stay_byte_for_byte(
    settings: Settings, catalog: Catalog, tmp_path: Path, name: str, format: Any
) -> None:
    folder = format(tmp_path / "files")
    (folder / "LICENSE").write_text("free\n")
    base = create(settings, name, folder)
    before = rows(settings, base.ref)
    first = next(path for path, each in before.items() if each and each.boxes)
    bare = next(path for path, each in before.items() if each and not each.source)
    mark(catalog, settings, base, first, NEW._replace(label="cat"))
    mark(catalog, settings, base, bare, NEW._replace(label="cat"))
    made = commit(settings, name)
    assert made.images == 2
    with api.open_snapshot(base.ref, settings) as old, api.open_snapshot(made.record.ref, settings) as new:
        then, now = ({each.path: each.etag for each in snapshot.manifest.entries()} for snapshot in (old, new))
    after = rows(settings, made.record.ref)
    files = {after[path].source.encode() for path in (first, bare)}  # type: ignore[union-attr]
    assert {path for path in then | now if then.get(path) != now.get(path)} == files
    assert [box[:1] for box in after[bare].boxes] == [("cat",)]  # type: ignore[union-attr]
    assert [box[:5] for box in after[first].boxes] == [("cat", 5, 5, 15.5, 20)]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("labels", "image"),
    [("1.txt", "1.png"), ("1.txt", "1.jpg"), ("2.txt", "1.png"), ("2.txt", "1.jpg"), ("1.TXT", "1.jpg")],
)
def test_marks_are_of_their_image_where_others_have_its_name(
    settings: Settings, catalog: Catalog, tmp_path: Path, name: str, labels: str, image: str
) -> None:
    folder = tmp_path / "files"
    draw(folder, "images/1.jpg", "images/1.png", "images/2.png")
    (folder / "labels").mkdir()
    (folder / "labels" / labels).write_text("0 0.5 0.5 0.1 0.1\n")
    (folder / "data.yaml").write_text("train: images\nnames: [dog, cat]\n")
    base = create(settings, name, folder)
    there = rows(settings, base.ref)[f"images/{image}"]
    assert there is not None

    def objects(ref: str) -> dict[str, list[str]]:
        """The labels on each image, by its bytes: a commit that writes all anew gives it another name."""
        with api.open_snapshot(ref, settings) as snapshot:
            etags = {path: snapshot.stat(path).etag for path in snapshot.paths()}
        return {etags[path]: [box.label for box in each.boxes] for path, each in rows(settings, ref).items() if each}

    before = objects(base.ref)
    with api.open_snapshot(base.ref, settings) as snapshot:
        etag = snapshot.stat(f"images/{image}").etag
    mark(catalog, settings, base, f"images/{image}", *kept(there), NEW._replace(label="cat"))
    assert commit(settings, name).images == 1
    assert objects(name) == before | {etag: [*before[etag], "cat"]}


def test_images_without_annotations_get_files_of_yolo_for_those_that_were_marked(
    settings: Settings, catalog: Catalog, tmp_path: Path, name: str
) -> None:
    draw(tmp_path / "files", "a/1.png", "a/2.png", "b/1.png")
    base = create(settings, name, tmp_path / "files")
    mark(catalog, settings, base, "a/1.png", NEW)
    left = mark(catalog, settings, base, "b/1.png", NEW, done=False)
    made = commit(settings, name)
    after = rows(settings, made.record.ref)
    assert {path: bool(each and each.boxes) for path, each in after.items()} == {
        "images/a/1.png": True,
        "images/a/2.png": False,
        "images/b/1.png": False,
    }
    with api.open_snapshot(made.record.ref, settings) as snapshot:
        assert [path for path in snapshot.paths() if path.endswith(".txt")] == ["labels/a/1.txt"]
    assert [tuple(each) for each in made.left] == [("b/1.png", "ann", "not done")]
    # Its image has another path now, and the draft has gone with it.
    assert api.draft(catalog, name, "b/1.png") is None
    moved = api.draft(catalog, name, "images/b/1.png")
    assert moved == left._replace(path="images/b/1.png", base=made.record.id)
    assert commit(settings, name, only_done=False).images == 1


def test_drafts_of_images_that_a_commit_has_written_anew_are_not_stale(
    settings: Settings, catalog: Catalog, tmp_path: Path, name: str
) -> None:
    base = create(settings, name, yolo(tmp_path / "files"))
    annotation = rows(settings, base.ref)["images/val/0.png"]
    assert annotation is not None
    mark(catalog, settings, base, "images/train/0.png")
    mark(catalog, settings, base, "images/val/0.png", kept(annotation)[1], NEW, author="bob", done=False)
    first = commit(settings, name)
    assert first.images == 1
    # Who has the earlier version open goes on, too.
    mark(catalog, settings, base, "images/val/0.png", kept(annotation)[1], author="bob")
    second = commit(settings, name, authors=["bob"])
    assert (second.images, second.left) == (1, ())
    after = rows(settings, second.record.ref)["images/val/0.png"]
    assert after is not None
    assert [box.label for box in after.boxes] == ["dog"]


@promise("Nobody's mark is overwritten")
def test_a_draft_whose_image_another_version_has_changed_is_left_and_told(
    settings: Settings, catalog: Catalog, tmp_path: Path, name: str
) -> None:
    folder = yolo(tmp_path / "files")
    base = create(settings, name, folder)
    draft = mark(catalog, settings, base, "images/train/0.png", NEW)
    (folder / "labels/train/0.txt").write_text("1 0.3 0.3 0.2 0.2\n")
    (folder / "images/train/1.png").unlink()
    newer = create(settings, name, folder)
    mark(catalog, settings, base, "images/train/1.png", NEW)
    made = commit(settings, name)
    assert (made.record.id, made.images) == (newer.id, 0)
    assert [(each.path[-5:], each.why) for each in made.left] == [("0.png", "stale"), ("1.png", "image gone")]
    assert api.draft(catalog, name, draft.path) == draft
    with pytest.raises(DraftConflictError, match="another version has changed"):
        mark(catalog, settings, newer, "images/train/0.png", NEW)


def test_a_commit_begins_anew_where_another_version_comes_in_between(
    settings: Settings, catalog: Catalog, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = yolo(tmp_path / "files")
    base = create(settings, name, folder)
    mark(catalog, settings, base, "images/train/0.png", NEW)
    real, others = commit_module.run, []

    def run_late(*arguments: Any, **how: Any) -> Any:
        if not others:
            (folder / "labels/val/1.txt").write_text("1 0.3 0.3 0.2 0.2\n")
            others.append(create(settings, name, folder))
        return real(*arguments, **how)

    monkeypatch.setattr(commit_module, "run", run_late)
    made = commit(settings, name)
    assert made.images == 1
    assert made.record.parent == others[0].id
    after = rows(settings, made.record.ref)
    marked, other = after["images/train/0.png"], after["images/val/1.png"]
    assert marked is not None
    assert [box.label for box in marked.boxes] == ["bird"]
    assert other is not None
    assert [box.label for box in other.boxes] == ["cat"]


def test_a_version_that_another_one_has_followed_before_it_got_its_tags_does_not_become_the_newest_again(
    settings: Settings, catalog: Catalog, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = yolo(tmp_path / "files")
    base = create(settings, name, folder, copy=True)
    mark(catalog, settings, base, "images/train/0.png", NEW)
    real, others = catalog_commit._make_visible, []

    def made_visible(*arguments: Any) -> None:
        real(*arguments)
        (folder / "labels/val/1.txt").write_text("1 0.3 0.3 0.2 0.2\n")
        monkeypatch.setattr(catalog_commit, "_make_visible", real)
        others.append(create(settings, name, folder, replace=True))

    monkeypatch.setattr(catalog_commit, "_make_visible", made_visible)
    made = commit(settings, name, tags=["v2"])
    assert made.record.parent == base.id
    assert api.resolve(catalog, f"{name}@v2").id == made.record.id
    assert api.resolve(catalog, name).id == others[0].id != made.record.id


def test_a_draft_that_was_saved_again_while_its_commit_ran_stays(
    settings: Settings, catalog: Catalog, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = create(settings, name, yolo(tmp_path / "files"))
    mark(catalog, settings, base, "images/train/0.png", NEW)
    real = commit_module.run

    def run_late(*arguments: Any, **how: Any) -> Any:
        mark(catalog, settings, base, "images/train/0.png", NEW, NEW._replace(label="later"))
        return real(*arguments, **how)

    monkeypatch.setattr(commit_module, "run", run_late)
    made = commit(settings, name)
    assert [each.why for each in made.left] == ["saved again"]
    there = api.draft(catalog, name, "images/train/0.png")
    assert there is not None
    assert [(each.label, each.of) for each in there.objects] == [("bird", 0), ("later", -1)]
    monkeypatch.undo()
    again = commit(settings, name)
    assert (again.images, again.left) == (1, ())
    after = rows(settings, again.record.ref)["images/train/0.png"]
    assert after is not None
    assert [box.label for box in after.boxes] == ["bird", "later"]


@promise("A commit that was killed is ended by the next")
@pytest.mark.parametrize("format", [yolo, voc, coco, None])
def test_a_commit_that_was_killed_before_it_removed_its_drafts_is_ended_by_the_next(
    settings: Settings, catalog: Catalog, tmp_path: Path, name: str, format: Any
) -> None:
    if format is None:
        draw(tmp_path / "files", "a/1.png", "a/2.png")
        base = create(settings, name, tmp_path / "files")
        path, marks = "a/1.png", [NEW]
    else:
        base = create(settings, name, format(tmp_path / "files"))
        path, found = next((path, each) for path, each in rows(settings, base.ref).items() if each and each.boxes)
        marks = [*kept(found), NEW]
    mark(catalog, settings, base, path, *marks)

    def child() -> None:
        commit_module.remove_draft = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
        commit(settings, name)

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    killed = api.resolve(catalog, name)
    assert killed.id != base.id
    assert len(api.drafts(catalog, name)) == 1
    again = commit(settings, name)
    assert (again.record.id, again.images, again.left) == (killed.id, 0, ())
    assert api.drafts(catalog, name) == []


def test_predictions_that_nobody_accepted_are_kept_refused_or_left_out(
    settings: Settings, catalog: Catalog, tmp_path: Path, name: str
) -> None:
    folder = yolo(tmp_path / "files")
    (folder / "labels/train/0.txt").write_text("1 0.5 0.5 0.2 0.2 0.75\n0 0.3 0.3 0.2 0.2 0.5\n")
    base = create(settings, name, folder)
    found = rows(settings, base.ref)["images/train/0.png"]
    assert found is not None
    mark(catalog, settings, base, found.path, kept(found)[0]._replace(accepted=True), kept(found)[1])
    with pytest.raises(UsageError, match="nobody has accepted"):
        commit(settings, name)
    assert api.resolve(catalog, name).id == base.id
    assert len(api.drafts(catalog, name)) == 1
    made = commit(settings, name, to="yolo-predictions")
    after = rows(settings, made.record.ref)[found.path]
    assert after is not None
    assert [(box.label, box.extra and box.extra.score) for box in after.boxes] == [("cat", None), ("dog", 0.5)]
    mark(catalog, settings, made.record, "images/val/0.png")
    assert commit(settings, name, skip_predictions=True).images == 1
    last = rows(settings, name)[found.path]
    assert last is not None
    assert [box.label for box in last.boxes] == ["cat"]


def test_objects_on_images_of_a_format_of_labels_need_another_format(
    settings: Settings, catalog: Catalog, tmp_path: Path, name: str
) -> None:
    draw(tmp_path / "files", "train/cat/1.png", "train/dog/2.png", "val/cat/3.png", "val/dog/4.png")
    base = create(settings, name, tmp_path / "files")
    mark(catalog, settings, base, "train/cat/1.png", labels=["dog"])
    first = commit(settings, name)
    with api.open_snapshot(first.record.ref, settings) as snapshot:
        assert len(snapshot.paths()) == 4
        [path] = [path for path in snapshot.paths() if path.startswith("train/dog/") and "1" in path]
    mark(catalog, settings, first.record, path, NEW)
    for to in (None, "folders"):
        with pytest.raises(UsageError, match="have none"):
            commit(settings, name, to=to)
    made = commit(settings, name, to="yolo")
    after = rows(settings, made.record.ref)
    assert sorted(len(each.boxes) for each in after.values() if each) == [0, 0, 0, 1]


def test_an_image_with_a_broken_annotation_stays_and_a_broken_file_of_many_is_refused(
    settings: Settings, catalog: Catalog, tmp_path: Path, name: str
) -> None:
    folder = voc(tmp_path / "files")
    (folder / "Annotations/1.xml").write_text("<annotation>")
    base = create(settings, name, folder)
    mark(catalog, settings, base, "JPEGImages/0.png", NEW)
    made = commit(settings, name)
    assert "JPEGImages/1.png" in rows(settings, made.record.ref)
    with api.open_snapshot(made.record.ref, settings) as snapshot:
        assert snapshot.read("Annotations/1.xml") == b"<annotation>"
    folder = coco(tmp_path / "coco")
    file = folder / "annotations/instances_val.json"
    file.write_text(file.read_text()[:-20])
    base = create(settings, f"{name}-coco", folder)
    mark(catalog, settings, base, "images/train/0.png", NEW)
    with pytest.raises(UsageError, match=r"instances_val\.json"):
        commit(settings, f"{name}-coco")


def test_the_same_drafts_give_the_same_version(settings: Settings, catalog: Catalog, tmp_path: Path, name: str) -> None:
    made = []
    for number in range(2):
        base = create(settings, f"{name}-{number}", coco(tmp_path / f"files-{number}"))
        mark(catalog, settings, base, "images/train/0.png", NEW)
        made.append(commit(settings, f"{name}-{number}").record)
    parameters = [record.lineage.parameters for record in made if record.lineage]
    assert parameters[0] == parameters[1]


@pytest.mark.parametrize("to", ["darknet", "imagefolder", "cvat", "label-studio", "labelme", "yolo-segment"])
def test_other_formats_keep_paths_splits_and_what_is_annotated(
    settings: Settings, catalog: Catalog, tmp_path: Path, name: str, to: str
) -> None:
    source = create(settings, f"{name}-source", yolo(tmp_path / "files"))
    how: dict[str, Any] = {"keep_unannotated": True, "settings": settings, "processes": 1}
    base = api.convert(source.ref, to=to, name=name, **how).record
    before, split_before = rows(settings, base.ref), splits(settings, base.ref)
    (path, annotation), (other, its) = [(path, each) for path, each in before.items() if each and each.boxes]
    expected = api.marked(_row(annotation), mark(catalog, settings, base, path, *kept(annotation)[1:], NEW))
    mark(catalog, settings, base, other, *kept(its), NEW, done=False)
    # Leaving out predictions, of which there are none, has the whole data set written anew.
    made = commit(settings, name, skip_predictions=True)
    after = rows(settings, made.record.ref)
    assert after.keys() == before.keys()
    assert splits(settings, made.record.ref) == split_before
    for each, now in after.items():
        then = expected if each == path else before[each]
        assert now is not None
        assert then is not None
        assert [_rough(box) for box in now.boxes] == [_rough(box) for box in then.boxes]
        assert bool(now.source) == bool(then.source), each
    assert [each.why for each in made.left] == ["not done"]
    second = commit(settings, name, only_done=False)
    assert (second.images, second.left) == (1, ())


def _rough(box: Box) -> tuple[object, ...]:
    return box.label, *(round(edge, 1) for edge in box[1:5])
