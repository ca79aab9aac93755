"""Commands that train and evaluate a policy: train, branch, sft, eval, check."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from antiphon.cli.arguments import (
    API,
    APIKey,
    APISettings,
    CodeFolder,
    ConfigPath,
    DryRun,
    Overrides,
    Overwrite,
    Resume,
    RunPath,
    Trust,
)
from antiphon.cli.configs import (
    load_for_branch,
    load_for_evaluation,
    load_run,
    locate_errors,
    make_api,
    print_run,
    refuse_both,
    require_models,
)
from antiphon.cli.dashboard_beside import Dashboard, dashboard_beside
from antiphon.cli.errors import exit_on_error
from antiphon.cli.tables import flatten, print_table
from antiphon.core.errors import ConfigError

if TYPE_CHECKING:
    from antiphon.run.config import RunConfig


def train(
    config: ConfigPath,
    overrides: Overrides = None,
    dry_run: DryRun = False,
    overwrite: Overwrite = False,
    resume: Resume = False,
    dashboard: Dashboard = None,
) -> None:
    """Train with reinforcement learning, after a supervised warm start if the configuration has one."""
    with exit_on_error(), locate_errors(config, overrides):
        run = load_run(config, overrides)
        refuse_both(overwrite, resume)
        if dry_run:
            print_run(run, config, overrides, trains=True)
            return
        require_models(run.models)
        run = _place(run)
        from antiphon.run.commands import train as build_and_train

        with dashboard_beside(Path(run.record.directory), run.name, dashboard):
            raise typer.Exit(build_and_train(run, overwrite=overwrite, resume=resume))


def branch(
    run: RunPath,
    at: Annotated[
        int, typer.Option("--at", metavar="STEP", help="Step whose checkpoint the new run begins at.", min=0)
    ],
    overrides: Overrides = None,
    name: Annotated[
        str, typer.Option("--name", help="Name of the new run, which lies beside RUN; by default RUN_at_STEP.")
    ] = "",
    overwrite: Overwrite = False,
    code: CodeFolder = None,
    trust: Trust = False,
) -> None:
    """Train a new run that begins at a checkpoint of RUN, with its configuration and other values for some keys.

    The modules that RUN's configuration names are imported only with --code or --trust.
    """
    with exit_on_error(run):
        given = [*(overrides or []), *([f"name={name}"] if name else [])]
        config = load_for_branch(run, at, given, code, trust)
        require_models(config.models)
        config = _place(config)
        from antiphon.run.commands import branch as build_and_train

        raise typer.Exit(build_and_train(run, at, config, overwrite=overwrite))


def _place(run: "RunConfig") -> "RunConfig":
    """Divide this machine's devices, if the configuration asks for it."""
    if not run.placement.auto:
        return run
    from antiphon.simulate.automatic_placement import place_automatically

    return place_automatically(run)


def sft(config: ConfigPath, overrides: Overrides = None, dry_run: DryRun = False, overwrite: Overwrite = False) -> None:
    """Fine-tune on the reference responses of the prompts, as the configuration's `sft` says."""
    with exit_on_error(), locate_errors(config, overrides):
        run = load_run(config, overrides)
        if run.sft is None:
            raise ConfigError("is missing; give at least sft.steps", key="sft", path=str(config))
        if dry_run:
            print_run(run, config, overrides)
            return
        require_models([run.model.path])
        run = _place(run)
        from antiphon.run.commands import sft as build_and_tune

        raise typer.Exit(build_and_tune(run, overwrite=overwrite))


