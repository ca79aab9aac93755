"""Commands that answer questions about a run from its directory: audit, why, diff, replay, regrade, export."""

import re
from pathlib import Path
from typing import Annotated, Any

import typer

from antiphon.cli.arguments import CodeFolder, RunPath, Trust
from antiphon.cli.configs import load_recorded
from antiphon.cli.errors import exit_on_error
from antiphon.cli.tables import print_line, print_table
from antiphon.core.errors import ConfigError


def audit(run: RunPath) -> None:
    """Check a run from its directory alone: count attempts by status, and list every broken invariant."""
    with exit_on_error(run):
        from antiphon.inspect.audit import audit as check

        found = check(run)
        if found.branch_point:
            print_line(
                "began at {run}: step {step}, lineage {lineage}, digest {digest:.16}…".format(**found.branch_point)
            )
        for lineage, balance in found.balance.items():
            print_table(f"lineage {lineage}", "attempts", {**balance, "all": sum(balance.values())})
            if lineage in found.ends:
                print_line(
                    f"lineage {lineage} ended{f' by an error: {error}' if (error := found.ends[lineage]) else ''}"
                )
        if not found.balance:
            print_line("no attempts: the run ended, or was killed, before it sampled; there was little to check")
        if found.open:
            print_line(f"open attempts: {found.open}; the run goes on, or it was killed, and --resume marks them lost")
        for violation in found.violations:
            print_line(violation)
        print(f"violations: {len(found.violations)}")
        raise typer.Exit(1 if found.violations else 0)


def why(
    run: RunPath,
    name: Annotated[
        str,
        typer.Argument(
            metavar="ID",
            help="An attempt, group.sibling.try (of lineage 1, 1:group.sibling.try); one of its tokens, with @token or"
            " @segment:token; or a list of attempts, group or group.sibling.",
        ),
    ],
) -> None:
    """Show where a sample or a token came from, how it was used, or why it was not trained on."""
    with exit_on_error(run):
        from antiphon.inspect.why import why as explain

        print_table("of", name, dict(explain(run, name)))


def samples(
    run: RunPath,
    step: Annotated[int | None, typer.Option(help="Only samples that this step trained on.")] = None,
    status: Annotated[str, typer.Option(help="Only samples with this status, such as filtered.")] = "",
    containing: Annotated[str, typer.Option("--prompt", help="Only conversations that contain this text.")] = "",
    order: Annotated[str, typer.Option(help="newest, best or worst first.")] = "newest",
    limit: Annotated[int, typer.Option(help="Number of samples to show.", min=1)] = 5,
    model: Annotated[Path | None, typer.Option(help="Folder of the tokenizer, if the run holds none.")] = None,
) -> None:
    """Show what the policy said: conversations with their rewards and what became of them."""
    with exit_on_error(run):
        from itertools import islice

        from antiphon.core.types import AttemptStatus
        from antiphon.inspect.samples import ORDERS, iterate_samples

        if order not in ORDERS:
            raise ConfigError(f"{order!r} is no order; valid are {', '.join(ORDERS)}", key="--order", valid=ORDERS)
        if status and status not in (statuses := [each.value for each in AttemptStatus]):
            raise ConfigError(
                f"{status!r} is no status; valid are {', '.join(statuses)}", key="--status", valid=statuses
            )
        found = iterate_samples(run, step=step, status=status, containing=containing, order=order, model=model)
        shown = 0
        for sample in islice(found, limit):
            shown += 1
            row, score = sample.row, sample.trajectory.meta.score
            rewards = "".join(f", {name} {value:g}" for name, value in score.parts.items())
            at = "" if row.step is None else f" at step {row.step}"
            reason = row.failure or score.detail
            print_line(f"=== {row.name}, {row.prompt.task}, {row.status}{at}, score {score.value}{rewards} {reason}")
            for kind, text in sample.parts:
                print_line(f"--- {kind}\n{text}")
        print(f"{shown} samples")


def diff(run: RunPath, other: RunPath) -> None:
    """Show the first difference between two runs: configuration, code, data, sample or number."""
    with exit_on_error(run, other):
        from antiphon.inspect.diff import diff as compare

        difference = compare(run, other)
        print_line(difference or "no difference")
        raise typer.Exit(1 if difference else 0)


def replay(
    run: RunPath,
    code: CodeFolder = None,
    trust: Trust = False,
    weights: Annotated[
        bool, typer.Option("--weights", help="Also train again, from the first checkpoint that was kept.")
    ] = False,
) -> None:
    """Run the scheduler and the stages again on what a run recorded; every batch must be identical, byte for byte."""
    with exit_on_error(run):
        config, recorded = load_recorded(run)
        from antiphon.inspect.replay import ReplayMismatchError, requires_models
        from antiphon.inspect.replay import replay as replay_run

        needed = (*recorded.REPLAY, *(recorded.MODELS if requires_models(config, weights) else ()))
        recorded.require_trust(run, config, needed, code=code, trust=trust)
        try:
            print_line(f"{replay_run(run, config, weights=weights, report=print_line)} steps, no difference")
        except ReplayMismatchError as mismatch:
            print_line(str(mismatch))
            raise typer.Exit(1) from mismatch


def regrade(
    run: RunPath,
    reward: Annotated[str, typer.Option(help="Another reward: a name, or package.module:attribute.")] = "",
    option: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="Option of that reward; may be repeated.")
    ] = None,
    task: Annotated[str, typer.Option(help="Use that reward for this task only.")] = "",
    code: CodeFolder = None,
    trust: Trust = False,
) -> None:
    """Grade the recorded responses again, with the run's rewards or another one, and compare the scores."""
    with exit_on_error(run):
        config, recorded = load_recorded(run)
        from antiphon.inspect.regrade import CLASSES, replace_reward
        from antiphon.inspect.regrade import regrade as regrade_run

        if (option or task) and not reward:
            raise ConfigError("is missing: --option and --task belong to the reward that it names", key="--reward")
        given: list[str] = []
        if reward:
            config = replace_reward(config, reward, _parse_options(option or []), task)
            given = [f"tasks.{number}.reward" for number, each in enumerate(config.tasks) if task in ("", each.name)]
        judged = any(each.judge for each in config.tasks)
        needed = (*recorded.REGRADE, *(recorded.ENGINES if judged else ()))
        recorded.require_trust(run, config, needed, code=code, trust=trust, given=given)
        found = regrade_run(run, config, re.sub(r"\W+", "_", reward) or "again")
        rows = {f"{then}, now {now}": found.confusion.get((then, now), 0) for then in CLASSES for now in CLASSES}
        print_table("was", "attempts", {name: count for name, count in rows.items() if count})
        print_table("of", "share whose score changed", found.by_step)
        print_line(f"{found.changed} of {found.attempts} scores changed; {found.path}")


def _parse_options(pairs: list[str]) -> dict[str, Any]:
    """Parse KEY=VALUE pairs; values are YAML."""
    import yaml

    split = [pair.partition("=") for pair in pairs]
    for pair, (key, found, _) in zip(pairs, split, strict=True):
        if not (key and found):
            raise ConfigError(f"{pair!r} must be KEY=VALUE", key="--option", value=pair)
    return {key: yaml.safe_load(value) for key, _, value in split}


def export(
    run: RunPath,
    target: Annotated[Path, typer.Argument(metavar="DIRECTORY", help="Directory to create for the model.")],
) -> None:
    """Copy the newest complete checkpoint of a run as a model directory that transformers and engines can load."""
    with exit_on_error(run):
        from antiphon.inspect.export import export as export_model

        print_line(str(export_model(run / "checkpoints", target, print_line)))
