"""Credentials of S3 stores that others give this process: files of volumes, and variables of a daemon's shells.

The CSI driver writes the files from Secrets (`CredentialFiles`); every process that asks a store reads them, in
`s3/access.py`. Clients tell a daemon their shells' AWS variables (`Environments`), over the socket that only the home's
owner can open; they stay in memory. Nothing here shows a secret in a repr, an error or a log, and credentials cannot be
pickled. Any thread; the files any process.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import secrets
import threading
import time
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

from datacache.core.disk import replace_file, sync_folder
from datacache.core.errors import StoreAccessError, UsageError
from datacache.store.urls import split_url

_FIELDS = ("access_key_id", "secret_access_key", "session_token", "endpoint_url", "region")
_NAMES = {f"{prefix}{name}": name for name in _FIELDS for prefix in ("", "aws_")}
_NAMES |= {"aws_endpoint_url_s3": "endpoint_url", "aws_default_region": "region"}
_KNOWN = "access_key_id, secret_access_key, session_token, endpoint_url, region (or their AWS_… names)"
_REGION = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]{0,62}")
_TEMPORARY = ".new-"
_LEFT_BEHIND_S = 60.0
"""An older file under such a name was left by a writer that was killed."""
_VARIABLES = frozenset(
    (
        *("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_SKIP_SIGNATURE"),
        *("AWS_PROFILE", "AWS_DEFAULT_PROFILE", "AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"),
        *("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_CA_BUNDLE"),
    )
)
_MOST = 8
_MAX_TEXT = 16 * 1024  # session tokens have up to some KiB
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class StoreCredentials:
    """The credentials that an owner brought along for one store."""

    owner: str
    access_key_id: str = field(repr=False)
    secret_access_key: str = field(repr=False)
    session_token: str = field(default="", repr=False)
    endpoint_url: str = ""
    region: str = ""

    def __reduce__(self) -> NoReturn:
        raise TypeError("credentials are not pickled: they would lie where the pickle goes")


def parse_credentials(owner: str, values: Mapping[str, str]) -> StoreCredentials:
    """Return the credentials that a Secret's keys give, in any case, without the space around values.

    `UsageError` names a key that is unknown, missing or wrong, and never a value.
    """
    found: dict[str, str] = {}
    for key, value in values.items():
        name = _NAMES.get(key.lower())
        if name is None:
            raise UsageError(f"store credentials have no key {key!r}", hint=f"Known: {_KNOWN}.")
        text = value.strip()
        if not all("!" <= character <= "~" for character in text):
            raise UsageError(f"the value of {key} has characters that it cannot have", hint="It is plain ASCII text.")
        if found.get(name, text) != text:
            raise UsageError(f"the store credentials say {name} twice, and not the same")
        if text:
            found[name] = text
    for name in ("access_key_id", "secret_access_key"):
        if name not in found:
            raise UsageError(f"the store credentials have no {name}", hint=f"Known keys: {_KNOWN}.")
    if not _REGION.fullmatch(found.get("region", "us-east-1")):  # it becomes a part of Amazon's host name
        raise UsageError("the region of the store credentials is no region", hint="It is like eu-central-1.")
    if not is_endpoint(found.get("endpoint_url", "https://s3")):
        raise UsageError("the endpoint_url of the store credentials is no URL", hint="Write http://HOST:PORT.")
    return StoreCredentials(owner=owner, **found)


def is_endpoint(url: str) -> bool:
    """Tell whether a URL can be an endpoint: http or https, a host, perhaps a port and a path, and nothing else that
    would change what a request asks for.
    """
    if not url.startswith(("http://", "https://")) or any(character in url for character in "@?#\\"):
        return False
    try:
        parts = urlsplit(url)
        return bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        return False


def takes_credentials(store_url: str) -> bool:
    """Tell whether volumes can bring credentials for a store of this URL: one that speaks S3."""
    return store_url.startswith("s3://")


class CredentialFiles:
    """The credential files in `folder`, one for each store and owner.

    The folder is 0700 and made at the first `put`, the files are 0600. A file is replaced whole, and its name is
    durable when `put` returns.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._told: set[str] = set()

    def __repr__(self) -> str:
        return f"CredentialFiles({str(self.folder)!r})"

    def put(self, owner: str, store_url: str, values: Mapping[str, str]) -> None:
        """Keep an owner's credentials for a store (any URL in it) in place of its earlier ones.

        The same credentials again change nothing, not even which owner's are the newest. `UsageError` as
        `parse_credentials`, and for a store that takes none.
        """
        store, _prefix = split_url(store_url)
        if not takes_credentials(store):
            raise UsageError(f"{store} takes no credentials from a volume", hint="They are for s3:// buckets.")
        credentials = parse_credentials(owner, values)
        path = self.folder / f"{_digest(store)}-{_digest(owner)}.json"
        content = {name: getattr(credentials, name) for name in StoreCredentials.__dataclass_fields__}
        there = self._read(path)
        if there is not None and there[1] == credentials:
            return
        content |= {"set_ns": time.time_ns()}
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if self.folder.stat().st_mode & 0o077:
                self.folder.chmod(0o700)
            self._replace(path, json.dumps(content).encode())
        except OSError as exc:
            raise StoreAccessError(
                f"the credentials for {store} cannot be kept in {self.folder}: {exc.strerror}", url=store
            ) from exc

    def drop(self, owner: str) -> None:
        """Remove all credentials of an owner, if there are any."""
        gone = [name for name in self._names() if name.endswith(f"-{_digest(owner)}.json")]
        try:
            for name in gone:
                (self.folder / name).unlink(missing_ok=True)
            if gone:
                sync_folder(self.folder)
        except OSError as exc:
            raise StoreAccessError(f"the credentials in {self.folder} cannot be removed: {exc.strerror}") from exc

    def owners(self) -> set[str]:
        """Return the owners that have brought credentials along."""
        found = (self._read(self.folder / name) for name in self._names())
        return {each[1].owner for each in found if each is not None}

    def for_store(self, store_url: str) -> list[StoreCredentials]:
        """Return the credentials for a store (as `split_url` gives it), the newest first.

        The log names a file that cannot be understood, once. `StoreAccessError` if the folder cannot be read.
        """
        found = [self._read(path) for path in self._paths(store_url)]
        newest_first = sorted((each for each in found if each is not None), key=lambda each: -each[0])
        return [credentials for _set_ns, credentials in newest_first]

    def stamp(self, store_url: str) -> object:
        """Return a value that changes with what `for_store` gives. Takes a few system calls."""
        stamps = []
        for path in self._paths(store_url):
            with contextlib.suppress(FileNotFoundError):
                stat = path.stat()
                stamps.append((path.name, stat.st_ino, stat.st_mtime_ns))
        return tuple(sorted(stamps))

    def _paths(self, store_url: str) -> list[Path]:
        beginning = f"{_digest(store_url)}-"
        return [self.folder / name for name in self._names() if name.startswith(beginning)]

    def _names(self) -> list[str]:
        try:
            return [name for name in os.listdir(self.folder) if name.endswith(".json")]
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as exc:
            raise StoreAccessError(f"the credentials in {self.folder} cannot be read: {exc.strerror}") from exc

    def _read(self, path: Path) -> tuple[int, StoreCredentials] | None:
        try:
            content: dict[str, Any] = json.loads(path.read_bytes())
            known = {name: content[name] for name in StoreCredentials.__dataclass_fields__}
            return int(content["set_ns"]), StoreCredentials(**known)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as exc:
            if path.name not in self._told:
                self._told.add(path.name)
                _log.warning("the credentials in %s cannot be used (%s)", path, type(exc).__name__)
            return None

    def _replace(self, path: Path, data: bytes) -> None:
        for left in self.folder.glob(f"{_TEMPORARY}*"):
            with contextlib.suppress(FileNotFoundError):
                if time.time() - left.stat().st_mtime > _LEFT_BEHIND_S:
                    left.unlink()
        replace_file(path, data, beside=self.folder / f"{_TEMPORARY}{secrets.token_hex(8)}")


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogateescape"), digest_size=12).hexdigest()


