"""The command line, as its users meet it: in a process of its own."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from antiphon import __version__
from antiphon.core.config import load
from antiphon.run.config import RunConfig

ROOT = Path(__file__).parents[3]

CONFIG = """\
name: demo
steps: 5
model: {path: ./no_such_model}
tasks:
  - {name: sums, prompts: {source: jsonl, path: problems.jsonl}, reward: exact_match}
rollout:
  groups_per_step: 4
  sampling: {max_tokens: 16}
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.yaml").write_text(CONFIG)
    return tmp_path


def antiphon(*arguments, cwd=ROOT, code=None):
    """Run the command; `code` runs in its process afterwards."""
    script = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from antiphon.cli.app import main\n"
    script += "try: main()\nfinally:\n " + (code or "pass")
    return subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, cwd=cwd)


def test_help_imports_nothing_heavy():
    heavy = {
        "torch",
        "transformers",
        "datasets",
        "numpy",
        "pydantic",
        "ray",
        "antiphon.run.config",
        "antiphon.run.build",
        "antiphon.offline.run",
    }
    done = antiphon("--help", code=f"print('HEAVY', *({heavy!r} & set(sys.modules)))")
    assert done.returncode == 0, done.stderr
    assert all(verb in done.stdout for verb in ("train", "sft", "dpo", "reward-model", "distill", "eval", "doctor"))
    assert done.stdout.splitlines()[-1].split() == ["HEAVY"]


def test_version():
    assert antiphon("--version").stdout.strip() == f"antiphon {__version__}"


@pytest.mark.parametrize("verb", ["train", "sft"])
def test_dry_run_prints_a_loadable_configuration(folder, verb):
    before = sorted(folder.rglob("*"))
    done = antiphon(verb, "config.yaml", "rollout.group_size=4", "sft.steps=2", "--dry-run", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert sorted(folder.rglob("*")) == before
    assert "samples a step" in done.stdout
    (folder / "resolved.yaml").write_text(done.stdout)
    resolved = load(folder / "resolved.yaml", model=RunConfig)
    assert resolved == load(folder / "config.yaml", ["rollout.group_size=4", "sft.steps=2"], model=RunConfig)
    assert yaml.safe_load(done.stdout)["rollout"]["group_size"] == 4


def test_a_dry_run_shows_where_each_value_comes_from(folder):
    (folder / "mine.yaml").write_text("base: config.yaml\nsteps: 9\nalgorithm: dapo\n")
    shown = antiphon("train", "mine.yaml", "rollout.group_size=4", "--dry-run", cwd=folder)
    assert shown.returncode == 0, shown.stderr
    found = dict(
        line.strip().split("# ", 1) for line in shown.stdout.partition("# Derived")[0].splitlines() if "# " in line
    )
    by_value = {value.strip(): source for value, source in found.items()}
    assert by_value["steps: 9"] == "mine.yaml:2" and by_value["group_size: 4"] == "command line"
    assert by_value["clip_high: 0.28"] == "recipe dapo" and by_value["seed: 0"] == "default"
    assert by_value["recipe: dapo"] == "mine.yaml:3" and by_value["groups_per_step: 4"].startswith("base config.yaml:")


def test_a_dry_run_of_a_local_model_estimates_its_memory(folder):
    import numpy as np
    from safetensors.numpy import save_file

    save_file({"a": np.zeros((1000, 1000), np.float32)}, folder / "model.safetensors")
    done = antiphon("train", "config.yaml", "model.path=.", "--dry-run", cwd=folder)
    assert "Memory for 1,000,000 parameters" in done.stdout


@pytest.mark.parametrize("kind", ["my_engin:MyEngine", "my_engine:MyEngin"])
def test_a_dry_run_finds_a_misspelt_import_path(folder, kind):
    (folder / "my_engine.py").write_text("raise RuntimeError('imported')\n\n\nclass MyEngine: ...\n")
    (folder / "config.yaml").write_text(f"{CONFIG}engine:\n  kind: {kind}\n")
    done = antiphon("train", "config.yaml", "--dry-run", cwd=folder)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("antiphon: config.yaml:10: engine.kind: ") and repr(kind) in done.stderr
    assert antiphon("train", "config.yaml", "engine.kind=my_engine:MyEngine", "--dry-run", cwd=folder).returncode == 0


def test_a_misspelt_key_is_one_message(folder):
    done = antiphon("train", "config.yaml", "rollout.group_sise=4", cwd=folder)
    assert done.returncode == 2
    assert done.stderr.startswith("antiphon: override 'rollout.group_sise=4': rollout.group_sise: there is no such key")
    assert "did you mean 'group_size'?" in done.stderr
    assert "Traceback" not in done.stderr and done.stdout == ""


@pytest.mark.parametrize("arguments", [("train", "config.yaml"), ("eval", "./no_such_model", "config.yaml")])
def test_missing_model_directory_is_named_first(folder, arguments):
    done = antiphon(*arguments, cwd=folder)
    assert done.returncode == 2
    assert done.stderr == "antiphon: model './no_such_model': there is no such directory\n"
    assert [path.name for path in folder.iterdir()] == ["config.yaml"]


def test_sft_without_its_configuration_says_what_to_give(folder):
    done = antiphon("sft", "config.yaml", cwd=folder)
    assert done.returncode == 2
    assert done.stderr == "antiphon: config.yaml: sft: is missing; give at least sft.steps\n"


def test_a_missing_file_is_one_message(folder):
    done = antiphon("train", "no.yaml", cwd=folder)
    assert (done.returncode, done.stderr) == (2, "antiphon: no.yaml: cannot be read: No such file or directory\n")


def test_doctor_names_versions_and_what_is_missing():
    done = antiphon("doctor")
    assert done.returncode == 0, done.stderr
    for row in ("python", "torch", "transformers", "CPUs", "memory", "CUDA devices", "float32", "ray", "vllm", "peft"):
        assert row in done.stdout
    offered = set(re.findall(r"pip install 'antiphon\[([^\]]+)\]'", done.stdout))
    assert offered <= {"deepspeed", "envs", "gguf", "megatron", "peft", "ray", "reasoning-gym", "tensorboard"}
