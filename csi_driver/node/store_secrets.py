"""Try out the store credentials that a volume brings along in a Kubernetes Secret, and keep them where the stores look;
bound how many calls wait for the endpoints that Secrets name.

Used by `preparation` and `mounts`. Credentials are written to `CredentialFiles` and nowhere else; no error and no log
says any of them. Any thread.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path

from csi_driver.node.records import NodeVolume, SharedMount
from csi_driver.status import invalid, precondition, unavailable
from datacache.core.errors import ObjectNotFoundError, StoreAccessError
from datacache.core.ids import ObjectRef
from datacache.manifest.reader import Manifest
from datacache.settings import Settings, StoreOptions
from datacache.store.credentials import CredentialFiles, StoreCredentials, parse_credentials, takes_credentials
from datacache.store.open import open_backend
from datacache.store.s3.access import endpoint_of, store_options
from datacache.store.urls import split_url

_OWNER = "csi-volume "
"""The beginning of each owner of a volume's credentials."""
_NOWHERE = Path("/nonexistent")
"""A folder without credentials of volumes (FHS: it never exists)."""
_LOOKED_AT = 1_000_000
"""How many rows of a snapshot are looked at for objects to try credentials on; with several stores, a few seconds."""

_log = logging.getLogger("csi_driver")


class StoreSecrets:
    """The credentials of one home's volumes.

    Those of data sets lie where all stores look, as the daemon reads a snapshot for everybody who may have it.
    Those of buckets lie in a folder of their mount, `<credentials>/<key>/`: that mount uses them and no others, and
    nobody else does.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._files = CredentialFiles(settings.credentials_dir)

    def folder(self, mount: SharedMount) -> Path:
        """Return where the credentials of a bucket's mount are, if volumes brought any."""
        return self._settings.credentials_dir / mount.key

    def has_any(self, mount: SharedMount) -> bool:
        """Tell whether a bucket's mount has credentials that volumes brought along."""
        return bool(self._of(mount).owners())

    def check_shared(self, record: NodeVolume, other: NodeVolume, secrets: Mapping[str, str]) -> bool:
        """Tell whether two volumes may share a bucket's mount: neither may gain what only the other's credentials open.
        Volumes of one namespace trust each other; so do those that an administrator wrote."""
        if not (record.credentials or other.credentials):
            return True
        if record.credentials != other.credentials:
            return False
        if not (record.inline or other.inline) and record.spec.namespace == other.spec.namespace:
            return True
        there = {each.owner: each for each in self._of(record.mount).for_store(split_url(record.spec.bucket)[0])}
        if _owner(record.volume_id) in there:
            return True  # it was looked at when they came; they may have been renewed since
        theirs = there.get(_owner(other.volume_id))
        return theirs is not None and bool(secrets) and replace(theirs, owner="") == parse_credentials("", secrets)

    def take_for_bucket(self, record: NodeVolume, secrets: Mapping[str, str]) -> None:
        """Keep a volume's credentials for its bucket. UNAUTHENTICATED if the store refuses them, UNAVAILABLE if it
        cannot be asked."""
        store_url, prefix = split_url(record.spec.bucket)
        files = self._of(record.mount)
        credentials = self._parse(files, record, store_url, secrets)
        options = self._here(store_url)
        if options.access_key_id or options.profile or options.anonymous:
            raise precondition(
                f"the node's configuration has credentials for {store_url} (stores.{options.name}), and a Secret does "
                "not take their place"
            )
        with closing(open_backend(store_url, self._with(store_url, credentials))) as store:
            next(iter(store.list(prefix)), None)
        self._settings.credentials_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        files.put(credentials.owner, store_url, secrets)

    def take_for_snapshot(self, record: NodeVolume, manifest: Manifest, secrets: Mapping[str, str]) -> bool:
        """Keep a volume's credentials for those stores of a snapshot that accept them and refuse the node's own. Return
        whether any are kept. UNAUTHENTICATED if they open no store, UNAVAILABLE if a store cannot be asked."""
        stores = sorted({source.store for source in manifest.root.sources if takes_credentials(source.store)})
        if not secrets or not stores:
            return False
        refused: list[StoreAccessError] = []
        samples = _samples(manifest, stores)
        kept = False
        for store_url in stores:
            credentials = self._parse(self._files, record, store_url, secrets)
            given, here = credentials.endpoint_url, endpoint_of(store_url, self._settings, brought=False)
            if given and given.rstrip("/").lower() != here:
                # All pods of the node read what the daemon fetches: a server of somebody's own would serve them all.
                raise precondition(
                    f"the Secret names the endpoint {given} for {store_url}, and the node's is {here or 'Amazon'}: "
                    "data sets are read from the node's. Leave it out, and set AWS_ENDPOINT_URL of the node"
                )
            sample = samples.get(store_url)
            if sample is None:
                _log.warning("no object of %s was found to try the Secret of %s on", store_url, record.volume_id)
                continue
            try:
                # Where the node's own open it, no others take their place: they may be too few for all else in there.
                _ask(sample, replace(self._settings, credentials=_NOWHERE))
                continue
            except StoreAccessError:
                pass
            try:
                _ask(sample, self._with(store_url, credentials))
            except StoreAccessError as exc:
                refused.append(exc)
            else:
                self._files.put(credentials.owner, store_url, secrets)
                kept = True
        if len(refused) == len(stores):
            raise refused[0]
        return kept

    def move(self, record: NodeVolume, mount: SharedMount) -> None:
        """Give a volume's credentials to another mount of its bucket, too. See `drop_of_mount`."""
        owner, store_url = _owner(record.volume_id), split_url(record.spec.bucket)[0]
        for each in self._of(record.mount).for_store(store_url):
            if each.owner == owner:
                values = asdict(each)
                del values["owner"]
                self._settings.credentials_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._of(mount).put(owner, store_url, values)

    def drop_of_mount(self, record: NodeVolume, mount: SharedMount) -> None:
        """Forget the credentials that a volume brought along for a mount that it no longer has."""
        self._drop_in(self.folder(mount), _owner(record.volume_id))

    def drop(self, volume_id: str) -> None:
        """Forget a volume's credentials."""
        for folder in self._folders():
            self._drop_in(folder, _owner(volume_id))

    def volumes(self) -> set[str]:
        """Return the ids of all volumes with credentials here."""
        owners = {owner for folder in self._folders() for owner in CredentialFiles(folder).owners()}
        return {owner.removeprefix(_OWNER) for owner in owners if owner.startswith(_OWNER)}

    def _folders(self) -> list[Path]:
        return [self._files.folder, *(path for path in self._files.folder.glob("*") if path.is_dir())]

    def _drop_in(self, folder: Path, owner: str) -> None:
        CredentialFiles(folder).drop(owner)
        if folder != self._files.folder:
            with contextlib.suppress(OSError):  # there are others', or it is gone
                folder.rmdir()

    def _of(self, mount: SharedMount) -> CredentialFiles:
        return CredentialFiles(self.folder(mount))

    def _here(self, store_url: str) -> StoreOptions:
        return store_options(store_url, self._settings) or StoreOptions(name="", url=store_url)

    def _parse(
        self, files: CredentialFiles, record: NodeVolume, store_url: str, secrets: Mapping[str, str]
    ) -> StoreCredentials:
        credentials = parse_credentials(_owner(record.volume_id), secrets)
        given, here = credentials.endpoint_url, self._here(store_url).endpoint_url
        if record.inline and given:
            raise invalid("the Secret of an inline volume cannot name an endpoint: it is the node's")
        others = [each for each in files.for_store(store_url) if each.owner != credentials.owner]
        if (given and here and given != here) or any(other.endpoint_url != given for other in others):
            whose = "the node's configuration" if given and here and given != here else "another volume on this node"
            raise precondition(f"the Secret names another endpoint for {store_url} than {whose}")
        return credentials

    def _with(self, store_url: str, credentials: StoreCredentials) -> Settings:
        here = self._here(store_url)
        options = replace(
            here,
            url=store_url,
            endpoint_url=here.endpoint_url or credentials.endpoint_url,  # as those who read do it
            brought=bool(credentials.endpoint_url and not here.endpoint_url),
            region=here.region or credentials.region,
            profile="",
            anonymous=False,
            access_key_id=credentials.access_key_id,
            secret_access_key=credentials.secret_access_key,
            session_token=credentials.session_token,
        )
        return replace(self._settings, stores=(options,))


