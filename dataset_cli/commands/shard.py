"""`dsctl shard`: a snapshot's samples as WebDataset tars or TFRecords at a URL; and checking what lies there.

With `--json`: `{"url", "format", "source", "samples", "bytes", "classes", "made", "shards": [{"name", "size_bytes",
"digest", "samples", "index_digest"}], "snapshot": {…as snapshot show…} or null, "report": {"unusable", "unannotated",
"boxes", "renamed", "left_out": {class: boxes}, "problems": [{"code", "action", "times"}]} or null}`; `made` is how many
shards were written now, and the report is null where the set was complete. `--check` prints `{"url", "ok", "samples",
"bytes", "shards", "problems": [{"shard", "message"}]}` and exits with 1 if there is a problem.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from datacache import api
from datacache.core.counters import count
from datacache.settings import format_bytes
from dataset_cli.app import (
    FILE,
    App,
    DatasetName,
    Size,
    SnapshotRef,
    command,
    naming_options,
    voc_options,
    workers_options,
)
from dataset_cli.commands.convert import counted_problems
from dataset_cli.commands.snapshot import described
from dataset_cli.output import printable

FORMATS = ("webdataset", "tfrecord")
_SHOWN = 20


@command()
@click.argument("ref", type=SnapshotRef(), required=False)
@click.option("--to", "to", metavar="URL", help="Where they go: s3://bucket/prefix, a folder, any fsspec URL.")
@click.option("--format", "format", type=click.Choice(FORMATS), default=FORMATS[0], show_default=True)
@click.option(
    "--max-size",
    "max_size_bytes",
    type=Size(),
    metavar="SIZE",
    default="256MB",
    show_default=True,
    help="No shard is larger than this.",
)
@click.option("--shuffle", is_flag=True, help="Put the samples in a random order.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Another seed, another order.")
@click.option("--as", "name", type=DatasetName(), help="Make a snapshot of the shards, so that they are cached.")
@naming_options("--as")
@click.option("--overwrite", is_flag=True, help="Write all shards anew, whatever is at the URL.")
@click.option("--classes", type=FILE, help="These classes in this order: a name a line.")
@click.option("--classes-from-folders", is_flag=True, help="An image's class is the folder that it is in.")
@click.option("--annotations", metavar="FORMAT", help="What the annotations are in, where that cannot be told.")
@voc_options
@workers_options
@click.option("--check", "check", metavar="URL", help="Instead: read every byte of the shards there and check it.")
def shard(app: App, /, *, ref: str | None, to: str | None, check: str | None, **options: Any) -> int:
    """Write a snapshot's samples as shards, or check shards.

    The same snapshot and options give the same bytes. Interrupted, it goes on where it was when it is run again.

    \b
    dsctl shard mask@v1 --to s3://faces/mask-shards --as mask-shards
    dsctl shard --check s3://faces/mask-shards
    """
    if check is not None:
        if ref is not None or to is not None:
            raise click.UsageError("--check URL is alone: it checks what lies there")
        return _check(app, check)
    if ref is None:
        raise click.UsageError("Missing argument 'REF'")
    if to is None:
        raise click.UsageError("Missing option '--to'")
    if options["name"] is None and app.output_ref is not None:
        raise click.UsageError("--output-ref is for --as: it names the snapshot of the shards")
    _make(app, ref, to, **options)
    return 0


def _make(app: App, ref: str, to: str, *, classes: Path | None, **options: Any) -> None:
    listed = api.read_classes(classes) if classes else None
    with app.out.progress(f"sharding {ref}") as bar:

        def show(what: str, done: int, total: int, written: int) -> None:
            bar.update(f"{what} {done:,} samples" + (f", {format_bytes(written)}" if written else ""), done, total)

        done = api.shard(ref, to=to, classes=listed, settings=app.settings, progress=show, **options)
    built, found = done.built, done.built.set
    snapshot = described(app, done.record) if done.record is not None else None
    sizes = f"{count(len(found.shards), f'{found.format} shard')}, {format_bytes(found.size_bytes)}"
    app.out.result(_as_json(done, snapshot), f"{printable(done.url)}  {count(found.samples, 'sample')} in {sizes}")
    if not built.made:
        app.out.line("It was there already, from the same snapshot and options: no shard was written.")
    elif built.made < len(found.shards):
        app.out.line(f"Of these, {len(found.shards) - built.made:,} there already; {built.made:,} written.")
    if found.classes:
        shown = ", ".join(map(printable, found.classes[:_SHOWN])) + (" …" if len(found.classes) > _SHOWN else "")
        app.out.line(f"classes   {len(found.classes):,}: {shown}")
    counts = built.counts
    if counts is not None:
        others = sum(built.left_out.values())
        boxes = count(others, "box", "boxes")
        for number, text in (
            (
                counts.unannotated,
                f"noted     {count(counts.unannotated, 'image')} without annotation, put in without boxes",
            ),
            (counts.unusable, f"left out  {count(counts.unusable, 'image')} that cannot be used"),
            (others, f"left out  {boxes} of classes that are not among those asked for"),
            (
                counts.renamed,
                f"renamed   {count(counts.renamed, 'sample')}, since another has its name but for extension or dots",
            ),
        ):
            if number:
                app.out.line(text)
    actions: Counter[str] = Counter()
    for problem in built.problems:
        actions[problem.action] += problem.times
    if counts is not None and actions:
        app.out.line(f"problems  {counted_problems(actions)}; see: dsctl stats {printable(ref)}")
    if snapshot is not None:
        tags = ", ".join(snapshot["tags"])
        app.out.line(f"snapshot  {snapshot['ref']}" + (f"  tags: {tags}" if tags else ""))
    app.out.lines(_next(done))


def _next(done: api.Sharded) -> list[str]:
    """Return what to type now."""
    store, prefix = api.split_url(done.url)
    found, folder = done.built.set, printable(f"/{prefix.rstrip('/')}" if store == "file://" else done.url)
    where = done.record.ref if done.record is not None else folder
    first, last = found.shards[0].name, found.shards[-1].name
    number = slice(len("shard-"), first.index("."))
    names = f"shard-{{{first[number]}..{last[number]}}}{first[number.stop :]}" if len(found.shards) > 1 else first
    opened = "torch.ShardDataset" if found.format == "webdataset" else "tf.dataset"
    return [
        f'python    datacache.{opened}("{where}")',
        f"shards    {folder}/{names}",
        f"check     dsctl shard --check {folder}",
    ]


def _as_json(done: api.Sharded, snapshot: dict[str, Any] | None) -> dict[str, Any]:
    built = done.built
    report = None
    if built.counts is not None:
        report = {name: value for name, value in asdict(built.counts).items() if name != "samples"}
        report |= {"left_out": built.left_out, "problems": [problem._asdict() for problem in built.problems]}
    return {
        "url": done.url,
        "format": built.set.format,
        "source": built.set.source,
        "samples": built.set.samples,
        "bytes": built.set.size_bytes,
        "classes": list(built.set.classes),
        "made": built.made,
        "shards": [shard._asdict() for shard in built.set.shards],
        "snapshot": snapshot,
        "report": report,
    }


def _check(app: App, url: str) -> int:
    with app.out.progress(f"checking {url}") as bar:
        found, problems = api.verify_shards(
            url,
            settings=app.settings,
            progress=lambda done, total: bar.update(f"checking {url}  {done:,} of {total:,} shards", done, total),
        )
    value = {"url": url, "ok": not problems, "samples": found.samples, "bytes": found.size_bytes}
    value |= {"shards": len(found.shards), "problems": [problem._asdict() for problem in problems]}
    app.out.result(value)
    if problems:
        app.out.lines(printable(f"{problem.shard} {problem.message}") for problem in problems[:_SHOWN])
        if len(problems) > _SHOWN:
            app.out.line(f"… and {len(problems) - _SHOWN:,} more: --json lists all")
        app.out.line(f"{printable(url)} is not whole: {count(len(problems), 'problem')}")
        app.out.line(
            f"Make it again: dsctl shard {found.source} --to {printable(url)} --overwrite, with the options that are "
            "in its shards.json"
        )
        return 1
    whole = f"{count(found.samples, 'sample')} in {count(len(found.shards), 'shard')}, {format_bytes(found.size_bytes)}"
    app.out.line(f"{printable(url)} is whole: {whole}; every byte was read")
    return 0
