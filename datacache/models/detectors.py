"""Models of every kind behind one call: images in, for each one what was found or how likely each class is.

Used by `predict`. A model is a callable of Python, also one that is named as `MODULE:CALLABLE`, a module of PyTorch or
TorchScript, a file for ONNX Runtime, or a `YOLO` of Ultralytics. What goes in is the kind's:

- modules of PyTorch, and TorchScript: float tensors of 3 x height x width from 0 to 1, as torchvision's models take
  them; a list of them, or one tensor of all where the images have one `size` (TorchScript: as its signature says);
- ONNX: what the model's one input asks for by its shape and type;
- Ultralytics: arrays with blue first, in their own sizes;
- any other callable: the list of images as it is.

What comes out is recognised and checked in `outputs`. Libraries are imported when a model of their kind is loaded. One
thread at a time may call a detector. A detector is not pickled: each process loads its own.
"""

from __future__ import annotations

import ast
import inspect
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from datacache.core.cores import cores
from datacache.core.errors import UsageError
from datacache.models.outputs import LEAST_SCORE, Classified, Found, Numbering, checked, per_image

__all__ = ["Classified", "Detector", "Found", "load_detector"]

_LINE: Final = "\n"
_MOST_CLASSES: Final = 1_000_000
_EXPORT: Final = "Export the model again."
_SPELLED: Final = "MODULE:CALLABLE, or a file: *.onnx for ONNX Runtime, *.torchscript, *.ts or *.pt for TorchScript"


class Detector(Protocol):
    """A model, ready to be called. It raises `UsageError` for an output that it does not understand, and whatever the
    model raises."""

    @property
    def classes(self) -> tuple[str, ...]:
        """The names that labels are positions of."""

    @property
    def size(self) -> tuple[int, int] | None:
        """The height and width that images are to have; None: each its own."""

    def __call__(self, images: list[NDArray[np.uint8]]) -> list[Found | Classified]:
        """Return what is in each image, uint8 of height x width x 3, red first."""


def load_detector(
    model: str | Callable[..., Any],
    *,
    weights: Path | None = None,
    device: str = "cpu",
    classes: Sequence[str] | None = None,
    size: tuple[int, int] | None = None,
    threads: int | None = None,
) -> Detector:
    """Return a model as a detector on a device ("cpu", "cuda", "cuda:1").

    `model` is a file or a callable as the module says, or the name of a callable, which is also looked for in the
    current folder. A class, and a function that takes `weights` or `device` or nothing at all, is called first and
    returns the model. `weights` are handed to it as a path, or loaded into the module of PyTorch that it returns.

    The model's `names` or `classes`, or the metadata of its file, say its classes. `classes` are for a model that says
    none, and otherwise replace its names one by one. `size`: height and width for a model that has none of its own.
    `threads` on the processor are those of PyTorch, in all of this process, and of ONNX Runtime; None: as PyTorch has
    it, and one for each core.

    `UsageError` where anything of that cannot be; whatever a callable raises itself is its cause.
    """
    if weights is not None and not weights.is_file():
        raise UsageError(f"there are no weights at {weights}", hint="Name a file.")
    if threads is not None:
        import torch

        torch.set_num_threads(threads)
    if isinstance(model, str):
        source = _open(model, weights, device, threads or cores())
    else:
        source = _wrap(_make(model, weights, device), device)
    name = model if isinstance(model, str) else source.name
    own, wanted = source.classes, None if classes is None else tuple(classes)
    if own is not None and wanted is not None and len(own) != len(wanted):
        raise UsageError(f"{name} has {len(own)} classes ({', '.join(own)}), and {len(wanted)} were given")
    names = own if wanted is None else wanted
    if not names:
        hint = "Name them in the order of its labels: --classes FILE, or an attribute `classes` of the model."
        raise UsageError(f"{name} does not say its classes", hint=hint)
    if source.size is not None and size is not None and tuple(size) != source.size:
        text = "{1}x{0}".format(*source.size)
        raise UsageError(f"{name} takes images of {text}, and {size[1]}x{size[0]} was asked for")
    return _Adapted(source, Numbering(names), source.size or size)


class _Source(NamedTuple):
    """A model as it was found."""

    name: str
    run: Callable[[list[NDArray[np.uint8]], bool], Any]
    """Call it with images; the flag says that all have one size."""
    classes: tuple[str, ...] | None = None
    size: tuple[int, int] | None = None


