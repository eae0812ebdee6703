"""A data folder of the MongoDB to try things out, from before it asked for a password."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pymongo
import pytest
from pymongo.errors import OperationFailure

from tests.servers import Mongod

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "KUBERNETES.md"


@pytest.fixture
def old(tmp_path: Path) -> Iterator[Mongod]:
    """A server with the password on, and with data but no user."""
    with Mongod(tmp_path / "mongod") as server:
        with pymongo.MongoClient(server.url) as client:
            client.datacache.snapshots.with_options(write_concern=pymongo.WriteConcern(j=True)).insert_one(
                {"_id": "mask"}
            )
        server.stop()
        server.start("--auth")
        yield server


def test_the_documented_command_makes_the_user_of_an_old_data_folder_once_and_everything_is_there(old: Mongod) -> None:
    [(user, role)] = re.findall(
        r'mongosh admin .*\\\n +\'db\.createUser\(\{user: "(\w+)", pwd: process\.env\.MONGO_INITDB_ROOT_PASSWORD, '
        r'roles: \["(\w+)"\]\}\)\'',
        DOCUMENT.read_text(encoding="utf-8"),
    )
    with pymongo.MongoClient(old.url) as client:
        with pytest.raises(OperationFailure, match=r"requires authentication|not authorized"):
            client.datacache.snapshots.find_one()
        client.admin.command("createUser", user, pwd="0123abcd", roles=[role])
        with pytest.raises(OperationFailure, match=r"requires authentication|not authorized"):
            client.admin.command("createUser", "another", pwd="0123abcd", roles=[role])
    # As the chart writes it.
    url = f"mongodb://{user}:0123abcd@127.0.0.1:{old.port}/datacache?authSource=admin"
    assert user == "datacache"
    with pymongo.MongoClient(url) as client:
        assert client.get_default_database().snapshots.find_one() == {"_id": "mask"}
        client.get_default_database().snapshots.insert_one({"_id": "more"})
