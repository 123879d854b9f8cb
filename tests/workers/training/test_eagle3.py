"""EAGLE-3's training against the paper's formulas, and against what the engine makes of the result."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.drafts.reference import Eagle
from tests.support.training import CONFIG, PROMPTS, answered, drafter_for, sure_model, sure_target, trainer_for
from workers.training import eagle3
from workers.training.documents import Document
from workers.training.eagle3 import STEP_DECAY, Eagle3Drafter
from workers.training.evaluation import Evaluation
from workers.training.features import ComputedFeatures, Features
from workers.training.simulation import simulate
from workers.training.vocabulary import frequent_tokens

STEPS = 3
ABOUT = {"target": "tiny", "architecture": "LlamaForCausalLM", "steps": STEPS}


@pytest.fixture(scope="module")
def target() -> Any:
    return sure_target()


@pytest.fixture(scope="module")
def documents(target: Any) -> list[Document]:
    return answered(target)


def paper_loss(
    drafter: Eagle3Drafter, tensors: dict[str, torch.Tensor], documents: Seq[Document], features: Any, vocabulary: Any
) -> torch.Tensor:
    """One context and one drafted token at a time: whole sequences, no pack, no mask."""
    model = sure_model()
    embed, head = model.model.embed_tokens.weight.detach(), model.lm_head.weight.detach()
    flags = {name: getattr(drafter.config, name) for name in ("norm_before_residual", "fc_norm", "norm_output")}
    eagle = Eagle(tensors, embed, 3, **flags)
    known = vocabulary.tolist()
    loss, start = torch.zeros(()), 0
    for document in documents:
        rows, final = features.layers[start : start + len(document)], features.final[start : start + len(document)]
        start += len(document)
        for place in range(document.num_prompt, len(document)):  # each token of the answer, at each depth
            for depth in range(STEPS):
                context = place - depth  # tokens before the first drafted one
                if context < max(2, document.num_prompt) or document.tokens[place] not in known:
                    continue
                outputs = eagle.draft(rows[: context - 1], document.tokens[:context], document.tokens[context:place])
                logits = eagle.logits(outputs[-1:], tensors["lm_head.weight"])[0]
                teacher = (final[place - 1] @ head.T)[vocabulary].softmax(-1)
                loss = loss - STEP_DECAY**depth * (teacher * logits.log_softmax(-1)).sum()
    return loss


@pytest.mark.parametrize("draft_vocab", [320, 60])
def test_loss_and_gradients_equal_the_papers(draft_vocab: int, target: Any, documents: list[Document]) -> None:
    some = documents[2:5]
    drafter = drafter_for(target, documents, draft_vocab=draft_vocab, steps=STEPS, noise=0.1)  # every part shows
    features = ComputedFeatures(target, some, drafter.feature_layers).of(range(len(some)))
    outcome = drafter.outcome(some, features)
    outcome.loss.backward()
    reference = {name: tensor.detach().clone().requires_grad_() for name, tensor in drafter.tensors.items()}
    vocabulary = frequent_tokens(documents, draft_vocab, 320)
    expected = paper_loss(drafter, reference, some, features, vocabulary)
    expected.backward()
    torch.testing.assert_close(outcome.loss, expected, rtol=1e-4, atol=1e-4)
    for name, tensor in drafter.tensors.items():
        assert reference[name].grad is not None, name
        assert bool(reference[name].grad.any()), name
        torch.testing.assert_close(
            tensor.grad, reference[name].grad, rtol=1e-3, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("fault", ["shift", "mask", "vocabulary", "features"])
def test_a_fault_of_one_place_shows(
    fault: str, target: Any, documents: list[Document], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison above is not blind: each of these moves the loss beyond ten times its tolerance."""
    some = documents[2:5]
    drafter = drafter_for(target, documents, draft_vocab=60, steps=STEPS, noise=0.1)
    features = ComputedFeatures(target, some, drafter.feature_layers).of(range(len(some)))
    right = float(drafter.outcome(some, features).loss.detach())
    if fault == "shift":
        after = eagle3._Pack.after
        monkeypatch.setattr(eagle3._Pack, "after", lambda pack, index, step: after(pack, index, step + 1))
    elif fault == "mask":
        some = [Document(document.tokens, document.num_prompt + 1) for document in some]
    elif fault == "vocabulary":
        drafter._draft_ids = drafter._draft_ids.roll(1)
    else:
        features = Features(features.layers.roll(1, 0), features.final)
    wrong = float(drafter.outcome(some, features).loss.detach())
    assert abs(wrong - right) > 1e-3 * right


@pytest.mark.parametrize("draft_vocab", [320, 120])
def test_served_equals_simulated(draft_vocab: int, tmp_path: Path, target: Any, documents: list[Document]) -> None:
    """The rows, masks, vocabulary and files of training are those that serve: token for token, in float32."""
    drafter = drafter_for(target, documents, draft_vocab=draft_vocab, steps=STEPS)
    trainer = trainer_for(tmp_path / "run", target, documents, drafter, epochs=40, lr=3e-2)
    for _ in trainer.run():
        pass
    drafter.save(tmp_path / "drafter", ABOUT, dtype=torch.float32)
    served = Evaluation(CONFIG, target, PROMPTS, max_tokens=24, depth=STEPS).run("eagle", tmp_path / "drafter")
    assert [document.tokens for document in served.documents] == [document.tokens for document in documents]
    features = ComputedFeatures(target, documents, drafter.feature_layers).of(range(len(documents)))
    simulated = simulate(documents, drafter.outcome(documents, features))
    assert served.counts.mean_acceptance_length > 2
    assert (simulated.tokens, simulated.steps) == (served.counts.output_tokens, served.counts.steps)
