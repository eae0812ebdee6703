"""From a URL to a catalog."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from datacache.catalog.blobcache import BlobCache
from datacache.catalog.mongo.catalog import MongoCatalog
from datacache.catalog.open import open_catalog_url
from datacache.catalog.sqlite.catalog import SqliteCatalog
from datacache.core.errors import SettingsError


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("sqlite:////data/c.db", "/data/c.db"),
        ("sqlite:///data/c.db", "/data/c.db"),
        ("sqlite:////data/100%41 x.db", "/data/100%41 x.db"),
        ("sqlite:///~/c.db", str(Path.home() / "c.db")),
    ],
)
def test_a_sqlite_path_is_always_absolute(url: str, path: str) -> None:
    catalog = open_catalog_url(url)
    assert isinstance(catalog, SqliteCatalog)
    assert str(catalog.path) == path


@pytest.mark.parametrize(
    "url", ["sqlite:///", "sqlite:///c.db", "sqlite:////data/", "sqlite://c.db", "", "redis://u:hush@h/"]
)
def test_what_is_no_catalog_is_refused(url: str) -> None:
    with pytest.raises(SettingsError) as caught:
        open_catalog_url(url)
    assert "hush" not in caught.value.message
    assert caught.value.hint


def test_a_shared_catalog_is_read_through_a_cache_of_the_node(tmp_path: Path) -> None:
    url = "mongodb://u:hush@127.0.0.1:9/lab"
    assert isinstance(open_catalog_url(url), MongoCatalog)
    cached = open_catalog_url(url, blob_cache_dir=tmp_path)
    assert isinstance(cached, BlobCache)
    assert cached.url == "mongodb://127.0.0.1:9/lab"
    assert "hush" not in repr(cached)
    assert isinstance(open_catalog_url(f"sqlite:///{tmp_path}/c.db", blob_cache_dir=tmp_path), SqliteCatalog)


def test_a_backends_library_is_imported_only_for_it() -> None:
    code = (
        "import sys; from datacache.catalog.open import open_catalog_url; open_catalog_url('sqlite:////x/c.db');"
        " assert 'pymongo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_pymongo_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "datacache.catalog.mongo.catalog", raising=False)
    monkeypatch.setitem(sys.modules, "pymongo", None)
    monkeypatch.setitem(sys.modules, "bson", None)
    with pytest.raises(SettingsError, match="needs pymongo") as raised:
        open_catalog_url("mongodb://host/db")
    assert raised.value.hint == "Install it: pip install 'dsctl[mongo]'"
