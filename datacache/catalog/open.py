"""From a URL to a catalog. Used by `datacache.api` and the tests; a backend's library is imported when it is
needed.

Any thread may call it; nothing is opened or contacted before the catalog's first call.
"""

from __future__ import annotations

from pathlib import Path

from datacache.catalog.base import Catalog
from datacache.core.errors import SettingsError


def open_catalog_url(url: str, *, blob_cache_dir: Path | None = None) -> Catalog:
    """The catalog at `sqlite:///PATH` or `mongodb://…`; `SettingsError` if it is neither.

    A shared catalog is read through a local cache of blobs in `blob_cache_dir`, if given. An SQLite path is
    always absolute (`sqlite:////data/c.db` and `sqlite:///data/c.db` are the same file): a daemon, its mounts
    and a command do not run in one working directory.
    """
    scheme, separator, rest = url.partition("://")
    if separator and scheme == "sqlite" and rest.startswith("/"):
        from datacache.catalog.sqlite.catalog import SqliteCatalog

        path = rest.lstrip("/")
        file = Path(path).expanduser() if path.startswith("~") else Path("/", path)
        if not path or path.endswith("/") or file.parent == Path("/"):
            raise SettingsError(
                f"{url!r} names no file for the catalog",
                hint="Write the whole path: sqlite:////home/me/catalog.db",
            )
        return SqliteCatalog(file)
    if separator and scheme in ("mongodb", "mongodb+srv"):
        try:
            from datacache.catalog.mongo.catalog import MongoCatalog
        except ModuleNotFoundError as exc:
            if exc.name not in ("pymongo", "bson"):
                raise
            raise SettingsError(
                "a catalog in MongoDB needs pymongo", hint="Install it: pip install 'dsctl[mongo]'"
            ) from exc

        catalog = MongoCatalog(url)
        if blob_cache_dir is None:
            return catalog
        from datacache.catalog.blobcache import BlobCache

        return BlobCache(catalog, blob_cache_dir / "manifests.db")
    raise SettingsError(
        f"a catalog's URL cannot begin with {scheme}://" if separator else "the catalog's URL has no scheme",
        hint="Write sqlite:///PATH or mongodb://HOST/DATABASE.",
    )