def _samples(manifest: Manifest, stores: Collection[str]) -> dict[str, ObjectRef]:
    """Return for each store an object of the first rows, if there is one, to try credentials on."""
    found: dict[str, ObjectRef] = {}
    rows = (manifest.object_ref(entry) for entry in islice(manifest.entries(), _LOOKED_AT) if entry.size_bytes)
    for ref in rows:
        if ref.store in stores and found.setdefault(ref.store, ref) is ref and len(found) == len(stores):
            break
    return found


def _ask(sample: ObjectRef, settings: Settings) -> None:
    """Ask for an object, which may be gone. `StoreAccessError` if the store refuses the credentials,
    `StoreUnavailableError` if it does not answer."""
    with closing(open_backend(sample.store, settings)) as store, contextlib.suppress(ObjectNotFoundError):
        store.head(sample.key)


def _owner(volume_id: str) -> str:
    return f"{_OWNER}{volume_id}"


OF_ONE = 8
"""Calls of one namespace at a time; of volumes whose namespace nobody knows (a PV by hand) together."""
OF_ALL = 32
"""Calls of all namespaces at a time. Beyond that, only a namespace that holds no turn is given one."""
OF_FIRST = 64
"""Such first turns at most. With them a quarter of `server.THREADS` is left, which those that wait for warm-ups
(`preparation`) do not fill: others find threads, too."""


class EndpointTurns:
    """The turns of one node."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards _taken
        self._taken: Counter[str] = Counter()

    @contextlib.contextmanager
    def take(self, namespace: str) -> Iterator[None]:
        """Hold a turn. UNAVAILABLE at once where none is left: waiting for one would take a thread, too.

        A namespace that holds none is refused only where `OF_FIRST` others hold turns: a second turn is given
        only while fewer than `OF_ALL` are taken, so all second and third turns together are fewer than that.
        """
        with self._lock:
            of_one, of_all = self._taken[namespace], self._taken.total()
            if of_one >= OF_ONE or of_all >= (OF_ALL if of_one else OF_ALL + OF_FIRST):
                whose = f"of namespace {namespace}" if namespace else "that were made by hand, for no namespace,"
                whose = whose if of_one >= OF_ONE else "of several namespaces"
                raise unavailable(
                    f"{of_one if of_one >= OF_ONE else of_all} volumes {whose} wait for the endpoints of their "
                    "Secrets, which are slow or do not answer; this one is tried again when some of these have ended"
                )
            self._taken[namespace] += 1
        try:
            yield
        finally:
            with self._lock:
                self._taken[namespace] -= 1
                self._taken += Counter()  # without those that have none
