"""The store credentials that a volume brings along in a Kubernetes Secret: tried out, then kept where the stores look.

Used by `preparation`. They are written to `CredentialFiles` and nowhere else; no error and no log says any of them. Any
thread.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import closing
from dataclasses import replace
from itertools import islice

import grpc

from csi_driver.status import RequestError, invalid
from datacache.core.errors import ObjectNotFoundError, StoreAccessError, StoreUnavailableError
from datacache.manifest.reader import Manifest
from datacache.settings import Settings, StoreOptions
from datacache.store.credentials import CredentialFiles, StoreCredentials, parse_credentials, takes_credentials
from datacache.store.open import open_backend
from datacache.store.s3_access import store_options
from datacache.store.urls import split_url

_OWNER = "csi-volume "
"""What the owner of a volume's credentials begins with."""
_LOOKED_AT = 1000
"""How many rows of a snapshot are looked at for an object to try credentials on."""


class StoreSecrets:
    """The credentials of one home's volumes."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._files = CredentialFiles(settings.credentials_dir)

    def take_for_bucket(self, volume_id: str, url: str, secrets: Mapping[str, str], *, inline: bool) -> bool:
        """Keep a volume's credentials for a bucket. UNAUTHENTICATED if the store refuses them, UNAVAILABLE if it cannot
        be asked. Whether there are any."""
        store_url, prefix = split_url(url)
        if not secrets or not takes_credentials(store_url):
            return False
        credentials = self._parse(volume_id, store_url, secrets, inline=inline)
        with closing(open_backend(store_url, self._with(store_url, credentials))) as store:
            next(iter(store.list(prefix)), None)
        self._files.put(_owner(volume_id), store_url, secrets)
        return True

    def take_for_snapshot(
        self, volume_id: str, manifest: Manifest, secrets: Mapping[str, str], *, inline: bool
    ) -> bool:
        """Keep a volume's credentials for the stores that a snapshot is read from, those that accept them.
        UNAUTHENTICATED if none does. Whether there are any."""
        stores = sorted({source.store for source in manifest.root.sources if takes_credentials(source.store)})
        if not secrets or not stores:
            return False
        refused: list[StoreAccessError] = []
        for store_url in stores:
            credentials = self._parse(volume_id, store_url, secrets, inline=inline)
            try:
                self._try_on(manifest, store_url, credentials)
            except StoreAccessError as exc:
                refused.append(exc)
            else:
                self._files.put(_owner(volume_id), store_url, secrets)
        if len(refused) == len(stores):
            raise refused[0]
        return True

    def drop(self, volume_id: str) -> None:
        """Forget a volume's credentials."""
        self._files.drop(_owner(volume_id))

    def keep_only(self, volume_ids: Collection[str]) -> None:
        """Forget those of all other volumes."""
        kept = {_owner(volume_id) for volume_id in volume_ids}
        for owner in self._files.owners():
            if owner.startswith(_OWNER) and owner not in kept:
                self._files.drop(owner)

    def _parse(self, volume_id: str, store_url: str, secrets: Mapping[str, str], *, inline: bool) -> StoreCredentials:
        credentials = parse_credentials(_owner(volume_id), secrets)
        # Every reader of a node reaches a store in one way. Nobody may lead the others to a server of his own.
        if inline and credentials.endpoint_url:
            raise invalid("the Secret of an inline volume cannot name an endpoint: it is the node's")
        for other in self._files.for_store(store_url):
            if other.owner != credentials.owner and other.endpoint_url != credentials.endpoint_url:
                raise RequestError(
                    grpc.StatusCode.FAILED_PRECONDITION,
                    f"the Secret names another endpoint for {store_url} than that of another volume on this node",
                )
        return credentials

    def _with(self, store_url: str, credentials: StoreCredentials) -> Settings:
        here = store_options(store_url, self._settings) or StoreOptions(name="", url=store_url)
        options = replace(
            here,
            url=store_url,
            endpoint_url=credentials.endpoint_url or here.endpoint_url,
            region=credentials.region or here.region,
            profile="",
            anonymous=False,
            access_key_id=credentials.access_key_id,
            secret_access_key=credentials.secret_access_key,
            session_token=credentials.session_token,
        )
        return replace(self._settings, stores=(options,))

    def _try_on(self, manifest: Manifest, store_url: str, credentials: StoreCredentials) -> None:
        rows = (manifest.object_ref(entry) for entry in islice(manifest.entries(), _LOOKED_AT) if entry.size_bytes)
        ref = next((ref for ref in rows if ref.store == store_url), None)
        if ref is None:
            return
        with closing(open_backend(store_url, self._with(store_url, credentials))) as store:
            try:
                store.head(ref.key)
            except (ObjectNotFoundError, StoreUnavailableError):
                return  # nothing against the credentials


def _owner(volume_id: str) -> str:
    return f"{_OWNER}{volume_id}"
