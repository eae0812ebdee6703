"""Open an engine by what a user calls it: `dask://HOST:PORT`, `ray://HOST:PORT`, `queue`, `queue://JOB`, or an
executor of the user's own.

Used by `datacache.api`. The processes of an engine need this datacache, and settings with which they reach catalog and
stores, as on any machine.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from datacache.catalog.open import open_catalog_url, open_task_store
from datacache.core.cores import cores
from datacache.core.engine import Engine
from datacache.core.errors import UsageError
from datacache.core.parallel import Workers
from datacache.settings import Settings

_log = logging.getLogger(__name__)
_WIDTH_S = 2.0
"""A cluster is asked for its size this often."""
_CONNECT_S = 10.0
_RETRIES = 3


@contextmanager
def open_workers(
    on: str | Executor | None, processes: int | None, settings: Settings, *, models: bool = False
) -> Iterator[Workers]:
    """Give who does the work: the engine that `on` names, or processes of this machine. Leave it when all is committed:
    then what the engine had done is forgotten. `models` says that tasks load models, as to `open_engine`, whose
    `UsageError` it raises as well."""
    if on is None or on == "local":
        yield processes
        return
    if processes is not None:
        raise UsageError(f"{on} has processes of its own", hint="Give either how many here, or an engine.")
    with open_engine(on, settings, models=models) as engine:
        yield engine


def open_engine(on: str | Executor, settings: Settings, *, models: bool = False) -> Engine:
    """Return the engine; it is a context. `UsageError` for another name, where its library is missing, and where nobody
    answers."""
    folder = settings.home / "jobs"
    if on == "queue" or (isinstance(on, str) and on.startswith("queue://")):
        return _queue(on.partition("://")[2], settings, folder, models=models)
    if not isinstance(on, str):
        return Engine(on, width=lambda: int(getattr(on, "_max_workers", 0) or cores()), folder=folder)
    scheme, _, address = on.partition("://")
    openers = {"dask": _dask, "ray": _ray}
    if scheme not in openers or not address:
        raise UsageError(
            f"{on or repr(on)} is no engine",
            hint="Write local, dask://HOST:PORT, ray://HOST:PORT, queue or queue://JOB.",
        )
    try:
        executor, width, close = openers[scheme](address)
    except (OSError, TimeoutError, ConnectionError) as exc:
        raise UsageError(f"nobody answers at {on}: {exc}", hint="Is its scheduler running, at this address?") from exc
    except RuntimeError as exc:  # Ray's, such as for another version of itself or of Python
        raise UsageError(f"{on} cannot be used: {exc}", hint="Clients must have the cluster's versions.") from exc
    return Engine(executor, named=on, width=_seldom(_say_none(on, width)), folder=folder, close=lambda _done: close())


def _queue(job: str, settings: Settings, folder: Path, *, models: bool) -> Engine:
    from datacache.executors.queue.client import QueueExecutor
    from datacache.executors.queue.trusted import loads

    catalog = open_catalog_url(settings.catalog, settings=settings)
    executor = QueueExecutor(catalog, open_task_store(settings.catalog), job, models=models)

    def close(done: bool) -> None:
        executor.close(done=done)

    start = f": dsctl tasks work{' --allow-models' if models else ''} (with the catalog {catalog.url})"
    named = f"queue://{executor.name}"
    width = _seldom(_say_none(named, executor.width, start))
    return Engine(executor, named=named, width=width, folder=folder, close=close, loads=loads)


def _need(module: str, extra: str) -> Any:
    try:
        return import_module(module)
    except ModuleNotFoundError as exc:
        raise UsageError(f"{extra}:// needs {exc.name}", hint=f"pip install 'dsctl[{extra}]'") from exc


def _dask(address: str) -> tuple[Executor, Callable[[], int], Callable[[], None]]:
    distributed = _need("distributed", "dask")
    client = distributed.Client(f"tcp://{address}", timeout=_CONNECT_S, set_as_default=False)
    executor: Executor = client.get_executor(pure=False, retries=_RETRIES)

    def width() -> int:
        return sum(client.nthreads().values())

    return executor, width, client.close


def _ray(address: str) -> tuple[Executor, Callable[[], int], Callable[[], None]]:
    ray = _need("ray", "ray")
    from datacache.executors.ray import RayExecutor

    for tries_left in reversed(range(_RETRIES)):
        try:
            ray.init(f"ray://{address}", logging_level="error", log_to_driver=False)
            break
        except ConnectionAbortedError:  # it starts a process for each client, and at times without success
            ray.shutdown()
            if not tries_left:
                raise
    return RayExecutor(ray, retries=_RETRIES), lambda: int(ray.cluster_resources().get("CPU", 0)), ray.shutdown


def _say_none(on: str, ask: Callable[[], int], hint: str = "") -> Callable[[], int]:
    """Return a function that also warns, once each time that the engine has no worker: the command only waits then."""
    said = False

    def width() -> int:
        nonlocal said
        processes = ask()
        if not processes and not said:
            _log.warning("%s has no worker; the command waits until one is there%s", on, hint)
        said = not processes
        return processes

    return width


def _seldom(ask: Callable[[], int]) -> Callable[[], int]:
    """Return a function that asks again only after a while."""
    known, at = 1, float("-inf")

    def width() -> int:
        nonlocal known, at
        if time.monotonic() - at > _WIDTH_S:
            known, at = max(1, ask()), time.monotonic()
        return known

    return width
