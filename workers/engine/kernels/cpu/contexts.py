"""A search tree over the contexts of tokens, in flat arrays: where did these last tokens occur before?

Token ids lie in a ring of slots, text after text, with END before the first, between them and after the last. A slot
holds the token that followed its *context*: the tokens before it in its text, read backwards, at most `depth` of them.
A slot whose context has SHORTEST tokens is also a node of one binary search tree in the order of contexts. There
contexts with the same last tokens lie side by side, so the neighbours of any other context share the longest suffix
with it, and all places of that suffix are a range.

The tree is a treap (Seidel and Aragon 1996): each node's priority, a hash of its slot, exceeds those of its children.
So its depth is logarithmic, whatever the texts are, and its shape depends on what it holds, not on the order of events.

`tokens` is int32 [S], `links` int32 [1 + 2 S]: the root, then the lesser and the greater child of each slot; `context`
int32 [depth + 1], closed by END. All of this is for use inside kernels.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from workers.engine.kernels.cpu.runtime import inlined

END, NONE = -1, -1
"""In place of a token id: no text goes on here. In place of a slot: no node."""
SHORTEST = 2
"""Tokens of the shortest match."""
ROOT = 0

# Contexts -----------------------------------------------------------------------------------------------------------


@inlined
def _before(tokens: Any, slot: Any, distance: Any) -> Any:
    place = slot - 1 - distance
    return tokens[place if place >= 0 else place + len(tokens)]


@inlined
def after(tokens: Any, slot: Any) -> Any:
    return slot + 1 if slot + 1 < len(tokens) else 0


@inlined
def read_context(tokens: Any, slot: Any, context: Any) -> Any:
    """Write the context of `slot` and then END; returns whether it is long enough for a node."""
    length = 0
    while length < len(context) - 1 and _before(tokens, slot, length) != END:
        context[length] = _before(tokens, slot, length)
        length += 1
    context[length] = END
    return length >= SHORTEST


@inlined
def _common(tokens: Any, slot: Any, context: Any, known: Any) -> Any:
    """How many first tokens of `context` the one of `slot` has too, of which `known` are known."""
    while context[known] != END and context[known] == _before(tokens, slot, known):
        known += 1
    return known


@inlined
def _is_greater(tokens: Any, slot: Any, context: Any, own: Any, common: Any) -> Any:
    """Whether `context`, of slot `own`, comes after that of `slot`: by the first token that differs, then by slot."""
    theirs = END if common == len(context) - 1 else _before(tokens, slot, common)
    return context[common] > theirs or (context[common] == theirs and own > slot)


# The tree -----------------------------------------------------------------------------------------------------------


@inlined
def _lesser(slot: Any) -> Any:
    return 1 + 2 * slot


@inlined
def _greater(slot: Any) -> Any:
    return 2 + 2 * slot


@inlined
def _priority(slot: Any) -> Any:
    """A permutation of the 32-bit integers without order (Wellons' lowbias32)."""
    x = np.uint32(slot)
    x = np.uint32((x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D))
    x = np.uint32((x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B))
    return np.uint32(x ^ (x >> np.uint32(16)))


@inlined
def insert(tokens: Any, links: Any, slot: Any, context: Any) -> None:
    # Everything below a node has at least the tokens in common that its nearest lesser and greater ancestors share.
    link, low, high = ROOT, 0, 0
    while links[link] != NONE and _priority(links[link]) > _priority(slot):
        node = links[link]
        common = _common(tokens, node, context, min(low, high))
        if _is_greater(tokens, node, context, slot, common):
            link, low = _greater(node), common
        else:
            link, high = _lesser(node), common
    node = links[link]
    links[link] = slot
    less, more = _lesser(slot), _greater(slot)
    while node != NONE:
        common = _common(tokens, node, context, min(low, high))
        if _is_greater(tokens, node, context, slot, common):
            links[less], less, low = node, _greater(node), common
            node = links[less]
        else:
            links[more], more, high = node, _lesser(node), common
            node = links[more]
    links[less] = links[more] = NONE


@inlined
def delete(tokens: Any, links: Any, slot: Any, context: Any) -> None:
    link, low, high = ROOT, 0, 0
    while links[link] != slot:
        node = links[link]
        common = _common(tokens, node, context, min(low, high))
        if _is_greater(tokens, node, context, slot, common):
            link, low = _greater(node), common
        else:
            link, high = _lesser(node), common
    less, more = links[_lesser(slot)], links[_greater(slot)]
    while less != NONE and more != NONE:
        if _priority(less) > _priority(more):
            links[link], link = less, _greater(less)
            less = links[link]
        else:
            links[link], link = more, _lesser(more)
            more = links[link]
    links[link] = more if less == NONE else less


@inlined
def find(tokens: Any, links: Any, context: Any) -> Any:
    """(length of the longest known suffix, root of the smallest subtree that holds all its places)."""
    node, low, high = links[ROOT], 0, 0
    longest, top = 0, NONE
    while node != NONE:
        common = _common(tokens, node, context, min(low, high))
        if common > longest:
            longest, top = common, node
        if _is_greater(tokens, node, context, NONE, common):
            node, low = links[_greater(node)], common
        else:
            node, high = links[_lesser(node)], common
    return longest, top


@inlined
def _pop(waiting: Any, size: Any) -> Any:
    """Take the node of highest priority out of the first `size`."""
    best = 0
    for i in range(1, size):
        if _priority(waiting[i]) > _priority(waiting[best]):
            best = i
    node = waiting[best]
    waiting[best] = waiting[size - 1]
    return node


@inlined
def collect(tokens: Any, links: Any, context: Any, longest: Any, top: Any, places: Any) -> Any:
    """Write the places below `top` that share `longest` tokens with `context`, those of highest priority; how many.

    Priorities know nothing of texts: a fair sample. Parents come before their children.
    """
    waiting = np.empty(len(places) + 1, np.int64)
    waiting[0] = top
    size, count = 1, 0
    while size > 0 and count < len(places):
        node = _pop(waiting, size)
        size -= 1
        common = _common(tokens, node, context, 0)
        if common >= longest:
            places[count] = node
            count += 1
        greater = _is_greater(tokens, node, context, NONE, common)
        if links[_lesser(node)] != NONE and (common >= longest or not greater):
            waiting[size] = links[_lesser(node)]
            size += 1
        if links[_greater(node)] != NONE and (common >= longest or greater):
            waiting[size] = links[_greater(node)]
            size += 1
    return count
