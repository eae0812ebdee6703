"""The driver's port for Prometheus and probes: `/metrics` and `/healthz` over HTTP, without secrets and without
names of objects, buckets and places, as whoever reaches a node's address can read it; of data sets and namespaces where
the setting `metrics_names` says so.

Used by `__main__`. `/metrics` is the node's: the cache daemon's over its Unix socket, those of read-write mounts, and a
few of the driver itself. What does not answer soon is left out, and counted. `COUNTS` is filled by `server` and the
mender, from any thread; requests are answered in threads of their own, which wait only for those whose numbers they
show.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import socketserver
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeVar

from csi_driver.node.patience import Patience
from csi_driver.node.records import Records
from csi_driver.status import RequestError
from datacache import api
from datacache.core.errors import DatacacheError
from datacache.settings import Settings
from fuse_mount import bucket_status, list_bucket_mounts, list_mounts, render_metrics

_log = logging.getLogger(__name__)
_REQUEST_TIMEOUT_S = 30.0
_ANSWER_S = 3.0
_TEXT = "text/plain; version=0.0.4; charset=utf-8"
_Page = Callable[[], tuple[HTTPStatus, str]]
T = TypeVar("T")


class CallCounts:
    """The counters of a driver since its start. Safe from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards all below
        self._calls: Counter[tuple[str, str]] = Counter()
        self._mended = self._labelled = 0

    def call(self, method: str, code: str) -> None:
        """Count an RPC's answer."""
        with self._lock:
            self._calls[method, code] += 1

    def mended(self) -> None:
        """Count a lost mount that was made anew under its pods."""
        with self._lock:
            self._mended += 1

    def labelled(self, nodes: int) -> None:
        """Count nodes whose labels were changed."""
        with self._lock:
            self._labelled += nodes

    def render(self) -> list[str]:
        """Return the counters as lines for Prometheus."""
        with self._lock:
            calls, mended, labelled = sorted(self._calls.items()), self._mended, self._labelled
        lines = ["# HELP datacache_csi_calls_total RPCs answered.", "# TYPE datacache_csi_calls_total counter"]
        lines += [f'datacache_csi_calls_total{{method="{name}",code="{code}"}} {n}' for (name, code), n in calls]
        lines += _metric("mounts_mended_total", "counter", "Mounts that were lost and made anew under pods.", mended)
        lines += _metric("nodes_labelled_total", "counter", "Changes of nodes' labels for what they hold.", labelled)
        return lines


COUNTS = CallCounts()
"""This process's."""


class NodeMetrics:
    """All metrics of a node. Asks everybody at once and for a bounded time: Prometheus gives up after 10 s, and then it
    has no metrics at all."""

    def __init__(self, settings: Settings, records: Records) -> None:
        self._settings, self._records = settings, records
        self._patience = Patience("whoever has them")

    def render(self) -> str:
        """Return the metrics as text."""
        buckets = list_bucket_mounts(self._settings)
        with ThreadPoolExecutor(len(buckets) + 2) as pool:
            daemon_asked = pool.submit(self._ask, "the daemon", self._daemon)
            mounts_asked = pool.submit(self._ask, "mounts of snapshots", lambda: len(list_mounts(self._settings)))
            statuses = pool.map(lambda info: self._ask(str(info.mountpoint), partial(bucket_status, info)), buckets)
            live = [(info, status) for info, status in zip(buckets, statuses, strict=True) if status is not None]
            daemon, mounts = daemon_asked.result(), mounts_asked.result()
        text = (daemon or "") + (render_metrics(live, self._settings.home, named=False) if live else "")
        used = sum(record.used for record in self._records.all())
        lines = COUNTS.render()
        lines += _metric("daemon_up", "gauge", "1 if the cache daemon answers.", int(daemon is not None))
        lines += _metric("volumes", "gauge", "Volumes that pods of this node use.", used)
        if mounts is not None:
            lines += _metric("snapshot_mounts", "gauge", "Snapshots mounted.", mounts)
        silent = len(buckets) - len(live)
        lines += _metric("bucket_mounts", "gauge", "Bucket prefixes mounted to be written.", len(buckets))
        lines += _metric("bucket_mounts_silent", "gauge", "Of them, those that do not answer.", silent)
        return text + "\n".join(lines) + "\n"

    def _daemon(self) -> str | None:
        client = api.running_daemon(self._settings)
        return None if client is None else client.metrics(names=self._settings.metrics_names)

    def _ask(self, whose: str, question: Callable[[], T]) -> T | None:
        try:
            return self._patience.ask(whose, question, _ANSWER_S)
        except (DatacacheError, RequestError) as exc:
            _log.warning("the metrics of %s are missing: %s", whose, exc)
            return None


class MetricsServer:
    """The port, answered until `close` in threads of its own."""

    def __init__(
        self,
        port: int,
        node: NodeMetrics | None,
        *,
        address: str = "127.0.0.1",
        problem: Callable[[], str] = lambda: "",
    ) -> None:
        """Answer on a TCP port (0: any; see `port`) of an address ("*": all). `OSError` if the port is taken or the
        address is not this machine's.

        `node` is None for a process that is no node's, such as a controller, which shows only its own counters.
        `problem` returns what keeps the driver from working, '' for nothing: `/healthz` then answers 503 with these
        words.
        """
        render = node.render if node else lambda: "\n".join(COUNTS.render()) + "\n"
        pages: dict[str, _Page] = {
            "/metrics": lambda: (HTTPStatus.OK, render()),
            "/healthz": lambda: _health(problem()),
        }
        self._server = listen(address, port, partial(_Handler, pages))
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop answering."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    timeout = _REQUEST_TIMEOUT_S
    server_version, sys_version = "datacache", ""

    def __init__(self, pages: Mapping[str, _Page], *connection: Any) -> None:
        self._pages = pages
        super().__init__(*connection)  # which answers

    def do_GET(self) -> None:
        """Answer one of the pages."""
        page = self._pages.get(self.path.partition("?")[0])
        status, text = page() if page is not None else (HTTPStatus.NOT_FOUND, "there are /metrics and /healthz\n")
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", _TEXT)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        with contextlib.suppress(ConnectionError):  # whoever asked has gone
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log at debug level: every probe would be a line."""
        _log.debug(format, *args)


class HttpServer(ThreadingHTTPServer):
    """A server of one address, IPv4 or both, that asks no name server."""

    daemon_threads = True

    def __init__(self, family: int, address: tuple[str, int], handler: Callable[..., BaseHTTPRequestHandler]) -> None:
        self.address_family = family
        super().__init__(address, handler)

    def server_bind(self) -> None:
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        # Not HTTPServer's, which asks a name server for our name.
        socketserver.TCPServer.server_bind(self)


def listen(
    address: str, port: int, handler: Callable[..., BaseHTTPRequestHandler], kind: type[HttpServer] = HttpServer
) -> HttpServer:
    """Return a server of this kind on a TCP port of an address ("*": all). `OSError` if it cannot be had."""
    if address == "*" and socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):  # IPv6 is switched off
            return kind(socket.AF_INET6, ("::", port), handler)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return kind(family, ("" if address == "*" else address, port), handler)


def _health(problem: str) -> tuple[HTTPStatus, str]:
    return (HTTPStatus.SERVICE_UNAVAILABLE, f"{problem}\n") if problem else (HTTPStatus.OK, "ok\n")


def _metric(name: str, kind: str, text: str, value: float) -> list[str]:
    full = f"datacache_csi_{name}"
    return [f"# HELP {full} {text}", f"# TYPE {full} {kind}", f"{full} {value}"]
