"""How one S3 bucket is reached: endpoint, region, credentials. Used by the S3 backend only.

The order: a named store of the configuration file, then what volumes brought along (`credentials`), then the standard
AWS variables, then profiles and what else botocore knows (single sign-on, web identities, instance roles). A daemon has
the variables of several shells (`environments`); everybody else those of the process. Resolved
when a request first needs it, so a node whose data is warm starts without any of it. Any thread.

What volumes brought along comes, changes and goes while a daemon or a mount runs. `Accesses` looks again when the store
refuses a request, and else once a minute: nothing is looked up for each request.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from datacache.core.addresses import AddressRule
from datacache.core.errors import SettingsError, StoreAccessError
from datacache.settings import Settings, StoreOptions
from datacache.store.credentials import CredentialFiles, Environments, is_endpoint
from datacache.store.errors import credentials_hint

_REFRESH = timedelta(minutes=5)
"""How long obstore may keep credentials that expire; botocore renews them 10 minutes and more before they
do."""


_PROFILE_FILES = {
    "config_file": ("AWS_CONFIG_FILE", "~/.aws/config"),
    "credentials_file": ("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials"),
}
"""botocore's name of each, the variable that says where it is, and where it is otherwise."""
_LOOK_AGAIN_S = 60.0
"""How long credential files that were replaced may go unnoticed while the store still takes the old ones."""


@dataclass(frozen=True, kw_only=True, eq=False)
class S3Access:
    """All that a client of one bucket needs. Its repr shows no credential."""

    bucket: str
    endpoint: str
    """`https://host[:port]`, path-style: the bucket follows in the path."""
    region: str
    timeout_s: float
    ca_bundle: str = ""
    rule: AddressRule | None = None
    """Which addresses the endpoint may lead to; None for all, where an administrator has chosen it."""
    credentials: Any = field(default=None, repr=False)
    """A botocore credentials object, or None for requests that are not signed."""

    def frozen_credentials(self) -> Any:
        """Return key id, secret and token of one moment (they are renewed as needed), or None."""
        return None if self.credentials is None else self.credentials.get_frozen_credentials()

    def obstore_provider(self) -> Callable[[], dict[str, Any]] | None:
        """Return a function that gives obstore the credentials, which it asks again for when they expire."""
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
    """Return the named store for this URL: the one with the longest URL that is a prefix of it."""
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
    when `find` would give others; it is asked now and then, and whenever the number that `generation` gives is another.
    """

    def __init__(
        self,
        find: Callable[[], Sequence[S3Access]],
        stamp: Callable[[], object] = lambda: None,
        generation: Callable[[], int] = lambda: 0,
    ) -> None:
        self._find = find
        self._stamp = stamp
        self._generation = generation
        self._lock = threading.Lock()  # of all below
        self._found: Sequence[S3Access] = ()
        self._seen: object = None
        self._at = 0
        self._look_at = 0.0
        self._looked_in = -1

    def get(self) -> S3Access:
        """Return the access to use. Raises what `find` raises."""
        current = time.monotonic() < self._look_at and self._looked_in == self._generation()
        if current and (found := self._found):
            return found[min(self._at, len(found) - 1)]
        with self._lock:
            self._look()
            return self._found[self._at]

    @property
    def checked(self) -> bool:
        """Tell whether addresses are to be checked on one of the ways."""
        self.get()
        return any(access.rule is not None for access in self._found)

    def each(self) -> Iterator[S3Access]:
        """Yield the access to use, and then others, for a request that the store refuses with each so far."""
        tried = [self.get()]
        yield tried[0]
        while True:
            with self._lock:
                self._look()
                in_turn = ((self._at + step) % len(self._found) for step in range(len(self._found)))
                at = next((at for at in in_turn if not any(self._found[at] is each for each in tried)), None)
                if at is None:
                    return
                self._at = at
                tried.append(self._found[at])
            yield tried[-1]

    def _look(self) -> None:
        generation, stamp = self._generation(), self._stamp()
        if not self._found or stamp != self._seen:
            self._found, self._at = (), 0
            self._found = self._find()
            self._seen = stamp  # as it was before: a file that has changed since is read again the next time
        self._look_at, self._looked_in = time.monotonic() + _LOOK_AGAIN_S, generation


def resolve_access(store_url: str, settings: Settings, environments: Environments | None = None) -> list[S3Access]:
    """Return the ways to reach a bucket, the best first. `StoreAccessError` where there are no
    credentials, `SettingsError` for wrong ones. Without `environments` the process's own counts."""
    options = store_options(store_url, settings) or StoreOptions(name="", url=store_url)
    known = environments.newest_first() if environments else (os.environ,)
    if options.access_key_id or options.profile or options.anonymous:
        return [_resolve(store_url, options, settings, known[0])]
    brought = CredentialFiles(settings.credentials_dir).for_store(store_url)
    if not brought:
        return _resolve_each(store_url, options, settings, known)
    # Many volumes of one team bring the same: what the store refuses once is not tried again for each.
    ways = dict.fromkeys(
        replace(
            options,
            endpoint_url=options.endpoint_url or each.endpoint_url,
            brought=bool(each.endpoint_url and not options.endpoint_url),
            region=options.region or each.region,
            access_key_id=each.access_key_id,
            secret_access_key=each.secret_access_key,
            session_token=each.session_token,
        )
        for each in brought
    )
    return [_resolve(store_url, way, settings, known[0]) for way in ways]


