"""Splits that have their share of each class, and samples by label."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

import datacache
from datacache.core.errors import UsageError
from datacache.settings import Settings
from tests.promises import promise

DataSet = Callable[..., str]
IMAGES = {
    f"{n:02}": (n, [("common", 2)] * (n % 5 != 0) + [("some", 20)] * (n % 4 == 0) + [("rare", 40)] * (n % 10 == 0))
    for n in range(40)
}


@pytest.fixture
def ref(data_set: DataSet) -> str:
    """40 images: 32 have `common`, 10 `some`, 4 `rare`; of the 8 without `common` 4 have no label at all."""
    return data_set("some", IMAGES)


def labels_of(ref: str, settings: Settings) -> dict[str, set[str]]:
    with datacache.open_annotations(ref, settings=settings) as (_, table):
        rows = [row.annotation for row in table.rows() if row.annotation is not None]
    return {row.path: {box.label for box in row.boxes} for row in rows}


@promise("With `--stratify` each split has its share of each class, as well as whole images allow")
def test_each_split_has_its_share_of_each_class(ref: str, settings: Settings) -> None:
    for seed in range(3):
        done = datacache.convert(
            ref,
            to="yolo",
            name="split",
            split="train=0.5,val=0.25,test=0.25",
            seed=seed,
            stratify=True,
            settings=settings,
        )
        found: Counter[tuple[str, str]] = Counter()
        for path, labels in labels_of(done.record.ref, settings).items():
            found.update((label, path.split("/")[1]) for label in labels)
        assert [found["rare", split] for split in ("train", "val", "test")] == [2, 1, 1]
        assert sorted(found["some", split] for split in ("train", "val", "test")) in ([2, 3, 5], [3, 3, 4])
        assert found["common", "train"] in (15, 16, 17)
        wanted = {"train": 20, "val": 10, "test": 10}
        assert all(abs(done.report.splits[split] - n) <= 1 for split, n in wanted.items())
        assert done.record.lineage is not None
        assert done.record.lineage.parameters["stratify"] is True


def test_classes_that_are_brought_together_are_one_for_splits(data_set: DataSet, settings: Settings) -> None:
    ref = data_set("some", {f"{n}": (n, [("cat" if n < 2 else "Cat", 2)]) for n in range(4)})
    rename = {"Cat": "cat"}
    options = {"split": "train=0.5,val=0.5", "stratify": True, "rename": rename, "settings": settings}
    done = datacache.convert(ref, to="yolo", name="one", **options)  # type: ignore[arg-type]
    assert done.report.splits == {"train": 2, "val": 2}


def test_only_splits_by_shares_are_stratified(ref: str, settings: Settings) -> None:
    for split in (None, "none"):
        with pytest.raises(UsageError, match="only splits that are dealt anew"):
            datacache.convert(ref, to="yolo", name="split", split=split, stratify=True, settings=settings)


@promise("A sample is the same each time")
def test_labels_choose_in_turn_the_rarest_first(ref: str, settings: Settings) -> None:
    record = datacache.sample(ref, 6, name="few", by="label", settings=settings)
    chosen = labels_of(record.ref, settings)
    assert len(chosen) == 6
    counts = Counter(label for labels in chosen.values() for label in labels)
    assert counts["rare"] >= 2
    assert counts["some"] >= 2
    assert counts["common"] >= 2
    assert all(chosen.values()), "images without a label come last"
    assert datacache.sample(ref, 6, name="few", by="label", settings=settings).ref == record.ref
    assert datacache.sample(ref, 6, name="few", by="label", seed=1, settings=settings).ref != record.ref
    assert record.lineage is not None
    assert (record.lineage.command, record.lineage.parameters) == ("sample", {"n": 6, "seed": 0, "by": "label"})
    with pytest.raises(UsageError, match="not by size"):
        datacache.sample(ref, 6, name="few", by="size", settings=settings)


def test_a_sample_grows_and_ends_with_all_images(ref: str, settings: Settings) -> None:
    def chosen(n: int) -> set[str]:
        return set(labels_of(datacache.sample(ref, n, name=f"few-{n}", settings=settings).ref, settings))

    few, more, every = map(chosen, (5, 15, 99))
    assert few < more < every
    assert (len(few), len(more), len(every)) == (5, 15, 40)
    by_label = labels_of(datacache.sample(ref, 99, name="labelled", by="label", settings=settings).ref, settings)
    assert set(by_label) == every
