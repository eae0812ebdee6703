"""CVAT XML: its documented samples, what is mended and refused, and that what was written is read back."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Iterable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datacache.annotations.formats import cvat, geometry
from datacache.annotations.model import Annotation, Box, Draft, DraftFile
from datacache.annotations.shapes import mask as masks
from datacache.annotations.shapes.clip import box_around
from datacache.annotations.shapes.outline import (
    Extra,
    Keypoints,
    Mask,
    Outline,
    Polygon,
    Rotated,
    Skeleton,
    bounds,
    pack,
    unpack,
)
from datacache.core.errors import AnnotationError
from tests.annotations.shapes import cases, hundredths, one_of_a_kind, points_within

FILE = "annotations.xml"


def document(inner: str, meta: str = "") -> bytes:
    head = '<?xml version="1.0" encoding="utf-8"?>\n<annotations><version>1.1</version>'
    return f"{head}{meta}{inner}</annotations>".encode()


def image(*shapes: str, size: str = 'width="64" height="48"', name: str = "a.jpg") -> bytes:
    return document(f'<image id="0" name="{name}" {size}>{"".join(shapes)}</image>')


def one(data: bytes) -> tuple[Draft, list[str]]:
    found = cvat.parse(data, FILE)
    ((draft, problems),) = found.images
    return draft, [f"{problem.code} {problem.action}" for problem in (*found.problems, *problems)]


def box_of(data: bytes) -> Box:
    draft, problems = one(data)
    assert problems == []
    (box,) = draft.boxes
    return box


def outline_of(box: Box) -> Outline:
    assert box.extra is not None
    assert box.extra.outline is not None
    return box.extra.outline


# docs.cvat.ai, "XML format", annotation of images: the sample, shortened to some of its shapes.
SAMPLE = b"""<?xml version="1.0" encoding="utf-8"?>
<annotations>
  <version>1.1</version>
  <meta>
    <task>
      <id>4</id>
      <name>segmentation</name>
      <size>27</size>
      <mode>annotation</mode>
      <overlap>0</overlap>
      <labels>
        <label>
          <name>car</name>
          <attributes>
          </attributes>
        </label>
        <label>
          <name>background</name>
          <attributes>
          </attributes>
        </label>
      </labels>
      <owner>
        <username>admin</username>
        <email></email>
      </owner>
    </task>
    <dumped>2018-09-25 11:47:55.543166+03:00</dumped>
  </meta>
  <image id="0" name="filename000.jpg" width="1600" height="1200">
    <box label="plate" xtl="797.33" ytl="870.92" xbr="965.52" ybr="928.94" source="manual" occluded="0" z_order="4">
    </box>
    <polygon label="car" points="561.30,916.23;561.30,842.77;554.72,761.63;553.62,716.67" source="manual" z_order="2">
      <attribute name="make">mazda</attribute>
    </polygon>
    <tag label="good_frame" source="manual">
    </tag>
    <skeleton label="sk" source="manual" z_order="0">
      <points label="1" occluded="0" source="manual" outside="0" points="60.59,50.33"></points>
      <points label="2" occluded="1" source="manual" outside="0" points="65.5,61.3"></points>
      <points label="3" occluded="0" source="manual" outside="1" points="70.0,54.29"></points>
    </skeleton>
    <mask label="car" source="manual" occluded="0" rle="1, 2, 5" left="3" top="5" width="4" height="2" z_order="0">
    </mask>
  </image>