def _resolve_each(
    store_url: str, options: StoreOptions, settings: Settings, known: Sequence[Mapping[str, str]]
) -> list[S3Access]:
    """Return the way of the newest environment, then of others with credentials that lead to the same endpoint."""
    newest, *others = known
    ways: list[S3Access] = []
    refusal: StoreAccessError | None = None
    try:
        ways.append(_resolve(store_url, options, settings, newest))
    except StoreAccessError as exc:
        refusal = exc
    for environ in others:
        if not (environ.get("AWS_ACCESS_KEY_ID") or _profile_of(environ)):
            continue
        with contextlib.suppress(StoreAccessError, SettingsError):  # of a shell that is gone, perhaps
            if _place(options, environ)[1] == _place(options, newest)[1]:
                ways.append(_resolve(store_url, options, settings, environ))
    if refusal is not None and not ways:
        raise refusal
    return ways


def endpoint_of(
    store_url: str, settings: Settings, *, brought: bool = True, environments: Environments | None = None
) -> str:
    """Return where a bucket is, without its credentials: the endpoint's URL; '' for Amazon's, where names are unique.
    Without `brought` what volumes brought along does not count: where this node has it."""
    from botocore.exceptions import BotoCoreError

    options = store_options(store_url, settings) or StoreOptions(name="", url=store_url)
    found = [options.endpoint_url]
    if brought and not (options.access_key_id or options.profile or options.anonymous):
        found += [each.endpoint_url for each in CredentialFiles(settings.credentials_dir).for_store(store_url)]
    environ: Mapping[str, str] = environments.newest_first()[0] if environments else os.environ
    found += [environ.get("AWS_ENDPOINT_URL_S3", ""), environ.get("AWS_ENDPOINT_URL", "")]
    if not any(found):
        with contextlib.suppress(BotoCoreError):
            profile = _session(options, environ).get_scoped_config()
            found.append(str(profile.get("endpoint_url") or ""))
    endpoint = next(filter(None, found), "").rstrip("/").lower()
    return "" if (urlsplit(endpoint).hostname or "").endswith(".amazonaws.com") else endpoint


def access_stamp(store_url: str, settings: Settings, environments: Environments | None = None) -> object:
    """Return something that is another one when `resolve_access` would find others: credentials that volumes brought
    along, variables of other shells, or profiles that were written again."""
    brought = CredentialFiles(settings.credentials_dir).stamp(store_url)
    if environments is None:
        return brought, _profile_stamp(os.environ)
    return brought, environments.generation, [_profile_stamp(each) for each in environments.newest_first()]


def _profile_stamp(environ: Mapping[str, str]) -> list[int]:
    """Return when the files of profiles were written; -1 for one that is not there."""
    found = []
    for name, usual in _PROFILE_FILES.values():
        try:
            found.append(Path(environ.get(name) or usual).expanduser().stat().st_mtime_ns)
        except (OSError, RuntimeError):
            found.append(-1)
    return found


def _profile_of(environ: Mapping[str, str]) -> str:
    return environ.get("AWS_DEFAULT_PROFILE") or environ.get("AWS_PROFILE") or ""


