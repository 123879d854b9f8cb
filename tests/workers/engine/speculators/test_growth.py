"""Trees hold the nodes that they should: which, no test of exactness can tell, and all of their worth lies in it."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.drafts import growth_reference
from tests.support.drafts.growth_reference import Model, expected_nodes, nodes_of
from tests.support.drafts.reference import Eagle, medusa_logits
from tests.support.drafts.weights import (
    LAYER,
    eagle1_tensors,
    random_heads,
    tiny_model,
    tiny_target,
    write_eagle,
    write_heads,
)
from tests.support.engine.runs import TARGET, run
from workers.engine import EngineConfig, EngineCore, Request, SamplingParams, SpeculationConfig
from workers.engine.api.tree_shape import TreeShape
from workers.engine.models.executor import LoadedModel
from workers.engine.models.executors.scripted import Script, ScriptedExecutor, load_scripted
from workers.engine.models.skipping import SkipSet
from workers.engine.models.trial import Trial
from workers.engine.sampler import RowContext, sample
from workers.engine.speculators.shared.growth import TreeGrowth, extend_all
from workers.engine.state.batch import Feed
from workers.engine.state.kv_cache import FINAL
from workers.engine.state.sequence import Sequence
from workers.engine.state.tree import DraftTree

GAPS = ((0,), (2,), (0, 0), (0, 1), (2, 1), (0, 1, 0), (0, 1, 2))
SHAPES = {
    "chain": TreeShape(),
    "beam of 3": TreeShape(3),
    "beam of 16": TreeShape(16),
    "dynamic, few nodes": TreeShape(3, 5),
    "dynamic": TreeShape(4, 14),
    "dynamic, all nodes": TreeShape(3, 200),
    "dynamic, fewer than a level": TreeShape(5, 3),
    "fixed": TreeShape(paths=GAPS),
}


# The mechanism, on random models -------------------------------------------------------------------------------------


def sequence(index: int, vocab: int, temperature: float) -> Sequence:
    """Two of the tokens end it."""
    params = SamplingParams(temperature=temperature, seed=index, max_tokens=99)
    return Sequence(Request(index, (1, 2, 3), params), index, frozenset({0, vocab // 2}), 1000)


def random_model(seed: int, vocab: int, sharpness: float) -> Model:
    def logits(path: growth_reference.Path) -> torch.Tensor:
        generator = torch.Generator().manual_seed(hash((seed, *path)) % 2**31)
        return torch.randn(vocab, generator=generator) * sharpness

    return logits


def grow(growths: dict[TreeGrowth, Model]) -> list[DraftTree]:
    """As drafters do it: a pass over the frontiers of all trees that still grow."""
    while growing := [growth for growth in growths if growth.growing]:
        extend_all(growing, torch.stack([growths[g](path) for g in growing for path in g.frontier_paths()]))
    return [growth.tree() for growth in growths]


@pytest.mark.parametrize("vocab", [7, 40])
@pytest.mark.parametrize("name", SHAPES)
def test_trees_of_one_batch_are_those_of_the_definition(name: str, vocab: int) -> None:
    """Trees of other depths and temperatures beside each other."""
    shape = SHAPES[name]
    cases = [
        (sequence(index, vocab, (0.0, 1.0, 0.6)[index % 3]), 1 + index % 5, random_model(index, vocab, 0.5 + index % 4))
        for index in range(30)
    ]
    growths = {TreeGrowth(seq, depth, shape, vocab): model for seq, depth, model in cases}
    trees = grow(growths)
    for (seq, depth, model), tree in zip(cases, trees, strict=True):
        assert nodes_of(tree) == expected_nodes(model, seq, depth, shape)
        assert len(tree) <= shape.max_nodes(depth)
    assert max(map(len, trees)) > 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", SHAPES)
def test_equals_leave_the_tree_whole(name: str, temperature: float) -> None:
    """A certain child scores as much as its parent. Of equals the earlier one is kept, so none loses its parent."""

    def certain(path: growth_reference.Path) -> torch.Tensor:
        return torch.full((9,), -torch.inf).index_fill_(0, torch.tensor([1 + len(path) % 3]), 3.0)

    def even(path: growth_reference.Path) -> torch.Tensor:
        return torch.zeros(9)

    shape = SHAPES[name]
    for model in (certain, even) if temperature == 0.0 else (certain,):
        seq = sequence(0, 9, temperature)
        if shape.paths and model is certain:
            continue  # there is no second-best child
        (tree,) = grow({TreeGrowth(seq, 4, shape, 9): model})
        assert nodes_of(tree) == expected_nodes(model, seq, 4, shape)


def test_with_temperature_the_best_candidate_is_what_the_target_draws() -> None:
    """So a drafter that agrees with the target on the distributions has every token of its first path accepted."""
    for index in range(40):
        seq, model = sequence(index, 30, 0.9), random_model(index, 30, 1.5)
        path: growth_reference.Path = ()
        (tree,) = grow({TreeGrowth(seq, 3, TreeShape(3, 6), 30): model})
        for _ in range(3):
            token = sample(model(path)[None], [RowContext(seq, path)]).tokens[0]
            path = (*path, token)
            if token in seq.eos_token_ids:
                break
            assert path in nodes_of(tree)


# The drafters, in the engine -----------------------------------------------------------------------------------------


def scripted(draft: str, skip: tuple[str, ...] = (), vocab: int = 257) -> Callable[[Sequence], Model]:
    """A scripted model, asked about whole sequences."""

    class Skipping(ScriptedExecutor):
        def forward(self, batch: Any, cache: Any) -> Any:
            return self.forward_skipping(batch, cache, SkipSet.parse(skip, self.script.layers))

    executor = Skipping(Script.parse(draft))

    def of(seq: Sequence) -> Model:
        tokens = list(seq.tokens)
        return lambda path: Trial(executor).chain([*tokens, *path])[-1][:vocab]

    return of


class TinyModels:
    """Heads and a layer on the tiny target, asked by the papers' formulas about whole sequences."""

    def __init__(self, folder: Path) -> None:
        self.target = tiny_target()
        weights = tiny_model()
        self._lm_head = weights.lm_head.weight.detach()
        self._heads = random_heads(3)
        layer = eagle1_tensors()
        self._eagle = Eagle(layer, weights.model.embed_tokens.weight.detach(), 1)
        self.medusa = write_heads(folder / "medusa", self._heads)
        self.eagle = write_eagle(folder / "eagle", LAYER, layer)

    def _features(self, tokens: Seq[int]) -> torch.Tensor:
        """[T - 1, N]: of all tokens but the last one."""
        trial = Trial(self.target.executor)
        trial.cache.keep_hidden((FINAL,))
        seq = trial.open(tokens)
        trial.run([Feed(seq, 0, len(seq) - 1)])
        return trial.cache.hidden[FINAL][[trial.cache.slot(seq, position) for position in range(len(seq) - 1)]]

    def ask_heads(self, seq: Sequence) -> Model:
        hidden = self._features(seq.tokens)[-1]
        return lambda path: medusa_logits(self._heads, len(path), 1, hidden)

    def ask_layer(self, seq: Sequence) -> Model:
        tokens = list(seq.tokens)
        features = self._features(tokens)
        return lambda path: self._eagle.draft(features, tokens, path)[-1] @ self._lm_head.T


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    return TinyModels(tmp_path_factory.mktemp("drafts"))


