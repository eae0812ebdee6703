"""What a request says about how a volume is to be used: access modes, mount options, the pod's group.

Used by the controller, which refuses what no node could do, and by the node. Pure; any thread may call. Whatever is
wrong is an `INVALID_ARGUMENT` that names it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from csi_driver.status import invalid
from csi_driver.volumes import VolumeSpec
from csi_driver.wire import csi_pb2
from fuse_mount.bucket_config import ACKS

Mode = csi_pb2.VolumeCapability.AccessMode
READER_MODES = (Mode.SINGLE_NODE_READER_ONLY, Mode.MULTI_NODE_READER_ONLY)
_GROUP_UMASK = 0o002
_FLAGS = ("ro", "rw", "noexec", "exec", "nosuid", "nodev")


@dataclass(frozen=True, kw_only=True)
class MountOptions:
    """How a volume is mounted on a node. The fields up to `staging` are a bucket mount's own."""

    uid: int = 0
    gid: int = 0
    umask: int = 0o022
    ack: str = "staged"
    ttl_s: float = 5.0
    upload_every_s: float = 30.0
    staging: str = ""
    read_only: bool = False
    noexec: bool = False

    def of_mount(self) -> dict[str, Any]:
        """What a bucket's mount is made with; volumes that agree in it can share one."""
        names = ("uid", "gid", "umask", "ack", "ttl_s", "upload_every_s", "staging")
        return {name: getattr(self, name) for name in names}


def check_capability(capability: csi_pb2.VolumeCapability, spec: VolumeSpec) -> None:
    """Raise unless the volume can be used like this."""
    mount_options(capability, spec)


def mount_options(capability: csi_pb2.VolumeCapability, spec: VolumeSpec) -> MountOptions:
    """How to mount the volume. Raises as `check_capability`.

    A data set may be asked for with any access mode, as many tools know ReadWriteOnce only; it is read-only in all.
    """
    kind = capability.WhichOneof("access_type")
    if kind == "block":
        raise invalid("a volume is a file system here, never a block device: use volumeMode: Filesystem")
    if kind is None:
        raise invalid("the volume capability has no access type: it is `mount`")
    mode = capability.access_mode.mode
    if mode == Mode.UNKNOWN or mode not in Mode.Mode.values():
        raise invalid("the volume capability has no access mode that is known here")
    values = _parse_flags(capability.mount.mount_flags, of_dataset=spec.read_only)
    group = capability.mount.volume_mount_group
    if group and not spec.read_only:
        values = {"gid": _number(10, "volume_mount_group", group), "umask": _GROUP_UMASK} | values
    read_only = bool(values.get("read_only")) or spec.read_only or mode in READER_MODES
    return MountOptions(**values | {"read_only": read_only})


def is_single_writer(capability: csi_pb2.VolumeCapability) -> bool:
    """Whether one place of one node may use the volume at a time."""
    return bool(capability.access_mode.mode == Mode.SINGLE_NODE_SINGLE_WRITER)


def _parse_flags(flags: Iterable[str], *, of_dataset: bool) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for flag in (part.strip() for text in flags for part in text.split(",")):
        name, equals, text = flag.partition("=")
        if not flag or (not equals and name in _FLAGS):
            values |= {"read_only": True} if name == "ro" else {"noexec": True} if name == "noexec" else {}
        elif equals and name in _OPTIONS and not of_dataset:
            field, parse = _OPTIONS[name]
            values[field] = parse(name, text)
        elif equals and name in _OPTIONS:
            raise invalid(f"mount option {flag!r}: it is for buckets; a data set can be read by everybody as it is")
        else:
            raise invalid(f"there is no mount option {flag!r}; there are {', '.join((*_FLAGS, *_OPTIONS))}")
    return values


def _number(base: int, name: str, text: str) -> int:
    limit = 0o777 if base == 8 else 2**32 - 2
    if not re.fullmatch(r"[0-7]{1,4}" if base == 8 else r"[0-9]{1,10}", text) or int(text, base) > limit:
        raise invalid(f"mount option {name}={text!r}: it is {'an octal number, such as 002' if base == 8 else 'an id'}")
    return int(text, base)


def _decimal(name: str, text: str) -> int:
    return _number(10, name, text)


def _octal(name: str, text: str) -> int:
    return _number(8, name, text)


def _seconds(name: str, text: str) -> float:
    try:
        seconds = float(text.removesuffix("s"))
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise invalid(f"mount option {name}={text!r}: it is a number of seconds")
    return seconds


def _ack(name: str, text: str) -> str:
    if text not in ACKS:
        raise invalid(f"mount option {name}={text!r}: it is one of {', '.join(ACKS)}")
    return text


def _folder(name: str, text: str) -> str:
    if not text.startswith("/") or ".." in text.split("/"):
        raise invalid(f"mount option {name}={text!r}: it is an absolute path on the node")
    return text


_OPTIONS: dict[str, tuple[str, Callable[[str, str], Any]]] = {
    "uid": ("uid", _decimal),
    "gid": ("gid", _decimal),
    "umask": ("umask", _octal),
    "ack": ("ack", _ack),
    "ttl": ("ttl_s", _seconds),
    "upload_every": ("upload_every_s", _seconds),
    "staging": ("staging", _folder),
}
