"""Nodes of a cluster on one machine: network namespaces (network_namespaces(7)), each joined to a switch by a cable.

```
this machine ── 198.18.K.1 ──┐
   node 1 ── 198.18.K.11 ── switch (a bridge in a namespace that has no address)
   node 2 ── 198.18.K.12 ────┘
```

Servers of this machine that are to be reached from nodes listen on `Network.address` (`tests.servers`: `host`). Nodes
share all but the network with this machine: files, Unix sockets that have a path, processors, memory.

A namespace lives as long as a process that is in it, and a cable as long as both of its ends. The processes that hold
namespaces, and all that is started in nodes, die with this process, even if that is killed. So the kernel takes
everything away, and nothing has to be cleaned up by the next run. Make networks in the main thread, because a process
started from a thread would die with the thread.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from benchmarks.harness import ROOT, Home
from datacache.daemon.client import DaemonClient
from datacache.settings import load_settings
from tests.conformance.relay import NO_TROUBLE, Relay, Trouble
from tests.servers import START_TIMEOUT_S, ServerError, program

_NETWORKS = 512
"""How many there may be at a time: 198.18.0.0/15 is kept for measuring (RFC 2544), cut into networks of 254."""
_LIBC = ctypes.CDLL(None, use_errno=True)
_CLONE_NEWNET = 0x40000000
_QUEUE_MS = 50
"""The longest that a packet waits before a limited cable; more are dropped."""
_BURST_BYTES = 128 * 1024
"""At least a packet of the kernel, which cuts it up later (up to 64 KiB)."""


class Traffic(NamedTuple):
    """Count what a node's cable has carried, in bytes. Packets that the kernel sends as one have one header here."""

    received_bytes: int
    sent_bytes: int


