"""The header of derived roots."""

from __future__ import annotations

import pytest

from datacache.core.errors import CorruptManifestError
from datacache.manifest import codec as blobtree
from datacache.manifest.model import BlobId

IDS = [BlobId(bytes([n]) * 16) for n in (3, 1, 2)]


def test_a_roots_blobs_and_its_payload_are_found_again_in_order() -> None:
    raw = blobtree.encode_children(IDS) + b"payload"
    assert blobtree.children(raw) == IDS
    assert bytes(blobtree.payload(raw)) == b"payload"
    assert raw[:8] == b"DCT1\x03\x00\x00\x00"


def test_a_root_may_need_no_blobs_and_have_no_payload() -> None:
    raw = blobtree.encode_children([])
    assert blobtree.children(raw) == []
    assert bytes(blobtree.payload(raw)) == b""


@pytest.mark.parametrize("raw", [b"", b"DCM1\x00\x00\x00\x00", b"DCT1", blobtree.encode_children(IDS)[:-1]])
def test_bytes_that_are_no_whole_root_are_a_corrupt_manifest(raw: bytes) -> None:
    with pytest.raises(CorruptManifestError):
        blobtree.children(raw)
    with pytest.raises(CorruptManifestError):
        blobtree.payload(raw)
