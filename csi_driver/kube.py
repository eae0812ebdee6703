"""The Kubernetes API: the controller reads PVCs and StorageClasses and labels nodes, both parts write Events.
`call` and `stream` are for other kinds of objects, such as DataSets.

Through the `kubernetes` package, which takes over a second to import: `warm_up` does that in a thread. Calls have a
limit and are not repeated (the provisioner calls the driver again). Any thread. `RequestError` with UNAVAILABLE where
the API is away, FAILED_PRECONDITION where it does not let us.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from csi_driver import DRIVER_NAME
from csi_driver.status import aborted, invalid, precondition, unavailable
from datacache.core.errors import SettingsError

READ_TIMEOUT_S = (3.0, 5.0)
"""To connect, to answer."""
EVENT_TIMEOUT_S = (2.0, 3.0)
_EVENTS_WAIT_S = 3.0
_NODES_A_PAGE = 500
_JSON, MERGE_PATCH = "application/json", "application/merge-patch+json"
_METADATA, _LIST_OF_METADATA = (
    f"application/json;as=PartialObjectMetadata{of};g=meta.k8s.io;v=v1,application/json" for of in ("", "List")
)
"""Kubernetes' API concepts, *Metadata-only fetches*. Nodes have some ten KiB each."""
_MOST_COUNTS = 1000
_MAX_MESSAGE = 1000
"""An Event's message has at most 1,024 bytes."""

_log = logging.getLogger("csi_driver.kube")


@dataclass(frozen=True, kw_only=True)
class VolumeClaim:
    """A PersistentVolumeClaim."""

    namespace: str
    name: str
    uid: str
    storage_class: str = ""
    annotations: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Pod:
    """A pod that has a volume, as the kubelet names it."""

    namespace: str
    name: str
    uid: str


