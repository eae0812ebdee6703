"""Ray as an `Executor`. A call is a task of one processor, which Ray runs again when a process or a node dies."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any


class RayExecutor(Executor):
    """Has Ray do calls. `ray` is its library, connected to a cluster."""

    def __init__(self, ray: Any, *, retries: int) -> None:
        self._ray, self._retries = ray, retries
        self._remote: dict[Callable[..., Any], Any] = {}

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run a function there; its future has what it returns, or raises."""
        if fn not in self._remote:
            self._remote[fn] = self._ray.remote(num_cpus=1, max_retries=self._retries)(fn)
        future: Future[Any] = self._remote[fn].remote(*args, **kwargs).future()
        future.set_running_or_notify_cancel()  # Ray's thread ends with an error at a result for a cancelled one
        return future
