"""`dsctl demo`: the whole way from a bucket to a training epoch, on a data set it draws itself.

It draws masked and bare faces into a bucket (a folder), snapshots it, mounts the snapshot, reads two epochs, and
compares every byte with the bucket; then it converts the annotations from VOC to YOLO and draws a picture of some
images with their boxes. Where PyTorch is installed, it trains a small detector from shards of the images (`demo/`;
`examples/mask_detection` is the same at more length, for any data), predicts with it, and evaluates that. At the end it
offers, on a terminal, to show all of it on the page of `dsctl ui` until Ctrl-C. It has a home of its own in the demo's
folder, so nothing of the user's is touched, and cleans up whatever happens but for the pictures, `preview.png` and
`predictions.png` where it was called (or in `--dir`); with `--keep`, folder and snapshots stay and can be looked at.

With `--json`: `{"ok", "snapshot", "mounted", "epochs": [{"files", "bytes", "seconds", "files_per_s"}],
"tiers", "compared_files", "converted", "preview", "training", "home", "bucket", "kept"}`, where training is null or
`{"shards", "images", "epochs", "seconds", "first_loss", "loss", "test_images", "f1", "average_precision", "model",
"predictions", "predicted", "map", "map_50", "match"}`; the last four are the snapshot of predictions, their mean
average precision, and the page's address where they are beside the labels.
"""

from __future__ import annotations

import os
import random
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import fuse_mount
from datacache import api
from datacache.core.counters import count as counted
from datacache.core.errors import CacheError, DaemonError, MountError, UsageError
from datacache.settings import format_bytes
from dataset_cli.app import FOLDER, App, command
from dataset_cli.commands.snapshot import as_json
from dataset_cli.commands.ui import page_is_installed, serve_page

if TYPE_CHECKING:
    from datacache.settings import Settings

_NAME, _TAG = "mask", "v1"
_YOLO, _PREDICTED = "mask-yolo", "mask-predicted"
_SHOWN = 12
_SSD_BYTES, _RAM_BYTES = 10**9, 64 * 2**20
_KEPT = (
    f"  dsctl ls -R {_NAME}@{_TAG}",
    f"  dsctl query {_NAME}@{_TAG} --label without_mask --min-objects 2",
    f"  mkdir -p /tmp/mask && dsctl mount {_YOLO}@{_TAG} /tmp/mask && ls /tmp/mask",
)
_NO_PAGE = "the page needs more packages: pip install 'dsctl[ui]'"
_EVALUATE = f"  dsctl evaluate {_PREDICTED}@{_TAG} --against {_YOLO}-val@{_TAG}"
_GONE = (
    "Everything is cleaned up. Try next, with your own data:",
    "  dsctl snapshot create faces --from s3://BUCKET/PREFIX --tag v1",
    "  dsctl convert faces@v1 --to yolo --as faces-yolo --split train=0.8,val=0.2",
    "  dsctl mount faces-yolo DIR",
    "or keep the demo's to play with: dsctl demo --keep",
    "or look at the demo's in a browser: dsctl demo --page",
)


