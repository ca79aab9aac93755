"""An engine that takes the place of another while the learner's weights change: it gets the weights of the version that it is
told it has."""

import json
import textwrap
from collections import defaultdict

import pytest
from safetensors.torch import load_file

# An engine that is killed as the file `kill` says, and notes what it loads; a learner that waits, where the file `gate` says,
# until an engine that took the place of another was found healthy. By then the pool has asked for its weights.
PARTS = """
    import json
    import os
    import signal
    import time
    from pathlib import Path

    from antiphon.engines.native.engine import NativeEngine
    from antiphon.engines.native.factory import open_engine
    from antiphon.learning.torch_learner import TorchLearner

    HERE = Path(__file__).parent

    def orders(name):
        path = HERE / name
        return path.read_text() if path.exists() else ""

    def die():
        (HERE / "kill").unlink()
        os.kill(os.getpid(), signal.SIGKILL)

    class Engine(NativeEngine):
        asked = 0
        replaces = False

        @property
        def capacity(self):  # is told when the engine is ready, and at each check of its health
            self.asked += 1
            if self.asked == 2 and orders("kill") == "health":
                die()
            if self.asked == 2 and self.replaces:
                (HERE / "replaced").touch()
            return self.__dict__["capacity"]

        def step(self):
            if self.version and orders("kill") == "step":
                die()
            return super().step()

        def load(self, update, mode):
            super().load(update, mode)
            size = sum(parameter.double().abs().sum().item() for parameter in self.model.parameters())
            line = {"engine": os.getpid(), "version": update.version, "size": size}
            with (HERE / "loads").open("a") as file:
                print(json.dumps(line), file=file)

    def engine(model, config, receive):
        opened = open_engine(model, config, receive)
        opened.__class__ = Engine
        opened.replaces = not orders("kill")
        return opened

    class Learner(TorchLearner):
        published = False

        def begin(self, *args):
            self.wait("begin")
            return super().begin(*args)

        def step(self, batch):
            if self.published:
                self.wait("step")
            return super().step(batch)

        def publish(self, version, exchange):
            self.published = True
            return super().publish(version, exchange)

        def wait(self, where):
            while orders("gate") == where and not (HERE / "replaced").exists():
                time.sleep(0.01)
"""


@pytest.fixture
def parts(project):
    (project.folder / "parts.py").write_text(textwrap.dedent(PARTS))
    return {"learner": {"kind": "parts:Learner"}, "engine": {"kind": "parts:engine"}}


ROLLOUT = {"async_ratio": 1, "timeout": 120, "engine_timeout": 8}


def loaded(project):
    """By version, the engines that loaded it, and how large all weights were in each of them then."""
    found = defaultdict(list)
    for line in (project.folder / "loads").read_text().splitlines():
        entry = json.loads(line)
        found[entry["version"]].append((entry["engine"], entry["size"]))
    return found


def test_an_engine_replaced_in_a_resume_gets_restored_weights(project, parts):
    path = project.config(**parts, steps=2, rollout=ROLLOUT, checkpoint={"every": 1})
    first = project.run("train", path)
    assert first.returncode == 0, first.stderr
    for name, content in {"kill": "health", "gate": "begin", "loads": ""}.items():
        (project.folder / name).write_text(content)
    (project.folder / "replaced").unlink(missing_ok=True)
    resumed = project.run("train", path, "--resume", "steps=3")
    assert resumed.returncode == 0, resumed.stderr
    weights = load_file(project.folder / "runs" / "run" / "checkpoints" / "step_000002" / "model.safetensors")
    expected = sum(tensor.double().abs().sum().item() for tensor in weights.values())
    assert [size for _, size in loaded(project)[2]] == [pytest.approx(expected, rel=1e-12)]


def test_an_engine_replaced_in_a_warm_start_gets_its_version(project, parts):
    task = {"name": "digits", "prompts": {"source": "mytask:problems"}, "reward": "mytask:digits"}
    path = project.config(
        **parts,
        steps=1,
        rollout=ROLLOUT,
        tasks=[task | {"validation": {"source": "mytask:problems", "split": "validation", "limit": 8}}],
        sft={"steps": 6, "batch_size": 4, "evaluate_every": 2, "stop_accuracy": 1.0},
    )
    (project.folder / "kill").write_text("step")
    (project.folder / "gate").write_text("step")
    ran = project.run("train", path)
    assert ran.returncode == 0, ran.stderr
    engines, sizes = zip(*loaded(project)[1], strict=True)
    assert len(set(engines)) == 2, "the one that was killed, and the one that took its place"
    assert len(set(sizes)) == 1