class KubeApi:
    """The API that a kubeconfig file leads to, or without one the API of the cluster around this process."""

    def __init__(self, kubeconfig: Path | None = None) -> None:
        self._kubeconfig = kubeconfig
        self._events = threading.Lock()  # one Event at a time; guards _counts
        self._counts: dict[str, int] = {}
        """By name, how often an Event was written: the next time costs one call instead of three."""

    def warm_up(self) -> None:
        """Import and connect in a thread, so that the first volume does not wait for it."""

        def work() -> None:
            try:
                _ = self._client
            except Exception as exc:  # noqa: BLE001  the call that needs it says so
                _log.warning("the Kubernetes API: %s", exc)

        threading.Thread(target=work, name="kube-warm-up", daemon=True).start()

    def claim(self, namespace: str, name: str) -> VolumeClaim | None:
        """Return the PVC, or None if it is gone."""
        call = "read_namespaced_persistent_volume_claim"
        found = self._ask(f"read the PVC {namespace}/{name}", "CoreV1Api", call, name, namespace)
        if found is None:
            return None
        return VolumeClaim(
            namespace=namespace,
            name=name,
            uid=found.metadata.uid or "",
            storage_class=(found.spec and found.spec.storage_class_name) or "",
            annotations=found.metadata.annotations or {},
        )

    def class_parameters(self, name: str) -> Mapping[str, str]:
        """Return the parameters of a StorageClass, with those that the provisioner keeps to itself."""
        found = self._ask(f"read the StorageClass {name}", "StorageV1Api", "read_storage_class", name)
        return {} if found is None else found.parameters or {}

    def node_labels(self, prefix: str) -> dict[str, dict[str, str]]:
        """Return the labels of all nodes whose keys begin with this, by the nodes' names."""
        found: dict[str, dict[str, str]] = {}
        more = ""
        while True:
            query = {"limit": str(_NODES_A_PAGE)} | ({"continue": more} if more else {})
            page = self.call("list the nodes", "GET", "/api/v1/nodes", query=query, accept=_LIST_OF_METADATA) or {}
            for node in page.get("items") or ():
                labels = node["metadata"].get("labels") or {}
                found[node["metadata"]["name"]] = {key: text for key, text in labels.items() if key.startswith(prefix)}
            more = (page.get("metadata") or {}).get("continue") or ""
            if not more:
                return found

    def label_node(self, name: str, labels: Mapping[str, str | None]) -> bool:
        """Set labels of a node, and remove those that are None. Return False if there is no such node."""
        body = {"metadata": {"labels": dict(labels)}}
        what, path = f"label the node {name}", f"/api/v1/nodes/{name}"
        found = self.call(what, "PATCH", path, body=body, content_type=MERGE_PATCH, accept=_METADATA)
        return found is not None

    def warn(self, about: VolumeClaim | Pod, reason: str, message: str) -> bool:
        """Write an Event on a PVC or pod, or count it if it exists. Return False, and log, where it cannot be
        written."""
        try:
            if not self._events.acquire(timeout=_EVENTS_WAIT_S):  # the API is slow, and calls are not to wait for it
                _log.warning("no Event for %s/%s: others are being written", about.namespace, about.name)
                return False
            try:
                self._count_event(about, reason, message[:_MAX_MESSAGE])
            finally:
                self._events.release()
        except Exception as exc:  # noqa: BLE001  what was to be said is in the answer, too
            _log.warning("no Event for %s/%s: %s", about.namespace, about.name, _words(exc))
            return False
        return True

    def _count_event(self, about: VolumeClaim | Pod, reason: str, message: str) -> None:
        """Create an Event, or count it if it exists, with the rights to create and to patch Events alone."""
        digest = hashlib.blake2b(f"{about.uid}\0{reason}\0{message}".encode(), digest_size=8).hexdigest()
        name, namespace = f"{about.name[:200].rstrip('.-')}.{digest}", about.namespace
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        kind = "Pod" if isinstance(about, Pod) else "PersistentVolumeClaim"
        there = {"namespace": namespace, "name": about.name, "uid": about.uid}
        body = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": name, "namespace": namespace},
            "involvedObject": {"apiVersion": "v1", "kind": kind} | there,
            "reason": reason,
            "message": message,
            "type": "Warning",
            "count": 1,
            "firstTimestamp": now,
            "lastTimestamp": now,
            "source": {"component": DRIVER_NAME},
        }
        ask = partial(self._ask, "write an Event", "CoreV1Api")
        patch = partial(ask, "patch_namespaced_event", name, namespace)
        count = self._counts.pop(name, 0) + 1
        if count == 1 or patch({"lastTimestamp": now, "count": count}) is None:  # a cluster forgets Events in an hour
            count = 1
            if ask("create_namespaced_event", namespace, body) is None:
                # Of a driver before this one. To read its count is a right that only this would need; a patch says it.
                count = (patch({"lastTimestamp": now}).count or 1) + 1
                patch({"count": count})
        self._counts[name] = count
        while len(self._counts) > _MOST_COUNTS:
            del self._counts[next(iter(self._counts))]

    @cached_property
    def _client(self) -> Any:
        try:
            from kubernetes import client, config
            from kubernetes.config.config_exception import ConfigException
        except ImportError as exc:
            raise SettingsError(
                "the package kubernetes is not installed", hint="Install dsctl[k8s], or leave --kubeconfig out."
            ) from exc
        settings = client.Configuration()
        settings.retries = False
        try:
            if self._kubeconfig is None:
                config.load_incluster_config(client_configuration=settings)
            else:
                config.load_kube_config(str(self._kubeconfig), client_configuration=settings)
        except (ConfigException, OSError) as exc:
            raise SettingsError(f"the Kubernetes API cannot be reached with this configuration: {exc}") from exc
        return client.ApiClient(settings)

    def _ask(self, what: str, api: str, call: str, *arguments: Any) -> Any:
        """Return the answer of an API; None where the thing asked for does not exist, or where what is made does."""
        client = self._client
        from kubernetes import client as kinds

        timeout_s = READ_TIMEOUT_S if call.startswith("read") else EVENT_TIMEOUT_S
        ask = partial(getattr(getattr(kinds, api)(client), call), *arguments, _request_timeout=timeout_s)
        return self._answer(what, ask, none_on=409 if call.startswith("create") else 404)

    def call(
        self,
        what: str,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Any = None,
        content_type: str = _JSON,
        accept: str = _JSON,
    ) -> Any:
        """Send a request and return the object of the answer, as JSON has it, of which the client would take long to
        make its own objects; None where the path leads to nothing, or where what is made with POST exists. `what` says
        what it is for.

        Also raise `RequestError` with INVALID_ARGUMENT, in the API's words, for a body that it does not accept, and
        with ABORTED where somebody else has changed the object meanwhile.
        """
        headers = {"Accept": accept, "Content-Type": content_type}

        def ask() -> Any:
            return json.loads(self._send(method, path, query, body, headers=headers).data)

        return self._answer(what, ask, none_on=409 if method == "POST" else 404)

    def stream(self, what: str, path: str, *, query: Mapping[str, str], silent_s: float) -> Any:
        """Begin a watch and return the response of urllib3, whose lines are events; None where the path leads to
        nothing. It ends when nothing has come for so many seconds; whoever reads it puts up with errors of urllib3 and
        closes it."""
        headers, timeout_s = {"Accept": _JSON}, (READ_TIMEOUT_S[0], silent_s)
        ask = partial(self._send, "GET", path, query, headers=headers, timeout_s=timeout_s)
        return self._answer(what, ask, none_on=404)

    def _send(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None,
        body: Any = None,
        *,
        headers: dict[str, str],
        timeout_s: tuple[float, float] = READ_TIMEOUT_S,
    ) -> Any:
        return self._client.call_api(
            path,
            method,
            query_params=list((query or {}).items()),
            header_params=headers,
            body=body,
            auth_settings=["BearerToken"],
            _preload_content=False,
            _request_timeout=timeout_s,
        )

    def _answer(self, what: str, ask: Callable[[], Any], *, none_on: int) -> Any:
        """Return an answer, None where it has the status `none_on`."""
        from kubernetes import client as kinds
        from urllib3.exceptions import HTTPError

        try:
            return ask()
        except kinds.ApiException as exc:
            if exc.status == none_on:
                return None
            if exc.status in (401, 403):
                raise precondition(
                    f"the Kubernetes API does not let the driver {what} ({exc.status} {exc.reason}): the service "
                    "account needs the ClusterRole that the chart has for it"
                ) from exc
            if exc.status in (400, 422):
                raise invalid(f"the Kubernetes API does not {what}: {_said(exc)}") from exc
            if exc.status == 409:
                raise aborted(f"cannot {what}: somebody else was first") from exc
            raise unavailable(f"cannot {what}: {_words(exc)}") from exc
        except json.JSONDecodeError as exc:
            raise unavailable(f"cannot {what}: the Kubernetes API's answer is no JSON") from exc
        except (HTTPError, OSError) as exc:
            raise unavailable(f"cannot {what}: {_words(exc)}") from exc


def open_api(kubeconfig: Path | None) -> KubeApi | None:
    """Return the API to use; None without a cluster around and without a file."""
    if kubeconfig is None and not os.environ.get("KUBERNETES_SERVICE_HOST"):
        return None
    return KubeApi(kubeconfig)


def _words(error: Exception) -> str:
    """Return a client error's text without its headers and body."""
    status = getattr(error, "status", None)
    return f"the Kubernetes API answered {status} {getattr(error, 'reason', '')}" if status else str(error)


def _said(error: Any) -> str:
    """Return what the API says about a body that it does not accept."""
    try:
        return str(json.loads(error.body)["message"])[:_MAX_MESSAGE]
    except (ValueError, TypeError, KeyError):
        return _words(error)