def is_told(name: str) -> bool:
    """Tell whether clients tell a daemon this variable."""
    return name in _VARIABLES


def told_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of an environment that clients tell a daemon."""
    return {name: environ[name] for name in sorted(_VARIABLES) if environ.get(name)}


def store_fingerprint() -> str:
    """Return a short hash of the variables that tell how to reach stores and that clients do not send to the daemon. If
    a daemon has other ones than its client it may be denied access, and the client can name the reason. It reveals no
    values."""
    names = sorted(n for n in os.environ if n.startswith(("AWS_", "GOOGLE_", "AZURE_")) and not is_told(n))
    text = "\0".join(f"{n}={os.environ[n]}" for n in names)
    return blake2b(text.encode("utf-8", "surrogateescape"), digest_size=6).hexdigest()


class Environments:
    """The AWS variables of up to eight shells that a daemon works for, the newest first.

    A daemon lives longer than the shell that started it. `s3/access.py` tries each shell that has credentials, at the
    endpoint of the newest.
    """

    def __init__(self, first: Mapping[str, str]) -> None:
        self._lock = threading.Lock()  # guards _known and _generation
        self._known: tuple[Mapping[str, str], ...] = (dict(first),)
        self._generation = 0

    @classmethod
    def take_from(cls, environ: MutableMapping[str, str]) -> Environments:
        """Move the variables out of a process's environment, so that nothing reads them past this object.

        Call it before the process has threads.
        """
        first = told_variables(environ)
        for name in first:
            del environ[name]
        return cls(first)

    def put(self, variables: Mapping[str, Any]) -> list[str]:
        """Make these variables the newest and return the names in which they differ from the newest so far.

        `UsageError` for a variable that is not one of ours, or no text.
        """
        for name, value in variables.items():
            if name not in _VARIABLES or not isinstance(value, str) or len(value) > _MAX_TEXT or "\0" in value:
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
        """Return all known shells' variables: at least one mapping, which may be empty."""
        return self._known

    @property
    def generation(self) -> int:
        """Return a number that changes with what `newest_first` gives."""
        return self._generation
