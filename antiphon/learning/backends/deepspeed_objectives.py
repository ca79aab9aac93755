"""Learners on DeepSpeed with an objective other than a policy's; see `learning.learner.objective_learner`."""

from antiphon.learning.backends.deepspeed import DeepSpeedBackend
from antiphon.learning.objectives import critic, distill, pairs


class CriticLearner(DeepSpeedBackend, critic.CriticLearner):
    """Trains a critic."""


class PreferenceLearner(DeepSpeedBackend, pairs.PreferenceLearner):
    """Trains a policy on pairs."""


class RewardLearner(DeepSpeedBackend, pairs.RewardLearner):
    """Trains a reward model on pairs."""


class DistillationLearner(DeepSpeedBackend, distill.DistillationLearner):
    """Trains a student."""


class Teacher(DeepSpeedBackend, distill.Teacher):
    """Says what a student learns."""
