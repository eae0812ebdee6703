"""What a PVC asks for: its annotations over the parameters of its StorageClass.

`datacache.io/dataset`, `bucket`, `warm`, `pin` and `subpath` on the PVC go before parameters of the same name. An
annotation that names a data set or a bucket takes the place of whichever of the two the class names, and of what the
class says about that (subpath; before a bucket also warm and pin). Where the class's stays, the PVC's subpath is
*inside* the class's: nobody gets out of what an administrator has opened by it.

In a class's `bucket`, `${pvc.namespace}` and `${pvc.name}` stand for the PVC's. Which bucket an annotation may name is
said by `BucketRules`: with the driver's own credentials, only those that are open. A class's `capacity` is of the class
and not of a volume (`capacity`). Pure values; any thread may call.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from csi_driver import DRIVER_NAME
from csi_driver.status import denied, invalid
from csi_driver.volumes import CAPACITY, KUBERNETES, PARAMETERS, VolumeSpec, parse_parameters
from datacache.core.errors import DatacacheError, SettingsError
from datacache.settings import Settings
from datacache.store.urls import split_url

PREFIX = f"{DRIVER_NAME}/"
"""Of our annotations."""
_ANNOTATIONS = tuple(PREFIX + name for name in PARAMETERS)
_REMOTE = ("s3", "gs", "az", "abfs", "abfss")
_PLACE = re.compile(r"\$\{([^}]*)\}")


class Asked(NamedTuple):
    """The request of a PVC."""

    spec: VolumeSpec
    own_bucket: bool
    """Whether the PVC itself names the bucket: then it is to be found out whether it may."""
    own_pin: bool = False
    """True if the PVC itself asks to pin, and its class does not: likewise."""


def read_request(
    parameters: Mapping[str, str], annotations: Mapping[str, str], *, namespace: str = "", name: str = ""
) -> Asked:
    """Return the volume that a StorageClass's parameters and a PVC's annotations ask for. `RequestError` names what is
    wrong."""
    of_class = {
        key: text
        for key, text in parameters.items()
        if key != CAPACITY and not key.startswith(KUBERNETES) and text.strip()
    }
    of_claim = _ours(annotations)
    if "bucket" in of_class:
        of_class["bucket"] = _filled_in(of_class["bucket"], {"pvc.namespace": namespace, "pvc.name": name})
    what = {"dataset", "bucket"} & set(of_claim)
    if what:
        dropped = {"dataset", "bucket", "subpath"} | ({"warm", "pin"} if "bucket" in what else set())
        of_class = {key: text for key, text in of_class.items() if key not in dropped}
    elif "subpath" in of_class and "subpath" in of_claim:
        inner = parse_parameters({"bucket": "s3://any", "subpath": of_claim["subpath"]}).subpath
        of_claim["subpath"] = f"{of_class['subpath'].rstrip('/')}/{inner}"
    spec = parse_parameters(of_class | of_claim)
    return Asked(spec, "bucket" in what, spec.pin and of_class.get("pin", "").lower() != "true")


def check_pin(settings: Settings, namespace: str) -> None:
    """Raise PERMISSION_DENIED unless claims and pods of a namespace ('': not known) may pin. A pinned volume takes its
    room from the cache of all others on the node, for as long as a pod has it."""
    if "*" not in settings.pins and namespace not in settings.pins:
        raise denied(
            f"pin: {f'namespace {namespace}' if namespace else 'who is not known'} may not pin data on nodes. Leave it "
            "out, use a StorageClass with pin: true, or have it allowed (DATACACHE_PINS)"
        )


class BucketRules:
    """The buckets that anybody who makes a PVC or a pod may have with the driver's own credentials."""

    def __init__(self, prefixes: Iterable[str] = ()) -> None:
        """Take URL prefixes, in which `${pvc.namespace}` stands for the namespace. `*` is every bucket of an object
        store; a node's folder (`file://`), or anything else a URL can lead to, must be named. `SettingsError`."""
        self._prefixes = tuple(prefixes)
        for prefix in self._prefixes:
            self._place(prefix, "any")

    def allow(self, url: str, namespace: str) -> bool:
        """Tell whether this namespace may have this bucket: a prefix names it, or a place above it."""
        store, prefix = split_url(url)
        places = [self._place(text, namespace) for text in self._prefixes if namespace or "${" not in text]
        anywhere = "*" in places and store.partition("://")[0] in _REMOTE
        return anywhere or any(f"{store}/{prefix}".startswith(place) for place in places)

    def describe(self, namespace: str) -> str:
        """Return the open buckets, for an error's text."""
        places = [self._place(text, namespace or "NAMESPACE") for text in self._prefixes]
        return f"open to this namespace: {', '.join(places)}" if places else "none is open"

    @staticmethod
    def _place(prefix: str, namespace: str) -> str:
        if prefix == "*":
            return prefix
        unknown = set(_PLACE.findall(prefix)) - {"pvc.namespace"}
        if unknown:
            raise SettingsError(
                f"allowed bucket {prefix!r}: there is no ${{{sorted(unknown)[0]}}}", hint="There is ${pvc.namespace}."
            )
        try:
            store, rest = split_url(prefix.replace("${pvc.namespace}", namespace))
        except DatacacheError as exc:
            raise SettingsError(f"allowed bucket {prefix!r}: {exc.message}", hint=exc.hint) from exc
        return f"{store}/{rest}"


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

    return _PLACE.sub(value, bucket)
