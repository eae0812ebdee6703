"""Evaluate a checked condition of `query` on whole columns at once, with NumPy, instead of row by row.

The source that `query.Program` made is read again with Python's parser and written anew: `and` becomes a call of
`np.logical_and`, and so on. Comparisons of texts become columns of truths: those of a path with what was typed are left
to the caller (`PathTest`), and the others stay as they are and are evaluated row by row. Nothing that was typed is ever
run. Used by `browser`; pure functions, any thread.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from datacache.annotations.query import FIELDS, TOO_LARGE, Column, Program
from datacache.core.errors import UsageError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class PathTest(NamedTuple):
    """A part of a condition that asks one thing of a path, a folder or a name."""

    field: str
    kind: str
    """`like`, `among` or `containing`."""
    texts: tuple[str, ...]
    """The pattern, the texts, or the text."""


class RowWise(NamedTuple):
    """A part of a condition that is evaluated row by row."""

    columns: tuple[Column, ...]
    run: Callable[[Sequence[Sequence[Any]]], list[bool]]
    """Takes the columns, of equal length."""
    test: PathTest | None = None
    """Tests all paths at once instead, where that is possible."""


class Vectorized:
    """A condition, and the columns it looks at."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self.row_wise: list[RowWise] = []
        """Their values come after those of `columns`."""
        tree = ast.parse(program.source, mode="eval")
        body = _Rewriter(self).visit(tree.body)
        self.columns: tuple[Column, ...] = tuple(
            column for column in program.columns if column.function != "field" or not _is_text(column)
        )
        """Numbers, and truths for `has`."""
        names = [self._name(column) for column in self.columns] + [f"r{n}" for n in range(len(self.row_wise))]
        self._run = _compiled(names, body, program.constants | _calls())

    def mask(self, columns: Sequence[NDArray[Any]], rows: int) -> NDArray[np.bool_]:
        """Return which of the rows are meant. `UsageError` for numbers that become too large."""
        import numpy as np

        try:
            with np.errstate(all="ignore"):
                found = self._run(*columns)
        except OverflowError as exc:
            raise UsageError(TOO_LARGE) from exc
        return np.broadcast_to(np.asarray(found, dtype=bool), (rows,))

    def hoist(self, node: ast.Compare) -> ast.expr:
        """Evaluate a part row by row, and return the name that its values have."""
        found = sorted(
            {int(each.id[1:]) for each in ast.walk(node) if isinstance(each, ast.Name) and each.id[0] == "c"}
        )
        columns = tuple(self._program.columns[n] for n in found)
        run = _compiled([f"c{n}" for n in found], node, self._program.constants)
        test = self._path_test(node) if len(node.ops) == 1 else None
        self.row_wise.append(RowWise(columns, lambda values: list(map(run, *values)), test))
        return ast.Name(f"r{len(self.row_wise) - 1}", ast.Load())

    def _path_test(self, node: ast.Compare) -> PathTest | None:
        """Return what a comparison asks; None for those that are no such question, or deny one."""
        constants, left, right = self._program.constants, node.left, node.comparators[0]
        asked: str | frozenset[str]
        if isinstance(left, ast.Call) and isinstance(left.func, ast.Name) and left.func.id in self._program.patterns:
            column, kind, asked = self.column(left.args[0]), "like", self._program.patterns[left.func.id]
        elif isinstance(node.ops[0], ast.In) and isinstance(left, ast.Name) and left.id in constants:
            column, kind, asked = self.column(right), "containing", constants[left.id]
        elif isinstance(node.ops[0], ast.In | ast.Eq) and isinstance(right, ast.Name) and right.id in constants:
            column, kind, asked = self.column(left), "among", constants[right.id]
        else:
            return None
        if column is None or not _is_path(column):
            return None
        return PathTest(column.name, kind, (asked,) if isinstance(asked, str) else tuple(asked))

    def has(self, constant: str) -> ast.expr:
        """Return the column that tells whether an image has the label that a constant names."""
        return ast.Name(self._program.column("has", self._program.constants[constant]), ast.Load())

    def column(self, node: ast.expr) -> Column | None:
        """Return the column that a name is of."""
        is_column = isinstance(node, ast.Name) and node.id[0] == "c"
        return self._program.columns[int(node.id[1:])] if is_column else None  # type: ignore[attr-defined]

    def _name(self, column: Column) -> str:
        return f"c{self._program.columns.index(column)}"