</annotations>
"""


def test_the_documented_sample_of_images() -> None:
    found = cvat.parse(SAMPLE, FILE)
    ((draft, problems),) = found.images
    assert (draft.name, draft.width, draft.height, draft.labels) == ("filename000.jpg", 1600, 1200, ("good_frame",))
    assert (problems, found.problems, found.classes) == ([], [], ("car", "background"))
    plate, car, sk, mask = draft.boxes
    assert plate == Box("plate", 797.33, 870.92, 965.52, 928.94, attributes=(("z_order", "4"),), line=31)
    assert outline_of(car) == Polygon(pack([561.30, 916.23, 561.30, 842.77, 554.72, 761.63, 553.62, 716.67]))
    assert (car[1:5], car.attributes) == ((553.62, 716.67, 561.3, 916.23), (("make", "mazda"), ("z_order", "2")))
    keypoints = Keypoints(pack([60.59, 50.33, 65.5, 61.3, 70.0, 54.29]), b"\2\1\0")
    assert (sk.extra, sk[1:5]) == (Extra(keypoints=keypoints), (60.59, 50.33, 65.5, 61.3))
    assert found.skeletons == {"sk": Skeleton(("1", "2", "3"))}
    assert masks.bounds(outline_of(mask)) == mask[1:5] == (4, 5, 6, 6)  # type: ignore[arg-type]


# docs.cvat.ai, "XML format", interpolation of videos: the sample, shortened.
VIDEO_META = (
    "<meta><task><size>30</size><mode>interpolation</mode><labels><label><name>car</name></label></labels>"
    "<original_size><width>1280</width><height>720</height></original_size></task></meta>"
)


def video(*shapes: str, track: str = 'id="3" label="car" source="auto" group_id="2"') -> DraftFile:
    return cvat.parse(document(f"<track {track}>{''.join(shapes)}</track>", VIDEO_META), FILE)


def framed(frame: int | str, x: float, more: str = 'keyframe="1"', outside: int = 0) -> str:
    return f'<box frame="{frame}" xtl="{x}" ytl="2" xbr="{x + 10}" ybr="20" outside="{outside}" occluded="0" {more}/>'


def test_a_track_is_an_object_of_each_frame_until_it_is_outside() -> None:
    found = video(framed(2, 1), framed(3, 2, 'keyframe="0"'), framed(4, 3, outside=1))
    assert [(draft.name, draft.width, draft.height) for draft, _ in found.images] == [
        ("frame_000002", 1280, 720),
        ("frame_000003", 1280, 720),
    ]
    extra = Extra(track=3, group=2, author="auto")
    boxes = [box for draft, _ in found.images for box in draft.boxes]
    assert boxes == [
        Box("car", 1, 2, 11, 20, line=2, extra=extra),
        Box("car", 2, 2, 12, 20, attributes=(("keyframe", "0"),), line=2, extra=extra),
    ]
    assert found.problems == []


def test_what_lies_between_keyframes_moves_evenly() -> None:
    found = video(framed(0, 10), framed(4, 18), framed(9, 100, outside=1), framed(2, 14))
    assert [(draft.name, draft.boxes[0].x1) for draft, _ in found.images] == [
        *((f"frame_{n:06d}", 10 + 2 * n) for n in range(5)),
        *((f"frame_{n:06d}", pytest.approx(18 + 16.4 * (n - 4))) for n in range(5, 9)),
    ]
    assert [(p.code, p.action) for p in found.problems] == [("track-interpolated", "noted")]
    moving = '<polygon frame="{}" points="{}" outside="0"/>'
    found = video(moving.format(0, "0,0;4,0;4,4"), moving.format(2, "2,2;6,2;6,8"))
    assert outline_of(found.images[1][0].boxes[0]) == Polygon(pack([1, 1, 5, 1, 5, 6]))
    found = video(moving.format(0, "0,0;4,0;4,4"), moving.format(2, "2,2;6,2;6,8;1,1"))
    assert outline_of(found.images[1][0].boxes[0]) == Polygon(pack([0, 0, 4, 0, 4, 4]))


def test_no_track_goes_on_beyond_the_frames_that_there_are() -> None:
    found = video(framed(0, 10), framed(999_999, 20))
    assert len(found.images) == 31  # 30 frames, and the one that the file names
    found = video(framed(10**6, 1), framed("x", 1), framed(-1, 1))
    assert [(p.code, p.action) for p in found.problems] == [("entry-malformed", "skipped")] * 3


def test_a_subset_is_a_folder() -> None:
    draft, _ = one(document('<image id="0" name="a.jpg" subset="train" width="1" height="1"></image>'))
    assert draft.name == "train/a.jpg"
    draft, _ = one(document('<image id="0" name="train/a.jpg" subset="train" width="1" height="1"></image>'))
    assert draft.name == "train/a.jpg"


def test_a_rotated_box_turns_clockwise_about_its_middle() -> None:
    box = box_of(image('<box label="a" xtl="10" ytl="10" xbr="30" ybr="20" rotation="90.00"/>'))
    assert unpack(outline_of(box).corners).tolist() == pytest.approx([25, 5, 25, 25, 15, 25, 15, 5])  # type: ignore[union-attr]
    assert box[1:5] == pytest.approx((15, 5, 25, 25))
    assert box_of(image('<box label="a" xtl="10" ytl="10" xbr="30" ybr="20" rotation="0"/>')).extra is None


def test_points_are_keypoints_and_have_a_box_with_an_area() -> None:
    box = box_of(image('<points label="p" points="5,6" occluded="1" group_id="7"/>'))
    assert (box.extra, box[1:5], box.occluded) == (
        Extra(keypoints=Keypoints(pack([5, 6]), b"\2"), group=7),
        (4.5, 5.5, 5.5, 6.5),
        True,
    )
    assert box_of(image('<points label="p" points="0,48;64,48"/>'))[1:5] == (0, 47.5, 64, 48)


def test_other_shapes_are_taken_as_something_like_them() -> None:
    draft, problems = one(
        image(
            '<polyline label="l" points="1,2;5,6"/>',
            '<ellipse label="e" cx="30" cy="20" rx="10" ry="5" rotation="90"/>',
            '<cuboid label="c" xtl1="1" ytl1="2" xbl1="1" ybl1="9" xtr1="5" ytr1="2" xbr1="5" ybr1="9"'
            ' xtl2="7" ytl2="3" xbl2="7" ybl2="8" xtr2="6" ytr2="3" xbr2="6" ybr2="8"/>',
            '<blob label="b"/>',
            '<tag label="t"><attribute name="n">v</attribute></tag>',
        )
    )
    assert problems == [
        "shape-boxed noted", "shape-approximated noted", "shape-boxed noted", "element-ignored noted",
        "element-ignored noted",
    ]  # fmt: skip
    line, ellipse, cuboid = draft.boxes
    assert (line[:5], line.extra) == (("l", 1, 2, 5, 6), None)
    assert ellipse[1:5] == pytest.approx((25, 10, 35, 30))
    assert isinstance(outline_of(ellipse), Polygon)
    assert cuboid[1:5] == (1, 2, 7, 9)
    assert draft.labels == ("t",)


@pytest.mark.parametrize(
    ("shape", "problem"),
    [
        ('<box label="a" xtl="1" ytl="2" xbr="3"/>', "box-missing skipped"),
        ('<box label="a" xtl="1" ytl="2" xbr="3" ybr="x"/>', "box-text skipped"),
        ('<box label="a" xtl="1" ytl="2" xbr="3" ybr="9" rotation="1_0"/>', "box-text skipped"),
        ('<polygon label="a"/>', "box-missing skipped"),
        ('<polygon label="a" points="1,2;3"/>', "box-text skipped"),
        ('<polygon label="a" points="1,2;3,y"/>', "box-text skipped"),
        ('<polygon label="a" points="1,2;3_0,4"/>', "box-text skipped"),
        ('<polygon label="a" points="1;2,3,4;5,6"/>', "box-text skipped"),
        ('<skeleton label="a"><points label="1" outside="1" points="1,2"/></skeleton>', "box-missing skipped"),
        ('<mask label="a" rle="1, 3" left="0" top="0" width="2" height="3"/>', "mask-broken skipped"),
        ('<mask label="a" rle="4" left="0" top="0" width="2" height="2"/>', "mask-broken skipped"),
        ('<mask label="a" rle="1,,3" left="0" top="0" width="2" height="2"/>', "mask-broken skipped"),
        ('<mask label="a" rle="" left="0" top="0" width="2" height="2"/>', "mask-broken skipped"),
        ('<mask label="a" rle="1 3, 0" left="0" top="0" width="2" height="2"/>', "mask-broken skipped"),
        ('<mask label="a" rle="-1, 5" left="0" top="0" width="2" height="2"/>', "mask-broken skipped"),
        (f'<mask label="a" rle="{2**63}, {2**63}, 4" left="0" top="0" width="2" height="2"/>', "mask-broken skipped"),
        ('<mask label="a" rle="1, 3" left="0.5" top="0" width="2" height="2"/>', "mask-broken skipped"),
        ('<mask label="a" rle="1, 3" left="63" top="0" width="2" height="2"/>', "mask-size skipped"),
        ('<mask label="a" rle="1, 3" left="-1" top="0" width="2" height="2"/>', "mask-size skipped"),
        ('<mask label="a" rle="1, 3" left="0" top="0" width="2"/>', "box-missing skipped"),
        (f'<polygon label="a" points="{"1,2;" * 100_000}1,2"/>', "shape-too-large skipped"),
    ],
)
def test_shapes_that_mean_nothing_are_left_out(shape: str, problem: str) -> None:
    kept = '<box label="kept" xtl="1" ytl="2" xbr="3" ybr="4"/>'
    draft, problems = one(image(shape, kept))
    assert ([box.label for box in draft.boxes], problems) == (["kept"], [problem])


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"", "xml-broken"),
        (b"<annotations><image></annotations>", "xml-broken"),
        (b"<annotation></annotation>", "not-cvat"),
        (b'<!DOCTYPE a [<!ENTITY b "c">]><annotations>&b;</annotations>', "xml-entities"),
        (b'<?xml version="1.0" encoding="gbk"?><annotations/>', "encoding"),
        (b'<?xml version="1.0" encoding="none"?><annotations/>', "encoding"),
        (b"<annotations>" + b"<a>" * 200, "file-too-large"),
        (b'<annotations><image name="' + b"a" * (9 * 2**20), "file-too-large"),
    ],
)
def test_files_that_cannot_be_used_are_refused(data: bytes, code: str) -> None:
    with pytest.raises(AnnotationError) as caught:
        cvat.parse(data, FILE)
    assert (caught.value.code, caught.value.file) == (code, FILE)


@pytest.mark.parametrize("element", ["<a/>", "<image/>", "<image name=''/>", "<image name='a'/>"])
@pytest.mark.parametrize("inner", ["%s", '<image name="a" width="9" height="9">%s</image>'])
def test_elements_that_hold_nothing_are_not_read_by_the_million(element: str, inner: str) -> None:
    few = document(inner % (element * 20_000))
    assert len(cvat.parse(few, FILE).images) <= 20_000
    with pytest.raises(AnnotationError, match=r"more than [\d,]+ elements up to here"):
        cvat.parse(document(inner % (element * 150_000)), FILE)


def test_an_image_without_a_name_or_a_size() -> None:
    found = cvat.parse(document('<image id="0" width="3" height="3"/>'), FILE)
    assert ([p.code for p in found.problems], found.images) == (["image-unnamed"], [])
    draft, problems = one(image(size='width="wide" height="48"'))
    assert (draft.width, problems) == (0, ["size-text noted"])


HOSTILE = """
import resource, time
import numpy
import datacache.annotations.formats.cvat as cvat
import datacache.annotations.shapes.mask
from datacache.core.errors import AnnotationError
used = int(open("/proc/self/statm").read().split()[0]) * 4096
image = '<annotations><image name="a.jpg" width="50000" height="50000">%s</image></annotations>'
mask = '<mask label="a" rle="%s" left="0" top="0" width="%d" height="%d"/>'
stripes = ", ".join(["5792"] * 5792)
for text in [
    image % ('<polygon label="a" points="' + "1,2;" * 2_500_000),
    image % (mask % ("1, " * 2_500_000 + "1", 5000, 5000)),
    image % (mask % ("2500000000", 50000, 50000)),
    image % (mask % (stripes, 5792, 5792)),
    "<annotations>" + "<image>" * 10_000,
]:
    data = text.encode()
    resource.setrlimit(resource.RLIMIT_AS, (used + len(data) * 2 + 200 * 2**20, resource.RLIM_INFINITY))
    start = time.process_time()
    try:
        found = cvat.parse(data, "a.xml")
        said = [problem.code for _, problems in found.images for problem in problems]
    except AnnotationError as exc:
        said = [exc.code]
    assert said, text[:99]
    print(time.process_time() - start)
