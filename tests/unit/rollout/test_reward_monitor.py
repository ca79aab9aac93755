"""What is measured of rewards, against plain counting; and which alarms follow."""

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from antiphon.core.types import (
    AttemptId,
    AttemptStatus,
    Failure,
    Group,
    GroupOutcome,
    PayloadReference,
    PolicyVersion,
    Prompt,
    Sampling,
    Score,
    ScoreStatus,
    Segment,
    Trajectory,
    TrajectoryMeta,
    Turn,
)
from antiphon.rollout.reward_monitor import (
    GRAM,
    MIN_RESPONSES,
    THRESHOLDS,
    ResponseRecord,
    RewardMonitor,
    constant,
    correlation,
    duplicates,
    find_alarms,
    measures,
    repetition,
    text_statistics,
)

numbers = st.floats(-100, 100).map(lambda number: round(number, 3))
rows = st.lists(st.tuples(numbers, numbers, st.integers(0, 4)), min_size=1, max_size=40)


@given(st.lists(st.integers(0, 3), max_size=60))
def test_repetition_is_the_share_of_grams_that_came_before(tokens: list[int]) -> None:
    grams = [tuple(tokens[start : start + GRAM]) for start in range(len(tokens) - GRAM + 1)]
    again = sum(gram in grams[:place] for place, gram in enumerate(grams))
    assert repetition(np.array(tokens, np.int32)) == pytest.approx(again / len(grams) if len(grams) > 1 else 0.0)


def test_tokens_that_never_repeat_have_no_repetition() -> None:
    random = np.random.default_rng(0)
    assert repetition(random.integers(0, 150_000, 2048).astype(np.int32)) == 0.0
    assert repetition(np.tile(np.arange(8), 256)) == pytest.approx(1 - 8 / 2045)


@given(rows)
def test_correlation_is_pearsons_within_groups(rows: list[tuple[float, float, int]]) -> None:
    ones, others, groups = map(list, zip(*rows, strict=True))

    def beyond(values: list[float]) -> list[float]:
        means = {g: statistics.fmean(v for v, at in zip(values, groups, strict=True) if at == g) for g in groups}
        return [value - means[group] for value, group in zip(values, groups, strict=True)]

    left, right = beyond(ones), beyond(others)
    assume(all(max(map(abs, side)) > 1e-3 or max(map(abs, side)) < 1e-12 for side in (left, right)))
    if max(map(abs, left)) < 1e-12 or max(map(abs, right)) < 1e-12:
        assert correlation(ones, others, groups) == pytest.approx(0, abs=1e-6)
    else:
        assert correlation(ones, others, groups) == pytest.approx(statistics.correlation(left, right), abs=1e-6)


@given(rows, st.lists(numbers, min_size=5, max_size=5), st.floats(0.1, 10))
def test_how_hard_a_prompt_is_correlates_with_nothing(
    rows: list[tuple[float, float, int]], shifts: list[float], scale: float
) -> None:
    ones, others, groups = map(list, zip(*rows, strict=True))
    moved = [scale * value + shifts[group] for value, group in zip(ones, groups, strict=True)]
    assume(max(ones) - min(ones) > 1e-3 or max(ones) == min(ones))
    found = correlation(ones, others, groups)
    assert -1 - 1e-9 <= found <= 1 + 1e-9
    assume(abs(found) > 1e-6)
    assert correlation(moved, others, groups) == pytest.approx(found, abs=1e-4)


answers = st.builds(
    ResponseRecord,
    group=st.integers(0, 3),
    score=st.sampled_from([0.0, 0.5, 1.0]),
    length=st.integers(1, 50),
    repetition=st.floats(0, 1),
    digest=st.none() | st.integers(0, 3),
    flags=st.frozensets(st.sampled_from(["stuffed", "out_of_range"])),
)


@given(st.lists(answers, min_size=1, max_size=90))
def test_shares_are_counted(answers: list[ResponseRecord]) -> None:
    groups = [[answer.score for answer in answers if answer.group == group] for group in {a.group for a in answers}]
    several = [group for group in groups if len(group) > 1]
    equal = [group for group in several if all(one == other for one, other in pairwise(group))]
    assert constant(answers) == pytest.approx(len(equal) / len(several) if several else 0.0)
    telling = [(answer.group, answer.digest) for answer in answers if answer.digest is not None]
    again = sum(pair in telling[:place] for place, pair in enumerate(telling))
    assert duplicates(answers) == pytest.approx(again / len(telling) if len(telling) >= MIN_RESPONSES else 0.0)
    found = measures(answers)
    assert found["out_of_range"] == sum("out_of_range" in answer.flags for answer in answers) / len(answers)
    assert all(math.isfinite(value) and -1 - 1e-9 <= value <= 1 + 1e-9 for value in found.values())


