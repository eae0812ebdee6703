"""Turns what libraries and servers say into this project's errors: the one place where they are told apart.

Backends use it and nothing else does. A message is made here from the object's address and the server's
error *code*; the library's own text is never repeated, because it can hold signatures, key ids and headers.
Pure functions, any thread.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

from datacache.core.addresses import ClosedAddressError
from datacache.core.errors import (
    AddressRefusedError,
    DatacacheError,
    ObjectChangedError,
    ObjectNotFoundError,
    StoreAccessError,
    StoreError,
    StoreUnavailableError,
    StoreUnreachableError,
)
from datacache.core.ids import ObjectRef

NOT_FOUND = (404, 405, 410)
_NOT_S3 = "If this lasts, check the endpoint: it must be the S3 endpoint, not a website."
_CODE = re.compile(r"<Code>\s*([A-Za-z0-9._-]{1,64})\s*</Code>")
_REGION = re.compile(r"[a-z]{2,8}(-[a-z]{1,12}){1,3}-[0-9]{1,2}")
_STATUS = re.compile(r"status code: (\d{3})|status: (\d{3})")

_ACCESS = {
    "InvalidAccessKeyId": "the store does not know this access key",
    "SignatureDoesNotMatch": "the secret key does not belong to the access key",
    "ExpiredToken": "the session token has expired",
    "ExpiredTokenException": "the session token has expired",
    "InvalidToken": "the session token is not valid",
    "TokenRefreshRequired": "the session token has expired",
    "RequestTimeTooSkewed": "this machine's clock is too far from the store's",
    "AccountProblem": "the store has a problem with this account",
}
_ACCESS_HINTS = {
    "ExpiredToken": "Get new credentials (for single sign-on: aws sso login) and try again.",
    "RequestTimeTooSkewed": "Set the clock of this machine (NTP) and try again.",
    "AccessDenied": "Ask for read and list permission on the bucket, or use other credentials.",
}
_ACCESS_HINTS |= dict.fromkeys(
    ("ExpiredTokenException", "InvalidToken", "TokenRefreshRequired"), _ACCESS_HINTS["ExpiredToken"]
)
_S3_CREDENTIALS_HINT = (
    "Check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (or the profile, the named store in the "
    "configuration file, the volume's secret), and that AWS_ENDPOINT_URL is the endpoint they belong to."
)
_S3_ADDRESS = "AWS_ENDPOINT_URL (or the profile, the named store in the configuration file, the volume's secret)"
_REGION_CODES = ("PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException")
_BUSY_CODES = (
    "SlowDown",
    "RequestTimeout",
    "InternalError",
    "ServiceUnavailable",
    "ThrottlingException",
    "TooManyRequests",
    "ConditionalRequestConflict",
    "OperationAborted",
    # What came is not what was sent: it went wrong on the way.
    "BadDigest",
    "IncompleteBody",
    "XAmzContentSHA256Mismatch",
)
_KNOWN_CODES = frozenset(
    (
        *_ACCESS,
        *_REGION_CODES,
        *_BUSY_CODES,
        *("AccessControlListNotSupported", "AccessDenied", "AllAccessDisabled", "BucketAlreadyExists"),
        *("BucketAlreadyOwnedByYou", "EntityTooLarge", "EntityTooSmall", "InvalidArgument"),
        *("InvalidBucketName", "InvalidDigest", "InvalidObjectState", "InvalidPart", "InvalidPartOrder"),
        *("InvalidRange", "InvalidRequest", "InvalidStorageClass", "InvalidURI", "KeyTooLongError", "MalformedXML"),
        *("MetadataTooLarge", "MethodNotAllowed", "MissingContentLength", "MissingSecurityHeader", "NoSuchBucket"),
        *("NoSuchKey", "NoSuchUpload", "NoSuchVersion", "NotImplemented", "NotModified", "NotSignedUp"),
        *("PreconditionFailed", "QuotaExceeded", "Redirect", "TemporaryRedirect", "TooManyBuckets"),
        *("UnexpectedContent", "UserSuspended", "XMinioStorageFull"),
        *("InvalidTag", "InvalidLocationConstraint", "EntityTooLargeError", "RequestTimeoutException"),
    )
)
"""The codes that an error of a store is told with: those of S3's reference, and of Ceph and MinIO."""

GONE_HINT = (
    "It was deleted since it was listed. Make a new snapshot, or restore it; dsctl snapshot verify NAME names all such "
    "files."
)
_HANGS = "See whether the store at that endpoint is well; DATACACHE_STORE_TIMEOUT_S sets how long to wait for it."
_OVERWRITTEN_HINT = (
    "It was overwritten since it was listed. Make a new snapshot, or restore the recorded version; dsctl snapshot "
    "verify NAME names all such files. A read-write mount shows what is there now soon."
)


