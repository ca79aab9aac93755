"""What users get wrong, and what machines do to them: one clear message each, no hang, no soup of tracebacks."""

import json
import os
import shutil
import signal
import textwrap
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

from antiphon.core.config import load
from antiphon.run.config import RunConfig
from antiphon.simulate.invariants import InvariantChecker
from tests.conftest import Project

NEEDS_RAY = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is optional: pip install -e '.[ray]'")


def error_of(done) -> str:
    assert done.returncode == 2, (done.returncode, done.stderr)
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("antiphon: ")
    return done.stderr


def test_a_misspelt_key(project):
    path = project.config(rollout={"group_sise": 4})
    message = error_of(project.run("train", path))
    assert str(path) in message and "rollout.group_sise" in message and "did you mean 'group_size'" in message
    message = error_of(project.run("train", project.config(), "learner.optimiser.eps=1"))
    assert "learner.optimiser" in message and "did you mean 'optimizer'" in message


def test_servers_that_cannot_be_what_the_run_wants(project):
    def start(*words, rollout=None, **engine):
        engine = {"kind": "server", "options": {"urls": ["http://127.0.0.1:1"]}, **engine}
        path = project.config(engine=engine, rollout=rollout or {"on_update": "drain"})
        return project.run("train", path, *words)

    def message_of(**changes):
        return error_of(start(**changes))

    assert "engine.options.urls" in message_of(options={})
    assert "engine.options.flavor" in message_of(options={"urls": ["http://127.0.0.1:1"], "flavor": "vllm"})
    message = message_of(replicas=2)
    assert "engine.replicas" in message and "1 server" in message
    for words in ((), ("--dry-run",)):
        message = error_of(start(*words, options={"urls": ["http://127.0.0.1:1"], "flavour": "openai"}))
        assert "engine.options.flavour" in message and "antiphon eval" in message
        message = error_of(start(*words, rollout={"on_update": "keep"}))
        assert "rollout.on_update" in message and "recompute" in message
        message = error_of(start(*words, options={"urls": ["http://127.0.0.1:1"], "flavour": "no_module:Own"}))
        assert "engine.options.flavour" in message and "no_module" in message
    secret = {"urls": ["http://127.0.0.1:1"], "key": "NO_SUCH_KEY"}
    assert "NO_SUCH_KEY" in message_of(options=secret)
    assert start("--dry-run", options=secret).returncode == 0
    assert "http://127.0.0.1:1 is lost: ConnectError" in message_of()


def test_what_cannot_begin_leaves_the_run_before_it_alone(project):
    """A Ray that is not there, or devices that are not, are found before anything is overwritten."""
    left = project.folder / "runs" / "run" / "config.yaml"
    left.parent.mkdir(parents=True)
    left.write_text("of an earlier run")
    for wrong in ("placement.learner=gpu:70", "engine.kind=server"):
        error_of(project.run("train", project.config(), "--overwrite", wrong))
        assert left.read_text() == "of an earlier run"


REFUSED_AFTER_THE_FOLDER = {
    "reward that raises": ({"tasks.0.reward": "mytask:raises"}, "no such column in my table"),
    "reward that cannot be imported": ({"tasks.0.reward": "broken:reward"}, "no_such_module"),
    "model that the mesh cannot divide": ({"learner.mesh": "{data: 1, pipeline: 3}"}, "learner.mesh"),
}


@pytest.mark.parametrize("case", REFUSED_AFTER_THE_FOLDER)
def test_a_refused_run_leaves_its_name_free(project, case):
    (project.folder / "broken.py").write_text("import no_such_module\nreward = max\n")
    changes, reason = REFUSED_AFTER_THE_FOLDER[case]
    overrides = [f"{key}={value}" for key, value in changes.items()]
    for _ in range(2):
        message = error_of(project.run("train", project.config(), *overrides))
        assert reason in message and "--overwrite" not in message
        assert not (project.folder / "runs" / "run").exists()