def evaluate(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Model directory, such as a checkpoint.")],
    config: ConfigPath,
    overrides: Overrides = None,
    samples: Annotated[
        int | None,
        typer.Option(help="Completions per prompt, the k of pass@k. Default: evaluation.samples.", min=1),
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(
            help="0 is greedy. Default: as the tasks' evaluation.sampling or evaluation.temperature says; without these 0 with"
            " one completion per prompt, 1 with several.",
            min=0.0,
        ),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(
            help="Use only the first N test prompts of all tasks together, with --suite of each task; 0 uses all."
            " Default: evaluation.limit.",
            min=0,
        ),
    ] = None,
    suite: Annotated[
        str, typer.Option(metavar="TASKS", help="Measure on these tasks of lm-eval instead, separated by commas.")
    ] = "",
    suite_path: Annotated[
        Path | None, typer.Option(help="Folder with tasks of your own, as YAML files of lm-eval.", exists=True)
    ] = None,
    shots: Annotated[int | None, typer.Option(help="Examples in each prompt of --suite.", min=0)] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Ask --suite by the model's chat template.")] = False,
    api: API = "",
    api_key: APIKey = "",
    api_settings: APISettings = "{}",
    code: CodeFolder = None,
    trust: Trust = False,
) -> None:
    """Measure a model on the test prompts: accuracy and pass@k, with confidence intervals. Or, with --suite, on benchmarks.

    With --api, MODEL is the name of a model that others serve. If CONFIG is the file that a run recorded, the modules that
    it names are imported only with --code or --trust.
    """
    with exit_on_error():
        run = load_for_evaluation(Path(config), overrides or [], code, trust)
        chat_api = make_api(api, api_key, api_settings)
        require_models([] if chat_api else [model])
        if suite:
            if samples is not None or temperature is not None or chat_api is not None:
                raise ConfigError(
                    "give --samples, --temperature and --api without --suite: its tasks say how they sample"
                )
            _evaluate_suite(model, run, suite, suite_path, limit or 0, shots, chat)
            return
        from antiphon.run.commands import evaluate_model

        limit = run.evaluation.limit if limit is None else limit
        result = evaluate_model(model, run, samples=samples, temperature=temperature, limit=limit, api=chat_api)
        print_table("measure", "value", flatten(result))
        print(f"accuracy: share of completions that {_describe_success(run)}; pass@k: of prompts with one such among k")


def _evaluate_suite(
    model: str, run: "RunConfig", suite: str, folder: Path | None, limit: int, shots: int | None, chat: bool
) -> None:
    from antiphon.run.suites import measure_suite

    names = [name.strip() for name in suite.split(",")]
    found = measure_suite(model, run, names, folder=folder, limit=limit, shots=shots, chat=chat)
    for task, measures in found.items():
        print_table(task, "value", measures)


def _describe_success(run: "RunConfig") -> str:
    """Describe what counts as a success; tasks may differ."""
    kinds = {(task.evaluation.success_part, task.evaluation.success_at) for task in run.tasks if task.test}
    if len(kinds) > 1:
        return "are a success as their task's evaluation says (success_at, success_part)"
    (part, least) = kinds.pop()
    return f"score at least {least:g}" + (f" in the part {part!r}" if part else "")


def check(
    config: ConfigPath,
    overrides: Overrides = None,
    prompts: Annotated[int, typer.Option(help="Prompts of each task to try its reward on.", min=1)] = 16,
) -> None:
    """Test the rewards before a run: correct, empty and garbage responses, range, repeatability, speed, known reward hacks.

    Of a task with an environment, the environment is reset and takes one step.
    """
    with exit_on_error(), locate_errors(config, overrides):
        run = load_run(config, overrides)
        from antiphon.run.reward_checks import check_rewards

        found = check_rewards(run, prompts)
        for finding in found:
            means = {"correct responses": finding.oracle, "empty ones": finding.empty, "garbage": finding.garbage}
            scores = {f"mean score of {kind}": "none" if mean is None else mean for kind, mean in means.items()}
            timing = {"gradings": finding.gradings, "seconds, slowest": finding.seconds}
            timing |= {"attacks": finding.attacks, "attacks that scored": len(finding.holes)}
            print_table(f"task {finding.task}", "", {**scores, **timing})
        problems = [
            f"task {finding.task}: {problem}"
            for finding in found
            for problem in (*finding.problems, *finding.errors, *(f"reward hack: {hole}" for hole in finding.holes))
        ]
        print("\n".join([*problems, f"problems: {len(problems)}"]))
        raise typer.Exit(1 if problems else 0)
