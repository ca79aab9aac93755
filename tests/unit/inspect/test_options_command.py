"""What `antiphon options` says, against the list of options that the tests keep and against values of the models."""

from pathlib import Path

import pytest

from antiphon.inspect.options import find_options, list_options
from antiphon.offline.config import DpoConfig
from antiphon.run.config import RunConfig

KEPT = (Path(__file__).parents[1] / "options.txt").read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("model, command", [(RunConfig, "train"), (DpoConfig, "dpo")])
def test_every_option_is_listed(model, command):
    kept = {line.split(": ", 1)[1].split(" = ")[0] for line in KEPT if line.startswith(f"{command}: ")}
    assert {option.key for option in list_options(model)} == kept


def test_an_option_says_all_that_is_known_of_it():
    (option,) = find_options(RunConfig, "rollout.group_size")
    assert option.type == "integer > 0" and option.default == "8" and option.meaning


def test_a_section_has_the_options_below_it():
    keys = [option.key for option in find_options(RunConfig, "learner.optimizer")]
    assert "learner.optimizer.learning_rate" in keys
    assert all(key.startswith("learner.optimizer.") for key in keys)
    assert not find_options(RunConfig, "learner.optim")
