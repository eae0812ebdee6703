"""The parts of Kubernetes objects that commands print have in common. No state, no I/O."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import click

RESTRICTED_CONTAINER: dict[str, Any] = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}
"""The `securityContext` of a container under the Pod Security Standard `restricted`."""


def restricted_pod(user: int) -> dict[str, Any]:
    """Return the `securityContext` of such a pod, run by this user and group."""
    return {
        "runAsNonRoot": True,
        "runAsUser": user,
        "runAsGroup": user,
        "fsGroup": user,
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def matching(pattern: str, what: str) -> Callable[..., str | None]:
    """Return a check of an option's text. `click.BadParameter` says `what` it should be."""

    def check(_context: click.Context, _parameter: click.Parameter, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(pattern, value):
            raise click.BadParameter(what)
        return value

    return check


checked_name = matching(
    "[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", "letters a to z, digits and '-', at most 63, none of '-' at the ends"
)
checked_secret = matching(
    "[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?",
    "letters a to z, digits, '-' and '.', at most 253, none of these at the ends",
)
checked_size = matching("[1-9][0-9]*(k|[MGTPE]|[KMGTPE]i)?", "a number with a unit of Kubernetes, such as 100Gi")


def name_of(text: str, length: int = 63) -> str:
    """Return a name in Kubernetes that reminds of a reference or URL."""
    name = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:length].rstrip("-")
    return name or "data"


def as_yaml(objects: list[dict[str, Any]]) -> str:
    """Return the text to give to `kubectl apply`."""
    import yaml

    return str(yaml.safe_dump_all(objects, sort_keys=False, allow_unicode=True, width=1000)).rstrip()
