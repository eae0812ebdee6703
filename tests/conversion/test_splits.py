"""Splits by hash, and how a command line gives them."""

from __future__ import annotations

from collections import Counter

import pytest

from datacache.annotations.model import Annotation
from datacache.conversion.model import Splits, parse_splits, stem
from datacache.core.errors import UsageError


def of(splits: Splits, path: str) -> str | None:
    return splits.of(Annotation(path, 10, 10))


def test_shares_come_out_as_asked_for() -> None:
    splits = parse_splits("train=0.7,val=0.2,test=0.1", 0)
    counts = Counter(of(splits, f"images/{number}.jpg") for number in range(20_000))
    assert {name: round(count / 20_000, 2) for name, count in counts.items()} == {"train": 0.7, "val": 0.2, "test": 0.1}


def test_an_image_keeps_its_split_whatever_else_there_is_and_another_seed_deals_anew() -> None:
    splits = parse_splits("train=0.5,val=0.5", 7)
    before = {path: of(splits, path) for path in (f"{n}.jpg" for n in range(100))}
    after = {path: of(parse_splits("train=0.5,val=0.5", 7), path) for path in (f"{n}.jpg" for n in range(200))}
    assert {path: after[path] for path in before} == before
    assert {path: of(parse_splits("train=0.5,val=0.5", 8), path) for path in before} != before


def test_three_equal_shares_leave_nobody_out() -> None:
    splits = parse_splits("a=0.3333333,b=0.3333333,c=0.3333334", 0)
    assert {of(splits, f"{n}") for n in range(1000)} == {"a", "b", "c"}


def test_without_splits_everything_is_in_one_without_a_name() -> None:
    assert of(Splits(), "a.jpg") == ""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("train", "'train' is no share"),
        ("train=x", "'train=x' is no share"),
        ("train=0.8,val=0.3", "add up to 1.1"),
        ("train=0.5", "add up to 0.5"),
        ("train=nan,val=1", "'train=nan' is no share"),
        ("train=-1,val=2", "is no share"),
        ("train=0.5,train=0.5", "'train' is given twice"),
        ("../x=1", "cannot be a tag"),
    ],
)
def test_what_is_no_split_is_named(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=r"--split|tag") as caught:
        parse_splits(text, 0)
    assert said in caught.value.message


def test_a_stem_has_no_extension_and_keeps_its_folders() -> None:
    assert [stem(path) for path in ("a.b/c.jpg", "a.b/c", "x.tar.gz", ".jpg")] == ["a.b/c", "a.b/c", "x.tar", ".jpg"]
