"""The target as its own draft: the cache left as a fresh pass leaves it, skip sets refused by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.drafts.caches import watch
from tests.support.drafts.weights import tiny_model, tiny_target
from tests.support.engine.runs import answers, mixed_requests, run
from tests.support.models.tiny import build, config_of, prompt
from workers.engine import Completion, EngineConfig, EngineCore, SpeculationConfig
from workers.engine.api.errors import InvalidConfig, UnsupportedModel
from workers.engine.api.tree_shape import TreeShape
from workers.engine.models.executor import LoadedModel
from workers.engine.models.executors.fused import FusedExecutor
from workers.engine.models.loading.pretrained import build_executor
from workers.engine.models.skipping import NOTHING, SkipSet
from workers.engine.models.trial import Trial
from workers.engine.speculators.self.skip_file import SkipFile
from workers.engine.speculators.self.speculator import SelfSpeculator, skip_set_of, skipping
from workers.engine.speculators.speculator import Speculator
from workers.engine.state.batch import Batch, Feed
from workers.engine.state.sequence import Sequence
from workers.engine.text.tokenizer import ByteTokenizer

REQUESTS = mixed_requests(10, max_tokens=20)
SKIP = ("attn.1", "mlp.2")


@pytest.fixture(scope="module")
def target() -> LoadedModel:
    return tiny_target()


def engine(target: LoadedModel, speculation: SpeculationConfig, **options: Any) -> EngineCore:
    config = EngineConfig(**{"target": "tiny", "kv_blocks": 600, "speculation": speculation, **options})
    return EngineCore(config, model=target)


@pytest.fixture(scope="module")
def truth(target: LoadedModel) -> dict[object, Completion]:
    return run(engine(target, SpeculationConfig(), max_batch=1, prefix_reuse=False), REQUESTS)


def test_the_whole_model_agrees_with_itself(target: LoadedModel, truth: dict[object, Completion]) -> None:
    speculation = SpeculationConfig(method="self", skip=(), max_draft_tokens=6, policy="fixed")
    done = run(engine(target, speculation, kv_blocks=40, block_size=4), REQUESTS)
    assert answers(done) == answers(truth)
    stats = [completion.stats for completion in done.values()]
    assert sum(s.accepted for s in stats) + sum(s.trimmed for s in stats) == sum(s.drafted for s in stats) > 20


def test_rows_of_one_batch_may_take_it_or_not(target: LoadedModel, truth: dict[object, Completion]) -> None:
    speculation = SpeculationConfig(
        method="self", row_methods=("none", "ngram"), skip=SKIP, tree_width=3, ngram_min=1, policy="fixed"
    )
    requests = [replace(r, method=(None, "none", "ngram")[i % 3]) for i, r in enumerate(REQUESTS)]
    done = run(engine(target, speculation, kv_blocks=50, block_size=4), requests)
    assert answers(done) == answers(truth)
    assert {done[r.id].method for r in requests} == {"self", "none", "ngram"}


@pytest.mark.parametrize("verify", ["rejection", "block", "typical"])
def test_other_rules_count_correctly(verify: str, target: LoadedModel) -> None:
    speculation = SpeculationConfig(method="self", skip=SKIP, verify=verify, policy="fixed")
    done = run(engine(target, speculation, kv_blocks=60, block_size=4), REQUESTS)
    for completion in done.values():
        assert completion.stats.emitted == len(completion.token_ids)
        assert completion.stats.accepted + completion.stats.trimmed <= completion.stats.drafted
    assert sum(completion.stats.accepted for completion in done.values()) > 20


@pytest.mark.parametrize("shape", [TreeShape(), TreeShape(4, 10)], ids=["chain", "dynamic"])
def test_the_cache_is_left_as_a_fresh_pass_leaves_it(shape: TreeShape) -> None:
    target = tiny_target()
    executor = skipping(target)

    def make(context: Any) -> Speculator:
        skip = SkipSet.parse(SKIP, 3)
        return SelfSpeculator(executor, context.cache, skip, shape=shape, vocab_size=target.facts.vocab_size)

    def check(speculator: Speculator, seq: Sequence, features: torch.Tensor) -> None:
        pass

    watch(target, make, check)


@torch.inference_mode()
def test_skipped_sublayers_add_nothing() -> None:
    """Logits equal those of the untouched model whose skipped output matrices are zero."""
    model = tiny_model(1.0)
    executor = build_executor(tiny_model(1.0), "numba", "tiny", 256)
    for layer in (0, 2):
        model.model.layers[layer].self_attn.o_proj.weight.zero_()
    for layer in (0, 1):
        model.model.layers[layer].mlp.down_proj.weight.zero_()
    tokens = prompt(30, 1)
    expected = model(torch.tensor([tokens]), use_cache=False).logits[0, -1]
    assert isinstance(executor, FusedExecutor)
    trial = Trial(executor)
    seq = trial.open(tokens)
    batch = Batch.pack([Feed(seq, 0, len(seq))], trial.cache)
    skip = SkipSet.parse(("attn.0", "attn.2", "mlp.0", "mlp.1"), 3)
    torch.testing.assert_close(executor.forward_skipping(batch, trial.cache, skip).logits[0], expected)
    whole = executor.forward(batch, trial.cache).logits
    assert torch.equal(executor.forward_skipping(batch, trial.cache, NOTHING).logits, whole)


def test_skip_sets() -> None:
    skip = SkipSet.parse(("mlp.2", "attn.1"), 3)
    assert skip.names == ("attn.1", "mlp.2")
    assert skip.flip("attn.1").flip("mlp.0").names == ("mlp.0", "mlp.2")
    assert SkipSet.leave_at(1, 3).names == ("attn.1", "attn.2", "mlp.1", "mlp.2")
    for wrong in ("attn.3", "mlp", "head.0", "attn.-1"):
        with pytest.raises(InvalidConfig, match=r"no sublayer of this model, which has attn\.0 to attn\.2"):
            SkipSet.parse((wrong,), 3)
    with pytest.raises(InvalidConfig, match=r"exit_layer must be 1 to 2"):
        SkipSet.leave_at(3, 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "self", "skip": ("attn.0",), "exit_layer": 2}, "skip and exit_layer"),
        ({"method": "ngram", "skip": ("attn.0",)}, "only self skips sublayers"),
        ({"method": "self", "skip": ("attention.0",)}, r'"attn.3" and "mlp.7", got \'attention.0\''),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidConfig, match=message):
        SpeculationConfig(**options)


def test_without_a_skip_set_the_command_that_finds_one_is_named(
    target: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NIGHTDRAFT_CACHE", str(tmp_path))
    config = EngineConfig(target="tiny", speculation=SpeculationConfig(method="self"))
    with pytest.raises(InvalidConfig, match="nightdraft calibrate --method self --target tiny"):
        skip_set_of(config, target)
    SkipFile("tiny", target.content_hash, SKIP, 0.9, 0.6, 3, 1.2).write()
    assert skip_set_of(config, target).names == SKIP


def test_a_skip_set_of_another_model_is_refused(target: LoadedModel, tmp_path: Path) -> None:
    path = SkipFile("other", "f" * 32, SKIP, 0.9, 0.6, 3, 1.2).write(tmp_path / "skip.json")
    config = EngineConfig(target="tiny", speculation=SpeculationConfig(method="self", skip_file=str(path)))
    with pytest.raises(InvalidConfig, match="calibrated for other"):
        skip_set_of(config, target)
    path.write_text("{}")
    with pytest.raises(InvalidConfig, match="is no calibrated skip set"):
        skip_set_of(config, target)
    path.unlink()
    with pytest.raises(InvalidConfig, match="No such file"):
        skip_set_of(config, target)


def test_models_that_cannot_skip_are_refused_by_name() -> None:
    executor = build_executor(build(config_of("Phi3")), "numba", "tiny-phi", 128)
    target = LoadedModel(executor, ByteTokenizer(320), "tiny-phi", "0")
    with pytest.raises(UnsupportedModel, match="tiny-phi cannot skip sublayers"):
        engine(target, SpeculationConfig(method="self", exit_layer=1))
