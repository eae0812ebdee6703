"""`datacache.torch.loader`: a DataLoader that is set up by measuring, can be resumed, and says what holds it up.

Used in the training's process. The parts: `sampler.py` (order and states), `tuning/` (number of workers, and where the
time goes), `device.py`. PyTorch is imported when a loader is made. One thread, one iteration at a time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Unpack, cast

from datacache.core.counters import Counters, count, counters_of
from datacache.core.errors import UsageError
from datacache.loaders.device import DevicePrefetcher
from datacache.loaders.order import OrderOptions, State
from datacache.loaders.processes import keep_freed_memory, processors, worker_context
from datacache.loaders.sampler import EpochSampler
from datacache.loaders.tuning.autotune import Choice, choose, shut_down
from datacache.loaders.tuning.clock import Clocks, Measured, MeasuredCollate, enter_worker
from datacache.loaders.tuning.report import Report, Step, Stretch, Watch, diagnose
from datacache.settings import Settings, load_settings
from datacache.tiers.memory import counters_dir, make_shared

log = logging.getLogger("datacache.loader")

_END = object()


class Loader:
    """Batches of a map-style dataset, epoch after epoch: `for batch in loader`.

    `num_workers` and `prefetch_factor`: measured for about two seconds when they are first needed, unless given
    (`choice` says what was found; 0 workers is best where nothing has to be decoded). `shuffle` (by default True),
    `seed`, `rank`, `world`, `even`, `lookahead`: see `EpochSampler`. `multiple_of` is for gradients that are added up
    over several batches: the number of each rank's batches in an epoch is a multiple of it, and all are full. With
    `device`, batches are on that device, copied while the one before is computed on. `collate_fn` is
    `datacache.torch.collate` for our datasets and PyTorch's for others.

    Each iteration is the next epoch, or the one that `set_epoch` names; after `load_state_dict` it is what is left of
    the epoch of the state. `state_dict` counts the batches that the training got, not those that workers have ready.

    A batch of which all samples were skipped (`on_error="skip"`) does not come; it counts as used. Ranks that lose one
    are a step ahead of the others, and so is their state: then the states of all ranks have to be saved.

    `last` is the latest `Step`, also given to `on_step`; `report()` says what the epoch waits for. The report is logged
    (`datacache.loader`) every `report_every` seconds and at the end of an epoch; each step at level DEBUG.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        *,
        num_workers: int | None = None,
        prefetch_factor: int | None = None,
        drop_last: bool = False,
        collate_fn: Callable[[Any], Any] | None = None,
        device: Any = None,
        pin_memory: bool | None = None,
        persistent_workers: bool = True,
        multiprocessing_context: Any = None,
        worker_init_fn: Callable[[int], Any] | None = None,
        timeout: float = 0,
        report_every: float = 60.0,
        on_step: Callable[[Step], Any] | None = None,
        settings: Settings | None = None,
        **order: Unpack[OrderOptions],
    ) -> None:
        _check(dataset, batch_size, num_workers, prefetch_factor)
        self.dataset, self.batch_size, self.drop_last = dataset, batch_size, drop_last
        self.device = device
        settings = settings or getattr(dataset, "settings", None) or load_settings()
        if "multiple_of" in order:
            order["multiple_of"] *= batch_size  # from here on it counts samples
        self._sampler = EpochSampler(dataset, settings=settings, **order)
        if len(dataset) and not len(self):
            log.warning(
                "an epoch of this loader has no batch on this rank: %s in all, too few for what is asked for",
                count(len(dataset), "sample"),
            )
        from datacache.loaders.packed import CollateUnlessEmpty

        self._collate = CollateUnlessEmpty(collate_fn or default_collate(dataset))
        self._asked = (num_workers, prefetch_factor)
        on_cuda = device is not None and str(device).startswith("cuda")
        self._pin_memory = on_cuda if pin_memory is None else pin_memory
        self._worker_init, self._context = worker_init_fn, multiprocessing_context
        self._of_workers = {"persistent_workers": persistent_workers, "timeout": timeout}
        self._report_every, self._on_step = report_every, on_step
        self._counters: Counters = counters_of(
            counters_dir(settings.home, settings.ram_dir), partial(make_shared, home=settings.home)
        )
        self._choice: Choice | None = None
        self._batches: _Batches | None = None
        self._generator: Any = None
        self._epoch = 0
        self._fixed = False  # whether the user has said which epoch is next
        self._under_way = False  # whether that epoch's iteration was begun
        self._samples = self._given = 0  # of this iteration on this rank: all, and those handed out
        self._before = 0  # steps of the epoch before it
        self._watch: Watch | None = None
        keep_freed_memory()

    # --- epochs -----------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of the next epoch, or of what is left of one. It begins when the first batch is asked
        for."""
        batches, watch = self._ready()
        self._next_epoch()
        watch.begin(self._epoch, self._before)
        try:
            iterator = iter(batches if self.device is None else DevicePrefetcher(batches, self.device))
            while True:
                watch.asked()
                batch, samples = self._next_batch(iterator)
                if batch is _END:
                    break
                watch.handed_out(samples)
                yield batch
        except Exception:
            self._end_workers()  # one of them may be gone; the next iteration starts others
            raise
        finally:
            watch.end()

    def __len__(self) -> int:
        """Return the batches of a whole epoch, also while the rest of one is iterated: learning-rate schedules and
        Lightning, which adds what it had done before, count on that."""
        return self._count(len(self._sampler))

    @property
    def remaining(self) -> int:
        """The batches that are left of the iteration under way; if there is none, those of the next one."""
        return self._count(self._samples - self._given) if self._under_way else self._count(self._sampler.remaining)

    @property
    def epoch(self) -> int:
        """The epoch of the iteration under way or ended; before the first one, the one to come."""
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Set which epoch the next iteration is. A state that was loaded goes on if it is of that epoch."""
        if epoch != self._epoch or self._under_way:
            self._sampler.set_epoch(epoch)
            self._epoch, self._under_way, self._before = epoch, False, 0
        self._fixed = True

    def state_dict(self) -> State:
        """Return what is to be saved for going on behind the batch that the training got last: JSON, a few hundred
        bytes. Ranks in lockstep need that of one of them."""
        return self._sampler.state_dict(consumed=self._given if self._under_way else 0)

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Go on with the samples that a training had not seen, with any number of ranks and workers and any batch size.
        `state` is one rank's, or a list of all ranks'. See `EpochSampler.load_state_dict`."""
        self._sampler.load_state_dict(state)
        self._epoch, self._under_way, self._fixed = self._sampler.epoch, False, False
        here = self._sampler.upcoming()
        self._before = (here.order.size - here.left) // (self.batch_size * here.world)

    # --- what was measured --------------------------------------------------------------------------------------------

    @property
    def last(self) -> Step | None:
        """The latest step; None before the first."""
        return None if self._watch is None else self._watch.last

    @property
    def choice(self) -> Choice:
        """The number of workers, how far they read ahead, and why. Measures if that was not done yet."""
        if self._choice is None:
            workers, prefetch = self._asked
            if workers is None:
                self._choice = choose(
                    self.dataset, self.batch_size, self._collate, context=self._context, prefetch_factor=prefetch
                )
                log.info("%s", self._choice.text)
            else:
                self._choice = Choice(workers, (prefetch or 2) if workers else None, "as it was asked for")
        return self._choice

    @property
    def num_workers(self) -> int:
        return self.choice.num_workers

    def report(self) -> Report:
        """Return what the steps of this epoch waited for. The first batch is left out: it has to start the workers."""
        return diagnose(Stretch(0, processors())) if self._watch is None else self._watch.report()

    # --- the end ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the workers, and tell the daemon that the order is not read any more. Iterating starts them again."""
        self._end_workers()
        self._sampler.close()

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        workers = "not measured yet" if self._choice is None else self._choice.num_workers
        return f"<Loader: {len(self.dataset):,} samples by {self.batch_size}, workers: {workers}>"

    # --- inside -------------------------------------------------------------------------------------------------------

    def _end_workers(self) -> None:
        batches, self._batches = self._batches, None
        if batches is not None:
            shut_down(batches.iterator)

    def _ready(self) -> tuple[_Batches, Watch]:
        import torch
        from torch.utils.data import DataLoader

        if self._batches is None or self._watch is None:
            workers = self.choice.num_workers
            clocks = Clocks(workers)
            self._watch = Watch(
                clocks, self._counters, workers=workers, report_every=self._report_every, on_step=self._on_step
            )
            self._generator = torch.Generator()  # not the user's: his random numbers stay what they are
            dataloader = DataLoader(
                Measured(self.dataset, clocks),
                batch_size=self.batch_size,
                sampler=self._sampler,
                num_workers=workers,
                prefetch_factor=self.choice.prefetch_factor,
                drop_last=self.drop_last,
                collate_fn=MeasuredCollate(self._collate, clocks),
                pin_memory=self._pin_memory,
                multiprocessing_context=worker_context(self._context) if workers else None,
                worker_init_fn=partial(_init_worker, clocks, self._worker_init),
                generator=self._generator,
                **(self._of_workers if workers else {}),
            )
            self._batches = _Batches(dataloader)
        return self._batches, self._watch

    def _next_batch(self, iterator: Iterator[Any]) -> tuple[Any, int]:
        """Return a batch that has samples, and how many numbers of samples it was made of."""
        from datacache.loaders.packed import Nothing

        while True:
            batch = next(iterator, _END)
            if batch is _END:
                return batch, 0
            samples = min(self.batch_size, self._samples - self._given)
            self._given += samples
            if not isinstance(batch, Nothing):
                return batch, samples

    def _next_epoch(self) -> None:
        # Without `_under_way`, the state was saved at the end of its epoch.
        if self._under_way or not (self._fixed or self._batches_left()):
            self._epoch += 1
            self._sampler.set_epoch(self._epoch)
            self._before = 0
        self._fixed, self._under_way = False, True
        self._samples, self._given = self._sampler.remaining, 0
        # What workers that start now draw follows from the seed, the epoch and the rank.
        drawn_of = (self._sampler.ordering.seed, self._epoch, self._sampler.upcoming().rank)
        self._generator.manual_seed(hash(drawn_of) & (2**63 - 1))

    def _count(self, samples: int) -> int:
        return samples // self.batch_size if self.drop_last else -(-samples // self.batch_size)

    def _batches_left(self) -> int:
        """Return the batches that are left to any rank: all ranks have to agree on which epoch is next."""
        if self._sampler.ordering.even != "uneven":
            return self._count(self._sampler.remaining)
        here = self._sampler.upcoming()
        return self._count(-(-here.left // here.world))


class _Batches:
    """A DataLoader whose iterator, and with it the workers, can be got at."""

    def __init__(self, dataloader: Any) -> None:
        self._dataloader = dataloader
        self.iterator: Any = None

    def __len__(self) -> int:
        return len(self._dataloader)

    def __iter__(self) -> Iterator[Any]:
        self.iterator = iter(self._dataloader)
        return cast("Iterator[Any]", self.iterator)


def default_collate(dataset: Any) -> Callable[[Any], Any]:
    """Return what makes a batch of a dataset's samples where the user does not say."""
    if _is_ours(dataset):
        from datacache.loaders.packed import collate

        return collate
    from torch.utils.data import default_collate as collate_of_torch

    return cast("Callable[[Any], Any]", collate_of_torch)


def _is_ours(dataset: Any, depth: int = 16) -> bool:
    """Tell whether it is one of our datasets, or torch.utils.data's Subset or ConcatDataset of them."""
    if hasattr(dataset, "plan_source"):
        return True
    if not depth or dataset is None:
        return False
    parts = getattr(dataset, "datasets", None)
    inner = [getattr(dataset, "dataset", None), *(parts if isinstance(parts, list | tuple) else ())]
    return any(_is_ours(each, depth - 1) for each in inner)


def _init_worker(clocks: Clocks, then: Callable[[int], Any] | None, worker: int) -> None:
    enter_worker(clocks, worker)
    keep_freed_memory()
    if then is not None:
        then(worker)


def _check(dataset: Any, batch_size: int, num_workers: int | None, prefetch_factor: int | None) -> None:
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise UsageError(
            f"a loader needs samples by number, and {type(dataset).__name__} has no __len__ and __getitem__",
            hint="Give an iterable dataset to torch.utils.data.DataLoader.",
        )
    for name, value, least in (
        ("batch_size", batch_size, 1),
        ("num_workers", num_workers, 0),
        ("prefetch_factor", prefetch_factor, 1),
    ):
        if value is not None and value < least:
            raise UsageError(f"{name}={value!r}: it is a number from {least} on")


loader = Loader
"""As it is called in training scripts: `loader(dataset, batch_size=64)`."""
