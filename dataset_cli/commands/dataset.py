"""`dsctl dataset`: the data sets there are, and who may have them.

With `--json`, `list` prints an array of `{"name", "snapshots", "latest", "latest_created_at", "tags", "access"}` and
`access` prints `{"name", "access"}`; an access is `{"everybody", "allowed", "denied", "listed", "inherited_from"}`: who
of Kubernetes' namespaces may have the data set (with `everybody` all but `denied`), whether it has a list of its own,
and the data sets that it has that from.
"""

from __future__ import annotations

from typing import Any

import click

from datacache import api
from datacache.core.errors import UsageError
from dataset_cli.app import App, DatasetName, command
from dataset_cli.output import format_time


class _Group(click.Group):
    """A group that knows what people look for in it."""

    def resolve_command(
        self, context: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command; a `click.UsageError` for a removal says how a data set is removed."""
        if args[0] in ("rm", "remove", "delete"):
            name = next((word for word in args[1:] if not word.startswith("-")), "NAME")
            context.fail(
                "there is no command for that: a data set goes with its last snapshot. See them: "
                f"dsctl snapshot list {name}. Remove each: dsctl snapshot rm {name}@ID --all-tags"
            )
        return super().resolve_command(context, args)


@click.group(cls=_Group)
def dataset() -> None:
    """See the data sets there are, and say who may have them."""


@command(dataset, "list")
def list_(app: App) -> None:
    """List the data sets."""
    values, rows = [], []
    with app.catalog() as catalog:
        for record in catalog.datasets():
            times = {each.id: each.created_at for each in catalog.snapshots(record.name)}
            access = api.access_of(catalog, record.name, default=app.settings.access)
            created_at = times.get(record.latest, "")
            values.append(
                {
                    "name": record.name,
                    "snapshots": len(times),
                    "latest": record.latest,
                    "latest_created_at": created_at,
                    "tags": record.tags,
                    "access": _as_json(access),
                }
            )
            tags = ", ".join(record.tags)
            rows.append(
                [record.name, f"{len(times):,}", record.latest[:12], format_time(created_at), tags, str(access)]
            )
    app.out.listing(
        values,
        ["NAME", "SNAPSHOTS", "LATEST", "CREATED (UTC)", "TAGS", "OPEN TO"],
        rows,
        right=(1,),
        empty="There are no data sets yet. Make one: dsctl snapshot create NAME --from URL",
    )


@command(dataset)
@click.argument("name", type=DatasetName())
@click.option("--allow", multiple=True, metavar="NAMESPACE", help="Open it to this namespace; may be repeated.")
@click.option("--deny", multiple=True, metavar="NAMESPACE", help="Not to this one any more; may be repeated.")
@click.option("--all", "to_all", is_flag=True, help="Open it to all namespaces.")
@click.option("--none", "to_none", is_flag=True, help="Open it to no namespace.")
def access(app: App, *, name: str, allow: tuple[str, ...], deny: tuple[str, ...], to_all: bool, to_none: bool) -> None:
    """Show or change which namespaces of Kubernetes may mount a data set.

    The first --allow makes a list: from then on the data set is open to those on it only. --deny takes namespaces off
    the list; from a data set that is open to all, it shuts out just these. A data set without a list goes by
    DATACACHE_ACCESS. What is made of a data set (convert, query, shard, …) inherits its list. Pods that have it mounted
    keep it. Whoever can read the catalog without Kubernetes is not asked.

    \b
    dsctl dataset access mask --allow team-a --allow team-b    open to these two
    dsctl dataset access mask --all --deny guests              open to all but these
    """
    if both := sorted(set(allow) & set(deny)):
        raise UsageError(f"{both[0]} cannot be both allowed and denied")
    for one, other, given in (
        ("--all", "--none", to_all and to_none),
        ("--all", "--allow", to_all and allow),
        ("--none", "--deny", to_none and deny),
    ):
        if given:
            raise UsageError(f"{one} and {other} do not go together", hint="Leave one of them out.")
    if allow or deny or to_all or to_none:
        everybody = to_all if to_all or to_none else None
        before, found = api.set_dataset_access(name, everybody=everybody, allow=allow, deny=deny, settings=app.settings)
        if before.everybody and not found.everybody and not to_none:
            app.out.warning(f"{name} was open to {before}, and now is to those on its list only")
    else:
        found = api.dataset_access(name, app.settings)
    text = f"{name} is open to {found}"
    if not found.chosen:
        text += f" (inherited from {', '.join(found.made_of)}, of which it is made)"
    if not found.listed:
        text += f" (it has no list of its own; DATACACHE_ACCESS is {app.settings.access})"
    app.out.result({"name": name, "access": _as_json(found)}, text)


def _as_json(access: api.Access) -> dict[str, Any]:
    return {
        "everybody": access.everybody,
        "allowed": list(access.allowed),
        "denied": list(access.denied),
        "listed": access.listed,
        "inherited_from": [] if access.chosen else list(access.made_of),
    }
