"""How an engine is set up: what to load, how to speculate, how much memory to use. No torch here."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace

from workers.engine.api.backends import ENGINES
from workers.engine.api.errors import InvalidConfig
from workers.engine.api.methods import REGISTRY
from workers.engine.api.options import Range, not_among, out_of_range, wrong_types
from workers.engine.api.tree_shape import RankPath, TreeShape

METHODS = tuple(REGISTRY)
DRAFTERS = ("draft_model", "medusa", "eagle")
"""Methods that load a draft."""
SCORERS = (*DRAFTERS, "self")
"""Methods that score tokens, and so can grow trees."""
DRAFTING = tuple(method for method in METHODS if method != "none")
OPTIONS_OF_METHODS = {
    **dict.fromkeys(("draft", "draft_dtype"), DRAFTERS),
    **dict.fromkeys(("vocabulary",), ("draft_model",)),
    **dict.fromkeys(("skip", "exit_layer", "skip_file"), ("self",)),
    **dict.fromkeys(("tree_width", "tree_nodes", "tree_paths"), SCORERS),
    **dict.fromkeys(("ngram_min", "ngram_max"), ("ngram",)),
    **dict.fromkeys(("suffix_depth", "suffix_factor", "suffix_min_probability", "suffix_memory_tokens"), ("suffix",)),
    **dict.fromkeys(("max_draft_tokens", "policy", "raise_above", "lower_below"), DRAFTING),
}
"""Options of speculation -> the methods that they mean something to."""
OPTIONS_OF_CHOICES = {
    **dict.fromkeys(("raise_above", "lower_below"), ("policy", "threshold")),
    **dict.fromkeys(("typical_epsilon", "typical_delta"), ("verify", "typical")),
}
"""Options that mean something only where another one has this value."""
DRAFT_DTYPES = ("float32", "bfloat16", "int8")
VOCABULARIES = ("auto", "same", "mapped", "text")
VERIFY_RULES = ("exact", "rejection", "block", "typical")
_FIXED_DRAFTS = ("none", "ngram", "suffix")
"""Methods that look their drafts up: nothing is drawn, so there is no distribution to weigh."""
DTYPES = ("auto", "float32", "bfloat16")
ATTENTION_BACKENDS = ("auto", "numba", "sdpa", "reference")
POLICIES = ("auto", "fixed", "threshold")
MAX_TREE_WIDTH, MAX_TREE_NODES = 16, 256
DYNAMIC_WIDTH, DYNAMIC_NODES = 4, 16
"""Tree of medusa and eagle where none is set. EAGLE-2 takes 10 and 60 at batch size 1."""
DEFAULT_DEPTH = 4

_CHOICES = {
    "method": METHODS,
    "row_methods": METHODS,
    "draft_dtype": DRAFT_DTYPES,
    "vocabulary": VOCABULARIES,
    "policy": POLICIES,
    "verify": VERIFY_RULES,
}
_RANGES = {
    "max_draft_tokens": Range(1, 32),
    "tree_width": Range(1, MAX_TREE_WIDTH),
    "tree_nodes": Range(1, MAX_TREE_NODES),
    "raise_above": Range(0, 1),
    "lower_below": Range(0, 1),
    "ngram_min": Range(1),
    "ngram_max": Range(1),
    "suffix_depth": Range(2),
    "suffix_factor": Range(0, above=True),
    "suffix_min_probability": Range(0, 1),
    "suffix_memory_tokens": Range(1),
    "typical_epsilon": Range(0, 1, above=True),
    "typical_delta": Range(0, 1, above=True),
}
_PLAIN_OPTIONS = {
    *(option for option, methods in OPTIONS_OF_METHODS.items() if not set(SCORERS).issuperset(methods)),
    *OPTIONS_OF_CHOICES,
}
"""Options with a default that is no None, so that only a change of it tells that they were set."""
_ENGINE_CHOICES = {"backend": tuple(ENGINES), "dtype": DTYPES, "attention": ATTENTION_BACKENDS}
_ENGINE_RANGES = {
    **dict.fromkeys(("max_batch", "max_step_tokens", "block_size", "kv_memory"), Range(1)),
    **dict.fromkeys(("max_model_len", "kv_blocks"), Range(2)),
}


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    """Which speculator runs and how much it drafts. Raises `InvalidConfig`, naming the option."""

    method: str = "none"
    row_methods: tuple[str, ...] = ()
    """Further methods that single requests may ask for; they share the options below."""
    draft: str | None = None
    """draft_model: directory, hub id, GGUF file or alias; "target" shares the target's weights.
    medusa, eagle: directory or hub id of the heads, or of the draft layer."""
    draft_dtype: str | None = None
    """Precision of the weights of the draft model, the heads or the draft layer; None is the target's. int8: linear
    layers of 8-bit weights and activations (CPU). With draft "target" the draft is a copy of the target in that
    precision."""
    vocabulary: str = "auto"
    """draft_model with another tokenizer (docs/speculation.md). same: refuse it; mapped: draft from the common tokens;
    text: draft text and tokenise it again; auto: same or mapped if it can, else text."""
    skip: tuple[str, ...] | None = None
    """self: sublayers that a draft pass leaves out, such as ("attn.3", "mlp.7")."""
    exit_layer: int | None = None
    """self: leave out everything from this layer on."""
    skip_file: str | None = None
    """self: where `nightdraft calibrate` put the skip set. Without skip, exit_layer and skip_file the one that was
    calibrated for the target on this machine is taken."""
    max_draft_tokens: int | None = None
    """Depth of the draft: tokens along one path. None: as deep as tree_paths, or as medusa's heads; otherwise 4."""
    tree_width: int | None = None
    """Candidates per level; 1 is a chain. None: a chain with draft_model; with medusa the tree that was calibrated for
    its heads, if there is one; otherwise a dynamic tree."""
    tree_nodes: int | None = None
    """Dynamic tree (EAGLE-2): the best tree_width nodes of each level are expanded, the best tree_nodes proposed."""
    tree_paths: tuple[RankPath, ...] = ()
    """Fixed tree: (0, 2) is the third-best child of the best child. The parent of every path is a path too."""
    policy: str = "auto"
    """How long drafts are, 0 included. auto: as long as pays, by what steps take and drafts are accepted; fixed: always
    max_draft_tokens; threshold: longer and shorter by acceptance alone."""
    raise_above: float = 0.6
    lower_below: float = 0.3
    ngram_min: int = 2
    """Shortest suffix that counts as a match, tokens."""
    ngram_max: int = 5
    suffix_depth: int = 64
    """Longest suffix that is compared, tokens."""
    suffix_factor: float = 2.0
    """A suffix draft is at most this times as long as its match."""
    suffix_min_probability: float = 0.1
    """A suffix draft ends where fewer of the matching occurrences agree."""
    suffix_memory_tokens: int = 500_000
    """Finished output that is remembered for each job, tokens."""
    verify: str = "exact"
    """Which drafted tokens stand (docs/verification.md). exact: the coupled rule, same tokens as without speculation;
    rejection, block: same distribution; typical: Medusa's, which changes the distribution."""
    typical_epsilon: float = 0.09
    """typical: a token passes above min(epsilon, delta * e^-entropy)."""
    typical_delta: float = 0.3

    @property
    def methods(self) -> tuple[str, ...]:
        """Every method that runs, the default first."""
        return tuple(dict.fromkeys((self.method, *self.row_methods)))

    @property
    def depth(self) -> int:
        """Tokens along one path, as far as the options tell: heads of medusa may decide otherwise (`settled`)."""
        return self.max_draft_tokens or max(map(len, self.tree_paths), default=DEFAULT_DEPTH)

    def settled(self, depth: int | None) -> SpeculationConfig:
        """With max_draft_tokens set, if any method drafts: to `depth`, that of the loaded draft, where nothing is."""
        if self.methods == ("none",):
            return self
        return replace(self, max_draft_tokens=self.max_draft_tokens or depth or self.depth)

    @property
    def has_tree(self) -> bool:
        """Whether the shape of the drafts is set here, and not left to the method."""
        return self.tree_width is not None or self.tree_nodes is not None or bool(self.tree_paths)

    @property
    def tree_shape(self) -> TreeShape:
        if self.tree_paths:
            return TreeShape(paths=self.tree_paths)
        if self.tree_nodes is not None:
            return TreeShape(self.tree_width or DYNAMIC_WIDTH, self.tree_nodes)
        if self.tree_width is None and not self.draws_apart and {"medusa", "eagle"} & set(self.methods):
            return TreeShape(DYNAMIC_WIDTH, DYNAMIC_NODES)
        width = self.tree_width or 1
        if self.verify == "rejection" and width > 1:
            # A beam drops drawn candidates by how they were drawn, which biases the output: take fixed ranks instead.
            return TreeShape.comb(width, self.depth)
        return TreeShape(width)

    @property
    def draws_apart(self) -> bool:
        """Whether the draft has to be drawn with noise of its own, keeping what it was drawn from."""
        return self.verify in ("rejection", "block")

    def label(self, method: str) -> str:
        """How completions name a method: with the rule, unless that is exact."""
        return method if self.verify == "exact" else f"{method}/{self.verify}"

    def __post_init__(self) -> None:
        wrong = dict(wrong_types(self))
        wrong |= dict(not_among(self, _CHOICES, wrong)) | dict(out_of_range(self, _RANGES, wrong))
        problems = [*wrong.values(), *self._unfit(wrong)]
        if problems:
            raise InvalidConfig(*problems)
        object.__setattr__(self, "row_methods", tuple(self.row_methods))
        object.__setattr__(self, "skip", None if self.skip is None else tuple(self.skip))
        object.__setattr__(self, "tree_paths", tuple(tuple(path) for path in self.tree_paths))

    def _unfit(self, wrong: Mapping[str, str]) -> Iterator[str]:
        """What does not fit together, among options that are right by themselves."""
        checks = {
            self._check_draft: ("method", "row_methods", "draft", "draft_dtype", "vocabulary"),
            self._check_skips: ("method", "row_methods", "skip", "exit_layer", "skip_file"),
            self._check_sublayers: ("skip",),
            self._check_tree: ("method", "row_methods", "tree_width", "tree_nodes", "tree_paths"),
            self._check_paths: ("tree_width", "tree_nodes", "tree_paths", "max_draft_tokens"),
            self._check_verify: ("method", "row_methods", "verify", "tree_width", "tree_nodes", "tree_paths"),
            self._check_bounds: ("ngram_min", "ngram_max", "lower_below", "raise_above"),
            self._check_effect: ("method", "row_methods", "policy", "verify", *_PLAIN_OPTIONS),
        }
        for check, options in checks.items():
            if wrong.keys().isdisjoint(options):
                yield from check()

    def _check_draft(self) -> Iterator[str]:
        drafters = [method for method in self.methods if method in DRAFTERS]
        if len(drafters) > 1:
            yield f"methods {' and '.join(drafters)} would share one draft: choose one of them"
        if drafters and not self.draft:
            yield f"method {drafters[0]} needs a draft: set draft to its directory"
        if self.draft and not drafters:
            yield f"draft is set, but method is {self.method}: only {', '.join(DRAFTERS)} take a draft"
        if self.vocabulary != "auto" and "draft_model" not in self.methods:
            yield f"vocabulary is set, but method is {self.method}: only draft_model has one"
        if self.draft_dtype is not None and not drafters:
            yield f"draft_dtype is set, but method is {self.method}: only {', '.join(DRAFTERS)} have one"

    def _check_skips(self) -> Iterator[str]:
        chosen = [name for name in ("skip", "exit_layer", "skip_file") if getattr(self, name) is not None]
        if len(chosen) > 1:
            yield f"{' and '.join(chosen)} each say what method self skips: set one of them"
        if chosen and "self" not in self.methods:
            yield f"{chosen[0]} is set, but method is {self.method}: only self skips sublayers"

    def _check_sublayers(self) -> Iterator[str]:
        for name in self.skip or ():
            if not re.fullmatch(r"(attn|mlp)\.\d+", name):
                yield f'skip names sublayers such as "attn.3" and "mlp.7", got {name!r}'

    def _check_tree(self) -> Iterator[str]:
        if self.tree_nodes is not None and self.tree_width == 1:
            yield "tree_nodes has no effect on a chain: set tree_width to more than 1, or drop it"
        shapes = {
            "tree_width": (self.tree_width or 1) > 1,
            "tree_nodes": self.tree_nodes,
            "tree_paths": self.tree_paths,
        }
        trees = [name for name, is_tree in shapes.items() if is_tree]
        if trees and not set(SCORERS) & set(self.methods):
            scorers = ", ".join(SCORERS)
            yield f"{trees[0]} is set, but drafts of method {self.method} are chains: trees need one of {scorers}"

    def _check_paths(self) -> Iterator[str]:
        paths = tuple(tuple(path) for path in self.tree_paths)
        if not paths:
            return
        if self.tree_width is not None or self.tree_nodes is not None:
            yield "tree_paths fixes the tree: drop tree_width and tree_nodes"
        if len(paths) > MAX_TREE_NODES or max(map(max, filter(None, paths)), default=0) >= MAX_TREE_WIDTH:
            yield f"tree_paths holds at most {MAX_TREE_NODES} paths with ranks below {MAX_TREE_WIDTH}"
            return
        if max(map(len, paths)) > (self.max_draft_tokens or MAX_TREE_NODES):
            yield f"tree_paths is {max(map(len, paths))} tokens deep, but max_draft_tokens is {self.max_draft_tokens}"
        try:
            TreeShape(paths=paths)
        except ValueError as error:
            yield f"tree_paths: {error}"

    def _check_verify(self) -> Iterator[str]:
        """Rules that do not fit the method, with the reason."""
        if self.verify != "exact" and self.methods == ("none",):
            yield f"verify is {self.verify}, but method none drafts nothing to verify: choose a method"
        if self.draws_apart and self.tree_nodes is not None:
            yield (
                f"verify {self.verify} cannot take a dynamic tree, which drops candidates by how they were drawn: "
                "drop tree_nodes, or set tree_paths"
            )
        if self.verify != "block":
            return
        if (self.tree_width or 1) > 1 or self.tree_paths:
            yield "verify block takes chains, not trees: set tree_width to 1, or verify to rejection"
        for method in self.methods:
            if method in _FIXED_DRAFTS and method != "none":
                yield (
                    f"verify block gains nothing with method {method}, whose drafts are looked up, not drawn: "
                    "rejection and exact accept the same tokens for less work"
                )

    def _check_effect(self) -> Iterator[str]:
        """Options that are set and would change nothing."""
        changed = [item.name for item in fields(self) if getattr(self, item.name) != item.default]
        for option in filter(_PLAIN_OPTIONS.__contains__, changed):
            methods = OPTIONS_OF_METHODS.get(option, METHODS)
            if set(methods).isdisjoint(self.methods):
                yield f"{option} is set, but method is {self.method}: it belongs to {', '.join(methods)}"
            elif (choice := OPTIONS_OF_CHOICES.get(option)) and getattr(self, choice[0]) != choice[1]:
                yield f"{option} is set, but {choice[0]} is {getattr(self, choice[0])}: it belongs to {choice[1]}"

    def _check_bounds(self) -> Iterator[str]:
        if self.ngram_min > self.ngram_max:
            yield f"ngram_min must be 1 to ngram_max, got {self.ngram_min} and {self.ngram_max}"
        if self.lower_below > self.raise_above:
            yield f"lower_below must be 0 to raise_above, got {self.lower_below} and {self.raise_above}"


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything an engine needs to start. Raises `InvalidConfig`, naming the option."""

    target: str
    """Directory, hub id, GGUF file, alias (smollm2-135m) or scripted model (scripted:...)."""
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    backend: str = "nightdraft"
    """Which engine runs it."""
    dtype: str = "auto"
    device: str = "auto"
    attention: str = "auto"
    max_batch: int = 64
    """Sequences that run at the same time."""
    max_step_tokens: int = 2048
    """Token budget of one step: what is left after decoding goes to prompts (chunked prefill)."""
    max_model_len: int | None = None
    """Context limit, tokens; None takes the model's."""
    block_size: int = 16
    """Tokens per KV block."""
    kv_blocks: int | None = None
    """Blocks of every KV pool, the target's and a draft's; None sizes them from kv_memory."""
    kv_memory: int = 2 * 2**30
    """Bytes for all of them, hidden states that drafts read included, when kv_blocks is None."""
    prefix_reuse: bool = True
    """Compute common prompt prefixes once."""
    trust_remote_code: bool = False
    """Run the Python files that come with the target or the draft model. Without it none of them is even downloaded."""

    def __post_init__(self) -> None:
        wrong = dict(wrong_types(self))
        wrong |= dict(not_among(self, _ENGINE_CHOICES, wrong)) | dict(out_of_range(self, _ENGINE_RANGES, wrong))
        problems = list(wrong.values())
        if self.target == "":
            problems.append("target must name a model")
        if "block_size" not in wrong and self.block_size & (self.block_size - 1):
            problems.append(f"block_size must be a power of two, got {self.block_size}")
        if problems:
            raise InvalidConfig(*problems)
