"""Test what is pending, by key, folder and need."""

from __future__ import annotations

import stat

from hypothesis import given
from hypothesis import strategies as st

from datacache.writeback.model import Attributes, Logged, Pending, Stored
from datacache.writeback.overlay import Overlay, name_of, parent_of

FILE = Attributes(stat.S_IFREG | 0o644, 0, 0, 0)


def pending(key: str, *, gone: bool = False, needs: str = "") -> Pending:
    content = Stored(needs, 1, "e") if needs else Logged(0)
    return Pending(key, None if gone else FILE, None if gone or key.endswith("/") else content, "", 1, 0.0)


def test_a_key_lies_in_its_folder_under_its_name():
    assert (parent_of("a/b/c"), name_of("a/b/c")) == ("a/b/", "c")
    assert (parent_of("a/b/"), name_of("a/b/")) == ("a/", "b/")
    assert (parent_of("a"), name_of("a")) == ("", "a")


def test_folders_above_a_pending_key_are_known_until_it_goes():
    overlay = Overlay()
    overlay.set(pending("a/b/c"))
    assert overlay.names("") == ["a/"]
    assert overlay.names("a/") == ["b/"]
    assert list(overlay.below("a/")) == ["a/b/c"]
    overlay.drop("a/b/c")
    assert overlay.names("") == overlay.names("a/") == []
    assert not overlay.anything_below("a/")


def test_a_folder_with_a_pending_marker_stays_when_what_was_in_it_goes():
    overlay = Overlay()
    overlay.set(pending("a/"))
    overlay.set(pending("a/b"))
    overlay.drop("a/b")
    assert overlay.names("") == ["a/"]
    overlay.drop("a/")
    assert overlay.names("") == []


def test_deletions_do_not_make_a_folder_be_there():
    overlay = Overlay()
    overlay.set(pending("a/b", gone=True))
    assert overlay.anything_below("a/")
    assert not overlay.exists_below("a/")
    overlay.set(pending("a/c/d"))
    assert overlay.exists_below("a/")


def test_who_needs_an_object_is_known_as_long_as_it_does():
    overlay = Overlay()
    overlay.set(pending("new", needs="old"))
    overlay.set(pending("own", needs="own"))
    assert overlay.needed_by("old") == ["new"]
    assert overlay.needed_by("own") == []
    overlay.set(pending("new"))
    assert overlay.needed_by("old") == []


keys = st.lists(st.sampled_from("ab"), min_size=1, max_size=3).map("/".join) | st.lists(
    st.sampled_from("ab"), min_size=1, max_size=3
).map(lambda names: "/".join(names) + "/")


@given(st.lists(st.tuples(st.booleans(), keys), max_size=30))
def test_names_and_what_lies_below_agree_with_the_keys(steps):
    overlay = Overlay()
    expected: set[str] = set()
    for adds, key in steps:
        if adds:
            overlay.set(pending(key))
            expected.add(key)
        else:
            overlay.drop(key)
            expected.discard(key)
        for folder in ("", "a/", "b/", "a/b/", "a/a/"):
            inside = {k for k in expected if k.startswith(folder) and k != folder}
            assert sorted(overlay.below(folder)) == sorted(inside)
            names = set()
            for k in inside:
                first, slash, _ = k[len(folder) :].partition("/")
                names.add(first + slash)
            assert set(overlay.names(folder)) == names
    assert {p.key for p in overlay} == expected
