"""Test what the thresholds do is seen in page faults, in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

_PROGRAM = """
import resource, sys
from datacache.loaders.processes import keep_freed_memory

said = keep_freed_memory() if sys.argv[1] == "keep" else None

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        a = bytearray(8 << 20)
        for at in range(0, len(a), 4096):
            a[at] = 1
        del a
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults()  # the first round has to get the memory
print(said, keep_freed_memory() if said is not None else None, faults())
"""


def _run(how: str, **variables: str) -> list[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_TUNABLES"))}
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, how], env=env | variables, capture_output=True, text=True, check=True
    )
    return done.stdout.split()


def _glibc() -> bool:
    try:
        return bool(os.confstr("CS_GNU_LIBC_VERSION"))
    except ValueError:
        return False


@pytest.mark.skipif(not _glibc(), reason="the C library is not glibc")
def test_memory_that_is_freed_and_taken_again_is_not_faulted_in_again():
    said, again, kept = _run("keep")
    *_, plain = _run("plain", MALLOC_TRIM_THRESHOLD_="131072", MALLOC_MMAP_THRESHOLD_="131072")
    assert (said, again) == ("True", "True")
    assert int(kept) * 10 < int(plain)


@pytest.mark.parametrize(
    ("name", "value"),
    [("MALLOC_TRIM_THRESHOLD_", "1000000"), ("GLIBC_TUNABLES", "glibc.malloc.mmap_threshold=1000000")],
)
def test_thresholds_that_the_user_set_stay(name, value):
    assert _run("keep", **{name: value})[:2] == ["False", "False"]