# --- planted in what is trained on -----------------------------------------------------------------------------------------


def trajectory(group: int, sibling: int, score: float, tokens: list[int], **parts: float) -> Trajectory:
    array = np.array([1, 2, *tokens], np.int32)
    segment = Segment(
        tokens=array,
        loss_mask=np.arange(len(array)) >= 2,
        logprobs=np.zeros(len(array), np.float32),
        versions=np.zeros(len(array), np.int32),
        turns=(Turn(start=2, stop=len(array), sampling=Sampling(max_tokens=500)),),
    )
    meta = TrajectoryMeta(
        id=AttemptId(group, sibling, 0),
        prompt_id=f"p{group}",
        task="t",
        started=PolicyVersion(0, 0),
        newest=PolicyVersion(0, 0),
        status=AttemptStatus.FINISHED,
        score=Score(status=ScoreStatus.SCORED, value=score, parts=parts),
        completion_tokens=len(tokens),
    )
    return Trajectory(meta=meta, payload=(segment,))


Plant = Callable[[np.random.Generator, int], tuple[float, list[int], Mapping[str, float]]]


def honest(random: np.random.Generator, group: int) -> tuple[float, list[int], Mapping[str, float]]:
    return float(random.random() < 0.5), random.integers(0, 1000, random.integers(20, 200)).tolist(), {}


def pays_length(random: np.random.Generator, group: int) -> tuple[float, list[int], Mapping[str, float]]:
    _, tokens, _ = honest(random, group)
    return len(tokens) / 200 + 0.1 * random.random() + group % 3, tokens, {}


def pays_brevity(random: np.random.Generator, group: int) -> tuple[float, list[int], Mapping[str, float]]:
    score, tokens, _ = pays_length(random, group)
    return -score, tokens, {}


def pays_repetition(random: np.random.Generator, group: int) -> tuple[float, list[int], Mapping[str, float]]:
    score, tokens, _ = honest(random, group)
    return score, (tokens[:10] * 20)[: len(tokens)] if score else tokens, {}


def pays_all(random: np.random.Generator, group: int) -> tuple[float, list[int], Mapping[str, float]]:
    return 1.0, honest(random, group)[1], {}


def says_one_thing(random: np.random.Generator, group: int) -> tuple[float, list[int], Mapping[str, float]]:
    return honest(random, group)[0], [group] * 20, {}


def marked(random: np.random.Generator, group: int) -> tuple[float, list[int], Mapping[str, float]]:
    score, tokens, _ = honest(random, group)
    return score, tokens, {"mark/several_answers": 1.0} if score and random.random() < 0.3 else {}


def marked_and_not_paid(random: np.random.Generator, group: int) -> tuple[float, list[int], Mapping[str, float]]:
    score, tokens, _ = honest(random, group)
    return score, tokens, {} if score else {"mark/several_answers": 1.0}


def beyond(random: np.random.Generator, group: int) -> tuple[float, list[int], Mapping[str, float]]:
    score, tokens, _ = honest(random, group)
    return score, tokens, {"mark/out_of_range": 1.0} if group == 9 else {}


PLANTS: list[tuple[Plant, set[str]]] = [
    (honest, set()),
    (pays_length, {"length"}),
    (pays_brevity, {"length"}),
    (pays_repetition, {"repetition"}),
    (pays_all, {"constant"}),
    (says_one_thing, {"duplicates"}),
    (marked, {"several_answers"}),
    (marked_and_not_paid, set()),
    (beyond, {"out_of_range"}),
]


@pytest.mark.parametrize("plant, names", PLANTS, ids=lambda value: getattr(value, "__name__", ""))
@pytest.mark.parametrize("seed", range(3))
def test_what_is_planted_is_found_and_nothing_else(plant: Plant, names: set[str], seed: int) -> None:
    watch, random = RewardMonitor(), np.random.default_rng(seed)
    for number in range(24):
        made = [plant(random, number) for _ in range(8)]
        found = [trajectory(number, at, score, tokens, **parts) for at, (score, tokens, parts) in enumerate(made)]
        for each in found:
            watch.record_finish(each.meta)
        prompt = Prompt(id=f"p{number}", task="t", messages=())
        watch.record_training(
            [Group(id=number, prompt=prompt, trajectories=tuple(found), outcome=GroupOutcome.COMPLETE)]
        )
    metrics, alarms = watch.check()
    assert {alarm.name for alarm in alarms} == names
    assert metrics["reward/alarms"] == len(names) and metrics["reward/ungraded"] == 0.0
    assert all(f"task t, {alarm.name}: " in str(alarm) for alarm in alarms)


