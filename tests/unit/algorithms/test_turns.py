"""What turns earned reaches the tokens, whether or not each turn has any: tables worked by hand, and sums in plain Python."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.algorithms.config import AlgorithmConfig
from antiphon.algorithms.examples import example as groups_of
from antiphon.algorithms.registry import ADVANTAGES
from antiphon.algorithms.trajectories import trajectories, turn_rewards
from antiphon.algorithms.value_targets import value_targets
from antiphon.core.errors import ConfigError
from antiphon.core.types import VALUES, AttemptId, Sampling, Segment, Streams, Turn

from .stages_for_tests import taken_through

EPSILON = 1e-4  # that is added to deviations
EMPTY_FIRST = [(0, 5.0), (2, 1.0)]  # sampled tokens of each turn, and what its environment paid
EMPTY_MIDDLE = [(1, 1.0), (0, 4.0), (1, 2.0)]
EMPTY_LAST = [(2, 1.0), (0, 5.0)]
TWO_EMPTY_FIRST = [(0, 1.0), (0, 2.0), (1, 4.0), (1, 8.0)]


def trajectory(turns, sibling=0, keys=None, apart=False):
    """A trajectory of these turns with an observation before each; `apart`: a sample each."""
    ((blank,),) = groups_of([sum(paid for _, paid in turns)])
    found = []
    for number, (count, paid) in enumerate(turns):
        if apart or not found:
            found.append(([], []))
        mask, spans = found[-1]
        mask.append(False)
        spans.append(
            Turn(
                start=len(mask),
                stop=len(mask) + count,
                sampling=Sampling(max_tokens=9),
                reward=paid,
                state_key=keys[number] if keys else None,
            )
        )
        mask += [True] * count
    return [
        replace(
            blank,
            meta=replace(blank.meta, id=AttemptId(0, sibling, 0)),
            segment=Segment(
                tokens=np.zeros(len(mask), np.int32),
                loss_mask=np.array(mask),
                logprobs=np.zeros(len(mask), np.float32),
                versions=np.zeros(len(mask), np.int32),
                turns=tuple(spans),
            ),
            streams=Streams({VALUES: np.zeros((len(mask), 1), np.float32)}),
            advantages=np.zeros(len(mask), np.float32),
            weights=np.ones(len(mask), np.float32),
        )
        for mask, spans in found
    ]


def on_tokens(group, arrays):
    """What the sampled tokens of each trajectory were given."""
    flat = [array[sample.segment.loss_mask].tolist() for sample, array in zip(group, arrays, strict=True)]
    lengths = [len(samples) for samples in trajectories(group)]
    parts = iter(flat)
    return [[value for _ in range(length) for value in next(parts)] for length in lengths]


TABLE = [
    ("gae", EMPTY_FIRST, [6, 1]),
    ("gae", EMPTY_MIDDLE, [7, 2]),
    ("gae", EMPTY_LAST, [6, 6]),
    ("gae", TWO_EMPTY_FIRST, [15, 8]),
    ("turn_reinforce", EMPTY_FIRST, [6, 6]),
    ("turn_reinforce", EMPTY_MIDDLE, [1 + 4 / 2 + 2 / 4, 2]),  # turns go by, with tokens or without
    ("turn_reinforce", EMPTY_LAST, [1 + 5 / 2, 1 + 5 / 2]),
    ("turn_reinforce", TWO_EMPTY_FIRST, [1 + 2 + 4 + 8 / 2, 8]),
]


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("name, turns, wanted", TABLE)
def test_a_turn_without_tokens_is_paid(name, turns, wanted, apart):
    group = trajectory(turns, apart=apart)
    (found,) = on_tokens(group, ADVANTAGES.resolve(name)([group], AlgorithmConfig(turn_gamma=0.5))[0])
    assert found == pytest.approx(wanted)
    if name == "gae":
        (targets,) = on_tokens(group, value_targets([group], AlgorithmConfig(), 1.0)[0])
        assert targets == pytest.approx(wanted)


@pytest.mark.parametrize("apart", [False, True])
def test_step_reinforce_compares_turns_with_tokens(apart):
    """Returns of the turns with tokens are 6; 3 and 2; of all three the mean is 11/3 and the variance 13/3."""
    group = [*trajectory(EMPTY_FIRST, 0, apart=apart), *trajectory([(1, 1.0), (1, 2.0)], 1, apart=apart)]
    found = on_tokens(group, ADVANTAGES.resolve("step_reinforce")([group], AlgorithmConfig())[0])
    values = [(value - 11 / 3) / ((13 / 3) ** 0.5 + EPSILON) for value in (6, 3, 2)]
    assert found == [pytest.approx([values[0]] * 2), pytest.approx(values[1:])]


def test_gigpo_compares_turns_with_tokens():
    """Episodes of 6 and 3; in state "a" turns of 6 and 2, where a turn that said nothing is no third; in "b" one alone."""
    group = [
        *trajectory([(0, 5.0), (2, 1.0)], 0, keys=["a", "a"]),
        *trajectory([(1, 1.0), (1, 2.0)], 1, keys=["b", "a"]),
    ]
    found = on_tokens(group, ADVANTAGES.resolve("gigpo")([group], AlgorithmConfig())[0])
    episode, step = 1.5 / (4.5**0.5 + EPSILON), 2 / (8**0.5 + EPSILON)
    assert found == [pytest.approx([episode + step] * 2), pytest.approx([-episode, -episode - step])]


drawn_turns = st.lists(st.tuples(st.integers(0, 3), st.integers(-4, 4).map(float)), min_size=1, max_size=6)


@given(turns=drawn_turns.filter(lambda turns: any(count for count, _ in turns)), apart=st.booleans())
def test_returns_are_conserved(turns, apart):
    """Undiscounted, the first sampled token is worth all that the trajectory earned, and each later turn what is then left."""
    total = sum(paid for _, paid in turns)
    group, config = trajectory(turns, apart=apart), AlgorithmConfig()
    for arrays in (
        ADVANTAGES.resolve("gae")([group], config)[0],
        ADVANTAGES.resolve("turn_reinforce")([group], config)[0],
        value_targets([group], config, 1.0)[0],
    ):
        (found,) = on_tokens(group, arrays)
        assert found[0] == pytest.approx(total)
        began = [sum(count for count, _ in turns[:number]) for number in range(len(turns))]
        heard = [number for number, (count, _) in enumerate(turns) if count]
        for number in heard[1:]:
            left = sum(paid for _, paid in turns[number:])
            assert found[began[number]] == pytest.approx(left)


@pytest.mark.parametrize("name", sorted(ADVANTAGES.known))
def test_trajectories_without_tokens_have_no_advantages(name):
    group = [*trajectory([(0, 5.0), (0, 1.0)], 0), *trajectory([(1, 1.0), (0, 2.0)], 1)]
    found = on_tokens(group, ADVANTAGES.resolve(name)([group], AlgorithmConfig())[0])
    assert found[0] == [] and len(found[1]) == 1 and np.isfinite(found[1]).all()


# --- what is made of scores ----------------------------------------------------------------------------------------------

PAID = [[(1, 10.0), (1, 10.0)], [(1, 10.0), (1, 0.0)]]  # scores of 20 and 10: a deviation of √50
DIVISOR = 50**0.5 + EPSILON


def siblings(turns=PAID):
    return [sample for number, paid in enumerate(turns) for sample in trajectory(paid, number)]


def advantages_after(turns=PAID, **algorithm):
    step = taken_through([siblings(turns)], **algorithm)
    return on_tokens(step.samples[0], [sample.advantages for sample in step.samples[0]])


@pytest.mark.parametrize("over", ["group", "batch", "running"])
@pytest.mark.parametrize("name", ["turn_reinforce", "gae"])
def test_turns_are_divided_as_their_score_is(name, over):
    found = advantages_after(advantage=name, reward={"scale": over})
    assert found == [pytest.approx([20 / DIVISOR, 10 / DIVISOR]), pytest.approx([10 / DIVISOR, 0], abs=1e-6)]


def test_step_reinforce_sees_divided_turns():
    """Returns 20, 10, 10, 0 over the deviation of the scores; their own deviation is √(200/3) over it."""
    found = advantages_after(advantage="step_reinforce", reward={"scale": "group"})
    one = 10 / DIVISOR / ((200 / 3) ** 0.5 / DIVISOR + EPSILON)
    assert found == [pytest.approx([one, 0], abs=1e-6), pytest.approx([0, -one], abs=1e-6)]


def test_a_penalty_of_length_is_of_the_last_turn():
    """Completions of 9 tokens, the limit, lose 3; then scores are 2 - 3 and 1 - 3: the deviation is √½."""
    group = [
        replace(sample, meta=replace(sample.meta, completion_tokens=9))
        for sample in siblings([[(1, 1.0), (1, 1.0)], [(1, 1.0), (1, 0.0)]])
    ]
    reward = {"overlong_tokens": 3, "overlong_penalty": 3.0, "scale": "group"}
    step = taken_through([group], advantage="turn_reinforce", reward=reward)
    found = on_tokens(step.samples[0], [sample.advantages for sample in step.samples[0]])
    divisor = 0.5**0.5 + EPSILON
    assert found == [pytest.approx([-1 / divisor, -2 / divisor]), pytest.approx([-2 / divisor, -3 / divisor])]


def pay_turns(groups, config):
    """An advantage function of one's own: to each trajectory what its first turn earned."""
    return [
        [turn_rewards(samples)[0] * sample.segment.loss_mask for samples in trajectories(group) for sample in samples]
        for group in groups
    ]


