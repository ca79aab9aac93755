"""The documentation runs."""

import asyncio
import doctest
import inspect
import json
import os
import re
import tomllib
from pathlib import Path

import pytest
import yaml

from antiphon.core.config import load
from antiphon.core.errors import ConfigError, UnsupportedError
from antiphon.engines.config import EngineConfig
from antiphon.learning.config import LearnerConfig
from antiphon.run.config import RunConfig
from antiphon.sandbox.base import Level
from antiphon.sandbox.isolation import levels
from antiphon.tasks.config import TaskConfig
from antiphon.tasks.environments import ENVIRONMENTS, environment_factory
from antiphon.tasks.rewards import REWARDS as REGISTERED
from antiphon.tasks.rewards import build_group_reward, build_reward
from tools.combinations import PAGE, TABLE, make_table

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("page", sorted(str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")))
def test_examples(page, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("sys.path", list(os.sys.path))
    result = doctest.testfile(
        str(ROOT / "docs" / page), module_relative=False, optionflags=doctest.NORMALIZE_WHITESPACE
    )
    assert result.failed == 0


REWARDS = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "rewards.md").read_text(), re.DOTALL)


@pytest.mark.parametrize("fragment", REWARDS)
def test_the_rewards_of_their_page_can_be_built(fragment):
    task = yaml.safe_load(fragment)
    if task["reward"] != "reward_model":  # its model is none of ours
        try:
            reward = build_reward(task["reward"], task.get("reward_options", {}))
        except UnsupportedError:  # it runs programs in a sandbox, by default at level 3
            level = levels.probe().level or 0
            assert level < Level.ISOLATED
            pytest.skip(f"this machine has sandbox level {int(level)}")
        if inspect.isawaitable(closing := getattr(reward, "close", bool)()):
            asyncio.run(closing)
    if "group_reward" in task:
        build_group_reward(task["group_reward"], task["group_reward_options"])
    assert TaskConfig.model_validate(task)


def test_the_page_of_rewards_has_them_all():
    page = (ROOT / "docs" / "rewards.md").read_text() + (TaskConfig.model_fields["reward"].description or "")
    assert [name for name in REGISTERED.known if page.count(f"`{name}`") < 2] == []


FRAGMENTS = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "algorithms.md").read_text(), re.DOTALL)


@pytest.mark.parametrize("fragment", FRAGMENTS)
def test_what_the_page_on_algorithms_says_can_be_configured(fragment, tmp_path):
    base = yaml.safe_load((ROOT / "recipes" / "tiny_arithmetic" / "config.yaml").read_text())
    base["tasks"][0]["name"] = "sums"
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(base | yaml.safe_load(fragment)))
    load(tmp_path / "config.yaml", model=RunConfig)


# Rows of these tables: `name` or words, then accuracies, the gain last; "±" and its interval follow each.
LEARNING = ROOT / "benchmarks" / "results" / "cpu-2core" / "learning.json"


def test_learning_tables_are_of_the_result_file():
    page = (ROOT / "docs" / "algorithms.md").read_text()
    figures = json.loads(LEARNING.read_text())["figures"]
    rows = re.findall(
        r"^\| `(\w+)`.* \| (.*) ± (.*) \| (.*) ± (.*) \| (.*) ± (.*) \| (.*) ± (.*) \|$", page, re.MULTILINE
    )
    assert len(rows) == 6
    for loss, *cells in rows:
        names = [f"staleness_{loss}_age{age}_accuracy" for age in (0, 2, 8)] + [f"staleness_{loss}_age8_gain"]
        expected = [figures[name + ending] for name in names for ending in ("", "_interval")]
        assert [float(cell) for cell in cells] == pytest.approx(expected, abs=0.00501)


def test_learning_tables_name_their_learning_rate():
    """All settings of a section share one, so the page may not read as a comparison of tuned algorithms."""
    section = (ROOT / "docs" / "algorithms.md").read_text().split("## Measured results")[1].split("\n## ")[0]
    recipe = load(ROOT / "recipes" / "tiny_arithmetic" / "config.yaml", model=RunConfig)
    named = [float(text) for text in re.findall(r"learning rate of ([\d.e-]+)", section)]
    assert named == [recipe.learner.optimizer.learning_rate] and "rank nothing" in section


ENVIRONMENTS_PAGE = (ROOT / "docs" / "environments.md").read_text()


