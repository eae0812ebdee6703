"""Unpickle what a catalog keeps, and nothing that could run code of others.

Whoever may write into a catalog can write a pickle. Of a pickle only values are made: named tuples and enumerations of
ours, errors, arrays, paths, and what `_OURS` lists. Whoever needs more to travel adds it there, and looks first whether
making it, with any arguments and attributes, does harm.

A pickle can also give new attributes to what it names, so to a class, a function, or the settings of this process, for
good. So values are made by stand-ins for their classes, which take no attributes. What names our code is unpickled by
Python's own unpickler, here one that gives attributes only to new objects of `_OURS`. It is slow, and code is small.

Arrays travel as `core.engine` pickles them. Numpy's own pickles are refused: they can make an array of any addresses.
What loads models runs code that the client names, and travels only to workers that are told so. Pure functions, any
thread.
"""

from __future__ import annotations

import enum
import io
import pickle
import sys
from functools import cache
from typing import Any, ClassVar

from datacache.core.errors import DatacacheError, UsageError, _rebuild

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
        "datacache.imports.fetching._elsewhere",
        "datacache.settings._elsewhere",
        "datacache.shards.place._elsewhere",
        "datacache.shards.writer.ShardWriter",
    }
)
_MODELS = frozenset({"datacache.api.weights.weights_path", "datacache.models.predicting.elsewhere.ModelWorker"})
_OTHERS = frozenset(
    {
        *(f"builtins.{name}" for name in ("bytearray", "complex", "frozenset", "range", "set", "slice")),
        *(f"collections.{name}" for name in ("Counter", "OrderedDict", "deque")),
        *(f"datetime.{name}" for name in ("date", "datetime", "timedelta", "timezone")),
        *(f"pathlib.{name}" for name in ("Path", "PosixPath", "PurePath", "PurePosixPath")),
        *(f"pathlib._local.{name}" for name in ("Path", "PosixPath", "PurePath", "PurePosixPath")),
        "datacache.core.engine._array",
    }
)


class UntrustedPickleError(DatacacheError, pickle.UnpicklingError):
    """A pickle in the catalog that names what may not travel, or changes what it may only name."""


def loads(data: bytes, *, models: bool = False) -> Any:
    """Return the value of a pickle. `UntrustedPickleError` where it names anything but values, before that is touched,
    and where it is damaged; `UsageError` where it is to load a model and `models` does not say that it may. Raises what
    opening a snapshot raises."""
    try:
        try:
            return _Unpickler(io.BytesIO(data)).load()
        except _OursError:
            return _CodeUnpickler(io.BytesIO(data), models).load()
    except DatacacheError:
        raise
    except Exception as exc:
        raise UntrustedPickleError(f"a pickle in the catalog is damaged: {type(exc).__name__}: {exc}") from exc


class _OursError(Exception):
    """A pickle names code of ours."""


class _Unpickler(pickle.Unpickler):
    """Makes values by stand-ins."""

    def find_class(self, module: str, name: str) -> Any:
        whole = f"{module}.{name}"
        if whole in _OURS or whole in _MODELS:
            raise _OursError
        if whole == _REBUILD:
            return _stand_in(_rebuild_error)
        if whole in _OTHERS:
            return _stand_in(super().find_class(module, name))
        if (found := _value_class(module, name)) is None:
            raise _refused(whole)
        if issubclass(found, enum.Enum):
            raise _OursError  # members are there once, and take attributes
        return found if issubclass(found, Exception) else _stand_in(found)


_PythonUnpickler: Any = pickle._Unpickler  # noqa: SLF001 - C's gives attributes to anything


class _CodeUnpickler(_PythonUnpickler):  # type: ignore[misc]
    """Names `_OURS` as well, and `_MODELS` where it may. Calls what it names, and nothing else."""

    dispatch: ClassVar[dict[int, Any]] = dict(_PythonUnpickler.dispatch)

    def __init__(self, file: io.BytesIO, models: bool) -> None:
        super().__init__(file)
        self._known = _OURS | _MODELS if models else _OURS
        self._named: list[Any] = []

    def find_class(self, module: str, name: str) -> Any:
        whole = f"{module}.{name}"
        if whole in self._known or whole in _OTHERS:
            found = super().find_class(module, name)
        elif whole in _MODELS:
            raise UsageError(
                "a worker of the queue may load no models, and was asked to",
                hint="Start all of them with --allow-models, if you trust whoever may write into the catalog.",
            )
        elif whole == _REBUILD:
            found = _rebuild_error
        elif (found := _value_class(module, name)) is None:
            raise _refused(whole)
        self._named.append(found)
        return found

    def load_reduce(self) -> None:
        if not any(self.stack[-2] is named for named in self._named):
            raise UntrustedPickleError("a pickle in the catalog calls what it does not name")
        super().load_reduce()

    def load_build(self) -> None:
        target, state = self.stack[-2:]
        kind = type(target)
        if isinstance(target, Exception):
            if not isinstance(state, dict):
                raise UntrustedPickleError("a pickle in the catalog has an error without attributes")
        elif (
            f"{kind.__module__}.{kind.__qualname__}" not in _OURS
            or not isinstance(state, dict)
            or any(callable(getattr(kind, name, None)) for name in state)
        ):
            raise UntrustedPickleError(f"a pickle in the catalog changes {kind.__module__}.{kind.__qualname__}")
        super().load_build()

    def load_old(self) -> None:
        raise UntrustedPickleError("a pickle in the catalog is of an old protocol")

    dispatch[pickle.REDUCE[0]] = load_reduce
    dispatch[pickle.BUILD[0]] = load_build
    dispatch[pickle.INST[0]] = dispatch[pickle.OBJ[0]] = load_old


class _Sealed(type):
    """The class of stand-ins, of which no attribute can be set."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls.make(*args, **kwargs)  # type: ignore[attr-defined]

    def __setattr__(cls, name: str, _value: object) -> None:
        raise UntrustedPickleError(f"a pickle in the catalog changes {cls.__qualname__}.{name}")


@cache
def _stand_in(real: Any) -> Any:
    """Return what makes the objects of a class, or calls a function, and takes no attributes."""

    def new(_cls: type, *args: Any, **kwargs: Any) -> Any:
        return real.__new__(real, *args, **kwargs)

    return _Sealed(real.__qualname__, (), {"__slots__": (), "__new__": new, "make": staticmethod(real)})


_REBUILD = "datacache.core.errors._rebuild"


def _rebuild_error(kind: object, message: str, state: dict[str, object]) -> DatacacheError:
    if not isinstance(kind, type) or not issubclass(kind, DatacacheError):
        raise UntrustedPickleError(f"a pickle in the catalog has {kind!r} for an error")
    return _rebuild(kind, message, state)


def _refused(whole: str) -> UntrustedPickleError:
    return UntrustedPickleError(
        f"a pickle in the catalog names {whole}, which may not travel",
        hint="Somebody else has written it, or another version of datacache. Who may write into the catalog?",
    )


def _value_class(module: str, name: str) -> Any:
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
