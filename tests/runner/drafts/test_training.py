"""From prompts to a drafter that a job uses, by commands alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.cli import Cli
from tests.support.models.tiny import save_tokenizer
from tests.support.training import sure_model

WORDS = ("red", "green", "blue", "tea", "bread", "sea", "map", "train", "night", "garden")
PROMPTS = [f"{a} {b}" for a in WORDS for b in WORDS[:4]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("target")
    sure_model().save_pretrained(folder)
    return save_tokenizer(folder)


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    return Cli(tmp_path)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    rows = {"prompt": PROMPTS, "category": ["x" if len(text) % 2 else "y" for text in PROMPTS]}
    pq.write_table(pa.table(rows), tmp_path / "prompts.parquet")
    return tmp_path / "prompts.parquet"


def distilled(cli: Cli, prompts: Path, model: str) -> tuple[Any, str]:
    folder = str(cli.folder / "answers")
    return cli.json(
        "distill", str(prompts), "--target", model, "--max-tokens", "16", "--name", "night", "--out", folder
    ), folder


TRAIN = ("--epochs", "30", "--lr", "0.02", "--pack-tokens", "200", "--draft-vocab", "200", "--held-out", "0.2",
         "--steps", "3", "--no-autocast", "--evaluate-steps", "40")  # fmt: skip


def test_two_nights(cli: Cli, prompts: Path, model: str) -> None:
    about, folder = distilled(cli, prompts, model)
    assert (about["answers"], about["unusable"]) == (len(PROMPTS), {})
    found = cli.json("train", "eagle3", folder, "--out", str(cli.folder / "training"), *TRAIN)
    assert found["finished"]
    assert found["num_documents"] + found["num_held_out"] == len(PROMPTS)
    # The simulated figure is that of training in float32; what serves was rounded to bfloat16.
    last = found["evaluations"][-1]
    assert last["served"] == pytest.approx(last["simulated"], rel=0.03)

    plain = cli.json("run", str(prompts), "--target", model, "--max-tokens", "16", "--name", "plain")
    drafted = cli.json(
        "run", str(prompts), "--target", model, "--max-tokens", "16", "--name", "drafted",
        "--method", "eagle", "--draft", found["drafter"], "--tree-width", "1", "--policy", "fixed",
    )  # fmt: skip
    assert plain["num_ok"] == drafted["num_ok"] == len(PROMPTS)
    assert drafted["mean_acceptance_length"] > 1.3
    texts = cli.json(
        "sql", "SELECT count(DISTINCT output_text) AS n FROM results JOIN jobs ON jobs.id = job_id"
        " WHERE name IN ('plain', 'drafted') GROUP BY row_index HAVING n <> 1",
    )  # fmt: skip
    assert texts == []


def test_answers_of_a_job_that_has_run(cli: Cli, prompts: Path, model: str) -> None:
    run = ("run", str(prompts), "--target", model, "--max-tokens", "8")
    cli.json(*run, "--name", "without")
    failed = cli("distill", "--from-job", "without", "--out", str(cli.folder / "a"), code=2)
    assert "kept no token ids" in failed.stderr
    cli.json(*run, "--name", "with", "--set", "keep_token_ids=true")
    about = cli.json("distill", "--from-job", "with", "--out", str(cli.folder / "b"))
    assert about["answers"] == len(PROMPTS)
    assert pq.read_table(cli.folder / "b" / "answers.parquet").num_rows == len(PROMPTS)
    for neither_or_both in ((), (str(prompts), "--from-job", "with")):
        assert "one of the two" in cli("distill", *neither_or_both, "--out", "c", code=2).stderr


def test_what_cannot_be_trained_is_refused(cli: Cli, prompts: Path, model: str) -> None:
    _, folder = distilled(cli, prompts, model)
    out = ("--out", str(cli.folder / "t"))
    assert "kl, reverse_kl" in cli("train", "eagle3", folder, *out, "--loss", "mse", code=2).stderr
    assert "nightdraft distill" in cli("train", "eagle3", str(cli.folder), *out, code=2).stderr
    short = ("--epochs", "1", "--draft-vocab", "200", "--held-out", "0")
    assert cli.json("train", "eagle3", folder, *out, *short)["finished"]
    assert cli.json("train", "eagle3", folder, *out, *short)["evaluations"] == []
    changed = cli("train", "eagle3", folder, *out, *short, "--lr", "0.5", code=2)
    assert "lr was 0.001 and is 0.5" in " ".join(changed.stderr.split())
    weights = Path(model) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + b"\x00\x00\x00@")
    assert "other weights" in cli("train", "eagle3", folder, *out, *short, code=2).stderr
