"""Learners of each objective on each backend, made with fixed settings: `torch_PreferenceLearner`, `megatron_Teacher` …"""

import importlib
from typing import Any

from antiphon.algorithms.offline_config import DistillationConfig, PreferenceConfig
from antiphon.core.registry import import_path
from antiphon.learning.config import CriticConfig, LearnerConfig
from antiphon.learning.learner import objective_learner

VOCABULARY = 129  # tokens; the head has two rows more
SETTINGS: dict[str, tuple[Any, ...]] = {
    "CriticLearner": (CriticConfig(),),
    "PreferenceLearner": (PreferenceConfig(label_smoothing=0.1),),
    "RewardLearner": (),
    "DistillationLearner": (DistillationConfig(teacher="", divergence="reverse_kl", sft_weight=0.3), VOCABULARY),
    "Teacher": (DistillationConfig(teacher="", top_k=4), VOCABULARY),
}


def __getattr__(name: str) -> type:
    """Return a class whose objects are made as those of `TorchLearner` are."""
    kind, _, objective = name.partition("_")
    if objective not in SETTINGS:
        raise AttributeError(name)
    if kind == "megatron":
        importlib.import_module("tests.parity.megatron_bench")  # which has it run on CPUs
    base = import_path(objective_learner(objective, kind), "learner", "kind")

    class Learner(base):  # type: ignore[misc, valid-type]
        runs_on = "cpu"

        def __init__(self, model_path: str, config: LearnerConfig, seed: int) -> None:
            super().__init__(model_path, config, seed, *SETTINGS[objective])

    return Learner