class Network:
    """A switch with this many nodes, each cable of `mbit` megabits a second in each direction. Close it.

    Skips the test where there can be none.
    """

    def __init__(self, nodes: int, *, mbit: float | None = None) -> None:
        if os.geteuid():
            pytest.skip("nodes are network namespaces, made by root")
        self._namespaces: list[_Namespace] = []
        try:
            self._switch = self._namespace()
            self._switch.ip("link add switch type bridge", "link set switch up")
            self.link, subnet = self._plug_in_this_machine()
            self.address = f"{subnet}.1"
            """This machine's, as nodes see it."""
            self.nodes = [
                Node(f"n{number}", f"{subnet}.{10 + number}", self._namespace(), self._switch)
                for number in range(1, nodes + 1)
            ]
            for node in self.nodes:
                node.limit(mbit)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Take it down with all that runs in its nodes and has not left them. Idempotent."""
        if hasattr(self, "link"):  # when this returns the address is free, not when the kernel finds time for it
            subprocess.run(
                [program("ip", package="iproute2"), "link", "del", self.link], check=False, capture_output=True
            )
        for node in getattr(self, "nodes", []):
            node.close()
        for namespace in self._namespaces:
            namespace.close()

    def __enter__(self) -> Network:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _namespace(self) -> _Namespace:
        namespace = _Namespace()
        self._namespaces.append(namespace)
        return namespace

    def _plug_in_this_machine(self) -> tuple[str, str]:
        """Join this machine to the switch; return the name of its end and the first three numbers of addresses. Two
        runs cannot have the same, as a name of an interface exists once."""
        ip = program("ip", package="iproute2")
        for number in range(_NETWORKS):
            link, subnet = f"dctest{number}", f"198.{18 + number // 256}.{number % 256}"
            add = f"link add {link} type veth peer name machine netns {self._switch.pid}"
            done = subprocess.run([ip, *add.split()], capture_output=True, text=True, check=False)
            if done.returncode == 0:
                self._switch.ip("link set machine master switch up")
                _call([ip, "address", "add", f"{subnet}.1/24", "dev", link])
                _call([ip, "link", "set", link, "up"])
                return link, subnet
            if "exists" not in done.stderr:
                pytest.skip(f"nodes are network namespaces, which are not to be had here: {done.stderr.strip()}")
        raise ServerError(f"there are {_NETWORKS} networks already")


class Node:
    """One namespace with an address and a cable (`eth0`)."""

    def __init__(self, name: str, address: str, namespace: _Namespace, switch: _Namespace) -> None:
        self.name, self.address = name, address
        self._namespace, self._switch = namespace, switch
        self._ends = ((namespace, "eth0"), (switch, name))  # of the cable; a limit is set where packets go in
        self._started: list[subprocess.Popen[bytes]] = []
        switch.ip(
            f"link add {name} type veth peer name eth0 netns {namespace.pid}", f"link set {name} master switch up"
        )
        namespace.ip("link set lo up", f"address add {address}/24 dev eth0", "link set eth0 up")

    @property
    def enter(self) -> tuple[str, ...]:
        """Return what a command is run behind to be in the node, and to die with the process that starts it."""
        return self._namespace.enter

    def run(self, *command: str | Path, env: Mapping[str, str] | None = None, timeout_s: float = 60.0) -> str:
        """Run a program here to its end; return what it printed. Raises `ServerError` if it fails."""
        return _call([*self.enter, *map(str, command)], env=env, timeout=timeout_s)

    def start(self, *command: str | Path, log: Path, env: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        """Start a program here, in the checkout. It ends with the network, or before."""
        with open(log, "ab") as output:
            process = subprocess.Popen(
                [*self.enter, *map(str, command)],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=env,
            )
        self._started.append(process)
        return process

    def cut(self) -> None:
        """Pull the cable out of the switch: nothing is refused, all is lost on the way."""
        self._switch.ip(f"link set {self.name} down")

    def mend(self) -> None:
        """Put it back."""
        self._switch.ip(f"link set {self.name} up")

    def stand_in(self, address: str, port: int) -> socket.socket:
        """Return a socket that listens in this node at another node's address, which leads here from now on."""

        def listen() -> socket.socket:
            with open(f"/proc/{self._namespace.pid}/ns/net", "rb") as namespace:
                if _LIBC.setns(namespace.fileno(), _CLONE_NEWNET):
                    raise ServerError(f"no way into {self.name}: {os.strerror(ctypes.get_errno())}")
            return socket.create_server((address, port), backlog=256)

        self._namespace.ip(f"address replace {address}/32 dev lo")
        with ThreadPoolExecutor(1) as pool:  # setns(2) moves the thread that calls it, and that one ends here
            return pool.submit(listen).result()

    def limit(self, mbit: float | None) -> None:
        """Give the cable this rate in each direction from now on (tc-tbf(8))."""
        for namespace, end in self._ends:
            if mbit is None:
                namespace.call("tc", "qdisc", "del", "dev", end, "root", check=False)  # there may be none
            else:
                burst = max(_BURST_BYTES, int(mbit * 125))  # a millisecond's
                rate = f"tbf rate {int(mbit * 1e6)}bit burst {burst} latency {_QUEUE_MS}ms"
                namespace.call("tc", "qdisc", "replace", "dev", end, "root", *rate.split())

    def rates_bytes_s(self) -> list[int]:
        """Return what the kernel limits the cable to: what the node sends, then what it receives."""
        return [queue["options"]["rate"] for queue in self._queues()]

    def delayed(self) -> int:
        """Return how many times the limit has held back what the node sends or receives."""
        return sum(queue["overlimits"] for queue in self._queues())

    def traffic(self) -> Traffic:
        """Return what the cable has carried so far."""
        for line in Path(f"/proc/{self._namespace.pid}/net/dev").read_text().splitlines():
            name, _, numbers = line.partition(":")
            if name.strip() == "eth0":
                fields = numbers.split()
                return Traffic(int(fields[0]), int(fields[8]))
        raise ServerError(f"{self.name} has no cable")

    def close(self) -> None:
        """End what was started here. Idempotent."""
        for process in self._started:
            process.kill()
        for process in self._started:
            process.wait()
        self._started.clear()

    def _queues(self) -> list[dict[str, Any]]:
        found = []
        for namespace, end in self._ends:
            found += json.loads(namespace.call("tc", "-s", "-j", "qdisc", "show", "dev", end))
        return [queue for queue in found if queue["kind"] == "tbf"]


CLUSTER_PORT = 7070


