"""First commands of a user: what `antiphon init` writes, and what it refuses."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[3]


def antiphon(*arguments, cwd):
    command = [sys.executable, "-m", "antiphon", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env={**os.environ, "COLUMNS": "200"})


def test_a_new_project_has_its_own_files(tmp_path):
    done = antiphon("init", "mine", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "cd mine && antiphon train run.yaml" in done.stdout
    names = {"README.md", "model.py", "reward.py", "run.yaml", "test.jsonl", "train.jsonl"}
    assert {file.name for file in (tmp_path / "mine").iterdir()} == names


@pytest.mark.parametrize("recipe", sorted(folder.parent.name for folder in ROOT.glob("recipes/*/README.md")))
def test_each_recipe_becomes_a_project(tmp_path, recipe):
    """A project is complete without the recipe's folder: nothing in it leads back there."""
    done = antiphon("init", "mine", "--recipe", recipe, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    configs = sorted((tmp_path / "mine").glob("*.yaml"))
    assert configs
    for config in configs:
        shown = antiphon("train", config.name, "--dry-run", cwd=tmp_path / "mine")
        assert shown.returncode == 0, shown.stderr
    for code in (tmp_path / "mine").glob("*.py"):
        assert "parents[1]" not in code.read_text()


def test_a_folder_with_files_is_left_alone(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("kept")
    done = antiphon("init", "mine", cwd=tmp_path)
    assert done.returncode == 2 and "mine" in done.stderr
    assert [file.name for file in (tmp_path / "mine").iterdir()] == ["notes.txt"]


def test_an_unknown_recipe_is_refused(tmp_path):
    done = antiphon("init", "mine", "--recipe", "tiny", cwd=tmp_path)
    assert done.returncode == 2 and "tiny_arithmetic" in done.stderr
    assert not (tmp_path / "mine").exists()


def test_recipes_are_listed(tmp_path):
    shown = antiphon("recipes", cwd=tmp_path).stdout
    for folder in ROOT.glob("recipes/*/README.md"):
        assert folder.parent.name in shown


def test_every_problem_of_the_starter_is_right():
    """The sums are checked here, not where they were made."""
    import json

    for name in ("train", "test"):
        for line in (ROOT / "recipes" / "starter" / f"{name}.jsonl").read_text().splitlines():
            row = json.loads(line)
            a, b = map(int, row["prompt"].rstrip("=").split("+"))
            assert int(row["answer"]) == a + b and row["response"].endswith(f":{a + b}")
    config = yaml.safe_load((ROOT / "recipes" / "starter" / "run.yaml").read_text())
    assert config["tasks"][0]["prompts"]["path"] == "train.jsonl"


def test_a_project_says_what_its_recipe_needs(tmp_path):
    done = antiphon("init", "mine", "--recipe", "webshop", cwd=tmp_path)
    assert "next: cd mine && pip install 'antiphon[envs]' && antiphon train run.yaml" in done.stdout
    clusters = antiphon("init", "many", "--recipe", "clusters", cwd=tmp_path).stdout
    assert clusters.count("pip install") == 1


@pytest.mark.parametrize("recipe", sorted(folder.parent.name for folder in ROOT.glob("recipes/*/README.md")))
def test_a_recipes_page_begins_in_a_project_of_its_own(recipe):
    """Its commands are those of the folder that `antiphon init` leaves one in, not of this repository."""
    page = (ROOT / "recipes" / recipe / "README.md").read_text()
    commands = [line for block in page.split("```sh\n")[1:] for line in block.split("```")[0].splitlines()]
    assert commands and not [line for line in commands if "recipes/" in line]
    if recipe != "starter":
        assert f"antiphon init {recipe} --recipe {recipe} && cd {recipe}" in commands
