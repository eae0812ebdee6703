"""Write down in the catalog who works on the queue, as client or as worker, and the bytes of parcels. The documents:

    work-job      NAME → who has the job, until when, and how it ended
    work-worker   worker → which job it works for ('' for any), and until when
    work-bytes    NAME/… → a worker's code, tasks or answers, packed, in pieces

A job is one task queue as well, `queue_name(job)`, whose tasks are parcels. Times are by the clock that all users of
the catalog share. The catalog is given without a cache of this node. Any thread may call.
"""

from __future__ import annotations

import json
import re
import time
from base64 import b64decode, b64encode
from typing import NamedTuple

from datacache.catalog.base import Catalog
from datacache.catalog.leases import all_documents, lasts
from datacache.catalog.tasks.base import WORK, QueueRecord, TaskStore
from datacache.core.errors import DatacacheError, TasksError, UsageError
from datacache.core.packed import pack, unpack

JOBS, WORKERS, BYTES = "work-job", "work-worker", "work-bytes"
RUNNING, DONE, FAILED = "running", "done", "failed"
JOB_LEASE_S = 30.0
WORKER_LEASE_S = 20.0
KEPT_S = 3600.0
"""A job whose client has died is there for so long, to be taken up; one that has ended, to be seen by its workers."""
_TAKE_S = 0.5
_PIECE = 4 * 2**20
"""Characters. A document of MongoDB has 16 MiB at most."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class QueueJob(NamedTuple):
    """A job as it was at one moment."""

    name: str
    token: str
    """Drawn whenever a client takes the job."""
    by: str
    until_s: float
    state: str


def check_job(name: str) -> str:
    """Return `name` if it can name a job; raise `UsageError` otherwise."""
    if not _NAME.fullmatch(name):
        raise UsageError(f"{name!r} cannot name a job", hint="Use letters, digits, '.', '_' and '-'.")
    return name


def queue_name(job: str) -> str:
    """Return the name of a job's task queue, which no queue of training tasks can have."""
    return f"{WORK}{job}"


def take_job(catalog: Catalog, name: str, by: str, token: str) -> QueueJob:
    """Take a job that nobody has. Wait for the lease of a client to end that may have died; `TasksError` where it
    lives. The same call again, with the `token` that was drawn for it, finds the job taken."""
    held = None
    while True:
        text = catalog.document(JOBS, name)
        now_s = catalog.now_s()
        if text is not None and _lives(old := _job(name, text), now_s):
            if old.token == token:
                return old
            if held not in (None, text):
                raise TasksError(f"{old.by} does the job {name} now", hint="Wait for its end, or take another name.")
            held = text
            time.sleep(_TAKE_S)
            continue
        job = QueueJob(name, token, by, now_s + JOB_LEASE_S, RUNNING)
        if catalog.set_document(JOBS, name, _text(job), old=text):
            return job


def renew_job(catalog: Catalog, job: QueueJob, state: str = RUNNING) -> QueueJob:
    """Hold a job for longer, or end it. `TasksError` where it was lost."""
    while True:
        text = catalog.document(JOBS, job.name)
        if text is None or _job(job.name, text).token != job.token:
            raise TasksError(f"the job {job.name} was taken over or removed", hint="Run the command again: it goes on.")
        until_s = catalog.now_s() + (JOB_LEASE_S if state == RUNNING else KEPT_S)
        new = job._replace(until_s=until_s, state=state)
        if catalog.set_document(JOBS, job.name, _text(new), old=text):
            return new


def jobs(catalog: Catalog) -> dict[str, QueueJob]:
    """Return all jobs, by name."""
    return {name: _job(name, text) for name, text in all_documents(catalog.documents, JOBS)}


def running(catalog: Catalog) -> list[str]:
    """Return the names of the jobs whose clients live."""
    now_s = catalog.now_s()
    return [job.name for job in jobs(catalog).values() if _lives(job, now_s)]


def forget_job(catalog: Catalog, store: TaskStore, name: str) -> None:
    """Remove a job's parcels; who had it stays noted."""
    store.remove(queue_name(name))
    end = f"{name}0"  # '0' follows '/'
    while page := catalog.documents(BYTES, after=f"{name}/", limit=4):
        for key, _piece in page:
            if key >= end:
                return
            catalog.remove_document(BYTES, key)