class _Adapted:
    """The detector that a source makes."""

    def __init__(self, source: _Source, numbering: Numbering, size: tuple[int, int] | None) -> None:
        self.classes, self.size = numbering.classes, size
        self._source, self._numbering = source, numbering

    def __call__(self, images: list[NDArray[np.uint8]]) -> list[Found | Classified]:
        if not images:
            return []
        parts = per_image(self._source.run(images, self.size is not None), len(images))
        return [checked(part, image.shape, self._numbering) for part, image in zip(parts, images, strict=True)]


def _open(model: str, weights: Path | None, device: str, threads: int) -> _Source:
    opened: dict[str, Callable[[Path, str], _Source]] = {
        ".onnx": partial(_open_onnx, threads=threads),
        ".torchscript": _open_torchscript,
        ".ts": _open_torchscript,
        ".pt": _open_torchscript,
    }
    path = Path(model)
    if path.suffix.lower() in opened:
        if not path.is_file():
            raise UsageError(f"there is no model at {model}", hint="Name a file.")
        if weights is not None:
            raise UsageError(f"{model} has its weights in it, and {weights} was given besides")
        return opened[path.suffix.lower()](path, device)
    return _wrap(_make(_import(model), weights, device), device)


# --- callables ------------------------------------------------------------------------------------------------------


def _import(model: str) -> Any:
    module, colon, name = model.partition(":")
    if not (module and colon and name):
        raise UsageError(f"{model} is no model", hint=f"Expected: {_SPELLED}.")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # and left there: models import more when they are called
    try:
        found: Any = import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except ModuleNotFoundError as exc:
        hint = f"Modules are looked for where Python has them, and in {os.getcwd()}."
        raise UsageError(f"{model} needs the module {exc.name}, which is not there", hint=hint) from exc
    except AttributeError as exc:
        raise UsageError(f"{model} is not there: {exc}") from exc
    except Exception as exc:
        raise UsageError(f"{model} cannot be imported: {type(exc).__name__}: {exc}") from exc
    if not callable(found):
        raise UsageError(f"{model} is a {type(found).__name__}, which cannot be called")
    return found


def _make(found: Callable[..., Any], weights: Path | None, device: str) -> Any:
    """Return the model that a class or a factory makes, or `found` if it is one, with its weights."""
    parameters: Mapping[str, inspect.Parameter] = {}
    made, name = found, getattr(found, "__qualname__", type(found).__name__)
    if isinstance(found, type) or inspect.isroutine(found):
        try:
            parameters = inspect.signature(found).parameters
        except ValueError:  # built in
            parameters = {}
        needed = [
            each.name for each in parameters.values() if each.default is each.empty and each.kind < each.VAR_POSITIONAL
        ]
        if isinstance(found, type) or not needed or {"weights", "device"} & set(parameters):
            # Ultralytics has its weights as `model`.
            taken = next((each for each in ("weights", "model") if each in parameters), None)
            given: dict[str, Any] = {} if taken is None or weights is None else {taken: weights}
            given |= {"device": device} if "device" in parameters else {}
            if missing := [each for each in needed if each not in given]:
                text = f"{name} makes a model from {', '.join(needed)}, and {', '.join(missing)} is not given"
                raise UsageError(text, hint="Give --weights, or name a function without other arguments.")
            try:
                made = found(**given)
            except Exception as exc:
                raise UsageError(f"{name} makes no model: {type(exc).__name__}: {exc}") from exc
            weights = None if taken else weights
    if not callable(made):
        raise UsageError(f"{name} made a {type(made).__name__}, which cannot be called")
    if weights is not None:
        if not _is_module(made):
            raise UsageError(f"{name} takes no weights, and {weights} was given", hint="Let it take `weights`, a path.")
        _load_weights(made, weights)
    return made


def _wrap(model: Any, device: str) -> _Source:
    """Return a model of Python's as a source."""
    name = getattr(model, "__qualname__", type(model).__name__)
    classes, size = _names(getattr(model, "names", None)) or _names(getattr(model, "classes", None)), None
    match getattr(model, "size", None):
        case (int(height), int(width)):
            size = height, width
    if callable(getattr(model, "predict", None)) and hasattr(model, "names"):

        def predict(images: list[NDArray[np.uint8]], _sized: bool) -> Any:
            turned = [np.ascontiguousarray(image[..., ::-1]) for image in images]
            return model.predict(turned, device=device, conf=LEAST_SCORE, verbose=False)

        return _Source(name, predict, classes)
    if _is_module(model):
        return _Source(name, _run_module(model, device), classes, size)
    return _Source(name, lambda images, _sized: model(images), classes, size)


