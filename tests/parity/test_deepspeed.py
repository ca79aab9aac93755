"""Ranks of DeepSpeed learn what one rank of torch does, at every stage of ZeRO."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from unittest.mock import patch

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from antiphon.core.types import Streams, Update
from antiphon.inspect.audit import audit
from antiphon.learning.config import LearnerConfig, OptimizerConfig
from antiphon.learning.mesh_config import MeshConfig
from antiphon.learning.parallel.rank_group import RankGroup
from tests.parity.test_meshes import (
    ADDED,
    ALGORITHM,
    alone,
    apart,
    asked,
    batch_for,
    deviations,
    idle,
    kept,
    leaves_its_device,
    on_mesh,
    opened,
    packs,
    saved_models,
    shares_its_devices,
    trained,
)
from tests.parity.test_meshes import ranks as ranks_of
from tests.parity.test_mixtures import batch_for as recorded_batch
from tests.parity.test_mixtures import trained as replayed
from tests.parity.workbench import Arrays, Workbench
from tests.system.test_offline_meshes import assert_close, here, start

pytestmark = pytest.mark.skipif(
    find_spec("deepspeed") is None, reason="DeepSpeed is not installed: make parity has it in envs/learners"
)


class ZeroBench(Workbench):
    """A workbench whose learner may be DeepSpeed's."""

    def open(self, model: str, config: LearnerConfig, rank: int, where: str) -> None:
        """See `Workbench.open`: DeepSpeed, too, is to know nothing of what was before: not all ranks have seen as much. Stage 3
        is to cut small parameters, too, which else it keeps whole: these are all small."""
        from deepspeed.comm import comm
        from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
        from deepspeed.runtime.zero.partition_parameters import Init
        from deepspeed.utils import groups

        from antiphon.learning.backends import deepspeed as learner

        comm.cdb = groups._WORLD_GROUP = None
        Init.param_id, DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__ = 0, ([0],)  # what it counts
        settings = learner._settings
        with patch.object(learner, "_settings", lambda config: cut_all(settings(config))):
            super().open(model, config, rank, where)

    def gradient(self, update: Update) -> Arrays:
        """See `Workbench.gradient`: a step, which moves nothing, is what makes DeepSpeed forget it."""
        from deepspeed.utils import safe_get_full_grad

        learner = self.learner
        learner.shards.train_packs(update.packs[learner.shards.data], learner._pipeline_forward, learner._backward)
        found = {
            name: safe_get_full_grad(parameter).numpy().copy()
            for name, parameter in learner.model.named_parameters()
            if parameter.requires_grad
        }
        for group in learner.optimizer.param_groups:
            group["lr"] = 0.0
        learner._optimizer_step()
        return found

    def spoil(self, algorithm, batch) -> tuple[float, bool]:
        """How many updates are skipped whose gradient is not finite, and whether all weights are as they were."""
        learner = self.learner
        learner.begin(algorithm, OptimizerConfig(learning_rate=1e-3), 1)
        (spoiled, parameter), *_ = learner.model.named_parameters()
        before = {name: tensor.detach().clone() for name, tensor in learner.shards.gather_parameters()}
        learner.shards.scatter_tensor(spoiled, parameter, torch.full_like(before[spoiled], torch.nan))
        skipped = learner._update(batch.updates[0])["skipped_updates"]
        after = {name: tensor.detach() for name, tensor in learner.shards.gather_parameters()}
        return skipped, all(torch.equal(after[name], before[name]) for name in after if name != spoiled)

    @contextmanager
    def plain_descent(self) -> Iterator[None]:
        """See `Workbench.plain_descent`."""
        zero = self.learner.shards.zero
        adam = zero.optimizer
        zero.optimizer = torch.optim.SGD([{"params": group["params"]} for group in adam.param_groups], lr=0.3)
        self.learner.scheduler = torch.optim.lr_scheduler.LambdaLR(zero.optimizer, lambda step: 1.0)
        yield
        zero.optimizer = adam


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return saved_models(tmp_path_factory)


@pytest.fixture(scope="module")
def bench():
    yield from ranks_of(f"{__name__}:{ZeroBench.__name__}")


@pytest.fixture(scope="module")
def references(models):
    return alone(models)


