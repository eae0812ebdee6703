"""A lock file ties a data set's version to a commit of code: it names one snapshot for ever.

Used by `dsctl lock` and wherever a reference is taken: the name of a lock file, `data.lock`, stands for what it locks.
It is JSON with a line for each value, so that git shows what changed. Any thread.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from datacache.catalog.refs import check_name, is_name, is_whole_id
from datacache.core.errors import UsageError

SUFFIX = ".lock"
_VERSION = 1
_LIMIT_BYTES = 2**16


class Lock(NamedTuple):
    """A snapshot that is locked."""

    dataset: str
    id: str
    """The whole id."""
    asked: str
    """The reference that was locked, for people: a tag in it may have moved since."""
    files: int
    total_bytes: int
    catalog: str = ""
    """The URL of a catalog in a bucket that has it; empty where only the user's own does."""

    @property
    def ref(self) -> str:
        """Return `NAME@ID`."""
        return f"{self.dataset}@{self.id}"

    def as_json(self) -> dict[str, object]:
        """Return the content of the file."""
        said = {"datacache_lock": _VERSION, "dataset": self.dataset, "id": self.id, "ref": self.asked}
        said |= {"files": self.files, "bytes": self.total_bytes}
        return said | ({"catalog": self.catalog} if self.catalog else {})

    def encode(self) -> str:
        """Return the text of the file."""
        return json.dumps(self.as_json(), indent=2, ensure_ascii=False)


def find_lock(text: str) -> Lock | None:
    """Return what the file of that name locks; None where `text` is no name of a lock file that is there, but may be a
    reference or a URL.

    `UsageError` for a file named so that is none, or is not there.
    """
    if not text.endswith(SUFFIX):
        return None
    if not (path := Path(text)).is_file():
        if is_name(text) or "@" in text or "://" in text:
            return None
        raise UsageError(f"there is no lock file {text}", hint=f"Make one: dsctl lock NAME@TAG > {text}")
    try:
        with path.open("rb") as file:
            said = json.loads(file.read(_LIMIT_BYTES))
        version, id = said["datacache_lock"], said["id"]
        if version != _VERSION:
            message = f"{text} is a lock file of version {version}, and this datacache knows version {_VERSION}"
            raise UsageError(message, hint="Install a newer datacache.")
        if is_whole_id(id):
            return Lock(
                check_name(said["dataset"]),
                id,
                str(said["ref"]),
                int(said["files"]),
                int(said["bytes"]),
                str(said.get("catalog", "")),
            )
    except UsageError:
        raise
    except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        pass
    raise UsageError(f"{text} is no lock file of datacache", hint=f"Make one: dsctl lock NAME@TAG > {text}")
