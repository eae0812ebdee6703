"""`dsctl shard` as a user meets it."""

from __future__ import annotations

from pathlib import Path

import pytest

from dataset_cli.demo.faces import draw_faces
from tests.cli.conftest import Dsctl


@pytest.fixture
def faces(tmp_path: Path, dsctl: Dsctl) -> Path:
    folder = tmp_path / "faces"
    draw_faces(folder, count=10)
    (folder / "Annotations" / "000002.xml").unlink()
    (folder / "JPEGImages" / "000003.jpg").write_bytes(b"no image")
    assert dsctl("snapshot", "create", "faces", "--from", folder, "--tag", "v1").code == 0
    return folder


def test_it_says_what_was_made_and_what_to_type_next(faces: Path, dsctl: Dsctl, tmp_path: Path) -> None:
    out = tmp_path / "shards"
    first = dsctl("shard", "faces@v1", "--to", out, "--max-size", "20KB", "--as", "s", "--tag", "v1")
    assert (first.code, first.err) == (0, "")
    assert first.out.startswith(f"file://{out}  9 samples in ")
    assert "classes   2: with_mask, without_mask" in first.out
    assert "left out  1 image that cannot be used" in first.out
    assert "noted     1 image without annotation" in first.out
    assert "snapshot  s@" in first.out
    assert "tags: v1" in first.out
    assert 'datacache.torch.ShardDataset("s@' in first.out
    last = sorted(out.glob("*.tar"))[-1].name[6:12]
    assert f"{out}/shard-{{000000..{last}}}.tar" in first.out
    again = dsctl("shard", "faces@v1", "--to", out, "--max-size", "20KB")
    assert "It was there already" in again.out
    other = dsctl("shard", "faces@v1", "--to", f"file://{out}", "--max-size", "30KB")
    assert other.code == 2
    assert "holds another shard set already" in other.err
    assert "--overwrite" in other.err
    assert dsctl("shard", "faces@v1", "--to", out, "--max-size", "30KB", "--overwrite").code == 0
    shown = dsctl("snapshot", "show", "s@v1").out
    assert "shard faces@" in shown


def test_json_has_the_set_the_snapshot_and_the_report(faces: Path, dsctl: Dsctl, tmp_path: Path) -> None:
    arguments = ("faces", "--to", tmp_path / "s", "--format", "tfrecord", "--shuffle", "--seed", "4", "--json")
    done = dsctl("shard", *arguments, "--as", "t")
    assert done.code == 0
    assert (done.json["samples"], done.json["format"], done.json["made"]) == (9, "tfrecord", 1)
    assert done.json["report"]["unusable"] == done.json["report"]["unannotated"] == 1
    assert done.json["shards"][0]["name"] == "shard-000000.tfrecord"
    assert done.json["snapshot"]["lineage"]["command"] == "shard"
    assert done.json["snapshot"]["lineage"]["parameters"]["seed"] == 4
    again = dsctl("shard", *arguments)
    assert (again.json["made"], again.json["report"], again.json["snapshot"]) == (0, None, None)


def test_check_names_what_is_damaged(faces: Path, dsctl: Dsctl, tmp_path: Path) -> None:
    out = tmp_path / "s"
    assert dsctl("shard", "faces", "--to", out, "--max-size", "20KB").code == 0
    other = dsctl("shard", "faces", "--to", out, "--max-size", "1MB", "--overwrite")
    assert other.out.startswith(f"file://{out}  9 samples in 1 webdataset shard, ")
    assert dsctl("shard", "faces", "--to", out, "--max-size", "20KB", "--overwrite").code == 0
    whole = dsctl("shard", "--check", out)
    assert whole.code == 0
    assert "is whole: 9 samples" in whole.out
    (out / "shard-000001.tar").unlink()
    broken = dsctl("shard", "--check", out)
    assert broken.code == 1
    assert "shard-000001.tar is missing" in broken.out
    machine = dsctl("shard", "--check", out, "--json")
    assert machine.code == 1
    assert machine.json["problems"] == [{"shard": "shard-000001.tar", "message": "is missing"}]
    nothing = dsctl("shard", "--check", tmp_path)
    assert nothing.code == 1
    assert "there is no shard set" in nothing.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["faces"], "--to"),
        (["--to", "/tmp/x"], "REF"),
        (["faces", "--to", "/tmp/x", "--check", "/tmp/x"], "--check"),
        (["faces", "--to", "/tmp/x", "--max-size", "many"], "--max-size"),
        (["faces", "--to", "/tmp/x", "--format", "zip"], "zip"),
        (["faces", "--to", "/tmp/x", "--tag", "v1"], "--as"),
        (["faces", "--to", "/tmp/x", "--classes", "/nowhere/c.txt"], "/nowhere/c.txt"),
        (["faces", "--to", "s3://KEY:SECRET@bucket/x"], "credentials"),
        (["faces", "--to", "/tmp/x", "--classes-from-folders"], "--classes-from-folders"),
    ],
)
def test_wrong_usage_is_2_and_names_the_option(arguments: list[str], said: str, faces: Path, dsctl: Dsctl) -> None:
    done = dsctl("shard", *arguments)
    assert done.code == 2
    assert said in done.err
    assert "Traceback" not in done.err
