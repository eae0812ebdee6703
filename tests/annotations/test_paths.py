"""Patterns find in the bytes of all paths what Python finds in each text."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from fnmatch import fnmatchcase

import pytest

from datacache.annotations.table.paths import FIELDS, Paths, path_arrays

ASCII = ("a", "b", "ab", "/", ".", "\n")
SETS = ("[", "]", "[!", "[a-b]", "[!/]", "[]a]", "[b-a]")
LETTERS = (*ASCII, "é", "戴", "\udcc3", "\udca9")
"""Two are bytes that are no UTF-8, and would be an é together."""


def drawn(rng: random.Random, letters: tuple[str, ...], most: int) -> str:
    return "".join(rng.choices(letters, k=rng.randrange(most)))


def field_of(path: str, field: str) -> str:
    folder, _, name = path.rpartition("/")
    return {"path": path, "folder": folder, "name": name}[field]


def paths_of(texts: Sequence[str]) -> Paths:
    """The paths in two parts."""
    parts = [[*map(encode, texts[:100])], [*map(encode, texts[100:])]]
    return Paths(path_arrays((array("I", map(len, part)), b"".join(part)) for part in parts))


def encode(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


@pytest.mark.parametrize("letters", [ASCII, LETTERS], ids=["ascii", "any"])
def test_what_is_found_at_once_is_what_python_finds_path_by_path(letters: tuple[str, ...]) -> None:
    rng = random.Random(3)
    # As they are read again: two such bytes that come together are one character.
    texts = [encode(drawn(rng, letters, 12)).decode("utf-8", "surrogateescape") for _ in range(300)]
    paths = paths_of(texts)
    answered = 0
    for _ in range(400):
        pattern, part = drawn(rng, (*letters, "*", "*", "?", *SETS), 7), drawn(rng, letters, 4)
        for field in FIELDS:
            values = [field_of(text, field) for text in texts]
            asked = {
                f"like {pattern!r}": (paths.like(field, pattern), [fnmatchcase(each, pattern) for each in values]),
                f"{part!r} in": (paths.containing(field, part), [part in each for each in values]),
                f"in {part!r}": (paths.among(field, (part, values[0])), [each in (part, values[0]) for each in values]),
            }
            for question, (found, expected) in asked.items():
                if found is not None:
                    answered += 1
                    assert found.tolist() == expected, (field, question)
    assert answered > 1_500


def test_patterns_that_bytes_cannot_answer_are_left_to_the_caller() -> None:
    ascii, other = (paths_of([path]) for path in ("a/b.jpg", "戴/b.jpg"))
    assert ascii.like("name", "?.jpg") is not None
    assert other.like("name", "?.jpg") is None
    assert other.like("name", "[ab].jpg") is None
    assert other.like("name", "[.jpg") is not None
    assert ascii.containing("path", "\udcff") is None
    assert ascii.among("path", ["a", "\ud800"]) is None


def test_a_piece_across_the_parts_of_a_long_text_is_found() -> None:
    long = "x" * (2**20 - 3)
    paths = paths_of([long, "yzyzyz/yz", "zy"])
    assert paths.containing("path", "yzyz").tolist() == [False, True, False]
    assert paths.containing("path", "xy").tolist() == [False, False, False]


def test_no_paths_are_no_matches() -> None:
    paths = Paths(path_arrays([]))
    assert paths.like("path", "*a*b") is not None
    assert paths.containing("path", "a") is not None
