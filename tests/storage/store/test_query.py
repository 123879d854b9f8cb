from __future__ import annotations

import pytest

from storage.errors import InvalidQuery
from storage.store.query import run_sql
from storage.store.store import Store
from tests.support.records import add_job


def test_columns_and_rows(store: Store) -> None:
    add_job(store, "a")
    columns, rows = run_sql(
        store, "SELECT name, num_rows, 7 % 4 AS rest, NULL AS empty FROM jobs WHERE name LIKE '%a%'"
    )
    assert columns == ["name", "num_rows", "rest", "empty"]
    assert list(rows) == [("a", 10, 3, None)]


def test_a_query_without_rows_still_has_columns(store: Store) -> None:
    columns, rows = run_sql(store, "SELECT id FROM jobs")
    assert (columns, list(rows)) == (["id"], [])


def test_a_common_table_expression_and_a_trailing_semicolon(store: Store) -> None:
    _, rows = run_sql(store, "WITH one AS (SELECT 1 AS a) SELECT a + 1 FROM one;")
    assert list(rows) == [(2,)]


@pytest.mark.parametrize(
    "sql",
    [
        "DELETE FROM jobs",
        "UPDATE jobs SET name = 'x'",
        "CREATE TABLE intruder (a INTEGER)",
        "DROP VIEW throughput",
        "SELECT 1; DELETE FROM jobs",
        "COMMIT; DELETE FROM jobs",
        "INSERT INTO workers VALUES ('a', 'b', 1, '2026-01-01', '2026-01-01')",
    ],
)
def test_nothing_can_be_changed(store: Store, sql: str) -> None:
    add_job(store, "a")
    with pytest.raises(InvalidQuery):
        list(run_sql(store, sql)[1])
    assert [job.name for job in store.jobs.newest()] == ["a"]


@pytest.mark.parametrize(
    ("sql", "message"),
    [("SELEC 1", "syntax error"), ("SELECT nothing FROM jobs", "nothing"), ("SELECT * FROM nowhere", "nowhere")],
)
def test_the_database_s_message_is_passed_on(store: Store, sql: str, message: str) -> None:
    with pytest.raises(InvalidQuery, match=message):
        run_sql(store, sql)


def test_a_write_is_called_what_it_is(store: Store) -> None:
    with pytest.raises(InvalidQuery, match="only queries can be run here"):
        run_sql(store, "DELETE FROM jobs")


@pytest.mark.parametrize("sql", ["", "   ", "-- nothing"])
def test_no_statement_at_all(store: Store, sql: str) -> None:
    with pytest.raises(InvalidQuery):
        run_sql(store, sql)


def test_rows_stream(store: Store) -> None:
    numbers = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 1000000000) SELECT i FROM n"
    if store.database.is_sqlite:
        _, rows = run_sql(store, numbers)
        assert [next(rows) for _ in range(3)] == [(1,), (2,), (3,)]
        rows.close()  # type: ignore[attr-defined]


def test_a_write_in_between_does_not_wait_for_a_reader(store: Store) -> None:
    add_job(store, "a")
    _, rows = run_sql(store, "SELECT name FROM jobs UNION ALL SELECT 'more'")
    add_job(store, "b")
    assert sorted(rows) == [("a",), ("more",)]
