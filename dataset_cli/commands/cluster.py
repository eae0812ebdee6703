"""`dsctl cluster`: the cluster of caches that this node is in, as its daemon sees it.

`status --json` prints `{"cluster", "node", "problem", "listed", "members": [{"node", "address", "zone", "state",
"weight", "seen_s", "this", "problem"}], "from_nodes": {"blocks", "bytes", "missed"}}`, and `drain --json` prints
`{"node", "state", "listed"}`. `listed`: the members are a list of the settings, so no node learns another's state.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import click

from datacache import api
from datacache.core.counters import count
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
@click.argument("node", required=False, default="")
def drain(app: App, node: str) -> None:
    """Have this node own no blocks any more, before it is stopped.

    NODE is its name, to be sure to drain the right one. It lasts until the daemon ends.
    """
    answer = api.drain_node(node, app.settings)
    app.out.result(answer, f"node {answer['node']} is draining: it owns no blocks until its daemon is started again")
    if answer["listed"]:
        app.out.warning(
            "the other nodes do not learn it: they have a list of the members. Take it out of their"
            " DATACACHE_CLUSTER_MEMBERS"
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
                member["state"],
                f"{member['weight'] / zones[member['zone']]:.1%}" if member["state"] == "serving" else "-",
                "-" if state["listed"] else f"{format_seconds(member['seen_s'])} ago",
                "this node" if member["this"] else "",
                member["problem"],
            ]
            for member in state["members"]
        ],
        right=(4,),
    )
