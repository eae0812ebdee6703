"""The pinned refs of a home and the data sets they are of: a small JSON file beside the index, which outlives it."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from datacache.core.disk import replace_file

log = logging.getLogger(__name__)


def read(path: Path) -> dict[str, str]:
    """Ref → data set; empty if there is no such file."""
    try:
        return {str(ref): str(dataset) for ref, dataset in json.loads(path.read_bytes()).items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, AttributeError) as exc:
        log.warning("the pins in %s cannot be read: %s", path, exc)
        return {}


def write(path: Path, pins: dict[str, str]) -> None:
    """Replace the file as a whole, durably. `OSError` leaves it as it was."""
    replace_file(path, json.dumps(pins).encode())
