"""Learners on Megatron-Core with an objective other than a policy's; see `learning.learner.objective_learner`."""

from antiphon.learning.backends.megatron import MegatronBackend
from antiphon.learning.objectives import critic, distill, pairs


class CriticLearner(MegatronBackend, critic.CriticLearner):
    """Trains a critic."""


class PreferenceLearner(MegatronBackend, pairs.PreferenceLearner):
    """Trains a policy on pairs."""


class RewardLearner(MegatronBackend, pairs.RewardLearner):
    """Trains a reward model on pairs."""


class DistillationLearner(MegatronBackend, distill.DistillationLearner):
    """Trains a student."""


class Teacher(MegatronBackend, distill.Teacher):
    """Says what a student learns."""
