"""What would keep an engine from starting shows before it starts, in the same words, without a weight being read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.drafts.ways import GOOD, OTHER_MODEL, Options, draft_model, eagle, medusa, skipping, spoilt
from tests.support.drafts.weights import (
    eagle3_tensors,
    safeailab3,
)
from tests.support.models.tiny import VOCAB
from workers.engine.api.config import EngineConfig, SpeculationConfig
from workers.engine.api.errors import EngineError
from workers.engine.api.request import Request
from workers.engine.api.sampling_params import SamplingParams
from workers.engine.core import EngineCore
from workers.engine.measure.preflight import Preflight
from workers.engine.models.loading.sources import resolve
from workers.engine.speculators.self.skip_file import SkipFile

pytestmark = pytest.mark.usefixtures("nothing_calibrated")

WRONG: dict[str, tuple[str, Options]] = {
    "self, nothing calibrated": (
        "does not know which sublayers",
        skipping(),
    ),
    "self, no skip file": (
        "No such file",
        skipping(skip_file="/no/such/file.json"),
    ),
    "self, skip file of another kind": (
        "no calibrated skip set",
        skipping('{"skip": 3}'),
    ),
    "self, skip file is no JSON": (
        "no calibrated skip set",
        skipping("skip"),
    ),
    "self, skip file of another model": (
        "calibrated for x",
        skipping(OTHER_MODEL),
    ),
    "self, no such sublayer": (
        "'attn.8' is no sublayer",
        skipping(skip=("attn.8",)),
    ),
    "self, no such exit": (
        "exit_layer must be 1 to 7",
        skipping(exit_layer=8),
    ),
    "self, for rows alone": (
        "does not know which sublayers",
        lambda _: {"method": "none", "row_methods": ("self",)},
    ),
    "eagle, no directory": (
        "no such directory",
        lambda _: {"method": "eagle", "draft": "/no/such/place"},
    ),
    "eagle, nothing on the hub": (
        "the hub did not give it",
        lambda _: {"method": "eagle", "draft": "someone/some-layer"},
    ),
    "eagle, no config": (
        "has no config.json",
        spoilt(eagle(), "config.json", None),
    ),
    "eagle, broken config": (
        "Expecting property name",
        spoilt(eagle(), "config.json", "{"),
    ),
    "eagle, no weights": (
        "none of model.safetensors",
        spoilt(eagle(), "model.safetensors", None),
    ),
    "eagle, broken weights": (
        "cannot be read as a file of tensors",
        spoilt(eagle(), "model.safetensors", "not a tensor in sight"),
    ),
    "eagle, broken pickle": (
        "cannot be read as a file of tensors",
        spoilt(eagle(pickled=True), "pytorch_model.bin", "not a tensor in sight"),
    ),
    "eagle, missing tensor": (
        "fc.weight [48, 144] is missing",
        eagle(drop="fc.weight"),
    ),
    "eagle, missing tensor, pickled": (
        "norm.weight [48] is missing",
        eagle(drop="norm.weight", pickled=True),
    ),
    "eagle, unknown tensor": (
        "unknown tensors surprise",
        eagle(surprise=torch.zeros(3)),
    ),
    "eagle, mismatching tensor": (
        "lm_head.weight is [320, 40]",
        eagle(**{"lm_head.weight": torch.zeros(VOCAB, 40)}),
    ),
    "eagle, for another target": (
        "target_hidden_size is 4096",
        eagle(safeailab3(target_hidden_size=4096)),
    ),
    "eagle, unknown layer": (
        "model_type 'mamba'",
        eagle(safeailab3(model_type="mamba")),
    ),
    "eagle, broken vocabulary": (
        "d2t does not give distinct ids",
        eagle(safeailab3(draft_vocab_size=100), **eagle3_tensors(draft_vocab=100) | {"d2t": torch.full((100,), VOCAB)}),
    ),
    "medusa, no directory": (
        "no such directory",
        lambda _: {"method": "medusa", "draft": "/no/such/place"},
    ),
    "medusa, no config": (
        "has no config.json",
        spoilt(medusa(), "config.json", None),
    ),
    "medusa, config without heads": (
        "medusa_num_heads is missing",
        spoilt(medusa(), "config.json", "{}"),
    ),
    "medusa, no weights": (
        "none of medusa_lm_head.safetensors",
        spoilt(medusa(), "medusa_lm_head.safetensors", None),
    ),
    "medusa, missing tensor": (
        "2.1.weight [320, 48] is missing",
        medusa(drop="2.1.weight"),
    ),
    "medusa, for another target": (
        "0.0.linear.weight is [40, 40]",
        medusa(hidden=40),
    ),
    "medusa, too few heads": (
        "max_draft_tokens is 9",
        medusa(max_draft_tokens=9),
    ),
    "medusa, broken tree": (
        "not a tree of rank paths",
        medusa(tree="[]"),
    ),
    "draft_model, no directory": (
        "no such directory",
        lambda _: {"method": "draft_model", "draft": "/no/such/place"},
    ),
    "draft_model, heads": (
        "model_type",
        lambda directory: medusa()(directory) | {"method": "draft_model"},
    ),
    "draft_model, no weights": (
        "no .safetensors file",
        spoilt(draft_model(), "model.safetensors", None),
    ),
    "draft_model, another vocabulary": (
        "have different vocabularies",
        draft_model(shift=7, vocabulary="same"),
    ),
    "draft_model, a tree through text": (
        "drafts through text are chains",
        draft_model(shift=7, vocabulary="text", tree_width=2),
    ),
    "draft_model, scripted in int8": (
        "a scripted model has no weights",
        lambda _: {
            "method": "draft_model",
            "draft": "scripted:vocab=300",
            "draft_dtype": "int8",
        },
    ),
}


def refusal(start: Callable[[EngineConfig], object], config: EngineConfig) -> EngineError:
    with pytest.raises(EngineError) as caught:
        start(config)
    return caught.value


@pytest.mark.parametrize("mistake", WRONG)
def test_a_mistake_shows_in_the_words_of_the_engine(mistake: str, llama: str, tmp_path: Path) -> None:
    words, options = WRONG[mistake]
    config = EngineConfig(target=llama, speculation=SpeculationConfig(**options(tmp_path)))
    before, later = refusal(Preflight, config), refusal(EngineCore, config)
    assert words in str(before)
    assert (type(before), str(before)) == (type(later), str(later))


@pytest.mark.parametrize("options", [{"max_model_len": 999}, {"device": "warp"}, {"target": "/no/place"}])
def test_so_do_mistakes_about_the_target(options: dict[str, Any], llama: str) -> None:
    config = EngineConfig(**{"target": llama, **options})
    before, later = refusal(Preflight, config), refusal(EngineCore, config)
    assert (type(before), str(before)) == (type(later), str(later))


@pytest.mark.parametrize("name", GOOD)
def test_what_fits_passes_and_the_engine_starts(name: str, llama: str, tmp_path: Path) -> None:
    config = EngineConfig(target=llama, speculation=SpeculationConfig(**GOOD[name](tmp_path)), kv_blocks=64)
    Preflight(config)
    EngineCore(config)


def test_a_skip_set_is_that_of_the_very_weights(llama: str) -> None:
    config = EngineConfig(target=llama, speculation=SpeculationConfig(method="self"))
    SkipFile(llama, resolve(llama).content_hash(), ("attn.1",), 0.9, 0.6, 3, 1.2).write()
    Preflight(config)
    EngineCore(config)


@pytest.mark.parametrize(
    "request_",
    [
        Request(1, ()),
        Request(1, tuple(range(3, 103))),
        Request(1, (3, VOCAB)),
        Request(1, (3,), SamplingParams(stop_token_ids=(VOCAB,))),
        Request(1, (3,), SamplingParams(max_tokens=90)),
        Request(1, (3,), method="self"),
    ],
)
def test_a_request_is_refused_as_the_engine_would_refuse_it(request_: Request, llama: str) -> None:
    config = EngineConfig(target=llama, max_model_len=100, kv_blocks=4)
    completion = EngineCore(config).add(request_)
    assert completion is not None
    with pytest.raises(EngineError) as caught:
        Preflight(config).check(request_)
    assert (caught.value.code, str(caught.value)) == (completion.error_code, completion.error_message)
    Preflight(config).check(Request(1, (3,), SamplingParams(max_tokens=8)))
