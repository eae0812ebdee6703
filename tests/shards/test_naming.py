"""Keys, held against the rule of the real webdataset package."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from webdataset.tariterators import base_plus_ext

from datacache.shards.samples import Names, group_key, image_key

names = st.text(
    st.one_of(
        st.sampled_from(".._ab-é日\n\x00\x7f%\\ "),
        st.characters(exclude_categories=["Cs"], exclude_characters="/"),
        st.characters(min_codepoint=0xDC80, max_codepoint=0xDCFF),
    ),
    min_size=1,
    max_size=8,
)
paths = st.lists(names, min_size=1, max_size=4).map("/".join)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("a/b.jpg", ("a/b", "jpg")),
        ("a/b.c.JPG", ("a/b_c", "jpg")),
        ("a.b/c.png", ("a.b/c", "png")),
        ("a", ("a", "bin")),
        (".jpg", ("_jpg", "bin")),
        ("../b.jpg", ("%5f_/b", "jpg")),
        ("/b.jpg", ("_/b", "jpg")),
        ("x//y/./b.jpg", ("x/_/y/_/b", "jpg")),
        ("\udcff\n.jpg", ("%ff%0a", "jpg")),
        ("日本/語.jpg", ("日本/語", "jpg")),
        ("__pycache__/b.jpg", ("%5f_pycache__/b", "jpg")),
    ],
)
def test_the_key_of_an_image(path: str, expected: tuple[str, str]) -> None:
    assert image_key(path) == expected


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("a/b.seg.PNG", ("a/b", "seg.png")),
        ("a.b/c.tar.gz", ("a.b/c", "tar.gz")),
        (".hidden", ("_hidden", "bin")),
        (".hidden.x.y", ("_hidden", "x.y")),
    ],
)
def test_the_key_of_a_file_of_a_group(path: str, expected: tuple[str, str]) -> None:
    assert group_key(path) == expected


@given(paths)
def test_webdataset_cuts_every_member_where_we_did(path: str) -> None:
    for key, extension in (image_key(path), group_key(path)):
        member = f"{key}.{extension}"
        assert base_plus_ext(member) == (key, extension)
        assert re.match(r"__[^/]*__($|/)", member) is None
        assert not member.startswith("/")
        assert not {"", ".", ".."} & set(member.split("/"))
        member.encode()


@given(st.lists(st.sampled_from(["a", "a_jpg", "a_2", "b", "a_png"]), max_size=12), st.sampled_from(["jpg", ""]))
def test_every_sample_gets_a_key_of_its_own_and_the_first_its_own(wanted: list[str], extension: str) -> None:
    given_names = Names(wanted)
    keys = [given_names.give(key, extension) for key in wanted]
    assert len(set(keys)) == len(keys)
    again = Names(wanted)
    assert [again.give(key, extension) for key in wanted] == keys
    for at, key in enumerate(wanted):
        if key not in wanted[:at]:
            assert keys[at] == key
    assert given_names.renamed == len(wanted) - len(set(wanted))
