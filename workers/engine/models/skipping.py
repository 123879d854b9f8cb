"""Running a model with some of its sublayers left out: a cheaper model that shares weights and KV cache."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from workers.engine.api.errors import InvalidConfig

ATTENTION, MLP = "attn", "mlp"


@dataclass(frozen=True, slots=True)
class SkipSet:
    """Layers whose attention, and layers whose MLP, is left out: its input goes past it on the residual stream."""

    attention: frozenset[int] = frozenset()
    mlp: frozenset[int] = frozenset()

    @classmethod
    def parse(cls, names: Iterable[str], num_layers: int) -> SkipSet:
        """From names such as "attn.3" and "mlp.7"; raises `InvalidConfig`, naming what the model does not have."""
        found: dict[str, set[int]] = {ATTENTION: set(), MLP: set()}
        for name in names:
            kind, _, layer = name.partition(".")
            if kind not in found or not layer.isdecimal() or int(layer) >= num_layers:
                raise InvalidConfig(
                    f"skip: {name!r} is no sublayer of this model, which has attn.0 to attn.{num_layers - 1} "
                    f"and mlp.0 to mlp.{num_layers - 1}"
                )
            found[kind].add(int(layer))
        return cls(frozenset(found[ATTENTION]), frozenset(found[MLP]))

    @classmethod
    def leave_at(cls, layer: int, num_layers: int) -> SkipSet:
        """Everything from `layer` on; raises `InvalidConfig` unless that leaves out something and keeps something."""
        if not 1 <= layer < num_layers:
            raise InvalidConfig(f"exit_layer must be 1 to {num_layers - 1} with this model, got {layer}")
        rest = frozenset(range(layer, num_layers))
        return cls(rest, rest)

    @property
    def names(self) -> tuple[str, ...]:
        """Attention first, each kind by layer."""
        return (*(f"{ATTENTION}.{i}" for i in sorted(self.attention)), *(f"{MLP}.{i}" for i in sorted(self.mlp)))

    def __len__(self) -> int:
        return len(self.attention) + len(self.mlp)

    def flip(self, name: str) -> SkipSet:
        """With that sublayer left out if it was kept, and kept if it was left out."""
        kind, _, layer = name.partition(".")
        one = frozenset((int(layer),))
        return SkipSet(self.attention ^ one, self.mlp) if kind == ATTENTION else SkipSet(self.attention, self.mlp ^ one)


NOTHING = SkipSet()