def cut_all(settings):
    settings["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    return settings


def zero(stage, **config):
    return {"kind": "deepspeed", "options": {"stage": stage}, **config}


CASES = [
    ("llama", 2, zero(1)),
    ("llama", 2, zero(2)),
    ("qwen3", 2, zero(2)),
    ("llama", 3, zero(3)),
    ("qwen3", 2, zero(3)),
    ("mixture", 2, zero(2)),
    ("mixture", 2, zero(3)),
    ("llama", 2, zero(1, cpu_offload=True)),
    ("llama", 2, zero(2, cpu_offload=True)),
    ("llama", 2, zero(3, cpu_offload=True)),
    ("llama", 2, zero(2, gradient_checkpointing=True)),
    ("llama", 2, zero(3, gradient_checkpointing=True)),
]


@pytest.fixture(scope="module")
def measured(request):
    yield from kept(request, "parity_deepspeed", CASES, ("backends.deepspeed", "model_worker", "pack_learner"))


@pytest.mark.parametrize(("model", "ranks", "config"), CASES, ids=str)
def test_ranks_learn_what_one_does(bench, models, references, measured, model, ranks, config):
    runner, members = bench
    ours = runner.run(trained(members, models[model], {"shard": ranks}, **config))
    more = [name for name in config if name not in ("kind", "options")]
    case = f"{model}, {ranks} ranks, stage {config['options']['stage']}"
    measured[", ".join([case, *more])] = deviations(ours, references[model])


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_ranks_learn_adapters_as_one_does(bench, models, stage):
    runner, members = bench
    lora = {"lora": ADDED}
    ours = runner.run(trained(members, models["llama"], {"shard": 2}, **zero(stage), **lora))
    theirs = alone({"llama": models["llama"]}, **lora)["llama"]
    assert {kind for name in ours["gradient"] for kind in ("lora", "norm", "embed") if kind in name} == {
        "lora",
        "norm",
        "embed",
    }
    assert apart(ours["gradient"], theirs["gradient"]) <= 1e-5
    assert apart(ours["moved"], theirs["moved"]) <= 1e-5
    assert ours["curve"] == pytest.approx(theirs["curve"], rel=1e-4, abs=1e-6)


async def learns_between_questions(members, model, **config):
    """What ranks say with adapters and without, after two updates each."""
    members, ranks = await opened(members, model, {"shard": 2}, **config)
    learner = RankGroup(members, ranks)
    for _ in range(2):
        await learner.call("descend", ALGORITHM, batch_for(ranks))
        said = [await learner.call(method, packs()) for method in ("predict", "predict_base")]
    return said


@pytest.mark.parametrize("stage", [1, 3])
def test_ranks_know_the_base_of_adapters_as_one_does(bench, models, stage):
    """Asked between updates, it leaves no trace: neither in parameters nor in the optimiser's copies of them."""
    (runner, members), one = bench, Workbench()
    ours = runner.run(learns_between_questions(members, models["llama"], **zero(stage, lora=ADDED)))
    one.open(models["llama"], LearnerConfig(lora=ADDED), 0, "")
    for _ in range(2):
        one.descend(ALGORITHM, batch_for(MeshConfig()))
    for method, said in zip(("predict", "predict_base"), ours, strict=True):
        for mine, theirs in zip(said, getattr(one.learner, method)(packs()), strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("config", [zero(2), zero(3), zero(3, gradient_checkpointing=True)], ids=str)
def test_ranks_replay_experts_as_one_does(bench, models, config):
    """Also from some pack on, when at stage 3 what comes next of their routers may be on its way."""
    runner, members = bench
    one, batch = Workbench(), recorded_batch(replayed=True)
    one.open(models["mixture"], LearnerConfig(), 0, "")
    ((packs,),) = [update.packs for update in batch.updates]
    given = [*(replace(pack, streams=Streams()) for pack in packs), *packs]
    expected = one.learner.predict(given)
    assert np.abs(expected[0] - expected[len(packs)]).max() > 1e-3
    said, _ = runner.run(asked(members, models["mixture"], {"shard": 2}, given, **config))
    for mine, theirs in zip(said, expected, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5)
    theirs = one.train(ALGORITHM, batch)
    ours = runner.run(replayed(members, models["mixture"], ALGORITHM, replayed=True, config=config, shard=2))
    assert apart(ours[0], theirs["gradient"]) <= 1e-5
    assert apart(ours[1], theirs["moved"]) <= 1e-5


@pytest.mark.parametrize("config", [zero(1), zero(2), zero(3), zero(3, lora={"rank": 4})], ids=str)
def test_a_device_that_is_left_has_nothing_of_it(bench, models, config):
    for before, *away in leaves_its_device(*bench, models["llama"], {"shard": 2}, **config):
        assert max(away) < 0.02 * before


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_updates_without_packs_move_nothing(bench, models, stage, offload):
    idle(*bench, models["llama"], {"shard": 2}, **zero(stage, cpu_offload=offload))


@pytest.mark.parametrize("stage", [2, 3])
def test_ranks_say_what_one_does(bench, models, stage):
    runner, members = bench
    expected, rhythm = runner.run(asked(members, models["llama"], {}))
    said, read = runner.run(asked(members, models["llama"], {"shard": 2}, **zero(stage)))
    for mine, theirs in zip([*said, *read], [*expected, *rhythm], strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_gradient_that_is_not_finite_moves_nothing(bench, models, stage):
    runner, members = bench
    for skipped, same in runner.run(on_mesh(members, models["llama"], {"shard": 2}, "spoil", **zero(stage))):
        assert skipped == 1 and same


ONE = ({}, {})  # rank, of torch
GONE_ON = {
    "stage 1, then torch": (({"shard": 2}, zero(1)), ONE),
    "stage 2, then FSDP": (({"shard": 2}, zero(2)), ({"shard": 2}, {})),
    "stage 3, then torch": (({"shard": 3}, zero(3)), ONE),
    "torch, then stage 1": (ONE, ({"shard": 2}, zero(1))),
    "torch, then stage 3": (ONE, ({"shard": 3}, zero(3))),
    "stage 2, then stage 3, offloaded": (({"shard": 3}, zero(2)), ({"shard": 2}, zero(3, cpu_offload=True))),
    "stage 3, offloaded, then stage 2": (({"shard": 2}, zero(3, cpu_offload=True)), ({"shard": 2}, zero(2))),
    "adapters, stage 3, then torch": (
        ({"shard": 2}, zero(3, lora={"rank": 4})),
        ({}, {"lora": {"rank": 4}}),
    ),
}


@pytest.mark.parametrize(("before", "after"), GONE_ON.values(), ids=GONE_ON)
def test_what_one_has_saved_another_goes_on_with(bench, models, tmp_path, before, after):
    runner, members = bench
    (mesh, config), (other_mesh, other_config) = before, after
    there, *_ = runner.run(on_mesh(members, models["qwen3"], mesh, "save", tmp_path, **config))
    elsewhere, *_ = runner.run(on_mesh(members, models["qwen3"], other_mesh, "restore", tmp_path, **other_config))
    for mine, theirs in zip(elsewhere, there, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-6)
    AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("verb", ["dpo", "reward-model", "distill"])
def test_offline_runs_learn_as_one_rank_of_torch_does(project, verb):
    changes = "model.path=mytask:build_deep", "learner.tokens_per_pack=40"
    here(project, verb, *changes, "name=one")
    done = start(project, verb, *changes, "learner.kind=deepspeed", "learner.mesh.shard=2")
    assert done.returncode == 0, done.stderr
    assert_close(project, "one", "run")


def test_a_whole_run_goes_on_with_torch(project):
    def train(learner, *arguments, steps):
        path = project.config(
            model={"path": "mytask:build_deep"},
            learner=learner,
            rollout={"async_ratio": 1},
            engine={"replicas": 2},
            checkpoint={"every": 1},
            algorithm={"recipe": "ppo"},
            critic={"optimizer": {"learning_rate": 1e-3}},
            steps=steps,
        )
        done = project.run("train", path, *arguments)
        assert done.returncode == 0, done.stderr

    train(zero(2, mesh={"shard": 2}), steps=3)
    steps = project.metrics()
    assert len(steps) == 3
    assert all(abs(step["learner/mismatch_kl"]) < 0.05 for step in steps), "engines have what the ranks have learned"
    assert all(step["critic/0/grad_norm"] > 0 for step in steps), "so has the critic, on DeepSpeed too"
    train({}, "--resume", steps=4)
    assert project.summary()["steps"] == 4
    assert not audit(project.folder / "runs" / "run").violations


def test_a_run_whose_engines_have_its_devices(project):
    shares_its_devices(project, zero(3, mesh={"shard": 2}))
