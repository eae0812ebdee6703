"""Models of every kind behind one call: real ONNX Runtime and TorchScript, and objects as libraries return them.

Neither torchvision nor Ultralytics is installed where these tests run: what they return is made here in the form that
their documentation gives, by classes with the same attributes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn

from datacache.core.errors import UsageError
from datacache.models.detectors import Classified, Detector, Found, load_detector
from datacache.models.outputs import distinct

CLASSES = ("cat", "dog")
BOXES = [[1.0, 2.0, 11.0, 12.0], [4.0, 4.0, 9.0, 9.0]]


def image(height: int = 24, width: int = 32, red: int = 0) -> np.ndarray:
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[..., 0] = red
    return pixels


def one(output: Any, *, classes: Any = CLASSES) -> Found | Classified:
    """Return what a detector makes of a model's output for one image of 32x24."""
    [found] = load_detector(lambda _images: output, classes=classes)([image()])
    return found


def expect_two(found: Found | Classified, scores: tuple[float, ...] = (0.9, 0.25)) -> None:
    assert isinstance(found, Found)
    assert (found.boxes.dtype, found.labels.dtype, found.scores.dtype) == (np.float32, np.int64, np.float32)
    assert found.boxes.tolist() == BOXES
    assert found.labels.tolist() == [1, 0]
    assert found.scores.tolist() == pytest.approx(scores)


class Boxes:
    """The `boxes` of a `Results` of Ultralytics."""

    xyxy, cls, conf = torch.tensor(BOXES), torch.tensor([1.0, 0.0]), torch.tensor([0.9, 0.25])


class Yolo:
    """As `ultralytics.YOLO`: made from the path of its weights, `names` by number, and `predict`, which is given arrays
    with blue first and gives `Results`."""

    names: ClassVar = {0: "cat", 1: "dog"}

    def __init__(self, model: str | Path = "yolo11n.pt", task: str | None = None, verbose: bool = False) -> None:
        self.model, self.asked = model, {}

    def __call__(self, *_arguments: Any) -> Any:
        raise AssertionError("YOLO is asked through `predict`")

    def predict(self, source: list[np.ndarray], **asked: Any) -> list[Any]:
        self.asked = asked
        assert [int(each[0, 0, 2]) for each in source] == list(range(len(source)))
        return [SimpleNamespace(boxes=Boxes, probs=None, names=self.names) for _ in source]


