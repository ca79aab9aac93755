"""What `AGENTS.md` names exists: commands with their options, addresses, keys of the configuration, paths, make targets."""

import re
import shlex
from pathlib import Path

import pytest
import typer

from antiphon.cli.app import app
from antiphon.dashboard.app import describe_api
from tests.unit.test_options import all_options

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "AGENTS.md").read_text(encoding="utf-8")
CODE = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", PAGE, flags=re.DOTALL))
LINES = [
    line.partition("#")[0].strip()
    for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    for line in block.splitlines()
]
COMMANDS = [part for line in (*LINES, *CODE) for part in line.split(" && ") if part.startswith("antiphon ")]
PATHS = [
    each for each in CODE if re.match(r"(docs|antiphon|tests|tools|recipes)/", each) or each.endswith((".md", ".toml"))
]


def test_page_is_short():
    assert PAGE.count("\n") <= 80
    assert len(COMMANDS) > 12 and len(PATHS) > 12


@pytest.mark.parametrize("line", COMMANDS)
def test_command_and_its_options_exist(line):
    command = typer.main.get_command(app)
    words = shlex.split(line)[1:]
    verb = command.commands[words[0]]
    if "show" in getattr(verb, "commands", {}):  # `antiphon dashboard RUNS` is `antiphon dashboard show RUNS`
        verb = verb.commands["show"]
    known = {option for parameter in verb.params for option in parameter.opts}
    assert {word for word in words if word.startswith("--")} <= known
    assert all((ROOT / word).exists() for word in words if word.startswith("scenarios/"))
    keys = {word.partition("=")[0] for word in words if re.match(r"[a-z_.]+=", word)}
    assert words[0] == "simulate" or keys <= find_keys()


@pytest.mark.parametrize("path", PATHS)
def test_path_exists(path):
    assert (ROOT / path).exists()


def test_addresses_are_those_of_the_dashboard():
    known = set(describe_api()) | {"/api", "/api/schema"}
    assert {each for each in CODE if each.startswith("/api")} <= known
    named = {re.sub(r"^http://[^/]+", "", url).partition("?")[0] for url in re.findall(r'"(http://[^"]+)"', PAGE)}
    assert named and {re.sub("/try$", "/{run}", path) for path in named} <= known


def find_keys():
    return {line.split(" ")[1] for line in all_options("train")}


def test_keys_are_those_of_the_configuration():
    named = {each.partition(":")[0] for each in CODE if re.fullmatch(r"[a-z_]+(\[\])?\.[a-z_.]+(: \w+)?", each)}
    named -= set(PATHS) | {"run.yaml"}
    assert len(named) > 8 and named <= find_keys() | {"antiphon.open_run"}


def test_make_targets_exist():
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert set(re.findall(r"\bmake ([a-z-]+)", PAGE)) <= set(targets)