def forget_old(catalog: Catalog, store: TaskStore) -> None:
    """Remove jobs that nobody has taken up, or that ended long ago, and workers that are gone."""
    now_s = catalog.now_s()
    for name, text in list(all_documents(catalog.documents, JOBS)):
        job = _job(name, text)
        until_s = job.until_s + (KEPT_S if job.state == RUNNING else 0.0)
        if not lasts(until_s, now_s, JOB_LEASE_S + KEPT_S) and catalog.remove_document(JOBS, name, old=text):
            forget_job(catalog, store, name)
    for name, text in list(all_documents(catalog.documents, WORKERS)):
        if not lasts(_worker(text)[1] + KEPT_S, now_s, WORKER_LEASE_S + KEPT_S):
            catalog.remove_document(WORKERS, name, old=text)


def renew_worker(catalog: Catalog, name: str, job: str, *, models: bool = False) -> None:
    """Note that a worker lives, and whether it loads models."""
    text = json.dumps({"version": 1, "job": job, "until_s": catalog.now_s() + WORKER_LEASE_S, "models": models})
    while not catalog.set_document(WORKERS, name, text, old=catalog.document(WORKERS, name)):
        pass  # by itself, an answer was lost


def remove_worker(catalog: Catalog, name: str) -> None:
    """Note that a worker ends."""
    catalog.remove_document(WORKERS, name)


def count_workers(catalog: Catalog, job: str, *, models: bool = False) -> int:
    """Return how many workers live that do tasks of a job; with `models`, of one that has them load models."""
    now_s = catalog.now_s()
    found = (_worker(text) for _name, text in all_documents(catalog.documents, WORKERS))
    return sum(
        for_job in ("", job) and models <= may and lasts(until_s, now_s, WORKER_LEASE_S)
        for for_job, until_s, may in found
    )


def put_bytes(catalog: Catalog, key: str, data: bytes) -> None:
    """Keep bytes under a key, unless it has some."""
    text = b64encode(pack(data)).decode()
    pieces = [text[at : at + _PIECE] for at in range(0, len(text), _PIECE)] or [""]
    for number, piece in reversed(list(enumerate(pieces))):  # the first, by which the others are found, is last
        catalog.set_document(BYTES, f"{key}/{number}", f"{len(pieces)}:{piece}", old=None)


def get_bytes(catalog: Catalog, key: str) -> bytes | None:
    """Return the bytes under a key; None where some are missing. `DatacacheError` where they are damaged."""
    pieces: list[str] = []
    count = 1
    while len(pieces) < count:
        text = catalog.document(BYTES, f"{key}/{len(pieces)}")
        if text is None:
            return None
        number, _, piece = text.partition(":")
        pieces.append(piece)
        try:
            count = int(number)
        except ValueError:
            raise _damaged(key) from None
    try:
        return unpack(b64decode("".join(pieces), validate=True))
    except ValueError as exc:
        raise _damaged(key) from exc


def remove_bytes(catalog: Catalog, key: str) -> None:
    """Remove the bytes under a key."""
    number = 0
    while catalog.remove_document(BYTES, f"{key}/{number}"):
        number += 1


def _damaged(key: str) -> DatacacheError:
    return DatacacheError(f"the catalog's {BYTES}/{key} is damaged", hint="Run the command again: it is sent anew.")


def _text(job: QueueJob) -> str:
    return json.dumps({"version": 1, **job._asdict()})


def _job(name: str, text: str) -> QueueJob:
    """Return a job; one that nobody has for what is none."""
    try:
        found = json.loads(text)
        return QueueJob(name, str(found["token"]), str(found["by"]), float(found["until_s"]), str(found["state"]))
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return QueueJob(name, "", "", 0.0, "")


def _lives(job: QueueJob, now_s: float) -> bool:
    return job.state == RUNNING and lasts(job.until_s, now_s, JOB_LEASE_S)


def _worker(text: str) -> tuple[str, float, bool]:
    try:
        found = json.loads(text)
        return str(found["job"]), float(found["until_s"]), found.get("models") is True
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return "?", 0.0, False


def parameters_text(lease_s: float, max_lost: int, *, models: bool = False) -> str:
    """Return the parameters of a job's queue; `models` is for one whose tasks load models."""
    return json.dumps({"lease_s": lease_s, "max_lost": max_lost} | ({"models": True} if models else {}))


def needs_models(queue: QueueRecord) -> bool:
    """Tell whether a job's tasks load models, as its client says: workers that do not pass it over."""
    try:
        return bool(json.loads(queue.parameters)["models"])
    except (ValueError, TypeError, KeyError, RecursionError):
        return False


def parameters(queue: QueueRecord) -> tuple[float, int] | None:
    """Return how long leases of a job's tasks are, and how often one may be lost; None where no client has written
    it."""
    try:
        found = json.loads(queue.parameters)
        lease_s, max_lost = float(found["lease_s"]), int(found["max_lost"])
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None
    return (lease_s, max_lost) if 0 < lease_s <= KEPT_S and max_lost > 0 else None
