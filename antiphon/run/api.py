"""The commands as functions for scripts and notebooks. `docs/python.md` shows them in use."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from antiphon.core.config import load
from antiphon.core.errors import ConfigError, RecordError
from antiphon.record import safe_files
from antiphon.record.checkpoint import list_checkpoints
from antiphon.record.metrics_table import plot_metric, read_metrics_table
from antiphon.run import build, commands
from antiphon.run.branch import default_overrides
from antiphon.run.chat_api import ChatAPI
from antiphon.run.compose import Source, load_config
from antiphon.run.config import RunConfig
from antiphon.run.stepping import RunSession

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome of a run.

    Attributes:
        directory: Its directory; `antiphon.open_run` looks into it.
        summary: Its `summary.json`: accuracy before and after, seconds, steps and versions.
        exit_code: That of the command line: 0, 1 below `evaluation.minimum_accuracy`, 130 after Ctrl-C.
    """

    directory: Path
    summary: dict[str, Any]
    exit_code: int

    @classmethod
    def read(cls, root: str, name: str, exit_code: int) -> Self:
        """Return the outcome of the run `name` in the directory `root`."""
        directory = Path(root, name)
        summary = directory / "summary.json"
        found = json.loads(summary.read_text(encoding="utf-8")) if summary.is_file() else {}
        return cls(directory, found, exit_code)

    def metrics(self) -> "pandas.DataFrame":
        """Return the metrics of all steps that were not undone, a row a step; needs pandas."""
        return read_metrics_table(self.directory)

    def plot(self, metric: str = "reward/mean") -> "Axes":
        """Draw a metric over the steps; needs matplotlib."""
        return plot_metric(self.directory, metric)

    @property
    def model(self) -> Path:
        """Directory of the trained model, which transformers can load: the newest checkpoint.

        Raises:
            RecordError: There is none: `checkpoint.every` is 0, and the run did not end by itself.
        """
        checkpoints = list_checkpoints(self.directory / "checkpoints")
        if not checkpoints:
            raise RecordError(f"{self.directory} has no checkpoint", path=self.directory)
        return checkpoints[-1]


def train(config: Source | None = None, *, overwrite: bool = False, resume: bool = False, **changes: Any) -> Result:
    """Train with reinforcement learning, as `antiphon train` does, and return when the run has ended.

    Args:
        config: A YAML file, a mapping with the same keys, or a `RunConfig`.
        overwrite: Replace the run of this name, if there is one.
        resume: Go on with the run of this name from its newest checkpoint.
        changes: `reward`, `prompts`, `environment`, `model`, `tokenizer` and other keys, see `load_config`.

    Raises:
        ConfigError: The configuration is wrong, or the run exists already.
        AntiphonError: Another error that ended the run.
    """
    found = load_config(config, **changes)
    return Result.read(found.record.directory, found.name, commands.train(found, overwrite=overwrite, resume=resume))


def start_run(
    config: Source | None = None, *, overwrite: bool = False, resume: bool = False, **changes: Any
) -> RunSession:
    """Start a run to be trained step by step; arguments are those of `train`.

    `async with antiphon.start_run(…) as run:` gives a `Run` for `async for step in run`; a plain `with`, one for a plain `for`.
    If the block is left before the last step, the run ends after the step in hand with a checkpoint, and can be resumed.
    """
    return RunSession(build.start_run(load_config(config, **changes), overwrite=overwrite, resume=resume))


def branch(run: str | Path, at: int, *, overwrite: bool = False, **changes: Any) -> Result:
    """Train a new run that begins at a checkpoint of another one, as `antiphon branch` does, and return when it has ended.

    Args:
        run: Directory of the other run, which is not changed.
        at: Step of the checkpoint.
        overwrite: Replace the new run, if there is one of its name.
        changes: Changes of the other run's configuration, as for `train`, such as `algorithm`. Objects that it was given, such
            as a reward, are given again. By default the new run lies beside the other one, with `_at_STEP` after its name.

    Raises:
        ConfigError: The step has no whole checkpoint, a change is one that a branch may not make, or the new run exists.
        AntiphonError: Another error that ended the run.
    """
    recorded = load(safe_files.resolve_file(Path(run), "config.yaml"), model=RunConfig, bases=False)
    found = load_config(recorded, default_overrides(Path(run), at), **changes)
    return Result.read(found.record.directory, found.name, commands.branch(Path(run), at, found, overwrite=overwrite))


def sft(config: Source | None = None, *, overwrite: bool = False, **changes: Any) -> Result:
    """Fine-tune on the reference responses of the prompts, as `antiphon sft` does; arguments are those of `train`."""
    found = load_config(config, **changes)
    return Result.read(found.record.directory, found.name, commands.sft(found, overwrite=overwrite))


def evaluate(
    model: str | Path,
    config: Source | None = None,
    *,
    samples: int | None = None,
    temperature: float | None = None,
    limit: int | None = None,
    api: ChatAPI | None = None,
    **changes: Any,
) -> dict[str, Any]:
    """Return accuracy and pass@k of a model on the tasks' test prompts, as `antiphon eval` measures them.

    Args:
        model: Directory or Hugging Face id, or the name of the model that `api` has.
        config: The tasks, engines and sampling; with `changes`, as for `train`.
        samples: Completions a prompt; by default as `evaluation.samples` and the tasks say.
        temperature: Of sampling; by default as `evaluation.temperature` and the tasks say.
        limit: Number of prompts to use, from the first of all tasks together; 0 uses all; by default as `evaluation.limit`
            says.
        api: A model behind an API that is asked instead of the engines, `antiphon.ChatAPI(url=…)`.
        changes: Changes of the configuration.
    """
    found = load_config(config, **(changes if api else {"model": model, **changes}))
    limit = found.evaluation.limit if limit is None else limit
    for name, number, least in (("samples", samples, 1), ("limit", limit, 0)):
        if number is not None and number < least:
            raise ConfigError(f"must be {least} or more, not {number}", key=name, value=number)
    return commands.evaluate_model(str(model), found, samples=samples, temperature=temperature, limit=limit, api=api)
