"""Task queues on both databases: the conformance suite, outages, crashes, a model, and workers that are killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from datacache.catalog.tasks import Leased, TaskStore
from datacache.catalog.tasks_mongo import MongoTasks
from datacache.catalog.tasks_sqlite import SqliteTasks
from datacache.testing.tasks import TasksConformance
from tests.servers import Mongod


class TestSqliteTasks(TasksConformance):
    @pytest.fixture
    def tasks_url(self, tmp_path: Path) -> str:
        return f"sqlite:///{tmp_path}/home/catalog.db"

    def expire(self, store: TaskStore, lease: Leased) -> None:
        assert isinstance(store, SqliteTasks)
        with store._catalog.writing(durable=False) as connection:
            connection.execute(
                "UPDATE tasks SET until_s = until_s - 7200 WHERE generation = ? AND number = ? AND token = ?",
                (lease.generation, lease.number, lease.token),
            )


class TestMongoTasks(TasksConformance):
    @pytest.fixture
    def tasks_url(self, mongod: Mongod) -> str:
        return mongod.database_url()

    def expire(self, store: TaskStore, lease: Leased) -> None:
        assert isinstance(store, MongoTasks)
        store._tasks.update_one(
            {"g": lease.generation, "number": lease.number, "token": lease.token},
            [{"$set": {"until": {"$subtract": ["$until", 7_200_000]}}}],
        )
