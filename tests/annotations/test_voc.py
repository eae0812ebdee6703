"""Pascal VOC: what is read, what is mended, what is refused, and that what was written is read back."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from datacache.annotations.formats import voc
from datacache.annotations.formats.voc import MAX_OBJECTS, VocReader
from datacache.annotations.formats.xml_encoding import decode
from datacache.annotations.model import Annotation, Box, Draft, Problem
from datacache.core.errors import AnnotationError
from tests.annotations.shapes import cases

FILE = "Annotations/a.xml"
SIZE = "<size><width>640</width><height>480</height><depth>3</depth></size>"
BNDBOX = "<bndbox><xmin>1</xmin><ymin>2</ymin><xmax>30</xmax><ymax>40</ymax></bndbox>"
CAT = Box("cat", 1, 2, 30, 40, line=1)


def document(*objects: str, size: str = SIZE, head: str = "<filename>a.jpg</filename>") -> str:
    return f"<annotation>{head}{size}{''.join(objects)}</annotation>"


def an_object(rest: str = BNDBOX, name: str = "<name>cat</name>") -> str:
    return f"<object>{name}{rest}</object>"


def bndbox(**changed: str | None) -> str:
    sides = {"xmin": "1", "ymin": "2", "xmax": "30", "ymax": "40"} | changed
    return f"<bndbox>{''.join(f'<{side}>{text}</{side}>' for side, text in sides.items() if text is not None)}</bndbox>"


def parsed(text: str | bytes, origin: int = 0) -> tuple[Draft, list[Problem]]:
    data = text if isinstance(text, bytes) else text.encode()
    return voc.parse(data, FILE, origin=origin)


def boxes_of(text: str | bytes, origin: int = 0) -> tuple[Box, ...]:
    """The boxes of a file with which nothing is wrong."""
    draft, problems = parsed(text, origin)
    assert problems == []
    return draft.boxes


def found(text: str | bytes) -> list[tuple[str, str, int]]:
    """Code, action and line of each problem."""
    _, problems = parsed(text)
    assert all(problem.file == FILE and problem.message for problem in problems)
    return [(problem.code, problem.action, problem.line) for problem in problems]


def refused(text: str | bytes) -> AnnotationError:
    with pytest.raises(AnnotationError) as caught:
        parsed(text)
    assert caught.value.file == FILE
    return caught.value


# --- what is plain ---------------------------------------------------------------------------------------------------


def test_a_file_says_its_image_size_and_boxes_with_lines() -> None:
    text = (
        "<annotation>\n <folder>x</folder>\n <filename> a b.jpg </filename>\n"
        " <size><width>640</width><height>480</height><depth>3</depth></size>\n"
        " <object>\n  <name>cat</name><pose>Left</pose><truncated>1</truncated><difficult>0</difficult>\n"
        "  <bndbox><xmin>1</xmin><ymin>2</ymin><xmax>30</xmax><ymax>40.5</ymax></bndbox>\n </object>\n"
        " <object><name>dog</name><difficult>1</difficult>"
        "<bndbox><xmin>5</xmin><ymin>6</ymin><xmax>7</xmax><ymax>8</ymax></bndbox></object>\n</annotation>\n"
    )
    assert parsed(text) == (
        Draft(
            FILE,
            "a b.jpg",
            640,
            480,
            (
                Box("cat", 1, 2, 30, 40.5, truncated=True, attributes=(("pose", "Left"),), line=5),
                Box("dog", 5, 6, 7, 8, difficult=True, line=9),
            ),
        ),
        [],
    )


def test_lines_are_counted_alike_whatever_ends_them() -> None:
    text = document("\n\n", an_object(), "\n", an_object())
    for ending in ("\n", "\r\n", "\r"):
        assert [box.line for box in boxes_of(text.replace("\n", ending))] == [3, 4]


def test_one_based_inclusive_pixels_become_edges() -> None:
    whole = bndbox(xmin="1", ymin="1", xmax="640", ymax="480")
    assert boxes_of(document(an_object(whole)), origin=1) == (Box("cat", 0, 0, 640, 480, line=1),)
    assert boxes_of(document(an_object(whole)), origin=0) == (Box("cat", 1, 1, 640, 480, line=1),)
    assert boxes_of(document(an_object(bndbox(xmin="1.1", ymin="1e0"))), origin=1)[0][1:3] == (0.1, 0.0)


def test_any_order_of_elements_reads_the_same() -> None:
    in_order = "<pose>Left</pose><truncated>1</truncated><occluded>1</occluded><difficult>1</difficult>" + bndbox()
    other = (
        "<object><bndbox><ymax>40</ymax><xmax>30</xmax><ymin>2</ymin><xmin>1</xmin></bndbox><difficult>1</difficult>"
        "<occluded>1</occluded><truncated>1</truncated><pose>Left</pose><name>cat</name></object>"
    )
    expected = boxes_of(document(an_object(in_order)))
    assert expected[0][5:8] == (True, True, True)
    assert boxes_of(document(other)) == expected
    assert parsed(document(other, SIZE, size=""))[0] == parsed(document(an_object(in_order)))[0]
    roboflow = (
        "<pose>Left</pose><truncated>1</truncated><difficult>1</difficult><occluded>1</occluded>"
        "<bndbox><xmin>1</xmin><xmax>30</xmax><ymin>2</ymin><ymax>40</ymax></bndbox>"
    )
    assert boxes_of(document(an_object(roboflow))) == expected


def test_attributes_of_tools_and_unknown_elements_are_kept() -> None:
    cvat = (
        "<attributes><attribute><name>colour</name><value> red </value></attribute>"
        "<attribute><name>age</name><value>3</value></attribute></attributes>"
    )
    half = cvat.replace("<value>3</value>", "")
    assert boxes_of(document(an_object(BNDBOX + half)))[0].attributes == (("age", ""), ("colour", "red"))
    text = document(
        an_object(f"<pose>Left</pose><score>0.5</score>{BNDBOX}<actions><jumping>1</jumping></actions>{cvat}")
    )
    assert boxes_of(text)[0].attributes == (
        ("actions/jumping", "1"),
        ("age", "3"),
        ("colour", "red"),
        ("pose", "Left"),
        ("score", "0.5"),
    )
    assert boxes_of(document(an_object(BNDBOX + cvat)))[0].attributes == (("age", "3"), ("colour", "red"))


def test_an_annotation_without_objects_is_one() -> None:
    assert parsed(document()) == (Draft(FILE, "a.jpg", 640, 480), [])
    assert parsed("<annotation/>") == (Draft(FILE), [])


@pytest.mark.parametrize(
    ("text", "value"),
    [("0", 0), ("1", 1), (" 1 ", 1), ("true", 1), ("True", 1), ("false", 0), ("Unspecified", 0), ("", 0), ("yes", 1)],
)
def test_flags_are_read_as_they_are_written(text: str, value: int) -> None:
    for position, flag in enumerate(("difficult", "truncated", "occluded"), start=5):
        (box,) = boxes_of(document(an_object(f"<{flag}>{text}</{flag}>{BNDBOX}")))
        assert box[5:8] == tuple(index == position and bool(value) for index in (5, 6, 7))


def test_a_flag_of_other_text_is_not_set_and_noted() -> None:
    text = document(an_object("<truncated>maybe</truncated>" + BNDBOX))
    assert parsed(text)[0].boxes == (CAT,)
    assert found(text) == [("flag-text", "noted", 1)]
    assert "'maybe'" in parsed(text)[1][0].message


def test_names_with_spaces_are_left_to_the_check() -> None:
    assert [box.label for box in boxes_of(document(an_object(name="<name>\n cat </name>"), an_object(name="")))] == [
        "\n cat ",
        "",
    ]


def test_text_with_entities_comments_and_cdata_is_what_it_means() -> None:
    name = "<name>a<!-- not this --> &lt;b&gt; &#99; <![CDATA[<d>]]></name>"
    assert boxes_of(document("<!-- <object/> -->", an_object(name=name))) == (CAT._replace(label="a <b> c <d>"),)


# --- numbers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["1.5", " 1.5\n", "15e-1", "+1.5", "1.50", "001.5"])
def test_fractions_are_read(text: str) -> None:
    assert boxes_of(document(an_object(bndbox(xmin=text))))[0].x1 == 1.5


@pytest.mark.parametrize("text", ["nan", "NaN", "inf", "-Infinity", "1e999"])
def test_what_is_not_finite_is_left_to_the_check(text: str) -> None:
    box = boxes_of(document(an_object(bndbox(xmin=text))))[0]
    assert repr(box.x1) == repr(float(text))
    assert repr(boxes_of(document(an_object(bndbox(xmin=text))), origin=1)[0].x1) == repr(float(text))


def test_reversed_and_negative_boxes_are_left_to_the_check() -> None:
    assert boxes_of(document(an_object(bndbox(xmin="-30", xmax="-40")))) == (CAT._replace(x1=-30, x2=-40),)


@pytest.mark.parametrize("text", ["twelve", "1,5", "1_0", "0x10", "1 2", "9" * 100, "--1"])
def test_a_coordinate_of_text_leaves_the_object_out(text: str) -> None:
    document_ = document("\n", an_object(bndbox(ymax=text)), an_object())
    assert parsed(document_)[0].boxes == (CAT._replace(line=2),)
    assert found(document_) == [("box-text", "skipped", 2)]
    assert text[:50] in parsed(document_)[1][0].message


@pytest.mark.parametrize(
    "rest",
    ["", "<bndbox/>", bndbox(xmin=None), bndbox(ymax=""), bndbox(ymin=" "), "<polygon/>", "<bndbox>1 2</bndbox>"],
)
def test_an_object_without_a_whole_box_is_left_out(rest: str) -> None:
    text = document(an_object(rest), an_object())
    assert parsed(text)[0].boxes == (CAT,)
    assert found(text) == [("box-missing", "skipped", 1)]


def test_of_several_boxes_or_names_the_first_counts() -> None:
    twice = bndbox() + bndbox(xmin="9", xmax="10")
    text = document(an_object(twice + "<name>dog</name>"), an_object(bndbox() + "<difficult/><difficult>1</difficult>"))
    assert parsed(text)[0].boxes == (CAT, CAT)
    assert found(text) == [("element-repeated", "noted", 1)] * 3
    flags = "<difficult>1</difficult><occluded>0</occluded><difficult>0</difficult>" + BNDBOX
    assert parsed(document(an_object(flags)))[0].boxes == (CAT._replace(difficult=True),)
    assert found(document(an_object(flags))) == [("element-repeated", "noted", 1)]
    inside = "<bndbox><xmin>1</xmin><xmin>7</xmin><ymin>2</ymin><xmax>30</xmax><ymax>40</ymax></bndbox>"
    assert parsed(document(an_object(inside)))[0].boxes == (CAT,)
    assert found(document(an_object(inside))) == [("element-repeated", "noted", 1)]


def test_a_second_size_or_file_name_does_not_count() -> None:
    text = document(head="<filename>a.jpg</filename><filename>b.jpg</filename>", size=SIZE + SIZE.replace("640", "9"))
    assert parsed(text)[0] == Draft(FILE, "a.jpg", 640, 480)
    assert found(text) == [("element-repeated", "noted", 1)] * 2


def test_part_boxes_are_not_the_objects_box() -> None:
    part = "<part><name>head</name><bndbox><xmin>5</xmin><ymin>5</ymin><xmax>6</xmax><ymax>6</ymax></bndbox></part>"
    for rest in (BNDBOX + part + part, part + BNDBOX):
        assert parsed(document(an_object(rest)))[0].boxes == (CAT,)
        assert found(document(an_object(rest))) == [("part-ignored", "noted", 1)]
    assert [code for code, *_ in found(document(an_object(part)))] == ["part-ignored", "box-missing"]


@pytest.mark.parametrize("wrapper", ["objects", "Objects"])
def test_objects_in_a_wrapper_are_read_and_it_is_said(wrapper: str) -> None:
    text = document(f"<{wrapper}>{an_object()}{an_object()}</{wrapper}>{an_object()}")
    assert parsed(text)[0].boxes == (CAT, CAT, CAT)
    assert ("objects-wrapped", "repaired", 1) in found(text)


def test_elements_with_capitals_are_read_and_it_is_said() -> None:
    upper = BNDBOX.replace("bndbox", "BndBox").replace("xmin", "XMin")
    text = f"<Annotation>{SIZE}<Object><Name>cat</Name>{upper}<Colour>red</Colour></Object></Annotation>"
    assert parsed(text)[0].boxes == (CAT._replace(attributes=(("Colour", "red"),)),)
    assert {(code, action) for code, action, _ in found(text)} == {("tag-case", "repaired")}


@pytest.mark.parametrize(
    ("text", "place"),
    [
        (document(f"<frame>{an_object()}</frame>"), "frame"),
        (document(f"<objects><objects>{an_object()}</objects></objects>"), "objects"),
        (document(an_object(BNDBOX + an_object())).replace("</annotation>", "</annotation>"), "object"),
        (document(an_object(f"{BNDBOX}<part>{an_object()}</part>")), "object/part"),
    ],
)
def test_an_object_that_lies_elsewhere_is_left_out_with_a_line_that_says_where(text: str, place: str) -> None:
    _, problems = parsed(text)
    assert [(p.code, p.action) for p in problems if p.action == "skipped"] == [("object-misplaced", "skipped")]
    assert f"<{place}>" in next(p.message for p in problems if p.action == "skipped")


def test_polygons_are_passed_over_and_noted_once() -> None:
    pair = "<attribute><name>a</name><value>b</value></attribute>"
    polygon = f"<polygon><x1>1</x1><y1>1</y1><name>dog</name>{pair}</polygon>"
    text = document(an_object(polygon + BNDBOX), an_object(BNDBOX + polygon))
    assert parsed(text)[0].boxes == (CAT, CAT)
    assert found(text) == [("element-ignored", "noted", 1)]


# --- the size --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", ["", "<size/>", "<size><width/><height> </height></size>"])
def test_a_missing_size_is_none(size: str) -> None:
    assert parsed(document(an_object(), size=size)) == (Draft(FILE, "a.jpg", 0, 0, (CAT,)), [])


@pytest.mark.parametrize(("text", "value"), [("640.0", 640), (" 640 ", 640), ("0", 0), ("6.4e2", 640)])
def test_a_size_that_is_a_whole_number_is_read(text: str, value: int) -> None:
    draft, problems = parsed(document(size=f"<size><width>{text}</width><height>480</height></size>"))
    assert (draft.width, draft.height, problems) == (value, 480, [])


@pytest.mark.parametrize("text", ["big", "-640", "640.5", "nan", "inf", "1e300", "9" * 400])
def test_a_size_of_other_text_is_none_and_noted(text: str) -> None:
    data = document(size=f"\n<size><width>{text}</width><height>480</height></size>")
    assert parsed(data)[0] == Draft(FILE, "a.jpg", 0, 480)
    assert found(data) == [("size-text", "noted", 2)]
    assert text[:50] in parsed(data)[1][0].message


# --- encodings -------------------------------------------------------------------------------------------------------

MASK = document(an_object(name="<name>口罩</name>"))


def test_a_byte_order_mark_is_passed_over() -> None:
    assert boxes_of(b"\xef\xbb\xbf" + MASK.encode())[0].label == "口罩"
    assert boxes_of("\ufeff<?xml version='1.0' encoding='utf-8'?>" + document(an_object())) == (CAT,)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_wide_encodings_are_known_by_their_first_bytes(encoding: str) -> None:
    assert boxes_of(MASK.encode(encoding))[0].label == "口罩"
    declared = f'<?xml version="1.0" encoding="{encoding}"?>{MASK}'
    assert boxes_of(declared.encode(encoding))[0].label == "口罩"


@pytest.mark.parametrize("declared", ["GBK", "gb2312", "GB18030", "cp936"])
def test_declared_gbk_is_read(declared: str) -> None:
    text = f'<?xml version="1.0" encoding="{declared}"?>{MASK}'
    assert boxes_of(text.encode("gbk"))[0].label == "口罩"


@pytest.mark.parametrize(
    ("declared", "label"),
    [
        ("ISO-8859-1", "café"),
        ("windows-1251", "маска"),
        ("big5", "口罩"),
        ("Shift_JIS", "マスク"),
        ("EUC-KR", "마스크"),
    ],
)
def test_other_declared_encodings_are_read(declared: str, label: str) -> None:
    text = f'<?xml version="1.0" encoding="{declared}"?>{MASK.replace("口罩", label)}'
    assert boxes_of(text.encode(declared))[0].label == label


@pytest.mark.parametrize("declaration", ["", '<?xml version="1.0"?>', '<?xml version="1.0" encoding="utf-8"?>'])
def test_undeclared_gbk_is_read_and_reported(declaration: str) -> None:
    data = (declaration + MASK).encode("gb18030")
    assert parsed(data)[0].boxes[0].label == "口罩"
    assert found(data) == [("encoding", "repaired", 0)]


@pytest.mark.parametrize(
    ("label", "codec", "name"),
    [
        ("Fußgänger", "latin-1", "Windows-1252"),
        ("Größe", "cp1252", "Windows-1252"),
        ("ÜBERGRÖSSE", "latin-1", "Windows-1252"),
        ("vélo électrique", "latin-1", "Windows-1252"),
        ("café", "latin-1", "Windows-1252"),
        ("пешеход", "cp1251", "Windows-1251"),
        ("без маски", "cp1251", "Windows-1251"),
        ("安全帽 helmet", "gbk", "GB18030"),
        ("人", "gb2312", "GB18030"),
    ],
)
def test_undeclared_code_pages_are_told_by_their_script_and_named(label: str, codec: str, name: str) -> None:
    data = MASK.replace("口罩", label).encode(codec)
    draft, (problem,) = parsed(data)
    assert draft.boxes[0].label == label
    assert (problem.code, problem.action) == ("encoding", "repaired")
    assert problem.message.endswith(f"it is read as {name}")


@pytest.mark.parametrize("declared", ["utf-16", "ascii", "x-unheard-of", "rot13", "zlib", "unicode_escape", "idna"])
def test_utf8_that_declares_something_else_is_read_and_reported(declared: str) -> None:
    data = f'<?xml version="1.0" encoding="{declared}"?>{MASK}'.encode()
    assert parsed(data)[0].boxes[0].label == "口罩"
    assert found(data) == [("encoding", "repaired", 0)]


@pytest.mark.parametrize(
    "data",
    [
        MASK.replace("口罩", "口罩口罩").encode().replace("罩".encode(), "罩".encode()[:2], 1),
        MASK.encode().replace("罩".encode(), b"\xe7\xbd\xc0"),
        MASK.replace("口罩", "没有口罩").encode().replace("没".encode(), b"\xc0\xb2\xa1"),
        MASK.replace("口罩", "żółty").encode("cp1250"),
        MASK.replace("口罩", "マスク").encode("shift_jis"),
        MASK.replace("口罩", "口罩").encode("big5"),
        MASK.replace("口罩", "Füße").encode("cp437"),
        MASK.replace("口罩", "A口B").encode("gbk"),
        b"\xef\xbb\xbf" + MASK.encode("gbk"),
        MASK.encode("utf-16")[:-1],
    ],
)
def test_bytes_of_no_known_encoding_are_refused_not_guessed(data: bytes) -> None:
    assert refused(data).code == "encoding"


# --- XML that is not taken -------------------------------------------------------------------------------------------

BOMB = "".join(f'<!ENTITY e{n} "{f"&e{n - 1};" * 10 if n else "ha" * 10}">' for n in range(12))


@pytest.mark.parametrize(
    ("declarations", "name"),
    [
        ('<!ENTITY cat "cat">', "&cat;"),
        ('<!ENTITY cat "cat">', "cat"),
        (BOMB, "&e11;"),
        ('<!ENTITY secret SYSTEM "file:///etc/passwd">', "&secret;"),
        ('<!ENTITY % outside SYSTEM "http://127.0.0.1:9/x.dtd"> %outside;', "cat"),
        ('<!ATTLIST name x CDATA "a default value">', "cat"),
    ],
)
def test_entities_are_refused_and_nothing_outside_is_opened(declarations: str, name: str) -> None:
    text = f"<!DOCTYPE annotation [{declarations}]>\n" + document(an_object(name=f"<name>{name}</name>"))
    error = refused(text)
    assert error.code == "xml-entities"
    assert error.line == 1


def test_entities_of_an_outside_declaration_are_refused() -> None:
    text = '<!DOCTYPE annotation SYSTEM "voc.dtd">\n' + document(an_object(name="<name>&cat;</name>"))
    assert refused(text).code == "xml-entities"
    assert refused(text.replace("SYSTEM", "PUBLIC 'x'")).line == 2


@pytest.mark.parametrize(
    "doctype",
    ["<!DOCTYPE annotation>", '<!DOCTYPE annotation SYSTEM "voc.dtd">', "<!DOCTYPE annotation [<!ELEMENT a (b)>]>"],
)
def test_a_document_type_is_passed_over_and_noted(doctype: str) -> None:
    text = doctype + document(an_object())
    assert parsed(text)[0].boxes == (CAT,)
    assert found(text) == [("xml-doctype", "noted", 1)]


def test_namespaces_are_passed_over_and_noted() -> None:
    plain = document(an_object())
    by_default = plain.replace("<annotation>", '<annotation xmlns="http://example.org/voc">')
    prefixed = plain.replace("</", "</v:").replace("<", "<v:").replace("<v:/v:", "</v:")
    for text in (by_default, prefixed, prefixed.replace("<v:annotation>", '<v:annotation xmlns:v="x">')):
        assert parsed(text)[0] == parsed(plain)[0]
        assert found(text) == [("xml-namespace", "noted", 1)]


def test_xml_cut_short_anywhere_is_refused_whole() -> None:
    text = document(an_object(), "\n", an_object())
    for end in range(len(text)):
        error = refused(text[:end])
        assert (error.code, error.line) == ("xml-broken", 1 + text.count("\n", 0, end))


@pytest.mark.parametrize(
    "data", [b"", b" \n", b"\0" * 100, b"\xff\xd8\xff\xe0 JPEG", b"{}", b"<annotation>&nbsp;</annotation>"]
)
def test_what_is_no_xml_is_refused(data: bytes) -> None:
    assert refused(data).code in ("xml-broken", "encoding")


@pytest.mark.parametrize("text", ["\ufffe", "\uffff", "a]]>b", "\x01", "\x1f", "a&b", "a<b", "&#0;", "&#xd800;"])
def test_text_that_xml_does_not_allow_is_refused(text: str) -> None:
    for element in (f"<name>{text}</name>", f"<pose>{text}</pose>"):
        assert refused(document(an_object(element + BNDBOX, name=""))).code == "xml-broken"


def test_an_empty_file_is_said_to_be_empty() -> None:
    assert "empty" in refused(b"").message


@pytest.mark.parametrize("root", ["annotations", "html", "Annotations"])
def test_other_documents_are_refused(root: str) -> None:
    error = refused(f"<!-- x -->\n<{root}><object/></{root}>")
    assert (error.code, error.line) == ("not-voc", 2)
    assert f"<{root}>" in error.message


def test_files_that_are_too_large_or_too_deep_are_refused() -> None:
    assert refused(b" " * (voc.MAX_BYTES + 1)).code == "file-too-large"
    assert refused("<annotation>" + "<a>" * 200).code == "file-too-large"
    assert refused("<annotation>" + "<a>" * 20 + "<a/>" * 2_000_000).code == "file-too-large"
    assert refused("<annotation>" + "<object/>" * (MAX_OBJECTS + 1)).code == "file-too-large"
    assert "100,000 objects" in refused("<annotation>" + "<object/>" * (MAX_OBJECTS + 1)).message


def test_a_large_file_takes_no_tree_in_memory() -> None:
    data = document("<other><deep>text</deep></other>" * 100_000).encode()
    tracemalloc.start()
    try:
        assert parsed(data)[0] == Draft(FILE, "a.jpg", 640, 480)
        assert tracemalloc.get_traced_memory()[1] < 4 * len(data)
    finally:
        tracemalloc.stop()


# --- both ways of reading give the same ------------------------------------------------------------------------------

PLAIN_TEXTS = ["", "cat", " cat ", "口罩", "x\u00a0", "\x7f\x85", "a]]b", "😷", "Unspecified", "unspecified "]
PLAIN_NUMBERS = ["0", "7", "640", "4096", "007", "999999999"]
PLAIN_SIDES = [*PLAIN_NUMBERS, "-7", "12.25", "-0.5", "640.000000001"]
texts = st.sampled_from([*PLAIN_TEXTS, "a\tb", "a\nb", "a\rb", "a\r\nb", "&lt;", "<!-- x -->cat", "<b/>"])
numbers = st.sampled_from([*PLAIN_SIDES, "9999999999", "1e3", " 5", "", "nan", "x"])
spaces = st.sampled_from(["", " ", "\n\t", "\r\n", "\n \n"])


@st.composite
def objects(draw: st.DrawFn, plain: bool) -> str:
    """An object as tools write them, and, where it is not to be plain, now and then something else."""

    def content(plain_ones: list[str], others: st.SearchStrategy[str]) -> str:
        return draw(st.sampled_from(plain_ones) if plain or draw(st.integers(0, 9)) else others)

    order = draw(st.sampled_from([("truncated", "occluded", "difficult"), ("truncated", "difficult", "occluded")]))
    if not plain:
        order = draw(st.permutations(order))
    elements = [f"<name>{content(PLAIN_TEXTS, texts)}</name>"]
    if draw(st.booleans()):
        elements.append(f"<pose>{content(PLAIN_TEXTS, texts)}</pose>")
    there = [flag for flag in order if draw(st.booleans())]
    elements += [f"<{flag}>{content(['0', '1'], st.sampled_from(['', 'true', '2']))}</{flag}>" for flag in there]
    sides = draw(st.sampled_from([("xmin", "ymin", "xmax", "ymax"), ("xmin", "xmax", "ymin", "ymax")]))
    between = draw(spaces)
    inner = between.join(f"<{side}>{content(PLAIN_SIDES, numbers)}</{side}>" for side in sides)
    elements.append(f"<bndbox>{between}{inner}</bndbox>")
    if draw(st.booleans()):
        pair = f"<name>{content(PLAIN_TEXTS, texts)}</name>{between}<value>{content(PLAIN_TEXTS, texts)}</value>"
        elements.append(f"<attributes>{between}{f'<attribute>{between}{pair}</attribute>' * 2}</attributes>")
    if not plain and draw(st.booleans()):
        other = draw(st.sampled_from([*elements, "<!-- x -->", "<part/>", "y", "<score>1</score>"]))
        elements.insert(draw(st.integers(0, len(elements))), other)
    return f"<object>{between}{between.join(elements)}{between}</object>"


@st.composite
def documents(draw: st.DrawFn, plain: bool) -> str:
    heads = ["<folder>x</folder>", "<folder/>", "<source><database>y</database></source>", "<segmented>0</segmented>"]
    elements = draw(st.lists(st.sampled_from(heads), max_size=2))
    if draw(st.booleans()):
        elements.append(f"<filename>{draw(st.sampled_from(PLAIN_TEXTS) if plain else texts)}</filename>")
    if draw(st.booleans()):
        side = st.sampled_from(PLAIN_NUMBERS) if plain else numbers
        elements.append(f"<size><width>{draw(side)}</width><height>{draw(side)}</height><depth>3</depth></size>")
    elements += draw(st.lists(objects(plain), max_size=3))
    if not plain and draw(st.booleans()):
        elements = draw(st.permutations(elements))
    declaration = draw(st.sampled_from(["", "\ufeff", '<?xml version="1.0" encoding="UTF-8"?>\n']))
    between = draw(spaces)
    return f"{declaration}<annotation>{between}{between.join(elements)}{between}</annotation>{between}"


@settings(max_examples=300, deadline=None)
@given(documents(plain=True), st.sampled_from([0, 1]))
def test_what_is_plain_goes_the_short_way_and_reads_as_expat_reads_it(text: str, origin: int) -> None:
    plain = voc._parse_plain(text.encode(), FILE, origin)
    assert plain is not None
    assert VocReader(FILE, origin).read(text) == (plain, [])


@settings(max_examples=300, deadline=None)
@given(documents(plain=False), st.sampled_from([0, 1]))
def test_what_goes_the_short_way_reads_as_expat_reads_it(text: str, origin: int) -> None:
    plain = voc._parse_plain(text.encode(), FILE, origin)
    if plain is not None:
        assert VocReader(FILE, origin).read(text) == (plain, [])


@settings(max_examples=400, deadline=None)
@given(documents(plain=True), st.data())
def test_the_short_way_takes_nothing_that_was_damaged_otherwise(text: str, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(text)))
    inserted = data.draw(
        st.sampled_from(["", "<", ">", "&", "&lt;", "/", "x", "\0", "\ufffe", "]]>", "<a>", "<!-- -->", "\r"])
    )
    text = text[:at] + inserted + text[at + data.draw(st.integers(0, 8)) :]
    plain = voc._parse_plain(text.encode(), FILE, 0)
    if plain is not None:
        assert VocReader(FILE, 0).read(decode(text.encode(), FILE)[0]) == (plain, [])


def test_what_tools_write_goes_the_short_way(blood_cells: Path) -> None:
    for path in (blood_cells / "Annotations").glob("*.xml"):
        data = path.read_bytes()
        plain = voc._parse_plain(data, FILE, 0)
        assert plain is not None
        assert (plain, []) == VocReader(FILE, 0).read(data.decode())
        written = voc.write(Annotation("a.jpg", 640, 480, plain.boxes))
        assert voc._parse_plain(written, FILE, 0) is not None


def test_real_files_read_as_an_independent_reader_reads_them(blood_cells: Path) -> None:
    boxes = 0
    for path in (blood_cells / "Annotations").glob("*.xml"):
        draft, problems = voc.parse(path.read_bytes(), path.name)
        root = ET.parse(path).getroot()
        assert problems == []
        assert [(box.label, *box[1:5]) for box in draft.boxes] == [
            (
                found.findtext("name"),
                *(float(found.findtext(f"bndbox/{side}")) for side in ("xmin", "ymin", "xmax", "ymax")),
            )
            for found in root.iter("object")
        ]
        assert (draft.width, draft.height) == (int(root.findtext("size/width")), int(root.findtext("size/height")))
        boxes += len(draft.boxes)
    assert boxes == 4888


# --- fuzzing ---------------------------------------------------------------------------------------------------------

SEED = '<?xml version="1.0" encoding="utf-8"?>\n' + document(
    an_object("<pose>Left</pose><truncated>1</truncated>" + BNDBOX + "<part><name>x</name></part>"), "\n", an_object()
)


def reads_or_refuses(data: bytes) -> None:
    try:
        draft, problems = voc.parse(data, FILE)
    except AnnotationError as error:
        if error.code not in ("xml-broken", "xml-entities", "not-voc", "encoding"):
            raise
        return
    # Every object is a box or a line of the report.
    text, _ = decode(data, FILE)
    _, *elements = ET.fromstring(text).iter()
    objects = [each for each in elements if each.tag.rpartition("}")[2].rpartition(":")[2].lower() == "object"]
    assert len(draft.boxes) + sum(problem.action == "skipped" for problem in problems) == len(objects)


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_damaged_files_are_read_or_refused_and_lose_no_object_silently(data: st.DataObject) -> None:
    encoding = data.draw(st.sampled_from(["utf-8", "utf-8", "gbk", "utf-16"]))
    damaged = bytearray(SEED.replace("cat", "口罩").encode(encoding))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(damaged)))
        new = data.draw(
            st.one_of(st.binary(max_size=4), st.sampled_from([b"<object/>", b"<object>", b"</object>", b"<part>"]))
        )
        damaged[at : at + data.draw(st.integers(0, 20))] = new
    reads_or_refuses(bytes(damaged))


@settings(max_examples=250, deadline=None)
@given(st.one_of(st.binary(max_size=200), st.text(max_size=200).map(lambda text: f"<annotation>{text}".encode())))
def test_random_bytes_are_refused(data: bytes) -> None:
    reads_or_refuses(data)


tags = st.sampled_from(
    [
        "object",
        "Object",
        "objects",
        "frame",
        "name",
        "bndbox",
        "xmin",
        "ymin",
        "xmax",
        "ymax",
        "size",
        "width",
        "part",
        "attributes",
        "attribute",
        "value",
    ]
)
trees = st.recursive(
    st.one_of(texts.map(lambda text: text.replace("]]", "")), numbers),
    lambda inner: st.lists(st.tuples(tags, inner), max_size=5).map(
        lambda children: "".join(f"<{tag}>{text}</{tag}>" for tag, text in children)
    ),
    max_leaves=40,
)


@settings(max_examples=300, deadline=None)
@given(trees)
def test_any_structure_is_read_and_loses_no_object_silently(inner: str) -> None:
    reads_or_refuses(f"<annotation>{inner}<object>{inner}{BNDBOX}</object></annotation>".encode())


# --- writing ---------------------------------------------------------------------------------------------------------

clean_text = st.text(st.characters(exclude_categories=("Cs", "Cc"), exclude_characters="\ufffe\uffff"), max_size=12)
stripped = clean_text.map(str.strip)
coordinates = st.one_of(
    st.integers(0, 5000).map(float),
    st.floats(0, 1e5, allow_subnormal=False).filter(lambda value: value == 0 or value > 1e-9),
)
written_boxes = st.builds(
    Box,
    label=stripped.filter(bool),
    x1=coordinates,
    y1=coordinates,
    x2=coordinates,
    y2=coordinates,
    difficult=st.booleans(),
    truncated=st.booleans(),
    occluded=st.booleans(),
    line=st.just(0),
    extra=st.none(),
    attributes=st.lists(st.tuples(stripped, stripped).filter(any), max_size=3).map(lambda pairs: tuple(sorted(pairs))),
)


@cases
@given(st.lists(written_boxes, max_size=3), stripped, st.sampled_from([0, 1]))
def test_what_is_written_is_read_back_exactly(boxes: list[Box], name: str, origin: int) -> None:
    assume("/" not in name)
    annotation = Annotation(f"images/{name}", 640, 480, tuple(boxes))
    data = voc.write(annotation, origin=origin, folder=name)
    draft, problems = voc.parse(data, FILE, origin=origin)
    assert problems == []
    assert [box._replace(line=0) for box in draft.boxes] == boxes
    assert (draft.name, draft.width, draft.height) == (name, 640, 480)
    assert voc.write(annotation, origin=origin, folder=name) == data


def test_line_ends_in_attributes_are_read_back_as_they_are() -> None:
    attributes = (("a\rb", "c\r\nd\te"),)
    data = voc.write(Annotation("a.jpg", 640, 480, (CAT._replace(attributes=attributes),)))
    assert boxes_of(data)[0].attributes == attributes


def test_poses_are_written_where_every_tool_looks_for_them() -> None:
    for attributes, pose in [
        ((("pose", "Left"),), "Left"),
        ((), "Unspecified"),
        ((("pose", "Unspecified"),), "Unspecified"),
        ((("pose", "Left"), ("pose", "Right")), "Unspecified"),
    ]:
        data = voc.write(Annotation("a.jpg", 640, 480, (CAT._replace(attributes=attributes),)))
        assert ET.fromstring(data).findtext("object/pose") == pose
        assert boxes_of(data)[0].attributes == attributes


def test_whole_numbers_are_written_without_a_fraction() -> None:
    data = voc.write(Annotation("a.jpg", 640, 480, (Box("cat", 1.0, 0.1, 30.0, 40.25),)))
    assert b"<xmin>1</xmin>" in data
    assert b"<ymin>0.1</ymin>" in data
    data = voc.write(Annotation("a.jpg", 640, 480, (Box("cat", 1.0, 0.1, 30.0, 40.25),)), origin=1)
    assert b"<xmin>2</xmin>" in data
    assert b"<ymin>1.1</ymin>" in data
    assert b"<xmax>30</xmax>" in data


def test_what_xml_cannot_hold_is_written_as_the_character_for_that() -> None:
    boxes = boxes_of(voc.write(Annotation("a.jpg", 640, 480, (CAT._replace(label="a\0b\ud800c\ufffe<&>\"'"),))))
    assert boxes[0].label == "a\ufffdb\ufffdc\ufffd<&>\"'"


def test_real_files_are_the_same_after_writing_and_reading(blood_cells: Path) -> None:
    for path in (blood_cells / "Annotations").glob("*.xml"):
        draft, _ = voc.parse(path.read_bytes(), path.name)
        annotation = Annotation(draft.name, draft.width, draft.height, draft.boxes)
        again, problems = voc.parse(voc.write(annotation), path.name)
        assert problems == []
        assert [box._replace(line=0) for box in again.boxes] == [box._replace(line=0) for box in draft.boxes]