"""


SKELETON_OF_1000 = "".join(f'<points label="{n}" points="1,1"/>' for n in range(1000))


@pytest.mark.parametrize(
    "inner",
    [
        *(
            f'<track label="a"><{shape}/><{shape.replace("0", "999999", 1)}/></track>'
            for shape in ('box frame="0" xtl="1" ytl="2" xbr="3" ybr="4"', 'points frame="0" points="1,2"')
        ),
        f'<image name="a"><skeleton label="s">{SKELETON_OF_1000}</skeleton>'
        + '<skeleton label="s"><points label="0" points="1,1"/></skeleton>' * 300
        + "</image>",
    ],
)
def test_few_bytes_do_not_make_millions_of_points(inner: str) -> None:
    with pytest.raises(AnnotationError) as caught:
        cvat.parse(document(inner), FILE)
    assert caught.value.code == "file-too-large"


def test_masks_of_a_file_are_looked_at_up_to_a_number_of_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(geometry, "_MASK_PIXELS", 0)
    mask = '<mask label="a" rle="0,810000" left="0" top="0" width="900" height="900"/>'
    draft, problems = one(image(mask, mask, size='width="900" height="900"'))
    assert (len(draft.boxes), problems) == (0, ["shape-too-large skipped"] * 2)


@pytest.mark.parametrize("drawn", ['<line data-node-from="1" ', '<circle data-node-id="1" '])
def test_a_drawing_without_an_end_takes_no_time(drawn: str) -> None:
    svg = (drawn * 30_000).replace("<", "&lt;")
    labels = f"<label><name>s</name><svg>{svg}</svg></label><label><name>p</name><parent>s</parent></label>"
    found = cvat.parse(document("", f"<meta><task><labels>{labels}</labels></task></meta>"), FILE)
    assert found.skeletons == {"s": Skeleton(("p",))}
    assert list(cvat.subsets(b"<image " * 100_000)) == []


def test_subsets_are_told_up_to_where_a_file_is_broken() -> None:
    given = """<annotations><!-- <image name="no" subset="x"/> --><image subset='A&amp;B' name="a.jpg"/>
    <meta><![CDATA[<image name="no" subset="x"/>]]></meta><image name="ü &gt; c" subset="t"><image"""
    for encoding in ("utf-8", "utf-16"):
        assert list(cvat.subsets(given.encode(encoding))) == [("a.jpg", "A&B"), ("ü > c", "t")]
    for head in ('<!DOCTYPE a [<!ENTITY b "c">]>', *(f'<?xml version="1.0" encoding="{e}"?>' for e in ("gbk", "none"))):
        assert list(cvat.subsets(f'{head}<annotations><image name="a" subset="b"/>'.encode())) == []


def test_files_from_strangers_take_neither_memory_nor_time() -> None:
    done = subprocess.run([sys.executable, "-c", HOSTILE], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert all(float(seconds) < 1 for seconds in done.stdout.split()), done.stdout


# --- there and back --------------------------------------------------------------------------------------------------

WIDTH, HEIGHT = 64, 48
SKELETONS = {"sk": Skeleton(('no"se', "left eye", "<r>"), ((0, 1), (1, 2)))}
words = st.text(
    st.characters(exclude_categories=("Cs", "Cc"), exclude_characters="\ufffe\uffff"), min_size=1, max_size=5
)


@st.composite
def boxes(draw: st.DrawFn) -> tuple[float, float, float, float]:
    x, y = draw(hundredths(WIDTH - 2)), draw(hundredths(HEIGHT - 2))
    x2, y2 = (round(v + draw(hundredths(1)) + 0.01, 2) for v in (x, y))
    return x, y, x2, y2


@st.composite
def rotated(draw: st.DrawFn) -> Rotated:
    x1, y1, x2, y2 = draw(boxes())
    degrees = draw(st.integers(1, 35999)) / 100
    text = f'<box label="a" xtl="{x1}" ytl="{y1}" xbr="{x2}" ybr="{y2}" rotation="{degrees}"/>'
    found = outline_of(box_of(image(text)))
    assert isinstance(found, Rotated)
    return found


@st.composite
def mask_outlines(draw: st.DrawFn) -> Mask:
    polygon = Polygon(draw(points_within(WIDTH, HEIGHT)))
    mask = masks.fill(polygon, WIDTH, HEIGHT)
    return mask if masks.area(mask) else masks.from_runs([0, WIDTH * HEIGHT], WIDTH, HEIGHT)


@st.composite
def objects(draw: st.DrawFn, *, both: bool = True) -> Box:
    """Draw an object as CVAT can have it; `both`: an outline and keypoints, which are two shapes."""
    outline = draw(st.none() | points_within(WIDTH, HEIGHT).map(Polygon) | rotated() | mask_outlines())
    extra = Extra(outline, None, -1, draw(st.integers(-1, 9)), None, draw(st.sampled_from(["", "auto", 'a"b'])))
    label = draw(words)
    around = draw(boxes())
    if outline is not None:
        around = bounds(outline.points) if isinstance(outline, Polygon) else box_around(outline) or around
    if (both or outline is None) and draw(st.booleans()):
        label, count = ("sk", 3) if draw(st.booleans()) else (label, draw(st.integers(1, 4)))
        found = draw(points_within(WIDTH, HEIGHT, count, count))
        seen = draw(st.lists(st.integers(0, 2), min_size=count, max_size=count)) if label == "sk" else [2] * count
        if any(seen):
            extra = extra._replace(keypoints=Keypoints(found, bytes(seen)))
    attributes = draw(st.dictionaries(words, st.text(st.characters(exclude_categories=("Cs", "Cc")), max_size=4)))
    attributes |= draw(st.sampled_from([{}, {"z_order": "-3"}]))
    flags = draw(st.tuples(st.booleans(), st.booleans(), st.booleans()))
    return Box(label, *around, *flags, tuple(sorted(attributes.items())), 0, None if extra == Extra() else extra)


def plain(box: Box, *, edges: bool) -> Box:
    """Return the box without its line; without its edges where they are those around its shape."""
    return box._replace(line=0) if edges else box._replace(line=0, x1=0, y1=0, x2=0, y2=0)


def near(box: Box) -> Box:
    """Return the box with the corners of a turned one to two decimals."""
    if box.extra is None or not isinstance(box.extra.outline, Rotated):
        return box
    corners = pack(round(value, 9) + 0.0 for value in unpack(box.extra.outline.corners))
    return box._replace(extra=box.extra._replace(outline=Rotated(corners)))


@cases
@given(
    st.lists(objects(), max_size=3).filter(one_of_a_kind),
    st.lists(words, max_size=2),
    st.sampled_from(["", "train"]),
)
def test_what_was_written_is_read_back(found: list[Box], labels: list[str], split: str) -> None:
    annotation = Annotation("a'\"&.jpg", WIDTH, HEIGHT, tuple(found), tuple(labels))
    data = b"".join(cvat.write([(split, annotation)], ["sk", "a"], SKELETONS, 1))
    back = cvat.parse(data, FILE)
    ((draft, problems),) = back.images
    assert (problems, back.problems) == ([], [])
    assert (draft.name.rpartition("/")[2], draft.labels) == (annotation.path, annotation.labels)
    assert (draft.width, draft.height, back.classes, back.skeletons) == (WIDTH, HEIGHT, ("sk", "a"), SKELETONS)
    for box, again in zip(found, draft.boxes, strict=True):
        alone = box.extra is None or (box.extra.outline is None and box.extra.keypoints is None)
        assert plain(near(again), edges=alone) == plain(near(box), edges=alone)
    # Once more, to the last digit.
    again = annotation._replace(boxes=draft.boxes)
    assert b"".join(cvat.write([(split, again)], ["sk", "a"], SKELETONS, 1)) == data


@st.composite
def videos(draw: st.DrawFn) -> list[tuple[int, Annotation]]:
    """Draw frames with objects, some of them of tracks: the objects of one have its label, group and author."""
    frames: dict[int, list[Box]] = {frame: [] for frame in draw(st.lists(st.integers(0, 12), max_size=6, unique=True))}
    for track in range(draw(st.integers(0, 3)) if frames else 0):
        first = draw(objects(both=False))
        whose = (first.extra or Extra())._replace(track=draw(st.sampled_from([-1, track, track * 100])))
        shown = draw(st.lists(st.sampled_from([*frames]), unique=True)) if whose.track >= 0 else [*frames][:1]
        for frame in shown:
            box = draw(objects(both=False))
            if box.label == "sk" != first.label:  # points of another class have no visibility
                continue
            extra = (box.extra or Extra())._replace(track=whose.track, group=whose.group, author=whose.author)
            frames[frame].append(box._replace(label=first.label, extra=None if extra == Extra() else extra))
    return [(n, Annotation(f"frame_{n:06d}", WIDTH, HEIGHT, tuple(found))) for n, found in sorted(frames.items())]


def of_tracks(boxes: Iterable[Box], tracks: set[int]) -> Iterator[Box]:
    """Yield boxes as `plain` does, of these tracks or of none."""
    for box in map(near, boxes):
        extra = box.extra or Extra()
        if extra.track not in tracks:
            extra = extra._replace(track=-1)
        alone = extra.outline is None and extra.keypoints is None
        yield plain(box._replace(extra=None if extra == Extra() else extra), edges=alone)


@cases
@given(videos())
def test_a_video_that_was_written_is_read_back(frames: list[tuple[int, Annotation]]) -> None:
    count = 1 + max([frame for frame, _ in frames], default=0)
    data = b"".join(cvat.write_video(frames, ["sk", "a"], SKELETONS, count))
    back = cvat.parse(data, FILE)
    assert back.problems == []
    assert not any(problems for _, problems in back.images)
    shown = [(frame, each) for frame, each in frames if each.boxes]
    assert [(draft.name, draft.width, draft.height) for draft, _ in back.images] == [each[:3] for _, each in shown]
    known = {box.extra.track for _, each in shown for box in each.boxes if box.extra}
    for (draft, _), (_, annotation) in zip(back.images, shown, strict=True):
        alone = sum((box.extra or Extra()).track < 0 for box in annotation.boxes)
        new = [box.extra.track for box in draft.boxes if box.extra and box.extra.track not in known]
        assert len(new) == len(set(new)) == alone
        # Those of a frame are in the order of their tracks.
        one, other = (sorted(map(repr, of_tracks(boxes, known))) for boxes in (draft.boxes, annotation.boxes))
        assert one == other
    # Once more, to the last digit.
    boxes = {draft.name: draft.boxes for draft, _ in back.images}
    again = [(frame, each._replace(boxes=boxes.get(each.path, ()))) for frame, each in frames]
    assert b"".join(cvat.write_video(again, ["sk", "a"], SKELETONS, count)) == data


def test_a_turn_that_rounds_to_none_is_a_box() -> None:
    corners = pack([10, 10, 30, 10.0001, 30, 20, 10, 20])
    annotation = Annotation("a.jpg", 64, 48, (Box("a", 10, 10, 30, 20, extra=Extra(Rotated(corners))),))
    box = box_of(b"".join(cvat.write([("", annotation)], ["a"], {}, 1)))
    assert (box[:5], box.extra) == (("a", 10, 10, 30, 20), None)
    assert math.isclose(box.y2, 20)
