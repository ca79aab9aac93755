"""Antiphon: asynchronous reinforcement-learning post-training for language models and agents.

    import antiphon

    result = antiphon.train("run.yaml", reward=my_function, steps=200)
    result.plot()

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
    from antiphon.inspect.recorded_run import open_run
    from antiphon.offline.api import distill, dpo, reward_model
    from antiphon.run.api import Result, branch, evaluate, sft, start_run, train
    from antiphon.run.chat_api import ChatAPI
    from antiphon.run.compose import load_config
    from antiphon.run.config import RunConfig
    from antiphon.run.loop import Run
    from antiphon.simulate.automatic_placement import place_automatically
    from antiphon.tasks.base import Transcript

__version__ = "0.1.0"

_TYPES = (
    *("Completion", "GenerateRequest", "Group", "Message", "PolicyVersion", "Prompt", "Sample", "Sampling", "Score"),
    *("Segment", "StreamSpec", "Streams", "TrainBatch", "Trajectory", "Turn"),
)
# Where each name is imported from.
_EXPORTS = {
    "AntiphonError": "antiphon.core.errors:AntiphonError",
    "ChatAPI": "antiphon.run.chat_api:ChatAPI",
    "ConfigError": "antiphon.core.errors:ConfigError",
    "DataError": "antiphon.core.errors:DataError",
    "LossInputs": "antiphon.algorithms.losses:LossInputs",
    "Result": "antiphon.run.api:Result",
    "Run": "antiphon.run.loop:Run",
    "RunConfig": "antiphon.run.config:RunConfig",
    "Transcript": "antiphon.tasks.base:Transcript",
    "branch": "antiphon.run.api:branch",
    "distill": "antiphon.offline.api:distill",
    "dpo": "antiphon.offline.api:dpo",
    "evaluate": "antiphon.run.api:evaluate",
    "load_config": "antiphon.run.compose:load_config",
    "open_run": "antiphon.inspect.recorded_run:open_run",
    "place_automatically": "antiphon.simulate.automatic_placement:place_automatically",
    "reward_model": "antiphon.offline.api:reward_model",
    "sft": "antiphon.run.api:sft",
    "start_run": "antiphon.run.api:start_run",
    "train": "antiphon.run.api:train",
    **{name: f"antiphon.core.types:{name}" for name in _TYPES},
}

__all__ = [
    "AntiphonError",
    "ChatAPI",
    "Completion",
    "ConfigError",
    "DataError",
    "GenerateRequest",
    "Group",
    "LossInputs",
    "Message",
    "PolicyVersion",
    "Prompt",
    "Result",
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
    "branch",
    "distill",
    "dpo",
    "evaluate",
    "load_config",
    "open_run",
    "place_automatically",
    "reward_model",
    "sft",
    "start_run",
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