class TorchvisionLike(nn.Module):
    """As torchvision's detection models in evaluation: float tensors of 3 x height x width in, dicts out, 0 is the
    background."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(1))

    def forward(self, images: list[Tensor], targets: Any = None) -> list[dict[str, Tensor]]:
        assert not self.training
        found = []
        for each in images:
            assert (each.dtype, each.shape[0]) == (torch.float32, 3)
            score = each[0].mean() + self.shift
            boxes, labels = torch.tensor(BOXES), torch.tensor([2, 1])
            found.append({"boxes": boxes, "labels": labels, "scores": torch.cat((score, score / 2))})
        return found


def test_dicts_tuples_batches_and_results_of_boxes_mean_the_same() -> None:
    boxes, labels, scores = np.array(BOXES), np.array([1, 0]), np.array([0.9, 0.25])
    for output in (
        [{"boxes": torch.tensor(BOXES), "labels": torch.tensor([1, 0]), "scores": torch.tensor(scores)}],
        [(boxes, labels, scores)],
        [(BOXES, [1, 0], [0.9, 0.25])],
        (boxes, labels, scores),
        (boxes[None], labels[None], scores[None]),
        {"boxes": boxes[None], "labels": labels[None], "scores": scores[None]},
        ({}, [{"boxes": boxes, "labels": labels, "scores": scores}]),
        [Found(boxes.astype(np.float32), labels, scores.astype(np.float32))],
        [SimpleNamespace(boxes=Boxes, probs=None)],
    ):
        expect_two(one(output))


def test_an_image_without_objects_is_an_empty_result_in_every_form() -> None:
    for output in (
        [([], [], [])],
        [{"boxes": torch.zeros(0, 4), "labels": torch.zeros(0).long(), "scores": torch.zeros(0)}],
    ):
        found = one(output)
        assert isinstance(found, Found)
        assert (found.boxes.shape, found.labels.shape) == ((0, 4), (0,))


def test_class_scores_are_probabilities_or_become_them() -> None:
    for output in (
        [np.array([0.2, 0.8])],
        np.array([[0.2, 0.8]]),
        torch.tensor([[0.0, np.log(4)]]),
        [Classified(np.float32([0.2, 0.8]))],
    ):
        found = one(output)
        assert isinstance(found, Classified)
        assert found.scores.dtype == np.float32
        assert found.scores.tolist() == pytest.approx([0.2, 0.8])
    found = one([SimpleNamespace(boxes=None, probs=SimpleNamespace(data=torch.tensor([0.2, 0.8])))])
    assert found.scores.tolist() == pytest.approx([0.2, 0.8])


def test_boxes_are_clipped_to_the_image_and_those_without_area_go() -> None:
    edges = [[-3.0, -1.0, 40.0, 30.0], [5.0, 5.0, 5.0, 9.0], [33.0, 0.0, 40.0, 9.0]]
    found = one([(edges, [0, 1, 1], [0.5, 0.5, 0.5])])
    assert isinstance(found, Found)
    assert found.boxes.tolist() == [[0, 0, 32, 24]]


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ([([[1, 2, 3]], [0], [0.5])], r"boxes of shape \(1, 3\), expected \(n, 4\)"),
        ([(BOXES, [0], [0.5, 0.5])], r"2 boxes with labels of shape \(1,\)"),
        ([([[1, 2, float("nan"), 4]], [0], [0.5])], "no finite numbers"),
        ([(BOXES, [0, 1], [0.5, float("nan")])], "no finite numbers"),
        ([(BOXES, [0, 1], [0.5, 1j])], "scores that are no finite numbers"),
        ([(BOXES, [0, 1], ["0.5", "1"])], "scores that are no finite numbers"),
        ([(np.array(BOXES, str), [0, 1], [0.5, 0.5])], "edges that are no finite numbers"),
        ([(BOXES, ["0", "1"], [0.5, 0.5])], "labels that are no finite numbers"),
        ([(BOXES, [0, 0.7], [0.5, 0.5])], "labels that are no whole numbers"),
        ((np.zeros((2, 1, 4)), np.zeros((1, 1)), np.zeros((1, 1))), "a tuple of 3 for 1 image"),
        ([(BOXES, [0, 1], [0.5, 90])], "scores from 0.5 to 90, expected 0 to 1"),
        ([(BOXES, [0, 2], [0.5, 0.5])], "labels from 0 to 2, expected 0 to 1: it has 2 classes"),
        ([([[9, 2, 3, 4]], [0], [0.5])], "the box 9, 2, 3, 4 for an image of 32x24"),
        ([([[300, 200, 340, 260]], [0], [0.5])], "the box 300, 200, 340, 260 for an image of 32x24"),
        ([(BOXES, [0, 1], [0.5, 0.5])] * 2, "a list of 2 for 1 image"),
        ([np.array([0.1, 0.2, 0.7])], r"class scores of shape \(3,\), expected \(2,\)"),
        ([{"boxes": BOXES, "scores": [0.5, 0.5]}], "a dict of boxes, scores, without labels"),
        (["a cat"], "a str for an image"),
        (7, "a int for 1 image"),
        (np.zeros((1, 9, 20)), "9 x 20 values for an image, expected 6 x n"),
    ],
)
def test_a_wrong_output_is_an_error_that_says_what_came_and_what_was_expected(output: Any, expected: str) -> None:
    with pytest.raises(UsageError, match=expected) as caught:
        one(output)
    said = f"{caught.value.message} {caught.value.hint}"
    assert any(word in said for word in ("xpected", "name all of them", "finite", "A label is"))


def test_the_background_is_no_class_and_a_name_that_comes_twice_is_one() -> None:
    detector = load_detector(TorchvisionLike(), classes=("__background__", "cat", "dog"))
    assert detector.classes == CLASSES
    found = detector([image(red=255), image(30, 40, red=51)])
    expect_two(found[0], (1.0, 0.5))
    expect_two(found[1], (0.2, 0.1))
    twice = one([(BOXES, [2, 0], [0.5, 0.5])], classes=("N/A", "cat", "N/A"))
    assert twice.labels.tolist() == [0, 0]


def test_a_module_gets_one_tensor_where_the_images_have_a_size() -> None:
    class Mean(nn.Module):
        classes = CLASSES

        def forward(self, pixels: Tensor) -> Tensor:
            red = pixels[:, 0].mean(dim=(1, 2))
            return torch.stack((red, 1 - red), dim=1)

    found = load_detector(Mean(), size=(24, 32))([image(red=255), image(red=51)])
    assert [each.scores.tolist() for each in found] == [pytest.approx([1, 0]), pytest.approx([0.2, 0.8])]


def test_an_ultralytics_model_gets_its_weights_and_blue_first(tmp_path: Path) -> None:
    weights = tmp_path / "best.pt"
    weights.write_bytes(b"weights")
    detector = load_detector(Yolo, weights=weights)
    assert detector.classes == CLASSES
    for found in detector([image(red=0), image(30, 40, red=1)]):
        expect_two(found)
    assert load_detector(Yolo()).classes == CLASSES


# --- MODULE:CALLABLE ------------------------------------------------------------------------------------------------


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Callable[[str], str]:
    """Write a module into the current folder; give its name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [path for path in __import__("sys").path if path])

    def write(text: str) -> str:
        name = f"module_of_{abs(hash(request.node.name))}"
        (tmp_path / f"{name}.py").write_text("import numpy as np\nimport torch\n" + text)
        return name

    return write


