"""Queues of images that several people mark, and others review.

Used through `api.make_queue` and `api.open_queue`. A queue is one of `TaskQueue`, with a task an image; `dsctl tasks`
shows it. The task has a record for the marking and one for the review, if there is one. A person has one image to mark
and one to review at a time: asked again, a queue gives the same ones, so a page can be reloaded. Nobody is given what
they have marked to review. A lease ends `LEASE_S` after the image was given or kept last, and then others are given
the image; its draft stays. Any thread, any process.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from typing import Any, Final, NamedTuple

from datacache.annotations.model import quote
from datacache.catalog.tasks.base import DOING, DONE, TODO, Leased, TaskStore
from datacache.core.errors import LeaseLostError, TasksError, UsageError
from datacache.loaders.tasks.plan import Span, TaskParameters, Wait
from datacache.loaders.tasks.queue import TaskQueue
from datacache.marking.drafts import check_author

LEASE_S: Final = 600.0
_WAIT_S: Final = 10.0
_ALWAYS: Final = 2**31 - 1
"""Leases that people may let expire before an image counts as failed."""


class QueuedImage(NamedTuple):
    """An image that was given to a person."""

    queue: str
    path: str
    user: str
    review: bool
    lease: Leased


class QueueProgress(NamedTuple):
    """How far a queue is, in images."""

    name: str
    dataset: str
    review: bool
    """What was marked is reviewed by somebody else."""
    to_mark: int
    marking: dict[str, int]
    """Being marked, by person."""
    to_review: int
    reviewing: int
    done: int

    @property
    def images(self) -> int:
        return self.to_mark + sum(self.marking.values()) + self.to_review + self.reviewing + self.done


class MarkingQueue:
    """The queue `name` in `store`. Nothing is opened before the first call."""

    def __init__(self, store: TaskStore, name: str) -> None:
        self._tasks = TaskQueue(store, name, patience_s=0.0)
        self.name = name

    @classmethod
    def create(cls, store: TaskStore, name: str, dataset: str, paths: Iterable[str], *, review: bool) -> MarkingQueue:
        """Make a queue of images of a data set, in the order given. With the same arguments it is the same queue, as
        far as it has got; with others `TasksError`."""
        steps = 2 if review else 1
        spans = [Span(_checked(path), steps * n, steps) for n, path in enumerate(paths)]
        parameters = TaskParameters(
            dataset=dataset, images_of=dataset, records=steps, shuffle=False, lease_s=LEASE_S, max_lost=_ALWAYS
        )
        TaskQueue.create(store, name, spans, parameters, patience_s=0.0).make()
        return cls(store, name)

    def next_image(self, user: str, *, review: bool = False) -> QueuedImage | Wait | None:
        """Give the user an image to mark, or to review: the one that they have already, or the next. `Wait` where
        others have not finished theirs, which may come back; None where nothing is left for this user."""
        user = check_author(user)
        parameters = self._parameters()
        if review and parameters.records == 1:
            raise UsageError(f"nothing is reviewed in the queue {self.name}", hint="Make a queue with a review.")
        claim = blake2b(f"{review:d}{user}".encode(), digest_size=16).hexdigest()
        how: dict[str, Any] = {"position": int(review), "not_owner": user if review else ""}
        while True:
            lease = self._tasks.lease(user, claim, **how)
            if lease is None or isinstance(lease, Wait):
                return lease or self._wait(user, review=review)
            image = QueuedImage(self.name, lease.name, user, review, lease)
            try:
                self.keep(image)  # one that they have already may have expired
            except LeaseLostError:  # just now, to somebody else
                continue
            return image

    def keep(self, image: QueuedImage) -> None:
        """Renew the lease of an image. `LeaseLostError` where somebody else was given it."""
        self._tasks.store.report(image.lease, 0, lease_s=LEASE_S)

    def finish(self, image: QueuedImage) -> None:
        """Note that an image is marked, or reviewed. `LeaseLostError` as above. Idempotent."""
        if not image.review and image.lease.records > 1:
            self._tasks.store.pass_on(image.lease, 1)
        else:
            self._tasks.store.report(image.lease, image.lease.records, lease_s=LEASE_S)

    def give_back(self, image: QueuedImage) -> None:
        """Let others have an image, as it is. `LeaseLostError` as above."""
        self._tasks.store.release(image.lease)

    def progress(self) -> QueueProgress:
        """Return how far the queue is."""
        parameters = self._parameters()
        steps = self._tasks.steps()
        marking = {step.owner: step.tasks for step in steps if step.state == DOING and step.position == 0}

        def count(state: str, position: int | None = None) -> int:
            return sum(step.tasks for step in steps if step.state == state and position in (None, step.position))

        return QueueProgress(
            self.name,
            parameters.images_of,
            parameters.records > 1,
            count(TODO, 0) if steps else parameters.tasks,
            dict(sorted(marking.items())),
            count(TODO, 1),
            count(DOING, 1),
            count(DONE),
        )

    def remove(self) -> bool:
        """Forget the queue; drafts stay. Return whether it existed."""
        return self._tasks.remove()

    def _wait(self, user: str, *, review: bool) -> Wait | None:
        for step in self._tasks.steps():
            if step.state == DONE or (step.position == 1 and step.owner == user) or step.position > review:
                continue
            return Wait(_WAIT_S)
        return None

    def _parameters(self) -> TaskParameters:
        parameters = self._tasks.parameters
        if not parameters.images_of:
            raise TasksError(f"{self.name} is a queue of training tasks, not of images", hint="Take another name.")
        return parameters


def list_marking_queues(store: TaskStore, dataset: str) -> list[QueueProgress]:
    """Return the queues of a data set, by name."""
    found = store.queues()
    names = [queue.name for queue in found if TaskParameters.decode(queue.parameters).images_of == dataset]
    return [MarkingQueue(store, name).progress() for name in names]


def _checked(path: str) -> str:
    try:
        path.encode()
    except UnicodeEncodeError as exc:
        raise UsageError(f"{quote(path)} cannot be queued: its path is no text", hint="Leave the image out.") from exc
    return path
