from __future__ import annotations

from tests.runner.conftest import Cli


def test_a_healthy_machine_without_a_broker(cli: Cli) -> None:
    checks = {check["check"]: check for check in cli.json("doctor")}
    assert {check["level"] for check in checks.values()} <= {"ok", "warning"}
    assert "torch" in checks["packages"]["found"]
    assert checks["store"]["found"] == cli.store
    assert "not set" in checks["broker"]["found"]
    assert "python" in cli("doctor").stdout


def test_what_is_broken_is_named_and_exits_with_1(cli: Cli) -> None:
    checks = {check["check"]: check for check in cli.json("doctor", "--broker", "redis://127.0.0.1:1/0", code=1)}
    assert checks["broker"]["level"] == "broken"
    checks = {check["check"]: check for check in cli.json("doctor", "--broker", "kafka://x", code=1)}
    assert "not supported" in checks["broker"]["found"]
    (cli.folder / "text.db").write_text("this is no database " * 100)
    checks = {check["check"]: check for check in cli.json("doctor", "--store", "text.db", code=1)}
    assert checks["store"]["level"] == "broken"
