"""Fetch the blocks that trainings will read, in the order they have published, a window ahead of them.

Any thread may call it. One thread follows the plans: it reads their positions, looks which blocks have come into their
windows and are not here, and ends the plans of dead processes. As many threads as there may be fetches at a time take
blocks from the plan that has the fewest under way, and fetch them as a warm-up does, behind the reads that wait.

A plan's object that is gone or changed is passed over: its reader gets the error. While the store is away the plan
waits, ever longer; while the tiers keep nothing more, until there is room. What the disk of another node keeps is
fetched ahead as far as RAM has room, and else left to its reader.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import lmdb

from datacache.core.errors import (
    CatalogUnavailableError,
    DatacacheError,
    SettingsError,
    StoreAccessError,
    StoreUnavailableError,
    UsageError,
)
from datacache.core.ids import BlockId
from datacache.daemon.fetcher import Fetcher
from datacache.daemon.orders.plan import Plan, PlanObjects, Wanted
from datacache.daemon.orders.plan_file import PlanFile, PlanHeader, remove_if_dead
from datacache.manifest.reader import Manifest
from datacache.settings import Settings
from datacache.tiers.containers import open_region_size
from datacache.tiers.memory import lookahead_dir
from datacache.tiers.tier import Tier
from datacache.tiers.writer import TierWriter

if TYPE_CHECKING:  # see `server`: it comes with the first order, or with the policy
    import numpy as np
    from numpy.typing import NDArray

    from datacache.daemon.orders.clairvoyant import Clairvoyant

log = logging.getLogger(__name__)
_WINDOW_BYTES = 512 * 2**20
_WINDOW_SHARE = 4
_CLAIRVOYANT_SHARE = 16
"""Fetching ahead takes room from cached blocks, so the window is a smaller part of the tier."""
_STEP_BYTES, _STEP_SHARE = 16 * 2**20, 64
_LOOK_EVERY_S, _BUSY_LOOK_S, _IDLE_LOOK_S = 0.02, 0.004, 30.0
_ALIVE_EVERY_S = 0.5
_PAUSE_S, _MAX_PAUSE_S = 1.0, 30.0
_OBJECTS_KEPT_S = 300.0
_STANDS_S = 300.0
"""An order that stands still for so long holds up no warm-up: its program may have been forgotten in a debugger."""
_AGAIN_S = 0.2
_STOP_TIMEOUT_S, _ROOM_STOP_TIMEOUT_S = 0.5, 5.0
_ALL_OBJECTS = (StoreUnavailableError, StoreAccessError, SettingsError, CatalogUnavailableError)


@dataclass
class LookaheadStats:
    """The fetches for all plans since the daemon's start."""

    plans: int = 0
    fetched: int = 0
    fetched_bytes: int = 0


class Room:
    """The part of a tier that may be filled ahead: taken before a fetch, so that nothing is fetched to be thrown away.

    Any thread may take and give. A thread of its own has room made when there is little, by the tier's policy, and
    tries again after a while if there is none to be made.
    """

    def __init__(
        self, tier: Tier, make: Callable[[int], bool], wake: Callable[[], None], *, step_bytes: int, reserve_bytes: int
    ) -> None:
        """`make` makes so much room and tells whether there is; `wake` is called when there may be more. Room is made
        in steps, before there is none left; `reserve_bytes` are never given away, because making room takes some."""
        self._tier, self._make, self._wake = tier, make, wake
        self._step_bytes, self._reserve_bytes = step_bytes, reserve_bytes
        self._lock = threading.Lock()  # guards _taken
        self._taken = 0
        self._short = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="room", daemon=True)
        self.full = False
        """True if there was no room to be had at the last try to make some."""

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def take(self, size_bytes: int) -> bool:
        """Take room for a block, the caller's until it gives it back; False if there is none."""
        with self._lock:
            left = self._tier.budget_bytes - self._tier.used_bytes - self._taken - size_bytes - self._reserve_bytes
            if left < self._step_bytes:
                self._short.set()
            if left < 0 or (self.full and left < self._step_bytes) or self._tier.problem:
                return False
            self._taken += size_bytes
            return True

    def give(self, size_bytes: int) -> None:
        """Give room back: the block is stored, or will not be."""
        with self._lock:
            self._taken -= size_bytes

    def look(self, *, refused: bool = False) -> None:
        """Have the thread make room if there is too little, or if the tier has `refused` a block, whatever room there
        seemed to be."""
        self.full |= refused
        self._short.set()

    def stop(self, timeout_s: float) -> None:
        """End the thread."""
        self._stopping.set()
        self._short.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            self._short.wait()
            if self._stopping.is_set():
                return
            self._short.clear()
            try:
                self.full = not self._make(self._reserve_bytes + 2 * self._step_bytes)
            except (lmdb.Error, OSError) as exc:
                log.warning("no room can be made: %s", exc)
                self.full = True
            except Exception:  # a plan waits then, and readers fetch what it would have fetched
                log.exception("no room can be made")
                self.full = True
            if self.full and self._stopping.wait(_AGAIN_S):
                return
            self._wake()


