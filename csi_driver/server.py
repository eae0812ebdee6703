"""The gRPC server: from a `.proto`'s services and objects with methods of the RPCs' names to calls on a Unix socket.

Used by `__main__`. A method takes the request, returns the answer, and raises `RequestError` or an error
of `datacache`, which becomes the code that `status` says. An RPC without a method is UNIMPLEMENTED. Each call ends in
one line of log, in which, as in the answer, no value of a secret is.

Here are the services that every process of the driver has, too: who it is and what it can do. With `--register` the
driver does itself what the sidecar `node-driver-registrar` is for elsewhere. The kubelet watches its folder
`plugins_registry`: a socket that appears is asked for `GetInfo`, one that goes is deregistered.

The socket is bound beside its place and then renamed into it, so a driver that lives there is replaced without a moment
in which nobody answers, and a dead one's socket is no obstacle. At the end it is removed only if it is still this
server's. Calls come in from many threads; `start` and `close` are the owner's.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import socket
import stat
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.descriptor import FileDescriptor, ServiceDescriptor
from google.protobuf.message_factory import GetMessageClass
from google.protobuf.wrappers_pb2 import BoolValue

import datacache
from csi_driver import DRIVER_NAME
from csi_driver.status import RequestError, aborted, status_of
from csi_driver.volumes import volume_id
from csi_driver.wire import csi_pb2 as csi
from csi_driver.wire import registration_pb2 as wire
from datacache.core import lockfile
from datacache.core.errors import SettingsError

THREADS = 128
"""Calls at a time. Those of pods that wait for a warm-up, or for the endpoint of a Secret, sit there."""
PATIENCE_S = 20.0
"""For calls under way at the end; Kubernetes gives a pod 30 s."""
PROBE_S = 6.0
"""Less than the kubelet waits for the probe (the chart: 10 s), so that its words are seen."""
_MAX_SOCKET_PATH_BYTES = 107
"""unix(7): `sun_path` has 108 with the zero at the end."""
_MAX_WORDS = 4000
"""gRPC gives up on a status that takes more than 8 KiB, in which a byte beyond ASCII takes three."""
_PLAIN_SECRETS = ("endpoint", "endpoint_url", "region", "aws_endpoint_url", "aws_region", "aws_default_region")
"""Keys of secrets whose values are none: an error may say which endpoint it is that does not answer."""
_QUIET = (
    *("Probe", "GetInfo", "GetPluginInfo", "GetPluginCapabilities"),
    *("ControllerGetCapabilities", "GetCapacity", "ListVolumes"),
    *("NodeGetCapabilities", "NodeGetVolumeStats"),
)
"""Asked again and again: logged only where they fail."""

DEADLINE: ContextVar[float] = ContextVar("deadline", default=math.inf)
"""Until when (monotonic seconds) the caller of the RPC in this thread waits."""

_log = logging.getLogger("csi_driver")


class Server:
    """The gRPC server on one socket."""

    def __init__(
        self,
        socket: Path,
        file: FileDescriptor,
        services: Mapping[str, object],
        *,
        count: Callable[[str, str], None] = lambda _rpc, _code: None,
    ) -> None:
        """Take the `services` by their names in `file`. `count` is called with each call's RPC and code."""
        self.socket = socket
        self._count = count
        self._beside = socket.with_name(f".{socket.name}.{os.getpid()}")
        self._identity: tuple[int, int] | None = None
        self._busy = _Busy()
        self._server = grpc.server(
            ThreadPoolExecutor(THREADS, thread_name_prefix="csi"),
            options=[("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", 4 * 2**20)],
        )
        for name, service in services.items():
            self._server.add_generic_rpc_handlers((self._handler(file.services_by_name[name], service),))

    def start(self) -> None:
        """Answer calls. `SettingsError` names what is wrong with the socket's place."""
        if len(os.fsencode(self._beside)) > _MAX_SOCKET_PATH_BYTES:
            raise SettingsError(
                f"the path of the socket {self.socket} is too long",
                hint=f"A Unix socket's path has at most {_MAX_SOCKET_PATH_BYTES} bytes, and while it is replaced it "
                f"takes {len(os.fsencode(self._beside)) - len(os.fsencode(self.socket))} more.",
            )
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISSOCK(self.socket.lstat().st_mode):
                raise SettingsError(f"{self.socket} is there, and no socket", hint="Remove it, or name another place.")
        with self._place():
            for left in self.socket.parent.glob(f".{self.socket.name}.*"):  # of one that was killed right here
                left.unlink(missing_ok=True)
            try:
                bound = self._server.add_insecure_port(f"unix:{self._beside}")
            except RuntimeError:
                bound = 0
            if not bound:
                folder = self.socket.parent
                hint = "" if os.access(folder, os.W_OK | os.X_OK) else f"This process may not write into {folder}."
                raise SettingsError(f"no socket can be made in {folder}", hint=hint)
            self._beside.chmod(0o660)  # a sidecar may be another user, of the pod's group
            found = self._beside.lstat()
            self._identity = (found.st_dev, found.st_ino)
            self._server.start()
            if _is_answered(self.socket):
                _log.info("taking %s over from who answers there", self.socket)
            self._beside.replace(self.socket)

    def close(self, *, patience_s: float = PATIENCE_S) -> bool:
        """Take no new call, wait for those under way for `patience_s`, and remove the socket if it is ours. Return
        whether all calls have ended; the threads of others go on."""
        if self._identity is not None:
            # First the name: whoever comes from now on finds no socket, or our successor's.
            with contextlib.suppress(OSError, SettingsError), self._place():
                found = self.socket.lstat()
                if (found.st_dev, found.st_ino) == self._identity:
                    self.socket.unlink()
            self._identity = None
        self._server.stop(patience_s).wait(patience_s + 1.0)
        left = self._busy.calls()
        if left:
            _log.warning("still under way after %.0f s, and left: %s", patience_s, ", ".join(left))
        return not left

    @contextlib.contextmanager
    def _place(self) -> Iterator[None]:
        """Hold the socket's folder, so that one driver at a time puts a socket there or takes it away."""
        try:
            folder = os.open(self.socket.parent, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as exc:
            raise SettingsError(
                f"the folder {self.socket.parent} of the socket cannot be opened: {exc.strerror}",
                hint="Make it, or name a socket in a folder that is there.",
            ) from exc
        try:
            lockfile.take(folder)
            yield
        finally:
            os.close(folder)

    def _handler(self, service: ServiceDescriptor, implementation: object) -> grpc.GenericRpcHandler:
        methods = {
            method.name: grpc.unary_unary_rpc_method_handler(
                self._called(method.name, getattr(implementation, method.name)),
                request_deserializer=GetMessageClass(method.input_type).FromString,
                response_serializer=GetMessageClass(method.output_type).SerializeToString,
            )
            for method in service.methods
            if hasattr(implementation, method.name)
        }
        return grpc.method_handlers_generic_handler(service.full_name, methods)

    def _called(self, name: str, function: Callable[[Any], Any]) -> Callable[[Any, grpc.ServicerContext], Any]:
        def call(request: Any, context: grpc.ServicerContext) -> Any:
            started = time.monotonic()
            try:
                with self._busy.hold(name, _work_of(name, request)):
                    DEADLINE.set(started + context.time_remaining())
                    answer = function(request)
            except Exception as exc:  # noqa: BLE001  the caller gets it
                code, words = status_of(exc)
                words = _cut(_without_secrets(words, request))
                _log.warning("%s: %s", _line(name, request, code.name, started), _one_line(words))
                if not isinstance(exc, RequestError) and code is grpc.StatusCode.INTERNAL:
                    _log.error("%s", _without_secrets("".join(traceback.format_exception(exc)), request))
                self._count(name, code.name)
                context.abort(code, words)
            _log.log(logging.DEBUG if name in _QUIET else logging.INFO, "%s", _line(name, request, "OK", started))
            self._count(name, "OK")
            return answer

        return call


class IdentityService:
    """The Identity service: the same in all modes, as it speaks for the driver as a whole."""

    def GetPluginInfo(self, _request: csi.GetPluginInfoRequest) -> csi.GetPluginInfoResponse:
        return csi.GetPluginInfoResponse(name=DRIVER_NAME, vendor_version=datacache.__version__)

    def GetPluginCapabilities(self, _request: csi.GetPluginCapabilitiesRequest) -> csi.GetPluginCapabilitiesResponse:
        service, expansion = csi.PluginCapability.Service, csi.PluginCapability.VolumeExpansion
        return csi.GetPluginCapabilitiesResponse(
            capabilities=[
                csi.PluginCapability(service=service(type=service.CONTROLLER_SERVICE)),
                csi.PluginCapability(volume_expansion=expansion(type=expansion.ONLINE)),
            ]
        )

    def Probe(self, _request: csi.ProbeRequest) -> csi.ProbeResponse:
        # Ready as soon as it answers. A catalog or a store that is away is no reason to be restarted for.
        return csi.ProbeResponse(ready=BoolValue(value=True))


class RegistrationService:
    """The service `pluginregistration.Registration`. Its methods are the RPCs."""

    def __init__(self, endpoint: str) -> None:
        """Take `endpoint`, the path of the driver's socket as the kubelet sees it."""
        self._endpoint = endpoint

    def GetInfo(self, _request: wire.InfoRequest) -> wire.PluginInfo:
        # The versions are those of the kubelet's interface, not of the driver or of CSI's latest.
        return wire.PluginInfo(
            type="CSIPlugin", name=DRIVER_NAME, endpoint=self._endpoint, supported_versions=["1.0.0"]
        )

    def NotifyRegistrationStatus(self, request: wire.RegistrationStatus) -> wire.RegistrationStatusResponse:
        if request.plugin_registered:
            _log.info("the kubelet has registered the driver")
        else:
            _log.error("the kubelet does not register the driver: %s", request.error)
        return wire.RegistrationStatusResponse()


def probe(socket: Path) -> str:
    """Return what keeps the driver on a socket from answering, '' for nothing (Identity.Probe, for `PROBE_S` at most).
    This process's own threads answer, or those of a successor, so a hanging one is noticed."""
    channel = grpc.insecure_channel(f"unix:{socket}", options=[("grpc.use_local_subchannel_pool", 1)])
    try:
        call = channel.unary_unary(
            "/csi.v1.Identity/Probe",
            request_serializer=csi.ProbeRequest.SerializeToString,
            response_deserializer=csi.ProbeResponse.FromString,
        )
        call(csi.ProbeRequest(), timeout=PROBE_S)
    except grpc.RpcError as exc:
        return f"{socket}: {exc.code().name}: {exc.details()}"
    finally:
        channel.close()
    return ""


class _Busy:
    """The volumes that calls work on. A second call on one is refused: the first goes on although its caller gave
    up."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards both
        self._works: Counter[tuple[str, ...]] = Counter()
        self._calls: Counter[str] = Counter()

    def calls(self) -> list[str]:
        """Return the RPCs that are under way."""
        with self._lock:
            return sorted(self._calls.elements())

    @contextlib.contextmanager
    def hold(self, rpc: str, work: tuple[str, ...]) -> Iterator[None]:
        with self._lock:
            if work and self._works[work]:
                raise aborted(f"another call on the volume {work[0]!r} is under way")
            self._calls[rpc] += 1
            self._works[work] += 1
        try:
            yield
        finally:
            with self._lock:
                self._calls[rpc] -= 1
                self._works[work] -= 1
                self._works += Counter()  # without those that have ended


def _is_answered(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(1.0)
        try:
            connection.connect(str(path))
        except OSError:
            return False
        return True


def _work_of(name: str, request: Any) -> tuple[str, ...]:
    """Return what a call must have for itself: a volume, or one target of it, as pods may share the volume; or none."""
    if name == "CreateVolume":
        return (volume_id(request.name),)
    if name in ("DeleteVolume", "ControllerExpandVolume"):
        return (request.volume_id,)
    if name in ("NodeStageVolume", "NodeUnstageVolume", "NodeExpandVolume"):
        return (request.volume_id, "staging")
    if name in ("NodePublishVolume", "NodeUnpublishVolume"):
        return (request.volume_id, "target", request.target_path)
    return ()


def _line(name: str, request: Any, code: str, started: float) -> str:
    volume = _one_line(getattr(request, "volume_id", "") or getattr(request, "name", ""))
    return f"{name} volume={volume or '-'} code={code} ms={1000 * (time.monotonic() - started):.0f}"


def _cut(words: str) -> str:
    words = words.encode(errors="replace").decode()  # a path's bytes that are no text
    size, end = 0, 0
    while end < len(words) and size <= _MAX_WORDS:
        size += 1 if " " <= words[end] <= "~" else 3 * len(words[end].encode())
        end += 1
    return words if end == len(words) else f"{words[:end]}…"


def _one_line(text: str) -> str:
    return "".join(c if c.isprintable() else " " for c in text)


def _without_secrets(words: str, request: Any) -> str:
    secrets: Mapping[str, str] = getattr(request, "secrets", {})
    for value in sorted({value for key, value in secrets.items() if key.lower() not in _PLAIN_SECRETS}, key=len)[::-1]:
        if len(value) > 3:  # shorter ones say nothing, and are in every text
            words = words.replace(value, "***")
    return words
