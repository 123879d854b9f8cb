"""A memory of texts that tells what followed the longest known suffix of another one, and how often.

Exact, at 12 bytes per token: its id and two links of the tree in `kernels.contexts`.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import carray

from workers.engine.kernels.cpu.contexts import END, NONE, SHORTEST, after, collect, delete, find, insert, read_context
from workers.engine.kernels.cpu.floats import pointer
from workers.engine.kernels.cpu.runtime import ARGUMENTS, Kernel, inlined

MATCHES = 32
"""Places that are looked at; of more, a sample that is spread over them and always the same."""


class SuffixTree:
    """The ring and the tree. Who uses it keeps account of the slots: where texts begin, and which are free."""

    def __init__(self, depth: int) -> None:
        """With two slots: END before the first text, and where it begins."""
        self._depth = depth
        self._tokens = np.full(2, END, np.int32)
        self._links = np.full(_links(2), NONE, np.int32)
        self._addresses = self._find_addresses()

    def __len__(self) -> int:
        """Number of slots."""
        return len(self._tokens)

    @property
    def nbytes(self) -> int:
        return self._tokens.nbytes + self._links.nbytes

    def grow(self, slots: int) -> None:
        """Add free slots after the last; only while no text goes on in the first slot."""
        self._tokens = _longer(self._tokens, slots)
        self._links = _longer(self._links, _links(slots))
        self._addresses = self._find_addresses()

    def append(self, slot: int, tokens: Seq[int]) -> int:
        """Let a text go on in `slot`, where it ends now. Returns where it ends then.

        As many slots after this one, modulo their number, must be free: tokens and END.
        """
        new = array("i", tokens)
        _append(1, *self._addresses, slot, new.buffer_info()[0], len(new), numbers=0)
        return (slot + len(new)) % len(self)

    def finish(self, slot: int) -> int:
        """Let the next text begin after the one that ends in `slot`. Returns where."""
        slot = (slot + 1) % len(self)
        self._tokens[slot] = END
        return slot

    def remove(self, slot: int) -> int:
        """Forget the text that begins in `slot`. Returns where it ends: then its slots before this one are free."""
        end = array("q", bytes(8))
        _remove(1, *self._addresses, slot, 0, 0, end.buffer_info()[0], numbers=0)
        return end[0]

    def follow(self, context: Seq[int], steps: int, newest: int) -> tuple[int, int, list[int], list[int]]:
        """Go on after `context` as its longest known suffix went on most often.

        Returns the suffix's length (0: unknown), how many of its places are looked at, at most `steps` tokens, and how
        many places went on like this up to each. Of equally frequent tokens the latest is taken; `newest` is the slot
        in which the newest text ends.
        """
        recent = array("i", context[-self._depth :])
        found = array("q", bytes(8 * (3 + 2 * steps)))
        given = newest, recent.buffer_info()[0], len(recent)
        _follow(1, *self._addresses, *given, found.buffer_info()[0], steps, numbers=0)
        length, places, taken, *rest = found.tolist()
        return length, places, rest[:taken], rest[steps : steps + taken]

    def _find_addresses(self) -> tuple[int, int, int, int]:
        return self._depth, len(self), self._tokens.ctypes.data, self._links.ctypes.data


def compile_kernels() -> None:
    """Compile now what would otherwise be compiled on first use."""
    for kernel in (_append, _remove, _follow):
        kernel.compile()


def _links(slots: int) -> int:
    return 1 + 2 * slots


def _longer(numbers: npt.NDArray[np.int32], length: int) -> npt.NDArray[np.int32]:
    longer = np.empty(length, np.int32)
    longer[: len(numbers)] = numbers
    return longer


# What followed ------------------------------------------------------------------------------------------------------


@inlined
def _sort_by_age(places: Any, count: Any, end: Any, slots: Any) -> None:
    """Newest first: the slots before `end`, then those of the ring's last round."""
    for i in range(1, count):
        place, j = places[i], i
        while j > 0 and (end - places[j - 1]) % slots > (end - place) % slots:
            places[j] = places[j - 1]
            j -= 1
        places[j] = place


@inlined
def _vote(tokens: Any, places: Any, count: Any) -> Any:
    """(the most frequent token in `places`, the first of equals, or END if all texts are over; how often)."""
    winner, most = END, 0
    for i in range(count):
        token, votes = tokens[places[i]], 0
        if token != END:
            for j in range(i, count):
                votes += tokens[places[j]] == token
            if votes > most:
                winner, most = token, votes
            if 2 * most >= count:
                break
    return winner, most


@inlined
def _keep(tokens: Any, places: Any, count: Any, token: Any) -> None:
    """Go one slot on in the places that hold `token`; forget the others."""
    kept = 0
    for i in range(count):
        if tokens[places[i]] == token:
            places[kept] = after(tokens, places[i])
            kept += 1


# Kernels and their arguments ----------------------------------------------------------------------------------------

_DEPTH, _SLOTS, _TOKENS, _LINKS, _SLOT, _GIVEN, _COUNT, _FOUND, _STEPS = range(ARGUMENTS, ARGUMENTS + 9)


@inlined
def _arrays(block: Any) -> Any:
    slots = block[_SLOTS]
    tokens = carray(pointer(block[_TOKENS]), (slots,), np.int32)
    links = carray(pointer(block[_LINKS]), (1 + 2 * slots,), np.int32)
    # No context is longer than the ring.
    context = np.empty(min(block[_DEPTH], slots) + 1, np.int32)
    return tokens, links, context


def _append_body(block: Any) -> None:
    tokens, links, context = _arrays(block)
    slot = block[_SLOT]
    new = carray(pointer(block[_GIVEN]), (block[_COUNT],), np.int32)
    for i in range(len(new)):
        tokens[slot] = new[i]
        if read_context(tokens, slot, context):
            insert(tokens, links, slot, context)
        slot = after(tokens, slot)
        tokens[slot] = END


def _remove_body(block: Any) -> None:
    tokens, links, context = _arrays(block)
    slot = block[_SLOT]
    while tokens[slot] != END:
        if read_context(tokens, slot, context):
            delete(tokens, links, slot, context)
        slot = after(tokens, slot)
    carray(pointer(block[_FOUND]), (1,), np.int64)[0] = slot


def _follow_body(block: Any) -> None:
    tokens, links, context = _arrays(block)
    recent = carray(pointer(block[_GIVEN]), (block[_COUNT],), np.int32)
    steps = block[_STEPS]
    found = carray(pointer(block[_FOUND]), (3 + 2 * steps,), np.int64)
    length = min(len(recent), len(context) - 1)
    for i in range(length):
        context[i] = recent[len(recent) - 1 - i]
    context[length] = END
    longest, top = find(tokens, links, context)
    places = np.empty(MATCHES, np.int64)
    count = taken = 0
    if longest >= SHORTEST:
        count = collect(tokens, links, context, longest, top, places)
        _sort_by_age(places, count, block[_SLOT], len(tokens))
    found[0], found[1] = longest if count else 0, count
    while taken < steps:
        token, votes = _vote(tokens, places, count)
        if votes == 0:
            break
        found[3 + taken], found[3 + steps + taken] = token, votes
        _keep(tokens, places, count, token)
        count = votes
        taken += 1
    found[2] = taken


_append, _remove, _follow = Kernel(_append_body), Kernel(_remove_body), Kernel(_follow_body)