def credentials_hint(url: str) -> str:
    """Return the way out of missing or wrong credentials, by kind of store."""
    scheme = url.partition(":")[0]
    if scheme == "gs":
        return "Set GOOGLE_APPLICATION_CREDENTIALS to a service account file with access to the bucket."
    if scheme in ("az", "abfs", "abfss"):
        return "Set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY (or AZURE_STORAGE_SAS_TOKEN)."
    if scheme == "s3":
        return _S3_CREDENTIALS_HINT
    return "Check the credentials that the store's fsspec driver takes from its environment variables or files."


def changed(ref: ObjectRef, what: str) -> ObjectChangedError:
    """Return the error for an object that is another one than was asked for; `what` says how one can tell."""
    return ObjectChangedError(
        f"{ref.url} has changed in the bucket since it was listed: {what}", url=ref.url, hint=_OVERWRITTEN_HINT
    )


def expect_same(ref: ObjectRef, *, etag: str, size_bytes: int | None) -> None:
    """Raise `ObjectChangedError` unless an answer's ETag and full size are the recorded ones.

    A recorded ETag must come back: servers exist that ignore If-Match. `size_bytes` is None where the server
    did not say it; the body's length is counted anyway.
    """
    if ref.etag and expect_etag(etag, ref.url) != ref.etag:
        raise changed(ref, "its ETag is another one")
    if size_bytes is not None and size_bytes != ref.size_bytes:
        raise changed(ref, f"it has {size_bytes:,} bytes now, not {ref.size_bytes:,}")


def unexpected(url: str, expect: str) -> ObjectChangedError:
    """Return the error for a write that would have replaced something else than `expect` (see `store/bucket.py`)."""
    what = "is another object now" if expect else "is there already"
    return ObjectChangedError(f"{url} {what}: somebody else wrote it", url=url)


def plain_etag(etag: str | None) -> str:
    """Return an ETag without the quotes HTTP puts around it (listings of some servers have none)."""
    if not etag:
        return ""
    return etag[1:-1] if len(etag) >= 2 and etag[0] == etag[-1] == '"' else etag


def expect_etag(etag: str | None, url: str) -> str:
    """Return the plain ETag of an answer that has to have one. Without it, it may be anybody's answer: a page that says
    200 to everything while the store is down."""
    if not etag:
        raise StoreUnavailableError(f"{url}: the answer has no ETag, so it may not be the store's", url=url)
    return plain_etag(etag)


@contextmanager
def expect_listing() -> Iterator[None]:
    """Take a listing within that is none of S3's for a store that is away: a web page in its place has none."""
    try:
        yield
    except (ObjectNotFoundError, StoreAccessError, StoreUnavailableError):
        raise
    except StoreError as exc:
        raise StoreUnavailableError(f"{exc.message}, so it may not be the store", url=exc.url) from exc


def not_s3(store_url: str) -> StoreError:
    """Return the error for an answer that is none of S3's."""
    return StoreError(
        f"{store_url}: the endpoint does not answer as S3 does",
        url=store_url,
        hint="Check AWS_ENDPOINT_URL: it must be the S3 endpoint, not a console or a website.",
    )


def expect_empty(body: bytes, url: str) -> None:
    """Raise for an answer with a body: S3 answers a PUT or DELETE without one, a web page in its place has one."""
    if body.strip():
        raise StoreUnavailableError(f"{url}: a document came back, so the answer may not be the store's", url=url)


def expect_s3_not_found(status: int, body: str, url: str) -> None:
    """Raise for an answer that says "not there" without an S3 error code: a proxy or a web page has sent it."""
    if status in NOT_FOUND and _CODE.search(body) is None:
        what = f"{url}: not found (HTTP {status}), but the answer may not be the store's"
        raise StoreUnavailableError(what, url=url, hint=_NOT_S3)


def error_code(body: str) -> str:
    """Return the `<Code>` of an S3 error document, or ''. One that is none of S3's is not repeated: whatever answers at
    an endpoint that somebody else names could say anything by it."""
    match = _CODE.search(body)
    return match[1] if match and match[1] in _KNOWN_CODES else ""


def from_status(status: int, code: str, url: str, *, store: str, region: str = "") -> DatacacheError:
    """Return the error for an HTTP answer that is none of 2xx. `url` is what was asked for, `store` the bucket."""
    said = f"HTTP {status}{f', {code}' if code else ''}"
    if code in ("NoSuchBucket", "InvalidBucketName"):
        return ObjectNotFoundError(
            f"there is no bucket {store} ({said})",
            url=store,
            hint="Check the bucket's name and that AWS_ENDPOINT_URL is the endpoint it lives on."
            if store.startswith("s3:")
            else "Check the bucket's name.",
        )
    if code in _REGION_CODES or status in (301, 307):
        hint = f"Set AWS_REGION={region}." if _REGION.fullmatch(region) else "Set AWS_REGION to the bucket's region."
        return StoreError(f"{store} lives in another region or at another endpoint ({said})", url=url, hint=hint)
    if status in (401, 403) or code in _ACCESS:
        why = _ACCESS.get(code, "access is denied")
        hint = _ACCESS_HINTS.get(code) or credentials_hint(store)
        return StoreAccessError(f"{url}: {why} ({said})", url=url, hint=hint)
    if status in (412, 416):
        return ObjectChangedError(
            f"{url} has changed in the bucket since it was listed ({said})", url=url, hint=_OVERWRITTEN_HINT
        )
    if code in _BUSY_CODES or status in (408, 429) or (status >= 500 and status != 501):
        return StoreUnavailableError(f"{url}: the store cannot answer now ({said})", url=url)
    if status in NOT_FOUND:  # 405: the recorded version is a delete marker
        return ObjectNotFoundError(f"{url} is not there ({said})", url=url)
    return StoreError(f"{url}: the store refuses this request ({said})", url=url)


