"""The kind of a data set: the command that makes it, its sources, and its layout.

Used by `commit`, which lets a snapshot be the next version of a data set only if it is of the same kind: a data set
that somebody trains on never becomes another one because of a name that was typed. Of what changes from one version to
the next (ids of the inputs, a query's words, a resize, an export's file name) nothing is compared. No I/O.
"""

from __future__ import annotations

from typing import NamedTuple

from datacache.core.errors import OtherKindError
from datacache.manifest.model import Lineage, SnapshotRecord

_LAYOUTS = {"convert": "to", "shard": "format"}
"""Which parameter of a command says what the files look like."""


class Kind(NamedTuple):
    """The traits that all versions of a data set have in common."""

    command: str
    origin: str
    """The URL that was listed; empty where it was made in another way."""
    inputs: tuple[str, ...]
    """The data sets it is made of, by name."""
    layout: str

    def __str__(self) -> str:
        words = [self.command, *self.inputs]
        words += [f"--from {self.origin}"] if self.origin else []
        words += [f"--{_LAYOUTS[self.command]} {self.layout}"] if self.layout else []
        return " ".join(words)


def kind_of(lineage: Lineage) -> Kind:
    """The kind of the snapshots that are made so."""
    command, parameters, inputs = lineage
    return Kind(
        command,
        str(parameters.get("from", "")) if command == "create" else "",
        tuple(sorted({input.partition("@")[0] for input in inputs})),
        str(parameters.get(_LAYOUTS.get(command, ""), "")),
    )


def check_kind(latest: SnapshotRecord, kind: Kind) -> None:
    """`OtherKindError` unless a snapshot of this kind can be the next version after `latest`. One whose lineage is not
    known can be followed by any."""
    before = None if latest.lineage is None else kind_of(latest.lineage)
    if before is None or before == kind:
        return
    raise OtherKindError(
        f"{latest.dataset} is made by '{before}', and this is '{kind}'; {latest.dataset} was not changed",
        hint=f"Is it what you meant, and no mistyped URL? Then give it a name of its own, or have it replace what "
        f"{latest.dataset} is: --replace.",
    )