@pytest.mark.parametrize("estimate", [None, pay_turns])
@pytest.mark.parametrize("reward", [{"clip": 1.0}, {"baseline": "group"}, {"baseline": "batch", "scale": "batch"}])
def test_shaping_without_a_share_for_turns_is_refused(reward, estimate):
    with pytest.raises(ConfigError, match=r"algorithm\.reward\.(clip|baseline)") as refused:
        taken_through([siblings()], estimate, advantage="turn_reinforce", reward=reward)
    assert "algorithm.advantage" in str(refused.value)


@pytest.mark.parametrize("name", ["turn_reinforce", "gae"])
def test_scores_that_are_paid_at_the_end_are_clipped(name):
    """The last turn earns all of a score, so it is the score that is clipped."""
    found = advantages_after([[(1, 0.0), (1, 10.0)], [(2, 0.5)]], advantage=name, reward={"clip": 1.0})
    assert found == [pytest.approx([1, 1]), pytest.approx([0.5, 0.5])]


def test_whole_trajectories_are_shaped_whatever_turns_earned():
    """Scores 20 and 10, less 15, clipped to ±1."""
    found = advantages_after(advantage="reinforce", reward={"baseline": "group", "clip": 1.0})
    assert found == [[1, 1], [-1, -1]]


def test_an_example_is_a_whole_sample_of_sampled_tokens():
    """What documentation and tests try an advantage on: every token but the first was sampled, and counts as it is."""
    for group in groups_of([1.0, 0.0], [2.0], tokens=3):
        for sample in group:
            assert sample.weights.tolist() == [1.0] * len(sample.segment.tokens)
            assert sample.segment.loss_mask.tolist() == [False] + [True] * (len(sample.segment.tokens) - 1)
            assert not sample.advantages.any()
