"""The job spec: what a job reads, which engine answers it, and how. One value, parsed once, read by attribute.

Types, ranges, defaults and descriptions of the job's own fields are here and nowhere else. `engine` and `sampling`
stay JSON, because the store knows no engine: `workers.rows.settings` makes the engine's own values of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError

from storage.errors import RefusedSpec

_NO_OTHER_KEYS = ConfigDict(extra="forbid", allow_inf_nan=False)

_Text = Annotated[str, Field(strict=True)]
_Flag = Annotated[bool, Field(strict=True)]
_Paths = Annotated[
    tuple[_Text, ...],
    BeforeValidator(lambda value: (value,) if isinstance(value, str) else value),
    Field(min_length=1, description="Files, directories, globs or URLs of Parquet; one string or a list."),
]
Section = dict[str, Any]
"""A part of the spec as JSON holds it: no tuples, and texts for keys."""


@dataclass(frozen=True, slots=True)
class InputSpec:
    """Which files are read and which columns mean what. Submission settles exactly one of the two text columns."""

    __pydantic_config__ = _NO_OTHER_KEYS

    paths: _Paths
    prompt_column: Annotated[_Text | None, Field(description="A column of strings: the prompts.")] = None
    messages_column: Annotated[_Text | None, Field(description="A column of lists of {role, content}.")] = None
    id_column: Annotated[
        _Text | None, Field(description="A column that is kept as the row id in results and errors.")
    ] = None
    sampling_column: Annotated[
        _Text | None,
        Field(
            description="Sampling parameters of each row: a struct, a map or JSON text. None: the column"
            " `sampling_params`, if there is one."
        ),
    ] = None
    speculation_column: Annotated[
        _Text | None,
        Field(
            description="Speculation method of each row, by name. None: the column `speculation`, if there is one and"
            " it is text."
        ),
    ] = None
    limit: Annotated[int | None, Field(strict=True, ge=0, description="Only so many rows, the first ones.")] = None

    @property
    def text_column(self) -> str | None:
        """The one column that the rows' texts come from; None unless exactly one is set."""
        both = (self.prompt_column, self.messages_column)
        return None if None not in both else self.prompt_column or self.messages_column


@dataclass(frozen=True, slots=True)
class JobSpec:
    """One job. Made by `parse`, which checks everything; `to_json` is what the store keeps."""

    __pydantic_config__ = _NO_OTHER_KEYS

    input: InputSpec
    engine: Annotated[Section, Field(description="Every field of `EngineConfig`, `speculation` nested in it.")]
    sampling: Annotated[Section, Field(description="Every field of `SamplingParams`; `bad_words` are texts.")]
    name: Annotated[
        _Text | None,
        Field(description="Name of the job; without one it is derived from the input and the rest of the spec."),
    ] = None
    seed: Annotated[
        int,
        Field(
            strict=True,
            ge=0,
            lt=2**63,
            description="Rows without a seed of their own get one from this, their index and their sample.",
        ),
    ] = 0
    system_prompt: Annotated[
        _Text | None,
        Field(description="Put in front of every conversation; a row's own system message counts more."),
    ] = None
    chat_template: Annotated[
        _Flag | None,
        Field(description="None: used where the tokenizer has one. False: prompts go in as they are."),
    ] = None
    special_tokens_in_content: Annotated[
        Literal["text", "parse"],
        Field(description="What messages spell of control tokens: text like any other, or these tokens (parse)."),
    ] = "text"
    chunk_rows: Annotated[
        int | None,
        Field(
            strict=True, ge=1, description="Rows per chunk, the unit of leasing; not set: by the size of the dataset."
        ),
    ] = None
    max_error_rate: Annotated[
        float | None,
        Field(
            strict=True,
            ge=0.0,
            le=1.0,
            description="The job fails early when more than this share of its results are errors.",
        ),
    ] = None
    keep_token_ids: Annotated[_Flag, Field(description="Store the token ids of every output.")] = False
    max_attempts: Annotated[
        int,
        Field(
            strict=True,
            ge=1,
            description="Times a chunk may lose its worker before it is split to find the row that kills it.",
        ),
    ] = 3
    lease_seconds: Annotated[
        float,
        Field(
            strict=True,
            ge=1.0,
            description="Seconds after which a chunk goes to another worker when its own is not heard of.",
        ),
    ] = 60.0

    def __post_init__(self) -> None:
        # So that a spec is equal to itself after a way through the store.
        for section in ("engine", "sampling"):
            object.__setattr__(self, section, plain(getattr(self, section)))

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> JobSpec:
        """The spec that these JSON values stand for, defaults filled in. Raises `RefusedSpec`, naming every problem."""
        try:
            return _parser().validate_python(values)
        except ValidationError as error:
            raise RefusedSpec(*map(_in_words, error.errors())) from error

    def to_json(self) -> dict[str, Any]:
        """JSON values only, every default written out, so that a stored spec means the same in a later version."""
        values: dict[str, Any] = plain(asdict(self))
        return values

    @property
    def num_samples(self) -> int:
        """Samples for each row (n)."""
        return int(self.sampling.get("n") or 1)


def plain(value: Any) -> Any:
    """The value as JSON would give it back: lists for tuples, texts for the keys of mappings."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


@cache
def _parser() -> TypeAdapter[JobSpec]:
    """Built at the first use: most commands parse no spec, and building takes about 50 ms."""
    return TypeAdapter(JobSpec)


_WORDS = {
    "missing": "is missing",
    "unexpected_keyword_argument": "is no key of a job spec",
    "dataclass_type": "must be a mapping of keys to values",
    "dict_type": "must be a mapping of keys to values",
    "int_type": "must be an integer",
    "float_type": "must be a number",
    "finite_number": "must be a number",
    "bool_type": "must be true or false",
    "string_type": "must be text",
    "string_unicode": "must be text",
    "tuple_type": "must be a string or a list of strings",
    "too_short": "must not be empty",
    "greater_than_equal": "must be at least {ge:g}",
    "less_than_equal": "must be at most {le:g}",
    "less_than": "must be less than {lt}",
    "literal_error": "must be {expected}",
}
"""What pydantic finds wrong, in the words that the engine's options have."""


def _in_words(problem: Any) -> str:
    where = ".".join(map(str, problem["loc"])) or "the job spec"
    words = _WORDS.get(problem["type"], problem["msg"]).format(**problem.get("ctx", {}))
    return f"{where} {words}" if problem["type"] == "missing" else f"{where} {words}, got {problem['input']!r}"
