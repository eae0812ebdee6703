"""Test who may have a data set."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from datacache.catalog.access import Access, access_of, check_access, inherit_access, open_to, set_access
from datacache.catalog.commit import commit_manifest
from datacache.catalog.sqlite.catalog import SqliteCatalog
from datacache.core.errors import AccessDeniedError, CatalogError, OtherKindError, SnapshotNotFoundError, UsageError
from datacache.manifest.builder import ManifestBuilder
from datacache.manifest.model import Entry, Lineage, Naming, Source
from tests.conformance.catalog import a_record, run_together
from tests.promises import promise


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[SqliteCatalog]:
    catalog = SqliteCatalog(tmp_path / "catalog.db")
    catalog.commit(a_record("mask"), tags=["secret-tag"])
    yield catalog
    catalog.close()


def allowed(catalog: SqliteCatalog, namespace: str, *, dataset: str = "mask", default: str = "none") -> bool:
    try:
        check_access(catalog, dataset, namespace, default=default)
    except AccessDeniedError:
        return False
    return True


@promise("A data set with a list is open to the namespaces on it only; one without goes by `DATACACHE_ACCESS`")
def test_without_a_list_the_setting_decides(catalog: SqliteCatalog) -> None:
    assert allowed(catalog, "team-a", default="all")
    assert not allowed(catalog, "team-a", default="none")
    assert not access_of(catalog, "mask", default="all").listed


@promise("A data set with a list is open to the namespaces on it only; one without goes by `DATACACHE_ACCESS`")
def test_a_list_decides_whatever_the_setting_says(catalog: SqliteCatalog) -> None:
    set_access(catalog, "mask", allow=["team-a", "team-b"])
    for default in ("all", "none"):
        assert allowed(catalog, "team-a", default=default)
        assert not allowed(catalog, "team-c", default=default)
    assert set_access(catalog, "mask", deny=["team-a", "team-c"]) == Access(everybody=False, allowed=("team-b",))
    assert set_access(catalog, "mask", deny=["team-b"]) == Access(everybody=False)
    assert not allowed(catalog, "team-b", default="all")


def test_to_all_but_some_and_back(catalog: SqliteCatalog) -> None:
    set_access(catalog, "mask", allow=["team-a"])
    assert set_access(catalog, "mask", everybody=True, deny=["b", "a"]) == Access(everybody=True, denied=("a", "b"))
    assert set_access(catalog, "mask", deny=["d"]) == Access(everybody=True, denied=("a", "b", "d"))
    assert set_access(catalog, "mask", allow=["d"]) == Access(everybody=True, denied=("a", "b"))
    assert allowed(catalog, "c")
    assert not allowed(catalog, "a", default="all")
    assert set_access(catalog, "mask", allow=["a", "c"]) == Access(everybody=True, denied=("b",))
    assert set_access(catalog, "mask", everybody=False) == Access(everybody=False)
    assert not allowed(catalog, "c", default="all")


def test_one_that_shuts_somebody_out_is_not_open_to_whoever_is_not_known(catalog: SqliteCatalog) -> None:
    assert access_of(catalog, "mask", default="all").without_exception
    assert not set_access(catalog, "mask", deny=["guests"]).without_exception
    assert set_access(catalog, "mask", allow=["guests"]).without_exception
    assert not set_access(catalog, "mask", allow=["guests"]).without_exception


@promise("A refused namespace hears how to get the data set, and not even whether it exists")
def test_who_may_not_have_it_hears_how_to_get_it_and_nothing_else(catalog: SqliteCatalog) -> None:
    said = []
    for name in ("mask", "nosuch"):
        with pytest.raises(AccessDeniedError) as caught:
            check_access(catalog, name, "team-b", default="none")
        assert "secret-tag" not in caught.value.message + caught.value.hint
        said.append((caught.value.message.replace(name, "X"), caught.value.hint.replace(name, "X")))
    assert said[0] == said[1]  # whether there is such a data set is not told either
    assert said[0][0] == "data set X is not open to namespace team-b"
    assert "dsctl dataset access X --allow team-b" in said[0][1]


def test_a_namespace_is_shown_what_is_open_to_it(catalog: SqliteCatalog) -> None:
    for number in range(3):
        catalog.commit(a_record(f"d{number}"))
    set_access(catalog, "d0", allow=["team-a"])
    set_access(catalog, "d1", allow=["team-b"])
    assert open_to(catalog, "team-a", default="none") == ["d0"]
    assert open_to(catalog, "team-a", default="all") == ["d0", "d2", "mask"]


@promise("A list stays when all snapshots are removed and made anew")
def test_a_list_stays_when_the_data_set_goes_and_comes_back(catalog: SqliteCatalog) -> None:
    set_access(catalog, "mask", allow=["team-a"])
    catalog.remove_snapshot("mask", a_record("mask").id)
    assert not allowed(catalog, "team-b", default="all")
    set_access(catalog, "mask", allow=["team-c"])
    catalog.commit(a_record("mask", 2))
    assert access_of(catalog, "mask", default="all") == Access(everybody=False, allowed=("team-a", "team-c"))


def test_a_data_set_that_is_not_there_gets_no_list(catalog: SqliteCatalog) -> None:
    with pytest.raises(SnapshotNotFoundError) as caught:
        set_access(catalog, "nosuch", allow=["team-a"])
    assert "mask" in caught.value.hint
    assert catalog.documents("access") == []


@pytest.mark.parametrize("name", ["", "Team", "a_b", "-a", "a-", "a.b", "a" * 64, "ä", "a\n"])
def test_what_is_no_namespace_is_refused(catalog: SqliteCatalog, name: str) -> None:
    with pytest.raises(UsageError):
        set_access(catalog, "mask", allow=[name])
    with pytest.raises(UsageError):
        check_access(catalog, "mask", name, default="all")


@promise("A list that cannot be understood opens nothing")
@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[]",
        "[" * 100_000,
        '{"version": 2, "everybody": true, "allowed": [], "denied": []}',
        '{"version": 1, "everybody": "false", "allowed": [], "denied": []}',
        '{"version": 1, "everybody": [0], "allowed": [], "denied": []}',
        '{"version": 1, "everybody": true, "allowed": [], "denied": "team-a"}',
        '{"version": 1, "everybody": true, "allowed": [], "denied": {"names": ["team-a"]}}',
        '{"version": 1, "everybody": true, "allowed": [], "denied": ["Team-a "]}',
        '{"version": 1, "everybody": false, "everybody": true, "allowed": [], "denied": []}',
        '{"version": 1, "everybody": false, "allowed": "team-a", "denied": []}',
        '{"version": 1, "everybody": false, "allowed": ["team-a", "Team-b "], "denied": []}',
        '{"version": 1, "everybody": true, "allowed": [], "denied": [], "made_of": "a", "within_default": 0}',
    ],
)
def test_a_list_that_cannot_be_understood_opens_nothing(catalog: SqliteCatalog, text: str) -> None:
    catalog.set_document("access", "mask", text, old=None)
    with pytest.raises(CatalogError, match="cannot be understood"):
        check_access(catalog, "mask", "team-a", default="all")


def test_processes_that_change_a_list_at_once_lose_nothing(catalog: SqliteCatalog) -> None:
    def work(process: int) -> None:
        own = SqliteCatalog(catalog.path)
        for number in range(10):
            set_access(own, "mask", allow=[f"n{process}-{number}"])

    run_together(4, work)
    assert len(access_of(catalog, "mask", default="all").allowed) == 40


@pytest.mark.parametrize("others", [["team-b"], ["team-b", "team-c"], ["team-b", "team-c", "team-d"]])
def test_a_change_between_the_reading_and_the_writing_of_a_list_is_kept(
    catalog: SqliteCatalog, monkeypatch: pytest.MonkeyPatch, others: list[str]
) -> None:
    coming = iter(others)
    read, other = catalog.document, SqliteCatalog(catalog.path)

    def document(kind: str, name: str) -> str | None:
        text = read(kind, name)
        if namespace := next(coming, None):
            set_access(other, "mask", allow=[namespace])
        return text

    monkeypatch.setattr(catalog, "document", document)
    set_access(catalog, "mask", allow=["team-a"])
    assert access_of(other, "mask", default="all").allowed == ("team-a", *others)
    other.close()


# --- what is made of a data set ---------------------------------------------------------------------------------------


def made(catalog: SqliteCatalog, name: str, *inputs: str, content: int = 0, replace: bool = True) -> None:
    """Commit a snapshot of `name` that is made of snapshots of these data sets."""
    builder = ManifestBuilder([Source("s3://faces", "")], catalog.put_blobs)
    builder.add(Entry(b"file", 10 + content, 0, f"{content:032x}"))
    lineage = Lineage("convert", {}, tuple(f"{each}@{'0' * 32}" for each in inputs))
    commit_manifest(catalog, builder, Naming(name=name, replace=replace), origin="", lineage=lineage)


@promise("A derived data set inherits its source's list before it can be seen, of several the intersection")
def test_what_is_made_of_a_closed_data_set_is_open_to_no_others_and_that_is_said(
    catalog: SqliteCatalog, caplog: pytest.LogCaptureFixture
) -> None:
    set_access(catalog, "mask", everybody=False, allow=["lab"])
    made(catalog, "yolo", "mask")
    for default in ("all", "none"):
        assert allowed(catalog, "lab", dataset="yolo", default=default)
        assert not allowed(catalog, "guests", dataset="yolo", default=default)
    (said,) = caplog.messages
    assert said == "yolo is made of mask, so it is open to lab, as that is; see: dsctl dataset access yolo"
    made(catalog, "shards", "yolo")  # and so on
    assert not allowed(catalog, "guests", dataset="shards", default="all")
    made(catalog, "free", "nothing")
    assert not access_of(catalog, "free", default="all").listed
    set_access(catalog, "mask", everybody=True, deny=["guests"])
    made(catalog, "later", "mask")
    assert access_of(catalog, "later", default="none").denied == ("guests",)


@promise("A derived data set inherits its source's list before it can be seen, of several the intersection")
def test_what_is_made_of_several_is_open_to_whom_all_are(catalog: SqliteCatalog) -> None:
    for name in ("face", "hand", "plain"):
        catalog.commit(a_record(name))
    set_access(catalog, "mask", everybody=False, allow=["lab", "team"])
    set_access(catalog, "face", everybody=False, allow=["lab", "guests"])
    set_access(catalog, "hand", everybody=True, deny=["lab"])
    made(catalog, "a", "mask", "face")
    assert access_of(catalog, "a", default="all").allowed == ("lab",)
    made(catalog, "b", "mask", "hand")
    assert access_of(catalog, "b", default="all").allowed == ("team",)
    made(catalog, "c", "mask", "face", "hand")
    assert str(access_of(catalog, "c", default="all")) == "no namespace"
    made(catalog, "d", "mask", "plain")  # of which one goes by the setting
    assert allowed(catalog, "lab", dataset="d", default="all")
    assert not allowed(catalog, "lab", dataset="d", default="none")
    assert not allowed(catalog, "guests", dataset="d", default="all")


@promise("A derived data set inherits its source's list before it can be seen, of several the intersection")
def test_a_name_that_was_open_closes_when_something_closed_goes_into_it(catalog: SqliteCatalog) -> None:
    catalog.commit(a_record("face"))
    made(catalog, "mixed", "face")
    set_access(catalog, "mask", everybody=False, allow=["lab"])
    made(catalog, "mixed", "mask", content=1)
    assert allowed(catalog, "lab", dataset="mixed", default="all")
    assert not allowed(catalog, "lab", dataset="mixed", default="none")  # it went by the setting before
    assert not allowed(catalog, "guests", dataset="mixed", default="all")


@promise("A derived data set inherits its source's list before it can be seen, of several the intersection")
def test_what_a_data_set_without_a_list_went_into_stays_within_the_setting(catalog: SqliteCatalog) -> None:
    for name in ("plain", "hand"):
        catalog.commit(a_record(name))
    for name in ("mask", "hand"):
        set_access(catalog, name, everybody=False, allow=["lab"])
    made(catalog, "mixed", "mask", "plain")
    made(catalog, "mixed", "mask", "hand", content=1)  # older versions still have what was in `plain`
    assert allowed(catalog, "lab", dataset="mixed", default="all")
    assert not allowed(catalog, "lab", dataset="mixed", default="none")


@promise("A derived data set inherits its source's list before it can be seen, of several the intersection")
def test_a_list_that_was_chosen_stands_until_something_else_goes_into_it(catalog: SqliteCatalog) -> None:
    catalog.commit(a_record("face"))
    set_access(catalog, "mask", everybody=False, allow=["lab"])
    set_access(catalog, "face", everybody=False, allow=["team"])
    made(catalog, "yolo", "mask")
    set_access(catalog, "yolo", everybody=True)
    made(catalog, "yolo", "mask", content=1)
    assert allowed(catalog, "guests", dataset="yolo")
    made(catalog, "yolo", "mask", "face", content=2)
    assert not allowed(catalog, "guests", dataset="yolo")
    made(catalog, "inherits", "mask")
    set_access(catalog, "mask", everybody=False, allow=["others"])  # closed more: what was not chosen follows
    made(catalog, "inherits", "mask", content=1)
    assert not allowed(catalog, "lab", dataset="inherits", default="all")


@promise("A derived data set inherits its source's list before it can be seen, of several the intersection")
def test_a_commit_that_is_refused_changes_no_list(catalog: SqliteCatalog) -> None:
    set_access(catalog, "mask", everybody=False, allow=["lab"])
    made(catalog, "open")
    with pytest.raises(OtherKindError):
        made(catalog, "open", "mask", content=1, replace=False)
    assert not access_of(catalog, "open", default="all").listed


@promise("A derived data set inherits its source's list before it can be seen, of several the intersection")
def test_a_list_that_is_set_while_another_is_inherited_is_not_lost(
    catalog: SqliteCatalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalog.commit(a_record("yolo"))
    set_access(catalog, "mask", everybody=False, allow=["lab", "team"])
    read, other = catalog.document, SqliteCatalog(catalog.path)
    coming = iter(["yolo"])

    def document(kind: str, name: str) -> str | None:
        text = read(kind, name)
        if name == "yolo" and next(coming, None):
            set_access(other, "yolo", everybody=False, allow=["lab", "guests"])
        return text

    monkeypatch.setattr(catalog, "document", document)
    inherit_access(catalog, "yolo", ["mask"])
    assert access_of(other, "yolo", default="all").allowed == ("lab",)
    other.close()


def test_what_is_made_of_itself_keeps_the_list_that_was_chosen(catalog: SqliteCatalog) -> None:
    set_access(catalog, "mask", everybody=False, allow=["lab"])
    before = access_of(catalog, "mask", default="all")
    inherit_access(catalog, "mask", ["mask"])
    assert access_of(catalog, "mask", default="all") == before
