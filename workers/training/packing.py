"""Documents side by side in packs of a bounded number of tokens. Nothing attends from one document to another."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from random import Random

Pack = tuple[int, ...]
"""Indices of documents."""


def packs(lengths: Seq[int], budget: int, seed: int, epoch: int) -> list[Pack]:
    """All documents once, in an order that only `seed` and `epoch` decide, in packs of at most `budget` tokens.

    A document that is longer than `budget` has a pack of its own.
    """
    order = list(range(len(lengths)))
    Random(f"{seed}:{epoch}").shuffle(order)
    done: list[Pack] = []
    pack: list[int] = []
    room = budget
    for index in order:
        if pack and lengths[index] > room:
            done.append(tuple(pack))
            pack, room = [], budget
        pack.append(index)
        room -= lengths[index]
    if pack:
        done.append(tuple(pack))
    return done
