"""`dsctl cluster`: the cluster of caches that this node is in, as its daemon sees it.

`status --json` prints `{"cluster", "node", "problem", "listed", "members": [{"node", "address", "zone", "state",
"weight", "left", "seen_s", "this", "problem"}], "from_nodes": {"blocks", "bytes", "missed"}}`, and `drain --json`
prints `{"node", "state", "left"}`, without `left` if it does not wait. `listed`: the settings list the members. `left`:
the blocks that a node which drains has still to hand over, or that nobody took of one which has drained.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import click

from datacache import api
from datacache.core.counters import count
from datacache.core.errors import CacheError, UsageError
from datacache.settings import format_bytes
from dataset_cli.app import App, command
from dataset_cli.output import format_seconds

if TYPE_CHECKING:
    from dataset_cli.output import Output


@click.group()
def cluster() -> None:
    """See the cluster of caches that this node is in, and leave it."""


@command(cluster)
def status(app: App) -> None:
    """Show the members, and what came from other nodes."""
    state = api.cluster_status(app.settings)
    app.out.result(state)
    if not app.out.json:
        _print_members(app.out, state)
        app.out.line(f"cluster {state['cluster']}; {given_by_nodes(state['from_nodes'])}")
    if state["problem"]:
        app.out.warning(f"the view of the members may be old: {state['problem']}")


@command(cluster)
@click.argument("node", required=False)
@click.option("--no-wait", is_flag=True, help="Return at once; `dsctl cluster status` shows what is left.")
def drain(app: App, node: str | None, no_wait: bool) -> None:
    """Have a node own no blocks any more, and give others what it has, before it is stopped.

    NODE is its name; without one it is this node. It lasts until its daemon ends.
    """
    if node == "":
        raise UsageError("NODE is empty", hint="Leave it away to drain this node.")
    answer = api.drain_node(node or "", app.settings)
    node = answer["node"]
    if no_wait:
        app.out.result(answer, f"node {node} is draining: it owns no blocks until its daemon is started again")
        return
    most = 0
    with app.out.progress(f"draining {node}") as bar:
        for answer in api.follow_drain(node, app.settings):
            most = max(most, answer["left"])
            bar.update(f"{count(answer['left'], 'block')} left", most - answer["left"], most)
    if answer["state"] != "drained":
        raise CacheError(f"the node {node!r} {'was started again' if answer['state'] else 'left'} while it drained")
    app.out.result(
        {name: answer[name] for name in ("node", "state", "left")},
        f"node {node} has drained: it owns no blocks until its daemon is started again",
    )
    if answer["left"]:
        app.out.warning(
            f"no other node took {count(answer['left'], 'block')}, for want of room or as none answers (the daemon's "
            "log says which): the store gives them again"
        )


def given_by_nodes(given: dict[str, int]) -> str:
    """Return what came from other nodes, in words."""
    blocks, questions = count(given["blocks"], "block"), count(given["missed"], "question")
    return f"{blocks} ({format_bytes(given['bytes'])}) came from other nodes, {questions} brought none"


def _print_members(out: Output, state: dict[str, Any]) -> None:
    """Print the table. A node's share is that of the blocks that readers of its zone ask it for."""
    zones: Counter[str] = Counter()
    for member in state["members"]:
        if member["state"] == "serving":
            zones[member["zone"]] += member["weight"]
    out.table(
        ["NODE", "ADDRESS", "ZONE", "STATE", "SHARE", "SEEN", "", "PROBLEM"],
        [
            [
                member["node"],
                member["address"],
                member["zone"] or "-",
                member["state"] + (f", {count(member['left'], 'block')} left" if member["left"] else ""),
                f"{member['weight'] / zones[member['zone']]:.1%}" if member["state"] == "serving" else "-",
                "-" if state["listed"] else f"{format_seconds(member['seen_s'])} ago",
                "this node" if member["this"] else "",
                member["problem"],
            ]
            for member in state["members"]
        ],
        right=(4,),
    )
