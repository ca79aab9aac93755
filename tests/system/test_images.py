"""Runs with images, in prompts and in what an environment shows, by a tiny vision-language model."""

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from transformers import AutoModelForImageTextToText

from antiphon.core.config import add_import_folder, load
from antiphon.core.errors import ConfigError, DataError
from antiphon.dashboard.params import Params
from antiphon.dashboard.site import Site
from antiphon.dashboard.views.chat import query_chat
from antiphon.inspect.audit import audit
from antiphon.inspect.replay import replay
from antiphon.record.trajectories import read
from antiphon.run import commands
from antiphon.run.config import RunConfig
from antiphon.tasks.config import PromptsConfig, TaskConfig
from antiphon.tasks.prompts import load_prompts
from tests.vision_models import picture, write_vision_model

COLORS = {"r": (230, 20, 20), "g": (20, 220, 20), "b": (20, 20, 230)}
QUESTION = "color <image>"
TASK = '''
from antiphon.core.types import Message

from tests.vision_models import picture

COLORS = {"r": (230, 20, 20), "g": (20, 220, 20), "b": (20, 20, 230)}


def named(prompt, transcript):
    """1 for the letter of the color, 0.3 for another letter of a color: a random model begins with neither."""
    said, right = transcript.response[:1], prompt.payload["color"]
    assert prompt.messages[0].images and transcript.messages[0].images
    return 1.0 if said == right else 0.3 if said in COLORS else 0.0


class Lights:
    """Shows a light twice; the action names its color."""

    def __init__(self, prompt):
        self.color, self.turn = prompt.payload["color"], 0

    def _show(self):
        return {"images": [picture(COLORS[self.color])], "state_key": self.color}

    def reset(self, seed):
        return "light <image>", self._show()

    def step(self, action):
        self.turn += 1
        right = action[:1] == self.color
        self.color = {"r": "g", "g": "b", "b": "r"}[self.color]
        return "now <image>", float(right), self.turn == 2, False, self._show()

    def close(self):
        pass
'''


@pytest.fixture(scope="module")
def vision_model(tmp_path_factory):
    place = tmp_path_factory.mktemp("vision_model")
    write_vision_model(place, "llava", scale=1.0)
    return place


@pytest.fixture
def colors(project, vision_model):
    """The project with a task of naming colors: 12 pictures to train on, whose sizes and dots differ."""
    project.model = vision_model
    (project.folder / "colored.py").write_text(textwrap.dedent(TASK))
    rows = [
        {
            "prompt": QUESTION,
            "color": name,
            "images": [{"bytes": picture(color, (20 + 2 * n, 24), dots=n), "path": None}],
        }
        for n in range(4)
        for name, color in COLORS.items()
    ]
    pq.write_table(pa.Table.from_pylist(rows), project.folder / "colors.parquet")
    return project


def settings(project, **task):
    source = {"source": "parquet", "path": str(project.folder / "colors.parquet")}
    given = {"name": "colors", "prompts": source, "test": {**source, "limit": 6}, "reward": "colored:named", **task}
    return {
        "tasks": [given],
        "engine": {"slots": 32, "device": "cpu"},
        "evaluation": {},
        "rollout": {"groups_per_step": 6, "group_size": 8, "timeout": 180, "sampling": {"max_tokens": 1}},
        "learner": {"optimizer": {"learning_rate": 3e-3}, "device": "cpu"},
    }


def train(project, *overrides, debug="true", **sections):
    path = project.config(**sections)
    add_import_folder(path)
    overrides = (f"cluster.debug={debug}", "record.live=off", *overrides)
    return commands.train(load(path, overrides, model=RunConfig), overwrite=True)


def recorded(project):
    """The recorded trajectories of the run."""
    rollouts = project.folder / "runs" / "run" / "rollouts"
    return [each for file in sorted(rollouts.glob("*.parquet")) for each in read(file).values()]


def check(project):
    """The audit, and the replay of what was trained on, find what was recorded."""
    run = project.folder / "runs" / "run"
    assert audit(run).violations == []
    return replay(run, load(run / "config.yaml", model=RunConfig), report=lambda line: None)


def test_it_learns_to_name_what_it_sees(colors):
    assert train(colors, "steps=60", **settings(colors)) == 0
    assert colors.summary()["accuracy_after"] == 1.0
    assert check(colors) == 60
    run = colors.folder / "runs" / "run"
    shown = {image.data for each in recorded(colors) for segment in each.segments for image in segment.images}
    assert len(shown) == 12 == len(list((run / "rollouts" / "_images").iterdir()))
    trained = AutoModelForImageTextToText.from_pretrained(max((run / "checkpoints").iterdir()))
    before = AutoModelForImageTextToText.from_pretrained(colors.model).state_dict()
    changed = {name.split(".")[1] for name, tensor in trained.state_dict().items() if not tensor.equal(before[name])}
    assert {"vision_tower", "multi_modal_projector", "language_model"} <= changed
    page = query_chat(Site.make(run.parent, colors.folder / "cache"), Params([("id", "0.0.0")], "run"))
    assert page.problem and not page.prompt  # the dashboard's chat would send the prompt without its images


