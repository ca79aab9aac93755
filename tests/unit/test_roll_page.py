"""What `docs/roll.md` names exists, and its counts are those of its rows."""

import re
import shlex
from collections import Counter
from pathlib import Path

import pytest
import typer
import yaml

from antiphon.algorithms.recipes import RECIPES
from antiphon.algorithms.registry import ADVANTAGES, LOSSES
from antiphon.cli.app import app
from antiphon.inspect.options import list_options
from antiphon.sandbox.service.config import ServiceConfig
from antiphon.tasks.environments import ENVIRONMENTS
from antiphon.tasks.rewards import REWARDS
from tests.unit.test_options import MODELS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "roll.md").read_text(encoding="utf-8")
MARKS = {
    "partly there": "; **only:** ",
    "missing": "; **not yet:** ",
    "need a GPU": "; **needs a GPU: not run here**",
}
NAMES = {
    "algorithm.recipe": RECIPES,
    "algorithm.advantage": ADVANTAGES.known,
    "algorithm.loss": LOSSES.known,
    "tasks[].reward": REWARDS.known,
    "tasks[].environment": ENVIRONMENTS.known,
}
OPTIONS = {option.key: option for model in MODELS.values() for option in list_options(model)}


def read_rows(page):
    """Return the cells of each row about a capability."""
    found = [line.strip("| \n").split(" | ") for line in page.splitlines() if line.count(" | ") == 4]
    return [cells for cells in found if cells[0] != "capability"]


ROWS = read_rows(PAGE)
IDS = [cells[0].partition(";")[0] for cells in ROWS]


def state_of(capability):
    """Return what a row says about its capability; its text has at most one mark."""
    (state,) = [name for name, mark in MARKS.items() if mark in capability] or ["whole"]
    return state


def code_in(cell):
    return re.findall(r"`([^`]+)`", cell)


def problems_of_key(text):
    """Yield what is wrong with `key` or `key: value`."""
    key, _, value = text.partition(": ")
    option = OPTIONS.get(key)
    if option is None:
        if value or not any(each.startswith((f"{key}.", f"{key}[]")) for each in OPTIONS):
            yield f"no key {key}"
    elif value and not is_value(key, value, option):
        yield f"no value {value} of {key}"


def is_value(key, value, option):
    if key in NAMES:
        return value in NAMES[key]
    return value in (*option.type.split(" | "), *code_in(option.meaning)) or isinstance(yaml.safe_load(value), int)


def problems_of_command(line):
    """Yield what is wrong with a command, its options and its overrides."""
    command, words = typer.main.get_command(app), shlex.split(line)[1:]
    while words and hasattr(command, "commands"):
        name = words.pop(0)
        if name not in command.commands:
            yield f"no command {name}"
            return
        command = command.commands[name]
    known = {option for parameter in command.params for option in parameter.opts}
    keys = ServiceConfig.model_fields if "sandbox" in line else OPTIONS
    for word in words:
        if word.startswith("--") and word not in known:
            yield f"no option {word}"
        elif "=" in word and word.partition("=")[0] not in keys:
            yield f"no key {word}"


def problems_of(cells):
    """Yield what a row names that does not exist."""
    _, keys, code, tests, use = cells
    for text in code_in(keys):
        yield from problems_of_command(text) if text.startswith("antiphon ") else problems_of_key(text)
    for path in code_in(code):
        if not (ROOT / ("" if path.startswith("antiphon_envs/") else "antiphon") / path).is_file():
            yield f"no file {path}"
    for test in code_in(tests):
        path, _, name = test.partition("::")
        file = ROOT / "tests" / path
        if not file.is_file() or not re.search(rf"^(async )?def {name}\(", file.read_text("utf-8"), re.MULTILINE):
            yield f"no test {test}"
    links = re.findall(r"\]\(([^)#]+)", use)
    for path in [*(ROOT / "docs" / link for link in links), *(ROOT / path for path in code_in(use))]:
        if not path.is_file():
            yield f"no file {path}"


@pytest.mark.parametrize("cells", ROWS, ids=IDS)
def test_all_that_a_row_names_exists(cells):
    assert list(problems_of(cells)) == []


@pytest.mark.parametrize("cells", ROWS, ids=IDS)
def test_row_shows_what_it_claims(cells):
    """A whole capability has a test; a missing one has neither test nor key; what CI cannot test, on a GPU, is not whole."""
    state, tests = state_of(cells[0]), code_in(cells[3])
    assert tests or state != "whole"
    assert not (tests or code_in(cells[1])) or state != "missing"
    assert ("gpu/" not in cells[3]) or state != "whole"


def test_counts_are_those_of_the_rows():
    states = Counter(state_of(cells[0]) for cells in ROWS)
    claimed = re.search(
        r"^Of (\d+) rows, (\d+) are whole, (\d+) are partly there, (\d+) are missing,", PAGE, re.MULTILINE
    )
    gpu = re.search(r"and (\d+)\s+need a GPU\.", PAGE)
    wanted = [len(ROWS), *(states[name] for name in ("whole", "partly there", "missing")), states["need a GPU"]]
    assert [int(number) for number in (*claimed.groups(), *gpu.groups())] == wanted
    assert len(ROWS) > 150 and len(set(IDS)) == len(IDS)


def test_no_row_is_overlooked():
    """Every line of the tables about capabilities has five cells, so that it is checked and counted."""
    tables = PAGE.split("\n## ", 1)[1].splitlines()
    rows = [line for line in tables if line.startswith("|") and not line.startswith(("| capability |", "|---"))]
    assert len(rows) == len(ROWS)


@pytest.mark.parametrize(
    "wrong",
    [
        "| a | `rollout.async_rato` | – | – | – |",
        "| a | `algorithm.recipe: dapoo` | – | – | – |",
        "| a | `rollout.policy: que` | – | – | – |",
        "| a | `antiphon trian` | – | – | – |",
        "| a | `antiphon train --resum` | – | – | – |",
        "| a | `antiphon sandbox serve warn=8` | – | – | – |",
        "| a | – | `run/loops.py` | – | – |",
        "| a | – | – | `unit/test_docs.py::test_example` | – |",
        "| a | – | – | – | [roles](guides/role.md) |",
        "| a | – | – | – | `benchmarks/rolls.py` |",
    ],
)
def test_a_wrong_row_is_noticed(wrong):
    (cells,) = read_rows(wrong)
    assert len(list(problems_of(cells))) == 1
