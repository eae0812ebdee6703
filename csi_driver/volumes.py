"""Parse what a volume is, from a PVC's annotations, a StorageClass's parameters or a PV's attributes, and how a request
has it used: access modes, mount options, the pod's group.

    dataset   NAME@REF     a snapshot, read-only                  (either this
    bucket    URL          a bucket's prefix, read-write           or this)
    subpath   a/b          only this folder of it
    warm      true, false, wait: fetch all of a snapshot when a node first mounts it; `wait` has pods wait for that
    pin       true, false: never evict a snapshot's data while it is on a node

Used by the controller, which refuses what no node could do, and by the node. Pure values; no I/O. Any thread may call.
Whatever is wrong is an `INVALID_ARGUMENT` that names it.
"""

from __future__ import annotations

import difflib
import hashlib
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from csi_driver import DRIVER_NAME
from csi_driver.status import RequestError, invalid
from csi_driver.wire import csi_pb2
from datacache.catalog.refs import Ref, parse_ref
from datacache.core.errors import DatacacheError
from datacache.settings import parse_bytes
from datacache.store.credentials import takes_credentials
from datacache.store.urls import join_url, split_url
from fuse_mount import ACKS

KUBERNETES = "csi.storage.k8s.io/"
"""The prefix of parameters and attributes that Kubernetes and its sidecars add."""
PVC_NAME, PVC_NAMESPACE = f"{KUBERNETES}pvc/name", f"{KUBERNETES}pvc/namespace"
POD_NAMES = {name: f"{KUBERNETES}pod.{name}" for name in ("namespace", "name", "uid")}
"""Which pod a volume is published for (CSIDriver.spec.podInfoOnMount)."""
EPHEMERAL = f"{KUBERNETES}ephemeral"

PARAMETERS = ("dataset", "bucket", "warm", "pin", "subpath")
"""Parameters of a volume that a user sets; annotations are these with `datacache.io/` before them."""
CAPACITY = "capacity"
"""Parameters that only a StorageClass has, for all its bucket volumes together."""
_NOTED = ("asked", "namespace", "quota", "credentials")
"""Attributes that the controller adds to a PV."""
_FIELDS = ("asked", "namespace", "credentials")
_IGNORED = ("storage.kubernetes.io/csiProvisionerIdentity",)

_MAX_ID_BYTES = 128
"""Of the CSI specification, for a string that it does not say otherwise of."""
_PLAIN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True, kw_only=True)
class VolumeSpec:
    """One volume. Exactly one of `dataset` and `bucket` is set."""

    dataset: str = ""
    """`NAME@REF`; `NAME@ID` with the whole id once it was resolved."""
    bucket: str = ""
    """URL of the prefix, ending in a slash."""
    warm: str = "false"
    """`true`, `false` or `wait`."""
    pin: bool = False
    subpath: str = ""
    """A folder of it, without slashes at the ends; '' for all of it."""
    asked: str = ""
    """The reference as the user wrote it, once `dataset` is resolved."""
    namespace: str = ""
    """Of the PVC it was provisioned for, which was allowed to have it; '' for a static or an inline volume."""
    quota_bytes: int = 0
    """How much a bucket volume may hold, when it was provisioned (an expansion is in its record); 0: no limit."""
    credentials: str = ""
    """`secret`: it may only be mounted with store credentials from a secret, as the PVC named a bucket that is
    not open to everybody who can use the driver's."""

    @property
    def read_only(self) -> bool:
        """Tell whether nobody can write to it."""
        return bool(self.dataset)

    @property
    def takes_secret(self) -> bool:
        """Tell whether it is a bucket of a store that takes credentials."""
        return bool(self.bucket) and takes_credentials(split_url(self.bucket)[0])

    @property
    def ref(self) -> Ref:
        """Return the parsed `dataset`."""
        return parse_ref(self.dataset)

    def resolved(self, dataset: str, *, namespace: str = "") -> VolumeSpec:
        """Return the same volume, of exactly this snapshot (`NAME@ID`)."""
        return replace(self, dataset=dataset, asked=self.asked or self.dataset, namespace=namespace or self.namespace)

    def context(self) -> dict[str, str]:
        """Return the attributes of the volume's PV, which `parse_context` reads."""
        texts = {name: getattr(self, name) for name in ("dataset", "bucket", "warm", "subpath", *_FIELDS)}
        texts |= {"pin": "true" if self.pin else "", "quota": str(self.quota_bytes) if self.quota_bytes else ""}
        return {name: text for name, text in texts.items() if text and (name, text) != ("warm", "false")}


