"""A small stand-in for the Kubernetes API server: PVCs, StorageClasses, Events and nodes over HTTP, with a token.

The real one is not to be had in a test. This one answers what the driver's client sends, and fails on demand.
"""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import yaml

TOKEN = "token-of-the-service-account"


class ApiServer:
    """`claims`, `classes` and `events` are what it holds; `fail` is a status, or "hang", for paths with `failing` in
    them."""

    def __init__(self, handler: type[ApiHandler] | None = None) -> None:
        self.claims: dict[str, dict[str, Any]] = {}
        self.classes: dict[str, dict[str, Any]] = {}
        self.events: dict[str, dict[str, Any]] = {}
        self.nodes: dict[str, dict[str, str]] = {}
        """Labels by the nodes' names."""
        self.page = 2
        """At most so many nodes are in one answer, whatever is asked for."""
        self.requests: list[str] = []
        self.fail: int | str = 0
        self.failing = ""
        self._go_on, self._came = threading.Event(), threading.Condition()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (handler or ApiHandler,), {"api": self}))
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def put_claim(
        self,
        name: str,
        annotations: dict[str, str],
        *,
        namespace: str = "lab",
        uid: str = "0f4d0000-0000-4000-8000-000000000001",
        storage_class: str = "datacache",
    ) -> dict[str, str]:
        """Keep a PVC; the parameters by which the provisioner tells the driver of it."""
        self.claims[f"{namespace}/{name}"] = {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": name, "namespace": namespace, "uid": uid, "annotations": annotations},
            "spec": {"storageClassName": storage_class},
        }
        return {"csi.storage.k8s.io/pvc/name": name, "csi.storage.k8s.io/pvc/namespace": namespace}

    def put_class(self, name: str, parameters: dict[str, str]) -> None:
        """Keep a StorageClass."""
        self.classes[name] = {
            "apiVersion": "storage.k8s.io/v1",
            "kind": "StorageClass",
            "metadata": {"name": name},
            "provisioner": "datacache.io",
            "parameters": parameters,
        }

    def write_kubeconfig(self, file: Path, *, token: str = TOKEN) -> Path:
        """A kubeconfig that leads here."""
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "driver"}}],
            "clusters": [{"name": "test", "cluster": {"server": self.url}}],
            "users": [{"name": "driver", "user": {"token": token}}],
        }
        file.write_text(yaml.safe_dump(config))
        return file

    def wait_for(self, part: str) -> None:
        """Until a request with this in its path has come."""
        with self._came:
            assert self._came.wait_for(lambda: any(part in request for request in self.requests), 60)

    def note(self, request: str) -> None:
        with self._came:
            self.requests.append(request)
            self._came.notify_all()

    def wait_if_hanging(self) -> None:
        self._go_on.wait(60)

    def clear(self) -> None:
        """Hold nothing, and answer properly."""
        self.claims.clear()
        self.classes.clear()
        self.events.clear()
        self.nodes.clear()
        self.fail, self.failing = 0, ""

    def close(self) -> None:
        self._go_on.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class ApiHandler(BaseHTTPRequestHandler):
    """Answer requests out of what `api` holds."""

    api: Any
    disable_nagle_algorithm = True  # headers and body are two packets: 40 ms for each answer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer("GET")

    def do_POST(self) -> None:
        self._answer("POST")

    def do_PATCH(self) -> None:
        self._answer("PATCH")

    def _answer(self, method: str) -> None:
        api = self.api
        length = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(length)) if length else None
        api.note(f"{method} {self.path}")
        if api.fail and api.failing in self.path:
            if api.fail == "hang":
                api.wait_if_hanging()
                self.close_connection = True
                return
            self._send(int(api.fail), _status(int(api.fail)))
        elif self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._send(401, _status(401))
        else:
            path, _, query = self.path.partition("?")
            parts = path.strip("/").split("/")
            of_nodes = parts[:3] == ["api", "v1", "nodes"]
            found = self._of_nodes(method, parts[3:], body, query) if of_nodes else self._found(method, parts, body)
            self._send(*found)

    def _found(self, method: str, path: list[str], body: Any) -> tuple[int, Any]:
        api = self.api
        match method, path:
            case "GET", ["api", "v1", "namespaces", namespace, "persistentvolumeclaims", name]:
                return _item(api.claims.get(f"{namespace}/{name}"))
            case "GET", ["apis", "storage.k8s.io", "v1", "storageclasses", name]:
                return _item(api.classes.get(name))
            case "GET", ["api", "v1", "namespaces", namespace, "events", name]:
                return _item(api.events.get(f"{namespace}/{name}"))
            case "POST", ["api", "v1", "namespaces", namespace, "events"]:
                key = f"{namespace}/{body['metadata']['name']}"
                if key in api.events:
                    return 409, _status(409)
                assert body["involvedObject"]["namespace"] == body["metadata"]["namespace"] == namespace
                api.events[key] = body
                return 201, body
            case "PATCH", ["api", "v1", "namespaces", namespace, "events", name]:
                if self.headers["Content-Type"] not in (
                    "application/merge-patch+json",
                    "application/strategic-merge-patch+json",
                ):
                    return 415, _status(415)
                event = api.events.get(f"{namespace}/{name}")
                if event is not None:
                    event.update(body)
                return _item(event)
        return 404, _status(404)

    def _of_nodes(self, method: str, path: list[str], body: Any, query: str) -> tuple[int, Any]:
        nodes = self.api.nodes
        if method == "GET" and not path:
            asked = dict(parse_qsl(query))
            return 200, self._nodes(asked.get("continue", ""), int(asked["limit"]))
        [name] = path
        if method != "PATCH" or name not in nodes:
            return 404, _status(404)
        if self.headers["Content-Type"] != "application/merge-patch+json":
            return 415, _status(415)
        if "PartialObjectMetadataList" in self.headers["Accept"]:  # one node is no list
            return 406, _status(406)
        assert list(body) == ["metadata"]
        assert list(body["metadata"]) == ["labels"]
        labels = nodes[name] | body["metadata"]["labels"]
        nodes[name] = {key: text for key, text in labels.items() if text is not None}
        return 200, self._node(name)

    def _nodes(self, after: str, limit: int) -> dict[str, Any]:
        """A page of nodes, as metadata alone."""
        assert "as=PartialObjectMetadataList;g=meta.k8s.io;v=v1" in self.headers["Accept"]
        left = [name for name in sorted(self.api.nodes) if name > after]
        page = left[: min(limit, self.api.page)]
        more = {"continue": page[-1]} if len(page) < len(left) else {}
        kind = {"kind": "PartialObjectMetadataList", "apiVersion": "meta.k8s.io/v1"}
        return kind | {"metadata": {"resourceVersion": "1"} | more, "items": [self._node(name) for name in page]}

    def _node(self, name: str) -> dict[str, Any]:
        labels = self.api.nodes[name]
        return {"metadata": {"name": name, "uid": f"u-{name}"} | ({"labels": dict(labels)} if labels else {})}

    def _send(self, status: int, answer: Any) -> None:
        text = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def _item(found: Any) -> tuple[int, Any]:
    return (200, found) if found is not None else (404, _status(404))


def _status(code: int) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "Status", "status": "Failure", "code": code}
