"""What `antiphon options` says, against the list of options that the tests keep and against values of the models."""

import json
import re
from pathlib import Path

import pytest

from antiphon.algorithms.config import AlgorithmConfig
from antiphon.inspect.options import find_options, list_options
from antiphon.learning.config import CriticConfig, LearnerConfig, SftConfig
from antiphon.offline.config import DistillConfig, DpoConfig, RewardModelConfig
from antiphon.run.config import RunConfig
from antiphon.run.config_changes import flatten

MODELS = (RunConfig, DpoConfig, RewardModelConfig, DistillConfig)
KEPT = (Path(__file__).parents[1] / "options.txt").read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("model, command", [(RunConfig, "train"), (DpoConfig, "dpo")])
def test_every_option_is_listed(model, command):
    kept = {line.split(": ", 1)[1].split(" = ")[0] for line in KEPT if line.startswith(f"{command}: ")}
    listed = {option.key: option for option in list_options(model)}
    sections = {key for key, option in listed.items() if option.type == "section or null"}  # which are not kept
    assert listed.keys() - sections == kept - sections and "cluster" not in sections


def test_an_option_says_all_that_is_known_of_it():
    (option,) = find_options(RunConfig, "rollout.group_size")
    assert (option.type, option.unit, option.default) == ("integer > 0", "attempts", "8") and option.meaning
    assert all(part in str(option) for part in (option.key, option.type, option.unit, option.default, option.meaning))


@pytest.mark.parametrize("model", MODELS)
def test_every_option_is_described(model):
    options = list_options(model)
    assert [option.key for option in options if len(option.meaning) < 10] == []
    numbers = [option for option in options if re.match("integer|number", option.type)]
    assert [option.key for option in numbers if not option.unit] == []
    assert [option.key for option in options if "any" in option.type.split()] == []


@pytest.mark.parametrize(
    ("name", "section"),
    [
        ("learner", LearnerConfig()),
        ("critic", CriticConfig()),
        ("sft", SftConfig(steps=1)),
        ("algorithm", AlgorithmConfig()),
    ],
)
def test_shown_defaults_are_those_of_the_section(name, section):
    """The default of a section goes before the defaults of its model: `sft.optimizer` differs from `learner.optimizer`."""
    shown = {option.key: json.loads(option.default) for option in find_options(RunConfig, name) if option.default}
    values = {f"{name}.{key}": value for key, value in flatten(section.model_dump(mode="json"))}
    assert len(shown) > 10
    assert {key: values.get(key, default) for key, default in shown.items()} == shown


def test_a_section_has_the_options_below_it():
    keys = [option.key for option in find_options(RunConfig, "learner.optimizer")]
    assert "learner.optimizer.learning_rate" in keys
    assert all(key.startswith("learner.optimizer.") for key in keys)
    assert not find_options(RunConfig, "learner.optim")
