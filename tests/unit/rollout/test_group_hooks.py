"""Filters of groups: those of tasks before the run's own, and errors that name what to look at."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from antiphon.core.errors import UserCodeError
from antiphon.rollout.config import RolloutConfig
from antiphon.rollout.group_hooks import make_filter
from antiphon.tasks.config import TaskConfig

HERE = "tests.unit.rollout.test_group_hooks"


def with_filter(name):
    return RolloutConfig(groups_per_step=1, sampling={"max_tokens": 1}, filter=name)


def task(name, **fields):
    return TaskConfig.model_validate({"name": name, "prompts": {"source": "copy"}, "reward": "exact_match"} | fields)


def group(*scores, of="t"):
    siblings = [SimpleNamespace(meta=SimpleNamespace(score=SimpleNamespace(value=score))) for score in scores]
    return SimpleNamespace(id=7, prompt=SimpleNamespace(task=of, id="p"), trajectories=siblings)


def stumbles(group):
    return group.trajectories[0].meta.score.value > group.nothing


def test_groups_pass_the_range_of_their_task_and_the_filter():
    keep = make_filter(with_filter("spread"), [task("t", mean_range=[0.2, 0.6]), task("free")])
    assert keep(group(0.0, 0.5)) and keep(group(0.2, 0.6, 0.7, 0.9)), "bounds are allowed"
    assert not keep(group(0.0, 0.1)) and not keep(group(0.9, 1.0)) and not keep(group(0.5, 0.5))
    assert keep(group(0.9, 1.0, of="free")) and not keep(group(1.0, 1.0, of="free"))


def test_filter_of_the_guide_keeps_what_it_says():
    guide = (Path(__file__).parents[3] / "docs" / "guides" / "filter.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
    names = {}
    exec(code, names)
    keep = names["short_and_mixed"]

    def with_lengths(given, *lengths):
        for sibling, length in zip(given.trajectories, lengths, strict=True):
            sibling.meta.completion_tokens = length
        return given

    assert keep(with_lengths(group(0.0, 1.0), 150, 250))
    assert not keep(with_lengths(group(0.0, 1.0), 151, 250))
    assert not keep(with_lengths(group(1.0, 1.0), 1, 2))


def test_without_filter_and_ranges_all_groups_are_kept():
    assert make_filter(with_filter(None), [task("t")]) is None


@pytest.mark.parametrize("fields", [{}, {"mean_range": [0.0, 1.0]}])
def test_filter_that_raises_is_named_with_its_line(fields):
    keep = make_filter(with_filter(f"{HERE}:stumbles"), [task("t", **fields)])
    with pytest.raises(UserCodeError) as caught:
        keep(group(0.0, 1.0))
    assert (caught.value.key, caught.value.value) == ("rollout.filter", f"{HERE}:stumbles")
    line = stumbles.__code__.co_firstlineno + 1
    for told in (f"rollout.filter: {HERE}:stumbles", "AttributeError", f"test_group_hooks.py:{line}"):
        assert told in str(caught.value)
