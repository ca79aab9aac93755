"""The command that samples a data set with a model: generate."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from antiphon.cli.arguments import API, APIKey, APISettings, CodeFolder, Overrides, Trust
from antiphon.cli.configs import load_for_evaluation, make_api, require_models
from antiphon.cli.errors import exit_on_error
from antiphon.cli.tables import print_line
from antiphon.core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from antiphon.run.generate import GeneratedSample


def generate(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Model directory, or run directory: its newest checkpoint is used.")
    ],
    overrides: Overrides = None,
    *,
    data: Annotated[Path, typer.Option(help="JSONL or Parquet file with the prompts.", exists=True, dir_okay=False)],
    out: Annotated[Path, typer.Option(help="Parquet file for the samples.", dir_okay=False)],
    config: Annotated[
        Path | None, typer.Option(help="YAML file with the tasks and the sampling. Default: that of MODEL's run.")
    ] = None,
    task: Annotated[str, typer.Option(help="Task of the data, if the configuration has several and no route.")] = "",
    samples: Annotated[int | None, typer.Option(help="Completions per prompt.", min=1)] = None,
    temperature: Annotated[
        float | None, typer.Option(help="0 is greedy. Default: as in an evaluation of the task.", min=0.0)
    ] = None,
    limit: Annotated[int, typer.Option(help="Use only the first N rows; 0 uses all.", min=0)] = 0,
    best: Annotated[
        Path | None, typer.Option(help="JSONL file for SFT: the best scored response to each prompt.", dir_okay=False)
    ] = None,
    passed: Annotated[
        Path | None, typer.Option(help="JSONL file for SFT: all different responses that succeed.", dir_okay=False)
    ] = None,
    api: API = "",
    api_key: APIKey = "",
    api_settings: APISettings = "{}",
    code: CodeFolder = None,
    trust: Trust = False,
) -> None:
    """Sample the prompts of a file with a model and score the samples; make data for fine-tuning of the good ones.

    With --api, MODEL is the name of a model that others serve, and --config names the tasks.
    Rewards, environments and sampling are those of the configuration. If it is one that a run recorded, the modules it names
    are imported only with --code or --trust.
    """
    with exit_on_error():
        chat_api = make_api(api, api_key, api_settings)
        if chat_api is None:
            path, config = _find(Path(model), config)
            require_models([model := str(path)])
        elif config is None:
            raise ConfigError("is missing: a model behind --api belongs to no run", key="--config")
        run = load_for_evaluation(config, overrides or [], code, trust)
        from antiphon.run import generate as generation

        for file in filter(None, (out, best, passed)):
            if not file.resolve().parent.is_dir():
                raise ConfigError(f"the folder of {file} does not exist", value=str(file))
        prompts = generation.load_data(run, data, task, limit)
        if best or passed:
            generation.check_single_turn(run, prompts)
        found = generation.generate(model, run, prompts, run.plan_evaluation(samples, temperature), chat_api)
        generation.write_samples(out, found)
        print_line(f"{_describe(found)}; {out}")
        for target, choose in ((best, generation.best), (passed, generation.passed)):
            if target is not None:
                print_line(f"{generation.write_examples(target, choose(found))} examples; {target}")


def _find(model: Path, config: Path | None) -> tuple[Path, Path]:
    """Return the model's directory and the configuration: by default that of the run that the model belongs to."""
    from antiphon.record import safe_files
    from antiphon.record.checkpoint import newest_checkpoint

    checkpoints = model.resolve().parent
    if (model / "checkpoints").is_dir():
        checkpoints = safe_files.resolve_path(model, "checkpoints")
        model = newest_checkpoint(checkpoints, print_line)
    recorded = checkpoints.parent / "config.yaml"
    if config is None and not (checkpoints.name == "checkpoints" and recorded.is_file()):
        raise ConfigError("is missing: the model belongs to no run whose configuration could be used", key="--config")
    return model, config or recorded


def _describe(samples: "Sequence[GeneratedSample]") -> str:
    scores = [sample.score for sample in samples if sample.score is not None]
    mean = f"mean score {sum(scores) / len(scores):.3f}" if scores else "no scores"
    successes = sum(sample.success for sample in samples)
    return f"{len(samples)} samples, {mean}, {successes} successes, {len(samples) - len(scores)} without a score"