class NodeHome(Home):
    """The product on a node: `dsctl`, the daemon and readers (`enter`) are inside, in a home of the node's own."""

    def __init__(self, node: Node, path: Path, env: Mapping[str, str], settings: Mapping[str, object]) -> None:
        # A daemon that a command starts by itself would outlive this process.
        super().__init__(path, env, {"daemon": "external"} | dict(settings), enter=node.enter)
        self.env["PYTHONPATH"] = str(ROOT)
        self.node = node
        self.daemon: subprocess.Popen[bytes] | None = None

    def start_daemon(self) -> None:
        """Start the daemon, and wait until it answers."""
        self.launch_daemon()
        self.await_daemon()

    def launch_daemon(self) -> None:
        """Start the daemon."""
        self.daemon = self.node.start(
            *(sys.executable, "-m", "datacache.daemon", "--wait"),  # what a killed one had started may be ending still
            env=self.env,
            log=self.path / "daemon-output.log",
        )

    def await_daemon(self) -> None:
        """Wait until the daemon answers."""
        assert self.daemon is not None
        client, deadline = DaemonClient(load_settings(self.env)), time.monotonic() + START_TIMEOUT_S
        while not client.alive():
            if self.daemon.poll() is not None or time.monotonic() > deadline:
                log = (self.path / "daemon-output.log").read_text(errors="replace")
                raise ServerError(f"the daemon of {self.node.name} did not start\n{log[-2000:]}")
            time.sleep(0.02)

    def end_daemon(self, number: int = signal.SIGTERM) -> None:
        """Send it a signal, and wait for its end."""
        if self.daemon is not None:
            self.daemon.send_signal(number)
            self.daemon.wait()
            self.daemon = None

    def close(self) -> None:
        """End its processes and delete its files. Idempotent."""
        self.end_daemon(signal.SIGKILL)
        super().close()


@contextmanager
def relays_between(
    network: Network, *, trouble: Callable[[], Trouble] = lambda: NO_TROUBLE
) -> Iterator[dict[tuple[str, str], Relay]]:
    """Put a relay on the way from each node to the cluster's port of each other one; yield them by the nodes' names.

    Nodes keep their addresses, and reach this machine as before. What they send each other goes over the cable of the
    node that is asked, and not over the other's.
    """
    with ExitStack() as stack:
        yield {
            (one.name, other.name): stack.enter_context(
                Relay(
                    partial(one.stand_in, other.address, CLUSTER_PORT), (other.address, CLUSTER_PORT), trouble=trouble
                )
            )
            for one in network.nodes
            for other in network.nodes
            if one is not other
        }


@contextmanager
def one_home_a_node(
    network: Network,
    folder: Path,
    env: Mapping[str, str],
    *,
    cluster: str = "",
    processes: Sequence[int] = (),
    zones: Sequence[str] = (),
    **settings: object,
) -> Iterator[list[NodeHome]]:
    """Make a home with these settings on every node, and start the daemons: one cluster, if it is given a name; of so
    many `processes` each, in these `zones`."""
    homes: list[NodeHome] = []
    try:
        for node, count, zone in zip_longest(network.nodes, processes, zones):
            path = folder / node.name
            path.mkdir()
            own = {"cluster": cluster, "node": node.name, "listen": f"{node.address}:{CLUSTER_PORT}"} if cluster else {}
            own |= {"zone": zone} if zone else {}
            homes.append(NodeHome(node, path, env, settings | own | {"processes": count or 1}))
            homes[-1].launch_daemon()
        for home in homes:
            home.await_daemon()
        yield homes
    finally:
        for home in homes:
            home.close()


class _Namespace:
    """A namespace, and the process that holds it."""

    def __init__(self) -> None:
        self._setpriv = (program("setpriv", package="util-linux"), "--pdeathsig", "KILL", "--")
        self._nsenter = program("nsenter", package="util-linux")
        unshare = program("unshare", package="util-linux")
        self._holder = subprocess.Popen(
            [*self._setpriv, unshare, "--net", "--", "sh", "-c", "echo made; exec cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self.pid = self._holder.pid
        assert self._holder.stdout is not None
        assert self._holder.stderr is not None
        if not self._holder.stdout.readline():
            reason = self._holder.stderr.read().decode().strip()
            self.close()
            pytest.skip(f"nodes are network namespaces, which are not to be had here: {reason}")

    @property
    def enter(self) -> tuple[str, ...]:
        return (*self._setpriv, self._nsenter, f"--net=/proc/{self.pid}/ns/net", "--")

    def call(self, name: str, *arguments: str, check: bool = True) -> str:
        return _call([*self.enter, program(name, package="iproute2"), *arguments], check=check)

    def ip(self, *commands: str) -> None:
        _call([*self.enter, program("ip", package="iproute2"), "-batch", "-"], input="\n".join(commands))

    def close(self) -> None:
        self._holder.kill()
        self._holder.wait()
        for pipe in (self._holder.stdin, self._holder.stdout, self._holder.stderr):
            assert pipe is not None
            pipe.close()


def _call(command: list[str], *, check: bool = True, **more: Any) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, **more)
    if check and done.returncode:
        raise ServerError(f"{' '.join(command)} failed with {done.returncode}: {done.stderr[-2000:]}")
    return str(done.stdout)
