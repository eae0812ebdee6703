"""The sampler of a DataLoader: each rank's share of an epoch's order, which can be saved and gone on with anywhere.

Used in the training process, by users and by `datacache.torch.loader`. It gives plain integers and imports no PyTorch,
though it is what `DataLoader(dataset, sampler=…)` and Lightning (`use_distributed_sampler=False`) want. While it is
iterated, the node's daemon knows the order (`lookahead.py`). One thread at a time.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from operator import length_hint
from typing import Any, Final, Unpack, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from datacache.loaders.lookahead import Lookahead, LookaheadGroup, Plannable, PlanSource, publish
from datacache.loaders.order import Ordering, OrderOptions, RankOrder, Remaining, Stage, State, stages_of
from datacache.settings import Settings, load_settings

log = logging.getLogger(__name__)

_CHUNK: Final = 16384  # samples whose order is computed at a time
_ADVANCE: Final = 64  # samples between two notes of the position to the lookahead


class EpochSampler:
    """Sample numbers of this rank, epoch by epoch: `for epoch in …: sampler.set_epoch(epoch)`, as for PyTorch's
    DistributedSampler; without `set_epoch` each epoch has the same order.

    `dataset` is a dataset or the number of its samples. `shuffle` is "global" (True), "none" (False) or "blocks", which
    takes `groups` (by default `dataset.groups()`) and `window`; see `EpochOrder`, and `RankOrder` for `even` and
    `multiple_of`, which counts samples here: it is 256 for gradients that are added up over four batches of 64. `rank`
    and `world` are, if not given, torch.distributed's once it is initialised, else the variables RANK and WORLD_SIZE,
    else 0 of 1. With `lookahead` the order is published to the daemon, where the dataset, or what it is a
    torch.utils.data.Subset of, reads through one.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        groups: ArrayLike | None = None,
        window: int | None = None,
        settings: Settings | None = None,
        **order: Unpack[OrderOptions],
    ) -> None:
        self._lookahead: Lookahead | LookaheadGroup | None = None
        self.ordering = Ordering(**order)
        self._order = self.ordering.of(dataset, groups=groups, window=window)
        self._window, self._settings = window, settings
        self._dataset = _plannable(dataset) if self.ordering.lookahead and not isinstance(dataset, int) else None
        self._stages: tuple[Stage, ...] = ()
        self._iteration: _Iteration | None = None
        self._next: RankOrder | None = None
        self.upcoming()  # whatever is wrong is said here

    @property
    def epoch(self) -> int:
        return self._order.epoch

    def set_epoch(self, epoch: int) -> None:
        """Set which epoch the next iteration is. The epoch that a loaded state is of goes on where the state says;
        every other one is whole."""
        if epoch != self.epoch:
            self._go_to(epoch, ())

    def __len__(self) -> int:
        """Return this rank's samples in a whole epoch, also while the rest of one is iterated: learning-rate schedules
        and Lightning, which adds what it had done before, count on that. What there is to come is `remaining`."""
        return len(self.ordering.share(self._order))

    @property
    def remaining(self) -> int:
        """This rank's samples in the iteration under way, from its beginning; if there is none, in the next one."""
        if self._iteration is not None and not self._iteration.finished:
            return len(self._iteration.order)
        return len(self.upcoming())

    def __iter__(self) -> Iterator[int]:
        """Yield this rank's samples: the epoch, or after `load_state_dict` what is left of it. That rest is iterated
        once: if it came to its end, the next iteration is a whole epoch."""
        iteration = _Iteration(self.upcoming())
        self._iteration = iteration
        return self._run(iteration)

    def state_dict(self, consumed: int | None = None) -> State:
        """Return what has to be saved to go on from here: JSON, a few hundred bytes.

        `consumed` is how many samples of the iteration the training has used on this rank. Without it, those that were
        handed out count as used. That is right where the sampler is read directly, and WRONG behind a DataLoader with
        workers: it fetches `num_workers * prefetch_factor` batches ahead, which would be skipped. Give
        `consumed=steps * batch_size` there; the loader of `datacache.torch.loader` counts by itself.
        """
        if self._iteration is None:
            return self.upcoming().state_dict(consumed or 0)
        return self._iteration.order.state_dict(self._iteration.yielded if consumed is None else consumed)

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Go on where a training stopped, with any number of ranks: all of them are given the same.

        `state` is one rank's, which is enough if all ranks had taken the same number of samples, or the list of all
        ranks' states. `UsageError` says in what a state differs from what is expected.
        """
        order = self._order if self._window is not None else self._order.with_window_of(state)
        epoch, stages = stages_of(state, order.identity())
        Remaining(order.size, stages)  # raises if they cannot be
        self._order = order
        self._go_to(epoch, tuple(stages))

    def close(self) -> None:
        """Tell the daemon that the published order is not read any more. The sampler can still be used."""
        lookahead, self._lookahead = self._lookahead, None
        if lookahead is not None:
            lookahead.close()

    def __del__(self) -> None:
        if hasattr(self, "_lookahead"):
            self.close()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_lookahead": None}

    def _go_to(self, epoch: int, stages: tuple[Stage, ...]) -> None:
        self._order = self._order.of_epoch(epoch)
        self._stages = stages
        self._iteration = None
        self._next = None

    def upcoming(self) -> RankOrder:
        """Return what the next iteration goes through."""
        if self._iteration is not None and self._iteration.finished and self._stages:
            self._stages = ()
            self._next = None
        ranks = self.ordering.ranks()
        if self._next is None or (self._next.rank, self._next.world) != ranks:
            self._next = self.ordering.share(self._order, ranks, self._stages)
        return self._next

    def _run(self, iteration: _Iteration) -> Iterator[int]:
        # Not before the first sample is asked for: by then a DataLoader has forked its workers, and a thread may start.
        lookahead = self._publish(iteration.order)
        step = _CHUNK if lookahead is None else _ADVANCE
        try:
            for start in range(0, len(iteration.order), _CHUNK):
                chunk = iteration.order.take(start, start + _CHUNK).tolist()
                for first in range(0, len(chunk), step):
                    if lookahead is not None:
                        lookahead.advance(start + first)
                    yield from iteration.hand_out(chunk[first : first + step])
            iteration.finished = True
            if lookahead is not None:
                lookahead.advance(len(iteration.order))
        finally:
            # At the end it stays until the next epoch is published: the last batches are still being read.
            if not iteration.finished and lookahead is not None and lookahead is self._lookahead:
                self.close()

    def _publish(self, order: RankOrder) -> Lookahead | LookaheadGroup | None:
        if self._dataset is None:
            return None
        before, self._lookahead = self._lookahead, None
        try:
            if self._dataset.plan_source() is not None:
                after = self.ordering.share(self._order.of_epoch(self.epoch + 1), (order.rank, order.world))
                settings = self._settings or getattr(self._dataset, "settings", None) or load_settings()
                self._lookahead = publish(settings, self._dataset, order, next_order=after)
        except Exception:  # whatever it is, a training goes on without
            log.warning("the order of samples is not published; they are read as they are asked for", exc_info=True)
            self._dataset = None
        if before is not None:
            before.close()
        return self._lookahead


def _plannable(dataset: Any) -> Any:
    """Return what can say where the samples of a dataset lie; None, and a note in the log, if there is nothing."""
    inner, indices = dataset, []
    while not hasattr(inner, "plan_source") and hasattr(inner, "dataset") and hasattr(inner, "indices"):
        indices.append(inner.indices)
        inner = inner.dataset
    if not hasattr(inner, "plan_source"):
        log.info(
            "no order of samples is published: %s does not say where they lie (it has no plan_source), so the daemon"
            " fetches nothing ahead",
            type(inner).__name__,
        )
        return None
    return _PartPlan(inner, indices) if indices else inner


class _PartPlan:
    """The plan of a torch.utils.data.Subset of a dataset, or of a subset of one."""

    def __init__(self, dataset: Any, indices: Sequence[Any]) -> None:
        """`indices`: of the outermost first."""
        self._dataset, self._indices = dataset, indices
        self.settings = getattr(dataset, "settings", None)

    def plan_source(self) -> PlanSource | None:
        return cast("PlanSource | None", self._dataset.plan_source())

    def plan_parts(self) -> list[Plannable] | None:
        parts = self._dataset.plan_parts() if hasattr(self._dataset, "plan_parts") else None
        return None if parts is None else [_PartPlan(part, self._indices) for part in parts]

    def plan_items(self, samples: NDArray[np.int64]) -> NDArray[np.uint32]:
        for indices in self._indices:
            if isinstance(indices, Sequence):  # a list of millions is not to be made an array for a few of them
                samples = np.fromiter((indices[at] for at in samples.tolist()), np.int64, len(samples))
            else:
                samples = np.asarray(indices, dtype=np.int64)[samples]
        of_all = samples % len(self._dataset)  # -1 is the last one
        return cast("NDArray[np.uint32]", self._dataset.plan_items(of_all))


class _Iteration:
    """One pass over a rank's order, and how far it has come."""

    def __init__(self, order: RankOrder) -> None:
        self.order = order
        self.finished = False
        self._taken = 0
        self._chunk: Iterator[int] = iter(())

    @property
    def yielded(self) -> int:
        return self._taken - length_hint(self._chunk)

    def hand_out(self, samples: list[int]) -> Iterator[int]:
        """Return the list's own iterator, which knows how many are left: handing one out costs nothing here."""
        self._taken += len(samples)
        self._chunk = iter(samples)
        return self._chunk
