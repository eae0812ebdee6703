"""`python -m datacache.tiers.walk INDEX [--some]`: read a whole index, which may be torn and so fatal to its reader.

Exit code 0 if everything in it makes sense and, with `--some`, it knows a container. Run by `recovery`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import lmdb

from datacache.core.errors import CacheError
from datacache.core.ids import ObjectRef
from datacache.tiers import layout
from datacache.tiers.index import TIER_NAMES, UNCHECKED, Index
from datacache.tiers.tier import Container


def main() -> int:
    """Walk; the exit code."""
    known = 0
    try:
        index = Index(Path(sys.argv[1]), writable=True)
        with index.env.begin() as txn:
            for tier in TIER_NAMES:
                with txn.cursor(db=index.blocks[tier]) as cursor:
                    for _, value in cursor:
                        layout.unpack_location(value)
            with txn.cursor(db=index.meta) as cursor:
                for key, value in cursor:
                    if b"/" in key:
                        Container(**json.loads(value))
                        known += 1
                    elif key.startswith(UNCHECKED):
                        ObjectRef(*json.loads(value))
    except (CacheError, lmdb.Error, OSError, ValueError, TypeError, IndexError) as exc:
        sys.stderr.write(f"{exc}\n")
        return 1
    return 1 if "--some" in sys.argv[2:] and not known else 0


if __name__ == "__main__":
    sys.exit(main())
