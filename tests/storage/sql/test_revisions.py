from __future__ import annotations

import multiprocessing
import sqlite3
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from storage.errors import InvalidStore, NoStore, SchemaOutdated, StoreUnavailable
from storage.sql import revisions, views
from storage.sql.tables import metadata
from storage.store.store import Store


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.service)])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """URL of a database in which there is nothing at all."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'new.db'}"
    url: str = request.getfixturevalue("postgres_url")
    return url


def test_the_migrations_build_the_tables_of_the_code(store: Store) -> None:
    def differences(connection: sa.Connection) -> list[object]:
        return compare_metadata(MigrationContext.configure(connection, opts={"compare_type": True}), metadata)

    assert store.database.read(differences) == []


def test_the_revision_of_the_code_is_the_newest_migration(store: Store) -> None:
    assert revisions.revisions()[0] == revisions.HEAD
    assert store.database.read(revisions.current_revision) == revisions.HEAD


def test_every_view_is_there(store: Store) -> None:
    found = store.database.read(lambda connection: sa.inspect(connection).get_view_names())
    assert set(found) == set(views.NAMES)


def test_opening_and_upgrading_again_changes_nothing(store_url: str) -> None:
    Store.open(store_url).dispose()
    with Store.open(store_url) as store:
        store.upgrade()
        assert store.jobs.newest() == []


def test_a_store_that_is_not_there_is_not_set_up_by_looking(store_url: str) -> None:
    for _ in range(2):
        with pytest.raises(NoStore, match="there is no store"):
            Store.open(store_url, create=False)
    Store.open(store_url).dispose()
    Store.open(store_url, create=False).dispose()


def test_messages_hide_the_password() -> None:
    with Store("postgresql://me:secret@host/name") as store:
        assert "secret" not in store.url


def test_an_older_schema_is_refused_until_upgraded(store: Store, store_url: str) -> None:
    _set_revision(store, None)
    with pytest.raises(SchemaOutdated, match=r"nightdraft db upgrade"):
        Store.open(store_url)


def test_a_newer_schema_is_refused(store: Store, store_url: str) -> None:
    _set_revision(store, "9999")
    with pytest.raises(SchemaOutdated, match=r"9999.*newer nightdraft"):
        Store.open(store_url)
    with pytest.raises(SchemaOutdated, match="newer nightdraft"):
        store.upgrade()


def test_a_database_with_other_tables_is_left_alone_until_asked(store_url: str) -> None:
    with Store(store_url) as store:
        store.database.write(lambda connection: connection.exec_driver_sql("CREATE TABLE other (a INTEGER)").close())
        with pytest.raises(SchemaOutdated, match="of its own"):
            Store.open(store_url)
        store.upgrade()
    with Store.open(store_url) as store:
        assert store.jobs.newest() == []


def test_upgrading_makes_the_views_anew(store: Store, store_url: str) -> None:
    def drop_all(connection: sa.Connection) -> None:
        views.drop(connection)
        for table in reversed(metadata.sorted_tables):
            table.drop(connection)
        connection.exec_driver_sql("DELETE FROM alembic_version")
        connection.exec_driver_sql("CREATE VIEW throughput AS SELECT 1 AS stale")

    store.database.write(drop_all)
    store.upgrade()
    columns = store.database.read(lambda c: c.exec_driver_sql("SELECT * FROM throughput").keys())
    assert "elapsed_seconds" in columns


def test_several_processes_may_open_a_new_store_at_once(store_url: str) -> None:
    context = multiprocessing.get_context("spawn")
    with context.Pool(3) as pool:
        assert pool.map(_open_and_count, [store_url] * 6) == [0] * 6


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("nonsense", "not a store URL"),
        ("mysql://host/db", "SQLite or PostgreSQL"),
        ("sqlite://", "in-memory"),
        ("sqlite:///:memory:", "in-memory"),
        ("sqlite:////nowhere/at/all/store.db", "does not exist"),
    ],
)
def test_an_unusable_url_is_refused_by_name(url: str, message: str) -> None:
    with pytest.raises(InvalidStore, match=message):
        Store.open(url)


def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.db").write_text("not a database, but long enough to have a header" * 10)
    with pytest.raises(InvalidStore, match=r"notes\.db.*not a database"):
        Store.open(f"sqlite:///{tmp_path / 'notes.db'}")


def test_an_unreachable_server_is_named_without_the_password() -> None:
    with pytest.raises(StoreUnavailable) as caught:
        Store.open("postgresql://someone:secret@127.0.0.1:1/nothing")
    assert "127.0.0.1:1" in str(caught.value)
    assert "secret" not in str(caught.value)


def test_sqlite_waits_for_other_writers(tmp_path: Path) -> None:
    with Store.open(f"sqlite:///{tmp_path / 'store.db'}") as store:
        mode, timeout, keys = store.database.read(
            lambda c: [
                c.exec_driver_sql(f"PRAGMA {p}").scalar() for p in ("journal_mode", "busy_timeout", "foreign_keys")
            ]
        )
    assert (mode, keys) == ("wal", 1)
    assert timeout >= 30_000


def _open_and_count(url: str) -> int:
    with Store.open(url) as store:
        return len(store.jobs.newest())


def _set_revision(store: Store, revision: str | None) -> None:
    def write(connection: sa.Connection) -> None:
        connection.exec_driver_sql("DELETE FROM alembic_version")
        if revision is not None:
            connection.execute(sa.text("INSERT INTO alembic_version VALUES (:r)"), {"r": revision})

    store.database.write(write)


def test_the_database_file_is_plain_sqlite(tmp_path: Path) -> None:
    Store.open(f"sqlite:///{tmp_path / 'store.db'}").dispose()
    with sqlite3.connect(tmp_path / "store.db") as connection:
        assert connection.execute("SELECT count(*) FROM acceptance_by_job").fetchone() == (0,)
    connection.close()
