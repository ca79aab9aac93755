"""The mixture: proportions, epochs, resume."""

import json
from collections import Counter
from fractions import Fraction
from itertools import accumulate
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.core.errors import DataError
from antiphon.core.types import Message, Prompt
from antiphon.tasks.config import PromptsConfig, TaskConfig
from antiphon.tasks.mixture import Mixture, MixtureTask

Shape = list[tuple[float, int]]  # weight, prompts
shapes = st.lists(
    st.tuples(st.floats(1e-3, 1e3, allow_nan=False) | st.sampled_from([1.0, 0.1, 3.0]), st.integers(1, 7)),
    min_size=1,
    max_size=8,
)


def mixture(shape: Shape, seed: int = 0, shuffle: bool = True) -> Mixture:
    tasks = [
        MixtureTask(
            name=f"t{index}",
            weight=weight,
            shuffle=shuffle,
            prompts=[Prompt(id=f"t{index}/{n}", task=f"t{index}", messages=(), seed=n) for n in range(count)],
        )
        for index, (weight, count) in enumerate(shape)
    ]
    return Mixture(tasks, seed)


def draw(source: Mixture, count: int) -> list[tuple[str, int, int]]:
    return [(prompt.id, prompt.epoch, prompt.seed) for prompt in (source.next() for _ in range(count))]


def worst(shape: Shape, draws: int) -> tuple[Fraction, Fraction]:
    """How far a task comes to be from its part, in all draws so far, and in any stretch of them."""
    source, total = mixture(shape), sum(Fraction(weight) for weight, _ in shape)
    tasks = [source.next().task for _ in range(draws)]
    ahead, spread = Fraction(0), Fraction(0)
    for index, (weight, _) in enumerate(shape):
        share, one = Fraction(weight) / total, f"t{index}"
        path = list(accumulate(((task == one) - share for task in tasks), initial=Fraction(0)))
        ahead, spread = max(ahead, *map(abs, path)), max(spread, max(path) - min(path))
    return ahead, spread


@settings(deadline=None, max_examples=60)
@given(shapes)
def test_every_task_is_always_within_one_draw_of_its_share(shape: Shape) -> None:
    ahead, spread = worst(shape, 150)
    weights = len({weight for weight, _ in shape})
    assert ahead < 1
    assert spread < 1 if weights < 3 else spread <= 2 - Fraction(1, weights - 1)


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 4), st.integers(0, 4))
def test_two_weights_are_within_one_draw_in_every_stretch(one: int, other: int, ones: int, others: int) -> None:
    assert worst([(float(one), 1)] * ones + [(float(other), 1)] * others, 160)[1] < 1


def test_no_order_keeps_three_weights_within_one_draw() -> None:
    shares = [Fraction(1, 6), Fraction(2, 6), Fraction(3, 6)]

    def longest(ahead: list[Fraction], least: list[Fraction], most: list[Fraction], length: int) -> int:
        """Of the orders that go on from here: how far each task is ahead, and was at its least and most."""
        best = length
        for drawn in range(3) if length < 60 else ():
            now = [a + (task == drawn) - share for task, (a, share) in enumerate(zip(ahead, shares, strict=True))]
            low, high = list(map(min, least, now)), list(map(max, most, now))
            if all(up - down < 1 for up, down in zip(high, low, strict=True)):
                best = max(best, longest(now, low, high, length + 1))
        return best

    assert longest([Fraction(0)] * 3, [Fraction(0)] * 3, [Fraction(0)] * 3, 0) < 60


@settings(deadline=None, max_examples=40)
@given(shapes, st.integers(0, 5), st.booleans())
def test_every_prompt_comes_exactly_once_an_epoch(shape: Shape, seed: int, shuffle: bool) -> None:
    drawn = draw(mixture(shape, seed, shuffle), 150)
    assert len(set(drawn)) == len(drawn)
    for index, (_, count) in enumerate(shape):
        epochs = [epoch for id, epoch, _ in drawn if id.startswith(f"t{index}/")]
        assert epochs == [n // count for n in range(len(epochs))]
        seen = Counter((id, epoch) for id, epoch, _ in drawn if id.startswith(f"t{index}/"))
        assert all(times == 1 for times in seen.values())


@settings(deadline=None, max_examples=40)
@given(shapes, st.integers(0, 5), st.integers(0, 60))
def test_a_restored_mixture_goes_on_as_the_first_would_have(shape: Shape, seed: int, cut: int) -> None:
    first, second = mixture(shape, seed), mixture(shape, seed)
    draw(first, cut)
    second.restore(json.loads(json.dumps(first.state())))
    assert draw(second, 60) == draw(first, 60)


def test_order_follows_the_seed_and_changes_from_epoch_to_epoch() -> None:
    one, same, other = (draw(mixture([(1.0, 50)], seed), 100) for seed in (1, 1, 2))
    assert one == same != other
    assert [id for id, _, _ in one[:50]] != [id for id, _, _ in one[50:]]
    assert len({seed for _, _, seed in one}) == 100


def test_without_shuffle_the_order_is_the_sources() -> None:
    assert [id for id, _, _ in draw(mixture([(1.0, 3)], shuffle=False), 6)] == ["t0/0", "t0/1", "t0/2"] * 2


def test_a_cursor_of_other_prompts_is_refused() -> None:
    with pytest.raises(DataError, match="'t0'"):
        mixture([(1.0, 4)]).restore(mixture([(1.0, 3)]).state())


@pytest.mark.parametrize("tasks", [[], [MixtureTask(name="a", prompts=[])]])
def test_a_mixture_of_nothing_is_refused(tasks: list[MixtureTask]) -> None:
    with pytest.raises(ValueError, match="needs tasks"):
        Mixture(tasks, 0)


def rows(split: str, count: int) -> Any:
    return ({"prompt": f"{split} {n}"} for n in range(count))


def test_it_loads_what_the_configuration_says() -> None:
    tasks = [
        TaskConfig(
            name=name,
            weight=weight,
            prompts=PromptsConfig(source=f"{__name__}:rows", options={"count": 2}, shuffle=False),
        )
        for name, weight in (("a", 2.0), ("b", 1.0))
    ]
    source = Mixture.load(tasks, seed=3)
    drawn = [source.next() for _ in range(6)]
    assert Counter(prompt.task for prompt in drawn) == {"a": 4, "b": 2}
    assert drawn[0].messages == (Message("user", "train 0"),)
