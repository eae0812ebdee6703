"""`dsctl cache`: what is on this node, and what stays; and `dsctl warm` and `dsctl jobs`, which bring it here.

With `--json`, the daemon's own answers; `jobs` prints `{"jobs": [{…}]}`. `warm` exits with 1 unless every byte is here
in the end: a warm-up of a part is not called done.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

import click

from datacache import api
from datacache.core.counters import count, format_seconds
from datacache.core.errors import CacheError, UsageError
from datacache.settings import format_bytes
from dataset_cli.app import App, SnapshotRef, command
from dataset_cli.commands.cluster import given_by_nodes

if TYPE_CHECKING:
    from dataset_cli.output import Output, Progress


@click.group()
def cache() -> None:
    """See and steer what this node has cached."""


def print_cache(out: Output, state: dict[str, Any]) -> None:
    """Print the daemon's `cache_status()` for people."""
    out.table(
        ["TIER", "USED", "LIMIT", "BLOCKS", "EVICTED", "FOLDER"],
        [
            [
                tier["name"],
                format_bytes(tier["used_bytes"]),
                format_bytes(tier["budget_bytes"]),
                f"{tier['blocks']:,}",
                format_bytes(tier["evicted_bytes"]),
                tier["folder"],
            ]
            for tier in state["tiers"]
        ],
        right=(1, 2, 3, 4),
    )
    rate = state["reads"]["hit_rate"]
    out.line(f"policy {state['policy']}; hit rate {'no reads yet' if rate is None else f'{rate:.1%}'}")
    cluster = state.get("cluster")  # a daemon from before says nothing of it
    if cluster:
        out.line(f"cluster {cluster['cluster']}: {given_by_nodes(cluster['from_nodes'])}; see: dsctl cluster status")
    out.lines(f"  {dataset['name']}: {format_bytes(dataset['ssd_bytes'])}" for dataset in state["datasets"])
    for each in state.get("namespaces", []):  # a daemon from before says nothing of them
        limit = "" if each["limit_bytes"] is None else f" of {format_bytes(each['limit_bytes'])}"
        out.line(f"  namespace {each['name']}: {format_bytes(each['ssd_bytes'])}{limit}")
    out.lines(f"  pinned: {ref}" for ref in state["pins"])
    out.lines(f"  warming {job['ref']}: {_progress(job)}" for job in state["jobs"] if job["state"] == "running")
    for plan in state["plans"]:
        done, ahead = f"{plan['position']:,} of {plan['items']:,} samples", count(plan["fetched"], "block")
        out.line(f"  order of {plan['dataset']}: {done}, {ahead} fetched ahead ({plan['state']})")
    warn_of_silent_stores(out, state.get("silent_stores", []))  # a daemon from before says nothing of them
    for tier in state["tiers"]:
        if tier["problem"]:
            out.warning(f"tier {tier['name']}: {tier['problem']}")


def _progress(job: dict[str, Any]) -> str:
    return f"{format_bytes(job['bytes_done'])} of {format_bytes(job['bytes_total'])}"


def warn_of_silent_stores(out: Output, silent_stores: list[dict[str, Any]]) -> bool:
    """Say which stores do not answer the daemon. Return whether there are any."""
    for store in silent_stores:
        silent = format_seconds(store["silent_s"])
        out.warning(f"{store['url']} has not answered the daemon for {silent}: {store['problem']}")
    return bool(silent_stores)


@command(cache)
def status(app: App) -> None:
    """Show tiers, datasets, pins and the hit rate."""
    state = api.cache_status(app.settings)
    app.out.result(state)
    if not app.out.json:
        print_cache(app.out, state)


@command(cache)
@click.argument("ref", type=SnapshotRef())
def pin(app: App, ref: str) -> None:
    """Never evict what this node has of a snapshot."""
    answer = api.pin(ref, app.settings)
    app.out.result(answer, f"pinned {answer['ref']}; fetch what is missing: dsctl warm {ref}")


@command(cache)
@click.argument("ref", type=SnapshotRef())
def unpin(app: App, ref: str) -> None:
    """Let the eviction policy decide again."""
    answer = api.unpin(ref, app.settings)
    text = f"unpinned {answer['ref']}" if answer.get("was_pinned", True) else f"{answer['ref']} was not pinned"
    app.out.result(answer, text)


