"""Which addresses are open, and that the one that was checked is the one that is connected to."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datacache.core.addresses import AddressRule, ClosedAddressError, is_public, parse_network_rule, parse_network_rules
from tests.promises import promise


@promise("A connection goes to the address that was checked, in whatever form it was written")
@pytest.mark.parametrize(
    "address",
    [
        *("0.0.0.0", "10.1.2.3", "100.64.0.1", "127.0.0.1", "127.255.0.1", "168.63.129.16", "169.254.169.254"),
        *("172.31.0.1", "192.0.0.192", "192.168.0.1", "198.18.0.1", "224.0.0.1", "240.0.0.1", "255.255.255.255"),
        *("::", "::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "::7f00:1", "64:ff9b::7f00:1", "64:ff9b:1::1"),
        *("2002:7f00:1::", "2002:a00:1::", "2001::1", "2001:db8::1", "3fff::1", "5f00::1", "fc00::1", "fd00:ec2::254"),
        *("192.0.2.1", "192.88.99.1", "198.51.100.1", "203.0.113.255", "198.19.255.255", "2001:1ff::1", "2001:0:1::"),
        *("fe80::1", "fe80::1%1", "fec0::1", "ff02::1", "100::1"),
    ],
)
def test_special_addresses_are_closed_in_every_form(address: str) -> None:
    assert not is_public(ip_address(address))
    assert not AddressRule().allows_address(address, 80)
    assert AddressRule(["0.0.0.0/0", "::/0"]).allows_address(address, 80)


@pytest.mark.parametrize(
    "address",
    ["8.8.8.8", "172.32.0.1", "100.128.0.1", "2606:4700::1111", "::ffff:8.8.8.8", "2002:808:808::", "64:ff9b::808:808"],
)
def test_public_addresses_are_open(address: str) -> None:
    assert is_public(ip_address(address))


@promise("A connection goes to the address that was checked, in whatever form it was written")
@given(st.ip_addresses())
def test_what_the_registries_call_special_is_never_public(address: IPv4Address | IPv6Address) -> None:
    meant = address
    if isinstance(address, IPv6Address):
        in_last = address in IPv6Network("64:ff9b::/96")
        meant = address.ipv4_mapped or address.sixtofour or (IPv4Address(address.packed[-4:]) if in_last else address)
    assert not is_public(address) or (meant.is_global and not meant.is_multicast)


@promise("What an administrator allows is asked, and no other port of it")
def test_places_are_hosts_and_networks_with_or_without_a_port() -> None:
    rule = AddressRule(["10.20.0.0/16", "minio.example:9000", "[fd00::/8]:443", "192.168.1.5:81", "127.0.0.1"])
    assert rule.allows_address("10.20.255.1", 1)
    assert not rule.allows_address("10.21.0.1", 1)
    assert rule.allows_host("Minio.Example.", 9000)
    assert not rule.allows_host("minio.example", 9001)
    assert not rule.allows_host("x.minio.example", 9000)
    assert (rule.allows_address("fd00::1", 443), rule.allows_address("fd00::1", 80)) == (True, False)
    assert (rule.allows_address("192.168.1.5", 81), rule.allows_address("192.168.1.5", 82)) == (True, False)
    assert rule.allows_address("::ffff:127.0.0.1", 5)
    assert parse_network_rules(" 10.0.0.1:5, a.b\n[::1]:80 ") == ("10.0.0.1/32:5", "a.b", "[::1/128]:80")
    assert parse_network_rules(parse_network_rules("10.0.0.1:5 [::1]:80 a.b:1")) == (
        "10.0.0.1/32:5",
        "[::1/128]:80",
        "a.b:1",
    )


@pytest.mark.parametrize(
    "text",
    ["10.0.0.0/99", "10.0.0.1/8", "999.1.1.1", "a b", "http://x", "x:0", "x:65536", "a_b/c", "[::1", "-x", "*.x"],
)
def test_what_is_no_place_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"no network|neither|no port"):
        parse_network_rule(text)


@pytest.fixture
def servers() -> Iterator[dict[str, socket.socket]]:
    """Listeners at two addresses of this machine, on one port."""
    first = socket.create_server(("127.0.0.1", 0))
    port = first.getsockname()[1]
    listening = {"127.0.0.1": first, "127.0.0.2": socket.create_server(("127.0.0.2", port))}
    yield listening
    for each in listening.values():
        each.close()


@promise("A connection goes to the address that was checked, in whatever form it was written")
def test_a_name_is_resolved_once_and_the_connection_goes_to_what_was_checked(
    servers: dict[str, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    port = servers["127.0.0.1"].getsockname()[1]
    answers = ["127.0.0.2", "127.0.0.1"]  # allowed when it is checked, another one a moment later

    def resolve(host: str, asked: Any, *_rest: Any) -> list[Any]:
        assert host == "rebinding.example"
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (answers.pop(0), asked))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    rule = AddressRule(["127.0.0.2"])
    with rule.connect("rebinding.example", port, 5.0) as connection:
        assert connection.getpeername()[0] == "127.0.0.2"
    with pytest.raises(ClosedAddressError, match=r"rebinding\.example"):
        rule.connect("rebinding.example", port, 5.0)
    assert answers == []


def test_of_several_addresses_only_open_ones_are_tried(
    servers: dict[str, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    port = servers["127.0.0.1"].getsockname()[1]
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in servers]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_rest: found)
    with AddressRule(["127.0.0.2"]).connect("two.example", port, 5.0) as connection:
        assert connection.getpeername()[0] == "127.0.0.2"


def test_where_one_address_refuses_the_next_is_tried_and_the_last_error_is_told(
    servers: dict[str, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    port = servers["127.0.0.1"].getsockname()[1]
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in ("127.0.0.3", "127.0.0.1")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_rest: found)
    keep = (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    with AddressRule(["127.0.0.0/8"]).connect("two.example", port, 5.0, options=[keep]) as connection:
        assert connection.getpeername()[0] == "127.0.0.1"
        assert connection.gettimeout() == 5.0
        assert connection.getsockopt(*keep[:2])
    found.pop()
    with pytest.raises(ConnectionRefusedError):
        AddressRule(["127.0.0.0/8"]).connect("two.example", port, 5.0)


def test_an_address_of_this_machine_is_closed_even_if_it_looks_public(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datacache.core.addresses.is_public", lambda _address: True)
    assert not AddressRule().allows_address("127.0.0.1", 80)
    own = socket.gethostbyname(socket.gethostname())
    assert not AddressRule().allows_address(own, 80)


@promise("Processes elsewhere go to private networks only where their own setting names these")
def test_a_rule_within_another_opens_what_both_name_each_by_host_or_by_network(
    servers: dict[str, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    port = servers["127.0.0.1"].getsockname()[1]
    known = {"store.example": "127.0.0.1", "public.example": "93.184.216.34"}

    def resolve(host: str, asked: Any, *_rest: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (known.get(host, host), asked))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    by_host, by_network, other = ["store.example"], ["127.0.0.0/8"], ["10.0.0.0/8"]
    for outer, inner, is_open in [
        (by_host, by_host, True),
        (by_host, by_network, True),
        (by_network, by_host, True),
        (by_network, [f"127.0.0.1:{port}"], True),
        (by_network, other, False),
        (other, by_network, False),
        (by_host, [f"store.example:{port + 1}"], False),
        (by_host, [], False),
        ([], by_host, False),
    ]:
        rule = AddressRule(outer, within=AddressRule(inner))
        if is_open:
            rule.connect("store.example", port, 5.0).close()
            rule.check_host("store.example", port)
        else:
            with pytest.raises(ClosedAddressError):
                rule.connect("store.example", port, 5.0)
            with pytest.raises(ClosedAddressError):
                rule.check_host("store.example", port)
        rule.check_host("public.example", port)
        assert rule.allows_either("public.example", known["public.example"], port)
    assert AddressRule(by_host, within=AddressRule(other)) != AddressRule(by_host)


@promise("A list leads to no private address that is not allowed, nor does a redirect")
def test_through_a_proxy_a_host_is_refused_for_any_closed_address(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"open.example": ["93.184.216.34"], "both.example": ["93.184.216.34", "169.254.169.254"]}

    def resolve(host: str, port: Any, *_rest: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in known[host]]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    AddressRule().check_host("open.example", 80)
    with pytest.raises(ClosedAddressError, match=r"both\.example"):
        AddressRule().check_host("both.example", 80)
    AddressRule(["both.example"]).check_host("both.example", 80)
