"""Critics, pairs and distillation on ranks of each backend: they learn and say what one rank of torch does."""

import asyncio
from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import pytest

from antiphon.core.types import REFERENCE_LOGPROBS, TEACHER_DISTRIBUTION, TEACHER_TOKENS
from antiphon.learning.config import LearnerConfig
from antiphon.learning.data_samples import make_pair, make_response, make_scored_pair, pair_mean_batch, token_mean_batch
from antiphon.learning.mesh_config import MeshConfig
from antiphon.learning.parallel.rank_group import RankGroup
from tests.parity.objective_bench import VOCABULARY
from tests.parity.test_meshes import ALGORITHM, apart, batch_for, deviations, opened, packs, ranks, saved_models
from tests.parity.workbench import Workbench

MODULE = "tests.parity.objective_bench"
needs_deepspeed = pytest.mark.skipif(
    find_spec("deepspeed") is None, reason="DeepSpeed is not installed: make parity has it in envs/learners"
)
needs_megatron = pytest.mark.skipif(
    find_spec("megatron") is None, reason="needs the extra megatron: make parity has an environment with it"
)
ZERO_2, ZERO_3 = {"options": {"stage": 2}}, {"options": {"stage": 3}}
PLAIN = {"options": {"distributed_optimizer": False}}  # gradients are where torch has them
BENCHES = {
    "torch": "tests.parity.workbench:Workbench",
    "deepspeed": "tests.parity.test_deepspeed:ZeroBench",
    "megatron": "tests.parity.megatron_bench:MegatronBench",
}
TRAINED = [
    ("torch", "DistillationLearner", {"tensor": 2}, {}),
    *(
        pytest.param("torch", "DistillationLearner", {"tensor": 2, other: 2}, {}, marks=pytest.mark.long)
        for other in ("pipeline", "context")
    ),
    *(
        pytest.param("deepspeed", objective, {"shard": 2}, stage, marks=needs_deepspeed)
        for objective in ("CriticLearner", "PreferenceLearner", "RewardLearner", "DistillationLearner")
        for stage in (ZERO_2, ZERO_3)
    ),
    *(
        pytest.param("megatron", objective, mesh, PLAIN, marks=needs_megatron)
        for objective in ("CriticLearner", "PreferenceLearner", "RewardLearner", "DistillationLearner")
        for mesh in ({"tensor": 2}, {"pipeline": 2}, {"shard": 2, "context": 2})
    ),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return saved_models(tmp_path_factory)


@pytest.fixture(scope="module")
def benches():
    """Return the bench of a backend: a runner and four ranks."""
    started = {}

    def bench(backend):
        if backend not in started:
            started[backend] = ranks(BENCHES[backend])
            started[backend, "members"] = next(started[backend])
        return started[backend, "members"]

    yield bench
    for found in [found for found in started.values() if hasattr(found, "close")]:
        assert next(found, None) is None


def batch_of(objective, mesh):
    """A batch of pairs, of responses with what a teacher said, or of samples with returns."""
    rng = np.random.default_rng(7)

    def tokens(most):
        return rng.integers(3, VOCABULARY, rng.integers(2, most)).astype(np.int32)

    if objective == "CriticLearner":
        return batch_for(mesh)
    if objective == "DistillationLearner":
        groups = [make_response(number, tokens(20), tokens(30)) for number in range(9)]
        return token_mean_batch([list(map(with_teacher, group)) for group in groups], 90, mesh.data)
    make = make_pair if objective == "PreferenceLearner" else make_scored_pair
    groups = [make(number, tokens(20), tokens(30), tokens(30)) for number in range(9)]
    return pair_mean_batch([list(map(with_reference, group)) for group in groups], 90, mesh.data)


def with_reference(sample):
    logprobs = np.linspace(-6, -4, len(sample.advantages), dtype=np.float32)
    return replace(sample, streams=sample.streams.with_stream(REFERENCE_LOGPROBS, logprobs))


def with_teacher(sample):
    """Four tokens of the teacher's, and what it says of them and of all others."""
    count = len(sample.advantages)
    rng = np.random.default_rng(count)
    said = rng.dirichlet(np.ones(5), count).astype(np.float32)
    likeliest = np.stack([rng.permutation(VOCABULARY)[:4] for _ in range(count)]).astype(np.int32)
    streams = sample.streams.with_stream(TEACHER_TOKENS, likeliest)
    return replace(sample, streams=streams.with_stream(TEACHER_DISTRIBUTION, np.log(said)))


@pytest.mark.parametrize(("backend", "objective", "mesh", "config"), TRAINED)
def test_ranks_learn_what_one_of_torch_does(benches, models, backend, objective, mesh, config):
    runner, members = benches(backend)
    model = models["qwen3" if "tensor" in mesh else "llama"]
    one = Workbench()
    one.open(model, LearnerConfig(kind=f"{MODULE}:torch_{objective}"), 0, "")
    expected = one.train(ALGORITHM, batch_of(objective, MeshConfig()))

    async def train():
        there, axes = await opened(members, model, mesh, kind=f"{MODULE}:{backend}_{objective}", **config)
        calls = (member.call("train", ALGORITHM, batch_of(objective, axes)) for member in there)
        return await asyncio.gather(*calls)

    found = runner.run(train())
    gradient = {name: array for rank in reversed(found) for name, array in rank["gradient"].items()}
    assert gradient["model.norm.weight"].any() or objective == "CriticLearner"  # whose head is 0 at first
    deviations(found[0] | {"gradient": gradient}, expected)


@pytest.mark.parametrize(
    ("backend", "mesh", "config"),
    [
        ("torch", {"tensor": 2}, {}),
        pytest.param("deepspeed", {"shard": 2}, ZERO_3, marks=needs_deepspeed),
        pytest.param("megatron", {"tensor": 2}, {}, marks=needs_megatron),
    ],
)
def test_a_teacher_says_what_one_of_torch_does(benches, models, backend, mesh, config):
    runner, members = benches(backend)

    async def taught(kind, mesh, **config):
        there, axes = await opened(members, models["qwen3"], mesh, kind=f"{MODULE}:{kind}_Teacher", **config)
        return await RankGroup(there, axes).call("teach", packs())

    one = Workbench()
    one.open(models["qwen3"], LearnerConfig(kind=f"{MODULE}:torch_Teacher"), 0, "")
    for ours, theirs in zip(runner.run(taught(backend, mesh, **config)), one.learner.teach(packs()), strict=True):
        assert (ours[TEACHER_TOKENS] == theirs[TEACHER_TOKENS]).all() and theirs[TEACHER_TOKENS].any()
        both = ({"said": streams[TEACHER_DISTRIBUTION]} for streams in (ours, theirs))
        assert apart(*both) < 1e-5
