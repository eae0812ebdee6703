"""Cuts what a user types for a place into the store and the keys under it.

Used where URLs come in (commands, `open_snapshot`, JSON lines). Keys are taken literally: nothing is percent-decoded
and no `..` is resolved in a bucket, because those are legal keys. In a `file://` URL `%20` is a space, as RFC 8089 and
`Path.as_uri()` have it; a plain path is taken literally. Pure functions, any thread.
"""

from __future__ import annotations

import os
import re
from urllib.parse import unquote

from datacache.core.errors import UsageError

_RAW = "surrogateescape"
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_ALIASES = {"s3a": "s3", "s3n": "s3", "gcs": "gs", "azure": "az"}
_SIGNED = re.compile(
    r"[?&](x-amz-(signature|credential|security-token)|x-goog-(signature|credential)|awsaccesskeyid|googleaccessid"
    r"|signature|sig|token|access_token|api_?key|password|secret)=",
    re.IGNORECASE,
)
_USER_IS_NO_SECRET = ("sftp", "ssh", "hdfs", "webhdfs", "smb", "ftp", "abfs", "abfss")
"""Schemes whose authority may be `name@host`: a login or (Azure) a container."""


def split_url(url: str) -> tuple[str, str]:
    """Split a place into `(store_url, prefix)`, where the prefix is '' or ends with '/'.

    `s3://bucket/a/b` → `("s3://bucket", "a/b/")`; `file:///data/faces`, `/data/faces` and `./faces` →
    `("file://", "data/faces/")`, made absolute. `join_url` is the reverse. Raises `UsageError` for what is no place
    and for a URL with credentials in it, which it does not repeat.
    """
    store, key = split_object_url(url)
    return store, key if not key or key.endswith("/") else f"{key}/"


def join_url(store_url: str, key: str) -> str:
    """Return the URL that is split into these."""
    return f"{store_url}/{key.replace('%', '%25') if store_url == 'file://' else key}"


def split_object_url(url: str) -> tuple[str, str]:
    """Split an object's URL into `(store_url, key)`, the key exactly as it is written (a local path is made
    absolute)."""
    match = _SCHEME.match(url)
    if match is None or match[1].lower() == "file":
        return "file://", _local_key(url, url[match.end() :] if match else url)
    scheme = _ALIASES.get(match[1].lower(), match[1].lower())
    if scheme == "datacache":
        raise UsageError(
            "a datacache:// URL names a snapshot, not a bucket or folder",
            hint="From a snapshot others are made with: dsctl convert REF --as NAME, dsctl query REF --as NAME. "
            "Another name for it is a tag: dsctl snapshot tag.",
        )
    authority, _, key = url[match.end() :].partition("/")
    _refuse_credentials(scheme, authority, key)
    if not authority:
        raise UsageError(f"the URL {url!r} names no bucket or host", hint=f"Write {scheme}://NAME/PREFIX.")
    return f"{scheme}://{authority}", key


def _local_key(url: str, path: str) -> str:
    if url.lower().startswith("file:"):
        path = unquote(path.removeprefix("localhost") if path.startswith("localhost/") else path, errors=_RAW)
        if not path.startswith("/"):
            raise UsageError(f"the URL {url!r} names a host", hint="Write file:///absolute/path, or a plain path.")
    if not path or "\0" in path:
        raise UsageError(f"{url!r} is not a path")
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*:/", path):
        raise UsageError(f"{url!r} is neither a URL nor a path", hint="A URL has two slashes: s3://bucket/prefix.")
    key = os.path.abspath(path).lstrip("/")
    return f"{key}/" if path.endswith("/") and key else key


def _refuse_credentials(scheme: str, authority: str, key: str) -> None:
    user, at, _host = authority.rpartition("@")
    secret = bool(at) and (":" in user or scheme not in _USER_IS_NO_SECRET)
    if not at and ":" in authority:
        # An AWS secret may hold '/': in s3://KEY:SEC/RET@bucket the authority ends too early. A port is a
        # number.
        secret = scheme in ("s3", "gs", "az") or not re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[^:]*)(:\d*)?", authority)
    if secret or _SIGNED.search(key) or _SIGNED.search(authority):
        raise UsageError(
            f"the {scheme} URL carries credentials; URLs are written to catalogs and logs, so they must not",
            hint="Give credentials in the store's environment variables (AWS_ACCESS_KEY_ID, …), a profile, "
            "or a named store in the configuration file.",
        )