def test_engine_and_learner_agree(colors):
    sections = settings(colors)
    sections["rollout"] |= {"async_ratio": 0, "sampling": {"max_tokens": 4}}
    assert train(colors, "steps=3", **sections) == 0
    assert all(step["learner/mismatch_kl"] < 1e-9 for step in colors.metrics())


def test_frozen_encoder_and_adapters(colors):
    sections = settings(colors)
    sections["learner"] |= {"lora": {"rank": 4}}
    assert train(colors, "steps=2", **sections) == 0
    sections["learner"] |= {"lora": None, "freeze": ["*vision_tower*"]}
    assert train(colors, "steps=2", **sections) == 0
    run = colors.folder / "runs" / "run"
    trained = AutoModelForImageTextToText.from_pretrained(max((run / "checkpoints").iterdir())).state_dict()
    before = AutoModelForImageTextToText.from_pretrained(colors.model).state_dict()
    same = {name for name in trained if trained[name].equal(before[name])}
    assert {name for name in trained if "vision_tower" in name} <= same < set(trained)


@pytest.mark.parametrize("samples", ["trajectory", "turn", "joined"])
def test_environment_shows_images(colors, samples):
    sections = settings(colors, environment="colored:Lights", reward="environment_return")
    sections["rollout"] |= {"max_turns": 2, "samples": samples, "group_size": 4}
    assert train(colors, "steps=2", **sections) == 0
    assert check(colors) == 2
    for trajectory in recorded(colors):
        images = [len(segment.images) for segment in trajectory.segments]
        assert sum(images) in ({2} if samples != "turn" else {3, 4}) or images == [2]


def test_rollout_workers_resume_and_ranks(colors):
    """Images travel by the files of rollout workers to a learner of two ranks, and a resumed run finds them."""
    sections = settings(colors) | {"steps": 3, "checkpoint": {"every": 1}}
    sections["rollout"] |= {"workers": 2, "async_ratio": 1}
    sections["engine"] |= {"replicas": 2}
    sections["learner"] |= {"mesh": {"shard": 2}}
    done = colors.run("train", colors.config(**sections))
    assert done.returncode == 0, done.stderr
    more = colors.run("train", colors.config(**sections), "--resume", "steps=5")
    assert more.returncode == 0, more.stderr
    assert check(colors) == 5


@pytest.mark.parametrize("learner", [{"mesh": {"context": 2}}, {"kind": "deepspeed", "mesh": {"shard": 2}}], ids=str)
def test_what_cannot_divide_it_is_refused(colors, learner, monkeypatch):
    monkeypatch.setattr("antiphon.run.launch.model_checks.check_installed", lambda kind: None)
    sections = settings(colors)
    sections["learner"] = learner
    with pytest.raises(ConfigError) as raised:
        train(colors, debug="false", **sections)
    assert raised.value.key in ("learner.mesh.context", "learner.kind")


def test_model_without_eyes_is_named(colors, model):
    colors.model = model
    with pytest.raises(DataError) as raised:
        train(colors, **settings(colors))
    assert str(model) in str(raised.value)


def test_the_page_on_images(colors):
    """Its data set, its task and its environment."""
    page = (Path(__file__).parents[2] / "docs/guides/images.md").read_text()
    for name, text in re.findall(r"```python\n# (\w+\.py)\n(.*?)```", page, re.DOTALL):
        (colors.folder / name).write_text(text)
    subprocess.run([sys.executable, "make_colors.py"], cwd=colors.folder, check=True)
    task, world, learner = (yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL))
    for key in ("prompts", "test"):
        task["tasks"][0][key]["path"] = str(colors.folder / "colors.parquet")
    for sections in (task, world):
        assert train(colors, "steps=1", **{**settings(colors), **sections, **learner}) == 0
        assert check(colors) == 1
        assert all(segment.images for each in recorded(colors) for segment in each.segments)


def test_engine_that_reads_text_is_refused(colors):
    sections = settings(colors)
    sections["engine"] = {"kind": "vllm"}
    with pytest.raises(ConfigError) as raised:
        train(colors, **sections)
    assert (raised.value.key, raised.value.value) == ("engine.kind", "vllm")


def test_fine_tuning_before_training_sees_images(colors):
    """A few examples suffice to name each color."""
    sections = settings(colors) | {"sft": {"steps": 40, "batch_size": 12, "response": "color"}}
    sections["sft"]["optimizer"] = {"learning_rate": 1e-2}
    assert train(colors, "steps=1", **sections) == 0
    assert colors.summary()["accuracy_before"] == 1.0


def test_generated_examples_have_the_images(colors):
    out, good = colors.folder / "samples.parquet", colors.folder / "best.jsonl"
    model, config = str(colors.model), str(colors.config(**settings(colors)))
    files = ["--data", str(colors.folder / "colors.parquet"), "--out", str(out), "--best", str(good)]
    done = colors.run("generate", model, "--config", config, *files)
    assert done.returncode == 0, done.stderr
    prompts = PromptsConfig(source="jsonl", path=str(good))
    found = load_prompts(TaskConfig(name="good", prompts=prompts), prompts, 0)
    shown = {row["images"][0]["bytes"] for row in pq.read_table(colors.folder / "colors.parquet").to_pylist()}
    assert {image for prompt in found for image in prompt.messages[0].images} == shown and len(found) == 12
