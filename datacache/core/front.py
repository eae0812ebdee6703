"""The fronts of packages: names that are imported when they are first used, so that importing a front costs nothing.

A front lists its names once, as imports below `if TYPE_CHECKING:`, where type checkers and editors look. So a front
needs its source when it is imported, from a folder or a zip: a copy that has only `.pyc` files raises `ImportError`. No
state; any thread.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from importlib import import_module


def front(name: str) -> tuple[Callable[[str], object], list[str]]:
    """Return the `__getattr__` and `__all__` of the module `name`, by its imports for type checkers.

    There `from m import a as a` offers `a`; after `from m import n as _n`, the assignment `b = _n.c` offers `b`. Names
    that begin with an underscore are not offered.
    """
    places: dict[str, tuple[str, str]] = {}  # name → module and the name there, '' for the module itself
    for block in ast.parse(_source(name)).body:
        for line in block.body if isinstance(block, ast.If) else ():
            if isinstance(line, ast.ImportFrom):
                places |= {alias.asname or alias.name: (line.module or "", alias.name) for alias in line.names}
            elif isinstance(line, ast.Import):
                places |= {alias.asname or alias.name: (alias.name, "") for alias in line.names}
            elif isinstance(line, ast.Assign):
                module, _, there = ast.unparse(line.value).partition(".")
                places[ast.unparse(line.targets[0])] = ".".join(filter(None, places[module])), there

    def get(attribute: str) -> object:
        if attribute.startswith("_") or attribute not in places:
            raise AttributeError(f"module {name!r} has no attribute {attribute!r}")
        module, there = places[attribute]
        return getattr(import_module(module), there)

    return get, [attribute for attribute in places if not attribute.startswith("_")]


def _source(name: str) -> str:
    spec = sys.modules[name].__spec__
    source: str | None = getattr(spec and spec.loader, "get_source", lambda _: None)(name)
    if source is None:
        raise ImportError(f"{name} needs its source, and this copy has only .pyc files: install it with its .py files")
    return source
