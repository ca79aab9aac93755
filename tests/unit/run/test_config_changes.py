"""The keys that a resume may change, and the refusal of all others."""

from contextlib import nullcontext
from pathlib import Path

import pytest
import yaml

from antiphon.core.config import dump, load
from antiphon.core.errors import ConfigError
from antiphon.run.config import RunConfig
from antiphon.run.config_changes import CHANGEABLE, check_same
from tests.raising import raises_with

RECIPE = Path(__file__).parents[3] / "recipes" / "tiny_arithmetic" / "config.yaml"
PAGE = Path(__file__).parents[3] / "docs" / "record.md"


@pytest.fixture
def written(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(dump(load(RECIPE, model=RunConfig)))
    return path


@pytest.mark.parametrize(
    "change",
    [
        "learner.optimizer.learning_rate=1e-4",
        "learner.optimizer.schedule=cosine",
        "evaluation.every=5",
        "rollout.environment_timeout=7",
        "rollout.environment_concurrency=2",
        "steps=301",
    ],
)
def test_what_keeps_earlier_steps_true_may_change(written, change):
    check_same(written, load(RECIPE, [change], model=RunConfig))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("seed", 5),
        ("rollout.group_size", 4),
        ("rollout.sampling.temperature", 0.5),
        ("algorithm.clip_high", 0.5),
        ("learner.minibatches", 2),
        ("evaluation.limit", 3),
        ("sft.optimizer.learning_rate", 0.1),
    ],
)
def test_what_would_be_another_run_is_refused(written, key, value):
    with raises_with(ConfigError, key=key, value=value, path=written, valid=CHANGEABLE):
        check_same(written, load(RECIPE, [f"{key}={value}"], model=RunConfig))


def test_the_page_lists_every_key_that_may_change():
    _, _, rest = PAGE.read_text(encoding="utf-8").partition("A resume may change")
    listed = rest.partition("\n* **")[0]
    assert [key for key in CHANGEABLE if key not in listed and f"`{key.split('.', 1)[-1]}`" not in listed] == []


@pytest.mark.parametrize(
    ("change", "refused"),
    [
        ({"workers": 3, "timeout": 5.0, "placement": "cpu:1"}, ""),
        ({"factory": "mine:Other"}, "roles.scorer.factory"),
        ({"options": {"unit": 3}}, "roles.scorer.options.unit"),
    ],
)
def test_a_role_may_move_and_grow_but_not_become_another(tmp_path, change, refused):
    plain = load(RECIPE, model=RunConfig).model_dump(mode="json")
    role = {"factory": "mine:Role", "options": {"unit": 4}, "workers": 2}
    written = tmp_path / "config.yaml"
    written.write_text(yaml.safe_dump(plain | {"roles": {"scorer": role}}))
    now = load(plain | {"roles": {"scorer": role | change}}, model=RunConfig)
    with raises_with(ConfigError, key=refused) if refused else nullcontext():
        check_same(written, now)
