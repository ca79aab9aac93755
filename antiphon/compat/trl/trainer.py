"""TRL's GRPOTrainer as a face of `antiphon.train`."""

import copy
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from antiphon.compat.trl.config import read_fields
from antiphon.compat.trl.mapping import map_fields
from antiphon.core.errors import ConfigError
from antiphon.inspect.export import export
from antiphon.run.api import Result, train
from antiphon.run.compose import load_config
from antiphon.tasks.rewards.trl import TrlReward, check_functions

# Names in TRL's log by those in ours.
LOGGED = {
    "reward/mean": "reward",
    "learner/loss": "loss",
    "learner/grad_norm": "grad_norm",
    "learner/lr": "learning_rate",
    "learner/entropy": "entropy",
    "learner/reference_kl": "kl",  # in the loss
    "reward/kl": "kl",  # in the reward
    "length/mean": "completions/mean_length",
}
# Parameters of TRL's trainer that have no counterpart, with what to use.
REFUSED = {
    "reward_processing_classes": "reward models are `reward: reward_model` of a task",
    "callbacks": "use `for step in antiphon.start_run(…)`",
    "optimizers": "the optimizer is AdamW, `learner.optimizer`",
    "quantization_config": "weights are in float32",
    "tools": "use the environment `tools`, docs/environments.md",
    "rollout_func": "use `rollout.sampler`, or an environment",
    "environment_factory": "use `tasks.0.environment`, docs/environments.md",
}
LORA = {
    "r",
    "lora_alpha",
    "target_modules",
    "lora_dropout",
    "modules_to_save",
    "peft_type",
    "task_type",
}  # of peft's LoraConfig; others must be as by default


class TrainOutput(NamedTuple):
    """The result of `GRPOTrainer.train`, as that of transformers."""

    global_step: int
    training_loss: float
    metrics: dict[str, Any]


class GRPOTrainer:
    """Trains with GRPO as TRL's trainer of this name does, by a run of Antiphon.

    After `train`, `result` is what `antiphon.train` returns, and a model that was given as an object has the trained weights.
    """

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        peft_config: Any = None,
        **others: Any,
    ) -> None:
        """Prepare a run.

        Args:
            model: Directory or Hugging Face id, or a model of transformers.
            reward_funcs: A function `f(prompts, completions, **columns)` that returns a reward a completion, or several.
            args: A `GRPOConfig` of this module or of TRL.
            train_dataset: Rows with a column `prompt`: text, or a list of messages.
            eval_dataset: Rows to evaluate on before and after training.
            processing_class: The tokenizer; by default that beside the model.
            peft_config: peft's `LoraConfig`, to train adapters.
            others: `config`, a mapping of keys of Antiphon, which has the last word; other parameters of TRL are refused.

        Raises:
            ConfigError: Something is missing, unknown, or has no counterpart.
        """
        changes = _check_others(others)
        self.args = args
        self.result: Result | None = None
        self._fields = read_fields(args)
        rows = _check_rows(train_dataset, "train_dataset")
        self._is_chat = not isinstance(rows[0]["prompt"], str)
        functions = list(reward_funcs) if isinstance(reward_funcs, list | tuple) else [reward_funcs]
        functions = [each for each in functions if each is not None]
        check_functions(functions, list(rows[0]))
        weights = self._fields["reward_weights"] or [1.0] * len(functions)
        if len(weights) != len(functions):
            message = f"has {len(weights)} weights for {len(functions)} reward functions"
            raise ConfigError(message, key="GRPOConfig.reward_weights", value=weights)
        config = map_fields(self._fields, len(rows))
        splits = {"train": train_dataset}
        if eval_dataset is not None:
            _check_rows(eval_dataset, "eval_dataset")
            splits["test"] = eval_dataset
        if peft_config is not None:
            config["learner"]["lora"] = _map_lora(peft_config)
        self._model = model
        self.processing_class = processing_class or _load_tokenizer(model)
        self.config = load_config(
            config,
            **self._given_model(),
            prompts=splits,
            reward=TrlReward(functions, weights),
            **{"tasks.0.prompts.shuffle": bool(self._fields["shuffle_dataset"]), **changes},
        )
        self.state = SimpleNamespace(log_history=[], global_step=0)

    def train(self, resume_from_checkpoint: Any = None) -> TrainOutput:
        """Train, and return steps, mean loss and metrics.

        Args:
            resume_from_checkpoint: True or a path: go on with the run in `output_dir` from its newest checkpoint. Otherwise a
                run that is there is replaced.
        """
        resume = bool(resume_from_checkpoint or self._fields["resume_from_checkpoint"])
        self.result = result = train(self.config, overwrite=not resume, resume=resume)
        self.state.log_history = _read_log(result.directory)
        learner = self.config.learner
        self.state.global_step = result.summary["steps"] * learner.minibatches * learner.epochs
        losses = [line["loss"] for line in self.state.log_history if line.get("loss") is not None]
        loss = sum(losses) / len(losses) if losses else float("nan")
        if not isinstance(self._model, str | Path) and learner.lora is None:
            self._load_trained(result.model)
        metrics = {"train_runtime": result.summary["train_seconds"], "train_loss": loss}
        return TrainOutput(self.state.global_step, loss, metrics)

    def save_model(self, output_dir: str | Path | None = None) -> None:
        """Copy the trained model to a new directory; by default, or if it is that of the run, to `final_model` in there."""
        if self.result is None:
            raise ConfigError("there is no trained model yet; call train first", key="save_model")
        run = self.result.directory
        target = Path(output_dir or run)
        export(run / "checkpoints", run / "final_model" if target.resolve() == run.resolve() else target)

    @property
    def model(self) -> Any:
        """The model: the object that was given, or that of the newest checkpoint, or else the one that training begins with."""
        if not isinstance(self._model, str | Path):
            return self._model
        return _load_model(self._model if self.result is None else self.result.model)

    def _given_model(self) -> dict[str, Any]:
        """Return model and tokenizer for the run. TRL tokenizes a prompt that is text as it is, without a chat template."""
        tokenizer = self.processing_class
        is_raw = not self._is_chat and bool(tokenizer.chat_template)
        if isinstance(self._model, str | Path) and not is_raw:
            return {"model": str(self._model)}
        if is_raw:
            tokenizer = copy.deepcopy(tokenizer)
            tokenizer.chat_template = None
        return {"model": self.model, "tokenizer": tokenizer}

    def _load_trained(self, directory: Path) -> None:
        self._model.load_state_dict(_load_model(directory).state_dict())


