"""The admission webhook: pods whose volumes are data sets prefer nodes that hold these (`node_labels`).

Served by the controller over HTTPS. The answer to an AdmissionReview is always that the pod is allowed; there is a
patch with it where something is to be preferred, and none for a review that makes no sense, a data set that the pod's
namespace may not have, or a catalog or API that is away. So no pod ever fails or waits for it, and nobody learns here
which data sets there are. What a pod says about its nodes stays, and what is preferred already is not added again.

Whoever reaches the port may ask, as an API server shows no certificate by itself. Connections are few, short and small;
each has a thread of its own.
"""

from __future__ import annotations

import base64
import contextlib
import json
import logging
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from http import HTTPStatus
from http.client import LineTooLong
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, cast

from csi_driver import DRIVER_NAME, volume_records
from csi_driver.kube import KubeApi
from csi_driver.metrics import COUNTS, HttpServer, listen
from csi_driver.resolve import check_open
from csi_driver.status import RequestError
from csi_driver.volumes import PREFIX, volume_id
from datacache.api import open_catalog, preferred_nodes
from datacache.catalog.access import check_namespace
from datacache.catalog.refs import parse_ref, resolve
from datacache.core.errors import DatacacheError
from datacache.core.ipc import parse_object
from datacache.core.reloaded import Reloaded
from datacache.settings import Settings

PATH = "/place"
PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"
MOST_BYTES = 2 * 2**20
"""Of a review: a pod has 1.5 MiB at most (etcd's limit)."""
_MOST_BYTES_TOGETHER = 2 * MOST_BYTES
"""Of all reviews that are being answered: parsed, they take up to 27 times as much, and there are volumes to serve."""
_MOST_HEAD_BYTES = 32 * 2**10
_MOST_VOLUMES = 32
_MOST_SNAPSHOTS = 8
"""Each makes two terms, and all pods' terms are looked at for each node."""
_MOST_TERMS = 100
_MOST_CONNECTIONS = 64
_PATIENCE_S = 2.0
"""For one review. The API server waits no longer than `timeoutSeconds`, and goes on without us."""
_CONNECTION_S = 10.0
_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
_UID = re.compile(r"[A-Za-z0-9-]{1,128}")
_log = logging.getLogger(__name__)


class PodPlacement:
    """Finds the nodes that pods prefer. Any thread may call."""

    def __init__(self, settings: Settings, api: KubeApi | None) -> None:
        """Without an API, only volumes that a pod describes itself are known."""
        self._access, self._catalog, self._api = settings.access, open_catalog(settings), api

    def close(self) -> None:
        """Close the catalog."""
        self._catalog.close()

    def review(self, body: bytes) -> dict[str, Any]:
        """Return the answer to an AdmissionReview, whatever it is: allowed, with a patch or without."""
        response: dict[str, Any] = {"uid": "", "allowed": True}
        code = "ALLOWED"
        try:
            request = parse_object(body)["request"]
            uid = request["uid"]
            if isinstance(uid, str) and _UID.fullmatch(uid):
                response["uid"] = uid
                patch = self._patch(request)
                if patch:
                    code, encoded = "PATCHED", base64.b64encode(json.dumps(patch).encode())
                    response |= {"patchType": "JSONPatch", "patch": encoded.decode()}
        except Exception as exc:  # noqa: BLE001  no pod is to fail because of its preference
            code = "FAILED"
            _log.debug("a review is answered without a patch: %s", exc)
        COUNTS.call("ReviewPod", code)
        return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": response}

    def _patch(self, request: Mapping[str, Any]) -> list[dict[str, Any]]:
        kind, pod, namespace = request["kind"], request["object"], request["namespace"]
        of_pod = (kind.get("group", ""), kind["kind"], request["operation"]) == ("", "Pod", "CREATE")
        if not of_pod or pod["spec"].get("nodeName"):
            return []
        check_namespace(namespace)
        return add_preferences(pod["spec"], preferred_nodes(self._snapshots(pod["spec"], namespace)))

    def _snapshots(self, spec: Mapping[str, Any], namespace: str) -> dict[str, int]:
        """Return the snapshots that a pod's volumes are of, if its namespace may have them: ids and sizes in bytes."""
        until = time.monotonic() + _PATIENCE_S
        found: dict[str, int] = {}
        for volume in (spec.get("volumes") or [])[:_MOST_VOLUMES]:
            if time.monotonic() > until or len(found) == _MOST_SNAPSHOTS:
                break
            try:
                text = self._dataset(volume, namespace)
                if text:
                    ref = parse_ref(text)
                    check_open(self._catalog, ref.dataset, namespace, default=self._access, unknown="")
                    record = resolve(self._catalog, ref)
                    found[record.id] = record.total_bytes
            except (DatacacheError, RequestError, KeyError, TypeError, AttributeError) as exc:
                _log.debug("a volume is left out: %s", exc)
        return found

    def _dataset(self, volume: Mapping[str, Any], namespace: str) -> str:
        """Return the reference that a volume of a pod is of; '' for one that is no data set."""
        if volume.get("persistentVolumeClaim"):
            return self._of_claim(namespace, volume["persistentVolumeClaim"]["claimName"])
        if volume.get("ephemeral"):
            annotations = volume["ephemeral"]["volumeClaimTemplate"]["metadata"]["annotations"]
            return str(annotations.get(f"{PREFIX}dataset", ""))
        csi = volume.get("csi") or {}
        return str(csi["volumeAttributes"].get("dataset", "")) if csi.get("driver") == DRIVER_NAME else ""

    def _of_claim(self, namespace: str, name: str) -> str:
        claim = self._api.claim(namespace, name) if self._api is not None and _NAME.fullmatch(name) else None
        if claim is None:
            return ""
        record = volume_records.read(self._catalog, volume_id(f"pvc-{claim.uid}"))  # as csi-provisioner names it
        return claim.annotations.get(f"{PREFIX}dataset", "") if record is None else record.spec.dataset