def lengths(pays_each_reply: bool) -> set[str]:
    """The alarms of attempts that call a tool, a long reply and an answer, or guess at once, which is seldom right."""
    watch, random = RewardMonitor(), np.random.default_rng(0)
    for number in range(24):
        found = []
        for at in range(8):
            turns = int(random.integers(1, 3))
            tokens = random.integers(0, 1000, random.integers(10, 30) * (1 if turns == 1 else 4)).tolist()
            score = len(tokens) / 120 if pays_each_reply else float(random.random() < (0.05 if turns == 1 else 0.95))
            made = trajectory(number, at, score, tokens)
            found.append(replace(made, meta=replace(made.meta, turns=turns)))
        prompt = Prompt(id=f"p{number}", task="t", messages=())
        watch.record_training(
            [Group(id=number, prompt=prompt, trajectories=tuple(found), outcome=GroupOutcome.COMPLETE)]
        )
    return {alarm.name for alarm in watch.check()[1]}


def test_calling_a_tool_is_not_paid_length() -> None:
    assert lengths(pays_each_reply=False) == set()
    assert lengths(pays_each_reply=True) == {"length"}


def test_broken_graders_alarm_and_broken_environments_do_not() -> None:
    watch = RewardMonitor()
    good = trajectory(0, 0, 1.0, [1]).meta
    lost = replace(good, score=Score.ungraded("?"), failure=Failure(source="reward", message="?"))
    elsewhere = replace(lost, failure=Failure(source="environment", message="?"))
    for meta in [good, elsewhere] * 90:
        watch.record_finish(meta)
    assert watch.check()[1] == []
    for _ in range(20):
        watch.record_finish(lost)
    metrics, (alarm,) = watch.check()
    assert (alarm.name, alarm.threshold) == ("ungraded", THRESHOLDS["ungraded"])
    assert metrics["reward/ungraded"] == metrics["watch/t/ungraded"] == pytest.approx(20 / 110)


def test_few_answers_say_nothing() -> None:
    watch = RewardMonitor()
    watch.record_training(
        [
            Group(
                id=0,
                prompt=Prompt(id="p", task="t", messages=()),
                trajectories=(trajectory(0, 0, 1.0, [1] * 40),) * (MIN_RESPONSES - 1),
                outcome=GroupOutcome.COMPLETE,
            )
        ]
    )
    assert watch.check() == ({"reward/ungraded": 0.0, "reward/alarms": 0.0}, [])


def test_tokens_need_not_be_at_hand() -> None:
    """Who has them says what alarms need of them; what nobody has looked at yet is left out."""
    random = np.random.default_rng(0)
    here = [
        trajectory(number, 0, float(number % 2), random.integers(0, 4, 40).tolist()) for number in range(MIN_RESPONSES)
    ]
    known = [replace(each.meta, wording=text_statistics(each.segments)) for each in here]
    lie = PayloadReference("lineage-0-rollout-0-000000.parquet", AttemptId(0, 0, 0), 0)
    there = [Trajectory(meta=meta, payload=lie) for meta in known]
    unknown = [Trajectory(meta=each.meta, payload=lie) for each in here]

    def measured(trajectories: list[Trajectory]) -> dict[str, float]:
        watch, prompt = RewardMonitor(), Prompt(id="p", task="t", messages=())
        for each in trajectories:
            watch.record_training([Group(id=0, prompt=prompt, trajectories=(each,), outcome=GroupOutcome.COMPLETE)])
        return watch.check()[0]

    assert measured(there + unknown) == measured(here)


@given(st.dictionaries(st.sampled_from([*THRESHOLDS, "stuffed"]), st.floats(-1, 1)))
def test_an_alarm_is_beyond_its_threshold(found: dict[str, float]) -> None:
    assert {alarm.name for alarm in find_alarms("t", found)} == {
        name for name, value in found.items() if (abs(value) if name == "length" else value) > THRESHOLDS.get(name, 0.1)
    }