MODULE = """
def found(images):
    return [([[1, 2, 11, 12], [4, 4, 9, 9]], [1, 0], [0.9, 0.25]) for _ in images]

found.classes = ["cat", "dog"]

class Made:
    names = {0: "cat", 1: "dog"}
    size = 24, 32

    def __init__(self, weights=None, device="cuda"):
        assert device == "cpu"
        self.score = 0.9 if weights is None else float(weights.read_text())

    def __call__(self, images):
        return [([[1, 2, 11, 12], [4, 4, 9, 9]], [1, 0], [self.score, 0.25]) for _ in images]

def make(weights, device):
    return Made(weights, device)

def nothing():
    return Made(None, "cpu")

class Layer(torch.nn.Linear):
    classes = ["cat", "dog"]

    def __init__(self):
        super().__init__(3, 2)

    def forward(self, images):
        return super().forward(images.mean(dim=(2, 3)))

held = Made(None, "cpu")
number = 7

def broken(weights=None):
    raise OSError("no disk")
"""


def test_a_callable_is_found_in_the_current_folder_and_made_where_it_is_a_class_or_a_factory(
    in_folder: Callable[[str], str], tmp_path: Path
) -> None:
    module = in_folder(MODULE)
    (tmp_path / "weights.txt").write_text("0.75")
    for name in ("found", "Made", "nothing", "held"):
        detector = load_detector(f"{module}:{name}")
        assert detector.classes == CLASSES
        expect_two(*detector([image()]))
        assert detector.size == (None if name == "found" else (24, 32))
    for name in ("make", "Made"):
        expect_two(*load_detector(f"{module}:{name}", weights=tmp_path / "weights.txt")([image()]), (0.75, 0.25))
    assert load_detector(f"{module}:held", classes=("a", "b")).classes == ("a", "b")


def test_weights_are_loaded_into_a_module_that_does_not_take_them(
    in_folder: Callable[[str], str], tmp_path: Path
) -> None:
    from safetensors.torch import save_file

    module = in_folder(MODULE)
    values = {"weight": torch.tensor([[1.0, 0, 0], [0, 0, 0]]), "bias": torch.tensor([0.0, 0.5])}
    torch.save(values, tmp_path / "weights.pt")
    save_file(values, tmp_path / "weights.safetensors")
    for name in ("weights.pt", "weights.safetensors"):
        [found] = load_detector(f"{module}:Layer", weights=tmp_path / name, size=(24, 32))([image(red=255)])
        assert found.scores.tolist() == pytest.approx(torch.tensor([1.0, 0.5]).softmax(0).tolist())
    torch.save({"other": values["bias"]}, tmp_path / "other.pt")
    with pytest.raises(UsageError, match=r"other.pt cannot be loaded into a Layer"):
        load_detector(f"{module}:Layer", weights=tmp_path / "other.pt")