@command()
@click.option("--dir", "directory", type=FOLDER, help="Where (default: a new folder in /tmp).")
@click.option("--keep", is_flag=True, help="Leave the folder with bucket and home to look at.")
@click.option("--count", type=click.IntRange(1, 100_000), default=200, show_default=True, help="Images to draw.")
@click.option(
    "--train",
    "train_s",
    type=click.FloatRange(0, 3600),
    default=15,
    show_default=True,
    metavar="SECONDS",
    help="How long to train, where PyTorch is installed; 0: not at all.",
)
@click.option("--page/--no-page", default=None, help="At the end, show it in a browser until Ctrl-C, or do not ask.")
def demo(app: App, *, directory: Path | None, keep: bool, count: int, train_s: float, page: bool | None) -> None:
    """Try everything on a small drawn dataset.

    Snapshots it, mounts it, reads two epochs, compares every byte, converts it to YOLO, draws preview.png, trains a
    small detector from shards where PyTorch is installed, draws what it finds into predictions.png, predicts with it
    and measures the predictions, and cleans up.
    """
    with ExitStack() as cleanup:
        folder = _folder(directory, keep, cleanup)
        bucket, home = folder / "bucket", folder / "home"
        settings = replace(
            app.settings,
            home=home,
            catalog=f"sqlite:///{home / 'catalog.db'}",
            ssd_bytes=min(app.settings.ssd_bytes, _SSD_BYTES),
            ram_bytes=min(app.settings.ram_bytes, _RAM_BYTES),
            stores=(),
        )
        pictures = directory or (folder if keep else Path.cwd())
        _draw(app, bucket, count)
        record = api.create_snapshot(_NAME, bucket.as_uri(), settings=settings, tags=[_TAG], move_tags=True)
        size = format_bytes(record.total_bytes)
        app.out.line(f"snapshot  {_NAME}@{_TAG} is {record.ref}: {record.files:,} files, {size}")
        if not keep:
            cleanup.callback(shutil.rmtree, api.memory_dir(home, settings.ram_dir), ignore_errors=True)
        cleanup.callback(_stop_daemon, settings)
        with api.open_snapshot(record.ref, settings) as snapshot:
            paths = snapshot.paths()
        try:
            read = cleanup.enter_context(_mounted(app, record.ref, folder / "mnt", settings))
            mounted = True
        except MountError as exc:
            app.out.warning(f"nothing can be mounted here ({exc.message}); reading through Python instead")
            read, mounted = cleanup.enter_context(api.open_snapshot(record.ref, settings)).read, False
        epochs = [_epoch(app, number, paths, read, bucket) for number in (1, 2)]
        app.out.line(f"compared  every byte of {len(paths):,} files with the bucket: equal")
        tiers = api.cache_status(settings)["tiers"]
        for tier in tiers:
            used = f"{format_bytes(tier['used_bytes'])} in {counted(tier['blocks'], 'block')}"
            app.out.line(f"tier      {tier['name']}: {used}")
        converted = _convert(app, record.ref, settings)
        picture = _draw_preview(app, record.ref, _free_name(pictures, "preview"), settings)
        training = None
        if train_s:
            place = _free_name(pictures, "predictions")
            training = _train(app, converted.ref, bucket=bucket, picture=place, seconds=train_s, settings=settings)
        with closing(api.open_catalog(settings)) as catalog:
            shown, as_yolo = (as_json(each, catalog.dataset(each.dataset)) for each in (record, converted))
        _show_page(app, settings, page)
    app.out.result(
        {
            "ok": True,
            "snapshot": shown,
            "mounted": mounted,
            "epochs": epochs,
            "tiers": tiers,
            "compared_files": len(paths),
            "converted": as_yolo,
            "preview": picture,
            "training": training,
            "home": str(home),
            "bucket": str(bucket),
            "kept": keep,
        }
    )
    app.out.lines(["", *(_kept(folder, home, training) if keep else _GONE)])


def _kept(folder: Path, home: Path, training: Any) -> Iterator[str]:
    """Yield lines to type next, the page first. `training` is what `_train` has returned."""
    foreign = bool(os.environ.get("DATACACHE_CATALOG"))
    yield f"All of it is in {folder}. Look at it in a browser:"
    if page_is_installed():
        variables = f"{'env -u DATACACHE_CATALOG ' if foreign else ''}DATACACHE_HOME={shlex.quote(str(home))}"
        yield f"  {variables} dsctl ui"
        if training:
            yield f"  its {training['match']} has the predictions beside the labels"
    else:
        yield f"  {_NO_PAGE}"
    yield "and try next:"
    yield f"  export DATACACHE_HOME={shlex.quote(str(home))}"
    if foreign:
        yield "  unset DATACACHE_CATALOG"
    yield from _KEPT
    if training:
        yield _EVALUATE


def _show_page(app: App, settings: Settings, wanted: bool | None) -> None:
    """Serve the page of the demo's data sets until Ctrl-C. None: where somebody is there and wants it."""
    if wanted is None and not app.out.json and sys.stdin.isatty() and sys.stdout.isatty():
        if not page_is_installed():
            app.out.line(f"page      left out: {_NO_PAGE}")
            return
        wanted = click.confirm("page      Look at these data sets in a browser now?", default=True)
    if not wanted:
        return
    if not page_is_installed():
        raise UsageError(f"--page: {_NO_PAGE}")
    app.out.line("page      until Ctrl-C, at")
    with suppress(KeyboardInterrupt):
        serve_page(app, settings, browser=True, port=0)


