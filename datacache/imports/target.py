"""What an import will be called, checked before the work begins.

Used by `jsonl` and `export`. One thread.
"""

from __future__ import annotations

from datacache.catalog.base import Catalog, tag_exists
from datacache.catalog.commit import check_target
from datacache.manifest.model import Lineage, Naming


def check_import(catalog: Catalog, naming: Naming, lineage: Lineage) -> None:
    """Raise unless an import may have this name: `UsageError` for a bad name or tag, `OtherKindError` unless it
    replaces the data set.

    `TagExistsError` for a tag that is taken, now and not after hours of fetching, unless what it names was made by the
    same import: then this one may well come to the same snapshot.
    """
    dataset = check_target(catalog, naming, lineage)
    if dataset is None or naming.move_tags:
        return
    for tag in naming.tags:
        id = dataset.tags.get(tag)
        record = catalog.snapshot(naming.name, id) if id is not None else None
        if record is None or id is None:
            continue
        made = record.lineage
        content = lineage.parameters["content"]
        if made is None or made.command != lineage.command or made.parameters.get("content") != content:
            raise tag_exists(naming.name, tag, id)
