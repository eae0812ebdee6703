"""Test what every catalog backend promises of documents, as tests; a part of `testing.catalog.CatalogConformance`."""

from __future__ import annotations

import multiprocessing
import random
from collections.abc import Callable
from typing import Any

import pytest

from datacache.catalog.base import Catalog
from datacache.catalog.open import open_catalog_url
from datacache.core.errors import UsageError
from tests.conformance.killed import reported_until_killed
from tests.promises import promise

_fork = multiprocessing.get_context("fork")


class DocumentsConformance:
    """Needs the fixtures `catalog`, `catalog_url` and `open_again` of the whole suite."""

    @promise("Of several changes of a document (access list, volume) at once one succeeds")
    def test_a_document_is_what_was_set_last_from_what_it_was(
        self, catalog: Catalog, open_again: Callable[[], Catalog]
    ) -> None:
        assert catalog.document("access", "mask") is None
        assert catalog.set_document("access", "mask", "one", old=None)
        assert not catalog.set_document("access", "mask", "late", old=None)
        assert not catalog.set_document("access", "mask", "late", old="another")
        assert not catalog.set_document("access", "other", "late", old="one")
        assert catalog.set_document("access", "mask", "two", old="one")
        assert catalog.set_document("access", "mask", "two", old="two")
        for reader in (catalog, open_again()):
            assert reader.document("access", "mask") == "two"
            assert reader.document("access", "other") is None
            assert reader.document("another", "mask") is None

    def test_a_removed_document_is_gone_and_can_come_back(
        self, catalog: Catalog, open_again: Callable[[], Catalog]
    ) -> None:
        assert not catalog.remove_document("access", "mask")
        catalog.set_document("access", "mask", "one", old=None)
        assert not catalog.remove_document("access", "mask", old="another")
        assert catalog.remove_document("access", "mask", old="one")
        assert not catalog.remove_document("access", "mask", old="one")
        catalog.set_document("access", "mask", "one", old=None)
        assert catalog.remove_document("access", "mask")
        assert not catalog.remove_document("access", "mask")
        assert open_again().document("access", "mask") is None
        assert not catalog.set_document("access", "mask", "two", old="one")
        assert catalog.set_document("access", "mask", "two", old=None)
        assert open_again().document("access", "mask") == "two"

    def test_documents_keep_every_character(self, catalog: Catalog) -> None:
        texts = ["", "\0", "mit Umlaut: ä, 顔 \U0001f637\n", "{$set: 1}", "x" * 1_000_000]
        for number, text in enumerate(texts):
            key = f"a/b.c/$d \0{number}ä"
            assert catalog.set_document("odd-2", key, text, old=None)
            assert catalog.document("odd-2", key) == text
            assert catalog.set_document("odd-2", key, "next", old=text)

    def test_documents_of_a_kind_are_listed_by_key_part_by_part(self, catalog: Catalog) -> None:
        keys = ["b", "a", "B", "a/b", "a.b", "ä", "顔", "\U0001f637", "a" * 1024, "a 1", "~"]
        for kind in ("volume", "volume-2", "volum", "w"):
            assert catalog.documents(kind) == []
            for key in keys:
                catalog.set_document(kind, key, f"{kind} {key}", old=None)
        expected = [(key, f"volume {key}") for key in sorted(keys)]
        assert catalog.documents("volume") == expected
        assert catalog.documents("volume", limit=4) == expected[:4]
        assert catalog.documents("volume", after=expected[3][0], limit=4) == expected[4:8]
        assert catalog.documents("volume", after="\U0001f637") == []
        assert catalog.documents("volume", limit=0) == []

    @pytest.mark.parametrize(
        ("kind", "key", "text"),
        [
            ("", "a", ""),
            ("a/b", "a", ""),
            ("A", "a", ""),
            ("a", "", ""),
            ("a", "k" * 1025, ""),
            ("a", "\udc80", ""),
            ("a", "b", "\udc80"),
        ],
    )
    def test_what_can_be_no_document_is_refused(self, catalog: Catalog, kind: str, key: str, text: str) -> None:
        with pytest.raises(UsageError):
            catalog.set_document(kind, key, text, old=None)

    @promise("Of several changes of a document (access list, volume) at once one succeeds")
    def test_of_processes_that_set_at_once_none_loses_what_another_has_set(
        self, catalog: Catalog, catalog_url: str
    ) -> None:
        start = _fork.Barrier(4)
        children = [_fork.Process(target=_count, args=(catalog_url, start, 15)) for _process in range(4)]
        for child in children:
            child.start()
        for child in children:
            child.join(120)
        assert [child.exitcode for child in children] == [0] * 4
        assert catalog.document("counter", "one") == "60"

    @promise("Acknowledged documents survive a killed writer and a broken connection")
    def test_a_killed_writer_of_documents_loses_nothing_it_was_told_is_done(
        self, catalog: Catalog, catalog_url: str
    ) -> None:
        chance = random.Random(5)
        for round_number in range(5):
            reports = reported_until_killed(
                _set_until_killed, catalog_url, f"k{round_number}", after_s=chance.uniform(0.01, 0.1)
            )
            done = reports[-1]
            there = catalog.document("killed", f"k{round_number}")
            assert there in (str(done), str(done + 1))
            if not catalog.set_document("killed", f"k{round_number}", "after", old=there):
                # A server goes on for a moment with what a killed writer had asked for.
                assert catalog.set_document("killed", f"k{round_number}", "after", old=str(done + 1))


def _count(url: str, start: Any, times: int) -> None:
    catalog = open_catalog_url(url)
    start.wait(30)
    done = 0
    while done < times:
        old = catalog.document("counter", "one")
        done += catalog.set_document("counter", "one", str(int(old or 0) + 1), old=old)


def _set_until_killed(url: str, key: str, sending: Any) -> None:
    catalog = open_catalog_url(url)
    old, number = None, 1
    while True:
        assert catalog.set_document("killed", key, str(number), old=old)
        sending.send(number)
        old, number = str(number), number + 1
