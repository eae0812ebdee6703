"""The size that a data set's images are resized to, as numbers and as text."""

from __future__ import annotations

import pytest

from datacache.core.errors import UsageError
from datacache.loaders.dataset import Options
from tests.promises import promise


@promise("`size` is height and width as numbers, and width x height as text")
def test_numbers_are_height_and_width_and_text_is_width_x_height() -> None:
    assert Options(decode="rgb", size=(480, 640)).resized == (480, 640)
    assert Options(decode="rgb", size="640x480").resized == (480, 640)


@pytest.mark.parametrize("wrong", ["640", "640x", "0x480", "640X480 ", "-1x5", "99999999x5", True])
def test_a_size_that_is_none_is_told(wrong: str) -> None:
    with pytest.raises(UsageError, match="size="):
        Options(decode="rgb", size=wrong).resized  # noqa: B018
