"""Open a catalog, or the task queues in it, by URL. A backend's library is imported only when it is needed.

Used by `datacache.api`, the daemon and mounts. Any thread may call it; it opens and contacts nothing before the first
call of what it returns.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

from datacache.catalog.base import Catalog
from datacache.core.errors import SettingsError
from datacache.settings import CATALOG_URLS, Settings, in_bucket, is_shared, load_settings

if TYPE_CHECKING:
    from datacache.catalog.sqlite.catalog import SqliteCatalog
    from datacache.catalog.tasks.base import TaskStore


def open_catalog_url(url: str, *, settings: Settings | None = None, blob_cache_dir: Path | None = None) -> Catalog:
    """Return the catalog at `sqlite:///PATH`, at `mongodb://…`, or, to be read only, in a bucket or folder. Raise
    `SettingsError` for any other URL.

    A shared catalog is read through a local cache of blobs in `blob_cache_dir`, if given. An SQLite path is always
    absolute (`sqlite:////data/c.db` and `sqlite:///data/c.db` are the same file): a daemon, its mounts and a command do
    not run in one working directory. `settings` say how a bucket is reached; None: those of the environment.
    """
    catalog: Catalog
    if in_bucket(url):
        catalog = _open_bucket(url, settings or load_settings())
    elif is_shared(url):
        with _explained_import():
            from datacache.catalog.mongo.catalog import MongoCatalog

        catalog = MongoCatalog(url)
    else:
        return _open_sqlite(url)
    if blob_cache_dir is None:
        return catalog
    from datacache.catalog.blobcache import BlobCache

    return BlobCache(catalog, blob_cache_dir / "manifests.db")


def open_task_store(url: str) -> TaskStore:
    """Return the task queues in the catalog at `url`. Raise `SettingsError` for one that can only be read."""
    if in_bucket(url):
        raise SettingsError(
            f"the catalog {url} can only be read, and a task queue is written all the time",
            hint="Set DATACACHE_CATALOG to mongodb://HOST/DATABASE, which all workers reach.",
        )
    if is_shared(url):
        with _explained_import():
            from datacache.catalog.tasks.mongo import MongoTasks

        return MongoTasks(url)
    from datacache.catalog.tasks.sqlite import SqliteTasks

    return SqliteTasks(_open_sqlite(url))


def _open_bucket(url: str, settings: Settings) -> Catalog:
    from datacache.catalog.bucket import BucketCatalog, ReadOnlyCatalog
    from datacache.catalog.sqlite.catalog import SqliteCatalog

    bucket = BucketCatalog(url, settings)
    digits = blake2b(bucket.url.encode("utf-8", "surrogateescape"), digest_size=8).hexdigest()
    return ReadOnlyCatalog(bucket, SqliteCatalog(settings.home / "catalogs" / f"{digits}.db"))


@contextmanager
def _explained_import() -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as exc:
        if exc.name not in ("pymongo", "bson"):
            raise
        hint = "Install it: pip install 'dsctl[mongo]'"
        raise SettingsError("a catalog in MongoDB needs pymongo", hint=hint) from exc


def _open_sqlite(url: str) -> SqliteCatalog:
    from datacache.catalog.sqlite.catalog import SqliteCatalog

    scheme, separator, rest = url.partition("://")
    if scheme != "sqlite" or not separator or not rest.startswith("/"):
        raise SettingsError(
            f"a catalog's URL cannot begin with {scheme}://" if separator else "the catalog's URL has no scheme",
            hint=f"{CATALOG_URLS[0].upper()}{CATALOG_URLS[1:]}.",
        )
    path = rest.lstrip("/")
    file = Path(path).expanduser() if path.startswith("~") else Path("/", path)
    if not path or path.endswith("/") or file.parent == Path("/"):
        raise SettingsError(
            f"{url!r} names no file for the catalog",
            hint="Write the whole path: sqlite:////home/me/catalog.db",
        )
    return SqliteCatalog(file)
