"""Options that set a key of the job spec: one table for every command that takes them.

A command names its flags with `takes` and is called with a `Given`: what the user said, from which it makes a spec.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import wraps
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer
from typer.core import TyperCommand, TyperOption

from workers.engine.api import config
from workers.engine.api.config import EngineConfig, SpeculationConfig
from workers.engine.api.sampling_params import SamplingParams

if TYPE_CHECKING:
    from storage.spec import JobSpec


def section_class(section: str) -> type:
    """The class whose fields are the keys of a section of the spec; "" is the spec itself."""
    from storage.spec import InputSpec, JobSpec  # pydantic takes 0.1 s, which only a help page should wait for

    return {
        "": JobSpec,
        "input": InputSpec,
        "engine": EngineConfig,
        "engine.speculation": SpeculationConfig,
        "sampling": SamplingParams,
    }[section]


def description(key: str) -> str | None:
    """What the field of a key says of itself, without the full stop; None where it has no `Field(description=...)`."""
    section, _, name = key.rpartition(".")
    hint = get_type_hints(section_class(section), include_extras=True)[name]
    texts = (getattr(item, "description", None) for item in getattr(hint, "__metadata__", ()))
    return next((text.removesuffix(".") for text in texts if text), None)


@dataclass(frozen=True, slots=True)
class Flag:
    """An option of the command line, and the key of the job spec that it sets."""

    name: str
    key: str
    text: str | None = None
    """Its help; None: the description of the field."""
    kind: Any = str
    metavar: str | None = None
    panel: str | None = None

    @property
    def parameter(self) -> str:
        """Its name as a Python parameter."""
        return self.name.removeprefix("--").replace("-", "_")

    def help(self, *, own_default: bool = False) -> str:
        """Its help, with the default that applies where nobody sets the key, unless the command has its own."""
        text = self.text or description(self.key)
        section, _, name = self.key.rpartition(".")
        default = next(item.default for item in fields(section_class(section)) if item.name == name)
        if own_default or not isinstance(default, (str, int, float)):
            return f"{text}."
        shown = f"{default:g}" if isinstance(default, float) else default
        return f"{text} (default: {shown})."

    def as_parameter(self, default: Any) -> inspect.Parameter:
        option = typer.Option(self.name, metavar=self.metavar, rich_help_panel=self.panel)
        if default is not None:
            option.min = 1
        kind: Any = self.kind if default is not None else self.kind | None
        annotation: Any = Annotated[kind, option]
        return inspect.Parameter(self.parameter, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _section(section: str, panel: str | None, *flags: tuple[Any, ...]) -> list[Flag]:
    return [Flag(name, f"{section}{key}", text, kind, metavar, panel) for name, key, text, kind, metavar in flags]


FLAGS: Mapping[str, Flag] = {
    flag.name: flag
    for flag in [
        *_section(
            "engine.", None,
            ("--target", "target", "Directory, hub id, GGUF file or alias (smollm2-135m)", str, "MODEL"),
        ),
        *_section(
            "engine.speculation.", "Speculation",
            ("--method", "method", ", ".join(config.METHODS), str, None),
            ("--row-method", "row_methods",
             "Further method that the rows' column 'speculation' may name; repeatable",
             list[str], "METHOD"),
            ("--draft", "draft",
             "Draft model (implies draft_model; 'target' is the target itself); Medusa heads; EAGLE layer",
             str, "MODEL"),
            ("--draft-dtype", "draft_dtype",
             f"Of the draft: {', '.join(config.DRAFT_DTYPES)}; default: the target's", str, None),
            ("--vocabulary", "vocabulary",
             f"draft_model with another tokenizer: {', '.join(config.VOCABULARIES)}", str, None),
            ("--skip-file", "skip_file", "self: a set of sublayers from `nightdraft calibrate`", str, "FILE"),
            ("--max-draft-tokens", "max_draft_tokens", "Depth of the draft (default: 4, or the heads)", int, None),
            ("--tree-width", "tree_width", "Candidates per level; 1 is a chain", int, None),
            ("--tree-nodes", "tree_nodes", "Dynamic tree: the number of best nodes that are kept", int, None),
            ("--policy", "policy", ", ".join(config.POLICIES), str, None),
            ("--verify", "verify", ", ".join(config.VERIFY_RULES), str, None),
        ),
        *_section(
            "sampling.", "Sampling",
            ("--max-tokens", "max_tokens", "Output tokens at most", int, None),
            ("--temperature", "temperature", "0: greedy", float, None),
            ("--top-p", "top_p", "Nucleus sampling", float, None),
        ),
        *_section("", "Sampling", ("--seed", "seed", None, int, None)),
        *_section(
            "engine.", "Engine",
            ("--max-batch", "max_batch", "Sequences that run together", int, None),
            ("--dtype", "dtype", ", ".join(config.DTYPES), str, None),
        ),
        *_section(
            "input.", "Input",
            ("--prompt-column", "prompt_column", None, str, "COLUMN"),
            ("--messages-column", "messages_column", None, str, "COLUMN"),
            ("--id-column", "id_column", None, str, "COLUMN"),
            ("--limit", "limit", None, int, "N"),
        ),
        *_section("", "Input", ("--chunk-rows", "chunk_rows", None, int, "N")),
        *_section("", None, ("--name", "name", None, str, None)),
    ]
}  # fmt: skip

_INPUTS = inspect.Parameter(
    "inputs",
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
    annotation=Annotated[
        list[str],
        typer.Argument(
            metavar="INPUT...", help="Parquet files, directories, globs or URLs; or one job file (YAML, JSON)."
        ),
    ],
)
_MAYBE_INPUTS = inspect.Parameter(
    "inputs",
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
    default=None,
    annotation=Annotated[list[str] | None, typer.Argument(metavar="[INPUT...]", help="As of `run`.")],
)
_JOB_FILE = inspect.Parameter(
    "inputs",
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
    annotation=Annotated[
        str, typer.Argument(metavar="JOB.yaml", help="Job file, YAML or JSON: docs/configuration.md.")
    ],
)
_SETTINGS = inspect.Parameter(
    "settings",
    inspect.Parameter.KEYWORD_ONLY,
    default=None,
    annotation=Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Any key of the job spec, e.g. sampling.top_k=40; repeatable."),
    ],
)


@dataclass(frozen=True, slots=True)
class Given:
    """What a command line says about a job."""

    inputs: Sequence[str]
    flags: Mapping[str, Any]
    """By sections of the spec; None: not given."""
    settings: Sequence[str]

    def spec(self) -> JobSpec:
        """The job spec: flags override the job file, `--set` overrides both. Raises `UsageError`."""
        from runner.spec.overrides import build_spec

        return build_spec(self.inputs, self.flags, self.settings)


def takes(
    *names: str, job_file: bool = False, inputs_optional: bool = False, **defaults: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the inputs (or one job file), the flags of these names, and `--set`; it is called with a `Given`.

    `inputs_optional`: the command can do without. `defaults` are the command's own, by parameter, where they are not
    those of the spec.
    """
    flags = [FLAGS[name] for name in names]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
        # A default of the spec is None here: what the user did not say must not override a job file.
        shared = [flag.as_parameter(defaults.get(flag.parameter)) for flag in flags]
        parameters = [_JOB_FILE if job_file else _MAYBE_INPUTS if inputs_optional else _INPUTS, *shared, _SETTINGS]

        @wraps(command)
        def run(inputs: list[str] | str | None, settings: list[str] | None = None, **values: Any) -> None:
            nested: dict[str, Any] = {}
            for flag in flags:
                _put(nested, flag.key, values.pop(flag.parameter))
            paths = [inputs] if isinstance(inputs, str) else inputs or []
            command(Given(paths, nested, settings or ()), **values)

        run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [*parameters, *(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own)]
        )
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in (*parameters, *own)}
        return run

    return decorate


class SpecCommand(TyperCommand):
    """A command that `takes` flags. Their help is made when it is shown: other commands need not wait for it."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        for option in self.params:
            if isinstance(option, TyperOption) and (flag := FLAGS.get(option.opts[0])):
                option.help = flag.help(own_default=option.default not in (None, []))
        super().format_help(ctx, formatter)


def _put(nested: dict[str, Any], key: str, value: Any) -> None:
    *sections, last = key.split(".")
    for section in sections:
        nested = nested.setdefault(section, {})
    nested[last] = value if value != [] else None
