"""Unpickle what a catalog keeps, and nothing that could run code of others.

Whoever may write into a catalog can write a pickle. Of a pickle only values are made: named tuples and enumerations of
ours, errors, arrays, paths, and what `_OURS` lists. Whoever needs more to travel adds it there, and looks first whether
making it, with any arguments and attributes, does harm. Pure functions, any thread.
"""

from __future__ import annotations

import enum
import io
import pickle
import sys
from typing import Any

from datacache.core.errors import DatacacheError

_OURS = frozenset(
    {
        "datacache.api.opening.open_snapshot",
        "datacache.catalog.objects._ElsewhereWriter",
        "datacache.catalog.verify.RangesReader",
        "datacache.conversion.dedupe._Hasher",
        "datacache.conversion.files.Files",
        "datacache.conversion.files._new_threads",
        "datacache.conversion.images._Worker",
        "datacache.conversion.images._new_threads",
        "datacache.conversion.index._Reader",
        "datacache.conversion.operations.Operations",
        "datacache.core.concurrency.PerProcess",
        "datacache.core.errors._rebuild",
        "datacache.settings._elsewhere",
        "datacache.shards.place._elsewhere",
        "datacache.shards.writer.ShardWriter",
    }
)
_OTHERS = frozenset(
    {
        *(f"builtins.{name}" for name in ("bytearray", "complex", "frozenset", "range", "set", "slice")),
        *(f"collections.{name}" for name in ("Counter", "OrderedDict", "deque")),
        *(f"datetime.{name}" for name in ("date", "datetime", "timedelta", "timezone")),
        *(f"pathlib.{name}" for name in ("Path", "PosixPath", "PurePath", "PurePosixPath")),
        *(f"pathlib._local.{name}" for name in ("Path", "PosixPath", "PurePath", "PurePosixPath")),
        "numpy.dtype",
        "numpy.ndarray",
        *(f"numpy._core.{name}" for name in ("multiarray._reconstruct", "multiarray.scalar", "numeric._frombuffer")),
        *(f"numpy.core.{name}" for name in ("multiarray._reconstruct", "multiarray.scalar", "numeric._frombuffer")),
    }
)


class UntrustedPickleError(DatacacheError, pickle.UnpicklingError):
    """A pickle in the catalog that names what may not travel."""


def loads(data: bytes) -> Any:
    """Return the value of a pickle. `UntrustedPickleError` where it names anything but values, before that is touched,
    and where it is damaged. Raises what opening a snapshot raises."""
    try:
        return _Unpickler(io.BytesIO(data)).load()
    except DatacacheError:
        raise
    except Exception as exc:
        raise UntrustedPickleError(f"a pickle in the catalog is damaged: {type(exc).__name__}: {exc}") from exc


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        whole = f"{module}.{name}"
        if whole in _OTHERS or whole in _OURS:
            return super().find_class(module, name)
        if (found := _value_class(module, name)) is not None:
            return found
        raise UntrustedPickleError(
            f"a pickle in the catalog names {whole}, which may not travel",
            hint="Somebody else has written it, or another version of datacache. Who may write into the catalog?",
        )


def _value_class(module: str, name: str) -> type | None:
    """Return a class that is only of values: ours, or an error of Python's."""
    if module != "builtins":
        if not module.startswith("datacache."):
            return None
        try:
            __import__(module)
        except ImportError:
            return None
    found = getattr(sys.modules[module], name, None)  # of a name with dots, which leads elsewhere, nothing
    if not isinstance(found, type) or (found.__module__, found.__qualname__) != (module, name):
        return None
    if issubclass(found, Exception):
        return found if module == "builtins" or issubclass(found, DatacacheError) else None
    return (
        found if issubclass(found, enum.Enum) or (found.__bases__ == (tuple,) and hasattr(found, "_fields")) else None
    )
