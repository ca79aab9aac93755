"""Whole runs whose learner has several ranks: they train, publish, save, die and go on as with one."""

import json
import shutil
import textwrap

import pytest

from antiphon.inspect.audit import audit

MESHES = {"sharded by tensors": {"shard": 2, "tensor": 2}, "pipeline": {"pipeline": 2}}
OF_ROLES = {"critic": {"shard": 2}, "reference": {"pipeline": 2}}
DYING = """
    import os
    import signal
    from pathlib import Path

    from antiphon.learning.torch_learner import TorchLearner

    class Learner(TorchLearner):
        # The second rank is killed in its third step, while the first waits for it.
        def _backward(self, pack):
            mark = Path(__file__).with_name("killed")
            if self.mesh.rank == 1 and self.scheduler.last_epoch == 2 and not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return super()._backward(pack)
"""


SAVING = """
    from pathlib import Path

    from antiphon.core import failpoints as points
    from antiphon.learning.torch_learner import TorchLearner

    class Learner(TorchLearner):
        # The second rank is killed when it has written its part of the third checkpoint, before that is there.
        def save(self, place):
            mark = Path(__file__).with_name("killed")
            if self.mesh.rank == 1 and self.scheduler.last_epoch == 2 and not mark.exists():
                mark.touch()
                points.arm("learner.saved")
            super().save(place)
"""


def train(project, learner, *arguments, steps=3, **sections):
    path = project.config(
        **sections,
        model={"path": "mytask:build_deep"},
        learner=learner,
        rollout={"async_ratio": 1},
        engine={"replicas": 2},
        checkpoint={"every": 1},
        steps=steps,
    )
    return project.run("train", path, *arguments)


@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)
def test_ranks_train_together_and_one_goes_on(project, mesh):
    done = train(project, {"mesh": mesh})
    assert done.returncode == 0, done.stderr
    steps = project.metrics()
    assert len(steps) == 3
    assert all(abs(step["learner/mismatch_kl"]) < 0.05 for step in steps), "engines have what the ranks have learned"
    more = train(project, {"mesh": {}}, "--resume", steps=4)
    assert more.returncode == 0, more.stderr
    assert project.summary()["steps"] == 4
    assert not audit(project.folder / "runs" / "run").violations


@pytest.mark.parametrize("channel", [pytest.param("shared_memory", marks=pytest.mark.long), "distributed"])
def test_all_ranks_send_what_they_have_learned(project, channel):
    """Two engines put it together; a replay, whose ranks send to nobody but itself, comes to the same."""
    encoding = "delta" if channel == "distributed" else "whole"
    weights = {"senders": "all", "channel": channel, "encoding": encoding}
    done = train(project, {"mesh": MESHES["sharded by tensors"]}, weights=weights)
    assert done.returncode == 0, done.stderr
    steps = project.metrics()
    assert len(steps) == 3
    assert all(abs(step["learner/mismatch_kl"]) < 0.05 for step in steps), "engines have what the ranks have learned"
    run = project.folder / "runs" / "run"
    assert not audit(run).violations
    same = project.run("replay", run, "--code", project.folder, "--weights")
    assert same.returncode == 0, same.stdout + same.stderr