def test_a_model_that_cannot_be_had_is_an_error_that_says_why(in_folder: Callable[[str], str], tmp_path: Path) -> None:
    module = in_folder(MODULE)
    (tmp_path / "weights.txt").write_text("0.75")
    (tmp_path / "syntax_is_wrong.py").write_text("def (")
    (tmp_path / "needs_more.py").write_text("import no_such_module_at_all")
    for model, expected in (
        ("detector", "detector is no model"),
        ("no_such_module_at_all:make", "needs the module no_such_module_at_all"),
        ("needs_more:make", "needs the module no_such_module_at_all"),
        ("syntax_is_wrong:make", "cannot be imported: SyntaxError"),
        (f"{module}:no_such_name", "no_such_name"),
        (f"{module}:number", "a int, which cannot be called"),
        (f"{module}:make", "makes a model from weights, device, and weights is not given"),
        (f"{module}:broken", "makes no model: OSError: no disk"),
        ("none.onnx", "there is no model at none.onnx"),
    ):
        with pytest.raises(UsageError, match=expected):
            load_detector(model)
    for given, expected in (
        ({"weights": tmp_path / "none"}, "there are no weights at"),
        ({"weights": tmp_path / "weights.txt"}, "takes no weights"),
        ({"classes": ("a",)}, "has 2 classes"),
        ({"size": (1, 2)}, "takes images of 32x24, and 2x1 was asked for"),
    ):
        with pytest.raises(UsageError, match=expected):
            load_detector(f"{module}:held", **given)
    with pytest.raises(UsageError, match="does not say its classes"):
        load_detector(lambda images: images)
    with pytest.raises(UsageError, match="cannot go to the device cuda:7"):
        load_detector(TorchvisionLike(), classes=CLASSES, device="cuda:7")


# --- TorchScript ----------------------------------------------------------------------------------------------------


class Scripted(nn.Module):
    """As a scripted model of torchvision: a list of tensors in; losses, and what was found, out."""

    def forward(self, images: list[Tensor]) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
        found: list[dict[str, Tensor]] = []
        for each in images:
            score = each[0].mean()
            boxes = torch.tensor([[1.0, 2.0, 11.0, 12.0], [4.0, 4.0, 9.0, 9.0]])
            scores = torch.stack([score, score / 2])
            found.append({"boxes": boxes, "labels": torch.tensor([1, 0]), "scores": scores})
        return {}, found