def parse_parameters(parameters: Mapping[str, str]) -> VolumeSpec:
    """Return the volume that a StorageClass's parameters, with the annotations over them, ask for."""
    return _parse(parameters, PARAMETERS, "parameter")


def parse_context(attributes: Mapping[str, str]) -> VolumeSpec:
    """Return the volume that a PV's attributes describe: those of `context`, or written by hand."""
    return _parse(attributes, (*PARAMETERS, *_NOTED), "volume attribute")


def id_of(request: Any) -> str:
    """Return the id of the volume that a request is about; INVALID_ARGUMENT without one."""
    if not request.volume_id:
        raise invalid("volume_id is missing")
    return str(request.volume_id)


def volume_id(name: str) -> str:
    """Return the id of the volume to make under this name: always the same for one name."""
    if len(name) <= _MAX_ID_BYTES and _PLAIN_ID.fullmatch(name):
        return name
    return f"volume-{hashlib.blake2b(name.encode(), digest_size=16).hexdigest()}"


def of_volume(parameters: Mapping[str, str]) -> dict[str, str]:
    """Return those of a StorageClass's parameters that say what a volume of it is."""
    return {name: text for name, text in _given(parameters).items() if name != CAPACITY}


def _given(values: Mapping[str, str]) -> dict[str, str]:
    return {
        name: text.strip()
        for name, text in values.items()
        if not name.startswith(KUBERNETES) and name not in _IGNORED and text.strip()
    }


def _parse(values: Mapping[str, str], known: tuple[str, ...], what: str) -> VolumeSpec:
    given = _given(values)
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise invalid(f"there is no {what} {unknown[0]!r}; there are {', '.join(PARAMETERS)}")
    dataset, bucket = given.get("dataset", ""), given.get("bucket", "")
    if bool(dataset) == bool(bucket):
        both = "both are given" if dataset else "neither is given"
        raise invalid(
            f"a volume needs a data set or a bucket, and {both}: annotate the PVC with datacache.io/dataset: NAME@REF "
            "(read-only) or datacache.io/bucket: s3://BUCKET/PREFIX (read-write)"
        )
    if bucket and (given.get("warm", "false") != "false" or given.get("pin", "false") != "false"):
        raise invalid("warm and pin are for data sets: a bucket's content changes")
    dataset = _dataset(dataset)
    try:
        quota_bytes = parse_bytes(given.get("quota", "0"))
    except ValueError as exc:
        raise invalid(f"quota {given['quota']!r}: {exc}") from exc
    asked = given.get("asked", "")
    if asked and (not dataset or parse_ref(_dataset(asked)).dataset != parse_ref(dataset).dataset):
        raise invalid(f"asked {asked!r}: it is no reference to the volume's data set")
    return VolumeSpec(
        dataset=dataset,
        bucket=_bucket(bucket),
        warm=_one_of("warm", given.get("warm", "false"), ("true", "false", "wait")),
        pin=_one_of("pin", given.get("pin", "false"), ("true", "false")) == "true",
        subpath=_subpath(given.get("subpath", "")),
        asked=asked,
        namespace=given.get("namespace", ""),
        quota_bytes=quota_bytes,
        credentials=_one_of("credentials", given.get("credentials", ""), ("", "secret")),
    )


def _dataset(text: str) -> str:
    if text:
        try:
            return str(parse_ref(text))
        except DatacacheError as exc:
            raise _named("dataset", text, exc) from exc
    return ""


