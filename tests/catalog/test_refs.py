"""`NAME@id|tag|latest`."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datacache.catalog.refs import (
    Ref,
    check_name,
    check_tag,
    forget_volume,
    parse_ref,
    plan_removal,
    remove,
    resolve,
    volume_snapshot,
)
from datacache.catalog.sqlite.catalog import SqliteCatalog
from datacache.core.errors import SnapshotNotFoundError, TagExistsError, UsageError
from datacache.manifest.model import SnapshotRecord
from tests.promises import promise

GOOD_NAMES = ["mask", "a", "0", "team/mask", "a.b-c_d/2024", "A" * 128]
BAD_NAMES = ["", "/", "a/", "/a", "a//b", ".a", "-a", "a b", "a@b", "ä", "a\n", "A" * 129, "a/../b", "a:b"]


def record(id: str, *, dataset: str = "mask") -> SnapshotRecord:
    return SnapshotRecord(
        dataset=dataset, id=id, created_at="2026-01-01T00:00:00Z", origin="s3://b/", files=1, total_bytes=1
    )


@pytest.fixture
def catalog(tmp_path: Path) -> SqliteCatalog:
    return SqliteCatalog(tmp_path / "catalog.db")


@pytest.mark.parametrize("name", GOOD_NAMES)
def test_a_name_is_letters_digits_and_a_few_signs(name: str) -> None:
    assert check_name(name) == name
    assert parse_ref(name) == Ref(name, "latest")
    assert parse_ref(f"{name}@v1") == Ref(name, "v1")
    assert str(parse_ref(f"{name}@v1")) == f"{name}@v1"


@pytest.mark.parametrize("name", BAD_NAMES)
def test_anything_else_is_no_name(name: str) -> None:
    with pytest.raises(UsageError):
        check_name(name)
    with pytest.raises(UsageError):
        parse_ref(f"{name}@v1@v2" if "@" in name else name)


@pytest.mark.parametrize("ref", ["mask@", "mask@@v1", "mask@a/b", "mask@-v", "mask@v 1", "@v1"])
def test_what_is_no_reference_is_refused(ref: str) -> None:
    with pytest.raises(UsageError):
        parse_ref(ref)


@pytest.mark.parametrize("tag", ["latest", "", "a/b", "-a", "a@b", "a\n"])
def test_what_cannot_be_a_tag_is_refused(tag: str) -> None:
    with pytest.raises(UsageError):
        check_tag(tag)


@given(st.text(max_size=20))
def test_parsing_gives_a_reference_or_a_usage_error(text: str) -> None:
    try:
        ref = parse_ref(text)
    except UsageError:
        return
    assert str(ref) == text or str(ref) == f"{text}@latest"


def test_a_reference_names_latest_a_tag_an_id_or_its_first_digits(catalog: SqliteCatalog) -> None:
    first, second = record("abcdef" + "0" * 26), record("123456" + "0" * 26)
    catalog.commit(first, tags=["v1"])
    catalog.commit(second)
    assert resolve(catalog, "mask") == second
    assert resolve(catalog, "mask@latest") == second
    assert resolve(catalog, "mask@v1") == first
    assert resolve(catalog, f"mask@{first.id}") == first
    assert resolve(catalog, "mask@abcdef") == first
    assert resolve(catalog, first.ref) == first


def test_a_tag_goes_before_an_id_of_the_same_digits(catalog: SqliteCatalog) -> None:
    first, second = record("abcdef" + "0" * 26), record("123456" + "0" * 26)
    catalog.commit(first)
    catalog.commit(second, tags=["abcdef"])
    assert resolve(catalog, "mask@abcdef") == second


def test_a_whole_id_is_that_snapshot_whatever_is_tagged_with_it(catalog: SqliteCatalog) -> None:
    first, second = record("abcdef" + "0" * 26), record("123456" + "0" * 26)
    catalog.commit(first)
    catalog.commit(second, tags=[first.id])
    assert resolve(catalog, f"mask@{first.id}") == first


def test_an_ambiguous_or_too_short_id_is_not_guessed(catalog: SqliteCatalog) -> None:
    catalog.commit(record("abcdef0" + "0" * 25))
    catalog.commit(record("abcdef1" + "0" * 25))
    with pytest.raises(SnapshotNotFoundError, match="names 2 snapshots"):
        resolve(catalog, "mask@abcdef")
    with pytest.raises(SnapshotNotFoundError):
        resolve(catalog, "mask@abcde")
    assert resolve(catalog, "mask@abcdef1").id.startswith("abcdef1")


@promise("A mistyped command, data set, tag or short id is answered with what may be meant")
def test_a_failure_says_what_there_is_instead(catalog: SqliteCatalog) -> None:
    with pytest.raises(SnapshotNotFoundError, match="no dataset 'mask'") as caught:
        resolve(catalog, "mask@v1")
    assert "snapshot create" in caught.value.hint
    catalog.commit(record("a" * 32), tags=["v1"])
    with pytest.raises(SnapshotNotFoundError, match="no dataset 'msk'") as caught:
        resolve(catalog, "msk@v1")
    assert "mask" in caught.value.hint
    assert caught.value.hint.startswith("Did you mean mask?")
    assert caught.value.ref == "msk@v1"
    with pytest.raises(SnapshotNotFoundError, match="no dataset 'mask/images'") as caught:
        resolve(catalog, "mask/images")
    assert "stands behind a version: mask@latest/images." in caught.value.hint
    with pytest.raises(SnapshotNotFoundError) as caught:
        resolve(catalog, "mask@aaaaa")
    assert "at least 6 of its digits" in caught.value.hint
    with pytest.raises(SnapshotNotFoundError) as caught:
        resolve(catalog, "mask@v1.")
    assert "mask@v1?" in caught.value.hint
    with pytest.raises(SnapshotNotFoundError, match="v2") as caught:
        resolve(catalog, "mask@v2")
    assert "v1" in caught.value.hint


def test_a_whole_id_that_is_not_here_is_sought_in_other_catalogs(catalog: SqliteCatalog) -> None:
    ref = "mask@" + "b" * 32
    with pytest.raises(SnapshotNotFoundError, match="no dataset 'mask'") as caught:
        resolve(catalog, ref)
    assert f"dsctl snapshot pull {ref} URL" in caught.value.hint
    catalog.commit(record("a" * 32), tags=["v1"])
    with pytest.raises(SnapshotNotFoundError, match="no tag or snapshot") as caught:
        resolve(catalog, ref)
    assert f"dsctl snapshot pull {ref} URL" in caught.value.hint


FIRST, SECOND = record("abcdef" + "0" * 26), record("123456" + "0" * 26)


def test_a_removal_is_done_only_while_the_tags_are_as_they_were_planned(catalog: SqliteCatalog) -> None:
    catalog.commit(FIRST, tags=["a", "b"])
    of_tag, of_all = plan_removal(catalog, "mask@a"), plan_removal(catalog, "mask@latest", all_tags=True)
    assert (of_tag.tags, of_tag.kept_tags, of_tag.of_snapshot) == (("a",), ("b",), False)
    assert (of_all.tags, of_all.kept_tags, of_all.of_snapshot) == (("a", "b"), (), True)
    catalog.remove_tag("mask", "b", id=FIRST.id)
    assert not remove(catalog, of_tag)  # it would be the last name
    catalog.set_tag("mask", "c", FIRST.id)
    assert not remove(catalog, of_all)  # nobody said that this name may go
    assert catalog.dataset("mask").tags == {"a": FIRST.id, "c": FIRST.id}
    assert remove(catalog, plan_removal(catalog, "mask@a"))
    assert remove(catalog, plan_removal(catalog, "mask@c"))
    assert catalog.snapshot("mask", FIRST.id) is None


def test_a_removal_says_what_is_latest_afterwards(catalog: SqliteCatalog) -> None:
    third = record("fedcba" + "0" * 26)
    for each in (FIRST, SECOND, third):
        catalog.commit(each)
    for removed, latest in ((FIRST, third), (third, SECOND), (SECOND, None)):
        planned = plan_removal(catalog, f"mask@{removed.id}")
        assert planned.latest == ("" if latest is None else latest.id)
        assert remove(catalog, planned)
        dataset = catalog.dataset("mask")
        assert (dataset and dataset.latest) == (latest and latest.id)


def test_a_tag_that_looks_like_the_snapshots_own_id_is_no_other_name_for_it(catalog: SqliteCatalog) -> None:
    catalog.commit(FIRST, tags=[FIRST.id])
    with pytest.raises(TagExistsError):
        plan_removal(catalog, f"mask@{FIRST.id}")


def test_of_two_nodes_that_resolve_a_volume_at_once_both_show_the_first_answer(catalog: SqliteCatalog) -> None:
    def slow() -> str:
        assert volume_snapshot(catalog, "pv", "mask@v1", lambda: "mask@first") == "mask@first"
        return "mask@second"

    assert volume_snapshot(catalog, "pv", "mask@v1", slow) == "mask@first"
    assert volume_snapshot(catalog, "pv", "mask@v2", lambda: "mask@third") == "mask@third"  # another reference
    assert volume_snapshot(catalog, "other", "mask@v1", lambda: "mask@fourth") == "mask@fourth"
    assert forget_volume(catalog, "pv")
    assert not forget_volume(catalog, "pv")
    assert volume_snapshot(catalog, "pv", "mask@v2", lambda: "mask@fifth") == "mask@fifth"