def add_preferences(spec: Mapping[str, Any], terms: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the JSON patch (RFC 6902) that adds preferred terms to a pod, but for labels that it speaks of already."""
    parts = ["", "spec"]
    there: Any = spec
    rest: Any = terms
    for name in ("affinity", "nodeAffinity", PREFERRED):
        parts.append(name)
        if not there.get(name):
            nested = ("affinity", "nodeAffinity", PREFERRED)
            for inner in reversed(nested[nested.index(name) + 1 :]):
                rest = {inner: rest}
            return [{"op": "add", "path": "/".join(parts), "value": rest}] if terms else []
        there = there[name]
    known = {each["key"] for term in there for each in term["preference"].get("matchExpressions") or ()}
    new = [term for term in terms if term["preference"]["matchExpressions"][0]["key"] not in known]
    if len(there) + len(new) > _MOST_TERMS:
        return []
    return [{"op": "add", "path": "/".join([*parts, "-"]), "value": term} for term in new]


class WebhookServer:
    """The port, answered until `close`."""

    def __init__(self, port: int, tls: Path, review: Callable[[bytes], dict[str, Any]], *, address: str = "*") -> None:
        """`tls`: a folder with `tls.crt` and `tls.key`, which may come or be renewed later. `OSError` if the port (0:
        any; see `port`) is taken."""
        handler = partial(_ReviewHandler, review, _Room(_MOST_BYTES_TOGETHER))
        self._server = listen(address, port, handler, _TlsServer)
        assert isinstance(self._server, _TlsServer)
        files = [tls / "tls.crt", tls / "tls.key"]
        self._server.tls = Reloaded(files, lambda: _tls_context(*files), named=f"the certificate in {tls}", log=_log)
        try:
            self._server.tls.get()
        except (OSError, ValueError) as exc:
            _log.warning("the webhook has no certificate yet, in %s: %s", tls, exc)
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, name="webhook", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop answering."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def _tls_context(certificate: Path, key: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(certificate, key, password="")  # nobody is asked for one
    return context


class _TlsServer(HttpServer):
    tls: Reloaded[ssl.SSLContext]

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._places = threading.BoundedSemaphore(_MOST_CONNECTIONS)

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Answer a connection, in its thread; hang up at once if there are too many."""
        if not self._places.acquire(blocking=False):
            return
        try:
            request.settimeout(_CONNECTION_S)
            context = self.tls.get()
            secured = context.wrap_socket(request, server_side=True, do_handshake_on_connect=False)
            with secured, _bounded(secured):
                secured.do_handshake()
                super().finish_request(secured, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log what befell a connection at debug level: anybody can make a bad one."""
        _log.debug("a connection to the webhook", exc_info=True)


@contextlib.contextmanager
def _bounded(connection: ssl.SSLSocket) -> Iterator[None]:
    """Hang up on somebody who sends a byte now and then."""

    def hang_up() -> None:
        with contextlib.suppress(OSError):
            socket.socket.shutdown(connection, socket.SHUT_RDWR)

    timer = threading.Timer(_CONNECTION_S, hang_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class _Room:
    """How many bytes of reviews are taken on at a time."""

    def __init__(self, size_bytes: int) -> None:
        self._changed = threading.Condition()  # guards _left
        self._left = size_bytes

    @contextlib.contextmanager
    def take(self, size_bytes: int) -> Iterator[bool]:
        """Wait until there is room, and keep it. False, and none, if that takes too long."""
        with self._changed:
            there = self._changed.wait_for(lambda: self._left >= size_bytes, _PATIENCE_S)
            self._left -= size_bytes if there else 0
        try:
            yield there
        finally:
            with self._changed:
                self._left += size_bytes if there else 0
                self._changed.notify_all()


class _ShortHead:
    """The stream of a request whose head may be no longer than `_MOST_HEAD_BYTES`: `http.server` takes 6 MiB."""

    def __init__(self, stream: Any) -> None:
        self._stream, self._left = stream, _MOST_HEAD_BYTES

    def readline(self, most_bytes: int) -> bytes:
        """Return the next line, as the stream has it."""
        line: bytes = self._stream.readline(min(most_bytes, self._left + 1))
        self._left -= len(line)
        if self._left < 0:
            raise LineTooLong("head")
        return line


class _ReviewHandler(BaseHTTPRequestHandler):
    server_version, sys_version = "datacache", ""

    def __init__(self, review: Callable[[bytes], dict[str, Any]], room: _Room, *connection: Any) -> None:
        self._review, self._room = review, room
        super().__init__(*connection)  # which answers

    def parse_request(self) -> bool:
        """Read the head of a request; one that is too long is refused."""
        stream, self.rfile = self.rfile, cast("Any", _ShortHead(self.rfile))
        try:
            return super().parse_request()
        finally:
            self.rfile = stream

    def do_POST(self) -> None:
        """Answer a review."""
        text = self.headers.get("Content-Length") or ""
        length = int(text) if re.fullmatch("[0-9]{1,9}", text) else MOST_BYTES + 1
        if length > MOST_BYTES:
            self.send_error(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
            return
        asked = self.rfile.read(length)  # whoever is not done with it sees no answer
        if self.path.partition("?")[0] != PATH:
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        with self._room.take(length) as there:
            body = json.dumps(self._review(asked)).encode() if there else b""
        if not there:
            self.send_error(HTTPStatus.SERVICE_UNAVAILABLE)
            return
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log at debug level: every pod would be a line."""
        _log.debug(format, *args)
