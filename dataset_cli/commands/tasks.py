"""`dsctl tasks`: queues of training tasks: make, list, show, retry, reset, remove, save and restore; and work for
commands with `--on queue`.

With `--json` a queue is `{"name", "dataset", "epoch", "epochs", "finished", "tasks", "records", "todo", "doing",
"done", "failed", "failed_before", "used", "parameters": {…}}`: tasks of the epoch by state, failed ones of earlier
epochs, and how many records of the epoch were reported as used. `list` prints an array of them; `show` adds `"leases"`
and `"failures"`, arrays of `{"epoch", "number", "name", "start", "records", "position", "token", "worker", "held_s",
"left_s", "failures", "lost", "errors"}`. `checkpoint` prints the checkpoint, which is JSON. `work` prints at its end
`{"ended": "done"|"failed"|"idle"|"once"|"stopped", "parcels", "tasks", "lost", "took_s"}`; `lost` are parcels that did
not count.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, BinaryIO

import click

from datacache import api
from datacache.core.counters import count, format_seconds
from datacache.core.errors import TasksError
from dataset_cli.app import App, DatasetName, command, confirm
from dataset_cli.commands.gc import Duration
from dataset_cli.output import SHOWN, printable

_CHECKPOINT_LIMIT_BYTES = 64 * 2**20
TERMINATED = 128 + 15
"""The exit code of what SIGTERM has ended."""


@click.group()
def tasks() -> None:
    """Queues of training tasks, and workers for commands with --on queue.

    dsctl tasks work does what such commands ask for. All the others are for queues of training.
    """


@command(tasks)
@click.argument("name", type=DatasetName())
@click.argument("dataset", metavar="REF_OR_URL")
@click.option("--records", type=click.IntRange(1), default=1024, show_default=True, help="The most of one task.")
@click.option("--epochs", type=click.IntRange(1), default=1, show_default=True)
@click.option("--lease", "lease_s", type=Duration(), default="60s", show_default=True, help="Silent workers are dead.")
@click.option(
    "--max-failures", type=click.IntRange(1), default=3, show_default=True, help="Then a task is given up, and listed."
)
@click.option(
    "--max-lost", type=click.IntRange(1), default=10, show_default=True, help="So many workers may die at one record."
)
@click.option(
    "--shuffle/--no-shuffle", default=True, help="Tasks and their records in random order (default: shuffle)."
)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Another seed, another order.")
def create(app: App, /, *, name: str, dataset: str, **options: Any) -> None:
    """Cut a data set into tasks: a snapshot, or shards in a snapshot, at a URL or in a folder.

    Made again with the same options it is the same queue, as far as it has got.

    \b
    dsctl tasks create mask-training mask-shards@v1 --epochs 90
    """
    queue = api.create_tasks(name, dataset, settings=app.settings, patience_s=0.0, **options)
    status = queue.status()
    p = status.parameters
    app.out.result(
        _as_json(status),
        f"{name}: {p.tasks:,} tasks of up to {p.records:,} records, {p.samples:,} records in {p.dataset},"
        f" {p.epochs:,} epochs",
    )


@command(tasks, "list")
def list_(app: App) -> None:
    """List the queues."""
    values = [_as_json(status) for status in api.list_tasks(app.settings)]
    app.out.listing(
        values,
        ["NAME", "EPOCH", "TODO", "DOING", "DONE", "FAILED", "DATA SET"],
        [
            [
                value["name"],
                f"{value['epoch'] + 1} of {value['epochs']}" + (", finished" if value["finished"] else ""),
                *(f"{value[state]:,}" for state in ("todo", "doing", "done")),
                f"{value['failed'] + value['failed_before']:,}",
                value["dataset"],
            ]
            for value in values
        ],
        right=(2, 3, 4, 5),
        empty="There are no task queues yet. Make one: dsctl tasks create NAME REF_OR_URL",
    )


@command(tasks)
@click.argument("name", type=DatasetName())
@click.option("--failed", "only_failed", is_flag=True, help="All failed tasks with all their errors, and nothing else.")
def show(app: App, name: str, only_failed: bool) -> None:
    """Show how far a queue is, who has which task, and what has failed."""
    status = _queue(app, name).status()
    leases = [] if only_failed else [_task_as_json(task) for task in status.doing]
    app.out.result(_as_json(status) | {"leases": leases, "failures": [_task_as_json(task) for task in status.failed]})
    if not only_failed:
        _show_progress(app, status)
    _show_failures(app, status, all_of_them=only_failed)


@command(tasks)
@click.argument("name", type=DatasetName())
@click.option("--task", "number", type=click.IntRange(0), help="Only the task with this number.")
def retry(app: App, name: str, number: int | None) -> None:
    """Put failed tasks back, to be tried again from where they failed."""
    retried = _queue(app, name).retry(number)
    app.out.result({"name": name, "retried": retried}, f"put {count(retried, 'failed task')} back")


@command(tasks)
@click.argument("name", type=DatasetName())
@click.option("--epoch", "epoch_only", is_flag=True, help="Only the epoch that it is in.")
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
def reset(app: App, name: str, epoch_only: bool, yes: bool) -> None:
    """Begin a queue anew. Workers that hold tasks lose them."""
    queue = _queue(app, name)
    confirm(yes, f"Begin {'the epoch' if epoch_only else 'all epochs'} of {name} anew?", about=_held(queue))
    queue.reset(epoch_only=epoch_only)
    status = queue.status()
    app.out.result(_as_json(status), f"{name} begins anew at epoch {status.epoch + 1}")


@command(tasks)
@click.argument("name", type=DatasetName())
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
def rm(app: App, name: str, yes: bool) -> None:
    """Remove a queue. Workers that hold tasks lose them; the data set is not touched."""
    queue = _queue(app, name)
    confirm(yes, f"Remove the task queue {name}?", about=_held(queue))
    queue.remove()
    app.out.result({"name": name, "removed": True}, f"removed {name}")


@command(tasks, has_json=False)
@click.argument("name", type=DatasetName())
def checkpoint(app: App, name: str) -> None:
    """Print what is done, as JSON, to go back to with restore: dsctl tasks checkpoint NAME > FILE"""
    print(_queue(app, name).get_shard_checkpoint())


@command(tasks)
@click.argument("name", type=DatasetName())
@click.argument("file", type=click.File("rb"))
def restore(app: App, name: str, file: BinaryIO) -> None:
    """Go back to a checkpoint: what was not done then is to do again. Workers that hold tasks lose them."""
    raw = file.read(_CHECKPOINT_LIMIT_BYTES)
    try:
        text = raw.decode()
    except UnicodeDecodeError as exc:
        raise TasksError(f"{file.name} is no checkpoint of a task queue") from exc
    queue = _queue(app, name)
    queue.restore_shard_from_checkpoint(text)
    queue.get_shard_checkpoint()  # the tasks are there, and counted below
    status = queue.status()
    done = status.counts["done"].tasks if "done" in status.counts else 0
    app.out.result(
        _as_json(status),
        f"{name} is back in epoch {status.epoch + 1}, {done:,} of {status.parameters.tasks:,} tasks done",
    )


@command(tasks)
@click.option("--job", default="", metavar="NAME", help="Only for --on queue://NAME, and end with it: 1 if it failed.")
@click.option("--processes", type=click.IntRange(1), default=1, show_default=True, help="How many work at once.")
@click.option("--once", is_flag=True, help="End after one parcel of tasks each.")
@click.option("--until-idle", is_flag=True, help="End when no command has work to do.")
@click.option("--max-idle", "max_idle_s", type=Duration(), metavar="TIME", help="End after so long without any.")
@click.option("--allow-models", is_flag=True, help="Load models of dsctl predict --on queue, which run code.")
def work(app: App, *, until_idle: bool, max_idle_s: float | None, **how: Any) -> int:
    """Do the tasks of commands with --on queue that use this catalog, on any machine.

    At SIGTERM and Ctrl-C it finishes what it has, or gives it back after 10 seconds.

    \b
    dsctl tasks work --processes 4
    dsctl convert mask@v1 --to yolo --as mask-yolo --on queue          elsewhere, or in another terminal
    """
    if until_idle and max_idle_s is not None:
        raise click.UsageError("--until-idle is --max-idle 0s: give one of them")

    def say(done: Any) -> None:
        what = f"{done.job}: {count(done.tasks, 'task')} in {done.took_s:.1f} s"
        if done.problem:
            app.out.warning(f"{what} do not count: {done.problem}")
        else:
            app.out.line(printable(what))

    ended = api.work_on_queue(settings=app.settings, say=say, max_idle_s=0.0 if until_idle else max_idle_s, **how)
    alone = ended.ended == "idle" and bool(how["job"])
    why = f"nobody has the job {how['job']}" if alone else _ENDED[ended.ended]
    app.out.result(ended._asdict(), f"{why}: {count(ended.tasks, 'task')} in {count(ended.parcels, 'parcel')}")
    if ended.ended == "stopped" and how["job"]:
        return TERMINATED  # with 0 Kubernetes would take a pod that is evicted for one that has done its part
    return int(alone or ended.ended == "failed")


_ENDED = {
    "done": "the job is done",
    "failed": "the job has failed",
    "idle": "nothing to do",
    "once": "done",
    "stopped": "stopped",
}


def _queue(app: App, name: str) -> api.TaskQueue:
    return api.open_tasks(name, app.settings, patience_s=0.0)


def _held(queue: api.TaskQueue) -> str:
    held = len(queue.status().doing)
    return f" {held:,} tasks are being done." if held else ""


def _as_json(status: api.TaskStatus) -> dict[str, Any]:
    counts = dict.fromkeys(("todo", "doing", "done", "failed"), 0)
    counts |= {state: found.tasks for state, found in status.counts.items()}
    p = status.parameters
    if not status.counts:  # the first worker makes them
        counts["todo"] = p.tasks
    return {
        "name": status.name,
        "dataset": p.dataset,
        "epoch": status.epoch,
        "epochs": p.epochs,
        "finished": status.finished,
        "tasks": p.tasks,
        "records": p.samples,
        **counts,
        "failed_before": sum(task.epoch < status.epoch for task in status.failed),
        "used": sum(found.used for found in status.counts.values()),
        "parameters": asdict(p),
    }


def _task_as_json(task: api.TaskState) -> dict[str, Any]:
    value = task._asdict()
    value["worker"] = value.pop("owner")
    value["errors"] = list(task.errors)
    del value["state"]
    return value


def _show_progress(app: App, status: api.TaskStatus) -> None:
    value = _as_json(status)
    used, records = value["used"], value["records"]
    failed = f", {len(status.failed):,} failed" if status.failed else ""
    ended = f", finished{failed}" if status.finished else ""
    app.out.fields(
        {
            "queue": value["name"],
            "data set": value["dataset"],
            "epoch": f"{status.epoch + 1} of {value['epochs']}{ended}",
            "tasks": ", ".join(f"{value[state]:,} {state}" for state in ("todo", "doing", "done", "failed")),
            "records": f"{used:,} of {records:,} used ({used / records:.1%})",
        }
    )
    if not status.doing:
        return
    app.out.line()
    app.out.table(
        ["WORKER", "TASK", "PART OF", "RECORD", "HELD", "LEASE"],
        [
            [
                task.owner,
                f"{task.epoch + 1}/{task.number}",
                task.name,
                f"{task.position:,} of {task.records:,}",
                format_seconds(max(0.0, task.held_s)),
                f"{format_seconds(task.left_s)} left" if task.left_s > 0 else "expired",
            ]
            for task in status.doing[:SHOWN]
        ],
        right=(3,),
    )
    if len(status.doing) > SHOWN:
        app.out.line(f"… and {len(status.doing) - SHOWN:,} more; --json has all")


def _show_failures(app: App, status: api.TaskStatus, *, all_of_them: bool) -> None:
    shown = status.failed if all_of_them else status.failed[:SHOWN]
    if all_of_them and not shown:
        app.out.line("no task has failed")
    for task in shown:
        app.out.line()
        app.out.line(
            f"failed: task {task.number} of epoch {task.epoch + 1}, {printable(task.name)} records {task.start:,} to"
            f" {task.start + task.records - 1:,}, after {task.position:,} of {task.records:,}"
        )
        errors = task.errors if all_of_them else task.errors[-1:]
        app.out.lines(f"  {printable(line)}" for error in errors for line in error.splitlines())
    if shown:
        app.out.line()
        if len(shown) < len(status.failed):
            app.out.line(f"… and {len(status.failed) - len(shown):,} more: dsctl tasks show {status.name} --failed")
        app.out.line(f"Put them back: dsctl tasks retry {status.name}")
