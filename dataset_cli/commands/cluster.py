"""`dsctl cluster`: the cluster of caches that this node is in, as its daemon sees it.

`status --json` prints `{"cluster", "node", "problem", "listed", "mode": {pattern: mode}, "members": [{"node",
"address", "zone", "state", "weight", "left", "seen_s", "this", "looked_at", "problem", "hint"}], "from_nodes":
{"blocks", "bytes", "missed"}}`, and `drain --json` prints `{"node", "state", "left"}`, without `left` if it does not
wait. `listed`: the settings list the members. `left`: the blocks that a node which drains has still to hand over, or
that nobody took of one which has drained. `looked_at`: there was time to see whether it answers.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import click

from datacache import api
from datacache.core.counters import count, format_seconds
from datacache.core.errors import CacheError, UsageError
from datacache.settings import format_bytes
from dataset_cli.app import App, command
from dataset_cli.output import printable

if TYPE_CHECKING:
    from dataset_cli.output import Output


@click.group()
def cluster() -> None:
    """See the cluster of caches that this node is in, and leave it."""


@command(cluster)
def status(app: App) -> None:
    """Show the members, whether they answer, and what came from them."""
    state = api.cluster_status(app.settings)
    app.out.result(state)
    if not app.out.json:
        if state["members"]:
            _print_members(app.out, state)
        app.out.lines(f"{each['node']} → {printable(each['hint'])}" for each in state["members"] if each["hint"])
        modes = {"*": "share"} | state["mode"]
        mode = ", ".join([*(f"{pattern} {modes.pop(pattern)}" for pattern in list(modes)[1:]), *modes.values()])
        app.out.line(f"cluster {state['cluster']}; mode {mode}; {given_by_nodes(state['from_nodes'])}")
        if state["listed"] and app.settings.catalog_is_shared:
            app.out.line("the members are those of DATACACHE_CLUSTER_MEMBERS: none are looked for in the catalog")
    if state["problem"]:
        known = "the members are those that were known last" if state["members"] else "no members are known yet"
        app.out.warning(f"{known}: {state['problem']}")


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
        text = f"node {node} is draining: it owns no blocks until its daemon is started again"
        app.out.result({name: answer[name] for name in ("node", "state")}, text)
        return
    most = 0
    with app.out.progress(f"draining {node}") as bar:
        for answer in api.follow_drain(node, app.settings):
            most = max(most, answer["left"])
            bar.update(f"{count(answer['left'], 'block')} left", most - answer["left"], most)
    if answer["state"] != "drained":
        again = f"dsctl cluster drain {node}"
        if answer["state"]:
            hint = f"It owns its share again. If it is to leave: {again}"
            raise CacheError(f"the node {node!r} was started again while it drained", hint=hint)
        hint = (
            f"What only it has comes from the store until it is back. To have it handed over: start it there, {again}"
        )
        raise CacheError(f"the node {node!r} left while it drained: its daemon has ended", hint=hint)
    app.out.result(
        {name: answer[name] for name in ("node", "state", "left")},
        f"node {node} has drained: it owns no blocks until its daemon is started again",
    )
    if answer["left"]:
        app.out.warning(
            f"no other node took {count(answer['left'], 'block')}, as none serves, answers or has room (the log of "
            f"{node} names those that do not answer): the store gives them again"
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
    several = len({member["zone"] for member in state["members"]}) > 1
    out.table(
        ["NODE", "ADDRESS", "ZONE", "STATE", "SHARE OF ZONE" if several else "SHARE", "SEEN", "", "PROBLEM"],
        [
            [
                member["node"],
                member["address"],
                member["zone"] or "-",
                member["state"] + (f", {count(member['left'], 'block')} left" if member["left"] else ""),
                f"{member['weight'] / zones[member['zone']]:.1%}" if member["state"] == "serving" else "-",
                "-" if state["listed"] else f"{format_seconds(member['seen_s'])} ago",
                "this node" if member["this"] else "",
                member["problem"] or ("" if member["this"] or member["looked_at"] else "not asked yet"),
            ]
            for member in state["members"]
        ],
        right=(4,),
    )