def address_refused(exc: ClosedAddressError, url: str) -> AddressRefusedError:
    """Return the error for an endpoint whose address is refused to the tenant that named it."""
    hint = (
        "An endpoint of a volume's Secret has to be public, unless an administrator allows it: DATACACHE_ALLOW_NETWORK "
        "takes hosts and networks."
    )
    return AddressRefusedError(f"{url}: {exc}", url=url, hint=hint)


def from_connection(text: str, url: str, *, endpoint: str = "") -> DatacacheError:
    """Return the error for a connection that failed; `text` is the library's description, used only to tell the
    cases."""
    lower = text.lower()
    where = endpoint or url.rpartition("/")[0] or url
    if any(word in lower for word in ("certificate", "unknownissuer", "invalidcertificate")):
        return StoreError(
            f"{url}: the TLS certificate of {where} is not trusted",
            url=url,
            hint="Set AWS_CA_BUNDLE to the certificate authority's PEM file." if url.startswith("s3:") else "",
        )
    if any(word in lower for word in ("invalidcontenttype", "wrong version number", "record layer failure", "[ssl:")):
        return StoreError(
            f"{url}: {where} does not speak TLS",
            url=url,
            hint="If the endpoint is a plain HTTP one, write http:// in AWS_ENDPOINT_URL, not https://.",
        )
    is_s3 = url.startswith("s3:")
    if "refused" in lower or "connect call failed" in lower:
        right = f"{_S3_ADDRESS} has its address and port" if is_s3 else "its address and port are right"
        hint = f"Check that the store runs and that {right}."
        return StoreUnreachableError(f"{url}: {where} refuses connections", url=url, hint=hint)
    if any(word in lower for word in ("dns error", "name or service", "getaddrinfo", "resolve", "lookup")):
        address = f"{_S3_ADDRESS}, AWS_REGION" if is_s3 else "the endpoint's address"
        hint = f"Check {address} and this machine's DNS."
        return StoreUnreachableError(f"{url}: the host name of {where} cannot be resolved", url=url, hint=hint)
    if any(word in lower for word in ("timed out", "timedout", "timeout")):
        what, hint = f"{where} did not answer in time", _HANGS
    else:
        what, hint = f"the connection to {where} broke", ""
    return StoreUnavailableError(f"{url}: {what}", url=url, hint=hint)


def from_obstore(exc: Exception, url: str, *, store: str, endpoint: str = "") -> DatacacheError:
    """Return the error for one of obstore's exceptions, which say most of what they know in their text."""
    text = str(exc)
    if match := _STATUS.search(text):
        return from_status(int(match[1] or match[2]), error_code(text), url, store=store)
    name = type(exc).__name__
    if isinstance(exc, FileNotFoundError) or name == "NotFoundError":
        return ObjectNotFoundError(f"{url} is not there", url=url)
    if name in ("PermissionDeniedError", "UnauthenticatedError"):
        return StoreAccessError(f"{url}: access is denied", url=url, hint=credentials_hint(store))
    if name in ("PreconditionError", "NotModifiedError"):
        return from_status(412, "", url, store=store)
    if name in ("NotSupportedError", "InvalidPathError", "UnknownConfigurationKeyError") or isinstance(exc, ValueError):
        return StoreError(f"{url}: the store's driver cannot do this ({name})", url=url)
    return from_connection(text, url, endpoint=endpoint)


@contextmanager
def translated(url: str) -> Iterator[None]:
    """Raise the errors of system calls within as errors of ours."""
    try:
        yield
    except DatacacheError:  # such as one of reading what is to be stored; some are OSErrors, too
        raise
    except OSError as exc:
        raise from_oserror(exc, url) from exc


def from_oserror(exc: OSError, url: str) -> DatacacheError:
    """Return the error for a failed system call on a file."""
    said = os.strerror(exc.errno) if exc.errno else type(exc).__name__
    if isinstance(exc, PermissionError):
        return StoreAccessError(
            f"{url}: permission denied", url=url, hint="Check the permissions of the file and of the folders above it."
        )
    if exc.errno in (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP, errno.ENXIO):
        return ObjectNotFoundError(f"{url} is not there ({said})", url=url)
    if exc.errno in (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.ENOTCONN, errno.EHOSTDOWN):
        return StoreUnavailableError(f"{url}: the file system failed ({said})", url=url)
    full = exc.errno in (errno.ENOSPC, errno.EDQUOT)
    return StoreError(f"{url}: {said}", url=url, hint="Make room there and run it again." if full else "")
