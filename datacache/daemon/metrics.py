"""The daemon's state as Prometheus text (exposition format 0.0.4). The names are here and nowhere else."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

from datacache.cluster.members import STATES
from datacache.cluster.peers import PeerStats
from datacache.daemon.fetcher import LATENCY_BOUNDS_S


def render_metrics(state: dict[str, Any], *, names: bool = False) -> str:
    """Return the metrics for the state that the operation `cache` tells. They name no credential and no object, and
    data sets and namespaces only with `names`."""
    lines: list[str] = []

    def metric(name: str, kind: str, text: str, samples: float | list[tuple[str, float]]) -> None:
        lines.extend((f"# HELP datacache_{name} {text}", f"# TYPE datacache_{name} {kind}"))
        each = samples if isinstance(samples, list) else [("", samples)]
        lines.extend(f"datacache_{name}{labels} {value}" for labels, value in each)

    def histogram(name: str, text: str, counts: list[int], sum_s: float) -> None:
        up_to = list(accumulate(counts))
        buckets = [(f'_bucket{{le="{le}"}}', n) for le, n in zip([*LATENCY_BOUNDS_S, "+Inf"], up_to, strict=True)]
        metric(name, "histogram", text, [*buckets, ("_sum", sum_s), ("_count", up_to[-1])])

    def by_tier(field: str) -> list[tuple[str, float]]:
        return [(f'{{tier="{tier["name"]}"}}', tier[field]) for tier in state["tiers"]]

    def hits(field: str) -> list[tuple[str, float]]:
        return [(f'{{tier="{name}"}}', reads[f"{name}_{field}"]) for name in ("ram", "ssd")]

    def checked(which: str) -> list[tuple[str, float]]:
        return [(f'{{by="{algorithm}"}}', count) for algorithm, count in sorted(state["checks"][which].items())]

    reads, fetched, loader = state["reads"], state["fetched"], state["loader"]
    metric("tier_used_bytes", "gauge", "Bytes a tier takes, metadata counted.", by_tier("used_bytes"))
    metric("tier_budget_bytes", "gauge", "Bytes a tier may take.", by_tier("budget_bytes"))
    metric("tier_blocks", "gauge", "Blocks in a tier.", by_tier("blocks"))
    metric("tier_evicted_bytes_total", "counter", "Bytes evicted from a tier.", by_tier("evicted_bytes"))
    problems = [(labels, float(bool(problem))) for labels, problem in by_tier("problem")]
    metric("tier_broken", "gauge", "1 while a tier takes nothing because its disk failed or is full.", problems)
    metric("hits_total", "counter", "Block reads answered from a tier.", hits("hits"))
    metric("hit_bytes_total", "counter", "Bytes answered from a tier.", hits("hit_bytes"))
    metric("misses_total", "counter", "Block reads that went to the daemon.", reads["misses"])
    metric("miss_bytes_total", "counter", "Bytes of block reads that went to the daemon.", reads["miss_bytes"])
    metric("direct_reads_total", "counter", "Block reads past an absent daemon.", reads["direct_reads"])
    metric("broken_blocks_total", "counter", "Blocks whose checksum did not hold.", reads["broken_blocks"])
    metric("loader_steps_total", "counter", "Steps of trainings.", loader["loader_steps"])
    metric("loader_samples_total", "counter", "Samples given to trainings.", loader["loader_samples"])
    metric("loader_bytes_total", "counter", "Bytes read for trainings.", loader["loader_bytes"])
    waited, took = loader["loader_data_ns"] / 1e9, loader["loader_step_ns"] / 1e9
    metric("loader_data_seconds_total", "counter", "Time trainings waited for data.", waited)
    metric("loader_step_seconds_total", "counter", "Time of whole steps, waiting counted.", took)
    metric("fetched_total", "counter", "Blocks fetched from stores.", fetched["fetched"])
    metric("fetched_bytes_total", "counter", "Bytes fetched from stores.", fetched["fetched_bytes"])
    whole = "Objects fetched whole, by the checksum that was compared."
    metric("objects_checked_total", "counter", whole, checked("right"))
    metric("checksum_failures_total", "counter", "Objects that came with wrong bytes.", checked("wrong"))
    metric("fetch_failures_total", "counter", "Fetches that failed.", fetched["failed"])
    metric("fetch_shared_total", "counter", "Requests that joined a fetch under way.", fetched["shared"])
    histogram("fetch_seconds", "How long gets of stores took.", fetched["get_counts"], fetched["get_s"])
    waits = "How long readers waited for blocks that were not on the node."
    histogram("reader_wait_seconds", waits, fetched["wait_counts"], fetched["wait_s"])
    metric("fetches_under_way", "gauge", "Blocks in flight.", fetched["under_way"])
    ahead, plans = state["lookahead"], state["plans"]
    metric("lookahead_plans", "gauge", "Published orders that are followed now.", len(plans))
    metric("lookahead_fetched_total", "counter", "Blocks fetched for published orders.", ahead["fetched"])
    ordered = "Bytes fetched for published orders."
    metric("lookahead_fetched_bytes_total", "counter", ordered, ahead["fetched_bytes"])
    window = sum(plan["ahead_bytes"] for plan in plans)
    metric("lookahead_ahead_bytes", "gauge", "Bytes fetched, or to be, ahead of the positions.", window)
    moved = "Bytes moved between regions so that the rest could be evicted."
    metric("lookahead_moved_bytes_total", "counter", moved, ahead["moved_bytes"])
    cluster = state["cluster"] or {"from_nodes": vars(PeerStats()), "members": []}
    given, states = cluster["from_nodes"], [member["state"] for member in cluster["members"]]
    metric("peer_blocks_total", "counter", "Blocks that other nodes of the cluster gave.", given["blocks"])
    metric("peer_bytes_total", "counter", "Bytes that other nodes of the cluster gave.", given["bytes"])
    metric(
        "peer_misses_total",
        "counter",
        "Questions to owners, or who stands in for them, that brought no block.",
        given["missed"],
    )
    members = [(f'{{state="{state}"}}', float(states.count(state))) for state in STATES]
    metric("cluster_members", "gauge", "Nodes of the cluster that this node knows of, itself counted.", members)
    metric("daemon_max_memory_bytes", "gauge", "Peak resident memory of the daemon.", state["memory_bytes"])
    for owner, of in (
        (("dataset", "a data set"), ("namespace", "a namespace, of shared ones its part")) if names else ()
    ):

        def by_owner(field: str, owner: str = owner) -> list[tuple[str, float]]:
            return [(f'{{{owner}="{_escaped(each["name"])}"}}', each[field]) for each in state[f"by_{owner}"]]

        metric(f"{owner}_held_bytes", "gauge", f"Bytes of {of}, that the disk has.", by_owner("held_bytes"))
        metric(f"{owner}_hits_total", "counter", f"Block reads of {of}, answered from a tier.", by_owner("hits"))
        metric(f"{owner}_hit_bytes_total", "counter", f"Bytes of {of}, answered from a tier.", by_owner("hit_bytes"))
        metric(f"{owner}_misses_total", "counter", f"Block reads of {of}, not on the node.", by_owner("misses"))
        metric(f"{owner}_miss_bytes_total", "counter", f"Bytes read of {of}, not on the node.", by_owner("miss_bytes"))
        fetched = f"Bytes of {of}, fetched from stores."
        metric(f"{owner}_fetched_bytes_total", "counter", fetched, by_owner("fetched_bytes"))
        evicted = f"Bytes of {of}, evicted from the disk."
        metric(f"{owner}_evicted_bytes_total", "counter", evicted, by_owner("evicted_bytes"))
    if names:
        limits = [
            (each["name"], each["limit_bytes"]) for each in state["namespaces"] if each["limit_bytes"] is not None
        ]
        quotas = [(f'{{namespace="{_escaped(name)}"}}', float(limit)) for name, limit in limits]
        metric("namespace_limit_bytes", "gauge", "Bytes of this node's disk that a namespace may have.", quotas)
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    """Return a label's value as the format wants it."""
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
