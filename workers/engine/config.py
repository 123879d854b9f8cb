"""How an engine is set up: what to load, how to speculate, how much memory to use. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, field

from workers.engine.errors import InvalidConfig
from workers.engine.tree_shape import TreeShape

METHODS = ("none", "ngram", "suffix", "draft_model")
VERIFY_RULES = ("exact",)
DTYPES = ("auto", "float32", "bfloat16")
ATTENTION_BACKENDS = ("auto", "numba", "sdpa", "reference")
POLICIES = ("fixed", "threshold")


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    """Which speculator runs and how much it drafts. Raises `InvalidConfig`, naming the option."""

    method: str = "none"
    row_methods: tuple[str, ...] = ()
    """Further methods that single requests may ask for; they share the options below."""
    draft: str | None = None
    """draft_model: directory, hub id, GGUF file or alias; "target" shares the target's weights."""
    max_draft_tokens: int = 4
    """Depth of the draft: tokens along one path."""
    tree_width: int = 1
    """Candidates per level; 1 is a chain."""
    policy: str = "threshold"
    """fixed: always max_draft_tokens; threshold: lengthen and shorten by the recent acceptance rate, 0 included."""
    raise_above: float = 0.8
    lower_below: float = 0.4
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

    @property
    def methods(self) -> tuple[str, ...]:
        """Every method that runs, the default first."""
        return tuple(dict.fromkeys((self.method, *self.row_methods)))

    @property
    def tree_shape(self) -> TreeShape:
        return TreeShape(self.tree_width)

    def __post_init__(self) -> None:
        _one_of("method", self.method, METHODS)
        _one_of("verify", self.verify, VERIFY_RULES)
        _one_of("policy", self.policy, POLICIES)
        object.__setattr__(self, "row_methods", tuple(self.row_methods))
        for method in self.row_methods:
            _one_of("row_methods", method, METHODS)
        if "draft_model" in self.methods and not self.draft:
            raise InvalidConfig("method draft_model needs a draft model: set draft")
        if self.draft and "draft_model" not in self.methods:
            raise InvalidConfig(f"draft is set, but method is {self.method}: only draft_model takes a draft")
        if not 1 <= self.max_draft_tokens <= 32:
            raise InvalidConfig(f"max_draft_tokens must be 1 to 32, got {self.max_draft_tokens}")
        if not 1 <= self.tree_width <= 8:
            raise InvalidConfig(f"tree_width must be 1 to 8, got {self.tree_width}")
        if self.tree_width > 1 and "draft_model" not in self.methods:
            raise InvalidConfig(f"tree_width > 1 needs method draft_model, not {self.method}")
        if not 1 <= self.ngram_min <= self.ngram_max:
            raise InvalidConfig(f"ngram_min must be 1 to ngram_max, got {self.ngram_min} and {self.ngram_max}")
        if self.suffix_depth < 2 or self.suffix_factor <= 0 or self.suffix_memory_tokens < 1:
            raise InvalidConfig("suffix_depth must be at least 2, suffix_factor and suffix_memory_tokens positive")
        if not 0.0 <= self.suffix_min_probability <= 1.0:
            raise InvalidConfig(f"suffix_min_probability must be 0 to 1, got {self.suffix_min_probability}")
        if not 0.0 <= self.lower_below <= self.raise_above <= 1.0:
            raise InvalidConfig(
                f"0 <= lower_below <= raise_above <= 1 is needed, got {self.lower_below} and {self.raise_above}"
            )


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything an engine needs to start. Raises `InvalidConfig`, naming the option."""

    target: str
    """Directory, hub id, GGUF file, alias (smollm2-135m) or scripted model (scripted:...)."""
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
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
    """Size of the KV pool; None sizes it from kv_memory."""
    kv_memory: int = 2 * 2**30
    """Bytes for the KV pool when kv_blocks is None."""
    prefix_reuse: bool = True
    """Compute common prompt prefixes once."""
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        if not self.target:
            raise InvalidConfig("target must name a model")
        _one_of("dtype", self.dtype, DTYPES)
        _one_of("attention", self.attention, ATTENTION_BACKENDS)
        for name in ("max_batch", "max_step_tokens", "block_size", "kv_memory"):
            if getattr(self, name) < 1:
                raise InvalidConfig(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.block_size & (self.block_size - 1):
            raise InvalidConfig(f"block_size must be a power of two, got {self.block_size}")
        if self.kv_blocks is not None and self.kv_blocks < 1:
            raise InvalidConfig(f"kv_blocks must be at least 1, got {self.kv_blocks}")
        if self.max_model_len is not None and self.max_model_len < 2:
            raise InvalidConfig(f"max_model_len must be at least 2, got {self.max_model_len}")


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise InvalidConfig(f"{name} must be one of {', '.join(allowed)}; got {value!r}")