@pytest.mark.parametrize(
    "sections",
    [
        {"placement": {"learner": "cpu:1", "critic": "with learner", "engine": "with learner"}},
        pytest.param({"rollout": {"workers": 1}, "cluster": {"fork": False}}, marks=pytest.mark.long),
    ],
    ids=["in turns with engines", "beside a trainer"],
)
def test_critics_and_reference_resume_on_other_meshes(project, sections):
    given = {
        "algorithm": {"recipe": "ppo", "kl": {"coefficient": 0.1}},
        "critic": {"count": 2},
        "checkpoint": {"every": 1},
    }
    rollout = {"groups_per_step": 2, "group_size": 4, "async_ratio": 1, "timeout": 180, "sampling": {"max_tokens": 8}}
    rollout |= sections.get("rollout", {})
    path = project.config(
        model={"path": "mytask:build_deep"}, meshes=OF_ROLES, **given | sections | {"rollout": rollout, "steps": 2}
    )
    done = project.run("train", path)
    assert done.returncode == 0, done.stderr
    logs = {log.stem for log in (project.folder / "runs" / "run" / "logs").rglob("*.log")}
    ranks = {f"{model}-rank-{rank}" for model in ("critic-0", "reference") for rank in range(2)}
    assert ranks | {"learner"} <= logs
    more = project.run("train", path, "--resume", "steps=3", "meshes={critic: {tensor: 2}}", "learner.mesh.shard=2")
    assert more.returncode == 0, more.stderr
    steps = project.metrics()
    assert len(steps) == 3 and all(step["critic/0/grad_norm"] > 0 for step in steps)
    assert not audit(project.folder / "runs" / "run").violations


@pytest.mark.parametrize(
    "dying", [pytest.param(DYING, marks=pytest.mark.long), SAVING], ids=["in mid-step", "in mid-save"]
)
def test_a_rank_that_dies_takes_nothing_along(project, dying):
    (project.folder / "dying.py").write_text(textwrap.dedent(dying))
    done = train(project, {"kind": "dying:Learner", "mesh": {"shard": 2}}, steps=5)
    assert done.returncode == 0, done.stderr
    assert (project.folder / "killed").exists()
    said = done.stdout + done.stderr
    assert "goes on at its last checkpoint" in said
    assert dying is not SAVING or "resuming after step 1" in said, "the checkpoint before"
    assert project.summary()["steps"] == 5
    assert not audit(project.folder / "runs" / "run").violations


def test_unfit_mesh_is_refused_before_learning(project):
    done = train(project, {"mesh": {"tensor": 3}})
    assert done.returncode == 2
    assert "learner.mesh.tensor" in done.stderr and "Traceback" not in done.stderr
    assert "step 1" not in done.stdout


def test_indivisible_layers_are_refused_before_the_start(project):
    biased = project.folder / "biased"
    shutil.copytree(project.model, biased)
    described = json.loads((biased / "config.json").read_text())
    (biased / "config.json").write_text(json.dumps(described | {"attention_bias": True}))
    path = project.config(model={"path": str(biased)}, learner={"mesh": {"tensor": 2}})
    for more in ((), ("--dry-run",)):
        done = project.run("train", path, *more)
        assert done.returncode == 2, done.stdout
        assert done.stderr.startswith(
            "antiphon: learner.mesh.tensor: layers.0.self_attn.o_proj of LlamaForCausalLM has"
        )
        assert "Traceback" not in done.stderr
    assert not (project.folder / "runs" / "run").exists(), "a start that is refused leaves nothing"


def test_the_megatron_learner_is_refused_where_it_cannot_be(project):
    done = train(project, {"kind": "megatron", "mesh": {"tensor": 2}})
    assert done.returncode == 2
    assert "'antiphon[megatron]'" in done.stderr or "CUDA" in done.stderr
    assert "Traceback" not in done.stderr and "step 1" not in done.stdout


def test_sampled_padding_token_trains_alike_on_ranks(project):
    """Transformers gives the embedding of the padding token no gradient."""
    norms = []
    for mesh in ({}, {"tensor": 2}):
        shutil.rmtree(project.folder / "runs", ignore_errors=True)
        path = project.config(
            model={"path": "mytask:build_padded"},
            learner={"mesh": mesh},
            algorithm={"aggregation": "token_mean"},
            rollout={"async_ratio": 0},
            engine={"replicas": 1},
            steps=3,
        )
        done = project.run("train", path)
        assert done.returncode == 0, done.stderr
        norms.append([step["learner/grad_norm"] for step in project.metrics()])
    assert norms[1] == pytest.approx(norms[0], rel=1e-3)