def _session(options: StoreOptions, environ: Mapping[str, str]) -> Any:
    """Return botocore's session for an environment. What a shell tells a daemon is given by name: botocore itself reads
    the variables of the process only."""
    import botocore.session

    own = environ is os.environ  # botocore's own order holds, such as keys of the environment before its profile
    session = botocore.session.Session(profile=options.profile or (None if own else _profile_of(environ)) or None)
    for name, (variable, _) in _PROFILE_FILES.items():
        if environ.get(variable):
            session.set_config_variable(name, environ[variable])
    return session


def _place(options: StoreOptions, environ: Mapping[str, str]) -> tuple[str, str, str]:
    """Return region, endpoint and CA bundle. botocore's errors."""
    session, env = _session(options, environ), environ.get
    profile: dict[str, Any] = session.get_scoped_config()
    region = options.region or env("AWS_REGION") or env("AWS_DEFAULT_REGION")
    region = region or session.get_config_variable("region") or "us-east-1"
    endpoint = options.endpoint_url or env("AWS_ENDPOINT_URL_S3") or env("AWS_ENDPOINT_URL")
    endpoint = endpoint or profile.get("endpoint_url") or f"https://s3.{region}.amazonaws.com"
    return region, endpoint, env("AWS_CA_BUNDLE") or profile.get("ca_bundle") or ""


def _credentials(store_url: str, options: StoreOptions, environ: Mapping[str, str]) -> Any:
    """Return botocore's credentials, or None for requests that are not signed. botocore's errors."""
    from botocore.credentials import Credentials
    from botocore.exceptions import PartialCredentialsError

    if options.access_key_id:
        return Credentials(options.access_key_id, options.secret_access_key, options.session_token or None)
    env = environ.get
    if options.anonymous or env("AWS_SKIP_SIGNATURE", "").lower() in ("1", "true", "yes"):
        return None
    key = env("AWS_ACCESS_KEY_ID")
    if environ is not os.environ and key and not options.profile:
        secret = env("AWS_SECRET_ACCESS_KEY")
        if not secret:
            raise PartialCredentialsError(provider="env", cred_var="AWS_SECRET_ACCESS_KEY")
        return Credentials(key, secret, env("AWS_SESSION_TOKEN") or None)
    credentials = _session(options, environ).get_credentials()
    if credentials is None:
        raise StoreAccessError(
            f"there are no credentials for {store_url}",
            url=store_url,
            hint="Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or a named store "
            "in the configuration file (anonymous = true for a public bucket), or give the volume a secret.",
        )
    credentials.get_frozen_credentials()  # so that a failing login is told from a failing store
    return credentials


def _resolve(store_url: str, options: StoreOptions, settings: Settings, environ: Mapping[str, str]) -> S3Access:
    from botocore.exceptions import BotoCoreError, ProfileNotFound

    try:
        region, endpoint, ca_bundle = _place(options, environ)
        credentials = _credentials(store_url, options, environ)
    except BotoCoreError as exc:
        why = f"({type(exc).__name__})"
        if isinstance(exc, ProfileNotFound):
            why = f"since there is no profile {exc.kwargs.get('profile', '')!r}"
        raise StoreAccessError(
            f"the credentials for {store_url} cannot be had {why}", url=store_url, hint=credentials_hint(store_url)
        ) from exc
    if not is_endpoint(endpoint):
        raise SettingsError(f"the endpoint for {store_url} is no URL", hint="Write http://HOST:PORT or https://HOST.")
    return S3Access(
        bucket=store_url.removeprefix("s3://"),
        endpoint=endpoint.rstrip("/"),
        region=region,
        timeout_s=settings.store_timeout_s,
        ca_bundle=ca_bundle,
        rule=_rule(endpoint, options, settings, environ) if options.brought else None,
        credentials=credentials,
    )


def _rule(endpoint: str, options: StoreOptions, settings: Settings, environ: Mapping[str, str]) -> AddressRule | None:
    """Return the rule for an endpoint that a volume brought along; None for one that the node has itself or that is
    allowed by its name: it is an administrator's choice then."""
    profile = _session(options, environ).get_scoped_config()
    own = (environ.get("AWS_ENDPOINT_URL_S3"), environ.get("AWS_ENDPOINT_URL"), profile.get("endpoint_url"))
    if any(endpoint.rstrip("/").lower() == each.rstrip("/").lower() for each in own if each):
        return None
    parts = urlsplit(endpoint)
    rule = AddressRule(settings.allow_network)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    return None if rule.allows_host(parts.hostname or "", port) else rule