class Traced(nn.Module):
    """As an export of Ultralytics: one tensor in, images x (4 + classes) x n out."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("values", torch.from_numpy(yolo_values()))

    def forward(self, pixels: Tensor) -> Tensor:
        return self.values + pixels.mean(dim=(1, 2, 3))[:, None, None] * 0


def yolo_values() -> np.ndarray:
    """Return two objects as columns of centres, sizes and scores of classes, and another view of the first."""
    columns = [[6, 7, 10, 10, 0.1, 0.9], [6.5, 6.5, 5, 5, 0.25, 0], [6, 7, 10, 9, 0, 0.8]]
    return np.ascontiguousarray(np.array(columns, np.float32).T)


def test_torchscript_is_called_as_its_signature_says(tmp_path: Path) -> None:
    torch.jit.script(Scripted()).save(str(tmp_path / "scripted.pt"))
    detector = load_detector(str(tmp_path / "scripted.pt"), classes=CLASSES, size=(24, 32))
    found = detector([image(red=255), image(red=51)])
    expect_two(found[0], (1.0, 0.5))
    expect_two(found[1], (0.2, 0.1))
    traced = torch.jit.trace(Traced().eval(), torch.rand(2, 3, 24, 32))
    about = '{"imgsz": [24, 32], "names": {"0": "cat", "1": "dog"}}'
    torch.jit.save(traced, str(tmp_path / "traced.torchscript"), _extra_files={"config.txt": about})
    detector = load_detector(str(tmp_path / "traced.torchscript"))
    assert (detector.classes, detector.size) == (CLASSES, (24, 32))
    for found in detector([image(red=255)] * 3):
        expect_two(found)


@pytest.mark.parametrize(
    ("about", "expected"),
    [
        ("{", "what cannot be read"),
        ("7", "what cannot be read"),
        ('{"imgsz": [0, 640]}', r"images of \[0, 640\]"),
        ('{"imgsz": "big"}', "images of 'big'"),
        ('{"names": {"cat": 0}}', "do not number its classes"),
        ('{"names": {"999999999999": "cat"}}', "do not number its classes"),
    ],
)
def test_torchscript_that_says_nonsense_of_itself_is_named(tmp_path: Path, about: str, expected: str) -> None:
    traced = torch.jit.trace(nn.Identity(), torch.zeros(1, 3, 24, 32))
    torch.jit.save(traced, str(tmp_path / "odd.torchscript"), _extra_files={"config.txt": about})
    with pytest.raises(UsageError, match=rf"odd.torchscript.*{expected}"):
        load_detector(str(tmp_path / "odd.torchscript"), classes=CLASSES)


def test_torchscript_with_one_side_takes_squares(tmp_path: Path) -> None:
    traced = torch.jit.trace(nn.Identity(), torch.zeros(1, 3, 24, 24))
    about = '{"imgsz": 24, "names": ["cat", "dog"]}'
    torch.jit.save(traced, str(tmp_path / "square.torchscript"), _extra_files={"config.txt": about})
    assert load_detector(str(tmp_path / "square.torchscript")).size == (24, 24)


def test_numbers_of_half_precision_are_understood() -> None:
    outputs = torch.tensor(BOXES), torch.tensor([1, 0]), torch.tensor([0.9, 0.25])
    for dtype in (torch.float16, torch.bfloat16):
        boxes, labels, scores = outputs[0].to(dtype), outputs[1], outputs[2].to(dtype)
        expect_two(one([{"boxes": boxes, "labels": labels, "scores": scores}]), tuple(scores.float().tolist()))


def test_weights_in_place_of_torchscript_are_told_apart(tmp_path: Path) -> None:
    torch.save({"weight": torch.zeros(3)}, tmp_path / "weights.pt")
    with pytest.raises(UsageError, match=r"weights.pt is no TorchScript") as caught:
        load_detector(str(tmp_path / "weights.pt"), classes=CLASSES)
    assert "--model MODULE:CALLABLE --weights FILE" in caught.value.hint


# --- ONNX -----------------------------------------------------------------------------------------------------------


def onnx_model(
    path: Path,
    shape: list[Any],
    outputs: dict[str, tuple[list[Any], np.ndarray]],
    *,
    kind: int = TensorProto.FLOAT,
    names: str = "",
) -> Path:
    """Write a model whose outputs are constants, of which those named `score…` are multiplied by the mean of all values
    of the input."""
    entry = helper.make_tensor_value_info("images", kind, shape)
    nodes = [
        helper.make_node("Cast", ["images"], ["floats"], to=TensorProto.FLOAT),
        helper.make_node("ReduceMean", ["floats"], ["mean"], keepdims=0),
    ]
    values, infos = [], []
    for name, (dimensions, value) in outputs.items():
        values.append(numpy_helper.from_array(value, f"{name}_value"))
        operation = helper.make_node("Identity", [f"{name}_value"], [name])
        if name.startswith("score"):
            operation = helper.make_node("Mul", [f"{name}_value", "mean"], [name])
        nodes.append(operation)
        infos.append(helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), dimensions))
    graph = helper.make_graph(nodes, "detector", [entry], infos, values)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    if names:
        helper.set_model_props(model, {"names": names})
    onnx.checker.check_model(model)
    onnx.save(model, path)
    return path


def onnx_detector(path: Path, **given: Any) -> Detector:
    return load_detector(str(path), **given)


def test_onnx_with_boxes_labels_and_scores_is_recognised_by_names_and_by_shapes(tmp_path: Path) -> None:
    boxes, labels = np.array(BOXES, np.float32), np.array([1, 0])
    scores = np.array([2.7, 0.75], np.float32)  # a red image has a mean of a third
    for names in (("boxes", "labels", "scores"), ("out_2", "out_1", "scored")):
        outputs = dict(zip(names, ((["n", 4], boxes), (["n"], labels), (["n"], scores)), strict=True))
        path = onnx_model(tmp_path / f"{names[0]}.onnx", [1, 3, "height", "width"], outputs)
        detector = onnx_detector(path, classes=CLASSES)
        assert detector.size is None
        for found in detector([image(red=255), image(30, 40, red=255)]):
            expect_two(found)
    batch = {
        "boxes": (["n", 2, 4], boxes[None]),
        "labels": (["n", 2], labels[None]),
        "scores": (["n", 2], scores[None]),
    }
    path = onnx_model(tmp_path / "channels-last.onnx", [1, 24, 32, 3], batch, kind=TensorProto.UINT8)
    detector = onnx_detector(path, classes=CLASSES)
    assert detector.size == (24, 32)
    expect_two(*detector([image(red=1)]))


def test_an_export_of_ultralytics_runs_in_onnx_and_the_best_of_overlapping_boxes_stays(tmp_path: Path) -> None:
    names = "{0: 'cat', 1: 'dog'}"
    path = onnx_model(tmp_path / "one.onnx", [1, 3, 24, 32], {"output0": ([1, 6, 3], yolo_values()[None])}, names=names)
    detector = onnx_detector(path)
    assert (detector.classes, detector.size) == (CLASSES, (24, 32))
    for found in detector([image()] * 3):
        expect_two(found)
    values = np.stack([yolo_values()] * 4)
    path = onnx_model(tmp_path / "four.onnx", [4, 3, 24, 32], {"output0": ([4, 6, 3], values)}, names=names)
    found = onnx_detector(path)([image()] * 6)
    assert len(found) == 6
    expect_two(found[5])
    distinct_already = np.zeros((1, 300, 6), np.float32)
    distinct_already[0, :2] = [[*BOXES[0], 0.9, 1], [*BOXES[1], 0.25, 0]]
    path = onnx_model(
        tmp_path / "end-to-end.onnx", [1, 3, 24, 32], {"output0": ([1, 300, 6], distinct_already)}, names=names
    )
    expect_two(*onnx_detector(path)([image()]))


def test_onnx_with_class_scores_takes_a_batch_at_once(tmp_path: Path) -> None:
    rows = np.array([[0.2, 0.8], [0.6, 0.4]], np.float32)
    path = onnx_model(
        tmp_path / "classes.onnx", ["n", 3, 24, 32], {"output": (["n", 2], rows)}, names="{0: 'a', 1: 'b'}"
    )
    found = onnx_detector(path)([image()] * 2)
    assert [each.scores.tolist() for each in found] == [pytest.approx([0.2, 0.8]), pytest.approx([0.6, 0.4])]


def test_an_onnx_file_that_cannot_be_used_is_named_with_what_it_takes(tmp_path: Path) -> None:
    (tmp_path / "broken.onnx").write_bytes(b"not a model")
    with pytest.raises(UsageError, match=r"broken.onnx is no model that ONNX Runtime can run"):
        onnx_detector(tmp_path / "broken.onnx", classes=CLASSES)
    path = onnx_model(tmp_path / "words.onnx", [1, 77], {"output": ([1, 2], np.zeros((1, 2), np.float32))})
    with pytest.raises(UsageError, match=r"takes images: tensor\(float\) of \[1, 77\]"):
        onnx_detector(path, classes=CLASSES)
    for names, expected in (("{0: ", "what cannot be read"), ("{'cat': 0}", "do not number"), ("{-1: 'a'}", "do not")):
        output = {"output": ([1, 2], np.zeros((1, 2), np.float32))}
        with pytest.raises(UsageError, match=rf"odd.onnx.*{expected}"):
            onnx_detector(onnx_model(tmp_path / "odd.onnx", [1, 3, 24, 32], output, names=names))
    path = onnx_model(tmp_path / "one.onnx", [1, 3, 24, 32], {"output": ([1, 2], np.zeros((1, 2), np.float32))})
    with pytest.raises(UsageError, match="has no cuda"):
        onnx_detector(path, classes=CLASSES, device="cuda:0")
    with pytest.raises(UsageError, match="has its weights in it"):
        onnx_detector(path, classes=CLASSES, weights=path)


def test_of_overlapping_boxes_of_a_class_the_first_stays() -> None:
    chance = np.random.default_rng(3)
    corners = chance.uniform(0, 80, (200, 2))
    boxes = np.concatenate((corners, corners + chance.uniform(5, 40, (200, 2))), axis=1)
    labels = chance.integers(0, 3, 200)
    kept = distinct(boxes, labels).tolist()
    expected: list[int] = []
    for at, (x1, y1, x2, y2) in enumerate(boxes):
        for other in expected:
            a1, b1, a2, b2 = boxes[other]
            shared = max(0, min(x2, a2) - max(x1, a1)) * max(0, min(y2, b2) - max(y1, b1))
            whole = (x2 - x1) * (y2 - y1) + (a2 - a1) * (b2 - b1) - shared
            if labels[at] == labels[other] and shared / whole > 0.7:
                break
        else:
            expected.append(at)
    assert kept == expected
    assert len(kept) < 200
