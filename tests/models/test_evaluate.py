"""Predictions measured by labels: COCO's numbers against pycocotools, the rest against plain readings of the rules."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from datacache import api
from datacache.annotations.comparing.matching import match_objects, score_of
from datacache.annotations.model import Annotation, Box
from datacache.annotations.shapes.outline import Extra
from datacache.annotations.table.ranges import Row
from datacache.annotations.table.table import Table
from datacache.core.errors import UsageError
from datacache.models.evaluate import Evaluation, WorstImage, evaluate_tables
from datacache.settings import Settings
from tests.annotations.tables import box, broken, build, image
from tests.models.coco_reference import coco_numbers, drawn_set, numbers_of
from tests.promises import promise

NAMES = "labels@v1", "guesses@v1"


def evaluated(labels: Table, guesses: Table, **how: Any) -> Evaluation:
    return evaluate_tables(NAMES, labels, guesses, **how)


def table(images: Mapping[str, Sequence[Box]]) -> Table:
    """A table whose images are all annotated, be it with nothing."""
    return build(Row(Annotation(path, 640, 480, tuple(boxes), source="a.json"), path) for path, boxes in images.items())


def guess(label: str, *edges: float, score: float = 0.9) -> Box:
    return box(label, *edges, extra=Extra(score=score))


@promise("Average precision and recall of boxes are those of pycocotools, to six decimals and more")
@pytest.mark.parametrize("seeds", [range(60), pytest.param(range(60, 200), marks=pytest.mark.long)])
def test_drawn_sets_have_the_numbers_of_pycocotools(seeds: range) -> None:
    for seed in seeds:
        labels, guesses = drawn_set(seed, images=6)
        expected = coco_numbers(labels, guesses)
        found = evaluated(table(labels), table(guesses), iou=(0.5, 0.75, 0.33)[seed % 3])
        assert found.coco == pytest.approx(expected.summary, abs=1e-9), seed
        for each in found.classes:
            ap = None if each.ap is None else (each.ap, each.ap_50)
            assert ap == pytest.approx(expected.classes[each.label], abs=1e-9), (seed, each.label)


@promise("Average precision and recall of boxes are those of pycocotools, to six decimals and more")
def test_predictions_of_blood_cells_have_the_numbers_of_pycocotools(
    blood_cells: Path, settings: Settings, tmp_path: Path
) -> None:
    """Labels go to pycocotools as COCO that `convert` writes; predictions are these, moved, missed and invented."""
    labels = api.create_snapshot("bccd", str(blood_cells), settings=settings)
    made = api.convert("bccd", to="coco", name="bccd-coco", split="none", settings=settings).record
    with api.open_snapshot(made.ref, settings) as snapshot:
        [file] = [path for path in snapshot.paths() if path.endswith(".json")]
        truth = json.loads(snapshot.read(file))
    rng = np.random.default_rng(5)
    guesses: list[dict[str, Any]] = []
    for each in truth["annotations"]:
        for _ in range(int(rng.choice([0, 1, 1, 1, 1, 2]))):
            x, y, width, height = np.array(each["bbox"]) * rng.uniform(0.93, 1.07, 4)
            edges = [max(0, x), max(0, y), min(640, x + width), min(480, y + height)]
            category = int(rng.integers(1, 4)) if rng.random() < 0.05 else each["category_id"]
            guesses.append(guessed(each["image_id"], category, *edges, score=rng.random()))
    corners = [(*(rng.random(2) * 300), *(rng.random(2) * 100 + 310)) for _ in truth["images"][::3]]
    invented = zip(truth["images"][::3], corners, strict=True)
    guesses += [guessed(each["id"], 1, *edges, score=rng.random()) for each, edges in invented]
    folder = tmp_path / "guesses"
    shutil.copytree(blood_cells / "JPEGImages", folder / "JPEGImages")
    names = {each["id"]: f"JPEGImages/{Path(each['file_name']).name}" for each in truth["images"]}
    images = [each | {"file_name": names[each["id"]]} for each in truth["images"]]
    numbered = [each | {"id": n, "area": 1} for n, each in enumerate(guesses, 1)]
    written = {"images": images, "categories": truth["categories"], "annotations": numbered}
    (folder / "annotations.json").write_text(json.dumps(written))
    predictions = api.create_snapshot("guesses", str(folder), settings=settings)

    found = api.evaluate("guesses", "bccd", settings=settings)
    expected = numbers_of(truth, guesses)
    assert found.coco == pytest.approx(expected.summary, abs=1e-9)
    assert {each.label: (each.ap, each.ap_50) for each in found.classes} == {
        label: pytest.approx(ap, abs=1e-9) for label, ap in expected.classes.items()
    }
    assert (found.images, found.warnings) == (364, [])
    assert found.predictions == len(guesses)

    kept = api.keep_worst(found, name="worst", settings=settings)
    again = api.keep_worst(found, name="worst", settings=settings)
    assert kept.id == again.id
    assert kept.lineage
    assert kept.lineage.command == "evaluate"
    assert kept.lineage.inputs == (f"bccd@{labels.id}", f"guesses@{predictions.id}")
    with api.open_annotations(kept.ref, settings=settings) as (_, table):
        assert {row.path for row in table.rows()} == {each.path for each in found.worst}
    perfect = api.evaluate("bccd-coco", "bccd-coco", settings=settings)
    with pytest.raises(UsageError, match="there is no worst image"):
        api.keep_worst(perfect, name="none", settings=settings)


def guessed(image: int, category: int, x1: float, y1: float, x2: float, y2: float, *, score: float) -> dict[str, Any]:
    bbox = [float(x1), float(y1), float(x2 - x1), float(y2 - y1)]
    return {"image_id": image, "category_id": category, "bbox": bbox, "score": float(score)}


def test_the_best_score_is_the_one_at_which_matching_finds_the_largest_f1() -> None:
    labels, guesses = drawn_set(7, images=14)
    for iou in (0.5, 0.62):
        found = evaluated(table(labels), table(guesses), iou=iou)
        scores = sorted({score_of(each) for boxes in guesses.values() for each in boxes})
        f1s = {score: evaluated(table(labels), table(guesses), iou=iou, score=score).f1 or 0 for score in scores}
        assert found.best
        assert found.score_is_best
        assert found.score == found.best.score
        assert (found.precision, found.recall) == pytest.approx((found.best.precision, found.best.recall))
        assert found.f1 == pytest.approx(max(f1s.values()))
        assert f1s[found.score] == pytest.approx(max(f1s.values()))


def test_precision_recall_confusions_and_the_worst_images_are_those_of_each_image_matched_alone() -> None:
    labels, guesses = drawn_set(11, images=60)
    found = evaluated(table(labels), table(guesses), score=0.4, worst=60)
    counts: dict[str, dict[str, int]] = {}
    confusion: dict[tuple[str, str], int] = {}
    for path, boxes in labels.items():
        mine = counts[path] = dict.fromkeys(("hit", "miss", "false-alarm", "other-class"), 0)
        for each in match_objects(boxes, guesses[path], least_score=0.4):
            if each.kind != "ignored":
                mine[each.kind] += 1
                both = each.before.label if each.before else "", each.after.label if each.after else ""
                confusion[both] = confusion.get(both, 0) + 1
    total = {
        kind: sum(mine[kind] for mine in counts.values()) for kind in ("hit", "miss", "false-alarm", "other-class")
    }
    assert found.precision == total["hit"] / (total["hit"] + total["false-alarm"] + total["other-class"])
    assert found.recall == total["hit"] / (total["hit"] + total["miss"] + total["other-class"])
    assert {(each.label, each.predicted): each.times for each in found.confusion} == confusion
    assert [each.times for each in found.confusion] == sorted(confusion.values(), reverse=True)
    wrong = [(sum(mine.values()) - mine["hit"], path) for path, mine in counts.items()]
    expected = sorted(((-number, path) for number, path in wrong if number))
    assert [(-each.wrong, each.path) for each in found.worst] == expected
    assert found.wrong_images == len(expected)
    assert all(list(each[2:]) == list(counts[each.path].values()) for each in found.worst)
    assert evaluated(table(labels), table(guesses), score=0.4, worst=3).worst == found.worst[:3]


def test_an_objects_area_is_the_one_its_file_gives_and_else_that_of_its_outline() -> None:
    from datacache.annotations.shapes.outline import Polygon, pack

    triangle = Polygon(pack([0, 0, 40, 0, 0, 40]))  # 800 square pixels in a box of 1,600
    outlined = box("cat", 0, 0, 40, 40, extra=Extra(outline=triangle))
    given = box("cat", 100, 0, 140, 40, extra=Extra(area=20_000.0))
    found = [guess("cat", 0, 0, 40, 40), guess("cat", 100, 0, 140, 40, score=0.8)]
    numbers = evaluated(table({"a.jpg": [outlined, given]}), table({"a.jpg": found})).coco
    assert [numbers[f"mar_{size}"] for size in ("small", "medium", "large")] == [1, None, 1]


def test_images_that_cannot_be_evaluated_are_left_out_and_named() -> None:
    cat = [box("cat", 10, 10, 50, 50)]
    seen = [guess("cat", 10, 10, 50, 50)]
    labels = build(
        [
            image("a.jpg", *cat),
            image("b.jpg"),
            image("c.jpg", *cat),
            broken("d.jpg"),
            image("e.jpg", *cat),
            image("f.jpg", *cat),
        ]
    )
    guesses = build(
        [
            image("a.jpg", *seen),
            image("b.jpg", *seen),
            image("c.jpg", *seen, size=(320, 240)),
            image("d.jpg", *seen),
            image("e.jpg"),
            image("g.jpg"),
        ]
    )
    found = evaluated(labels, guesses)
    assert (found.images, found.objects, found.predictions) == (2, 2, 1)
    assert {each.reason: (each.images, each.first) for each in found.left_out} == {
        "unannotated": (1, "b.jpg"),
        "other-size": (1, "c.jpg"),
        "unusable": (1, "d.jpg"),
        "only-labelled": (1, "f.jpg"),
        "only-predicted": (1, "g.jpg"),
    }
    assert "left out: 1 image of another size in the labels ('c.jpg')" in found.warnings
    assert (found.recall, found.precision) == (0.5, 1)
    kept = evaluated(labels, guesses, keep_unannotated=True)
    assert (kept.images, kept.precision, kept.recall) == (3, 0.5, 0.5)
    assert "unannotated" not in {each.reason for each in kept.left_out}


def test_classes_that_one_side_has_alone_are_named() -> None:
    labels = table({"a.jpg": [box("cat"), box("dog", 100, 100, 150, 150)]})
    guesses = table({"a.jpg": [guess("cat"), guess("Dog", 100, 100, 150, 150)]})
    found = evaluated(labels, guesses)
    unknown, unfound = found.warnings
    assert unknown == (
        "guesses@v1 alone has the class 'Dog': false alarms all, and no part of the mean average precision"
    )
    assert unfound.startswith("labels@v1 alone has the class 'dog': missed all; where one class has two names, dsctl")
    assert found.map == pytest.approx(0.5)
    assert {each.label: each.ap for each in found.classes} == pytest.approx({"cat": 1, "dog": 0, "Dog": None})


def test_predictions_without_scores_have_no_average_precision_and_all_else() -> None:
    labels = table({"a.jpg": [box("cat")], "b.jpg": [box("cat")]})
    found = evaluated(labels, table({"a.jpg": [box("cat")], "b.jpg": []}))
    assert (found.coco, found.map, found.best, found.curves) == ({}, None, None, {})
    assert (found.score, found.precision, found.recall) == (0, 1, 0.5)
    assert found.worst == [WorstImage("b.jpg", 1, 0, 1, 0, 0)]
    assert any("have no scores" in warning and "dsctl predict" in warning for warning in found.warnings)


def test_without_any_prediction_all_is_missed() -> None:
    found = evaluated(table({"a.jpg": [box("cat")]}), table({"a.jpg": []}))
    assert (found.precision, found.recall, found.f1) == (None, 0, None)
    assert found.warnings == ["guesses@v1 predicts nothing on these images: all objects are missed"]


@pytest.mark.parametrize(
    ("labels", "guesses", "message", "hint"),
    [
        ([], [guess("cat")], "labels@v1 has neither objects nor labels", "--format folders"),
        ([guess("cat")], [box("cat")], "wrong way round", "dsctl evaluate labels@v1 --against guesses@v1"),
    ],
)
def test_labels_that_are_none_are_refused(labels: list[Box], guesses: list[Box], message: str, hint: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        evaluated(table({"a.jpg": labels}), table({"a.jpg": guesses}))
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("labels", "hint"),
    [
        (image("b.jpg", box("cat")), "Predict on labels@v1"),
        (image("a.jpg", box("cat"), size=(64, 48)), "boxes are pixels"),
    ],
)
def test_without_an_image_in_common_nothing_is_evaluated(labels: Row, hint: str) -> None:
    with pytest.raises(UsageError, match="no image that can be evaluated") as caught:
        evaluated(build([labels]), build([image("a.jpg", guess("cat"))]))
    assert hint in caught.value.hint
    with pytest.raises(UsageError, match="no image that can be evaluated: 1 image without annotation") as caught:
        evaluated(build([image("a.jpg"), image("z.jpg", box("cat"))]), build([image("a.jpg", guess("cat"))]))
    assert "--keep-unannotated" in caught.value.hint


def labelled(images: Mapping[str, Sequence[str]]) -> Table:
    return build(Row(Annotation(path, 64, 48, (), tuple(labels), "a.json"), path) for path, labels in images.items())


def test_labels_of_whole_images_have_accuracy_and_confusions() -> None:
    truth = labelled({"a.jpg": ["cat"], "b.jpg": ["cat"], "c.jpg": ["dog"], "d.jpg": ["cow"], "e.jpg": ["dog"]})
    first = {"a.jpg": ["cat"], "b.jpg": ["dog", "cat"], "c.jpg": ["dog"], "d.jpg": [], "e.jpg": ["cat", "cow"]}
    found = evaluated(truth, labelled(first))
    assert (found.kind, found.images, found.accuracy, found.top_5) == ("labels", 5, 0.4, 0.6)
    assert (found.precision, found.recall) == (0.5, 0.4)
    cat = next(each for each in found.classes if each.label == "cat")
    assert (cat.objects, cat.predictions, cat.precision, cat.recall, cat.ap) == (2, 2, 0.5, 0.5, None)
    assert {tuple(each) for each in found.confusion} == {
        ("cat", "cat", 1),
        ("cat", "dog", 1),
        ("dog", "dog", 1),
        ("dog", "cat", 1),
        ("cow", "", 1),
    }
    assert [each.path for each in found.worst] == ["b.jpg", "e.jpg", "d.jpg"]
    assert evaluated(truth, labelled({path: labels[:1] for path, labels in first.items()})).top_5 is None


def test_scores_of_classified_images_rank_their_labels(settings: Settings, tmp_path: Path) -> None:
    truth = {"1.png": "cat", "2.png": "dog", "3.png": "cat", "4.png": "dog"}
    scores = {
        "1.png": {"dog": 0.1, "cat": 0.9},
        "2.png": {"cat": 0.8, "dog": 0.2},
        "3.png": {"dog": 0.9, "cow": 0.1},
        "4.png": {"dog": 0.4, "cat": 0.3},
    }
    guesses = [{"label": max(each, key=each.get), "scores": each} for each in scores.values()]
    for name, lines in (("truth", [{"label": label} for label in truth.values()]), ("guesses", guesses)):
        (tmp_path / name).mkdir()
        for path in truth:
            Image.new("RGB", (8, 8)).save(tmp_path / name / path)
        texts = [json.dumps({"file_name": path} | line) for path, line in zip(truth, lines, strict=True)]
        (tmp_path / name / "metadata.jsonl").write_text("\n".join(texts))
        api.create_snapshot(name, str(tmp_path / name), settings=settings)
    found = api.evaluate("guesses", "truth", settings=settings)
    assert (found.kind, found.images, found.accuracy, found.top_5) == ("labels", 4, 0.5, 0.75)
    assert [each.path for each in found.worst] == ["3.png", "2.png"]  # the surest first
    sure = api.evaluate("guesses", "truth", score=0.5, settings=settings)
    assert (sure.accuracy, sure.precision, sure.recall) == (0.25, 1 / 3, 0.25)
    assert ("dog", "", 1) in [tuple(each) for each in sure.confusion]


def test_labels_of_whole_images_are_not_measured_by_objects() -> None:
    objects = table({"a.jpg": [guess("cat")]})
    with pytest.raises(UsageError, match="labels@v1 has labels of whole images, and guesses@v1 has objects"):
        evaluated(labelled({"a.jpg": ["cat"]}), objects)
    with pytest.raises(UsageError, match="labels@v1 has objects, and guesses@v1 has labels of whole images"):
        evaluated(table({"a.jpg": [box("cat")]}), labelled({"a.jpg": ["cat"]}))


def test_an_overlap_of_nothing_is_refused() -> None:
    some = table({"a.jpg": [guess("cat")]})
    for iou in (0, 1.5, float("nan")):
        with pytest.raises(UsageError, match="an overlap of"):
            evaluated(some, some, iou=iou)


# --- predictions that others have written ---------------------------------------------------------------------------


def written(folder: Path, settings: Settings, change: Callable[[dict[str, Any]], dict[str, Any]]) -> str:
    """A snapshot of six images with a cat each in the same place, of which the first two are changed."""
    folder.mkdir()
    for number in range(6):
        Image.new("RGB", (200, 100), (number, 0, 0)).save(folder / f"{number}.png")
    images = [{"id": n, "file_name": f"{n}.png", "width": 200, "height": 100} for n in range(6)]
    objects = [
        {"id": n, "image_id": n, "category_id": 1, "bbox": [10, 10, 50, 50], "area": 2500, "score": 0.9}
        for n in range(6)
    ]
    objects[:2] = map(change, objects[:2])
    content = {"images": images, "annotations": objects, "categories": [{"id": 1, "name": "cat"}]}
    (folder / "instances.json").write_text(json.dumps(content))
    return api.create_snapshot(folder.name, folder.as_uri(), settings=settings).ref


@pytest.mark.parametrize("score", [float("nan"), float("inf"), "high", None, [0.9]])
def test_scores_that_are_none_count_as_the_least_and_are_told(tmp_path: Path, settings: Settings, score: Any) -> None:
    labels = written(tmp_path / "labels", settings, lambda each: each)
    guesses = written(tmp_path / "guesses", settings, lambda each: each | {"score": score})
    found = api.evaluate(guesses, labels, settings=settings)
    assert found.map == pytest.approx(1.0)
    assert (found.score, found.recall) == (0.0, 1.0)
    assert [warning for warning in found.warnings if "2 predictions of guesses@" in warning]
    assert api.accept_predictions(guesses, name="taken", least_score=0.5, settings=settings).accepted == 4


def test_predictions_that_were_left_out_or_changed_while_they_were_read_are_told(
    tmp_path: Path, settings: Settings
) -> None:
    labels = written(tmp_path / "labels", settings, lambda each: each)
    assert api.evaluate(labels, labels, settings=settings).warnings == []
    for name, change, told in (
        ("lost", {"image_id": 99}, r"2 entries .* left out \(image-unknown\)"),
        ("outside", {"bbox": [-40, -40, 100, 100]}, r"2 entries .* mended"),
    ):
        guesses = written(tmp_path / name, settings, lambda each, change=change: each | change)  # type: ignore[misc]
        [warning] = api.evaluate(guesses, labels, settings=settings).warnings
        assert re.search(told, warning)


def test_scores_in_percent_are_not_accepted(tmp_path: Path, settings: Settings) -> None:
    guesses = written(tmp_path / "guesses", settings, lambda each: each | {"score": 91})
    with pytest.raises(UsageError, match=r"0\.png has the score 91, and scores are from 0 to 1"):
        api.accept_predictions(guesses, name="taken", least_score=0.5, settings=settings)


def test_of_a_classified_image_the_highest_score_is_accepted_and_one_that_is_none_is_not(
    tmp_path: Path, settings: Settings
) -> None:
    folder = tmp_path / "sorted"
    folder.mkdir()
    scores: list[dict[str, float]] = [{"a": 0.3, "b": 0.7}, {"a": 0.9, "b": float("nan")}]
    for number in range(2):
        Image.new("RGB", (20, 10), (number, 0, 0)).save(folder / f"{number}.png")
    lines = [{"file_name": f"{n}.png", "label": "a", "scores": each} for n, each in enumerate(scores)]
    (folder / "metadata.jsonl").write_text("\n".join(map(json.dumps, lines)))
    ref = api.create_snapshot("sorted", folder.as_uri(), settings=settings).ref
    taken = api.accept_predictions(ref, name="taken", least_score=0.5, settings=settings)
    assert dict(taken.classes) == {"b": 1}


@pytest.mark.parametrize("how", [{"score": float("nan")}, {"score": -0.1}, {"worst": -1}, {"iou": float("nan")}])
def test_thresholds_that_cannot_be_meant_are_refused(how: dict[str, float]) -> None:
    labels = table({"a.png": [box("cat", 1, 1, 9, 9)]})
    with pytest.raises(UsageError):
        evaluated(labels, labels, **how)


def test_scores_are_found_where_the_first_objects_have_none() -> None:
    boxes = {f"{n:06}.png": [box("cat", 1, 1, 9, 9)] for n in range(5000)}
    guesses = table(boxes | {"z.png": [guess("cat", 1, 1, 9, 9)]})
    assert len(guesses.row_counts()) > 1
    assert evaluated(table(boxes | {"z.png": []}), guesses).coco
