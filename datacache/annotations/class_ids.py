"""Which class has which id, for who trains from a table of annotations: as files of a snapshot or as shards of it.

One function, so that a model trained from the one knows the classes of the other. Used by the builder of shards and by
the datasets. Pure, any thread.
"""

from __future__ import annotations

from collections.abc import Sequence

from datacache.annotations.classes import class_order
from datacache.annotations.table import Table

_NUMBERED = ("yolo", "keras-yolo3")
"""Formats whose labels are ids."""


def class_ids(table: Table, given: Sequence[str] | None = None) -> tuple[str, ...]:
    """The names of the class ids 0, 1, …: those of boxes in the order that a conversion gives them, then those that are
    of whole images alone, by name. With `given` exactly these. `UsageError` for ids that no list could hold."""
    order = class_order(
        [total.label for total in table.labels.values() if total.boxes],
        given=given,
        previous=table.meta.get("classes"),
        numbered=table.meta.get("format") in _NUMBERED,
    )
    if given is not None:
        return order
    known = set(order)
    return order + tuple(label for label in table.labels if label not in known)