def _bucket(text: str) -> str:
    if not text:
        return ""
    if "://" not in text:  # a path would be one on whichever machine reads it
        raise invalid(f"bucket {text!r}: it is a URL, such as s3://BUCKET/PREFIX")
    try:
        store, prefix = split_url(text)
    except DatacacheError as exc:
        raise _named("bucket", text, exc) from exc
    if {".", ".."} & set(prefix.split("/")):  # a key for us, and a way out of an open prefix for a server or a proxy
        raise invalid(f"bucket {text!r}: its prefix cannot have '.' or '..' in it")
    return join_url(store, prefix)


def _named(name: str, text: str, error: DatacacheError) -> RequestError:
    text = re.sub(r"(//)[^/]*@", r"\1…@", text)  # credentials, in a place where all can read them
    return invalid(f"{name} {text!r}: {error.message}. {error.hint}".removesuffix(". "))


def _one_of(name: str, text: str, values: tuple[str, ...]) -> str:
    if text.lower() not in values:
        raise invalid(f"{name} {text!r}: it is one of {', '.join(values)}")
    return text.lower()


def _subpath(text: str) -> str:
    parts = text.split("/")
    if text.startswith("/") or ".." in parts or "\0" in text:
        raise invalid(f"subpath {text!r}: it is a path inside the volume, without '..' and without a slash before it")
    return "/".join(part for part in parts if part not in ("", "."))


PREFIX = f"{DRIVER_NAME}/"
"""Of our annotations."""
_ANNOTATIONS = tuple(PREFIX + name for name in PARAMETERS)
PLACE = re.compile(r"\$\{([^}]*)\}")
"""A placeholder in a bucket's URL for a field of the PVC."""


class Asked(NamedTuple):
    """The request of a PVC."""

    spec: VolumeSpec
    own_bucket: bool
    """True if the PVC itself names the bucket: then its right to do so is checked."""
    own_pin: bool = False
    """True if the PVC itself asks to pin, and its class does not: likewise."""


def read_request(
    parameters: Mapping[str, str], annotations: Mapping[str, str], *, namespace: str = "", name: str = ""
) -> Asked:
    """Return the volume that a StorageClass's parameters and a PVC's annotations ask for.

    Annotations go before parameters of the same name. One that names a data set or a bucket takes the place of
    whichever of the two the class names, and of what the class says about that (subpath; before a bucket also warm and
    pin). Where the class's stays, the PVC's subpath is *inside* the class's: nobody gets out of what an administrator
    has opened by it. In a class's `bucket`, `${pvc.namespace}` and `${pvc.name}` stand for the PVC's.
    """
    of_class = of_volume(parameters)
    of_claim = _ours(annotations)
    if "bucket" in of_class:
        of_class["bucket"] = _filled_in(of_class["bucket"], {"pvc.namespace": namespace, "pvc.name": name})
    what = {"dataset", "bucket"} & set(of_claim)
    if what:
        dropped = {"dataset", "bucket", "subpath"} | ({"warm", "pin"} if "bucket" in what else set())
        of_class = {key: text for key, text in of_class.items() if key not in dropped}
    elif "subpath" in of_class and "subpath" in of_claim:
        of_claim["subpath"] = f"{of_class['subpath'].rstrip('/')}/{_subpath(of_claim['subpath'])}"
    spec = parse_parameters(of_class | of_claim)
    return Asked(spec, "bucket" in what, spec.pin and of_class.get("pin", "").lower() != "true")


def _ours(annotations: Mapping[str, str]) -> dict[str, str]:
    """Return our annotations without their prefix. Empty ones count as absent."""
    ours = {key: text for key, text in annotations.items() if key.startswith(PREFIX)}
    for key in sorted(set(ours) - set(_ANNOTATIONS)):
        near = difflib.get_close_matches(key.removeprefix(PREFIX).lower(), PARAMETERS, n=1)
        meant = f"did you mean {PREFIX}{near[0]}? There are" if near else "there are"
        raise invalid(f"there is no annotation {key}; {meant} {', '.join(_ANNOTATIONS)}")
    return {key.removeprefix(PREFIX): text.strip() for key, text in ours.items() if text.strip()}


