"""Do what a kubelet does with the Node service, in its words: make folders, send requests."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from csi_driver.status import status_of
from csi_driver.wire import csi_pb2 as csi
from datacache.api import create_snapshot
from datacache.settings import Settings
from fuse_mount.kernel.session import mounts
from tests.csi_driver.driver import capability

Call = Callable[[Any], Any]
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount what the driver mounts")


class Kubelet:
    """Volumes in `folder`, through `service`: a `NodeService`, or a driver's client."""

    def __init__(self, service: Any, folder: Path) -> None:
        self.service, self.folder = service, folder

    def call(self, rpc: str, request: Any) -> Any:
        return getattr(self.service, rpc)(request)

    def code(self, rpc: str, request: Any) -> tuple[str, str]:
        """The code's name and the words of an answer."""
        try:
            self.call(rpc, request)
        except grpc.RpcError as exc:
            return exc.code().name, exc.details()
        except Exception as exc:  # noqa: BLE001 - all of them have a code
            code, words = status_of(exc)
            return code.name, words
        return "OK", ""

    def staging(self, volume: str) -> Path:
        path = self.folder / "plugins" / volume / "globalmount"
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):  # it may be a dead mount, which is no folder
            path.mkdir()
        return path

    def target(self, volume: str, pod: str = "pod-1") -> Path:
        path = self.folder / "pods" / pod / "volumes" / volume / "mount"
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def stage_request(self, volume: str, context: dict[str, str], **more: Any) -> csi.NodeStageVolumeRequest:
        fields = {"volume_capability": self._capability(context)} | more
        return csi.NodeStageVolumeRequest(
            volume_id=volume, staging_target_path=str(self.staging(volume)), volume_context=context, **fields
        )

    def publish_request(
        self, volume: str, context: dict[str, str], pod: str = "pod-1", *, inline: bool = False, **more: Any
    ) -> csi.NodePublishVolumeRequest:
        fields: dict[str, Any] = {"volume_capability": self._capability(context)}
        if inline:
            context = context | {"csi.storage.k8s.io/ephemeral": "true"}
        else:
            fields |= {"staging_target_path": str(self.staging(volume))}
        fields |= more
        return csi.NodePublishVolumeRequest(
            volume_id=volume, target_path=str(self.target(volume, pod)), volume_context=context, **fields
        )

    def stage(self, volume: str, context: dict[str, str], **more: Any) -> None:
        self.call("NodeStageVolume", self.stage_request(volume, context, **more))

    def publish(self, volume: str, context: dict[str, str], pod: str = "pod-1", **more: Any) -> Path:
        self.call("NodePublishVolume", self.publish_request(volume, context, pod, **more))
        return self.target(volume, pod)

    def show(self, volume: str, context: dict[str, str], pod: str = "pod-1", **more: Any) -> Path:
        """Stage and publish; `secrets` are for staging."""
        self.stage(volume, context, **{name: value for name, value in more.items() if name != "readonly"})
        return self.publish(volume, context, pod, **more)

    def unpublish(self, volume: str, pod: str = "pod-1") -> None:
        target = str(self.target(volume, pod))
        self.call("NodeUnpublishVolume", csi.NodeUnpublishVolumeRequest(volume_id=volume, target_path=target))

    def unstage(self, volume: str) -> None:
        request = csi.NodeUnstageVolumeRequest(volume_id=volume, staging_target_path=str(self.staging(volume)))
        self.call("NodeUnstageVolume", request)

    def hide(self, volume: str, *pods: str) -> None:
        """Unpublish from all of these pods, and unstage."""
        for pod in pods or ("pod-1",):
            self.unpublish(volume, pod)
        self.unstage(volume)

    def stats(self, volume: str, path: Path) -> csi.NodeGetVolumeStatsResponse:
        request = csi.NodeGetVolumeStatsRequest(volume_id=volume, volume_path=str(path))
        answer: csi.NodeGetVolumeStatsResponse = self.call("NodeGetVolumeStats", request)
        return answer

    @staticmethod
    def _capability(context: dict[str, str]) -> csi.VolumeCapability:
        return capability("MULTI_NODE_READER_ONLY" if "dataset" in context else "MULTI_NODE_MULTI_WRITER")


def make_masks(folder: Path, settings: Settings | None = None) -> dict[str, str]:
    """The data set `mask` with the tags v1, v2 and v3, each with train/, train/deep/, val/ and README: their ids. Each
    is made of a folder of its own, which stays."""
    ids = {}
    for tag in ("v1", "v2", "v3"):
        for name in ("train/a.jpg", "train/deep/b.jpg", "val/c.jpg", "README"):
            (folder / tag / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / tag / name).write_text(f"{tag} {name}")
        (folder / tag / "VERSION").write_text(tag)
        ids[tag] = create_snapshot("mask", str(folder / tag), tags=[tag], replace=True, settings=settings).id
    return ids


def mounted_below(folder: Path) -> list[str]:
    """Everything mounted in a folder."""
    return sorted(mount.mountpoint for mount in mounts() if mount.mountpoint.startswith(f"{folder}/"))
