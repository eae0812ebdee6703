"""`dsctl cache`: what is on this node, and what stays. With `--json`, the daemon's own answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from datacache.core.counters import count
from dataset_cli.app import App, SnapshotRef, json_option, pass_app
from dataset_cli.output import format_bytes, format_seconds

if TYPE_CHECKING:
    from dataset_cli.output import Output


@click.group()
def cache() -> None:
    """See and steer what this node has cached."""


def print_cache(out: Output, state: dict[str, Any]) -> None:
    """The daemon's `cache_status()` for people."""
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
    reads = state["reads"]
    rate = f"{reads['hit_rate']:.1%}" if reads["hit_rate"] is not None else "no reads yet"
    out.line(f"policy {state['policy']}; hit rate {rate}")
    for dataset in state["datasets"]:
        out.line(f"  {dataset['name']}: {format_bytes(dataset['ssd_bytes'])}")
    for ref in state["pins"]:
        out.line(f"  pinned: {ref}")
    for job in state["jobs"]:
        if job["state"] == "running":
            done, total = format_bytes(job["bytes_done"]), format_bytes(job["bytes_total"])
            out.line(f"  warming {job['ref']}: {done} of {total}")
    for plan in state["plans"]:
        done = f"{plan['position']:,} of {plan['items']:,} samples"
        out.line(
            f"  order of {plan['dataset']}: {done}, {count(plan['fetched'], 'block')} fetched ahead ({plan['state']})"
        )
    warn_of_silent_stores(out, state.get("silent_stores", []))  # a daemon from before says nothing of them
    for tier in state["tiers"]:
        if tier["problem"]:
            out.warning(f"tier {tier['name']}: {tier['problem']}")


def warn_of_silent_stores(out: Output, silent_stores: list[dict[str, Any]]) -> bool:
    """Say which stores do not answer the daemon: whether there are any."""
    for store in silent_stores:
        silent = format_seconds(store["silent_s"])
        out.warning(f"{store['url']} has not answered the daemon for {silent}: {store['problem']}")
    return bool(silent_stores)


@cache.command()
@json_option
@pass_app
def status(app: App) -> None:
    """Show tiers, datasets, pins and the hit rate."""
    from datacache import api

    state = api.connect(app.settings).cache_status()
    app.out.result(state)
    if not app.out.json:
        print_cache(app.out, state)


@cache.command()
@click.argument("ref", type=SnapshotRef())
@json_option
@pass_app
def pin(app: App, ref: str) -> None:
    """Never evict what this node has of a snapshot."""
    from datacache import api

    answer = api.connect(app.settings).pin(ref)
    app.out.result(answer, f"pinned {answer['ref']}; fetch what is missing: dsctl warm {ref}")


@cache.command()
@click.argument("ref", type=SnapshotRef())
@json_option
@pass_app
def unpin(app: App, ref: str) -> None:
    """Let the eviction policy decide again."""
    from datacache import api

    answer = api.connect(app.settings).unpin(ref)
    text = f"unpinned {answer['ref']}" if answer.get("was_pinned", True) else f"{answer['ref']} was not pinned"
    app.out.result(answer, text)


@cache.command()
@click.argument("ref", type=SnapshotRef(), required=False)
@click.option("--all", "everything", is_flag=True, help="All that is not pinned, without a question.")
@json_option
@pass_app
def evict(app: App, ref: str | None, everything: bool) -> None:
    """Drop what this node has of a dataset, or of all that is not pinned."""
    import sys

    from datacache import api
    from datacache.core.errors import UsageError

    if ref and everything:
        raise UsageError("name a dataset, or say --all: not both")
    if not ref and not everything:
        if app.out.json or not (sys.stdin.isatty() and sys.stderr.isatty()):
            raise UsageError("which dataset is to go?", hint="Name it, or drop all that is not pinned with --all.")
        click.confirm("Drop everything that is not pinned from this node's cache?", abort=True, err=True)
    answer = api.connect(app.settings).evict(ref)
    app.out.result(answer, f"freed {format_bytes(answer['freed_bytes'])}")
