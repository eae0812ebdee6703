"""Test what errors carry: a hint that every traceback shows, through pickling, too."""

from __future__ import annotations

import pickle
import traceback

import pytest

from datacache.core.errors import AnnotationError, DatacacheError, ShardError


def _shown(error: DatacacheError) -> str:
    return "".join(traceback.format_exception(error))


def test_a_traceback_shows_the_hint_also_one_that_came_later() -> None:
    error = ShardError("it is damaged", shard="a.tar", hint="Copy it again.")
    assert "hint: Copy it again." in _shown(error)
    error.hint = "Ask somebody."
    assert "Ask somebody." in _shown(error)
    assert "Copy it again." not in _shown(error)
    error.hint = ""
    assert "hint" not in _shown(error)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickled_error_has_all_it_had(protocol: int) -> None:
    error = AnnotationError("no image", code="image-broken", file="a.jpg", line=3, hint="Look at it.")
    again = pickle.loads(pickle.dumps(error, protocol))
    assert (str(again), again.code, again.file, again.line, again.hint) == (
        "no image", "image-broken", "a.jpg", 3, "Look at it.",
    )  # fmt: skip
    assert "hint: Look at it." in _shown(again)


def test_an_error_can_be_made_of_its_message_alone_as_pytorch_does_it() -> None:
    for kind in (AnnotationError, ShardError, DatacacheError):
        assert str(kind("Caught in a worker")) == "Caught in a worker"