def test_a_refused_command_keeps_the_earlier_run(trained, tmp_path):
    project = Project(tmp_path, trained.model)
    run = project.folder / "runs" / "run"
    shutil.copytree(trained.folder / "runs" / "run", run)
    (project.folder / "mytask.py").write_text((trained.folder / "mytask.py").read_text())
    path = project.config(evaluation={}, steps=2, checkpoint={"every": 1, "keep_every": 1})
    before = {file.relative_to(run): file.read_bytes() for file in run.rglob("*") if file.is_file()}
    error_of(project.run("train", path, "tasks.0.reward=mytask:raises", "--overwrite"))
    assert {file.relative_to(run): file.read_bytes() for file in run.rglob("*") if file.is_file()} == before
    source = (project.folder / "mytask.py").read_text()
    (project.folder / "mytask.py").write_text("import no_such_module\n")
    error_of(project.run("train", path, "steps=3", "--resume"))
    assert (run / "config.yaml").read_bytes() == before[Path("config.yaml")]
    (project.folder / "mytask.py").write_text(source)
    done = project.run("train", path, "steps=3", "--resume")
    assert done.returncode == 0, done.stderr
    assert project.run("audit", run).returncode == 0


def test_what_means_nothing_for_the_engines_or_the_model(project):
    for sections, key in (
        ({"engine": {"minimum": 3, "replicas": 2}}, "engine.minimum"),
        ({"engine": {"minimum": 1}, "rollout": {"deterministic": True}}, "engine.minimum"),
        ({"algorithm": {"expert_balance": 0.1}}, "algorithm.expert_balance: the model at"),
        ({"learner": {"options": {"stage": 2}}}, "learner.options.stage"),
    ):
        assert key in error_of(project.run("train", project.config(**sections)))


def test_a_missing_model(project):
    message = error_of(project.run("train", project.config(model={"path": "no/such/model/here"})))
    assert "no/such/model/here" in message


def test_a_directory_that_is_no_model(project):
    (project.folder / "empty").mkdir()
    message = error_of(project.run("train", project.config(model={"path": str(project.folder / "empty")})))
    assert str(project.folder / "empty") in message


def test_a_dataset_without_the_named_column(project):
    data = project.folder / "data.jsonl"
    data.write_text(json.dumps({"question": "1+1", "answer": "2"}) + "\n")
    task = {
        "name": "t",
        "prompts": {"source": "jsonl", "path": str(data), "prompt_column": "questoin"},
        "reward": "exact_match",
    }
    message = error_of(project.run("train", project.config(tasks=[task])))
    assert "questoin" in message and "question" in message and str(data) in message


def test_a_reward_that_raises(project):
    task = {"name": "t", "prompts": {"source": "mytask:problems"}, "reward": "mytask:raises"}
    message = error_of(project.run("train", project.config(tasks=[task])))
    assert "KeyError" in message and "no such column in my table" in message


def test_a_reward_that_does_not_exist(project):
    task = {"name": "t", "prompts": {"source": "mytask:problems"}, "reward": "mytask:digit"}
    message = error_of(project.run("train", project.config(tasks=[task])))
    assert "mytask:digit" in message and "digits" in message


def test_a_run_that_exists(project):
    path = project.config()
    (project.folder / "runs" / "run").mkdir(parents=True)
    (project.folder / "runs" / "run" / "metrics.jsonl").write_text("")
    assert "--overwrite" in error_of(project.run("train", path))


@pytest.mark.parametrize("worker", ["engine-0", "learner"])
def test_a_worker_process_killed_in_mid_run(project, worker):
    alone = {"rollout": {"engine_restarts": 0}, "checkpoint": {"every": 0}}  # nothing to go on with
    process = project.start("train", project.config(steps=100_000, **alone))
    wait_for_line(process, "step ")
    victim = next(child for child in psutil.Process(process.pid).children(recursive=True) if is_worker(child, worker))
    victim.kill()
    _, err = process.communicate(timeout=120)
    assert process.returncode == 2, err
    assert f"worker {worker} was killed by SIGKILL" in err and "Traceback" not in err
    assert not [child for child in psutil.process_iter() if str(project.folder) in " ".join(arguments(child))]


