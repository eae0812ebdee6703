"""Predict on snapshots, and accept predictions as labels."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Any, Unpack

from datacache.api.opening import open_catalog, open_snapshot
from datacache.api.options import NamingOptions, take
from datacache.api.progress import of_images, shows
from datacache.api.weights import weights_path
from datacache.manifest.model import Naming
from datacache.settings import Settings, load_settings

if TYPE_CHECKING:
    from datacache.models.predicting.predict import Predicted
    from datacache.models.predicting.snapshots import Accepted


class PredictKeywords(NamingOptions, total=False):
    """List the options of `predict` beside its own."""

    weights: str | os.PathLike[str] | None
    devices: Sequence[str]
    """'' is a GPU where there is one, else the processor; of a module of PyTorch, the device that it is on."""
    processes: int
    """With the model, on each device."""
    decoders: int | None
    """For each of these."""
    threads: int | None
    """Of PyTorch or ONNX Runtime on the processor, in each of these."""
    classes: Sequence[str] | None
    size: tuple[int, int] | int | str | None
    """Height and width, or as the datasets of `datacache.torch` take it."""
    batch_size: int
    least_score: float
    split: str
    objects: str | None


@shows(of_images)
def predict(
    ref: str,
    model: str | Callable[..., Any],
    *,
    name: str,
    on: str | Executor | None = None,
    settings: Settings | None = None,
    progress: Callable[[str, int, int], None] = lambda _what, _done, _total: None,
    **options: Unpack[PredictKeywords],
) -> Predicted:
    """Make a snapshot of dataset `name` with the images of `ref` and what a model finds in them.

    `model` is `"MODULE:CALLABLE"`, a file for ONNX Runtime or TorchScript, or a callable (`models.detectors`). A name
    or a file is loaded by `processes` processes on each of `devices`, each with `decoders` processes that read and
    decode; a callable runs in this process. With `on`, as in `convert`, processes of an engine load a name or a file,
    decode and predict, each on the one device and with `threads` (1). `weights` are a path, a URL, or
    `NAME@REF/PATH`, a file of a snapshot. `size` is height and width for a model that has none of its own, `classes`
    its classes where it does not say them. Objects of a score below `least_score` are left out. `split` chooses images.
    `progress(what, done, total)` counts images. The result has `record` and `report`.

    The images are there by reference, under their own paths; an image that cannot be decoded is in the report and left
    out. Deterministic as far as the model is: the id depends on neither processes nor devices, nor on the batches where
    the model gives an image the same in each. Nothing is visible before the end. What a killed run has done is taken
    over by the next one with the same arguments; of a callable without weights only where it is a module of PyTorch.

    Raises `UsageError` for what is no model and for an output that is not understood, `PredictError` with the images of
    the batch where the model fails, and where a process of this machine was killed; `DatacacheError` where an engine
    has failed, or has lost the same batches four times; and what stores and catalogs raise.
    """
    from datacache.catalog.objects import ObjectWriter
    from datacache.core.engine import Engine
    from datacache.executors.open import open_workers
    from datacache.models.predicting.elsewhere import Elsewhere
    from datacache.models.predicting.predict import PredictOptions
    from datacache.models.predicting.predict import predict as run

    settings = settings or load_settings()
    given: dict[str, Any] = dict(options)
    naming = Naming(name=name, **take(given, NamingOptions))
    weights, objects = given.pop("weights", None), given.pop("objects", None)
    with ExitStack() as stack:
        if weights is not None:
            given |= {
                "weights": stack.enter_context(weights_path(weights, settings)),
                "weights_name": os.fspath(weights),
            }
        how = PredictOptions(**given)
        catalog = stack.enter_context(closing(open_catalog(settings)))
        snapshot = stack.enter_context(open_snapshot(ref, settings))
        engine = stack.enter_context(open_workers(on, None, settings, models=True))
        return run(
            catalog,
            snapshot,
            model,
            naming,
            options=how,
            home=settings.home,
            open_objects=lambda: ObjectWriter(catalog, settings, url=objects or ""),
            elsewhere=Elsewhere(engine, weights_path, settings) if isinstance(engine, Engine) else None,
            progress=progress,
        )


@shows(of_images)
def accept_predictions(
    ref: str,
    *,
    name: str,
    least_score: float,
    objects: str | None = None,
    settings: Settings | None = None,
    progress: Callable[[str, int, int], None] = lambda _what, _done, _total: None,
    **naming: Unpack[NamingOptions],
) -> Accepted:
    """Make a snapshot of dataset `name` with the images of `ref`, whose predictions of a score from `least_score` on
    are labels. Others are left out; objects that have no score stay.

    Each label has an attribute `accepted`, the score it had. An image of which nothing is left has no annotation, as
    nobody has said that nothing is in it. Deterministic. `UsageError` where no prediction has such a score.
    """
    from datacache.catalog.objects import ObjectWriter
    from datacache.models.predicting.snapshots import accept

    settings = settings or load_settings()
    with closing(open_catalog(settings)) as catalog, open_snapshot(ref, settings) as snapshot:
        return accept(
            catalog,
            snapshot,
            Naming(name=name, **naming),
            least_score=least_score,
            open_objects=lambda: ObjectWriter(catalog, settings, url=objects or ""),
            progress=progress,
        )