def _filled_in(bucket: str, values: Mapping[str, str]) -> str:
    def value(match: re.Match[str]) -> str:
        name = match[1]
        if name not in values:
            known = ", ".join(f"${{{known}}}" for known in values)
            raise invalid(f"the StorageClass's bucket {bucket!r}: there is no {match[0]}; there are {known}")
        if not values[name]:
            raise invalid(
                f"the StorageClass's bucket {bucket!r} needs {match[0]}, and the provisioner does not tell it: run "
                "csi-provisioner with --extra-create-metadata"
            )
        return values[name]

    return PLACE.sub(value, bucket)


Mode = csi_pb2.VolumeCapability.AccessMode
READER_MODES = (Mode.SINGLE_NODE_READER_ONLY, Mode.MULTI_NODE_READER_ONLY)
_GROUP_UMASK = 0o002
_FLAGS = ("ro", "rw", "noexec", "exec", "nosuid", "nodev")


@dataclass(frozen=True, kw_only=True)
class MountOptions:
    """The options of a mount on a node. The fields up to `staging` concern bucket mounts only."""

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
        """Return the arguments of a bucket's mount. Volumes that agree in them can share one."""
        return {field: getattr(self, field) for field, _, _ in _OPTIONS.values()}


def mount_options(capability: csi_pb2.VolumeCapability, spec: VolumeSpec) -> MountOptions:
    """Return how to mount the volume. Raise unless it can be used like this: a data set in any access mode, as many
    tools know ReadWriteOnce only; it is read-only in all."""
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
        values = {"gid": _option("volume_mount_group", group, _id, "an id"), "umask": _GROUP_UMASK} | values
    read_only = bool(values.get("read_only")) or spec.read_only or mode in READER_MODES
    return MountOptions(**values | {"read_only": read_only})


def is_single_writer(capability: csi_pb2.VolumeCapability) -> bool:
    """Tell whether only one place of one node may use the volume at a time."""
    return bool(capability.access_mode.mode == Mode.SINGLE_NODE_SINGLE_WRITER)


def _parse_flags(flags: Iterable[str], *, of_dataset: bool) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for flag in (part.strip() for text in flags for part in text.split(",")):
        name, equals, text = flag.partition("=")
        if not flag or (not equals and name in _FLAGS):
            values |= {"read_only": True} if name == "ro" else {"noexec": True} if name == "noexec" else {}
        elif equals and name in _OPTIONS and not of_dataset:
            field, parse, kind = _OPTIONS[name]
            values[field] = _option(name, text, parse, kind)
        elif equals and name in _OPTIONS:
            raise invalid(f"mount option {flag!r}: it is for buckets; a data set can be read by everybody as it is")
        else:
            raise invalid(f"there is no mount option {flag!r}; there are {', '.join((*_FLAGS, *_OPTIONS))}")
    return values


def _option(name: str, text: str, parse: Callable[[str], Any], kind: str) -> Any:
    try:
        return parse(text)
    except ValueError:
        raise invalid(f"mount option {name}={text!r}: it is {kind}") from None


def _number(text: str, *, pattern: str, base: int, limit: int) -> int:
    if not re.fullmatch(pattern, text) or int(text, base) > limit:
        raise ValueError(text)
    return int(text, base)


def _seconds(text: str) -> float:
    seconds = float(text.removesuffix("s"))
    if not 0 <= seconds < math.inf:
        raise ValueError(text)
    return seconds


def _folder(text: str) -> str:
    if not text.startswith("/") or ".." in text.split("/"):
        raise ValueError(text)
    return text


_id = partial(_number, pattern="[0-9]{1,10}", base=10, limit=2**32 - 2)
_OPTIONS: dict[str, tuple[str, Callable[[str], Any], str]] = {
    "uid": ("uid", _id, "an id"),
    "gid": ("gid", _id, "an id"),
    "umask": ("umask", partial(_number, pattern="[0-7]{1,4}", base=8, limit=0o777), "an octal number, such as 002"),
    "ack": ("ack", lambda text: ACKS[ACKS.index(text)], f"one of {', '.join(ACKS)}"),
    "ttl": ("ttl_s", _seconds, "a number of seconds"),
    "upload_every": ("upload_every_s", _seconds, "a number of seconds"),
    "staging": ("staging", _folder, "an absolute path on the node"),
}
"""Mount options of buckets: the field of `MountOptions`, how it is read, and what it is, for errors."""