@pytest.mark.parametrize("fragment", re.findall(r"```yaml\n(environment: .*?)```", ENVIRONMENTS_PAGE, re.DOTALL))
def test_the_environments_of_their_page_can_be_made(fragment):
    task = yaml.safe_load(fragment)
    environment_factory(task["environment"], task["environment_options"])
    assert TaskConfig.model_validate(
        {"name": "a", "prompts": {"source": "jsonl"}, "reward": "environment_return"} | task
    )


def test_the_tasks_of_the_page_of_environments_are_valid():
    (fragment,) = re.findall(r"```yaml\n(tasks:.*?)```", ENVIRONMENTS_PAGE, re.DOTALL)
    (task,) = yaml.safe_load(fragment)["tasks"]
    assert TaskConfig(**task).agent


def test_the_page_of_environments_has_them_all():
    assert [name for name in ENVIRONMENTS.known if f"| `{name}` |" not in ENVIRONMENTS_PAGE] == []


def test_pages_name_extras_that_there_are():
    """Antiphon is in no package index: pip finds its extras where it is installed, and not Antiphon itself."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "recipes").rglob("*.md")]
    texts = {path: path.read_text() for path in [*pages, *(ROOT / "antiphon").rglob("*.py")]}
    assert [path for path, text in texts.items() if re.search(r"pip install ['\"]?antiphon(?!\[)", text)] == []
    named = {each for text in texts.values() for each in re.findall(r"pip install 'antiphon\[([^\]{]+)\]'", text)}
    assert {"ray", "peft", "megatron", "gguf,reasoning-gym"} <= named
    assert {extra for each in named for extra in each.split(",")} <= extras.keys()


def test_every_extra_installs_something_that_the_code_uses():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    sources = [path for name in ("antiphon", "antiphon_envs", "recipes") for path in (ROOT / name).rglob("*.py")]
    code = "\n".join(path.read_text() for path in sources)
    for extra, requirements in extras.items():
        modules = {re.split(r"[<>=\[-]", requirement)[0] for requirement in requirements}
        unused = {module for module in modules if not re.search(rf'(import |from |"){module}\b', code)}
        assert extra in ("dev", "docs") or not unused, f"{extra} installs {unused}"


def test_support_matrix_names_tests_and_commands_that_exist():
    page = (ROOT / "docs" / "support.md").read_text()
    tests, targets = re.findall(r"`(tests/[\w/.]+)`", page), re.findall(r"`make (\w+)`", page)
    assert len(tests) > 15 and [path for path in tests if not (ROOT / path).exists()] == []
    makefile = (ROOT / "Makefile").read_text()
    assert targets and [name for name in targets if not re.search(rf"^{name}:", makefile, re.MULTILINE)] == []


def test_support_matrix_has_all_engines_and_learners():
    page = (ROOT / "docs" / "support.md").read_text().lower()
    kinds = [EngineConfig.model_fields["kind"].description, LearnerConfig.model_fields["kind"].description]
    named = [name for text in kinds for name in re.findall(r"`(\w+)`", text)]
    assert {"native", "vllm", "torch", "megatron"} <= set(named)
    assert [name for name in named if name not in page and name != "options"] == []


def test_the_table_of_learners_is_that_of_their_checks():
    """... and what it calls refused is refused in a run's configuration."""
    assert make_table() == TABLE.search(PAGE.read_text(encoding="utf-8"))[0]
    recipe = ROOT / "recipes/tiny_arithmetic/config.yaml"
    with pytest.raises(ConfigError) as raised:
        load(recipe, ("learner.kind=megatron", "learner.freeze=['lm_head.*']"), model=RunConfig)
    assert raised.value.key == "learner.freeze"


def test_the_table_of_cards_is_that_of_their_plans():
    figures = json.loads((ROOT / "benchmarks/results/cpu-2core/cards.json").read_text(encoding="utf-8"))["figures"]
    page = (ROOT / "docs" / "planning.md").read_text(encoding="utf-8")
    table = page[page.index("### One card") :].split("|---|---|---|---|---|\n")[1].split("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    assert len(rows) * 8 == len(figures)
    for model, *cells in rows:
        for card, cell in zip(("rtx4090", "l40s", "h100", "h200"), cells, strict=True):
            found = [
                (words, figures[f"{model}_{way}_{card}"]) for words, way in (("all weights", "full"), ("LoRA", "lora"))
            ]
            said = {2: "", 1: ", with changes", 0.5: ", offloaded"}
            expected = next((words + said[fits] for words, fits in found if fits), "–")
            assert cell == expected, (model, card)
