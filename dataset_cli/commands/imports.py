"""`dsctl snapshot create --from-jsonl`, `--from-export` and `--frames`: their options, reports and what they print.

Used by `snapshot create`. With `--json` the snapshot has one more member, `"import"`:

    --from-jsonl   {"lines", "left_out", "resumed", "failures": [{"line", "url", "path", "code", "reason"}]}
    --from-export  {"files", "images", "referenced", "replaced", "passed_over", "leading"}
    --frames       {"videos", "left_out", "images", "resumed", "failures": [{"video", "url", "code", "reason"}]}

An import from JSON lines or videos that fails prints `{"import": …}` alone. With `--report` the failures are in that
file, one a line, and not in the JSON.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import IO, Any, NamedTuple

import click

from datacache import api
from datacache.core.counters import count
from datacache.core.errors import ImportFailedError
from datacache.settings import format_bytes, parse_bytes
from dataset_cli.app import App, EngineName, Size, SnapshotRef, options

_SHOWN = 20
import_options = options(
    click.option("--from-jsonl", "lines", metavar="FILE", help="JSON lines: url, path, label, …; '-' for stdin."),
    click.option("--from-export", "export", metavar="PATH", help="A zip, tar, folder or .json of an annotation tool."),
    click.option("--images", type=SnapshotRef(), help="With --from-export: take the images of this snapshot."),
    click.option("--concurrency", type=click.IntRange(1, 256), help="With --from-jsonl: lines at a time."),
    click.option("--skip-failed", is_flag=True, help="With --from-jsonl: leave out lines that fail."),
    click.option(
        "--report", metavar="FILE", help="With --from-jsonl, --frames: write the failures there, as JSON lines."
    ),
    click.option(
        "--max-object",
        type=Size(),
        metavar="SIZE",
        help="With --from-jsonl: the largest copy (default and most: 1GiB).",
    ),
    click.option(
        "--object-timeout", type=click.FloatRange(min=1), help="With --from-jsonl: seconds for one (default: 300)."
    ),
    click.option(
        "--allow-local",
        multiple=True,
        metavar="DIR",
        help="With --from-jsonl: the list may name files of this folder, too; several times.",
    ),
    click.option(
        "--allow-network",
        multiple=True,
        metavar="HOST|CIDR",
        help="With --from-jsonl: it may lead to this private host or network; several times.",
    ),
    click.option(
        "--on",
        type=EngineName(),
        metavar="ENGINE",
        help="With --from-jsonl: have dask://HOST:PORT, ray://HOST:PORT, queue or queue://JOB fetch.",
    ),
    click.option(
        "--unpack-limit",
        "limits",
        multiple=True,
        metavar="NAME=N",
        help="With --from-export: members, total, member (bytes) or ratio; may be given several times.",
    ),
    click.option("--frames", metavar="WHICH", help="Of videos: every=1s, fps=2 or scene; frames become JPEGs."),
    click.option(
        "--max-side", type=click.IntRange(min=1), metavar="N", help="With --frames: pixels of the longer side at most."
    ),
    click.option("--quality", type=click.IntRange(1, 100), help="With --frames: of the JPEGs (default: 90)."),
)
"""`import_snapshot` takes them."""
_JSONL_ONLY = ("concurrency", "skip_failed", "max_object", "object_timeout", "allow_local", "allow_network", "on")
_EXPORT_ONLY = ("images", "limits")
_FRAMES_ONLY = ("max_side", "quality")


class Imported(NamedTuple):
    """Print an import, for `snapshot create`."""

    record: api.SnapshotRecord
    value: dict[str, Any]
    notes: Sequence[str]


def import_snapshot(
    app: App, name: str, *, url: str | None, copy: bool, imports: dict[str, Any], options: dict[str, Any]
) -> Imported | None:
    """Do the import that is asked for; None where it is none. `imports` are the options of `import_options`, `options`
    those that every snapshot has."""
    lines, export, frames = (imports.pop(each) for each in ("lines", "export", "frames"))
    if [url, lines, export].count(None) != 2:
        raise click.UsageError("give one of --from URL, --from-jsonl FILE and --from-export PATH")
    for needs, given, names in (
        ("--from-jsonl", lines, _JSONL_ONLY),
        ("--from-export", export, _EXPORT_ONLY),
        ("--frames", frames, _FRAMES_ONLY),
        ("--from-jsonl and --frames", lines or frames, ("report",)),
    ):
        wrong = [option for option in names if imports[option]] if given is None else []
        if wrong:
            raise click.UsageError(f"--{wrong[0].replace('_', '-').replace('limits', 'unpack-limit')} is for {needs}")
    if frames is not None and url is None:
        raise click.UsageError("--frames is for --from")
    if frames is not None and copy:
        raise click.UsageError("--copy is for --from and --from-jsonl; frames of videos are images of their own anyway")
    if export is not None and copy:
        raise click.UsageError("--copy is for --from and --from-jsonl; what an export holds is copied anyway")
    if lines is not None:
        return _from_jsonl(app, name, lines, copy=copy, imports=imports, options=options)
    if export is not None:
        return _from_export(app, name, export, imports=imports, options=options)
    if frames is not None and url is not None:
        return _from_videos(app, name, url, frames=frames, imports=imports, options=options)
    return None


def _from_jsonl(
    app: App, name: str, file: str, *, copy: bool, imports: dict[str, Any], options: dict[str, Any]
) -> Imported:
    chosen: dict[str, Any] = {key: imports[key] for key in ("skip_failed", "allow_local", "allow_network", "on")}
    for option, keyword in (
        ("concurrency", "concurrency"),
        ("max_object", "max_object_bytes"),
        ("object_timeout", "object_timeout_s"),
    ):
        if imports[option] is not None:
            chosen[keyword] = imports[option]
    with (
        _failures(app, imports["report"], "lines", _line_failed) as failures,
        app.out.progress("reading the lines") as bar,
    ):
        made = api.import_jsonl(
            name,
            file,
            copy=copy,
            progress=lambda progress: bar.update(_describe(progress), progress.done, progress.total),
            on_failure=failures.add,
            **chosen,
            **options,
        )
    value = {"lines": made.lines, "left_out": made.left_out, "resumed": made.resumed, **failures.value}
    notes = [f"{made.resumed:,} lines had been done before"] if made.resumed else []
    return Imported(made.record, value, notes)


def _from_export(app: App, name: str, path: str, *, imports: dict[str, Any], options: dict[str, Any]) -> Imported:
    limits, images = _limits(imports["limits"]), imports["images"] or ""
    with app.out.progress(f"reading {path}") as bar:
        made = api.import_export(
            name,
            path,
            images=images,
            limits=limits,
            progress=lambda done, files, size: bar.update(f"{done:,} files, {format_bytes(size)}", done, files),
            **options,
        )
    notes = [f"{made.files:,} files of the export, {made.images:,} of them images"]
    if images:
        replaced = f" ({made.replaced:,} more are in the export itself)" if made.replaced else ""
        notes.append(f"{made.referenced:,} images of {images}{replaced}")
    if made.leading:
        notes.append(f"without the leading {made.leading}")
    if made.passed_over:
        notes.append(f"{made.passed_over:,} files that a desktop left behind were passed over")
    value = made._asdict()
    del value["record"]
    return Imported(made.record, value, notes)


def _from_videos(
    app: App, name: str, url: str, *, frames: str, imports: dict[str, Any], options: dict[str, Any]
) -> Imported:
    chosen = {key: imports[key] for key in _FRAMES_ONLY if imports[key] is not None}
    with (
        _failures(app, imports["report"], "videos", lambda failure: f"{failure.video}: {failure.reason}") as failures,
        app.out.progress(f"decoding videos of {url}") as bar,
    ):
        made = api.import_frames(
            name,
            url,
            frames=frames,
            progress=lambda far: bar.update(_describe_frames(far), far.done, far.total),
            on_failure=failures.add,
            **chosen,
            **options,
        )
    value = made._asdict() | failures.value
    del value["record"]
    notes = [f"{made.images:,} images of {count(made.videos - made.left_out, 'video')}"]
    notes += [f"{count(made.resumed, 'stretch', 'stretches')} had been decoded before"] if made.resumed else []
    return Imported(made.record, value, notes)


class _Failures:
    """Writes failures to the report, or keeps them for `--json`; shows the first of them."""

    def __init__(self, app: App, report: IO[str] | None, what: str, describe: Callable[[Any], str]) -> None:
        self._app, self._report, self._what, self._describe = app, report, what, describe
        self._first: list[Any] = []
        self._all: list[dict[str, Any]] = []
        self._count = 0

    def add(self, failure: api.Failure | api.FailedVideo) -> None:
        """Take one failure; they come in the order of the input."""
        self._count += 1
        if len(self._first) < _SHOWN:
            self._first.append(failure)
        if self._report is not None:
            print(json.dumps(failure.as_json()), file=self._report)
        elif self._app.out.json:
            self._all.append(failure.as_json())

    @property
    def value(self) -> dict[str, Any]:
        """The failures for `--json`."""
        return {} if self._report is not None else {"failures": self._all}

    def show(self) -> None:
        """Say the first of them on stderr, and how many more there are."""
        for failure in self._first:
            self._app.out.warning(self._describe(failure))
        if self._count > len(self._first):
            where = "the report" if self._report is not None else "--report FILE or --json"
            self._app.out.warning(f"{self._count - len(self._first):,} more {self._what} failed; {where} has them all")


@contextmanager
def _failures(app: App, report: str | None, what: str, describe: Callable[[Any], str]) -> Iterator[_Failures]:
    """Give what takes the failures of an import, and show them at its end, also where it fails."""
    with ExitStack() as stack:
        failures = _Failures(app, stack.enter_context(_open_report(report)) if report else None, what, describe)
        try:
            yield failures
        except ImportFailedError as exc:
            failures.show()
            if exc.failures:
                app.out.result({"import": {"failed": exc.failures, **failures.value}})
            raise
        failures.show()


def _line_failed(failure: api.Failure) -> str:
    about = "" if not failure.url or failure.reason.startswith(failure.url) else f"{failure.url}: "
    return f"line {failure.line}: {about}{failure.reason}"


def _describe_frames(far: api.FramesProgress) -> str:
    failed = f", {far.failed:,} videos failed" if far.failed else ""
    return f"{far.images:,} images, {far.done:,} of {far.total:,} stretches of videos{failed}"


def _describe(progress: api.JsonlProgress) -> str:
    failed = f", {progress.failed:,} failed" if progress.failed else ""
    resumed = f", {progress.resumed:,} done before" if progress.resumed else ""
    return f"{progress.done:,} of {progress.total:,} lines, {format_bytes(progress.total_bytes)}{resumed}{failed}"


def _limits(given: Sequence[str]) -> api.UnpackLimits:
    names = {"members": "members", "ratio": "ratio", "total": "total_bytes", "member": "member_bytes"}
    values: dict[str, int] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or name not in names:
            raise click.UsageError(f"--unpack-limit {text}: write {', '.join(f'{name}=N' for name in names)}")
        try:
            values[names[name]] = parse_bytes(value)
        except ValueError as exc:
            raise click.UsageError(f"--unpack-limit: {exc}") from exc
    return api.UnpackLimits(**values)


def _open_report(file: str) -> IO[str]:
    try:
        return open(file, "w", encoding="utf-8")
    except OSError as exc:
        raise click.UsageError(f"--report: {file} cannot be written: {exc.strerror}") from exc
