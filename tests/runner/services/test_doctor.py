from __future__ import annotations

import json

import pytest

from tests.support.cli import Cli


def test_a_healthy_machine_without_a_broker(cli: Cli) -> None:
    cli("db", "upgrade")
    checks = {check["check"]: check for check in cli.json("doctor")}
    assert {check["level"] for check in checks.values()} <= {"ok", "warning"}
    assert "torch" in checks["packages"]["found"]
    assert checks["store"]["found"] == cli.store
    assert "not set" in checks["broker"]["found"]
    assert "python" in cli("doctor").stdout


def test_looking_at_a_store_that_is_not_there_creates_nothing(cli: Cli) -> None:
    (cli.folder / "empty.db").touch()
    for arguments in ((), ("--store", "empty.db"), ("--store", "other.db")):
        checks = {check["check"]: check for check in cli.json("doctor", *arguments)}
        assert checks["store"]["level"] == "ok"
        assert "there is no store" in checks["store"]["found"]
        assert "none" in checks["workers"]["found"]
    assert [(path.name, path.stat().st_size) for path in cli.folder.iterdir()] == [("empty.db", 0)]
    checks = {check["check"]: check for check in cli.json("doctor", "--store", "no/such/folder/x.db", code=1)}
    assert "does not exist; create it" in checks["store"]["found"]


def test_what_is_broken_is_named_and_exits_with_1(cli: Cli) -> None:
    checks = {check["check"]: check for check in cli.json("doctor", "--broker", "redis://127.0.0.1:1/0", code=1)}
    assert checks["broker"]["level"] == "broken"
    checks = {check["check"]: check for check in cli.json("doctor", "--broker", "kafka://x", code=1)}
    assert "not supported" in checks["broker"]["found"]
    (cli.folder / "text.db").write_text("this is no database " * 100)
    checks = {check["check"]: check for check in cli.json("doctor", "--store", "text.db", code=1)}
    assert checks["store"]["level"] == "broken"


@pytest.mark.parametrize(
    "broker",
    [
        "redis://127.0.0.1:1/0?password=SESAME",
        "redis://:SESAME@127.0.0.1:1/0;redis://:SESAME@127.0.0.1:2/0",
        "redis://:SESAME@127.0.0.1:abc/0",
    ],
)
def test_a_wrong_broker_or_store_is_a_finding_without_secrets(cli: Cli, broker: str) -> None:
    for store in ("postgresql://u@127.0.0.1:1/db?password=SESAME", "postgresql://u:SESAME@h:abc/db"):
        shown = cli("doctor", "--broker", broker, "--store", store, "--json", code=1)
        checks = {check["check"]: check for check in json.loads(shown.stdout)}
        assert (checks["broker"]["level"], checks["store"]["level"]) == ("broken", "broken")
        assert "SESAME" not in shown.output
        status = cli("status", "--store", store, code=2 if "abc" in store else 1)
        assert "SESAME" not in status.output
