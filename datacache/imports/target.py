"""What an import will be called, checked before the work begins.

Used by `jsonl` and `export`. One thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from datacache.catalog.base import Catalog, tag_exists
from datacache.catalog.commit import check_target, kind_of
from datacache.manifest.model import Lineage


def check_import(
    catalog: Catalog,
    name: str,
    tags: Sequence[str],
    *,
    move_tags: bool,
    replace: bool,
    command: str,
    parameters: Mapping[str, Any],
    inputs: Sequence[str] = (),
) -> None:
    """Raise unless a snapshot may be called so: `UsageError` for a bad name or tag, `OtherKindError` unless `replace`.

    `TagExistsError` for a tag that is taken, now and not after hours of fetching, unless what it names was made by the
    same import: then this one may well come to the same snapshot.
    """
    kind = None if replace else kind_of(Lineage(command, parameters, tuple(inputs)))
    dataset = check_target(catalog, name, tags, kind=kind)
    if dataset is None or move_tags:
        return
    for tag in tags:
        id = dataset.tags.get(tag)
        record = catalog.snapshot(name, id) if id is not None else None
        if record is None or id is None:
            continue
        lineage = record.lineage
        if lineage is None or lineage.command != command or lineage.parameters.get("content") != parameters["content"]:
            raise tag_exists(name, tag, id)
