"""What all pages share: the catalog, open snapshots, small pictures, jobs; who may see which data set; routes.

A page is a function of the `Site` and a request, and runs in a thread of its own. Pages that decode pictures share a
few threads, so that a grid of large images takes no more memory than some of them. When the server ends, it waits some
seconds for them, and for none that a store holds up.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Final

from anyio import CapacityLimiter, to_thread
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from datacache import api
from datacache.core.cores import cores
from datacache.core.errors import PathNotFoundError, SnapshotNotFoundError
from datacache.settings import Settings
from datacache.web.access import OneTimeLinks
from datacache.web.addresses import asked_of
from datacache.web.images import Thumbnails
from datacache.web.jobs import Jobs
from datacache.web.opened import OpenSnapshots, Shown

_MOST_COUNTS: Final = 10_000
_QUEUES_KEPT: Final = 16
_MOST_FORM_FIELDS: Final = 20_000


class Site:
    """What the pages of one server share. Close it."""

    def __init__(
        self,
        settings: Settings,
        links: OneTimeLinks,
        cookie: str,
        *,
        mounts: Callable[[], list[list[str]]] = list,
        read_only: bool = False,
    ) -> None:
        """`cookie` is the name of the one that visitors have who came with a link. `mounts` returns the lines that tell
        of each mount of this home. The guard refuses what writes where that is `read_only`, and pages do not offer it.
        """
        self.settings, self.mounts = settings, mounts
        self.links, self.cookie, self.read_only = links, cookie, read_only
        self.catalog = api.open_catalog(settings)
        self.opened = OpenSnapshots(settings)
        self.thumbnails = Thumbnails()
        self.jobs = Jobs()
        self.marking_queue = lru_cache(_QUEUES_KEPT)(partial(api.open_queue, settings=settings))
        self._few = CapacityLimiter(max(2, min(4, cores())))
        self._counts: dict[str, api.VersionCounts] = {}

    def close(self) -> None:
        """Close what was opened."""
        self.jobs.close()
        self.opened.close()
        self.catalog.close()

    # --- routes -----------------------------------------------------------------------------------------------------

    def get(self, path: str, page: Callable[[Site, Request], Response], *, decodes: bool = False) -> Route:
        """Return the route of a page that reads; `decodes` pictures."""

        async def answer(request: Request) -> Response:
            limiter = self._few if decodes else None
            return await to_thread.run_sync(page, self, request, limiter=limiter, abandon_on_cancel=True)

        return Route(path, answer)

    def post(self, path: str, page: Callable[[Site, Request, bytes], Response]) -> Route:
        """Return the route of a page that writes; it is given what was sent. The guard has checked who sends it."""

        async def answer(request: Request) -> Response:
            body = await request.body()
            return await to_thread.run_sync(page, self, request, body, abandon_on_cancel=True)

        return Route(path, answer, methods=["POST"])

    # --- what is asked for ------------------------------------------------------------------------------------------

    def row(self, request: Request) -> tuple[Shown, api.Row]:
        """Return the version and the image that a request names."""
        shown = self.opened.get(self.record(request.path_params["ref"]))
        path = dict(asked_of(request.scope["query_string"])).get("path", "")
        row = shown.browser.table.row(path)
        if row is None:
            raise PathNotFoundError(f"{shown.ref} has no image {path!r}", path=path)
        return shown, row

    def record(self, ref: str) -> api.SnapshotRecord:
        """Return the version that a reference names, if it may be seen."""
        self.dataset(api.parse_ref(ref).dataset)
        return api.resolve(self.catalog, ref)

    def dataset(self, name: str) -> api.DatasetRecord:
        """Return a data set. The error tells no others, which may not be seen."""
        dataset = self.catalog.dataset(name) if self.may_see(name) else None
        if dataset is None:
            raise SnapshotNotFoundError(f"there is no data set {name}", ref=name)
        return dataset

    def counts(self, record: api.SnapshotRecord) -> api.VersionCounts | None:
        """Return the numbers of a version's annotations where they were read before. Once known they stay."""
        found = self._counts.get(record.id) or api.version_counts(self.catalog, record)
        if found is not None:
            if len(self._counts) >= _MOST_COUNTS:
                self._counts.clear()
            self._counts[record.id] = found
        return found

    def access(self, dataset: str) -> str:
        """Return to whom a data set is open, if it has a list; '' where the page is for one namespace, as the list
        names others."""
        access = api.access_of(self.catalog, dataset, default=self.settings.access)
        return str(access) if access.listed and not self.settings.ui_namespace else ""

    def may_see(self, dataset: str) -> bool:
        """Tell whether the namespace that this page is for may see a data set."""
        namespace, default = self.settings.ui_namespace, self.settings.access
        api.check_name(dataset)
        return not namespace or api.access_of(self.catalog, dataset, default=default).allows(namespace)


def tags_of(dataset: api.DatasetRecord) -> dict[str, list[str]]:
    """Return the tags of each version, by its id."""
    tags: dict[str, list[str]] = {}
    for tag, id in sorted(dataset.tags.items()):
        tags.setdefault(id, []).append(tag)
    return tags


def form_of(body: bytes) -> list[tuple[str, str]]:
    """Return the names and values of a form. `UsageError` for too many."""
    return asked_of(body, _MOST_FORM_FIELDS)
