"""Draws by solve rates: in proportion to p (1 - p), without forgetting a prompt, and the same after a resume."""

import json
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.core.types import Prompt
from antiphon.tasks.config import CurriculumConfig
from antiphon.tasks.mixture import Mixture, MixtureTask

SIZE = 7
results = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3)), max_size=60)  # successes of 4, draws before


def mixture(seed=0, size=SIZE, **config):
    tasks = [
        MixtureTask(name="a", prompts=[Prompt(id=f"a/{n}", task="a", messages=(), seed=n) for n in range(size)]),
        MixtureTask(name="b", prompts=[Prompt(id=f"b/{n}", task="b", messages=(), seed=n) for n in range(3)]),
    ]
    return Mixture([replace(tasks[0], curriculum=CurriculumConfig(**config)), tasks[1]], seed)


def play(source, scores):
    """Draw prompts of the mixture, and record the attempts at each as `scores` says; return what was drawn."""
    drawn = []
    for successes, pause in scores:
        prompts = [source.next() for _ in range(pause + 1)]
        drawn += [(prompt.id, prompt.epoch, prompt.seed) for prompt in prompts]
        source.record(prompts[0], successes, 4)
    return drawn


@given(results, st.integers(0, 5), st.integers(1, 6))
def test_no_prompt_is_forgotten_and_none_has_an_epoch_twice(scores, seed, sweep):
    source = mixture(seed, sweep=sweep)
    drawn = play(source, scores) + play(source, [(4, 0)] * 4 * sweep * SIZE)
    own = [name for name, *_ in drawn if name.startswith("a/")]
    epoch = sweep * SIZE
    for start in range(0, len(own) - epoch + 1, epoch):
        assert len(set(own[start : start + epoch])) == SIZE
    assert len(own) >= epoch and len({each[:2] for each in drawn}) == len(drawn)
    assert len({seed for name, _, seed in drawn if name == "a/0"}) == own.count("a/0")


@given(results, results, st.integers(0, 5))
def test_resumed_mixture_draws_what_the_uninterrupted_one_does(before, after, seed):
    source = mixture(seed, sweep=3)
    play(source, before)
    state = json.loads(json.dumps(source.state()))
    assert len(state["curricula"]["a"]) <= SIZE
    resumed = mixture(seed, sweep=3)
    play(resumed, [(2, 1)] * 5)  # which the state replaces
    resumed.restore(state)
    assert play(resumed, after) == play(source, after)
    assert resumed.state() == source.state()


def test_prompts_are_drawn_in_proportion_to_the_variance_of_their_success():
    source = mixture(size=4, sweep=1_000_000, decay=0.5)
    names = {f"a/{n}": Prompt(id=f"a/{n}", task="a", messages=()) for n in range(4)}
    for name, successes in (("a/0", 8), ("a/0", 8), ("a/1", 0), ("a/2", 8), ("a/2", 0)):
        source.record(names[name], successes, 8)
    # (s + 1) / (n + 2): 8 + 4 of 12, 0 of 8, 0 + 4 of 12, none of none
    rates = {"a/0": 13 / 14, "a/1": 1 / 10, "a/2": 5 / 14, "a/3": 1 / 2}
    total = sum(rate * (1 - rate) for rate in rates.values())
    count = 4000
    drawn = Counter(prompt.id for prompt in (source.next() for _ in range(2 * count)) if prompt.task == "a")
    for name, rate in rates.items():
        assert drawn[name] / count == pytest.approx(rate * (1 - rate) / total, abs=0.03)


def test_draws_depend_on_seed_and_results_alone():
    scores = [(1, 2), (4, 1), (0, 3)] * 10
    assert play(mixture(1), scores) == play(mixture(1), scores)
    assert play(mixture(1), scores) != play(mixture(2), scores)
    assert play(mixture(1), scores) != play(mixture(1), [(2, pause) for _, pause in scores])


def test_sweep_of_one_draws_every_prompt_once_an_epoch():
    own = [name for name, *_ in play(mixture(sweep=1), [(0, 1)] * 3 * SIZE) if name.startswith("a/")]
    assert all(len(set(own[start : start + SIZE])) == SIZE for start in range(0, 3 * SIZE, SIZE))


def test_results_of_unknown_prompts_are_ignored_and_tasks_without_keep_no_state():
    source = mixture()
    source.record(Prompt(id="other/1", task="a", messages=()), 1, 4)
    source.record(Prompt(id="b/1", task="b", messages=()), 1, 4)
    assert source.state()["curricula"] == {"a": []}
