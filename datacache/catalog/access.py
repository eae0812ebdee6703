"""The namespaces of Kubernetes that a data set is open to: documents of kind `access` in the catalog.

Used by the CSI driver, which asks before it says anything else about a data set, and by `dsctl dataset access`. A data
set follows its own list, or without one the setting `access`. A list belongs to a name: it stays when all snapshots are
removed and made anew. Any thread and process may call; two that change a list at once lose neither change.

A data set that is made of others inherits their lists at the commit (`inherit_access`): the intersection of them, and
of its own list. A list that somebody sets afterwards stands until another input with a list comes in.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from datacache.catalog.base import Catalog
from datacache.catalog.leases import all_documents
from datacache.catalog.refs import check_name, resolve
from datacache.core.errors import AccessDeniedError, CatalogError, UsageError
from datacache.core.ipc import parse_object

KIND = "access"
_VERSION = 1
_log = logging.getLogger(__name__)
_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")


@dataclass(frozen=True, kw_only=True)
class Access:
    """The namespaces that may have a data set: `allowed`, or with `everybody` all but `denied`."""

    everybody: bool
    allowed: tuple[str, ...] = ()
    """Sorted; empty with `everybody`."""
    denied: tuple[str, ...] = ()
    """Sorted; empty without `everybody`."""
    listed: bool = True
    """False for a data set without a list of its own, which follows the setting `access`."""
    within_default: bool = False
    """True if one of its inputs has no list, so that the setting `access` limits this one, too."""
    made_of: tuple[str, ...] = ()
    """The data sets whose lists it has inherited, sorted."""
    chosen: bool = True
    """True if somebody has set this list; false if it was only inherited."""

    @property
    def without_exception(self) -> bool:
        """Tell whether every namespace may have it, also one that nobody has heard of."""
        return self.everybody and not self.denied

    def allows(self, namespace: str) -> bool:
        """Tell whether pods of this namespace may have it."""
        return namespace not in self.denied if self.everybody else namespace in self.allowed

    def allow(self, namespaces: Iterable[str]) -> Access:
        """Open it to these, too. If it was open to all without exception, open it to these only; if it was open to all
        but some, no longer deny these."""
        names = set(namespaces)
        if self.everybody and self.denied:
            return Access(everybody=True, denied=_sorted(set(self.denied) - names))
        return Access(everybody=False, allowed=_sorted(set(self.allowed) | names))

    def deny(self, namespaces: Iterable[str]) -> Access:
        names = set(namespaces)
        if self.everybody:
            return Access(everybody=True, denied=_sorted(set(self.denied) | names))
        return Access(everybody=False, allowed=_sorted(set(self.allowed) - names))

    def __str__(self) -> str:
        if self.everybody:
            return f"all namespaces but {', '.join(self.denied)}" if self.denied else "all namespaces"
        return ", ".join(self.allowed) or "no namespace"


def access_of(catalog: Catalog, dataset: str, *, default: str) -> Access:
    """Return who may have a data set, which need not exist; without a list that is `default` (`all` or `none`,
    `Settings.access`). Raise `CatalogError` for a list that cannot be understood."""
    return _parse(catalog.document(KIND, check_name(dataset)), dataset, default)


def check_access(catalog: Catalog, dataset: str, namespace: str, *, default: str) -> None:
    """Raise `AccessDeniedError` unless the data set is open to the namespace. The message does not tell whether the
    data set exists, so call this before anything that does, such as `refs.resolve`."""
    check_namespace(namespace)
    if not access_of(catalog, dataset, default=default).allows(namespace):
        raise AccessDeniedError(
            f"data set {dataset} is not open to namespace {namespace}",
            hint=f"Who keeps the data sets can open it: dsctl dataset access {dataset} --allow {namespace}",
        )


def open_to(catalog: Catalog, namespace: str, *, default: str) -> list[str]:
    """Return the names of the data sets that are open to a namespace: a message to it may name them."""
    check_namespace(namespace)
    lists = dict(all_documents(catalog.documents, KIND))
    names = [dataset.name for dataset in catalog.datasets()]
    return [name for name in names if _parse(lists.get(name), name, default).allows(namespace)]


def set_access(
    catalog: Catalog,
    dataset: str,
    *,
    everybody: bool | None = None,
    allow: Iterable[str] = (),
    deny: Iterable[str] = (),
    default: str = "all",
) -> Access:
    """Change a list and return the new one. Begin with the present one, or with `everybody` (True: open to all, False:
    to nobody); then apply `allow` and `deny`, see `Access`.

    Raise `UsageError` for what is no namespace, `SnapshotNotFoundError` if there is neither a list nor a data set.
    """
    allowed, denied = list(allow), list(deny)
    for namespace in (*allowed, *denied):
        check_namespace(namespace)
    if catalog.document(KIND, check_name(dataset)) is None and catalog.dataset(dataset) is None:
        resolve(catalog, dataset)  # raises, and names the data sets that exist
    while True:
        old = catalog.document(KIND, dataset)
        access = before = _parse(old, dataset, default)
        if everybody is not None:
            access = Access(everybody=everybody)
        if allowed:
            access = access.allow(allowed)
        if denied:
            access = access.deny(denied)
        access = replace(access, listed=True, made_of=before.made_of)
        if catalog.set_document(KIND, dataset, _text(access), old=old):
            return access


def declare_access(catalog: Catalog, dataset: str, access: Access) -> None:
    """Make `access` the list of a data set, which need not exist yet: so it is closed before it can be seen."""
    for namespace in (*access.allowed, *access.denied):
        check_namespace(namespace)
    while True:
        old = catalog.document(KIND, check_name(dataset))
        made_of = _parse(old, dataset, "all").made_of
        text = _text(replace(access, listed=True, made_of=made_of))
        if text == old or catalog.set_document(KIND, dataset, text, old=old):
            return


def inherit_access(catalog: Catalog, dataset: str, inputs: Iterable[str]) -> None:
    """Open a data set only to those who may have all of `inputs` (names), and log a change. Call it before the commit
    of a snapshot that is made of them."""
    names = _sorted(set(inputs) - {dataset})
    texts = {name: catalog.document(KIND, name) for name in names}
    lists = {name: _parse(text, name, "all") for name, text in texts.items() if text is not None}
    if not lists:
        return
    unlisted = len(lists) < len(names)
    while True:
        old = catalog.document(KIND, dataset)
        before = _parse(old, dataset, "all")
        if before.listed and before.chosen and set(lists) <= set(before.made_of):
            return
        access = Access(everybody=True)
        for each in (before, *lists.values()):
            access = _intersection(access, each)
        went_by_default = not before.listed and catalog.dataset(dataset) is not None
        access = replace(
            access,
            within_default=unlisted or went_by_default or any(each.within_default for each in lists.values()),
            made_of=_sorted({*before.made_of, *lists}),
            chosen=False,
        )
        if before.listed:
            access = replace(access, within_default=access.within_default or before.within_default)
        text = _text(access)
        if text == old:
            return
        if catalog.set_document(KIND, dataset, text, old=old):
            break
    if str(access) != str(before):
        _log.warning(
            "%s is made of %s, so it is open to %s, as that is; see: dsctl dataset access %s",
            dataset, ", ".join(lists), access, dataset,
        )  # fmt: skip


def check_namespace(namespace: str) -> None:
    """Raise `UsageError` unless this can name a namespace (a label of RFC 1123)."""
    if not _LABEL.fullmatch(namespace):
        raise UsageError(
            f"{namespace!r} cannot name a namespace",
            hint="Use up to 63 lower-case letters, digits and '-', with a letter or digit at both ends.",
        )


def _parse(text: str | None, dataset: str, default: str) -> Access:
    if text is None:
        return Access(everybody=default == "all", listed=False)
    try:
        found = parse_object(text)
        if found["version"] == _VERSION:
            access = Access(
                everybody=_flag(found["everybody"]),
                allowed=_namespaces(found["allowed"]),
                denied=_namespaces(found["denied"]),
                within_default=_flag(found.get("within_default", False)),
                made_of=_words(found.get("made_of", [])),
                chosen=_flag(found.get("chosen", True)),
            )
            closed = access.within_default and default == "none"
            return replace(access, everybody=False, allowed=(), denied=()) if closed else access
        cause: Exception | None = None
    except (ValueError, KeyError, UsageError) as exc:
        cause = exc
    raise CatalogError(
        f"the list of who may have data set {dataset} cannot be understood, so nobody may",
        hint="A newer datacache has written it: use that version.",
    ) from cause


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError("neither true nor false")
    return value


def _words(value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
        raise ValueError("no list of words")
    return tuple(value)


def _namespaces(value: object) -> tuple[str, ...]:
    """Return the names after checking each: an impossible one would deny nobody."""
    names = _words(value)
    for name in names:
        check_namespace(name)
    return names


def _text(access: Access) -> str:
    text = {"version": _VERSION, "everybody": access.everybody, "allowed": access.allowed, "denied": access.denied}
    if access.made_of:
        text |= {"within_default": access.within_default, "made_of": access.made_of, "chosen": access.chosen}
    return json.dumps(text)


def _intersection(one: Access, other: Access) -> Access:
    if one.everybody and other.everybody:
        return Access(everybody=True, denied=_sorted({*one.denied, *other.denied}))
    if one.everybody or other.everybody:
        few, many = (other, one) if one.everybody else (one, other)
        return Access(everybody=False, allowed=_sorted(set(few.allowed) - set(many.denied)))
    return Access(everybody=False, allowed=_sorted(set(one.allowed) & set(other.allowed)))


def _sorted(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(names))
