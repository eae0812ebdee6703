"""Which network addresses may be connected to on behalf of somebody who may not choose them freely.

Used for the endpoints that volumes bring along in a Secret (`store`) and for the addresses in imported lists
(`imports`). Public addresses are open. Those of this machine, of private networks and of neighbouring links are closed
unless an administrator (or whoever runs the command) names them: behind them lie metadata services, control planes and
daemons that trust whoever reaches them.

The rule is asked at the socket. A name is resolved once, and the connection goes to an address that was checked: what
the name resolves to a moment later does not count (DNS rebinding). Each redirect makes a connection, so each is asked.
Any thread.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterable, Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import NamedTuple

# What the IANA registries of special-purpose addresses do not call globally reachable, and multicast.
_CLOSED_4 = tuple(
    IPv4Network(text)
    for text in (
        "0.0.0.0/8",
        "10.0.0.0/8",
        "100.64.0.0/10",
        "127.0.0.0/8",
        "168.63.129.16/32",  # the platform of an Azure machine, at an address that looks public
        "169.254.0.0/16",
        "172.16.0.0/12",
        "192.0.0.0/24",
        "192.0.2.0/24",
        "192.88.99.0/24",
        "192.168.0.0/16",
        "198.18.0.0/15",
        "198.51.100.0/24",
        "203.0.113.0/24",
        "224.0.0.0/3",
    )
)
_OPEN_6 = IPv6Network("2000::/3")
_CLOSED_6 = tuple(IPv6Network(text) for text in ("2001::/23", "2001:db8::/32", "3fff::/20"))
_MAPPED, _SIX_TO_FOUR, _NAT64 = IPv6Network("::ffff:0:0/96"), IPv6Network("2002::/16"), IPv6Network("64:ff9b::/96")
_HOST = re.compile(r"(?=.{1,253}$)[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?\.?")
_PORT = 9
"""Discard (RFC 863); nothing is sent to it."""


class ClosedAddressError(Exception):
    """The address behind a host may not be connected to. Not an `OSError`, which HTTP clients take for a broken
    connection. Callers turn it into an error of theirs."""

    def __init__(self, host: str) -> None:
        super().__init__(f"{host} leads to an address of this machine or of a private network")
        self.host = host


class NetworkRule(NamedTuple):
    """A host or network that is allowed."""

    host: str
    """A name in lower case, or '' for a network."""
    network: IPv4Network | IPv6Network | None
    port: int
    """The one port that is allowed, or 0 for all."""

    def __str__(self) -> str:
        text = self.host or str(self.network)
        if not self.port:
            return text
        return f"[{text}]:{self.port}" if ":" in text else f"{text}:{self.port}"


def parse_network_rule(text: str) -> NetworkRule:
    """Parse `HOST`, `ADDRESS` or `NETWORK` in CIDR form, each with or without `:PORT` (`[…]:PORT` for IPv6).
    `ValueError` for anything else."""
    text = text.strip()
    what, port = text, ""
    if found := re.fullmatch(r"\[([^\[\]]+)\](?::([0-9]+))?", text) or re.fullmatch(r"([^:]+):([0-9]+)", text):
        what, port = found[1], found[2] or ""
    if port and not 0 < int(port) < 65536:
        raise ValueError(f"{text!r} has no port from 1 to 65535")
    try:
        return NetworkRule("", ip_network(what), int(port or 0))
    except ValueError as exc:
        if "/" in what or ":" in what or re.fullmatch(r"[0-9.]+", what):
            raise ValueError(f"{text!r} is no network ({exc}); write such as 10.20.0.0/16") from None
    if not _HOST.fullmatch(what):
        raise ValueError(f"{text!r} is neither a host nor a network; write such as minio.example:9000 or 10.20.0.0/16")
    return NetworkRule(what.lower().rstrip("."), None, int(port or 0))


def parse_network_rules(value: str | Sequence[str]) -> tuple[str, ...]:
    """Check a list of places, separated by commas or blanks, or as a list. `ValueError` names the one that is wrong."""
    parts = re.split(r"[,\s]+", value.strip()) if isinstance(value, str) else value
    if not all(isinstance(part, str) for part in parts):
        raise ValueError("it must be a list of hosts and networks")
    return tuple(str(parse_network_rule(part)) for part in parts if part)


class AddressRule:
    """Public addresses, and what is named in `allowed` (as `parse_network_rule` takes it); of these only what another
    rule allows as well, which they are `within`."""

    def __init__(self, allowed: Iterable[str] = (), *, within: AddressRule | None = None) -> None:
        self._rules = tuple(parse_network_rule(text) for text in allowed)
        self.within = within

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AddressRule) and (other._rules, other.within) == (self._rules, self.within)

    def __hash__(self) -> int:
        return hash((self._rules, self.within))

    def allows_host(self, host: str, port: int) -> bool:
        """Tell whether a host is allowed by its own name, wherever that leads, or is an address that is."""
        name = host.strip("[]").lower().rstrip(".")
        if any(rule.host == name and rule.port in (0, port) for rule in self._rules if rule.host):
            return True
        try:
            address = ip_address(name)
        except ValueError:
            return False
        return self._allows(address, port)

    def allows_address(self, address: str, port: int) -> bool:
        """Tell whether an address is public or allowed."""
        parsed = ip_address(address)
        return self._allows(parsed, port) or (is_public(parsed) and not _is_own(parsed))

    def check_host(self, host: str, port: int) -> None:
        """Raise `ClosedAddressError` for a host of which any address is closed, as far as this machine knows: for
        requests through a proxy, which resolves names itself and goes to whichever address it likes."""
        if self.within is not None:
            self.within.check_host(host, port)
        if self.allows_host(host, port):
            return
        try:
            found = socket.getaddrinfo(host.strip("[]"), port, 0, socket.SOCK_STREAM)
        except OSError:  # only the proxy knows it
            return
        if not all(self.allows_address(str(address[0]), port) for *_, address in found):
            raise ClosedAddressError(host)

    def connect(
        self,
        host: str,
        port: int,
        timeout_s: float | None,
        *,
        source_address: tuple[str, int] | None = None,
        options: Iterable[tuple[int, int, int | bytes]] = (),
    ) -> socket.socket:
        """Resolve a host once and connect to the first of its allowed addresses that answers. `ClosedAddressError`
        where none is allowed; `OSError` as `socket.create_connection`."""
        error: OSError | None = None
        for family, kind, protocol, _, address in socket.getaddrinfo(host.strip("[]"), port, 0, socket.SOCK_STREAM):
            if not self.allows_either(host, str(address[0]), port):
                continue
            connection = socket.socket(family, kind, protocol)
            try:
                for option in options:
                    connection.setsockopt(*option)
                connection.settimeout(timeout_s)
                if source_address:
                    connection.bind(source_address)
                connection.connect(address)
            except OSError as exc:
                error = exc
                connection.close()
            else:
                return connection
        if error is None:
            raise ClosedAddressError(host)
        raise error

    def allows_either(self, host: str, address: str, port: int) -> bool:
        """Tell whether a host is allowed, or its address, by this rule and by the one around it."""
        allowed = self.allows_host(host, port) or self.allows_address(address, port)
        return allowed and (self.within is None or self.within.allows_either(host, address, port))

    def _allows(self, address: IPv4Address | IPv6Address, port: int) -> bool:
        mapped = getattr(address, "ipv4_mapped", None)
        forms = (address,) if mapped is None else (address, mapped)
        return any(
            form.version == rule.network.version and form in rule.network and rule.port in (0, port)
            for rule in self._rules
            if rule.network is not None
            for form in forms
        )


def is_public(address: IPv4Address | IPv6Address) -> bool:
    """Tell whether an address is one of the public Internet. Of an IPv6 address that stands for an IPv4 one, that
    counts.
    """
    if isinstance(address, IPv4Address):
        return not any(address in network for network in _CLOSED_4)
    if address in _MAPPED or address in _NAT64:
        return is_public(IPv4Address(int(address) & 0xFFFFFFFF))
    if address in _SIX_TO_FOUR:
        return is_public(IPv4Address(int(address) >> 80 & 0xFFFFFFFF))
    return address in _OPEN_6 and not any(address in network for network in _CLOSED_6)


def _is_own(address: IPv4Address | IPv6Address) -> bool:
    """Tell whether an address is one of this machine's: then the kernel would send from it, too."""
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((str(address), _PORT))  # no packet: it only looks up the way
            return bool(ip_address(probe.getsockname()[0]) == address)
    except OSError:  # there is no way to it
        return False
