"""The table in docs/models.md, found out by loading and running a tiny model of every architecture.

`python -m tests.support.models.page` writes it into the page.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from tests.support.drafts.weights import LAYER, eagle1_tensors, random_heads, write_eagle, write_heads
from tests.support.engine.runs import run
from tests.support.models.tiny import CONFIGS, build, config_of, prompt, save_tokenizer
from workers.engine import EngineConfig, EngineCore, Request, SamplingParams, SpeculationConfig
from workers.engine.api.config import METHODS
from workers.engine.api.errors import EngineError
from workers.engine.models.executor import LoadedModel
from workers.engine.models.loading.load import load_model

PAGE = Path(__file__).parents[3] / "docs/models.md"
HEAD = "| `model_type` | runs | batch invariant | methods |\n|---|---|---|---|\n"
LIMIT = 200
TOKENS = 6
PROMPTS = (prompt(9, 1), prompt(23, 2))
TOGETHER: tuple[tuple[str, ...], ...] = (("none", "ngram", "suffix", "draft_model"), ("medusa",), ("eagle",), ("self",))
"""Methods that one engine can offer to its requests at once."""


@dataclass(frozen=True, slots=True)
class Line:
    """What was found out of one architecture."""

    model_type: str
    refusal: str = ""
    varies: tuple[str, ...] = ()
    methods: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.refusal:
            return f"| `{self.model_type}` | no: {self.refusal} | | |"
        invariant = f"no: {', '.join(self.varies)}" if self.varies else "yes"
        missing = [method for method in METHODS if method not in self.methods]
        methods = f"all but {', '.join(f'`{method}`' for method in missing)}" if missing else "all"
        return f"| `{self.model_type}` | yes | {invariant} | {methods} |"


def table(folder: Path) -> str:
    """Every architecture of `tiny.CONFIGS`, loaded from a directory and run by every method that takes it.

    Raises AssertionError where an answer is not that of transformers' `generate`.
    """
    drafts = {
        "draft_model": "target",
        "medusa": write_heads(folder / "heads", random_heads(2)),
        "eagle": write_eagle(folder / "eagle", LAYER, eagle1_tensors()),
    }
    save_tokenizer(folder / "tokenizer")
    lines = [_examine(folder, name, drafts) for name in CONFIGS]
    return HEAD + "".join(f"{line}\n" for line in sorted(lines, key=lambda line: line.model_type))


def written() -> str:
    """The table that the page has."""
    text = PAGE.read_text()
    return text[text.index(HEAD) :].partition("\n\n")[0] + "\n"


def _examine(folder: Path, name: str, drafts: dict[str, str]) -> Line:
    config = config_of(name)
    directory = folder / name
    model = build(config)
    model.save_pretrained(directory)
    shutil.copytree(folder / "tokenizer", directory, dirs_exist_ok=True)
    try:
        loaded = load_model(EngineConfig(str(directory), max_model_len=LIMIT))
    except EngineError as error:
        return Line(config.model_type, _reason(error, directory))
    expected = _expected(model)
    taken = tuple(method for methods in TOGETHER if _take(loaded, methods, drafts, expected) for method in methods)
    return Line(config.model_type, varies=tuple(loaded.report.batch_variance), methods=taken)


def _reason(error: EngineError, directory: Path) -> str:
    """The message without the names of the directory and the architecture."""
    text = re.sub(rf"^{re.escape(str(directory))}( \([^)]*\))?:? ", "", str(error))
    return text.replace(str(directory), "the model").replace("\n", " ").replace("|", "\\|")


def _take(loaded: LoadedModel, methods: tuple[str, ...], drafts: dict[str, str], expected: list[Any]) -> bool:
    """Whether the model can be run with these methods at all. What it answers then has to be the truth."""
    last = methods[-1]
    options: dict[str, Any] = {"exit_layer": 1} if last == "self" else {"draft": drafts[last]}
    speculation = SpeculationConfig(method=last, row_methods=methods[:-1], policy="fixed", **options)
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    requests = [
        Request((method, index), tokens, params, method=method)
        for method in methods
        for index, tokens in enumerate(PROMPTS)
    ]
    config = EngineConfig(loaded.name, kv_blocks=60, speculation=speculation)
    try:
        done = run(EngineCore(config, model=loaded), requests)
    except EngineError:
        return False
    for (method, index), completion in done.items():
        got = completion.token_ids
        assert got == expected[index], f"{loaded.name}: {method} answers {got}, generate {expected[index]}"
    return True


def _expected(model: Any) -> list[tuple[int, ...]]:
    """Greedy answers of transformers' own loop."""
    answers = []
    model.generation_config.eos_token_id = None
    for tokens in PROMPTS:
        ids = torch.tensor([tokens])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, do_sample=False, pad_token_id=0
        )
        answers.append(tuple(out[0, len(tokens) :].tolist()))
    return answers


if __name__ == "__main__":
    torch.set_num_threads(1)
    with TemporaryDirectory() as place:
        found = table(Path(place))
    PAGE.write_text(PAGE.read_text().replace(written(), found))
