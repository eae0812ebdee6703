"""How settings write down a cluster of caches and its nodes: names, addresses, a list of members, modes, the key.

Used by `settings`, which checks, and by `cluster`, which makes members of it. No state; any thread.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Any, NamedTuple

from datacache.core.addresses import parse_network_rule

_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,251}[A-Za-z0-9])?")
_LISTED = re.compile(r"(?P<id>[^=]*)=(?P<address>[^/*]+)(?:/(?P<zone>[^*]*))?(?:\*(?P<weight>.*))?")
CLUSTER_MODES = ("share", "partition", "off")
LEAST_KEY_BYTES = 16
_FORM = "ID=HOST:PORT[/ZONE][*WEIGHT]"


class ListedNode(NamedTuple):
    """One node in a list of members."""

    id: str
    address: str
    zone: str
    weight: float


def parse_name(text: str) -> str:
    """Check the name of a cluster, a node or a zone: letters, digits, and `-._` inside. `ValueError` otherwise."""
    if not _NAME.fullmatch(text):
        raise ValueError(f"{text!r} is no name; use letters, digits, '-', '.' and '_'")
    return text


def parse_address(text: str) -> str:
    """Check `HOST:PORT`, `ADDRESS:PORT` or `[ADDRESS]:PORT`. `ValueError` otherwise. An IPv4 address loses its
    brackets: a pod's environment does not know which kind it has."""
    text = re.sub(r"^\[([0-9.]+)\]", r"\1", text.strip())
    if "/" in text or not parse_network_rule(text).port:
        raise ValueError(f"{text!r} is no address with a port; write HOST:PORT, such as 10.0.0.7:7070")
    return text


def is_everywhere(address: str) -> bool:
    """Tell whether `HOST:PORT` stands for all addresses of a machine: one can listen there, and nobody can connect."""
    host = host_ip(address)
    return host is not None and host.is_unspecified


def host_ip(address: str) -> IPv4Address | IPv6Address | None:
    """Return the IP address in `HOST:PORT`; None for a name."""
    try:
        return ip_address(address.rpartition(":")[0].strip("[]"))
    except ValueError:
        return None


def parse_node(text: str) -> ListedNode:
    """Parse one node of a list. `ValueError` says what is wrong with it."""
    found = _LISTED.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is no member; write {_FORM}, such as a=10.0.0.7:7070")
    zone = found["zone"]
    if is_everywhere(parse_address(found["address"])):
        raise ValueError(f"{text!r}: no other node reaches {found['address']}; write the address that they use")
    try:
        weight = 1.0 if found["weight"] is None else float(found["weight"])
    except ValueError:
        weight = math.nan
    if not 0 < weight < math.inf:
        raise ValueError(f"{text!r} has no weight above 0; write {_FORM}")
    return ListedNode(
        parse_name(found["id"]), parse_address(found["address"]), "" if zone is None else parse_name(zone), weight
    )


def parse_nodes(value: str | Sequence[str]) -> tuple[str, ...]:
    """Check a list of members, separated by commas or blanks, or as a list; return their texts. `ValueError` names the
    one that is wrong, or that has the id or address of another."""
    parts = re.split(r"[,\s]+", value.strip()) if isinstance(value, str) else value
    if not all(isinstance(part, str) for part in parts):
        raise ValueError(f"it must be a list of members, each as {_FORM}")
    texts = tuple(part for part in parts if part)
    taken: set[str] = set()
    for text in texts:
        node = parse_node(text)
        for name in (node.id, node.address):
            if name in taken:
                raise ValueError(f"{name!r} is in the list twice")
            taken.add(name)
    return texts


def parse_cluster_mode(value: str | Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Parse `MODE`, `PATTERN=MODE,…` or a table into patterns of data set names and their modes. `ValueError`
    otherwise."""
    if isinstance(value, str):
        parts = [part.strip().rpartition("=") for part in value.split(",") if part.strip()]
        pairs = [(pattern.strip() if equals else "*", mode.strip()) for pattern, equals, mode in parts]
    else:
        pairs = list(value.items())
    if not pairs or any(not pattern or "," in pattern or mode not in CLUSTER_MODES for pattern, mode in pairs):
        modes = ", ".join(CLUSTER_MODES)
        raise ValueError(f"{value!r} is no mode and no PATTERN=MODE,…; the modes are {modes}")
    if len(dict(pairs)) < len(pairs):
        raise ValueError(f"{value!r} has a pattern twice")
    return tuple(pairs)


def parse_cluster_key(value: Any) -> str:
    """Check the key that nodes know each other by. `ValueError`, which does not quote it, if it is short or no text."""
    if not isinstance(value, str) or len(value.encode("utf-8", "surrogateescape")) < LEAST_KEY_BYTES:
        raise ValueError(f"the key must be a text of {LEAST_KEY_BYTES} bytes or more; `openssl rand -hex 32` makes one")
    return value