def watched(
    target: LoadedModel, speculation: SpeculationConfig, ask: Callable[[Sequence], Model], shape: TreeShape
) -> int:
    """Run requests, greedy and not, and compare every tree that is proposed; returns how many there were."""
    core = EngineCore(EngineConfig("watched", max_batch=4, kv_blocks=200, speculation=speculation), model=target)
    propose, found = core.speculator.propose, 0

    def watch(seqs: Seq[Sequence], lengths: Seq[int]) -> list[DraftTree]:
        nonlocal found
        trees = propose(seqs, lengths)
        for seq, length, tree in zip(seqs, lengths, trees, strict=True):
            if len(tree) == 0 and seq.num_emitted == 0:
                continue  # what the target has to lend is not there yet
            if length > 0:
                assert nodes_of(tree) == expected_nodes(ask(seq), seq, length, shape)
                found += 1
        return trees

    core.speculator.propose = watch  # type: ignore[method-assign]
    params = [SamplingParams(max_tokens=9, temperature=t, seed=5) for t in (0.0, 0.8, 1.0)]
    run(core, [Request(index, [40 + index, 50, 60 + index], params[index % 3]) for index in range(6)])
    return found


TREES: dict[str, dict[str, Any]] = {
    "chain": {"tree_width": 1},
    "beam": {"tree_width": 3},
    "dynamic": {"tree_width": 3, "tree_nodes": 7},
    "fixed": {"tree_paths": GAPS},
}
DRAFT = "scripted:seed=8,order=2,sharpness=1.5"


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("method", ["draft_model", "mapped", "self", "medusa", "eagle"])
def test_drafters_propose_the_trees_of_the_definition(method: str, tree: str, tiny: TinyModels) -> None:
    script, name = load_scripted(TARGET), "draft_model" if method == "mapped" else method
    target, options, ask = {
        "draft_model": (script, {"draft": DRAFT}, scripted(DRAFT)),
        "mapped": (script, {"draft": f"{DRAFT},vocab=300"}, scripted(f"{DRAFT},vocab=300")),
        "self": (script, {"skip": ("mlp.0",)}, scripted(TARGET, ("mlp.0",))),
        "medusa": (tiny.target, {"draft": tiny.medusa}, tiny.ask_heads),
        "eagle": (tiny.target, {"draft": tiny.eagle}, tiny.ask_layer),
    }[method]
    speculation = SpeculationConfig(method=name, max_draft_tokens=3, policy="fixed", **options, **TREES[tree])
    assert watched(target, speculation, ask, speculation.tree_shape) >= 12