_OPPOSITE: Final[Mapping[type[ast.cmpop], type[ast.cmpop]]] = {ast.NotIn: ast.In, ast.NotEq: ast.Eq}


class _Rewriter(ast.NodeTransformer):
    def __init__(self, to: Vectorized) -> None:
        self._to = to

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.expr:
        first, *others = (self.visit(value) for value in node.values)
        for other in others:
            first = _call("both" if isinstance(node.op, ast.And) else "either", first, other)
        return first  # type: ignore[no-any-return]

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:
        operand = self.visit(node.operand)
        return _call("negated", operand) if isinstance(node.op, ast.Not) else ast.UnaryOp(node.op, operand)

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        found = [column for each in ast.walk(node) if (column := self._to.column(each)) is not None]  # type: ignore[arg-type]
        if any(map(_is_text, found)):
            return self._of_texts(node)
        terms = [self.visit(term) for term in (node.left, *node.comparators)]
        truths = [_comparison(*each) for each in zip(node.ops, terms, terms[1:], strict=False)]
        first, *others = truths
        for other in others:
            first = _call("both", first, other)
        return first

    def _of_texts(self, node: ast.Compare) -> ast.expr:
        right, left = node.comparators[0], node.left
        among = len(node.ops) == 1 and isinstance(node.ops[0], ast.In | ast.NotIn)
        labels = self._to.column(right)
        if (
            among
            and labels is not None
            and labels.name == "labels"
            and isinstance(left, ast.Name)
            and left.id[0] == "k"
        ):
            has = self._to.has(left.id)
            return has if isinstance(node.ops[0], ast.In) else _call("negated", has)
        if len(node.ops) == 1 and type(node.ops[0]) in _OPPOSITE:
            opposite = ast.Compare(left, [_OPPOSITE[type(node.ops[0])]()], [right])
            return _call("negated", self._to.hoist(opposite))
        return self._to.hoist(node)


def _comparison(op: ast.cmpop, left: ast.expr, right: ast.expr) -> ast.expr:
    if not isinstance(op, ast.In | ast.NotIn):
        return ast.Compare(left, [op], [right])
    found = _call("among", left, right)
    return found if isinstance(op, ast.In) else _call("negated", found)


def _call(name: str, *arguments: ast.expr) -> ast.expr:
    return ast.Call(ast.Name(name, ast.Load()), list(arguments), [])


def _is_path(column: Column) -> bool:
    return column.function == "field" and FIELDS.get(column.name, ("number",))[0] == "text"


def _is_text(column: Column) -> bool:
    return column.function == "field" and FIELDS.get(column.name, ("number",))[0] in ("text", "labels")


def _compiled(names: Sequence[str], body: ast.expr, values: dict[str, Any]) -> Callable[..., Any]:
    arguments = ast.arguments([], [ast.arg(name) for name in names], None, [], [], None, [])
    tree = ast.fix_missing_locations(ast.Expression(ast.Lambda(arguments, body)))
    return eval(compile(tree, "<condition>", "eval"), values)  # type: ignore[no-any-return]  # noqa: S307 - made above


def _calls() -> dict[str, Callable[..., Any]]:
    import numpy as np

    def unless_zero(function: Any) -> Callable[[Any, Any], Any]:
        return lambda a, b: np.where(np.equal(b, 0), np.nan, function(np.asarray(a, float), b))

    def among(values: Any, constant: Any) -> Any:
        # Texts can only be constants here, as numbers may be.
        return np.isin(values, list(constant)) if isinstance(constant, frozenset) else values in constant

    return {
        "both": np.logical_and,
        "either": np.logical_or,
        "negated": np.logical_not,
        "among": among,
        "div": unless_zero(np.divide),
        "floordiv": unless_zero(np.floor_divide),
        "mod": unless_zero(np.mod),
    }
