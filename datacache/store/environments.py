"""The AWS variables of the shells that a daemon works for, newest first.

A daemon lives longer than the shell that started it, so clients tell it theirs (`/v1/environment`), over the socket
that only the home's owner can open. They stay in memory: nothing here shows a value, not a repr, not a log, not a
file. Who has credentials is tried in turn by `s3_access`, at the endpoint of the newest. Any thread.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, MutableMapping
from typing import Any

from datacache.core.errors import UsageError

_NAMES = frozenset(
    {
        "AWS_ACCESS_KEY_ID",
        "AWS_SECRET_ACCESS_KEY",
        "AWS_SESSION_TOKEN",
        "AWS_PROFILE",
        "AWS_DEFAULT_PROFILE",
        "AWS_CONFIG_FILE",
        "AWS_SHARED_CREDENTIALS_FILE",
        "AWS_REGION",
        "AWS_DEFAULT_REGION",
        "AWS_ENDPOINT_URL",
        "AWS_ENDPOINT_URL_S3",
        "AWS_CA_BUNDLE",
        "AWS_SKIP_SIGNATURE",
    }
)
_MOST = 8
_MAX_TEXT = 16 * 1024  # session tokens have up to some KiB


def is_told(name: str) -> bool:
    """Tell whether clients tell a daemon this variable."""
    return name in _NAMES


def told_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of an environment that clients tell a daemon."""
    return {name: environ[name] for name in sorted(_NAMES) if environ.get(name)}


class Environments:
    """The variables of up to eight shells, newest first."""

    def __init__(self, first: Mapping[str, str]) -> None:
        self._lock = threading.Lock()  # guards _known and _generation
        self._known: tuple[Mapping[str, str], ...] = (dict(first),)
        self._generation = 0

    @classmethod
    def take_from(cls, environ: MutableMapping[str, str]) -> Environments:
        """Move the variables out of a process's environment, so that nothing reads them past this object. To be called
        before the process has threads."""
        first = told_variables(environ)
        for name in first:
            del environ[name]
        return cls(first)

    def put(self, variables: Mapping[str, Any]) -> list[str]:
        """Make these the newest; the names in which they differ from the newest so far, none if they are it.
        `UsageError` for a variable that is not one of ours, or no text."""
        for name, value in variables.items():
            if name not in _NAMES or not isinstance(value, str) or len(value) > _MAX_TEXT or "\0" in value:
                raise UsageError(f"bad request: {name[:100]!r} is no variable that a daemon is told, or no text")
        own = dict(variables)
        with self._lock:
            newest = self._known[0]
            if own == newest:
                return []
            self._known = (own, *(known for known in self._known if known != own))[:_MOST]
            self._generation += 1
        return sorted(name for name in {*own, *newest} if own.get(name) != newest.get(name))

    def newest_first(self) -> tuple[Mapping[str, str], ...]:
        """All that are known; at least one, which may be empty."""
        return self._known

    @property
    def generation(self) -> int:
        """A number that is another one when `newest_first` gives something else."""
        return self._generation
