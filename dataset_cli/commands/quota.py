"""`dsctl k8s quota`: what namespaces may have of nodes' caches and staging areas, and what they have.

With `--json` it prints an array of `{"namespace", "cache_bytes", "staging_bytes", "own", "capacity_bytes", "nodes"}`:
limits (null: none), which of them the namespace says itself, the capacities of its bucket volumes together, and by node
`{"node", "cache_bytes", "staged_bytes"}`.
"""

from __future__ import annotations

from typing import Any

import click

from datacache import api
from datacache.core.errors import UsageError
from datacache.settings import format_bytes, parse_bytes
from dataset_cli.app import App, command


@command()
@click.argument("namespace", required=False)
@click.option("--cache", metavar="SIZE|none", help="What it may have of each node's cache.")
@click.option("--staging", metavar="SIZE|none", help="What its bucket volumes may hold together.")
@click.option("--remove", is_flag=True, help="Forget its own quota, so that the one of '*' holds.")
def quota(app: App, /, *, namespace: str | None, cache: str | None, staging: str | None, remove: bool) -> None:
    """Show or set what namespaces of Kubernetes may have.

    '*' is the quota of all that have none of their own. A data set that several namespaces have mounted counts for each
    in equal parts. A namespace that fills its share of a node's cache evicts its own data only. Nodes follow within
    seconds; volumes keep the capacity they have.

    \b
    dsctl k8s quota                                            all of them, and what they have
    dsctl k8s quota team-a --cache 500GiB --staging 2TiB
    dsctl k8s quota '*' --cache 100GiB
    """
    given = {"cache": cache, "staging": staging}
    changes = {name: _size(name, text) for name, text in given.items() if text is not None}
    if namespace is None and (changes or remove):
        raise UsageError("which namespace's quota?", hint="Name it, or '*' for all that have none of their own.")
    if remove and changes:
        raise UsageError("--remove and new limits do not go together", hint="Leave one of them out.")
    if namespace is not None and (changes or remove):
        api.set_namespace_quota(namespace, None if remove else changes, app.settings)
    found = api.namespace_quotas(namespace, app.settings)
    app.out.listing(
        [_as_json(use) for use in found],
        ["NAMESPACE", "CACHE", "USED AT MOST", "STAGING", "GIVEN", "STAGED"],
        [_row(use) for use in found],
        right=(1, 2, 3, 4, 5),
        empty="There are no quotas yet. Set one: dsctl k8s quota NAMESPACE --cache SIZE",
    )


def _size(name: str, text: str) -> int | None:
    if text.strip().lower() == "none":
        return None
    try:
        return parse_bytes(text)
    except (ValueError, OverflowError) as exc:
        words = exc if isinstance(exc, ValueError) else f"{text[:40]!r} is more than there can be"
        raise UsageError(f"--{name}: {words}", hint=f"No limit: --{name} none") from exc


def _row(use: api.QuotaUse) -> list[str]:
    node, most = max(use.cache_bytes.items(), key=lambda item: item[1], default=("", 0))
    return [
        use.namespace,
        _limit(use.quota.cache_bytes),
        f"{format_bytes(most)} ({node})" if node else "-",
        _limit(use.quota.staging_bytes),
        format_bytes(use.capacity_bytes),
        format_bytes(sum(use.staged_bytes.values())),
    ]


def _limit(size_bytes: int | None) -> str:
    return "no limit" if size_bytes is None else format_bytes(size_bytes)


def _as_json(use: api.QuotaUse) -> dict[str, Any]:
    nodes = sorted({*use.cache_bytes, *use.staged_bytes})
    return {
        "namespace": use.namespace,
        "cache_bytes": use.quota.cache_bytes,
        "staging_bytes": use.quota.staging_bytes,
        "own": sorted(use.quota.said),
        "capacity_bytes": use.capacity_bytes,
        "nodes": [
            {
                "node": node,
                "cache_bytes": use.cache_bytes.get(node, 0),
                "staged_bytes": use.staged_bytes.get(node, 0),
            }
            for node in nodes
        ],
    }
