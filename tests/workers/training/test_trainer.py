"""A training that is stopped anywhere and resumed ends with the weights of one that never was; what cannot be resumed
is refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.training import answered, drafter_for, sure_target, trainer_for
from workers.training.checkpoints import STATE, load_state
from workers.training.errors import ChangedRun, Diverged, TrainingError
from workers.training.features import ComputedFeatures, store_features
from workers.training.packing import packs
from workers.training.trainer import Trainer


@pytest.fixture(scope="module")
def target() -> Any:
    return sure_target()


@pytest.fixture(scope="module")
def documents(target: Any) -> Any:
    return answered(target)


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in trainer._drafter.tensors.items()}


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("stopped_at", [1, 3, 5, 7])
def test_stopped_and_resumed(stopped_at: int, accumulate: int, tmp_path: Path, target: Any, documents: Any) -> None:
    options = {"epochs": 3, "accumulate": accumulate}
    whole = trainer_for(tmp_path / "whole", target, documents, **options)
    losses = [point.loss for point in whole.run()]
    first = trainer_for(tmp_path / "parts", target, documents, **options)
    taken = [point.loss for point in first.run(stop=lambda: first.progress.step >= stopped_at)]
    assert len(taken) == min(stopped_at, len(losses))
    second = trainer_for(tmp_path / "parts", target, documents, **options)
    taken += [point.loss for point in second.run()]
    assert taken == losses
    for name, tensor in weights(whole).items():
        assert torch.equal(tensor, weights(second)[name]), name


def test_accumulated_packs_are_one_larger_pack(tmp_path: Path, target: Any, documents: Any) -> None:
    """Whatever their lengths: answers are weighed by their tokens, not pack by pack."""
    one = trainer_for(tmp_path / "one", target, documents, epochs=1, pack_tokens=10_000)
    many = trainer_for(tmp_path / "many", target, documents, epochs=1, pack_tokens=60, accumulate=1000)
    (a,), (b,) = list(one.run()), list(many.run())
    assert a.loss == pytest.approx(b.loss, rel=1e-5)
    gradients = [{n: t.grad for n, t in trainer._drafter.tensors.items()} for trainer in (one, many)]
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], rtol=1e-3, atol=1e-6)


def test_another_training_is_not_resumed(tmp_path: Path, target: Any, documents: Any) -> None:
    for _ in trainer_for(tmp_path, target, documents).run():
        pass
    with pytest.raises(ChangedRun, match="documents was 8 and is 7"):
        trainer_for(tmp_path, target, documents[:7])


def test_a_loss_that_is_no_number_ends_it_and_keeps_what_was_saved(tmp_path: Path, target: Any, documents: Any) -> None:
    trainer = trainer_for(tmp_path, target, documents, epochs=5)

    def poison() -> bool:
        if trainer.progress.step == 3:
            with torch.no_grad():
                trainer._drafter.tensors["fc.weight"].fill_(torch.nan)
        return False

    with pytest.raises(Diverged, match=r"the loss is nan in step 4.*what was saved in step 3 is kept"):
        list(trainer.run(stop=poison))
    state = load_state(tmp_path, {"documents": 8})
    assert state is not None
    assert state.progress.step == 3
    assert all(bool(torch.isfinite(tensor).all()) for tensor in state.tensors.values())
    assert [file.name for file in tmp_path.iterdir()] == [STATE]


def test_packs_hold_every_document_once_in_an_order_of_their_own_each_epoch() -> None:
    lengths = [5, 100, 30, 7, 64, 1, 33]
    found = [packs(lengths, 64, seed=3, epoch=epoch) for epoch in (0, 1, 0)]
    assert found[0] == found[2] != found[1]
    for pack in found[0]:
        assert len(pack) == 1 or sum(lengths[index] for index in pack) <= 64
    assert sorted(index for pack in found[0] for index in pack) == list(range(7))


def test_stored_features_are_those_that_are_computed(tmp_path: Path, target: Any, documents: Any) -> None:
    layers = drafter_for(target, documents).feature_layers
    computed = ComputedFeatures(target, documents, layers)
    stored = store_features(tmp_path, "a", target, documents, layers, budget=70)
    for chosen in ((0,), (5, 2, 7)):
        a, b = computed.of(chosen), stored.of(chosen)
        assert torch.equal(a.layers, b.layers)
        assert torch.equal(a.final, b.final)
    with pytest.raises(ChangedRun, match="other answers or another target"):
        store_features(tmp_path, "b", target, documents, layers, budget=70)


_CHILD = """
import sys
from pathlib import Path
from tests.support.training import answered, sure_target, trainer_for
target = sure_target()
for point in trainer_for(Path(sys.argv[1]), target, answered(target), epochs=4).run():
    print(point.progress.step, flush=True)
"""


def test_killed_and_resumed(tmp_path: Path, target: Any, documents: Any) -> None:
    """With -9, at five places: while it learns, and while it saves, since it saves after every step."""
    whole = trainer_for(tmp_path / "whole", target, documents, epochs=4)
    assert len(list(whole.run())) > 12
    for place in (1, 2, 4, 3, 1):
        command = [sys.executable, "-c", _CHILD, str(tmp_path / "killed")]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[3]) as child:
            assert child.stdout is not None
            for _ in range(place):
                assert child.stdout.readline()
            child.kill()
    killed = trainer_for(tmp_path / "killed", target, documents, epochs=4)
    assert 0 < killed.progress.step < whole.progress.step
    for _ in killed.run():
        pass
    for name, tensor in weights(whole).items():
        assert torch.equal(tensor, weights(killed)[name]), name
    assert not list((tmp_path / "killed").glob("*.partial"))


def test_a_full_disk_leaves_the_last_state(target: Any, documents: Any, tmp_path: Path) -> None:
    trainer = trainer_for(tmp_path, target, documents, epochs=4)
    steps = trainer.run()
    for _ in range(3):
        next(steps)
    saved = (tmp_path / STATE).read_bytes()
    (tmp_path / f"{STATE}.partial").symlink_to("/dev/full")
    with pytest.raises(TrainingError, match=r"cannot be saved .* What was saved before is kept"):
        for _ in steps:
            pass
    assert (tmp_path / STATE).read_bytes() == saved
    assert [file.name for file in tmp_path.iterdir()] == [STATE]
    for _ in trainer_for(tmp_path, target, documents, epochs=4).run():
        pass
