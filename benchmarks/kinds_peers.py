"""Forty small data sets of every kind of annotation, read and written back by us, Datumaro, FiftyOne and Supervision.

A cell is `what it read → what came back`. The data sets and what is right are made by `kinds.cases`; `kinds.files`
reads plainly what each tool has written in the same format, and says what is there. `all` is every box, outline,
object's keypoints, label and caption, of the right class, with coordinates within 0.01 pixels and all its details
(flags, attributes, crowd, group, track, score), and where it says so the order of classes. Otherwise it is how many are
of the right kind, class and place, and what is wrong or lacks: `mask → box` is another kind, `no score` a detail, `+2`
are things that were not there. Boxes of VOC that are counted from 0 and from 1 are equal. Where one file of several is
broken, or one image leads out of the data set, the others count.

Each tool is used as its documentation shows, in an environment of its own (`kinds.tools`). `no reader`: it has none for
that format; `raised`: nothing was read or written. Parts of a polygon that share a group count as one (Datumaro).
FiftyOne reads COCO either as polygons or as masks, here as masks where the file has any, and writes a file a kind.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.harness import ROOT, ResultTable, ToldProcess, Workspace, benchmark, foreign_environment
from benchmarks.kinds.cases import Case, cases, picture
from benchmarks.kinds.files import READERS, Thing, details, of_bits, pairs, sizes, stem
from benchmarks.peers import DATUMARO, FIFTYONE, SUPERVISION, Peer, PeerUnavailableError, programs_of

NEAR_PX = 0.01
ANSWER_TIMEOUT_S = 300
"""FiftyOne starts a database."""
OURS = "datacache"
OF_SETS = ("classes", "skeleton")
MIDS = {"/m/0k4j": "Car", "/m/0bt9lr": "Dog"}
"""Open Images has both: a tool may call a class by either."""
Answer = dict[str, Any]
"""`things`, and why nothing was `read` or `wrote`: '' where it was."""


class Verdict(NamedTuple):
    """Tell how much of a data set is there."""

    right: int
    of: int
    lacks: Counter[str]

    def __str__(self) -> str:
        if self.right == self.of and not self.lacks:
            return "all"
        return f"{self.right}/{self.of}" + (f" ({', '.join(self.lacks)})" if self.lacks else "")


class ThereAndBack(NamedTuple):
    """The verdicts of one tool about one data set; a text where there is none."""

    of: int
    read: Verdict | str
    back: Verdict | str

    def __str__(self) -> str:
        return str(self.read) if isinstance(self.read, str) else f"{self.read} → {self.back}"


def main() -> None:
    with benchmark(__doc__) as (args, work):
        tools: dict[str, Callable[[Case, Path, Path], Answer]] = {}
        home = work.home("home")
        home.ram_dir.mkdir(exist_ok=True)
        with home.environment():
            tools[OURS] = ours
            for peer in (DATUMARO, FIFTYONE, SUPERVISION):
                try:
                    tools[str(peer)] = _started(peer, programs_of(peer, args) / "python", work)
                except PeerUnavailableError as exc:
                    print(f"{peer} was not run: {exc}", file=sys.stderr)
            every = cases()
            rows = {tool: [row(case, ask, work, tool) for case in every] for tool, ask in tools.items()}
        report(every, rows)


def row(case: Case, ask: Callable[[Case, Path, Path], Answer], work: Workspace, tool: str) -> ThereAndBack:
    """Give a data set to a tool and judge the result."""
    place = work.folder(f"{tool}/{case.name.replace('/', ' ')}")
    source, out = place / "in", place / "out"
    case.write(source)
    (place / "outside.jpg").write_bytes(picture(9))
    before = _digest(source)
    right = [thing for thing in READERS[case.format](source) if _counts(thing, case)]
    answer = ask(case, source, out)
    broke = [word for word, is_so in _harm(place, source, out, before).items() if is_so]
    if answer["read"]:
        return ThereAndBack(len(right), ", ".join([answer["read"], *broke]), "")
    read = judge(right, answer["things"], case)
    if answer["wrote"]:
        return ThereAndBack(len(right), read, ", ".join([answer["wrote"], *broke]))
    back = judge(right, list(READERS[case.format](out)), case, written=True)
    gone = len({thing.image for thing in right if thing.image} - sizes(out).keys())
    back.lacks.update({f"{gone} image{'s' * (gone > 1)}": 1} if gone else {})
    back.lacks.update(broke)
    return ThereAndBack(len(right), read, back)


def _digest(folder: Path) -> dict[Path, bytes]:
    return {path: hashlib.blake2b(path.read_bytes()).digest() for path in folder.rglob("*") if path.is_file()}


def _harm(place: Path, source: Path, out: Path, before: Mapping[Path, bytes]) -> dict[str, bool]:
    after = _digest(source)
    inside = {source, out, place / "outside.jpg"}
    return {
        "changed its input": any(after.get(path) != digest for path, digest in before.items()),
        "wrote outside": any(path not in inside for path in place.iterdir()),
        "took a file from outside": any(out.rglob("outside*")),
    }


# --- what is there and what is not ---


def judge(right: Sequence[Thing], found: Sequence[Thing], case: Case, *, written: bool = False) -> Verdict:
    """Compare what was found with what is right: the nearest of one image belong together."""
    found = [thing._replace(label=MIDS.get(thing.label, thing.label)) for thing in found if _counts(thing, case)]
    costs = sorted(
        (len(lacks[0]), len(lacks[1]), other.kind == "box", at, to, lacks)
        for at, one in enumerate(right)
        for to, other in enumerate(found)
        if (lacks := lacking(one, other)) is not None
    )
    matched, taken, words, count = set[int](), set[int](), Counter[str](), 0
    for *_, at, to, (wrong, gone) in costs:
        if at not in matched and to not in taken:
            matched.add(at)
            taken.add(to)
            words.update([*wrong, *(f"no {name}" for name in gone)])
            count += not wrong
    words.update(f"no {right[at].kind}" for at in range(len(right)) if at not in matched)
    kinds = {thing.kind for thing in right} - {*OF_SETS}
    kinds -= {"box"} if len(kinds) > 1 else set()  # the boxes of outlines are nothing more
    more = sum(to not in taken and thing.kind in kinds for to, thing in enumerate(found))
    if written and more:
        words[f"+{more}"] += 1
    return Verdict(count, len(right), words)


def _counts(thing: Thing, case: Case) -> bool:
    if thing.kind == "classes":
        return case.classes
    return thing.kind in OF_SETS or not case.must or thing.image in case.must


def lacking(right: Thing, found: Thing) -> tuple[list[str], list[str]] | None:
    """Return what is wrong with a thing and which details it lacks; None where it is another one."""
    areas = ("box", "polygon", "parts", "mask", "rotated")
    if right.image != found.image or (right.kind != found.kind and not {right.kind, found.kind} <= {*areas}):
        return None
    if right.kind in ("label", "caption", *OF_SETS):
        if right.kind not in ("classes", "label") and right.label != found.label:
            return None
        words = ["class" if right.kind == "label" else "order of classes"] * (right.label != found.label)
    elif right.kind != found.kind:
        words = [f"{right.kind} → {found.kind}"]
    elif right.kind == "keypoints":
        one, other = (list(zip(*[iter(thing.numbers[0])] * 3, strict=True)) for thing in (right, found))
        words = ["visibility"] * ([v for *_, v in one] != [v for *_, v in other])
        seen = [(a, b) for a, b in zip(one, other, strict=False) if a[2]]
        words += ["coordinates"] * (len(one) != len(other) or not all(_near(a[:2], b[:2]) for a, b in seen))
        words += ["class"] * (right.label != found.label)
    else:
        same = {
            "mask": lambda: right.numbers == found.numbers,
            "box": lambda: _near(right.numbers[0], found.numbers[0]) or _near(right.numbers[0], _from_1(found)),
        }.get(right.kind, lambda: _same_rings(right.numbers, found.numbers))()
        words = ["pixels" if right.kind == "mask" else "coordinates"] * (not same)
    if right.kind in areas:
        words += ["class"] * (right.label != found.label)
    if len(words) > 1 and "class" in words:
        return None
    return words, sorted({detail.partition("=")[0] for detail in right.details - found.details})


def _from_1(thing: Thing) -> tuple[float, ...]:
    """Return a box with its first pixel counted as 1."""
    x1, y1, x2, y2 = thing.numbers[0]
    return x1 + 1, y1 + 1, x2, y2


def _near(one: Sequence[float], other: Sequence[float]) -> bool:
    return len(one) == len(other) and all(abs(a - b) <= NEAR_PX for a, b in zip(one, other, strict=True))


def _same_rings(one: Sequence[Sequence[float]], other: Sequence[Sequence[float]]) -> bool:
    """Tell whether rings are the same from whichever point they begin; a last point that repeats the first is none."""
    left = [_opened(ring) for ring in other]
    for ring in map(_opened, one):
        turns = [(n, at) for n, its in enumerate(left) for at in range(0, len(its), 2)]
        same = next((n for n, at in turns if _near(ring, [*left[n][at:], *left[n][:at]])), None)
        if same is None:
            return False
        del left[same]
    return not left


def _opened(ring: Sequence[float]) -> Sequence[float]:
    return ring[:-2] if len(ring) > 6 and _near(ring[:2], ring[-2:]) else ring


# --- the tools ---


def _started(peer: Peer, python: Path, work: Workspace) -> Callable[[Case, Path, Path], Answer]:
    """Start a peer in a process of its own, and again after it has died of a data set."""
    own = work.folder(f"home-{peer.name}")
    env = foreign_environment() | {"HOME": str(own), "FIFTYONE_DATABASE_DIR": str(own / "db")}
    env |= {"FIFTYONE_DEFAULT_DATASET_DIR": str(own / "data"), "FIFTYONE_DO_NOT_TRACK": "true"}
    running: list[ToldProcess] = []

    def ask(case: Case, source: Path, out: Path) -> Answer:
        if not running:
            script = ROOT / "benchmarks" / "kinds" / "tools.py"
            running.append(ToldProcess(python, "-P", script, peer.name, env=env, log=own / "log"))
            work.stack.callback(running[-1].close)
        running[0].say(json.dumps({"format": case.format, "folder": str(source), "out": str(out)}))
        line = running[0].answer(ANSWER_TIMEOUT_S)
        if not line:
            running.pop().close()
            return {"things": [], "read": "died, or took five minutes", "wrote": ""}
        answer: Answer = json.loads(line)
        if "why" in answer:
            print(f"{peer}: {case.name}: {answer['read'] or answer['wrote']}: {answer['why']}", file=sys.stderr)
        things = (
            Thing(image, kind, label, tuple(map(pairs, numbers)), details(**told))
            for image, kind, label, numbers, told in answer["things"]
        )
        return answer | {"things": list(things)}

    return ask


OUR_FORMATS = {"metadata": "imagefolder", "voc-masks": "voc"}
ASKED_FOR = {"yolo-obb": "yolo-obb", "folders": "folders"}
"""Formats that no file tells, so that users name them with `--format`."""


def ours(case: Case, source: Path, out: Path) -> Answer:
    """Read a data set, write it back and export it, as `dsctl snapshot create`, `convert` and `export` do."""
    from datacache import api
    from datacache.conversion.targets import TARGETS
    from datacache.core.errors import DatacacheError

    name = "".join(letter if letter.isalnum() else "-" for letter in case.name).lower()
    to, format = OUR_FORMATS.get(case.format, case.format), ASKED_FOR.get(case.format)
    answer: Answer = {"things": [], "read": "", "wrote": ""}
    try:
        ref = api.create_snapshot(name, str(source)).ref
        with api.open_annotations(ref, processes=1, format=format) as (_, table):
            answer["things"] = list(_our_things(table))
    except DatacacheError as exc:
        print(f"ours: {case.name}: {exc}", file=sys.stderr)
        return answer | {"read": f"raised {type(exc).__name__}"}
    if to not in TARGETS:
        return answer | {"wrote": "no writer"}
    try:
        done = api.convert(ref, to=to, name=f"{name}-back", processes=1, format=format)
        api.export_snapshot(done.record.ref, out)
    except DatacacheError as exc:
        print(f"ours: {case.name}: {exc}", file=sys.stderr)
        return answer | {"wrote": f"raised {type(exc).__name__}"}
    for problem in done.report.problems:
        print(f"ours: {case.name}: {problem.action} {problem.code}: {problem.message}", file=sys.stderr)
    return answer


def _our_things(table: Any) -> Iterator[Thing]:
    from pycocotools import mask as rle

    from datacache.annotations.shapes.outline import Extra, Mask, Polygon, rings, unpack

    yield Thing("", "classes", ", ".join(table.meta["classes"]))
    skeletons = table.meta.get("skeletons", {})
    for label, (names, edges, *_) in skeletons.items():
        joined = ";".join(f"{a + 1}-{b + 1}" for a, b in edges)
        yield Thing("", "skeleton", label, details=details(names=",".join(names), edges=joined))
    for row in table.rows():
        if row.annotation is None:
            continue
        image = stem(row.annotation.path)
        yield from (Thing(image, "label", label) for label in row.annotation.labels)
        yield from (Thing(image, "caption", caption) for caption in row.annotation.captions)
        for box in row.annotation.boxes:
            extra = box.extra or Extra()
            told: dict[str, Any] = {flag: getattr(box, flag) for flag in ("difficult", "truncated", "occluded")}
            told |= {"track": extra.track + 1, "source": extra.author, "author": extra.author, **dict(box.attributes)}
            told |= {"group": extra.group} if extra.group >= 0 else {}
            told |= {"score": extra.score} if extra.score is not None else {}
            outline, kind = extra.outline, "box"
            numbers: tuple[tuple[float, ...], ...] = ((box.x1, box.y1, box.x2, box.y2),)
            if outline is not None and table.meta["format"] == "open-images":  # which has the two in files of their own
                yield Thing(image, kind, box.label, numbers, details(**told))
            if isinstance(outline, Polygon):
                numbers = tuple(pairs(unpack(ring)) for ring, _ in rings(outline))
                kind = "polygon" if len(numbers) == 1 else "parts"
            elif isinstance(outline, Mask):
                packed = {"size": [outline.height, outline.width], "counts": outline.counts}
                kind, numbers = "mask", of_bits(rle.decode(packed).astype(bool))
            elif outline is not None:
                kind, numbers = "rotated", (pairs(unpack(outline.corners)),)
            if outline is not None or not (extra.keypoints and table.meta["format"] in ("cvat", "labelme")):
                yield Thing(image, kind, box.label, numbers, details(**told))
            if extra.keypoints:
                points = unpack(extra.keypoints.points)
                found = (
                    v
                    for x, y, v in zip(points[::2], points[1::2], extra.keypoints.visible, strict=True)
                    for v in (x, y, v)
                )
                if box.label in skeletons and table.meta["format"] == "cvat":
                    told["names"] = ",".join(skeletons[box.label][0])
                yield Thing(image, "keypoints", box.label, (pairs(found),), details(**told))


# --- the tables ---


def report(every: Sequence[Case], rows: Mapping[str, Sequence[ThereAndBack]]) -> None:
    """Print what each tool did with each data set, and the sums."""
    table = ResultTable("What each read → what came back, of 40 data sets", "", *rows)
    for at, case in enumerate(every):
        table.row(case.name, *(str(found[at]) for found in rows.values()))
    table.print()
    columns = ("no reader", "raised", "read: sets", "things", "came back: sets", "things")
    sums = ResultTable("Sums", "", *columns)
    things = sum(row.of for row in rows[OURS])
    for tool, found in rows.items():
        read, back = ([row[which] for row in found if isinstance(row[which], Verdict)] for which in (1, 2))
        none = sum(row.read == "no reader" for row in found)
        raised = sum("raised" in str(row) or "died" in str(row) for row in found)
        cells = (f"{_all(read)}", _share(read, things), f"{_all(back)}", _share(back, things))
        sums.row(tool, f"{none}", f"{raised}", *cells)
    sums.print()


def _all(verdicts: Iterable[Any]) -> int:
    return sum(str(verdict) == "all" for verdict in verdicts)


def _share(verdicts: Iterable[Any], of: int) -> str:
    return f"{sum(verdict.right for verdict in verdicts)}/{of}"


if __name__ == "__main__":
    main()
