"""Measure predictions by labels, and make a snapshot of the images that went worst."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Unpack

from datacache.api.annotations import SubsetOptions, open_annotations, subset
from datacache.api.options import ReadingOptions
from datacache.api.progress import of_images, shows
from datacache.core.errors import UsageError
from datacache.manifest.model import SnapshotRecord
from datacache.settings import Settings

if TYPE_CHECKING:
    from datacache.models.evaluate import Evaluation


@shows(of_images)
def evaluate(
    predicted: str,
    against: str,
    *,
    iou: float = 0.5,
    score: float | None = None,
    worst: int = 20,
    keep_unannotated: bool = False,
    settings: Settings | None = None,
    progress: Callable[[str, int, int], None] = lambda _what, _done, _total: None,
    **reading: Unpack[ReadingOptions],
) -> Evaluation:
    """Measure the predictions of one snapshot by the labels of another one whose images have the same paths.

    Average precision is COCO's, as pycocotools computes it. Precision, recall, confusions and the `worst` images are
    of predictions from `score` on (None: the score with the largest F1) that have at least `iou` in common with an
    object. Images without annotation among the labels are left out, unless `keep_unannotated` says that nothing is on
    them. `reading` is of the labels. `UsageError` where nothing can be compared.
    """
    from datacache.models.evaluate import evaluate_tables
    from datacache.models.predicting.snapshots import read_scores

    with ExitStack() as opened:
        one, labelled = opened.enter_context(open_annotations(against, settings=settings, progress=progress, **reading))
        two, guessed = opened.enter_context(open_annotations(predicted, settings=settings, progress=progress))
        return evaluate_tables(
            (one.record.ref, two.record.ref),
            labelled,
            guessed,
            iou=iou,
            score=score,
            worst=worst,
            keep_unannotated=keep_unannotated,
            read_ranked=lambda: read_scores(two),
            progress=progress,
        )


@shows(of_images)
def keep_worst(
    found: Evaluation,
    *,
    name: str,
    settings: Settings | None = None,
    progress: Callable[[str, int, int], None] = lambda _what, _done, _total: None,
    **options: Unpack[SubsetOptions],
) -> SnapshotRecord:
    """Make a snapshot of dataset `name` with the worst images of an evaluation, as they are labelled, by reference. It
    comes from both snapshots. `UsageError` where no image is wrong."""
    if not found.worst:
        raise UsageError(f"nothing is wrong in {found.predicted}: there is no worst image")
    parameters = {"iou": found.iou, "score": found.score, "worst": len(found.worst)}
    return subset(
        found.against,
        [image.path for image in found.worst],
        name=name,
        parameters=parameters,
        command="evaluate",
        chosen_by=[found.predicted],
        settings=settings,
        progress=progress,
        **options,
    )
