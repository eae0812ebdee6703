"""Which environment variables are likely meant to be settings of ours, and are none; and which settings of this shell
are not those of the daemon that runs. Used by `main`, `doctor`, `status` and `daemon`."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from datacache.settings import variable_names

if TYPE_CHECKING:
    from datacache.settings import Settings

_PREFIX = "DATACACHE"
_OTHERS = ("DATACACHE_DEBUG",)
_TESTS = "DATACACHE_TEST_"
# https://kubernetes.io/docs/concepts/services-networking/service/#environment-variables, for services named datacache
# or datacache-…
_SERVICE = re.compile(
    rf"{_PREFIX}_([A-Z0-9_]+_)?(SERVICE_HOST|SERVICE_PORT(_[A-Z0-9_]+)?|PORT(_[0-9]+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)"
)
_CLOSE = 0.8


class Difference(NamedTuple):
    """A setting of this shell that is another one in the daemon. Values are as in the environment; '' is not set."""

    name: str
    daemon: str
    shell: str

    @property
    def message(self) -> str:
        """A sentence about it."""
        return f"{self.name} is {self.shell or 'not set'} here, and the daemon runs with {self.daemon or 'the default'}"

    @property
    def hint(self) -> str:
        """Return what to do about it."""
        return f"dsctl daemon stop, then start it here; or set {self.name} as the daemon has it."


def differences(settings: Settings, health: Mapping[str, Any]) -> list[Difference]:
    """The settings that the daemon of this home goes by, and that are other ones in this shell."""
    own, its = settings.of_the_daemon(), health.get("settings", {})
    return [Difference(name, its[name], own[name]) for name in own if name in its and its[name] != own[name]]


def misspelt(names: Iterable[str]) -> dict[str, str]:
    """Variables that are no setting but close to one: that one."""
    known = {*variable_names(), *_OTHERS}
    return {
        name: meant
        for name in sorted(names)
        if name not in known and not name.startswith(_TESTS) and not _SERVICE.fullmatch(name)
        if (meant := _meant(name, known))
    }


def _meant(name: str, known: set[str]) -> str:
    upper = name.upper().replace("-", "_")
    prefix, _, rest = upper.partition("_")
    if difflib.SequenceMatcher(None, prefix, _PREFIX).ratio() < _CLOSE:
        return ""
    upper = f"{_PREFIX}_{rest}"
    if upper in known:
        return upper
    if prefix != _PREFIX:
        return ""
    rests = {each.removeprefix(f"{_PREFIX}_"): each for each in sorted(known)}
    unit_missing = [each for each in rests if each in (f"{rest}_BYTES", f"{rest}_S")]
    close = unit_missing or difflib.get_close_matches(rest, rests, n=1, cutoff=_CLOSE)
    return rests[close[0]] if close else ""
