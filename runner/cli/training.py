"""Commands that make drafters: answers of the target first, then a drafter that learned from them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from runner.cli.flags import FLAGS, Given, takes
from runner.cli.options import DEFAULT_STORE, Json, New, Store
from runner.output.output import Output

train = typer.Typer(no_args_is_help=True, help="Train a drafter on the answers of its target.")


@takes(*FLAGS, inputs_optional=True)
def distill(
    given: Given,
    out: Annotated[str, typer.Option("--out", "-o", metavar="DIR", help="Folder for the answers.")],
    from_job: Annotated[
        str | None,
        typer.Option("--from-job", metavar="JOB", help="Generate nothing: take the answers of a completed job."),
    ] = None,
    new: New = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Log every chunk.")] = False,
    store: Store = DEFAULT_STORE,
    as_json: Json = False,
) -> None:
    """Have the target answer prompts, as `run` would, and keep what drafters learn from. The same command resumes."""
    from runner.errors import UsageError
    from runner.jobs import distill as command

    if bool(given.inputs) == (from_job is not None):
        raise UsageError("give prompts to answer, or --from-job JOB: one of the two")
    output, folder = Output(as_json), Path(out)
    if from_job is not None:
        raise typer.Exit(command.distill_job(from_job, store, output, folder))
    raise typer.Exit(command.distill(given.spec(), store, output, folder, new=new, verbose=verbose))


@train.command("eagle3")
def eagle3(
    data: Annotated[str, typer.Argument(metavar="DIR", help="Folder of `nightdraft distill`.")],
    out: Annotated[
        str, typer.Option("--out", "-o", metavar="DIR", help="Folder of the training; the drafter is DIR/drafter.")
    ],
    epochs: Annotated[int, typer.Option(min=1, help="Times that each answer is learned from.")] = 2,
    lr: Annotated[float, typer.Option(min=0.0, help="Highest learning rate.")] = 1e-3,
    steps: Annotated[int, typer.Option(min=1, max=16, help="Tokens that are drafted while training.")] = 4,
    draft_vocab: Annotated[int, typer.Option(min=2, help="Tokens that the drafter can draft.")] = 4096,
    loss: Annotated[str, typer.Option(help="kl, reverse_kl, jsd, tv, adaptive.")] = "kl",
    pack_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a pack, prompts included.")] = 2048,
    accumulate: Annotated[int, typer.Option(min=1, help="Packs of one step of the optimiser.")] = 1,
    max_tokens: Annotated[int, typer.Option(min=4, help="Tokens of a prompt and its answer at most.")] = 1024,
    held_out: Annotated[float, typer.Option(min=0.0, max=0.9, help="Share of the prompts to evaluate on.")] = 0.05,
    evaluate_steps: Annotated[int, typer.Option(min=1, help="Steps between evaluations.")] = 200,
    features: Annotated[
        str, typer.Option(metavar="compute|disk", help="Compute the target's features as needed, or keep them.")
    ] = "compute",
    seed: Annotated[int, typer.Option(min=0, help="Of weights and order.")] = 0,
    dtype: Annotated[str, typer.Option(help="Of the target: auto, float32, bfloat16.")] = "auto",
    autocast: Annotated[bool, typer.Option(help="Products in bfloat16, weights in float32.")] = True,
    as_json: Json = False,
) -> None:
    """Train an EAGLE-3 draft layer (arXiv 2503.01840). The same command goes on where it was stopped."""
    from runner.drafts.train import train_eagle3
    from runner.errors import UsageError
    from workers.training.eagle3 import Eagle3Options
    from workers.training.losses import LOSSES
    from workers.training.runs import Eagle3Run
    from workers.training.trainer import TrainOptions

    if loss not in LOSSES:
        raise UsageError(f"--loss must be one of {', '.join(LOSSES)}; got {loss!r}")
    if features not in ("compute", "disk"):
        raise UsageError(f"--features must be compute or disk; got {features!r}")
    folder = Path(out)
    run = Eagle3Run(
        data=Path(data),
        out=folder,
        drafter=Eagle3Options(steps=steps, loss=loss),
        training=TrainOptions(
            epochs=epochs, pack_tokens=pack_tokens, accumulate=accumulate, lr=lr, seed=seed,
            evaluate_steps=evaluate_steps, autocast=autocast,
        ),
        draft_vocab=draft_vocab,
        max_tokens=max_tokens,
        held_out=held_out,
        features=folder / "features" if features == "disk" else None,
        dtype=dtype,
    )  # fmt: skip
    raise typer.Exit(train_eagle3(run, Output(as_json)))
