"""Object stores behind one protocol: list a prefix, read a range of one exact version, write small things.

`open_store(url, settings)` picks the backend: S3, Google and Azure through obstore, folders through the
kernel, every other URL through fsspec. `split_url` cuts what a user types into the store's URL and a prefix.
"""

from __future__ import annotations

from datacache.store.base import ObjectInfo, ObjectStore
from datacache.store.open import open_store
from datacache.store.urls import split_object_url, split_url

__all__ = ["ObjectInfo", "ObjectStore", "open_store", "split_url", "split_object_url"]