def _load_model(path: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path)


def _load_tokenizer(model: Any) -> Any:
    from transformers import AutoTokenizer

    path = str(model) if isinstance(model, str | Path) else getattr(getattr(model, "config", None), "_name_or_path", "")
    if not path:
        raise ConfigError("is missing: the model object does not say where its tokenizer is", key="processing_class")
    return AutoTokenizer.from_pretrained(path)


def _check_rows(rows: Any, key: str) -> Any:
    """Return a data set with a length, whose rows have a prompt; `ConfigError` if it is none."""
    if isinstance(rows, Mapping):
        message = f"is a mapping from split to data set: give one of them, such as {key}[{next(iter(rows), 'train')!r}]"
        raise ConfigError(message, key=key, value=list(rows))
    if rows is None or not hasattr(rows, "__len__") or not len(rows):
        found = type(rows).__name__ if rows is not None else "missing"
        message = f"is {found}; give a data set or a list of mappings, whose number is known, with a column 'prompt'"
        raise ConfigError(message, key=key, value=found)
    first = rows[0]
    if not isinstance(first, Mapping) or not isinstance(first.get("prompt"), str | Sequence):
        columns = list(first) if isinstance(first, Mapping) else type(first).__name__
        message = f"has no column 'prompt' with text or messages; it has {columns}"
        raise ConfigError(message, key=key, value=columns)
    return rows


def _check_others(others: Mapping[str, Any]) -> dict[str, Any]:
    """Return the changes of Antiphon's own configuration; refuse every other parameter by its name."""
    changes: dict[str, Any] = {}
    for name, value in others.items():
        if name == "config" and isinstance(value, Mapping):
            changes = dict(value)
        elif name in REFUSED and (value is None or value == (None, None)):
            continue
        else:
            valid = [
                "model",
                "reward_funcs",
                "args",
                "train_dataset",
                "eval_dataset",
                "processing_class",
                "peft_config",
            ]
            reason = REFUSED.get(name, "there is no such parameter")
            message = f"is not supported: {reason}. Valid are {', '.join(valid)}, and config"
            raise ConfigError(message, key=f"GRPOTrainer.{name}", value=value, valid=[*valid, "config"])
    return changes


def _map_lora(config: Any) -> dict[str, Any]:
    given = {**(config if isinstance(config, Mapping) else config.to_dict())}
    default = {} if isinstance(config, Mapping) else type(config)().to_dict()
    for name, value in given.items():
        if name not in LORA and value != default.get(name):
            message = f"is not supported; valid are {', '.join(sorted(LORA))}"
            raise ConfigError(message, key=f"peft_config.{name}", value=value, valid=sorted(LORA))
    targets = given.get("target_modules") or ()
    return {
        "rank": given.get("r", 8),
        "alpha": float(given.get("lora_alpha", 8)),
        "dropout": given.get("lora_dropout", 0.0),
        "modules_to_save": given.get("modules_to_save") or [],
        "targets": [] if targets == "all-linear" else [targets] if isinstance(targets, str) else sorted(targets),
    }


def _read_log(directory: Path) -> list[dict[str, Any]]:
    """Return the metrics of all steps by TRL's names, and by ours."""
    lines = (json.loads(line) for line in (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [line | {theirs: line[ours] for ours, theirs in LOGGED.items() if ours in line} for line in lines]
