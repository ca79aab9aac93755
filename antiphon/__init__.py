"""Antiphon: asynchronous reinforcement-learning post-training for language models and agents.

    import antiphon

    config = antiphon.load_config("run.yaml", ["rollout.async_ratio=2"])
    antiphon.train(config)

Everything here is imported when it is first used: `import antiphon` itself imports neither torch nor numpy.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from antiphon.algorithms.losses import LossInputs
    from antiphon.core.errors import AntiphonError, ConfigError, DataError
    from antiphon.core.types import (
        Completion,
        GenerateRequest,
        Group,
        Message,
        PolicyVersion,
        Prompt,
        Sample,
        Sampling,
        Score,
        Segment,
        Streams,
        StreamSpec,
        TrainBatch,
        Trajectory,
        Turn,
    )
    from antiphon.offline.run import dpo
    from antiphon.run.build import open_run
    from antiphon.run.commands import evaluate_model as evaluate
    from antiphon.run.commands import sft, train
    from antiphon.run.config import RunConfig, load_config
    from antiphon.run.loop import Run
    from antiphon.tasks.base import Transcript

__version__ = "0.1.0"

_TYPES = (
    *("Completion", "GenerateRequest", "Group", "Message", "PolicyVersion", "Prompt", "Sample", "Sampling", "Score"),
    *("Segment", "StreamSpec", "Streams", "TrainBatch", "Trajectory", "Turn"),
)
# Where each name is imported from.
_EXPORTS = {
    "AntiphonError": "antiphon.core.errors:AntiphonError",
    "ConfigError": "antiphon.core.errors:ConfigError",
    "DataError": "antiphon.core.errors:DataError",
    "LossInputs": "antiphon.algorithms.losses:LossInputs",
    "Run": "antiphon.run.loop:Run",
    "RunConfig": "antiphon.run.config:RunConfig",
    "Transcript": "antiphon.tasks.base:Transcript",
    "dpo": "antiphon.offline.run:dpo",
    "evaluate": "antiphon.run.commands:evaluate_model",
    "load_config": "antiphon.run.config:load_config",
    "open_run": "antiphon.run.build:open_run",
    "sft": "antiphon.run.commands:sft",
    "train": "antiphon.run.commands:train",
    **{name: f"antiphon.core.types:{name}" for name in _TYPES},
}

__all__ = [
    "AntiphonError",
    "Completion",
    "ConfigError",
    "DataError",
    "GenerateRequest",
    "Group",
    "LossInputs",
    "Message",
    "PolicyVersion",
    "Prompt",
    "Run",
    "RunConfig",
    "Sample",
    "Sampling",
    "Score",
    "Segment",
    "StreamSpec",
    "Streams",
    "TrainBatch",
    "Trajectory",
    "Transcript",
    "Turn",
    "dpo",
    "evaluate",
    "load_config",
    "open_run",
    "sft",
    "train",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, attribute = _EXPORTS[name].partition(":")
    value = globals()[name] = getattr(importlib.import_module(module), attribute)
    return value


def __dir__() -> list[str]:
    """List public names, those not imported yet included."""
    return sorted({*globals(), *_EXPORTS})
