"""Lists of classes: reading, writing, order."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datacache.annotations.check import clean_label
from datacache.annotations.classes import class_order, read_classes, read_data_yaml, write_classes
from datacache.core.errors import AnnotationError, UsageError
from tests.annotations.shapes import cases

labels = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12).map(clean_label).filter(bool)


def test_a_list_has_one_name_a_line():
    assert read_classes(b"mask\nno_mask\n", "c") == ("mask", "no_mask")
    assert read_classes(b"mask\r\nno mask\r\n\r\n\n", "c") == ("mask", "no mask")
    assert read_classes(b"\xef\xbb\xbf mask \nno_mask", "c") == ("mask", "no_mask")
    assert read_classes(b"", "c") == read_classes(b"\xef\xbb\xbf\n", "c") == ()


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "gb18030"])
def test_names_are_read_in_the_encodings_of_common_editors(encoding):
    assert read_classes("口罩\n无口罩\n".encode(encoding), "c") == ("口罩", "无口罩")


def test_what_could_mean_two_orders_is_an_error_that_names_the_line():
    with pytest.raises(UsageError, match=r"obj.names, line 3: the class 'a' is in line 1"):
        read_classes(b"a\nb\na\n", "obj.names")
    with pytest.raises(UsageError, match=r"obj.names, line 2: a blank line"):
        read_classes(b"a\n\nb\n", "obj.names")
    with pytest.raises(UsageError, match=r"line 1: a blank line"):
        read_classes(b"\na\n", "obj.names")
    with pytest.raises(UsageError, match="not in UTF-8"):
        read_classes(b"\xff\xff\xff", "obj.names")


@cases
@given(st.lists(labels, unique=True, max_size=6))
def test_what_is_written_is_read_again(names):
    assert read_classes(write_classes(names), "c") == tuple(names)


def test_a_name_that_no_line_can_hold_is_not_written():
    for name in ("", " a", "a\nb", "a\rb", "\udc80"):
        with pytest.raises(UsageError, match="cannot be written"):
            write_classes(["good", name])
    with pytest.raises(UsageError):
        write_classes(["a", "a"])


def test_ids_stay_what_they_were_when_classes_are_added():
    assert class_order({"b", "a"}) == ("a", "b")
    assert class_order({"b", "a", "c"}, None, ("b", "z")) == ("b", "z", "a", "c")
    assert class_order({"b", "a"}, None, ()) == ("a", "b")


def test_a_given_order_is_kept_whatever_was_found():
    assert class_order({"x"}, ("b", "a"), ("a", "b")) == ("b", "a")
    with pytest.raises(UsageError, match="'a' is given twice"):
        class_order(set(), ("a", "b", "a"))


def test_names_of_a_data_yaml_may_be_a_list_or_a_mapping():
    assert read_data_yaml(b"names: [mask, no_mask]\n", "d").classes == ("mask", "no_mask")
    assert read_data_yaml(b"names:\n  1: no_mask\n  0: mask\n", "d").classes == ("mask", "no_mask")
    assert read_data_yaml(b"names: {0: a, 2: c}\n", "d").classes == ("a", "class_1", "c")
    assert read_data_yaml(b"nc: 2\n", "d").classes == ("class_0", "class_1")
    assert read_data_yaml(b"names: []\n", "d").classes == ()


def test_a_name_is_what_is_written_and_not_what_yaml_makes_of_it():
    content = read_data_yaml(b"names: [yes, 010, 1.0, null, 2020-01-01, ' x ']\n", "d")
    assert content.classes == ("yes", "010", "1.0", "null", "2020-01-01", "x")


def test_a_data_yaml_says_where_splits_are_and_whether_there_are_keypoints():
    content = read_data_yaml(b"train: ../train/images\nval: [a, b]\ntest:\nnames: [x]\nkpt_shape: [17, 3]\n", "d")
    assert content.folders == {"train": ("../train/images",), "val": ("a", "b")}
    assert content.pose is not None
    assert len(content.pose.names) == 17
    assert read_data_yaml(b"valid: v\nnames: [x]\n", "d").folders == {"val": ("v",)}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"just text",
        b"- a\n",
        b"train: x\n",
        b"names: mask\n",
        b"names: {a: b}\n",
        b"names: {-1: b}\n",
        b"names: {999999999: b}\n",
        b"names: [[a]]\n",
        b"names: [a, a]\n",
        b"names: &a [*a]\n",
        b"names: [a\n",
        b"names: [\x00]\n",
        b"nc: many\n",
        b"\xff\xff\xff",
        b"!!python/object/apply:os.system [x]\n",
        b"[" * 5000,
        b"a: " * 3000,
    ],
)
def test_a_data_yaml_without_usable_names_is_an_error_of_ours(data):
    with pytest.raises(AnnotationError) as caught:
        read_data_yaml(data, "d/data.yaml")
    assert caught.value.code == "classes-unusable"
    assert caught.value.file == "d/data.yaml"
    assert caught.value.hint


def test_the_line_of_broken_yaml_is_named():
    with pytest.raises(AnnotationError) as caught:
        read_data_yaml(b"train: x\nnames: [a\nval: y: z\n", "d")
    assert caught.value.line >= 2


@given(st.one_of(st.binary(max_size=60), st.text("names:nc[]{}0123, \n-&*!|>'\"a%", max_size=60).map(str.encode)))
@settings(max_examples=400, deadline=None)
def test_no_data_yaml_raises_anything_else(data):
    with suppress(AnnotationError):
        read_data_yaml(data, "d")


@given(st.binary(max_size=60))
@settings(max_examples=300, deadline=None)
def test_no_list_of_classes_raises_anything_else(data):
    try:
        names = read_classes(data, "c")
    except UsageError:
        return
    assert len(set(names)) == len(names)
