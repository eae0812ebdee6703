"""Commit what people have marked on images, and deal images to them. Drafts themselves are in `marking.drafts`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import closing
from typing import TYPE_CHECKING

from datacache.api.opening import open_catalog, open_snapshot
from datacache.api.progress import of_images, shows
from datacache.manifest.model import Naming
from datacache.settings import Settings, load_settings

if TYPE_CHECKING:
    from datacache.loaders.tasks.images import MarkingQueue, QueueProgress
    from datacache.marking.commit import Committed


@shows(of_images)
def commit_marks(
    dataset: str,
    *,
    message: str,
    tags: Sequence[str] = (),
    to: str | None = None,
    authors: Collection[str] | None = None,
    only_done: bool = True,
    skip_predictions: bool = False,
    processes: int | None = None,
    settings: Settings | None = None,
    progress: Callable[[str, int, int], None] = lambda _what, _done, _total: None,
) -> Committed:
    """Make the next version of a data set out of its newest one and the drafts of these `authors` (None: of all) that
    are done, or of all with `only_done=False`. The drafts that went in are removed.

    All else is as it was: the format (or `to`; of images without annotations `yolo`), splits, and images that are not
    annotated. A draft on an image of which another version says something else by now is left, and so the result says.
    Where there is nothing to commit the result has the newest version and 0 images.

    Deterministic: the same drafts give the same version. A commit that was killed can be run again. `UsageError` where
    the format cannot hold predictions that nobody has accepted, without `skip_predictions`, which leaves them out; and
    where it has no objects. What stores and catalogs raise.
    """
    from datacache.catalog.objects import ObjectWriter
    from datacache.marking.commit import commit_marks as commit

    settings = settings or load_settings()
    with closing(open_catalog(settings)) as catalog:
        return commit(
            catalog,
            dataset,
            # A version of marks follows one of any kind.
            Naming(name=dataset, tags=tags, message=message, replace=True),
            to=to,
            authors=authors,
            only_done=only_done,
            skip_predictions=skip_predictions,
            open_snapshot=lambda record: open_snapshot(f"{record.dataset}@{record.id}", settings),
            open_objects=lambda: ObjectWriter(catalog, settings),
            processes=processes,
            progress=progress,
        )


def make_queue(
    name: str, dataset: str, paths: Iterable[str], *, review: bool, settings: Settings | None = None
) -> MarkingQueue:
    """Make a queue of images of a data set for several people to mark, in the order of `paths`, and with `review` for
    another person to review each. With the same arguments it is the same queue, as far as it has got; with others
    `TasksError`."""
    from datacache.catalog.open import open_task_store
    from datacache.catalog.refs import resolve
    from datacache.loaders.tasks.images import MarkingQueue

    settings = settings or load_settings()
    with closing(open_catalog(settings)) as catalog:
        resolve(catalog, dataset)
    return MarkingQueue.create(open_task_store(settings.catalog), name, dataset, paths, review=review)


def open_queue(name: str, settings: Settings | None = None) -> MarkingQueue:
    """Return the queue of images `name`: `next_image`, `keep`, `finish`, `give_back`, `progress`. Any thread may use
    it. `TasksError` at its first call where it is not there."""
    from datacache.catalog.open import open_task_store
    from datacache.loaders.tasks.images import MarkingQueue

    return MarkingQueue(open_task_store((settings or load_settings()).catalog), name)


def marking_queues(dataset: str, settings: Settings | None = None) -> list[QueueProgress]:
    """Return how far each queue of images of a data set is, by name."""
    from datacache.catalog.open import open_task_store
    from datacache.loaders.tasks.images import list_marking_queues

    with closing(open_task_store((settings or load_settings()).catalog)) as store:
        return list_marking_queues(store, dataset)
