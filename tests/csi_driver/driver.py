"""The driver as its own process on a Unix socket, and a client made from the messages' descriptors."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.descriptor import FileDescriptor
from google.protobuf.message_factory import GetMessageClass

from csi_driver.wire import csi_pb2 as csi

START_TIMEOUT_S = 60.0
CALL_TIMEOUT_S = 60.0


_OPTIONS = [
    ("grpc.use_local_subchannel_pool", 1),  # a connection of its own, not one to an older driver's socket
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 100),
]


class Client:
    """`client.CreateVolume(name=…)` calls that RPC with a request of these fields, whichever service has it."""

    def __init__(self, socket: Path, file: FileDescriptor = csi.DESCRIPTOR) -> None:
        self._channel = grpc.insecure_channel(f"unix:{socket}", options=_OPTIONS)
        self._methods = {
            method.name: (f"/{service.full_name}/{method.name}", method)
            for service in file.services_by_name.values()
            for method in service.methods
        }

    def __getattr__(self, name: str) -> Any:
        path, method = self._methods[name]
        request_class, answer_class = GetMessageClass(method.input_type), GetMessageClass(method.output_type)
        call = self._channel.unary_unary(
            path, request_serializer=request_class.SerializeToString, response_deserializer=answer_class.FromString
        )

        def send(request: Any = None, /, *, timeout_s: float = CALL_TIMEOUT_S, **fields: Any) -> Any:
            return call(request or request_class(**fields), timeout=timeout_s, wait_for_ready=True)

        return send

    def code(self, rpc: str, request: Any = None, /, **fields: Any) -> tuple[str, str]:
        """The code's name and the words of the answer to a call."""
        try:
            getattr(self, rpc)(request, **fields)
        except grpc.RpcError as exc:
            return exc.code().name, exc.details()
        return "OK", ""

    def close(self) -> None:
        self._channel.close()


class Driver:
    """`python -m csi_driver` with the variables of this process; its log is kept in `log`."""

    def __init__(self, folder: Path, *options: str, variables: Mapping[str, str] | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.socket = folder / "csi.sock"
        self.options = [f"--endpoint=unix://{self.socket}", "--node-id=node-1", *options]
        # By itself a driver reads no files of its machine, which most tests make their data sets of.
        self.variables = {"DATACACHE_SOURCES": "* file:///"} | dict(variables or {})
        self.log: list[str] = []
        self._logged = threading.Condition()
        self.process: subprocess.Popen[str]
        self.client = Client(self.socket)

    def start(self) -> Driver:
        """Start it, and wait until it answers."""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "csi_driver", *self.options],
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env=os.environ | self.variables,
            text=True,
        )
        answering = threading.Event()
        self._reader = threading.Thread(target=self._read, args=(self.process, answering))
        self._reader.start()
        if not answering.wait(START_TIMEOUT_S) or self.process.poll() is not None:
            self.kill()
            raise RuntimeError(f"the driver did not start:\n{self.text}")
        return self

    def _read(self, process: subprocess.Popen[str], answering: threading.Event) -> None:
        assert process.stderr is not None
        with process.stderr:
            for line in process.stderr:
                with self._logged:
                    self.log.append(line)
                    self._logged.notify_all()
                if "answering on" in line:
                    answering.set()
        with contextlib.suppress(subprocess.TimeoutExpired):  # or it would look as if it lived
            process.wait(START_TIMEOUT_S)
        answering.set()

    @property
    def text(self) -> str:
        return "".join(self.log)

    def lines(self, after: int, count: int) -> list[str]:
        """The first `count` lines of log that came after the first `after`; waits for them."""
        with self._logged:
            assert self._logged.wait_for(lambda: len(self.log) >= after + count, CALL_TIMEOUT_S), self.text
            return self.log[after : after + count]

    def stop(self) -> int:
        """SIGTERM; its exit code."""
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(timeout=60)
        self._reader.join()
        return code

    def kill(self) -> None:
        """SIGKILL. `start` starts it again on the same socket."""
        self.process.kill()
        self.process.wait()
        self._reader.join()

    def __enter__(self) -> Driver:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.client.close()
        if self.process.poll() is None:
            self.kill()


def capability(mode: str = "MULTI_NODE_READER_ONLY", *, flags: tuple[str, ...] = ()) -> csi.VolumeCapability:
    """A capability to mount with this access mode."""
    mount = csi.VolumeCapability.MountVolume(mount_flags=flags)
    return csi.VolumeCapability(mount=mount, access_mode=csi.VolumeCapability.AccessMode(mode=mode))


READ = [capability()]
WRITE = [capability("MULTI_NODE_MULTI_WRITER")]