def _names(names: Any) -> tuple[str, ...] | None:
    """Return a list of classes, or a dict from numbers to them, as a tuple; None for anything else."""
    if isinstance(names, Mapping) and names:
        try:
            named = {int(number): str(name) for number, name in names.items()}
        except (TypeError, ValueError):
            named = {}
        if not named or min(named) < 0 or max(named) >= _MOST_CLASSES:
            hint = "Expected: a list of names, or a dict from 0, 1, … to them."
            raise UsageError("the model's names do not number its classes", hint=hint)
        return tuple(named.get(number, str(number)) for number in range(max(named) + 1))
    return tuple(map(str, names)) if isinstance(names, list | tuple) and names else None


# --- PyTorch --------------------------------------------------------------------------------------------------------


def _is_module(model: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(model, torch.nn.Module)


def _run_module(module: Any, device: str, *, takes_list: bool | None = None) -> Callable[..., Any]:
    """Return what calls a module of PyTorch on a device. `takes_list`: None where it takes either."""
    import torch

    try:
        module = module.to(device).eval()
    except (RuntimeError, AssertionError) as exc:
        text = f"the model cannot go to the device {device}: {str(exc).partition(_LINE)[0]}"
        raise UsageError(text, hint="Choose the device cpu.") from exc

    pinned = device.startswith("cuda")  # the copy of an image goes on while the next one is put in pinned memory

    def run(images: list[NDArray[np.uint8]], sized: bool) -> Any:
        tensors = [torch.from_numpy(np.ascontiguousarray(image)) for image in images]
        if pinned:
            tensors = [tensor.pin_memory().to(device, non_blocking=True) for tensor in tensors]
        tensors = [tensor.to(device).permute(2, 0, 1).float() / 255 for tensor in tensors]
        as_list = not sized if takes_list is None else takes_list
        with torch.no_grad():
            return module(tensors if as_list else torch.stack(tensors))

    return run


def _load_weights(module: Any, weights: Path) -> None:
    try:
        if weights.suffix == ".safetensors":
            from safetensors.torch import load_file

            values: Any = load_file(weights)
        else:
            import torch

            values = torch.load(weights, map_location="cpu", weights_only=True)
        module.load_state_dict(values)
    except Exception as exc:
        text = f"{weights} cannot be loaded into a {type(module).__name__}: {exc}"
        raise UsageError(text, hint="Expected: what torch.save(model.state_dict(), …) writes, or safetensors.") from exc


def _open_torchscript(path: Path, device: str) -> _Source:
    torch = _need("torch")
    extra = {"config.txt": b""}  # where Ultralytics has what it knows of a model
    try:
        module = torch.jit.load(str(path), map_location="cpu", _extra_files=extra)
    except RuntimeError as exc:
        raise UsageError(
            f"{path} is no TorchScript: {str(exc).partition(_LINE)[0]}",
            hint="Weights alone go with the class they are of: --model MODULE:CALLABLE --weights FILE, which for "
            "Ultralytics is --model ultralytics:YOLO.",
        ) from exc
    about = _told_by(path, lambda: dict(json.loads(extra["config.txt"] or b"{}")))
    size = about.get("imgsz")
    if size is not None:
        height, width = size if isinstance(size, list) and len(size) == 2 else (size, size)
        if not (type(height) is type(width) is int and min(height, width) > 0):
            raise UsageError(f"{path} says that it takes images of {size!r}", hint=_EXPORT)
        size = height, width
    schema = getattr(getattr(module, "forward", None), "schema", None)
    if schema is None or len(schema.arguments) < 2:
        raise UsageError(f"{path} has no `forward` that takes images", hint="Script a model that has one.")
    run = _run_module(module, device, takes_list=str(schema.arguments[1].type).startswith("List"))
    return _Source(path.name, run, _told_names(path, about.get("names")), size)


def _told_by(path: Path, read: Callable[[], Any]) -> Any:
    """Return what a model's file says of itself. `UsageError` where that cannot be read."""
    try:
        return read()
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as exc:
        raise UsageError(f"{path} says of itself what cannot be read: {exc}", hint=_EXPORT) from exc


def _told_names(path: Path, names: Any) -> tuple[str, ...] | None:
    try:
        return _names(names)
    except UsageError as exc:
        raise UsageError(f"{path}: {exc.message}", hint=_EXPORT) from exc


def _need(module: str) -> Any:
    try:
        return import_module(module)
    except ModuleNotFoundError as exc:
        extra = {"onnxruntime": "onnx"}.get(module, module)
        raise UsageError(f"the model needs {module}", hint=f"pip install 'dsctl[{extra}]'") from exc


# --- ONNX Runtime ---------------------------------------------------------------------------------------------------


def _open_onnx(path: Path, device: str, threads: int) -> _Source:
    runtime = _need("onnxruntime")
    kind, _, number = device.partition(":")
    provider = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}.get(kind)
    if provider not in runtime.get_available_providers():
        raise UsageError(f"this onnxruntime has no {device}", hint="Choose the device cpu, or install onnxruntime-gpu.")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = threads  # its own count knows no quota of containers
    options.log_severity_level = 3
    where = (provider, {"device_id": number or "0"}) if kind == "cuda" else provider
    try:
        session = runtime.InferenceSession(str(path), options, providers=[where])
    except Exception as exc:
        raise UsageError(f"{path} is no model that ONNX Runtime can run: {exc}") from exc
    if not session.get_inputs():
        raise UsageError(f"{path} takes nothing", hint="Expected: one input of images.")
    entry, *more = session.get_inputs()
    dtype = {"tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(uint8)": np.uint8}.get(entry.type)
    sides = {"first": entry.shape[-2:], "last": entry.shape[-3:-1]}
    channels = next((at for at, side in (("first", -3), ("last", -1)) if entry.shape[side:][:1] == [3]), None)
    if more or channels is None or dtype is None or len(entry.shape) > 4 or 0 in entry.shape:
        told = ", ".join(f"{each.name}: {each.type} of {each.shape}" for each in (entry, *more))
        hint = "Expected: one input of images, 3 x height x width or height x width x 3, of floats or uint8."
        raise UsageError(f"{path} takes {told}", hint=hint)
    size = (sides[channels][0], sides[channels][1]) if all(isinstance(side, int) for side in sides[channels]) else None
    outputs = [each.name for each in session.get_outputs()]
    together: Any = entry.shape[0] if len(entry.shape) == 4 else 1
    if any(each.shape[1:] == [4] for each in session.get_outputs()):
        together = 1  # boxes of one image, as torchvision's exports have them
    about = session.get_modelmeta().custom_metadata_map

    def run(images: list[NDArray[np.uint8]], sized: bool) -> Any:
        answers: list[Any] = []
        many = together if isinstance(together, int) else len(images) if sized else 1
        for start in range(0, len(images), many):
            part = images[start : start + many]
            pixels = np.stack(part + part[-1:] * (many - len(part) if isinstance(together, int) else 0)).astype(dtype)
            if channels == "first":
                pixels = np.ascontiguousarray(pixels.transpose(0, 3, 1, 2))
            if dtype is not np.uint8:
                pixels /= dtype(255)
            values = session.run(None, {entry.name: pixels if len(entry.shape) == 4 else pixels[0]})
            answers += per_image(_named(outputs, values), len(pixels))
        return answers[: len(images)]

    names = _told_by(path, lambda: ast.literal_eval(about["names"])) if "names" in about else None
    return _Source(path.name, run, _told_names(path, names), size)


def _named(names: Sequence[str], values: Sequence[NDArray[Any]]) -> Any:
    """Return the one output, or a dict of boxes, labels and scores, found by their names or else by their shapes."""
    if len(values) == 1:
        return values[0]
    found: dict[str, Any] = {}
    for name, value in zip(names, values, strict=True):
        said = next((each for each in Found._fields if each[:-1] in name.lower()), None)
        is_boxes = value.ndim > 1 and value.shape[-1] == 4
        shaped = "boxes" if is_boxes else "labels" if np.issubdtype(value.dtype, np.integer) else "scores"
        found.setdefault(said or shaped, value)
    return found if len(found) == 3 else dict(zip(names, values, strict=True))
