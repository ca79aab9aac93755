"""What learners of each objective learn on a GPU, and what they say of samples there, is what it is on a CPU."""

import numpy as np
import pytest
import torch

from antiphon.core.types import TEACHER_DISTRIBUTION, TEACHER_TOKENS
from antiphon.learning.config import LearnerConfig, OptimizerConfig
from antiphon.learning.learner import LEARNERS
from antiphon.learning.mesh_config import MeshConfig
from antiphon.learning.objectives.scoring import Scorer
from tests.parity import test_mixtures as mixtures
from tests.parity.test_meshes import ALGORITHM, packs, saved_models
from tests.parity.test_objectives import MODULE, batch_of
from tests.unit.learning.test_attention_stats import attended, attentive, mixed

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DEVICES = ("cpu", "cuda")
OBJECTIVES = ["CriticLearner", "PreferenceLearner", "RewardLearner", "DistillationLearner"]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return saved_models(tmp_path_factory)


def opened(model, device, kind="torch", algorithm=ALGORITHM, **config):
    learner = LEARNERS.resolve(kind)(model, LearnerConfig(kind=kind, device=device, **config), 0)
    learner.begin(algorithm, OptimizerConfig(learning_rate=1e-3), 3)
    return learner


def learned(learner, batch):
    """What three updates say."""
    return [learner._update(batch.updates[0]) for _ in range(3)]


def assert_alike(here, there, tolerance=1e-3):
    for ours, theirs in zip(here, there, strict=True):
        assert there and ours == pytest.approx(theirs, rel=tolerance, abs=tolerance)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_it_learns_what_it_does_on_a_cpu(models, objective):
    batch = batch_of(objective, MeshConfig())
    cpu, gpu = (opened(models["qwen3"], device, f"{MODULE}:torch_{objective}") for device in DEVICES)
    assert_alike(learned(gpu, batch), learned(cpu, batch))


def test_a_teacher_says_what_it_does_on_a_cpu(models):
    cpu, gpu = (opened(models["qwen3"], device, f"{MODULE}:torch_Teacher").teach(packs()) for device in DEVICES)
    for ours, theirs in zip(gpu, cpu, strict=True):
        assert (ours[TEACHER_TOKENS] == theirs[TEACHER_TOKENS]).mean() > 0.99  # but for what is likely alike
        np.testing.assert_allclose(ours[TEACHER_DISTRIBUTION], theirs[TEACHER_DISTRIBUTION], atol=1e-3)


def test_a_text_scores_what_it_does_on_a_cpu(models):
    cpu, gpu = (Scorer(models["llama"], LearnerConfig(device=device), 0).score(packs()) for device in DEVICES)
    for ours, theirs in zip(gpu, cpu, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-3)


def test_experts_are_balanced_and_replayed_as_on_a_cpu(models):
    algorithm = ALGORITHM.model_copy(update={"expert_balance": 0.5})
    batch = mixtures.batch_for(replayed=True)
    cpu, gpu = (opened(models["mixture"], device, algorithm=algorithm) for device in DEVICES)
    assert_alike(learned(gpu, batch), learned(cpu, batch))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_heads_attend_to_what_they_do_on_a_cpu(models, dtype):
    cpu, gpu = (
        attended(attentive(models["llama"], device=device, dtype=precision), mixed(), 64)
        for device, precision in zip(DEVICES, ("float32", dtype), strict=True)
    )
    scale = max(float(np.abs(theirs).max()) for theirs in cpu)
    for ours, theirs in zip(gpu, cpu, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=scale * (1e-4 if dtype == "float32" else 0.05))
