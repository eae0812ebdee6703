"""How one S3 bucket is reached: endpoint, region, credentials. Used by the S3 backend only.

The order: a named store of the configuration file, then what volumes brought along (`credentials`), then the standard
AWS variables, then profiles and what else botocore knows (single sign-on, web identities, instance roles). Resolved
when a request first needs it, so a node whose data is warm starts without any of it. Any thread.

What volumes brought along comes, changes and goes while a daemon or a mount runs. `Accesses` looks again when the store
refuses a request, and else once a minute: nothing is looked up for each request.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import urlsplit

from datacache.core.errors import SettingsError, StoreAccessError
from datacache.settings import Settings, StoreOptions
from datacache.store.credentials import CredentialFiles
from datacache.store.errors import credentials_hint

_REFRESH = timedelta(minutes=5)
"""How long obstore may keep credentials that expire; botocore renews them 10 minutes and more before they
do."""


_LOOK_AGAIN_S = 60.0
"""How long credential files that were replaced may go unnoticed while the store still takes the old ones."""


@dataclass(frozen=True, kw_only=True, eq=False)
class S3Access:
    """What a client of one bucket needs. Its repr shows no credential."""

    bucket: str
    endpoint: str
    """`https://host[:port]`, path-style: the bucket follows in the path."""
    region: str
    timeout_s: float
    ca_bundle: str = ""
    credentials: Any = field(default=None, repr=False)
    """A botocore credentials object, or None for requests that are not signed."""

    def frozen_credentials(self) -> Any:
        """Key id, secret and token of one moment (they are renewed as needed), or None."""
        return None if self.credentials is None else self.credentials.get_frozen_credentials()

    def obstore_provider(self) -> Callable[[], dict[str, Any]] | None:
        """The same for obstore, which asks again when they expire."""
        credentials = self.credentials
        if credentials is None:
            return None
        expires = getattr(credentials, "refresh_needed", None) is not None

        def provide() -> dict[str, Any]:
            frozen = credentials.get_frozen_credentials()
            return {
                "access_key_id": frozen.access_key,
                "secret_access_key": frozen.secret_key,
                "token": frozen.token,
                "expires_at": datetime.now(UTC) + _REFRESH if expires else None,
            }

        return provide


def store_options(store_url: str, settings: Settings) -> StoreOptions | None:
    """The named store for this URL: the one with the longest URL that is a prefix of it."""
    best: StoreOptions | None = None
    for options in settings.stores:
        own = options.url.rstrip("/") + "/"
        if f"{store_url}/".startswith(own):
            if best is None or len(options.url.rstrip("/")) > len(best.url.rstrip("/")):
                best = options
        elif own.startswith(f"{store_url}/"):
            raise SettingsError(
                f"[stores.{options.name}]: the url {options.url} names a folder",
                hint=f"Options are for a whole bucket: write url = {store_url!r}.",
            )
    return best


class Accesses:
    """The way to a bucket that is used now, of the ways there are. One process; any thread.

    `find` gives the ways, the best first, and raises where there are none. `stamp` gives something that is another one
    when `find` would give others.
    """

    def __init__(self, find: Callable[[], Sequence[S3Access]], stamp: Callable[[], object] = lambda: None) -> None:
        self._find = find
        self._stamp = stamp
        self._lock = threading.Lock()  # of all below
        self._found: Sequence[S3Access] = ()
        self._seen: object = None
        self._at = 0
        self._look_at = 0.0

    def get(self) -> S3Access:
        """The one to use. Raises what `find` raises."""
        if time.monotonic() < self._look_at and (found := self._found):
            return found[min(self._at, len(found) - 1)]
        with self._lock:
            self._look()
            return self._found[self._at]

    def after_refusal(self, refused: Sequence[S3Access]) -> S3Access | None:
        """Another one, once the store has refused a request with each of these; None if there is none."""
        with self._lock:
            self._look()
            for step in range(len(self._found)):
                at = (self._at + step) % len(self._found)
                if not any(self._found[at] is each for each in refused):
                    self._at = at
                    return self._found[at]
        return None

    def _look(self) -> None:
        stamp = self._stamp()
        if not self._found or stamp != self._seen:
            self._found, self._at = (), 0
            self._found = self._find()
            self._seen = stamp  # as it was before: a file that has changed since is read again the next time
        self._look_at = time.monotonic() + _LOOK_AGAIN_S


def resolve_access(store_url: str, settings: Settings) -> list[S3Access]:
    """Find out how to reach a bucket: the ways there are, the best first. `StoreAccessError` where there are no
    credentials, `SettingsError` for wrong ones."""
    options = store_options(store_url, settings) or StoreOptions(name="", url=store_url)
    if options.access_key_id or options.profile or options.anonymous:
        return [_resolve(store_url, options, settings)]
    brought = CredentialFiles(settings.credentials_dir).for_store(store_url)
    if not brought:
        return [_resolve(store_url, options, settings)]
    # Many volumes of one team bring the same: what the store refuses once is not tried again for each.
    ways = dict.fromkeys(
        replace(
            options,
            endpoint_url=options.endpoint_url or each.endpoint_url,
            region=options.region or each.region,
            access_key_id=each.access_key_id,
            secret_access_key=each.secret_access_key,
            session_token=each.session_token,
        )
        for each in brought
    )
    return [_resolve(store_url, way, settings) for way in ways]


def endpoint_of(store_url: str, settings: Settings, *, brought: bool = True) -> str:
    """Where a bucket is, without its credentials: the endpoint's URL; '' for Amazon's, where names are unique. Without
    `brought` what volumes brought along does not count: where this node has it."""
    import botocore.session
    from botocore.exceptions import BotoCoreError

    options = store_options(store_url, settings) or StoreOptions(name="", url=store_url)
    found = [options.endpoint_url]
    if brought and not (options.access_key_id or options.profile or options.anonymous):
        found += [each.endpoint_url for each in CredentialFiles(settings.credentials_dir).for_store(store_url)]
    found += [os.environ.get("AWS_ENDPOINT_URL_S3", ""), os.environ.get("AWS_ENDPOINT_URL", "")]
    if not any(found):
        with contextlib.suppress(BotoCoreError):
            profile = botocore.session.Session(profile=options.profile or None).get_scoped_config()
            found.append(str(profile.get("endpoint_url") or ""))
    endpoint = next(filter(None, found), "").rstrip("/").lower()
    return "" if (urlsplit(endpoint).hostname or "").endswith(".amazonaws.com") else endpoint


def access_stamp(store_url: str, settings: Settings) -> object:
    """Something that is another one when `resolve_access` would find other credentials that volumes brought along."""
    return CredentialFiles(settings.credentials_dir).stamp(store_url)


def _resolve(store_url: str, options: StoreOptions, settings: Settings) -> S3Access:
    import botocore.session
    from botocore.credentials import Credentials
    from botocore.exceptions import BotoCoreError

    env = os.environ.get
    try:
        session = botocore.session.Session(profile=options.profile or None)
        profile: dict[str, Any] = session.get_scoped_config()
        region = options.region or env("AWS_REGION") or session.get_config_variable("region") or "us-east-1"
        endpoint = options.endpoint_url or env("AWS_ENDPOINT_URL_S3") or env("AWS_ENDPOINT_URL")
        endpoint = endpoint or profile.get("endpoint_url") or f"https://s3.{region}.amazonaws.com"
        credentials: Any = None
        if options.access_key_id:
            token = options.session_token or None
            credentials = Credentials(options.access_key_id, options.secret_access_key, token)
        elif not (options.anonymous or env("AWS_SKIP_SIGNATURE", "").lower() in ("1", "true", "yes")):
            credentials = session.get_credentials()
            if credentials is None:
                raise StoreAccessError(
                    f"there are no credentials for {store_url}",
                    url=store_url,
                    hint="Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or a named store "
                    "in the configuration file (anonymous = true for a public bucket), or give the volume a secret.",
                )
            credentials.get_frozen_credentials()  # so that a failing login is told from a failing store
        ca_bundle = env("AWS_CA_BUNDLE") or profile.get("ca_bundle") or ""
    except BotoCoreError as exc:
        raise StoreAccessError(
            f"the credentials for {store_url} cannot be had ({type(exc).__name__})",
            url=store_url,
            hint=credentials_hint(store_url),
        ) from exc
    if not endpoint.startswith(("http://", "https://")) or "@" in endpoint:
        raise SettingsError(f"the endpoint for {store_url} is no URL", hint="Write http://HOST:PORT or https://HOST.")
    return S3Access(
        bucket=store_url.removeprefix("s3://"),
        endpoint=endpoint.rstrip("/"),
        region=region,
        timeout_s=settings.store_timeout_s,
        ca_bundle=ca_bundle,
        credentials=credentials,
    )
