"""Predictions matched with labels: as a plain reading of the rules does, one by one."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from datacache.annotations.comparing.matching import MatchedObject, match_objects, score_of
from datacache.annotations.comparing.predictions import Quality, has_scores, match_tables, quality
from datacache.annotations.model import Box
from datacache.annotations.shapes.outline import Extra
from tests.annotations.tables import box, broken, build, image


def predicted(label: str, *edges: float, score: float = 0.9) -> Box:
    return box(label, *edges, extra=Extra(score=score))


def crowd(label: str, *edges: float) -> Box:
    return box(label, *edges, attributes=(("iscrowd", "1"),))


def common(a: Box, b: Box) -> float:
    return max(0.0, min(a.x2, b.x2) - max(a.x1, b.x1)) * max(0.0, min(a.y2, b.y2) - max(a.y1, b.y1))


def area(a: Box) -> float:
    return (a.x2 - a.x1) * (a.y2 - a.y1)


def overlap(a: Box, b: Box) -> float:
    return common(a, b) / (area(a) + area(b) - common(a, b))


def naive(labels: list[Box], predictions: list[Box], least: float, least_score: float) -> list[MatchedObject]:
    """Each prediction in turn looks at every object."""
    order = sorted((each for each in predictions if score_of(each) >= least_score), key=lambda each: -score_of(each))
    free = [each for each in labels if not each.attributes]
    verdicts: dict[int, MatchedObject] = {}
    for own in (True, False):
        for n, each in enumerate(order):
            if n in verdicts:
                continue
            could = [a for a in free if (a.label == each.label) is own and overlap(a, each) >= least]
            if could:
                best = max(could, key=lambda a: overlap(a, each))
                free = [a for a in free if a is not best]
                verdicts[n] = MatchedObject("hit" if own else "other-class", best, each)
        if own:
            for n, each in enumerate(order):
                around = [a for a in labels if a.attributes and a.label == each.label]
                lying = [a for a in around if common(a, each) / area(each) >= least]
                if n not in verdicts and lying:
                    best = max(lying, key=lambda a: common(a, each))
                    verdicts[n] = MatchedObject("ignored", best, each)
    misses = [MatchedObject("miss", each, None) for each in labels if any(each is a for a in free)]
    return misses + [verdicts.get(n, MatchedObject("false-alarm", None, each)) for n, each in enumerate(order)]


corners = st.tuples(st.integers(0, 20), st.integers(0, 20), st.integers(21, 40), st.integers(21, 40))
names = st.sampled_from(["cat", "dog", "cow"])
labelled = st.lists(
    st.builds(lambda make, label, edges: make(label, *edges), st.sampled_from([box, box, box, crowd]), names, corners),
    max_size=8,
)
guesses = st.lists(
    st.builds(lambda label, edges, s: predicted(label, *edges, score=s / 10), names, corners, st.integers(1, 9)),
    max_size=8,
)


@given(labelled, guesses, st.sampled_from([0.3, 0.5, 0.75]), st.sampled_from([0.0, 0.5]))
def test_each_prediction_takes_what_the_rules_give_it(
    labels: list[Box], predictions: list[Box], least: float, least_score: float
) -> None:
    found = match_objects(labels, predictions, least_overlap=least, least_score=least_score)
    assert found == naive(labels, predictions, least, least_score)


def test_the_surest_prediction_chooses_first_and_the_rest_are_false_alarms() -> None:
    cat = box("cat")
    sure, less = predicted("cat", 11, 20, 30, 60, score=0.9), predicted("cat", score=0.8)
    assert match_objects([cat], [less, sure]) == [
        MatchedObject("hit", cat, sure),
        MatchedObject("false-alarm", None, less),
    ]


def test_another_class_takes_only_what_its_own_class_leaves() -> None:
    cat = box("cat")
    dog, right = predicted("dog", score=0.99), predicted("cat", score=0.2)
    assert match_objects([cat], [dog, right]) == [
        MatchedObject("false-alarm", None, dog),
        MatchedObject("hit", cat, right),
    ]
    assert match_objects([cat], [dog, right], least_score=0.5) == [MatchedObject("other-class", cat, dog)]
    assert match_objects([cat], [dog, right], least_score=1) == [MatchedObject("miss", cat, None)]


def test_predictions_in_a_crowd_count_as_nothing() -> None:
    many, inside = crowd("cat", 0, 0, 100, 100), predicted("cat", 10, 10, 20, 20)
    assert [each.kind for each in match_objects([many], [inside, inside])] == ["ignored", "ignored"]
    assert [each.kind for each in match_objects([many], [predicted("dog", 10, 10, 20, 20)])] == ["false-alarm"]
    assert match_objects([many], []) == []


def test_a_score_may_be_an_attribute() -> None:
    assert score_of(box("cat", attributes=(("confidence", "0.5"),))) == 0.5
    assert score_of(box("cat", attributes=(("score", "high"),))) == 0
    assert has_scores(build([image("a.jpg"), image("b.jpg", box("cat", attributes=(("score", "0.5"),)))]))
    assert has_scores(build([image("a.jpg", predicted("cat"))]))
    assert not has_scores(build([image("a.jpg", box("cat"))]))
    assert not has_scores(build([]))


def test_tables_are_matched_image_by_image() -> None:
    rng = np.random.default_rng(3)

    def some(make: object) -> list[Box]:
        found = []
        for _ in range(int(rng.integers(0, 6))):
            x, y = rng.integers(0, 30, 2).tolist()
            label = ("cat", "dog")[int(rng.integers(0, 2))]
            score = float(rng.integers(1, 10)) / 10
            edges = x, y, x + 30, y + 40
            is_crowd = rng.random() < 0.1
            found.append(predicted(label, *edges, score=score) if make else (crowd if is_crowd else box)(label, *edges))
        return found

    paths = [f"{n:04d}.jpg" for n in range(900)]
    labels, guesses = ({path: some(make) for path in paths} for make in (0, 1))
    del guesses[paths[5]], labels[paths[9]]
    tables = (
        build([image(path, *boxes) for path, boxes in labels.items()]),
        build([broken(path) if path == paths[7] else image(path, *boxes) for path, boxes in guesses.items()]),
    )
    guesses[paths[7]] = []
    found = match_tables(*tables, least_overlap=0.4, least_score=0.3)
    expected = {
        path: match_objects(labels[path], guesses[path], least_overlap=0.4, least_score=0.3)
        for path in paths
        if path in labels and path in guesses
    }
    counts: dict[tuple[str, str, str], int] = {}
    for verdicts in expected.values():
        for each in verdicts:
            if each.kind != "ignored":
                key = each.kind, each.before.label if each.before else "", each.after.label if each.after else ""
                counts[key] = counts.get(key, 0) + 1
    assert found.objects() == counts
    for number, (before, after) in enumerate(found.pairs(range(len(found)), *tables)):
        assert before
        assert after
        assert before.path == after.path
        kinds = {each.kind for each in expected[before.path]} - {"ignored"}
        assert set(found.kinds_of(number)) == kinds
        assert found.find(before.path, *tables) == number
    every = quality(found)[-1]
    assert every.hits == sum(count for (kind, *_), count in counts.items() if kind == "hit")


def test_precision_and_recall_count_confusions_on_both_sides() -> None:
    labels = [image("a.jpg", box("cat"), box("dog", 100, 100, 120, 120)), image("b.jpg", box("cat"))]
    guesses = [image("a.jpg", predicted("dog"), predicted("dog", 100, 100, 120, 120)), image("b.jpg")]
    found = match_tables(build(labels), build(guesses))
    cat, dog, every = quality(found)
    assert cat == Quality("cat", 0, 1, 0, 1, 0)
    assert (cat.precision, cat.recall) == (None, 0)
    assert (dog.precision, dog.recall) == (0.5, 1)
    assert (every.hits, every.precision, every.recall) == (1, 0.5, 1 / 3)
