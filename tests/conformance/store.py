"""The conformance suite of object stores: what every backend must do, whatever it talks to.

A test class inherits `StoreConformance` and gives a pytest fixture `store`: an empty, writable
`ObjectStore`, or one whose keys under `self.base` are empty. What a backend cannot hold is said in class
attributes, not left out in silence.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

import pytest

from datacache.core.errors import ObjectChangedError, ObjectNotFoundError, StoreError
from datacache.core.ids import ObjectRef
from datacache.store.base import ObjectInfo, ObjectStore
from tests.promises import promise

PLAIN_KEYS = (
    "a.jpg",
    "a b",
    "a-b",
    "dir/a.jpg",
    "dir/b/c.txt",
    "dir-x",
    "dir.x/y",
    "é/ü.txt",
    "日本/語.jpg",
    "\U0001f600",
)
"""Names every store can hold together."""

ODD_KEYS = (
    "a%20b", "a%2Fb", "100%", "a#b", "a?b=c", "a+b", "a&b", "a=b", "a;b", "a:b", "a'b", 'a"b', "<a>", "a\\b",
    "a*b", "a|b", "~a", " a ", "a/ /b", "...", ".hidden", "a/.../b", "e\u0301", "\ufffd", "\u0085",
)  # fmt: skip
"""Names with a meaning to shells, URLs or XML. File systems hold them, and so must every bucket."""

CONTROL_KEYS = ("a\x01b", "a\x1fb", "a\x7fb", "a\nb", "a\tb", "a\rb")
"""Control characters, which XML 1.0 cannot say."""

BUCKET_KEYS = (
    "x//y",
    "/lead",
    "x/../y",
    "x/./y",
    "./x",
    "../x",
    "x/..",
    "m/",
    "m/n",
    "f",
    "f/g",
    "k" * 1000,
    "//",
    "..",
)
"""Keys that are no file names: empty and dot parts, markers, a key that is also a folder, 1,000 bytes."""


class StoreConformance:
    """Inherit, give the fixture `store`, and set what does not hold."""

    base: ClassVar[str] = ""
    """Prefix under which the tests write: '' or ends with '/'."""
    odd_keys: ClassVar[tuple[str, ...]] = (*PLAIN_KEYS, *ODD_KEYS, *CONTROL_KEYS, *BUCKET_KEYS)
    """All of which the store holds at the same time."""
    has_etags: ClassVar[bool] = True
    """Whether an object overwritten with as many bytes is another one."""
    page_test_keys: ClassVar[int] = 2100

    def test_what_was_put_is_read_back(self, store: ObjectStore) -> None:
        data = bytes(range(256)) * 40
        ref = self._put(store, "d/a.bin", data)
        assert store.read(ref, 0, len(data)) == data

    @pytest.mark.parametrize(
        ("start", "stop"), [(0, 1), (0, 10_239), (1, 10_240), (10_239, 10_240), (256, 512), (7, 7)]
    )
    def test_a_range_is_exactly_those_bytes(self, store: ObjectStore, start: int, stop: int) -> None:
        data = bytes(range(256)) * 40
        ref = self._put(store, "r.bin", data)
        assert store.read(ref, start, stop) == data[start:stop]

    def test_an_empty_object_is_there_and_empty(self, store: ObjectStore) -> None:
        ref = self._put(store, "empty", b"")
        assert store.head(ref.key).size_bytes == 0
        assert store.read(ref, 0, 0) == b""
        assert [o.size_bytes for o in self._listed(store)] == [0]

    def test_put_head_and_list_know_the_same(self, store: ObjectStore) -> None:
        put = store.put(f"{self.base}a.txt", b"hello")
        head = store.head(put.key)
        assert (head.key, head.size_bytes, head.etag) == (put.key, 5, put.etag)
        (listed,) = self._listed(store)
        assert (listed.key, listed.size_bytes, listed.etag) == (put.key, 5, put.etag)
        assert head.mtime_ns // 10**9 == listed.mtime_ns // 10**9
        assert bool(put.etag) == self.has_etags

    @promise("A snapshot has every object under its prefix, exactly once, by its exact key")
    def test_a_listing_has_every_key_exactly_once_and_exactly(self, store: ObjectStore) -> None:
        keys = [self.base + key for key in self.odd_keys]
        for key in keys:
            store.put(key, b"" if key.endswith("/") else key.encode("utf-8", "surrogateescape"))
        listed = [o.key for o in self._listed(store)]
        assert sorted(listed) == sorted(keys)
        if store.sorted_listing:
            assert listed == sorted(keys, key=_bytes)

    def test_every_listed_object_is_read_by_its_key(self, store: ObjectStore) -> None:
        for key in self.odd_keys:
            data = b"" if key.endswith("/") else b"bytes of " + key.encode("utf-8", "surrogateescape")
            store.put(self.base + key, data)
        for info in self._listed(store):
            if info.key.endswith("/"):
                continue
            expected = b"bytes of " + _bytes(info.key.removeprefix(self.base))
            ref = info.ref(store.url)
            assert store.read(ref, 0, len(expected)) == expected, info.key
            assert store.read(ref, 1, 9) == expected[1:9], info.key
            assert store.head(info.key).size_bytes == len(expected), info.key

    def test_a_prefix_lists_what_is_under_it_and_no_sibling(self, store: ObjectStore) -> None:
        for key in ("p/a", "p/b/c", "p-x", "p.x/a", "px", "q"):
            store.put(self.base + key, b"1")
        assert self._keys(store, "p/") == ["p/a", "p/b/c"]
        assert self._keys(store, "p/b/") == ["p/b/c"]

    def test_a_prefix_with_nothing_under_it_lists_nothing_or_says_so(self, store: ObjectStore) -> None:
        with suppress(ObjectNotFoundError):
            assert self._keys(store, "nothing/here/") == []

    def test_a_listing_of_many_pages_is_complete_and_can_be_left_and_goes_on_after_any_key(
        self, store: ObjectStore
    ) -> None:
        keys = [f"{n % 7}/{n:05d}" for n in range(self.page_test_keys)]
        _in_threads(keys, lambda key: store.put(self.base + key, b""))
        assert sorted(self._keys(store)) == sorted(keys)
        left_early = store.list(self.base)
        assert len(next(left_early)) > 0
        left_early.close()  # type: ignore[attr-defined]
        if store.sorted_listing:
            keys.sort()
            assert self._keys(store) == keys
            for after in (keys[0], keys[1000], keys[-2], "3/", "3", "3/00", "zzz"):
                pages = store.list(self.base, start_after=self.base + after)
                found = [o.key.removeprefix(self.base) for page in pages for o in page]
                assert found == [key for key in keys if key > after]

    def test_an_object_overwritten_with_other_bytes_has_changed(self, store: ObjectStore) -> None:
        ref = self._put(store, "a", b"first")
        store.put(ref.key, b"other!")
        if not ref.version:
            self._expect(ObjectChangedError, store, ref)

    def test_an_object_overwritten_with_as_many_bytes_has_changed(self, store: ObjectStore) -> None:
        if not self.has_etags:
            pytest.skip("this store has nothing that tells such objects apart")
        ref = self._put(store, "a", b"first")
        store.put(ref.key, b"other")
        if not ref.version:
            self._expect(ObjectChangedError, store, ref)

    @pytest.mark.parametrize("size_bytes", [0, 5, 40 * 2**20 + 3])
    def test_a_file_is_put_whole(self, store: ObjectStore, tmp_path: Path, size_bytes: int) -> None:
        data = (bytes(range(251)) * (size_bytes // 251 + 1))[:size_bytes]
        file = tmp_path / "file.put"
        file.write_bytes(data)
        info = store.put_file(f"{self.base}a.tar", file)
        head = store.head(info.key)
        assert (head.size_bytes, head.etag) == (size_bytes, info.etag)
        ref = info.ref(store.url)
        parts = [(at, min(at + 2**24, size_bytes)) for at in range(0, size_bytes, 2**24)]
        assert b"".join(store.read(ref, *part) for part in parts) == data
        assert file.read_bytes() == data
        file.write_bytes(b"other")
        assert store.put_file(f"{self.base}a.tar", file).size_bytes == 5
        assert store.read(store.head(info.key).ref(store.url), 0, 5) == b"other"

    def test_a_file_that_is_not_there_puts_nothing(self, store: ObjectStore, tmp_path: Path) -> None:
        with pytest.raises(OSError, match=r"."):
            store.put_file(f"{self.base}a.tar", tmp_path / "missing")
        with pytest.raises(ObjectNotFoundError):
            store.head(f"{self.base}a.tar")

    def test_a_wrong_size_or_etag_is_never_read_around(self, store: ObjectStore) -> None:
        ref = self._put(store, "a", b"0123456789")
        for wrong in (ref._replace(size_bytes=9), ref._replace(size_bytes=11)):
            with pytest.raises(ObjectChangedError):
                store.read(wrong, 2, 4)
            with pytest.raises(ObjectChangedError):
                store.read(wrong, 0, wrong.size_bytes)
        if self.has_etags:
            self._expect(ObjectChangedError, store, ref._replace(etag="0" * 32))

    def test_a_deleted_object_is_not_found(self, store: ObjectStore) -> None:
        ref = self._put(store, "a", b"first")
        store.delete(ref.key)
        store.delete(ref.key)
        if not ref.version:
            self._expect(ObjectNotFoundError, store, ref)
        with pytest.raises(ObjectNotFoundError) as caught:
            store.head(ref.key)
        assert ref.key in str(caught.value)
        assert isinstance(caught.value, StoreError)

    def test_an_object_that_never_was_is_not_found(self, store: ObjectStore) -> None:
        self._expect(ObjectNotFoundError, store, ObjectRef(store.url, f"{self.base}no/such", 3, "e"))

    def test_threads_read_at_the_same_time(self, store: ObjectStore) -> None:
        refs = [self._put(store, f"t{n}", bytes([n]) * (1000 + n)) for n in range(16)]

        def check(number: str) -> None:
            ref = refs[int(number) % 16]
            assert store.read(ref, 0, ref.size_bytes) == bytes([int(number) % 16]) * ref.size_bytes

        _in_threads([str(n) for n in range(64)], check)

    def test_what_many_reads_at_once_gave_stays_as_it_is(self, store: ObjectStore) -> None:
        refs = [self._put(store, f"t{n}", bytes([n]) * (1000 + n)) for n in range(16)] * 4
        with ThreadPoolExecutor(len(refs)) as pool:
            given = list(pool.map(lambda ref: store.read(ref, 0, ref.size_bytes), refs))
        store.close()
        for number, data in enumerate(given):
            assert data == bytes([number % 16]) * (1000 + number % 16)

    def test_it_works_after_close(self, store: ObjectStore) -> None:
        ref = self._put(store, "a", b"first")
        store.close()
        assert store.read(ref, 0, 5) == b"first"

    # --- what the tests above share ---

    def _put(self, store: ObjectStore, key: str, data: bytes) -> ObjectRef:
        return store.put(self.base + key, data).ref(store.url)

    def _listed(self, store: ObjectStore, prefix: str = "") -> list[ObjectInfo]:
        return [info for page in store.list(self.base + prefix) for info in page]

    def _keys(self, store: ObjectStore, prefix: str = "") -> list[str]:
        return [info.key.removeprefix(self.base) for info in self._listed(store, prefix)]

    def _expect(self, error: type[StoreError], store: ObjectStore, ref: ObjectRef) -> None:
        for start, stop in ((0, ref.size_bytes), (1, 2)):
            with pytest.raises(error):
                store.read(ref, start, stop)


def _bytes(key: str) -> bytes:
    return key.encode("utf-8", "surrogateescape")


def _in_threads(items: Iterable[str], call: object) -> None:
    """Call for each item from eight threads; the first error is raised."""
    assert callable(call)
    todo = iter(items)
    lock = threading.Lock()
    errors: list[BaseException] = []

    def work() -> None:
        while not errors:
            with lock:
                item = next(todo, None)
            if item is None:
                return
            try:
                call(item)
            except BaseException as exc:  # noqa: BLE001 - handed to the test
                errors.append(exc)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
