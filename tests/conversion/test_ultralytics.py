"""Labels of objects of any kind are such that Ultralytics loads every one of them.

The rules are those that its `verify_image_label` (8.4) shows when it is run: an image whose labels break one is left
out of the training with a warning, and of equal lines only one counts.
"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from datacache.annotations.model import Annotation, Box
from datacache.annotations.shapes.mask import encode
from datacache.annotations.shapes.outline import Extra, Keypoints, Outline, Rotated, Skeleton, polygon_of
from datacache.conversion.fitting import fit
from datacache.conversion.targets import TARGETS, About
from tests.annotations.shapes import bitmaps, cases, hundredths, points_within

ABOUT = About(("person", "car"), (), skeletons={"person": Skeleton(("nose", "left eye", "right eye"))})
WIDTH, HEIGHT = 64, 48


def accepted(labels: bytes, task: str) -> list[list[float]]:
    """Return the lines of a label file that Ultralytics would load for a task, as numbers; fail where it would not."""
    rows = [[float(word) for word in line.split()] for line in labels.splitlines()]
    for row in rows:
        assert row[0] in (0, 1)
        assert all(0 <= value <= 1 for value in (row[1:5] + row[5::3] + row[6::3] if task == "pose" else row[1:]))
        if task == "pose":
            assert len(row) == 5 + 3 * 3
            assert set(row[7::3]) <= {0, 1, 2}
        elif task == "detect":
            assert len(row) == 5
        else:  # a line of five numbers among polygons costs the image
            assert len(row) == 9 if task == "obb" else len(row) >= 7
            assert len(row) % 2 == 1
    return rows


@st.composite
def annotations(draw: st.DrawFn) -> Annotation:
    boxes = []
    for _ in range(draw(st.integers(0, 4))):
        x1, y1 = draw(hundredths(WIDTH - 1)), draw(hundredths(HEIGHT - 1))
        x2, y2 = draw(st.floats(x1 + 0.01, WIDTH)), draw(st.floats(y1 + 0.01, HEIGHT))
        outline: Outline | None = None
        kind = draw(st.sampled_from(["none", "rings", "mask", "rotated"]))
        if kind == "rings":
            found = draw(st.lists(points_within(WIDTH, HEIGHT), min_size=1, max_size=3))
            outline = polygon_of(found, draw(st.sampled_from([0, 2 * (len(found) > 1)])))
        elif kind == "mask":
            bits = draw(bitmaps())
            outline = encode(bits, 5, 6, WIDTH, HEIGHT) if bits.any() else None
        elif kind == "rotated":
            outline = Rotated(draw(points_within(WIDTH, HEIGHT, 4, 4)))
        label, keypoints = draw(st.sampled_from(ABOUT.classes)), None
        if label == "person" and draw(st.booleans()):
            seen = bytes(draw(st.lists(st.integers(0, 2), min_size=3, max_size=3)))
            keypoints = Keypoints(draw(points_within(WIDTH, HEIGHT, 3, 3)), seen)
        extra = Extra(outline, keypoints) if outline or keypoints else None
        boxes.append(Box(label, x1, y1, x2, y2, extra=extra))
    return Annotation("images/a.jpg", WIDTH, HEIGHT, tuple(boxes))


@cases
@given(annotations())
def test_every_object_is_a_line_that_ultralytics_loads(annotation: Annotation) -> None:
    for to, task in (("yolo", "detect"), ("yolo-segment", "segment"), ("yolo-pose", "pose"), ("yolo-obb", "obb")):
        target = TARGETS[to](ABOUT)
        target.expect([fitted := fit(annotation, target.holds, [])])
        ((path, labels),), _ = target.add(fitted, "", annotated=True)
        assert path == "labels/a.txt"
        rows = accepted(labels, task)
        assert [ABOUT.classes[int(row[0])] for row in rows] == [box.label for box in annotation.boxes]
