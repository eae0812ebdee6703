"""What `filter.html` shows: the fields of a filter over the images of a version, as they were filled in."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any, Final

from datacache.web.opened import Shown

_LISTED_CLASSES: Final = 300


def filter_values(shown: Shown, asked: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """Return the template's values. `asked` are those of the address."""
    table = shown.browser.table
    labels = [value for name, value in asked if name == "label"]
    listed = list(dict.fromkeys([*labels[:1], *islice(table.labels, _LISTED_CLASSES)]))
    splits = shown.browser.split_names or ()
    return {"table": table, "asked": dict(asked), "labels": labels, "listed": listed, "splits": splits}