class Lookaheads:
    """The published orders of a home."""

    def __init__(
        self, settings: Settings, writer: TierWriter, fetcher: Fetcher, open_manifest: Callable[[str], Manifest]
    ) -> None:
        self._folder, self._concurrency = lookahead_dir(settings.home, settings.ram_dir), settings.concurrency
        self._writer, self._fetcher, self._open_manifest = writer, fetcher, open_manifest
        self._tier = writer.tiers[-1] if settings.ssd_bytes else writer.tiers[0]
        self._ram = writer.tiers[0]
        share = _CLAIRVOYANT_SHARE if settings.eviction == "clairvoyant" else _WINDOW_SHARE
        self._window_bytes = min(_WINDOW_BYTES, self._tier.budget_bytes // share)
        self._changed = threading.Condition()  # guards all below and what plans have ready
        self._plans: dict[str, Plan] = {}
        self._known: dict[object, PlanObjects] = {}  # kept for a while: the next epoch has the same
        self._threads: list[threading.Thread] = []
        self._started = False
        self._stopping = threading.Event()
        self._clairvoyant: Clairvoyant | None = None
        if settings.eviction == "clairvoyant" and settings.ssd_bytes:
            from datacache.daemon.orders.clairvoyant import Clairvoyant

            self._clairvoyant = Clairvoyant(writer, self._tier, self._stopping.is_set)
        budget_bytes = self._tier.budget_bytes
        self._room = Room(
            self._tier,
            self._make_room,
            self._wake,
            step_bytes=min(_STEP_BYTES, budget_bytes // _STEP_SHARE),
            reserve_bytes=open_region_size(budget_bytes) if self._clairvoyant is not None else 0,
        )
        self.stats = LookaheadStats()
        with contextlib.suppress(OSError):  # nobody follows these any more: publishers see it by the mark
            for path in self._folder.iterdir():
                try:
                    if not remove_if_dead(path):
                        PlanFile(path).marked = False
                except OSError as exc:
                    log.warning("%s cannot be used: %s", path, exc)

    def add(self, header: PlanHeader, items: NDArray[np.uint32]) -> None:
        """Follow a plan from now on, in place of an earlier one of its id. `UsageError` if its file is not there or its
        rows are none; the catalog's errors."""
        try:
            file = PlanFile(self._folder / header.id)
        except OSError as exc:
            raise UsageError(f"the plan {header.id} has no file: {exc.strerror or exc}") from exc
        plan = Plan(header, items, self._objects(header), file)
        with self._changed:
            if self._stopping.is_set():
                return
            if self._clairvoyant is not None:  # before anybody can drop it
                self._clairvoyant.add(plan)
            self._plans[plan.id] = plan
            self.stats.plans += 1
            if not self._started:
                self._started = True
                self._room.start()
                self._begin_locked("plans", self._follow)
                for n in range(self._concurrency):
                    self._begin_locked(f"plan {n}", self._work)
            self._changed.notify_all()
        if self._clairvoyant is not None:
            self._room.look()  # which sorts its samples
        file.marked = True
        log.info("following the order %s of %s: %d samples", plan.id, plan.dataset, plan.length)

    def plans(self) -> list[dict[str, object]]:
        """Return the progress of the plans."""
        return [plan.state() | {"state": self._state(plan)} for plan in list(self._plans.values())]

    def planned(self, ref: str) -> bool:
        """Tell whether a snapshot (`dataset@id`, the id shortened or not) is being fetched in an order that goes on."""
        dataset, _, id = ref.partition("@")
        now_s = time.monotonic()
        return any(
            plan.dataset == dataset
            and plan.snapshot
            and plan.snapshot.startswith(id)
            and not plan.over()
            and now_s - plan.stands_since_s(now_s) < _STANDS_S
            for plan in list(self._plans.values())
        )

    def plans_parts(self, dataset: str) -> bool:
        """Tell whether an order that goes on reads parts of a data set's objects."""
        plans = list(self._plans.values()) if self._plans else ()
        return any(plan.dataset == dataset and plan.items.shape[1] == 3 and not plan.over() for plan in plans)

    @property
    def moved_bytes(self) -> int:
        """The bytes put into another region before their own was evicted."""
        return self._clairvoyant.moved_bytes if self._clairvoyant is not None else 0

    def stop(self) -> None:
        """End all threads and wait for those that do not wait for a store: they end with the fetcher."""
        self._stopping.set()
        self._wake()
        self._room.stop(_ROOM_STOP_TIMEOUT_S)
        end = time.monotonic() + _STOP_TIMEOUT_S
        for thread in list(self._threads):
            thread.join(max(0.0, end - time.monotonic()))

    def _make_room(self, need_bytes: int) -> bool:
        if self._clairvoyant is not None:
            return self._clairvoyant.make_room(need_bytes)
        return self._writer.call(lambda: self._tier.make_room(need_bytes)).result()

    def _objects(self, header: PlanHeader) -> PlanObjects:
        key = header.snapshot or header.refs
        with self._changed:
            known = self._known.get(key)
        if known is None:
            manifest = self._open_manifest(header.snapshot) if header.snapshot else None
            objects = PlanObjects(manifest, header.refs)
            with self._changed:
                known = self._known.setdefault(key, objects)
                if known is objects:
                    self._begin_locked("learn", self._learn, objects)
        known.used_s = time.monotonic()
        return known

    def _learn(self, objects: PlanObjects) -> None:
        while not objects.complete.is_set() and not self._stopping.is_set():
            try:
                objects.learn_all(self._stopping.is_set)
            except Exception as exc:  # whatever it is, it may be over the next time
                ours = isinstance(exc, DatacacheError)
                log.log(logging.WARNING if ours else logging.ERROR, "a plan's objects: %s", exc, exc_info=not ours)
                self._stopping.wait(_MAX_PAUSE_S)

    def _begin_locked(self, name: str, work: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=work, args=arguments, name=name, daemon=True)
        self._threads = [*(each for each in self._threads if each.is_alive()), thread]
        thread.start()

    def _follow(self) -> None:
        alive_at_s = 0.0
        while not self._stopping.is_set():
            with self._changed:
                self._changed.wait_for(lambda: self._plans or self._stopping.is_set(), _IDLE_LOOK_S)
                plans = list(self._plans.values())
            if self._stopping.is_set():
                return
            if time.monotonic() >= alive_at_s:
                self._look_after(plans)
                alive_at_s = time.monotonic() + _ALIVE_EVERY_S
            moved = [self._look_ahead(plan, len(plans)) for plan in plans]
            self._stopping.wait(_BUSY_LOOK_S if any(moved) else _LOOK_EVERY_S)

    def _look_ahead(self, plan: Plan, plans: int) -> bool:
        now_s = time.monotonic()
        if now_s < plan.paused_until_s:
            return False
        window_bytes = self._window_bytes
        if self._fetcher.partitions(plan.dataset):
            window_bytes = min(window_bytes, self._ram.budget_bytes // _WINDOW_SHARE)
        plan.window_bytes = window_bytes // plans
        before = len(plan.ready)
        try:
            moved = plan.look_ahead(self._missing)
        except DatacacheError as exc:
            self._pause(plan, exc)
            return False
        except Exception:  # of one plan; the others go on
            log.exception("the plan %s", plan.id)
            self._drop(plan)
            return False
        with self._changed:
            plan.drop_passed()
            if len(plan.ready) > before or not moved:
                self._changed.notify(max(1, len(plan.ready)))
        return moved

    def _missing(self, blocks: Sequence[BlockId]) -> list[int]:
        """Return the positions of the blocks that are not here, of those of this part."""
        part = self._writer.part
        return [at for at in self._fetcher.local.missing(blocks) if part.has(blocks[at])]

    def _look_after(self, plans: Sequence[Plan]) -> None:
        try:
            for plan in plans:
                plan.stands_since_s(time.monotonic())
                closed = not plan.file.path.exists()  # its publisher has taken it back
                if closed or remove_if_dead(plan.file.path):
                    self._drop(plan, dead=not closed)
            now_s = time.monotonic()
            with self._changed:
                for plan in self._plans.values():
                    plan.objects.used_s = now_s
                self._known = {key: one for key, one in self._known.items() if now_s - one.used_s < _OBJECTS_KEPT_S}
            if self._clairvoyant is not None and self._clairvoyant.has_news():
                self._room.look()
        except Exception:  # the plans go on
            log.exception("the plans")

    def _drop(self, plan: Plan, *, dead: bool = False) -> None:
        with self._changed:
            if self._plans.get(plan.id) is plan:
                del self._plans[plan.id]
        if self._clairvoyant is not None:
            self._clairvoyant.drop(plan, dead=dead)

    def _work(self) -> None:
        while True:
            with self._changed:
                taken: tuple[Plan, Wanted, bool] | None = None
                while taken is None:
                    if self._stopping.is_set():
                        return
                    taken = self._take()
                    if taken is None:
                        self._changed.wait()
                plan, wanted, has_room = taken
                plan.fetching += 1
            try:
                self._fetch(plan, wanted, has_room=has_room)
            except Exception:  # of one block; the thread goes on
                log.exception("fetching ahead")
                plan.errors += 1
            finally:
                with self._changed:
                    plan.fetching -= 1

    def _take(self) -> tuple[Plan, Wanted, bool] | None:
        """Return the next block to fetch, of the plan with the fewest under way, and whether it has taken room."""
        now_s = time.monotonic()
        candidates = [
            plan
            for plan in self._plans.values()
            if plan.ready
            and now_s >= plan.paused_until_s
            and self._tier.has_room_of_its_own(plan.dataset, plan.ready[0].length)
        ]
        while candidates:
            plan = min(candidates, key=lambda plan: plan.fetching)
            wanted = plan.ready[0]
            elsewhere = self._fetcher.kept_elsewhere(wanted.id, plan.dataset)
            if not elsewhere and not self._room.take(wanted.length):
                return None
            plan.ready.popleft()
            if not elsewhere or self._ram.admits(wanted.length):
                return plan, wanted, not elsewhere
            candidates = [plan for plan in candidates if plan.ready]
        return None

    def _fetch(self, plan: Plan, wanted: Wanted, *, has_room: bool) -> None:
        stored = functools.partial(self._stored, plan, wanted, has_room)
        taken = has_room
        try:
            looked = self._fetcher.landings
            if not self._fetcher.local.has(wanted.id):
                ref = plan.objects.ref(wanted.row)
                lane = self._clairvoyant.lane(plan, wanted) if self._clairvoyant is not None else 0
                self._fetcher.fill(
                    wanted.id, ref, wanted.number, plan.dataset, stored=stored, lane=lane, looked=looked, soon=True
                )
                taken = False  # `stored` gives it back
            plan.pause_s = 0.0
        except _ALL_OBJECTS as exc:
            with self._changed:
                plan.ready.appendleft(wanted)
            self._pause(plan, exc)
        except DatacacheError as exc:
            log.log(logging.DEBUG if plan.errors else logging.WARNING, "passed over in an order: %s", exc)
            plan.errors += 1
        finally:
            if taken:
                self._room.give(wanted.length)

    def _stored(self, plan: Plan, wanted: Wanted, has_room: bool, kept: bool) -> None:
        if has_room:
            self._room.give(wanted.length)
        if not kept:
            self._room.look(refused=True)
            return
        with self._changed:
            plan.fetched += 1
            plan.fetched_bytes += wanted.length
            self.stats.fetched += 1
            self.stats.fetched_bytes += wanted.length

    def _pause(self, plan: Plan, exc: Exception) -> None:
        """Pause a plan. Of several fetches that fail together, the first sets the pause."""
        now_s = time.monotonic()
        if now_s >= plan.paused_until_s:
            plan.pause_s = min(max(_PAUSE_S, 2 * plan.pause_s), _MAX_PAUSE_S)
            plan.paused_until_s = now_s + plan.pause_s
            log.warning("the order of %s waits for %.0f s: %s", plan.dataset, plan.pause_s, exc)

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _state(self, plan: Plan) -> str:
        if time.monotonic() < plan.paused_until_s:
            return "waiting for the store"
        if plan.over():
            return "over"
        if self._room.full and plan.ready:
            return "no room"
        return "fetching" if plan.ready or plan.fetching else "ahead"