def _folder(directory: Path | None, keep: bool, cleanup: ExitStack) -> Path:
    """Return the demo's folder, which is removed at the end unless it is to stay or was there before."""
    if directory is None:
        folder = Path(tempfile.mkdtemp(prefix="datacache-demo-"))
    else:
        folder = directory.absolute()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as exc:
            raise UsageError(f"{folder} cannot be made: {exc.strerror}", hint="Choose another --dir.") from exc
        if any(path.suffix != ".png" for path in folder.iterdir()) and not (folder / "bucket" / "JPEGImages").is_dir():
            raise UsageError(f"{folder} is not empty", hint="Choose an empty or a new --dir.")
    if not keep:
        for name in ("bucket", "home"):
            cleanup.callback(shutil.rmtree, folder / name, ignore_errors=True)
        if directory is None:
            cleanup.callback(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _draw(app: App, bucket: Path, count: int) -> None:
    try:
        from dataset_cli.demo.faces import draw_faces
    except ImportError as exc:
        raise UsageError("the demo draws with Pillow, which is missing", hint="pip install pillow") from exc
    shutil.rmtree(bucket, ignore_errors=True)
    with app.out.progress(f"drawing {count:,} images"):
        faces = draw_faces(bucket, count=count)
    kinds = f"{faces.masked:,} faces with a mask, {faces.bare:,} without"
    app.out.line(f"bucket    {bucket}: {faces.images:,} images, {kinds}")


@contextmanager
def _mounted(app: App, ref: str, mountpoint: Path, settings: Settings) -> Iterator[Callable[[str], bytes]]:
    """Mount; give what reads a file there."""
    mountpoint.mkdir(exist_ok=True)
    try:
        info = fuse_mount.mount_snapshot(ref, mountpoint, settings=settings)
        try:
            app.out.line(f"mount     {mountpoint}, served by {counted(len(info.workers), 'worker')}")
            yield lambda path: (mountpoint / path).read_bytes()
        finally:
            try:
                fuse_mount.unmount(mountpoint, settings=settings)
            except MountError:  # somebody looks into it, an indexer perhaps
                fuse_mount.unmount(mountpoint, lazy=True, settings=settings)
    finally:
        with suppress(OSError):
            mountpoint.rmdir()


def _epoch(app: App, number: int, paths: list[str], read: Callable[[str], bytes], bucket: Path) -> dict[str, Any]:
    """Read all files in a random order against the clock, then compare them with the bucket."""
    order = random.Random(number).sample(paths, len(paths))
    with app.out.progress(f"epoch {number}") as bar:
        begun = time.perf_counter()
        got = []
        for done, path in enumerate(order):
            got.append(read(path))
            bar.update(f"epoch {number}", done + 1, len(order))
        seconds = time.perf_counter() - begun
    for path, data in zip(order, got, strict=True):
        if data != (bucket / path).read_bytes():
            raise CacheError(f"{path} differs from the bucket", hint="This is a defect. Please report it.")
    size, rate = sum(map(len, got)), len(order) / seconds
    kind = "from the bucket" if number == 1 else "from this node"
    app.out.line(f"epoch {number}   {rate:>9,.0f} files/s ({kind}, {format_bytes(size)})")
    return {"files": len(order), "bytes": size, "seconds": seconds, "files_per_s": rate}


def _convert(app: App, ref: str, settings: Settings) -> api.SnapshotRecord:
    """Convert from VOC to YOLO: labels are new, images are not."""
    done = api.convert(
        ref, to="yolo", name=_YOLO, split="train=0.8,val=0.2", tags=[_TAG], move_tags=True, settings=settings
    )
    splits = " and ".join(f"{count:,} to {split}" for split, count in sorted(done.report.splits.items()))
    app.out.line(f"convert   {_YOLO}@{_TAG} is {done.record.ref}: YOLO labels of {done.report.boxes:,} boxes, {splits}")
    return done.record


def _draw_preview(app: App, ref: str, path: Path, settings: Settings) -> str | None:
    """Draw a picture of some images with their boxes. None where it cannot be written."""
    with api.open_annotations(ref, settings=settings) as (snapshot, table):
        rows = [row for _, row in zip(range(_SHOWN), table.rows(), strict=False)]
        pictures = [api.Picture(row.path, snapshot.read(row.path), row.annotation) for row in rows]
    data = api.draw_pictures(pictures, title=f"{_NAME}@{_TAG}", subtitle=f"{len(rows)} of {table.images:,} images")
    return _write_picture(app, path, data, f"preview   {path}: {len(rows)} images with their boxes")


def _free_name(folder: Path, name: str) -> Path:
    """Return `preview.png`, or a name beside it if somebody else's is there."""
    names = (folder / f"{name}{number or ''}.png" for number in range(1000))
    return next((path for path in names if not path.exists()), folder / f"{name}.png")


def _stop_daemon(settings: Settings) -> None:
    client = api.running_daemon(settings)
    if client is not None:
        with suppress(DaemonError):  # gone already
            client.stop()


def _train(app: App, ref: str, *, bucket: Path, picture: Path, seconds: float, settings: Settings) -> Any:
    """Train for some seconds on the split `train` of a YOLO snapshot and look at `val`. Return what was done, as JSON;
    None where it could not be, which is said."""
    name = ref.partition("@")[0]
    if find_spec("torch") is None:
        app.out.line("training  left out: it needs PyTorch (pip install 'dsctl[torch]')")
        return None
    with app.out.progress("training") as bar:
        bar.update("starting PyTorch")
        import torch

        from datacache.torch import ShardDataset
        from dataset_cli.demo import story
        from dataset_cli.demo.detector import Epoch, look, score, train

        # Two that wait for each other are slower than one where others have the processors, too.
        torch.set_num_threads(1)
        bar.update("making shards")
        parts = {}
        for split in ("train", "val"):
            made = story.shards_of_split(
                ref, split, str(bucket), name=f"{name}-{split}", tags=[_TAG], settings=settings
            )
            if made is None:
                app.out.line(f"training  left out: with so few images there is none in {split} (--count)")
                return None
            parts[split] = made.ref
        size = story.fitting_size(parts["train"], settings)
        training, test = (
            ShardDataset(ref, target="detection", decode="rgb", size=size, settings=settings) for ref in parts.values()
        )
        begun = time.monotonic()

        def show(epoch: Epoch) -> None:
            spent = time.monotonic() - begun
            bar.update(f"training, epoch {epoch.number}: loss {epoch.loss:.2f}", min(spent, seconds), seconds)

        network, epochs = train(training, seconds=seconds, batch_size=8, workers=0, on_epoch=show)
        took = time.monotonic() - begun
        bar.update("looking at images it was not trained on")
        found, targets = look(network, test)
        result = score(found, targets, test.classes, story.LEAST)[-1]
        model = f"{bucket.as_uri()}/models/{name}.pt"
        story.put_model(model, network, {"classes": list(test.classes), "size": list(size), "shards": parts}, settings)
        if not story.same(found, look(story.get_model(model, settings)[0], test)[0]):
            text = "the model that was read back finds other boxes"
            raise CacheError(text, hint="This is a defect. Please report it.")
    losses = f"loss {epochs[0].loss:.2f}, then {epochs[-1].loss:.2f}"
    precision = f"average precision {result.average_precision:.2f}"
    app.out.lines(
        [
            f"training  a detector, {took:.0f} s, {len(epochs)} epochs of {len(training):,} images in shards: {losses}",
            f"test      {len(test):,} other images: F1 {result.f1:.2f}, {precision}",
            f"model     {model}; read back, it finds the same boxes",
        ]
    )
    shown = story.picture(parts["val"], size, found, _SHOWN, settings)
    predictions = _write_picture(app, picture, shown, f"picture   {picture}: what it found, and what there is")
    return {
        "shards": parts,
        "images": len(training),
        "epochs": len(epochs),
        "seconds": took,
        "first_loss": epochs[0].loss,
        "loss": epochs[-1].loss,
        "test_images": len(test),
        "f1": result.f1,
        "average_precision": result.average_precision,
        "model": model,
        "predictions": predictions,
        **_predict(app, f"{name}-val@{_TAG}", model, settings),
    }


def _predict(app: App, labels: str, model: str, settings: Settings) -> dict[str, Any]:
    """Make a snapshot of what a stored model finds, and measure it by the labels. Return what was done, as JSON."""
    from dataset_cli.demo import story

    with app.out.progress("predicting") as bar:
        done = api.predict(
            labels,
            story.Trained,
            weights=model,
            name=_PREDICTED,
            tags=[_TAG],
            move_tags=True,
            replace=True,
            settings=settings,
            progress=bar.update,
        )
        measured = api.evaluate(done.record.ref, labels, settings=settings, progress=bar.update)
    match = f"/match/{_PREDICTED}@{_TAG}?with={labels}&score={measured.score:.2g}"
    objects = f"{counted(done.report.objects, 'object')} in {counted(done.report.predicted, 'image')}"
    app.out.lines(
        [
            f"predict   {_PREDICTED}@{_TAG} is {done.record.ref}: {objects}",
            f"evaluate  by labels of {labels}: mAP@50 {measured.map_50 or 0:.2f}, mAP@50:95 {measured.map or 0:.2f}",
            f"compare   predictions beside labels, on the page of dsctl ui: {match}",
        ]
    )
    return {"predicted": done.record.ref, "map": measured.map, "map_50": measured.map_50, "match": match}


def _write_picture(app: App, path: Path, data: bytes, text: str) -> str | None:
    """Write a picture, and say `text`. Return its path; None where it cannot be written, which is said."""
    try:
        path.write_bytes(data)
    except OSError as exc:
        app.out.warning(f"{path} cannot be written: {exc.strerror}")
        return None
    app.out.line(text)
    return str(path)