@pytest.mark.parametrize(
    ("cluster", "engines", "restarts", "channel"),
    [
        ("local", 2, 0, "distributed"),
        ("local", 1, 1, "shared_memory"),
        pytest.param("ray", 1, 1, "object_store", marks=[NEEDS_RAY, pytest.mark.long]),
    ],
)
def test_a_run_goes_on_when_one_of_its_engines_is_killed(project, cluster, engines, restarts, channel):
    """With the others, or with one that takes its place, by each way of weights; the counts are those of any run."""
    rollout = {"engine_restarts": restarts, "redundancy": 1, "extra_groups": 1, "order": "ready", "filter": "spread"}
    slow = {"optimizer": {"learning_rate": 1e-5}}  # what is learnt too well has nothing left to differ in
    record = {"events": True}
    kinds = {"cluster": {"kind": cluster}, "weights": {"channel": channel}}
    config = project.config(
        steps=60, engine={"replicas": engines}, rollout=rollout, learner=slow, record=record, **kinds
    )
    process = project.start("train", config)
    wait_for_line(process, "step ")
    victim = next(c for c in psutil.Process(process.pid).children(recursive=True) if is_worker(c, "engine-0"))
    victim.kill()
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    said = {"local": "worker engine-0 was killed by SIGKILL", "ray": "worker engine-0 died"}[cluster]
    assert said in out and f"engines left: {engines - 1}" in out
    assert project.summary()["steps"] == 60
    run = project.folder / "runs" / "run"
    checker = InvariantChecker(load(run / "config.yaml", model=RunConfig).rollout)
    checker.check((run / "events.jsonl").read_text().splitlines())
    checker.check_end(steps=60)
    assert list(checker.status.values()).count("trained") == 60 * 2 * 4
    assert (len(checker.engines), len(checker.lost)) == (engines + restarts, 1)
    assert checker.engines[max(checker.engines)] > 0, "whoever is left holds newer weights"
    assert json.loads((run / "trace.json").read_text())["traceEvents"]


def test_ctrl_c_stops_after_the_step_and_saves(project):
    process = project.start("train", project.config(steps=100_000))
    wait_for_line(process, "step ")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    summary = project.summary()
    assert summary["stopped_early"] and 0 < summary["steps"] < 100_000
    assert (
        project.folder / "runs" / "run" / "checkpoints" / f"step_{summary['steps']:06d}" / "model.safetensors"
    ).is_file()


def test_ctrl_c_ends_a_run_that_never_waits_for_groups(project):
    """The learner is slower than engines."""
    (project.folder / "slow.py").write_text(
        textwrap.dedent("""
        from antiphon.learning.torch_learner import TorchLearner

        class Learner(TorchLearner):
            def step(self, batch):
                for _ in range(200):
                    self.predict([pack for update in batch.updates for packs in update.packs for pack in packs])
                return super().step(batch)
        """)
    )
    rollout = {"groups_per_step": 1, "async_ratio": 12, "sampling": {"max_tokens": 1}}
    process = project.start("train", project.config(steps=100_000, learner={"kind": "slow:Learner"}, rollout=rollout))
    for _ in range(3):
        wait_for_line(process, "step ")
    process.send_signal(signal.SIGINT)
    wait_for_line(process, "stopping after this step")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert out.count("step ") <= 1, out


def test_a_second_ctrl_c_stops_at_once(project):
    process = project.start("train", project.config(steps=100_000))
    wait_for_line(process, "step ")
    process.send_signal(signal.SIGINT)
    wait_for_line(process, "stopping after this step")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert "Traceback" not in err


def test_an_engine_of_another_vocabulary_is_refused(project):
    (project.folder / "other.py").write_text(
        textwrap.dedent("""
        from transformers import AutoModelForCausalLM

        from antiphon.engines.native.engine import NativeEngine

        def open_engine(model, config, receive):
            other = AutoModelForCausalLM.from_pretrained(model)
            other.resize_token_embeddings(64)
            return NativeEngine(other, config, receive=receive)
        """)
    )
    done = project.run("train", project.config(engine={"kind": "other:open_engine"}))
    assert done.returncode == 2, done.stdout + done.stderr
    assert "engine.kind: engine-0 (other:open_engine) has a vocabulary of 64 tokens, and the model at" in done.stderr
    assert "Traceback" not in done.stderr


def wait_for_line(process, start: str | tuple[str, ...]) -> None:
    """Read until the run has made its first steps."""
    seen = []
    for line in process.stdout:
        seen.append(line)
        if line.startswith(start):
            return
    raise AssertionError("".join(seen) + process.stderr.read())


def is_worker(process: psutil.Process, name: str) -> bool:
    """True for the process that writes this worker's log."""
    return any(os.path.basename(path) == f"{name}.log" for path in output_of(process))


def output_of(process: psutil.Process) -> list[str]:
    try:
        return [os.readlink(f"/proc/{process.pid}/fd/1")]
    except OSError:
        return []


def arguments(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []
