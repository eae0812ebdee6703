"""Which backend serves which URL, and what opening one imports and does not do."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest

from datacache.core.errors import ObjectNotFoundError, StoreError, UsageError
from datacache.settings import Settings, StoreOptions
from datacache.store.cloud import ObstoreStore
from datacache.store.open import open_backend, open_bucket_backend, open_store


def test_memory_stores_of_one_name_share_their_objects(make_settings: Callable[..., Settings]) -> None:
    first, second = (open_store("memory://shared", make_settings()) for _ in range(2))
    other = open_store("memory://other", make_settings())
    ref = first.put("a", b"hello").ref(first.url)
    first.close()
    assert second.read(ref, 1, 3) == b"el"
    assert not second.node_wide
    with pytest.raises(ObjectNotFoundError):
        other.head("a")


def test_a_bucket_behind_s3fs_cannot_be_mounted_to_be_written(make_settings: Callable[..., Settings]) -> None:
    settings = make_settings(stores=(StoreOptions(name="lab", url="s3://bucket", backend="s3fs"),))
    with pytest.raises(UsageError, match="live") as caught:
        open_bucket_backend("s3://bucket", settings)
    assert "[stores.lab]" in caught.value.hint


@pytest.mark.parametrize(
    ("url", "kind"), [("file://", "LocalStore"), ("s3://bucket", "S3Store"), ("gs://bucket", "ObstoreStore")]
)
def test_the_scheme_decides(url: str, kind: str, make_settings: Callable[..., Settings]) -> None:
    store = open_backend(url, make_settings())
    assert type(store).__name__ == kind
    assert store.url == url


def test_a_store_is_opened_without_credentials_or_a_network(make_settings: Callable[..., Settings]) -> None:
    """A node whose data is warm starts without its object store."""
    open_store("s3://bucket", make_settings()).close()


def test_folders_are_served_without_loading_a_cloud_library() -> None:
    program = (
        "import sys; from pathlib import Path; from datacache.settings import load_settings\n"
        "from datacache.store import open_store; open_store('file://', load_settings())\n"
        "print([m for m in ('obstore', 'boto3', 'botocore', 'fsspec', 'urllib3') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_obstore_in_a_forked_child_is_an_error_not_a_hang() -> None:
    from obstore.store import MemoryStore as Driver

    driver = Driver()
    store = ObstoreStore("mem://x", lambda: driver, node_wide=False)
    ref = store.put("a", b"hello").ref(store.url)
    pid = os.fork()
    if not pid:
        try:
            store.read(ref, 0, 5)
        except StoreError as exc:
            os._exit(0 if "forked" in str(exc) else 1)
        finally:
            os._exit(2)
    assert os.waitpid(pid, 0)[1] == 0
    assert store.read(ref, 0, 5) == b"hello"


def test_a_marker_whose_slash_the_driver_drops_is_known_by_what_follows_it() -> None:
    from obstore.store import MemoryStore as Driver

    driver = Driver()
    store = ObstoreStore("mem://x", lambda: driver, node_wide=False)
    for key in ("a", "a/b", "c"):
        store.put(key, b"" if key != "a/b" else b"1")
    assert [info.key for page in store.list("") for info in page] == ["a/", "a/b", "c"]
