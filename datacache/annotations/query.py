"""Find images by what is annotated in them: labels, numbers of objects, a condition.

A query is compiled to one function over the columns of a range's summary, so that 100,000 images take some hundredths
of a second; boxes are decoded only for the fields that need them. Used by `dsctl query`, previews and subsets. A query
is a plain value; any thread.

A condition is `width >= 640 and count("no_mask") > 1`: a part of Python's expressions, read with Python's own parser
and checked node by node: comparisons, `and`, `or`, `not`, `in`, arithmetic, and three functions. A checked condition
becomes source text made here, of operators, and of names for columns and constants only, which Python compiles: nothing
that was typed is ever run. Every value has one of five kinds, and what cannot be meant (`width > "large"`) is an error
with its position, not a surprise. A number that does not exist (`min_side` of an image without boxes, a division by
zero) compares as false with all.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from fnmatch import translate
from functools import partial
from itertools import islice
from math import inf, nan
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from datacache.annotations.table.columns import as_float64
from datacache.annotations.table.ranges import (
    ANNOTATED,
    UNUSABLE,
    Summary,
    box_sizes,
    object_areas,
    with_attribute,
)
from datacache.annotations.table.shapes import SHAPED
from datacache.annotations.table.table import ImageSummary, Table
from datacache.core.errors import UsageError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

FIELDS: Final[Mapping[str, tuple[str, str]]] = {
    "path": ("text", "the image's path"),
    "folder": ("text", "its folder, without a slash at the end"),
    "name": ("text", "its name without folders"),
    "width": ("number", "of the image, in pixels"),
    "height": ("number", "of the image, in pixels"),
    "area": ("number", "width * height"),
    "aspect": ("number", "width / height"),
    "objects": ("number", "how many boxes it has"),
    "difficult": ("number", "how many of them are difficult"),
    "truncated": ("number", "how many of them are truncated"),
    "occluded": ("number", "how many of them are occluded"),
    "polygons": ("number", "how many of them have a polygon as outline"),
    "masks": ("number", "how many of them have a mask"),
    "rotated": ("number", "how many of them are rotated boxes"),
    "vertices": ("number", "how many points its polygons and rotated boxes have together"),
    "keypoints": ("number", "how many keypoints are there, hidden ones included"),
    "labels": ("labels", 'all its labels, for: "mask" in labels'),
    "annotated": ("condition", "whether an annotation was found for it, be it one without objects"),
    "min_side": ("number", "the shortest side of its boxes, in pixels"),
    "max_side": ("number", "the longest side of its boxes, in pixels"),
    "min_area": (
        "number",
        "the area of its smallest object, of its outline or else its box, as a part of the image from 0 to 1",
    ),
    "max_area": ("number", "the same of its largest object"),
}
"""Name → kind of its values, and what it is."""
BOX_FIELDS: Final = frozenset({"min_side", "max_side", "min_area", "max_area"})
"""Those for which boxes must be decoded."""
OF_DETAILS: Final = ("attribute", "boxes")
"""Functions whose columns are read from details."""
BOX_MEASURES: Final[Mapping[str, str]] = {
    "side": "its shorter side, in pixels",
    "area": "its area, as a part of the image from 0 to 1",
    "aspect": "its width / height",
}
"""The measures that `boxes` takes."""
HINT: Final = (
    f'Fields: {", ".join(FIELDS)}. Functions: count("label"), has("label"), attribute("colour"), '
    'attribute("colour", "red"), boxes("side", 8, 16), like(path, "*.png"). '
    "Operators: < <= > >= == != in, and or not, + - * / // %."
)
TOO_LARGE: Final = "the numbers in the condition become too large"
_MAX_CHARACTERS, _MAX_DEPTH = 4_000, 90
_LARGEST: Final = 1e300
_COMPARISONS: Final[Mapping[type[ast.cmpop], str]] = {
    ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=",
    ast.In: "in", ast.NotIn: "not in",
}  # fmt: skip
_ARITHMETIC: Final[Mapping[type[ast.operator], str]] = {
    ast.Add: "({} + {})", ast.Sub: "({} - {})", ast.Mult: "({} * {})",
    ast.Div: "div({}, {})", ast.FloorDiv: "floordiv({}, {})", ast.Mod: "mod({}, {})",
}  # fmt: skip
_OTHER_LANGUAGES: Final = (("&&", "and"), ("||", "or"), ("<>", "!="))


class Column(NamedTuple):
    """A column that a condition needs: a field, of a label the numbers of boxes (`count`) or whether it is there
    (`has`), the number of boxes with an `attribute`, or of `boxes` of some size or shape."""

    function: str
    """`field`, `count`, `has`, `attribute` or `boxes`."""
    name: str
    value: str | None = None
    """Of an attribute; None: any. Of boxes the least number, and the one they stay below."""

    @property
    def bounds(self) -> tuple[float, float]:
        """Return the bounds of `boxes`."""
        low, high = map(float, (self.value or "").split())
        return low, high


class Term(NamedTuple):
    """A checked part of a condition."""

    source: str
    kind: str
    """`number`, `text`, `condition`, `labels`, `texts` or `numbers`."""


class Program:
    """Conditions that must all hold, and the columns they look at."""

    def __init__(self) -> None:
        self.columns: list[Column] = []
        self.constants: dict[str, Any] = {**_CALLS, "__builtins__": {}}
        """The names that the source may use besides columns."""
        self.patterns: dict[str, str] = {}
        """Of `like`, by the names of the constants that match them."""
        self._conditions: list[str] = []

    @property
    def source(self) -> str:
        """Return all conditions as one expression."""
        return " and ".join(f"({source})" for source in self._conditions) or "True"

    def column(self, function: str, name: str, value: str | None = None) -> str:
        """Return the name that a column has in the source."""
        column = Column(function, name, value)
        if column not in self.columns:
            self.columns.append(column)
        return f"c{self.columns.index(column)}"

    def constant(self, value: Any) -> str:
        """Return the name that a constant has in the source."""
        name = f"k{len(self.constants)}"
        self.constants[name] = value
        return name

    def add(self, source: str) -> None:
        """Add one more condition: operators, and names from `column` and `constant`."""
        self._conditions.append(source)

    def compile(self) -> Callable[[Sequence[Sequence[Any]]], list[int]]:
        """Compile the function from columns (of equal length, in the order of `columns`) to the positions where all
        holds."""
        names = "".join(f"c{n}, " for n in range(len(self.columns)))
        source = f"lambda rows: [row for row, ({names}) in rows if {self.source}]"
        select = eval(compile(source, "<condition>", "eval"), self.constants)  # noqa: S307 - made above

        def run(columns: Sequence[Sequence[Any]]) -> list[int]:
            try:
                found: list[int] = select(enumerate(zip(*columns, strict=True)))
            except OverflowError as exc:
                raise UsageError(TOO_LARGE) from exc
            return found

        return run


def _unknown_label(label: str, labels: Collection[str]) -> UsageError:
    """Return the error for a label that is not there, with those that are."""
    import difflib

    same = [known for known in labels if known.strip().casefold() == label.strip().casefold()]
    close = same or difflib.get_close_matches(label, labels, 1)
    meant = f"; did you mean {close[0]!r}?" if close else ""
    listed = ", ".join(sorted(labels)[:40]) + (f" and {len(labels) - 40:,} more" if len(labels) > 40 else "")
    return UsageError(
        f"there is no label {label!r}{meant}", hint=f"There are: {listed}." if labels else "There are no labels at all."
    )


class _Checker:
    """Walks over what Python's parser read, and writes the source anew. `labels` are those there are: another one in
    the condition is a mistake."""

    def __init__(self, program: Program, text: str, labels: Collection[str]) -> None:
        self._program = program
        self._text = text.replace("\n", " ").strip()
        self._labels = labels
        self._depth = 0

    def check(self) -> None:
        """Check the condition and add it to the program. `UsageError` with the position if it cannot be understood."""
        if len(self._text) > _MAX_CHARACTERS:
            raise UsageError(f"a condition of {len(self._text):,} characters is too long (at most {_MAX_CHARACTERS:,})")
        try:
            with warnings.catch_warnings(action="ignore"):
                tree = ast.parse(self._text, mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as exc:
            raise self._syntax(exc) from None
        self._program.add(self._want(tree, "condition"))

    def _syntax(self, exc: Exception) -> UsageError:
        for theirs, ours in _OTHER_LANGUAGES:
            if theirs in self._text:
                return self._error(f"{theirs} is written {ours!r} here", self._text.index(theirs) + 1)
        if isinstance(exc, ValueError):
            return UsageError(f"the condition {self._text!r} has characters that are no text", hint=HINT)
        if not isinstance(exc, SyntaxError):
            return self._error("it is nested too deeply", 1)
        single = re.search(r"(?<![<>=!])=(?!=)", self._text)
        if single:
            return self._error("'=' is written '==' here", single.start() + 1)
        return self._error(exc.msg, min(exc.offset or len(self._text) + 1, len(self._text) + 1))

    def _error(self, message: str, at: ast.expr | int, hint: str = HINT) -> UsageError:
        if not isinstance(at, int):
            at = len(self._text.encode()[: at.col_offset].decode()) + 1  # the parser counts bytes
        return UsageError(f"{message} (in the condition {self._text!r}, at column {at})", hint=hint)

    def _written(self, node: ast.expr) -> str:
        text = ast.get_source_segment(self._text, node) or ""
        return text if len(text) <= 60 else f"{text[:59]}…"

    def _want(self, node: ast.expr, kind: str) -> str:
        """Return the source of a node that must have this kind."""
        found = self._term(node)
        if found.kind == kind:
            return found.source
        if kind == "condition":
            example = {"number": " > 0", "text": ' == "…"'}.get(found.kind, "")
            written = self._written(node)
            raise self._error(
                f"{written} is a {found.kind}, not a condition" + (f"; write {written}{example}" if example else ""),
                node,
            )
        raise self._error(f"{self._written(node)} is a {found.kind}, and a {kind} is needed", node)

    def _term(self, node: ast.expr) -> Term:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise self._error("it is nested too deeply", node)
        found = self._checked(node)
        self._depth -= 1
        return found

    def _checked(self, node: ast.expr) -> Term:
        match node:
            case ast.BoolOp(op=op, values=values):
                word = " and " if isinstance(op, ast.And) else " or "
                return Term(f"({word.join(self._want(value, 'condition') for value in values)})", "condition")
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return Term(f"(not {self._want(operand, 'condition')})", "condition")
            case ast.UnaryOp(op=ast.USub() | ast.UAdd() as op, operand=operand):
                sign = "-" if isinstance(op, ast.USub) else "+"
                return Term(f"({sign}{self._want(operand, 'number')})", "number")
            case ast.BinOp(left=left, op=op, right=right):
                return self._arithmetic(node, left, op, right)
            case ast.Compare():
                return self._comparison(node)
            case ast.Constant(value=bool() as value):
                return Term(str(value), "condition")
            case ast.Constant(value=int() | float() as value):
                return Term(self._program.constant(value), "number")
            case ast.Constant(value=str() as value):
                return Term(self._program.constant(value), "text")
            case ast.Tuple(elts=items) | ast.List(elts=items) | ast.Set(elts=items) if items:
                return self._several(node, items)
            case ast.Name(id=name):
                return self._field(node, name)
            case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]):
                return self._call(node, name, arguments)
        raise self._error(f"{self._written(node)} has no meaning here", node)

    def _arithmetic(self, node: ast.expr, left: ast.expr, op: ast.operator, right: ast.expr) -> Term:
        form = _ARITHMETIC.get(type(op))
        if form is None:
            raise self._error(f"{self._written(node)} uses an operator that is not known here", node)
        return Term(form.format(self._want(left, "number"), self._want(right, "number")), "number")

    def _comparison(self, node: ast.Compare) -> Term:
        terms = [self._term(item) for item in (node.left, *node.comparators)]
        source = terms[0].source
        for op, left, right, at in zip(node.ops, terms, terms[1:], node.comparators, strict=False):
            if type(op) not in _COMPARISONS:
                raise self._error("'is' has no meaning here; write ==", node)
            if isinstance(op, ast.In | ast.NotIn):
                self._check_in(node, left, right)
            elif left.kind != right.kind or left.kind not in ("number", "text"):
                raise self._error(f"a {left.kind} cannot be compared with a {right.kind}", at)
            source += f" {_COMPARISONS[type(op)]} {right.source}"
        return Term(f"({source})", "condition")

    def _check_in(self, node: ast.Compare, left: Term, right: Term) -> None:
        if right.kind not in {"text": ("text", "labels", "texts"), "number": ("numbers",)}.get(left.kind, ()):
            raise self._error(f"a {left.kind} cannot be in a {right.kind}", node)
        if right.kind == "labels" and isinstance(node.left, ast.Constant):
            self._check_label(node.left)

    def _several(self, node: ast.expr, items: Sequence[ast.expr]) -> Term:
        values = [item.value for item in items if isinstance(item, ast.Constant)]
        for kind, types in (("texts", str), ("numbers", int | float)):
            if len(values) == len(items) and all(isinstance(value, types) for value in values):
                return Term(self._program.constant(frozenset(values)), kind)
        raise self._error("only texts, or only numbers, can stand in a list", node)

    def _field(self, node: ast.expr, name: str) -> Term:
        if name in FIELDS:
            return Term(self._program.column("field", name), FIELDS[name][0])
        import difflib

        if name in self._labels:
            raise self._error(f'there is no field {name!r}; for the label, write has("{name}")', node)
        close = difflib.get_close_matches(name, FIELDS, 1)
        raise self._error(f"there is no field {name!r}" + (f"; did you mean {close[0]!r}?" if close else ""), node)

    def _call(self, node: ast.expr, name: str, arguments: Sequence[ast.expr]) -> Term:
        match name, arguments:
            case (("count" | "has"), [ast.Constant(value=str() as label) as at]):
                self._check_label(at)
                return Term(self._program.column(name, label), "number" if name == "count" else "condition")
            case "attribute", [ast.Constant(value=str() as key)]:
                return Term(self._program.column(name, key), "number")
            case "attribute", [ast.Constant(value=str() as key), ast.Constant(value=str() as value)]:
                return Term(self._program.column(name, key, value), "number")
            case "boxes", [ast.Constant(value=str() as measure), *bounds] if measure in BOX_MEASURES:
                numbers = [_bound(each) for each in bounds]
                if len(numbers) in (1, 2) and None not in numbers:
                    low, high = [*numbers, inf][:2]
                    return Term(self._program.column(name, measure, f"{low!r} {high!r}"), "number")
            case "like", [text, ast.Constant(value=str() as pattern)]:
                matches = self._program.constant(re.compile(translate(pattern)).match)
                self._program.patterns[matches] = pattern
                return Term(f"({matches}({self._want(text, 'text')}) is not None)", "condition")
        usage = {
            "count": 'count("label")',
            "has": 'has("label")',
            "attribute": 'attribute("colour") or attribute("colour", "red")',
            "boxes": f'boxes("side", 8, 16) or boxes("side", 512), and with {", ".join(BOX_MEASURES)}',
            "like": 'like(path, "*.png")',
        }
        if name in usage:
            raise self._error(f"{name} is used so: {usage[name]}", node)
        raise self._error(f"there is no function {name!r}", node)

    def _check_label(self, node: ast.Constant) -> None:
        if node.value not in self._labels:
            error = _unknown_label(str(node.value), self._labels)
            raise self._error(error.message, node, error.hint)


def _bound(node: ast.expr) -> float | None:
    value = node.value if isinstance(node, ast.Constant) else None
    return float(min(value, _LARGEST)) if isinstance(value, int | float) and not isinstance(value, bool) else None


_CALLS: Final[Mapping[str, Callable[[float, float], float]]] = {
    "div": lambda a, b: a / b if b else nan,
    "floordiv": lambda a, b: a // b if b else nan,
    "mod": lambda a, b: a % b if b else nan,
}


_DETAILS_AHEAD = 32
_Select = Callable[[Sequence[Sequence[Any]]], list[int]]
_Found = Iterator[tuple[Summary, list[int]]]


@dataclass(frozen=True, kw_only=True)
class Query:
    """Which images are meant. Images that cannot be used never are."""

    labels: tuple[str, ...] = ()
    """Labels an image must have, on a box or as a whole: all of them, or with `any_label` one."""
    any_label: bool = False
    min_objects: int | None = None
    """At least so many boxes: of each label in `labels` (with `any_label`: of one), or of all where none is given."""
    max_objects: int | None = None
    """At most so many, counted in the same way."""
    where: str = ""
    """A condition."""

    def __post_init__(self) -> None:
        for name, number in (("min_objects", self.min_objects), ("max_objects", self.max_objects)):
            if number is not None and number < 0:
                raise UsageError(f"{name} cannot be {number}", hint="Give a number from 0 on.")

    def as_json(self) -> dict[str, Any]:
        """Return what is asked for, for lineage."""
        asked = {name: value for name, value in asdict(self).items() if value is not None and value not in ((), "")}
        if self.labels:
            asked["labels"] = list(self.labels)
        if not self.any_label:
            del asked["any_label"]
        return asked


def find(table: Table, query: Query) -> Iterator[ImageSummary]:
    """Return the images a query means, in the byte order of their paths. `UsageError` at once for a label that the
    table does not have, and for a condition that cannot be understood."""
    return (
        ImageSummary(paths[row], widths[row], heights[row], objects[row], labels[row])
        for summary, rows in _select(table, query)
        for paths, widths, heights in [(summary.paths(), summary.widths(), summary.heights())]
        for objects, labels in [(summary.objects(), summary.counts())]
        for row in rows
    )


def find_paths(table: Table, query: Query) -> Iterator[str]:
    """Return the paths alone, which is faster."""
    return (paths[row] for summary, rows in _select(table, query) for paths in [summary.paths()] for row in rows)


def count(table: Table, query: Query) -> int:
    """Count the images."""
    return sum(len(rows) for _, rows in _select(table, query))


def _select(table: Table, query: Query) -> _Found:
    """Find the rows that are meant, of each range that has some. Mistakes are found before the first range is read."""
    program = make_program(table, query)
    return _evaluate(table, query, program.columns, program.compile())


def make_program(table: Table, query: Query) -> Program:
    """Return the conditions that a query means. `UsageError` as in `find`."""
    program = Program()
    program.add(f"{program.column('field', 'state')} != {UNUSABLE}")
    for label in query.labels:
        if label not in table.labels:
            raise _unknown_label(label, table.labels)
    if query.labels:
        word = " or " if query.any_label else " and "
        of_each = (
            [program.column("has", label), *_bounds(program, program.column("count", label), query)]
            for label in query.labels
        )
        program.add(word.join(f"({' and '.join(conditions)})" for conditions in of_each))
    else:
        bounds = _bounds(program, program.column("field", "objects"), query)
        program.add(" and ".join(bounds) or "True")
    if query.where.strip():
        _Checker(program, query.where, table.labels).check()
    return program


class _WithoutLabels(_Checker):
    """Knows of no label whether it is there."""

    def _check_label(self, node: ast.Constant) -> None:
        pass


def check_condition(where: str) -> None:
    """Check all of a condition but which labels there are. `UsageError` as in a query."""
    if where.strip():
        _WithoutLabels(Program(), where, ()).check()


def _bounds(program: Program, number: str, query: Query) -> list[str]:
    bounds = []
    if query.min_objects is not None:
        bounds.append(f"{number} >= {program.constant(query.min_objects)}")
    if query.max_objects is not None:
        bounds.append(f"{number} <= {program.constant(query.max_objects)}")
    return bounds


def _evaluate(table: Table, query: Query, columns: Sequence[Column], select: _Select) -> _Found:
    of_sizes = any(column.function == "field" and column.name in BOX_FIELDS for column in columns)
    attributes = [column for column in columns if column.function in OF_DETAILS]
    summaries = table.summaries(query.labels, any_label=query.any_label)
    while part := list(islice(summaries, _DETAILS_AHEAD)):
        details = table.details([number for number, _ in part]) if of_sizes or attributes else {}
        for number, summary in part:
            of_boxes: dict[Column, list[float]] = {}
            if of_sizes:
                fields = box_columns(details[number], summary)
                of_boxes = {Column("field", name): values.tolist() for name, values in fields.items()}
            for column in attributes:
                of_boxes[column] = detail_column(details[number], summary, column)
            rows = select([of_boxes[each] if each in of_boxes else column_of(summary, each) for each in columns])
            if rows:
                yield summary, rows


def column_of(summary: Summary, column: Column) -> Sequence[Any]:
    """Return the values of a column for all rows of a range, where they are in its summary."""
    if column.function != "field":
        numbers = [0] * summary.rows
        there = [False] * summary.rows
        for row, boxes in summary.of_label(column.name):
            numbers[row], there[row] = boxes, True
        return numbers if column.function == "count" else there
    return _FIELDS[column.name](summary)


_FIELDS: dict[str, Callable[[Summary], Sequence[Any]]] = {
    "state": Summary.states,
    "annotated": lambda summary: [state == ANNOTATED for state in summary.states()],
    "path": Summary.paths,
    "folder": lambda summary: [path.rpartition("/")[0] for path in summary.paths()],
    "name": lambda summary: [path.rpartition("/")[2] for path in summary.paths()],
    "width": Summary.widths,
    "height": Summary.heights,
    "area": lambda summary: [w * h for w, h in zip(summary.widths(), summary.heights(), strict=True)],
    "aspect": lambda summary: [w / (h or 1) for w, h in zip(summary.widths(), summary.heights(), strict=True)],
    "objects": Summary.objects,
    "difficult": lambda summary: summary.flagged("difficult"),
    "truncated": lambda summary: summary.flagged("truncated"),
    "occluded": lambda summary: summary.flagged("occluded"),
    "labels": Summary.counts,
    **{name: partial(Summary.shaped, name=name) for name in SHAPED},
}


def detail_column(parts: Sequence[bytes], summary: Summary, column: Column) -> list[float]:
    """Return a column of `OF_DETAILS` for all images of a range."""
    import numpy as np

    if column.function == "attribute":
        return with_attribute(parts, summary, column.name, column.value)
    (low, high), values = column.bounds, box_measures(parts, summary)[column.name]
    before = np.append(0, np.cumsum((values >= low) & (values < high)))
    ends = before[np.cumsum(as_float64(summary.objects()).astype(np.intp))]
    numbers: list[float] = np.diff(ends, prepend=0).tolist()
    return numbers


def box_measures(parts: Sequence[bytes], summary: Summary) -> dict[str, NDArray[np.float64]]:
    """Return `BOX_MEASURES` of all boxes of a range, in the order of its images."""
    import numpy as np

    widths, heights = box_sizes(parts, summary)
    images = as_float64(summary.widths()) * as_float64(summary.heights())
    of_box = np.maximum(np.repeat(images, as_float64(summary.objects()).astype(np.intp)), 1)
    tiny = np.finfo(float).tiny
    return {
        "side": np.minimum(widths, heights),
        "area": widths * heights / of_box,
        "aspect": widths / np.maximum(heights, tiny),
    }


def box_columns(parts: Sequence[bytes], summary: Summary) -> dict[str, NDArray[np.float64]]:
    """Return `BOX_FIELDS` of each image of a range; nan where it has no boxes."""
    import numpy as np

    widths, heights = box_sizes(parts, summary)
    objects = as_float64(summary.objects()).astype(np.intp)
    images = as_float64(summary.widths()) * as_float64(summary.heights())
    areas = object_areas(parts, summary) / np.repeat(images, objects)
    having = objects > 0
    starts = (np.cumsum(objects) - objects)[having]
    found = {}
    for name, values, reduce in (
        ("min_side", np.minimum(widths, heights), np.minimum),
        ("max_side", np.maximum(widths, heights), np.maximum),
        ("min_area", areas, np.minimum),
        ("max_area", areas, np.maximum),
    ):
        column = np.full(len(objects), np.nan)
        if len(starts):
            column[having] = reduce.reduceat(values, starts)
        found[name] = column
    return found