@command(cache)
@click.argument("ref", type=SnapshotRef(), required=False)
@click.option("--all", "everything", is_flag=True, help="All that is not pinned, without a question.")
def evict(app: App, ref: str | None, everything: bool) -> None:
    """Drop what this node has of a dataset, or of all that is not pinned."""
    if ref and everything:
        raise UsageError("name a dataset, or say --all: not both")
    if not ref and not everything:
        if app.out.json or not (sys.stdin.isatty() and sys.stderr.isatty()):
            raise UsageError("which dataset is to go?", hint="Name it, or drop all that is not pinned with --all.")
        click.confirm("Drop everything that is not pinned from this node's cache?", abort=True, err=True)
    answer = api.evict(ref, app.settings)
    app.out.result(answer, f"freed {format_bytes(answer['freed_bytes'])}")


@command()
@click.argument("ref", type=SnapshotRef())
@click.option("--wait/--no-wait", default=True, help="Whether to wait until it is here (default: wait).")
def warm(app: App, ref: str, wait: bool) -> None:
    """Fetch all of a snapshot that is not on this node yet."""
    if not wait:
        job = api.warm(ref, wait=False, settings=app.settings)
        app.out.result(job, f"warming {job['ref']} in the background; see: dsctl jobs")
        return
    started = time.monotonic()
    with app.out.progress(f"warming {ref}") as bar:
        job = _follow(app, ref, bar)
    took_s = time.monotonic() - started
    if job["state"] != "done":
        app.out.result(job)
        more = f", and {count(job['errors'] - 1, 'more error')}" if job["errors"] > 1 else ""
        text = f"{job['ref']} is not warm: {job['error']}{more} ({_progress(job)} are here)"
        raise CacheError(text, hint=job.get("hint", ""))
    all_bytes, fetched = format_bytes(job["bytes_total"]), format_bytes(job["bytes_fetched"])
    given = job.get("bytes_from_nodes")  # a daemon from before says nothing of it
    given = f", {format_bytes(given)} of these from other nodes" if given else ""
    took = format_seconds(took_s)
    app.out.result(job, f"{job['ref']} is warm: {all_bytes}; {fetched} were fetched in {took}{given}")


def _follow(app: App, ref: str, bar: Progress) -> dict[str, Any]:
    """Show the warm-up until it has ended, and return its job."""

    def still(seconds: float, silent_stores: list[dict[str, Any]]) -> None:
        if not warn_of_silent_stores(app.out, silent_stores):
            app.out.warning(f"nothing has come for {seconds:.0f} s; it is waited for")

    job: dict[str, Any] = {}
    try:
        for job in api.follow_warm_up(
            ref,
            settings=app.settings,
            on_still=still,
            on_silence=lambda exc: app.out.warning(f"{exc.message}; the warm-up is waited for. {exc.hint}"),
        ):
            bar.update(f"{job['ref']}  {_progress(job)}", job["bytes_done"], job["bytes_total"])
    except KeyboardInterrupt:
        if job:
            app.out.warning(f"the warm-up goes on in the daemon; to end it: dsctl jobs cancel {job['id']}")
        else:  # the daemon may have begun, and its answer be on its way
            app.out.warning("if the warm-up has begun, it goes on in the daemon: dsctl jobs lists it")
        raise
    return job


@command(cls=click.Group, invoke_without_command=True)
def jobs(app: App) -> None:
    """List the warm-ups of this node's daemon, or cancel one."""
    if click.get_current_context().invoked_subcommand is not None:
        return
    client = api.running_daemon(app.settings)
    found = client.jobs() if client is not None else []
    app.out.result({"jobs": found}, "" if found else "no jobs")
    for job in found:
        kind = "  (begun by a read)" if job["background"] else ""
        app.out.line(f"{job['id']}  {job['state']:10}  {job['ref']}  {_progress(job)}{kind}")
        app.out.lines(f"    {words}" for words in (job["error"], job["hint"]) if words)
    if client is not None:
        warn_of_silent_stores(app.out, client.silent_stores())


@command(jobs)
@click.argument("id")
def cancel(app: App, id: str) -> None:
    """End a warm-up. What it has fetched stays in the cache."""
    job = api.cancel_job(id, app.settings)
    is_ending = job["state"] == "running"
    text = f"cancelling {job['ref']}" if is_ending else f"{job['ref']} has ended already: {job['state']}"
    app.out.result(job, text)
