"""The limits of PostgreSQL sessions: ours by default, the user's where given, other ones for queries and migrations."""

from __future__ import annotations

import psycopg
import pytest
import sqlalchemy as sa

from storage.errors import InvalidQuery, InvalidStore, StoreFailed, StoreUnavailable
from storage.sql import sessions
from storage.store.query import run_sql
from storage.store.store import Store

pytestmark = pytest.mark.service

ALL = sa.text("SELECT name, setting || coalesce(unit, '') FROM pg_settings WHERE source = 'client'")


def settings(connection: sa.Connection) -> dict[str, str]:
    return dict(map(tuple, connection.execute(ALL)))


def test_every_session_has_limits_and_the_url_and_the_environment_override_them(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Store.open(postgres_url) as store:
        found = store.database.read(settings)
        assert found["search_path"].startswith("t"), "the URL's own options are kept"
        times = {name: found[name] for name in sessions.LIMITS if "tcp" not in name}
        assert times == {
            "idle_in_transaction_session_timeout": "10000ms",
            "lock_timeout": "5000ms",
            "statement_timeout": "300000ms",
        }
        _, rows = run_sql(
            store, "SELECT name, setting FROM pg_settings WHERE name IN ('lock_timeout', 'tcp_keepalives_idle')"
        )
        assert dict(rows) == {"lock_timeout": "10000", "tcp_keepalives_idle": "15"}
    with Store.open(f"{postgres_url}%20-clock_timeout%3D7s&application_name=mine") as store:
        found = store.database.read(settings)
        assert (found["lock_timeout"], found["application_name"]) == ("7000ms", "mine")
    monkeypatch.setenv("PGOPTIONS", "-c statement_timeout=9s")
    with Store(postgres_url.partition("?")[0]) as store:
        assert store.database.read(settings)["statement_timeout"] == "9000ms"


def test_a_migration_has_limits_of_its_own(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, str] = {}
    monkeypatch.setattr(
        "storage.sql.revisions._migrate", lambda connection: seen.update(map(tuple, connection.execute(ALL_NOW)))
    )
    with Store(f"{postgres_url}%20-cstatement_timeout%3D1234ms") as store, pytest.raises(StoreFailed):
        store.upgrade()  # the views have no tables to look at
    assert seen == {"idle_in_transaction_session_timeout": "600000", "lock_timeout": "60000", "statement_timeout": "0"}


ALL_NOW = sa.text(
    "SELECT name, setting FROM pg_settings"
    " WHERE name IN ('idle_in_transaction_session_timeout', 'lock_timeout', 'statement_timeout')"
)


def test_a_statement_that_takes_too_long_is_cut_off_in_the_stores_own_words(postgres_url: str) -> None:
    with Store(f"{postgres_url}%20-cstatement_timeout%3D50ms", patience=0.1) as store:
        with pytest.raises(StoreUnavailable, match="does not answer: canceling statement due to statement timeout"):
            store.database.read(lambda connection: connection.exec_driver_sql("SELECT pg_sleep(5)"))
        with pytest.raises(InvalidQuery, match="in the store URL gives it more"):
            run_sql(store, "SELECT pg_sleep(5)")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"username": "nobody"}, 'role "nobody" does not exist'),
        ({"database": "nothing"}, 'database "nothing" does not exist'),
        ({"host": "nohost.invalid"}, "failed to resolve host"),
        ({"query": {"colour": "blue"}}, 'invalid connection option "colour"'),
        ({"query": {"options": "-cspeed=high"}}, 'unrecognized configuration parameter "speed"'),
    ],
)
def test_a_slip_in_the_url_is_named_at_once_and_is_an_outage_to_whoever_had_it_open(
    postgres_url: str, change: dict[str, object], text: str
) -> None:
    url = sa.make_url(postgres_url).set(**change).render_as_string(hide_password=False)  # type: ignore[arg-type]
    with pytest.raises(InvalidStore, match=text):
        Store.open(url)
    with Store(url, patience=0.1) as store, pytest.raises(StoreUnavailable, match=text):
        store.jobs.newest()


def test_the_words_of_a_driver_stay_inside_for_what_no_waiting_mends(postgres_url: str) -> None:
    with Store.open(postgres_url) as store, psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute("ALTER TABLE jobs RENAME TO gone")
        with pytest.raises(StoreFailed, match='refuses: relation "jobs" does not exist'):
            store.jobs.newest()
