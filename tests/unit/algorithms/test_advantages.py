"""Advantages, rewards and weights against their formulas, written out one token at a time in plain Python."""

import math
import re
from dataclasses import asdict
from pathlib import Path
from statistics import mean, pstdev, stdev

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from antiphon.algorithms.advantages import discounted_sums, gae
from antiphon.algorithms.batch_arrays import flatten_sampled, select_lowest, whiten
from antiphon.algorithms.config import AlgorithmConfig
from antiphon.algorithms.kl_reward import add_kl_rewards
from antiphon.algorithms.registry import ADVANTAGES, LOSSES
from antiphon.algorithms.rewards import (
    EPSILON,
    AlgorithmState,
    Moments,
    restore_algorithm_state,
    shape_rewards,
    trajectory_weights,
)
from antiphon.algorithms.sections import KlConfig, LossWeightConfig, RewardConfig
from antiphon.algorithms.teacher_advantages import add_teacher_advantages
from antiphon.algorithms.trajectories import trajectories
from antiphon.algorithms.value_targets import value_targets
from antiphon.core.types import (
    PROXIMAL_LOGPROBS,
    REFERENCE_LOGPROBS,
    TEACHER_LOGPROBS,
    VALUES,
    AttemptId,
    AttemptStatus,
    PolicyVersion,
    Sample,
    Sampling,
    Score,
    ScoreStatus,
    Segment,
    Streams,
    StreamSpec,
    TrajectoryMeta,
    Turn,
)

SAMPLING = Sampling(max_tokens=9)


def meta_of(name, score, tokens=5, truncated=False, turns=(), task="t"):
    now = PolicyVersion(0, 0)
    return TrajectoryMeta(
        id=name,
        prompt_id=str(name.group),
        task=task,
        started=now,
        newest=now,
        status=AttemptStatus.FINISHED,
        score=Score(status=ScoreStatus.SCORED, value=score, turns=turns),
        completion_tokens=tokens,
        truncated=truncated,
    )


def sample(rng, meta, turns, paid):
    """A prompt, and `turns` completions with observations between them; the environment pays each something if `paid`."""
    mask, spans = [False] * int(rng.integers(1, 4)), []
    for _ in range(turns):
        start = len(mask)
        mask += [True] * int(rng.integers(1, 4))
        reward, key = (float(rng.normal()) if paid else None), str(rng.integers(3)) if rng.random() < 0.8 else None
        spans.append(Turn(start=start, stop=len(mask), sampling=SAMPLING, reward=reward, state_key=key))
        mask += [False] * int(rng.integers(0, 3))
    length = len(mask)
    streams = {
        REFERENCE_LOGPROBS: -rng.random(length).astype(np.float32),
        TEACHER_LOGPROBS: -rng.random(length).astype(np.float32),
        StreamSpec("values", shape=(2,)): rng.normal(size=(length, 2)).astype(np.float32),
    }
    if meta.id.group % 2:
        streams[PROXIMAL_LOGPROBS] = -rng.random(length).astype(np.float32)
    segment = Segment(
        tokens=np.zeros(length, np.int32),
        loss_mask=np.array(mask),
        logprobs=np.where(mask, -rng.random(length), 0).astype(np.float32),
        versions=np.zeros(length, np.int32),
        turns=tuple(spans),
    )
    zeros = np.zeros(length, np.float32)
    return Sample(
        meta=meta,
        segment=segment,
        streams=Streams(streams),
        advantages=zeros,
        weights=zeros + 1,
        reward=meta.score.value,
    )


@st.composite
def batches(draw, most_groups=3):
    """Groups of trajectories, of one sample or two, of one turn or several."""
    rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    found = []
    for group in range(draw(st.integers(1, most_groups))):
        members = []
        for sibling in range(draw(st.integers(2, 4))):
            meta = meta_of(AttemptId(group, sibling, 0), float(rng.integers(-2, 3)))
            paid = bool(rng.random() < 0.5)
            members += [sample(rng, meta, int(rng.integers(1, 4)), paid) for _ in range(int(rng.integers(1, 3)))]
        found.append(members)
    return found


configs = st.builds(
    AlgorithmConfig,
    gamma=st.sampled_from([1.0, 0.9, 0.0]),
    turn_gamma=st.sampled_from([1.0, 0.8]),
    gae_lambda=st.sampled_from([1.0, 0.7, 0.0]),
    step_weight=st.sampled_from([1.0, 0.5]),
    kl=st.sampled_from([{}, {"coefficient": 0.3, "place": "reward"}, {"coefficient": 0.3, "place": "loss"}]),
)


def penalty(one, at, config):
    if not (config.kl.coefficient and config.kl.place == "reward"):
        return 0.0
    policy = one.streams.get(PROXIMAL_LOGPROBS, one.segment.logprobs)
    apart = float(policy[at]) - float(one.streams[REFERENCE_LOGPROBS][at])
    return -config.kl.coefficient * (math.exp(-apart) - 1 + apart)


def tokens_of(samples):
    """(sample, place, number of the turn in the trajectory, whether it ends the turn) of each sampled token, in order."""
    number = -1
    for one in samples:
        for turn in one.segment.turns:
            number += 1
            for at in range(turn.start, turn.stop):
                yield one, at, number, at == turn.stop - 1


def paid_turns(samples):
    earned = [turn.reward or 0.0 for one in samples for turn in one.segment.turns]
    earned[-1] += samples[0].reward - sum(earned)
    return earned


def normal(values):
    return [(x - mean(values)) / (stdev(values) + EPSILON) for x in values] if len(values) > 1 else [0.0]


def expected(name, group, config, batch):
    """The advantage of each sampled token of each trajectory of a group."""
    members = trajectories(group)
    scores = [samples[0].reward for samples in members]
    everything = [samples[0].reward for other in batch for samples in trajectories(other)]
    outcome = {
        "grpo": normal(scores),
        "dr_grpo": [x - mean(scores) for x in scores],
        "rloo": [x - mean(scores[:i] + scores[i + 1 :]) for i, x in enumerate(scores)],
        "reinforce": scores,
        "nothing": [0.0 for _ in scores],
        "lite_ppo": [(x - mean(scores)) / (stdev(everything) + EPSILON) for x in scores],
    }
    later = []  # of each trajectory: what its turns and those after them earned
    for samples in members:
        earned = paid_turns(samples)
        later.append(
            [sum(config.turn_gamma ** (j - i) * earned[j] for j in range(i, len(earned))) for i in range(len(earned))]
        )
    flat = [x for values in later for x in values]
    keys = [turn.state_key for samples in members for one in samples for turn in one.segment.turns]
    alike = []
    for x, key in zip(flat, keys, strict=True):
        peers = [y for y, other in zip(flat, keys, strict=True) if other == key]
        spread = stdev(peers) + EPSILON if len(peers) > 1 else 1.0
        alike.append((x - mean(peers)) / spread if key is not None and len(peers) > 1 else 0.0)
    found, first_turn = [], 0
    for index, samples in enumerate(members):
        tokens = list(tokens_of(samples))
        penalties = [penalty(one, at, config) for one, at, _, _ in tokens]
        values = [float(one.streams[VALUES][at].astype(np.float64).mean()) for one, at, _, _ in tokens]
        row = []
        for t, (_, _, turn, _) in enumerate(tokens):
            left = range(t, len(tokens))
            after = sum(config.gamma ** (k - t) * penalties[k] for k in left)
            if name in outcome:
                row.append(config.gamma ** (len(tokens) - 1 - t) * outcome[name][index] + after)
            elif name == "turn_reinforce":
                row.append(later[index][turn] + after)
            elif name == "step_reinforce":
                row.append(normal(flat)[first_turn + turn] + after)
            elif name == "gigpo":
                row.append(normal(scores)[index] + config.step_weight * alike[first_turn + turn] + after)
            elif name == "gae":
                total = 0.0
                for k in left:
                    reward = penalties[k] + (paid_turns(samples)[tokens[k][2]] if tokens[k][3] else 0.0)
                    following = values[k + 1] if k + 1 < len(tokens) else 0.0
                    total += (config.gamma * config.gae_lambda) ** (k - t) * (
                        reward + config.gamma * following - values[k]
                    )
                row.append(total)
        first_turn += len(later[index])
        found.append(row)
    return found


def read(group, arrays):
    """What the sampled tokens of each trajectory were given; the others must have nothing."""
    for one, array in zip(group, arrays, strict=True):
        assert array.shape == one.segment.tokens.shape and array.dtype == np.float64
        assert not array[~one.segment.loss_mask].any(), "a token that was not sampled has an advantage"
    by_sample = {id(one): array for one, array in zip(group, arrays, strict=True)}
    return [[float(by_sample[id(one)][at]) for one, at, _, _ in tokens_of(samples)] for samples in trajectories(group)]


def with_divergence(batch, config):
    """The samples as advantage functions get them: where the divergence is taken off rewards, the stage has done so."""
    return add_kl_rewards(batch, config.kl) if config.kl.in_reward else batch


BY_GROUP = sorted(set(ADVANTAGES.known) - {"reinforce_plus_plus", "reinforce_plus_plus_baseline"})


@pytest.mark.parametrize("name", BY_GROUP)
@given(batch=batches(), config=configs)
def test_advantages(name, batch, config):
    found = ADVANTAGES.resolve(name)(with_divergence(batch, config), config)
    for group, arrays in zip(batch, found, strict=True):
        for got, wanted in zip(read(group, arrays), expected(name, group, config, batch), strict=True):
            np.testing.assert_allclose(got, wanted, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize(
    "name, raw", [("reinforce_plus_plus", "reinforce"), ("reinforce_plus_plus_baseline", "dr_grpo")]
)
@given(batch=batches(), config=configs)
def test_whitened_advantages(name, raw, batch, config):
    found = ADVANTAGES.resolve(name)(with_divergence(batch, config), config)
    before = [[x for row in expected(raw, group, config, batch) for x in row] for group in batch]
    everything = [x for rows in before for x in rows]
    for group, arrays, rows in zip(batch, found, before, strict=True):
        wanted = [(x - mean(everything)) / (pstdev(everything) + EPSILON) for x in rows]
        np.testing.assert_allclose([x for row in read(group, arrays) for x in row], wanted, rtol=5e-3, atol=5e-3)


@given(batch=batches(), config=configs, lambda_=st.sampled_from([1.0, 0.6]))
def test_what_critics_are_to_say(batch, config, lambda_):
    """λ = 1: the discounted sum of the rewards that follow; else advantage and value together."""
    found = value_targets(with_divergence(batch, config), config, lambda_)
    of_lambda = config.model_copy(update={"gae_lambda": lambda_})
    for group, arrays in zip(batch, found, strict=True):
        for samples, got, gained in zip(
            trajectories(group), read(group, arrays), expected("gae", group, of_lambda, batch), strict=True
        ):
            values = [float(one.streams[VALUES][at].mean()) for one, at, _, _ in tokens_of(samples)]
            np.testing.assert_allclose(got, [a + v for a, v in zip(gained, values, strict=True)], rtol=1e-4, atol=1e-4)
            if lambda_ == 1:
                rewards = [
                    penalty(one, at, config) + (paid_turns(samples)[turn] if ends else 0)
                    for one, at, turn, ends in tokens_of(samples)
                ]
                sums = [
                    sum(config.gamma ** (k - t) * rewards[k] for k in range(t, len(rewards)))
                    for t in range(len(rewards))
                ]
                np.testing.assert_allclose(got, sums, rtol=1e-4, atol=1e-4)


@given(batch=batches(), config=configs, lambda_=st.sampled_from([1.0, 0.6]))
def test_whitened_rewards(batch, config, lambda_):
    """Their mean over the batch stays, and their deviation is 1, for advantages and for what critics are to say."""
    config = config.model_copy(update={"gae_lambda": lambda_, "reward": RewardConfig(whiten=True)})
    shaped = with_divergence(batch, config)
    paid, valued = [], []
    for samples in (samples for group in batch for samples in trajectories(group)):
        tokens, turns = list(tokens_of(samples)), paid_turns(samples)
        paid.append([penalty(one, at, config) + (turns[turn] if ends else 0) for one, at, turn, ends in tokens])
        valued.append([float(one.streams[VALUES][at].astype(np.float64).mean()) for one, at, _, _ in tokens])
    everything = [reward for row in paid for reward in row]
    middle, spread = mean(everything), pstdev(everything) + EPSILON
    gained = []
    for rewards, values in zip(paid, valued, strict=True):
        row = []  # from the last token back
        for reward, value, after in zip(rewards[::-1], values[::-1], [0.0, *values[:0:-1]], strict=True):
            delta = middle + (reward - middle) / spread + config.gamma * after - value
            row.append(delta + config.gamma * lambda_ * (row[-1] if row else 0.0))
        gained.append(row[::-1])
    found = zip(gae(shaped, config), value_targets(shaped, config, lambda_), batch, strict=True)
    both = [pair for arrays, aims, group in found for pair in zip(read(group, arrays), read(group, aims), strict=True)]
    for (got, aim), wanted, values in zip(both, gained, valued, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-3, atol=1e-3)
        np.testing.assert_allclose(aim, np.add(wanted, values), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", sorted(ADVANTAGES.known))
@given(batch=batches(), config=configs, seed=st.integers(0, 99))
def test_unsampled_tokens_and_group_order_change_nothing(name, batch, config, seed):
    """Values and log-probs of prompts and observations are nobody's; nor does it matter which group comes first."""
    rng = np.random.default_rng(seed)
    noisy = [[_with_noise(one, rng) for one in group] for group in reversed(batch)]
    found = ADVANTAGES.resolve(name)(with_divergence(batch, config), config)
    again = ADVANTAGES.resolve(name)(with_divergence(noisy, config), config)[::-1]
    for arrays, others in zip(found, again, strict=True):
        for array, other in zip(arrays, others, strict=True):
            np.testing.assert_allclose(array, other, rtol=1e-4, atol=1e-4)


def _with_noise(one, rng):
    streams = {}
    for spec in one.streams:
        array = one.streams[spec].copy()
        array[~one.segment.loss_mask] = rng.normal(size=array[~one.segment.loss_mask].shape)
        streams[spec] = array
    return Sample(
        meta=one.meta,
        segment=one.segment,
        streams=Streams(streams),
        advantages=one.advantages,
        weights=one.weights,
        reward=one.reward,
    )


@pytest.mark.parametrize("name", sorted(ADVANTAGES.known))
def test_edges(name):
    """Equal rewards, answers of one token, no groups: always numbers; and no advantage where there is nothing to compare."""
    rng, mask = np.random.default_rng(0), np.array([False, True])
    group = []
    for sibling in range(3):
        one = sample(rng, meta_of(AttemptId(0, sibling, 0), 0.3), 1, False)
        turn = Turn(start=1, stop=2, sampling=SAMPLING)
        segment = Segment(
            tokens=np.zeros(2, np.int32),
            loss_mask=mask,
            logprobs=np.zeros(2, np.float32),
            versions=np.zeros(2, np.int32),
            turns=(turn,),
        )
        streams = Streams({StreamSpec("values", shape=(1,)): np.zeros((2, 1), np.float32)})
        zeros = np.zeros(2, np.float32)
        group.append(
            Sample(meta=one.meta, segment=segment, streams=streams, advantages=zeros, weights=zeros + 1, reward=0.3)
        )
    estimate, config = ADVANTAGES.resolve(name), AlgorithmConfig()
    found = read(group, estimate([group], config)[0])
    itself = name in ("reinforce", "turn_reinforce", "gae")
    assert found == ([[pytest.approx(0.3)]] * 3 if itself else [[pytest.approx(0.0, abs=1e-3)]] * 3)
    assert estimate([], config) == []


@given(rewards=st.lists(st.floats(-3, 3), max_size=40), gamma=st.sampled_from([0.0, 0.3, 0.99, 1.0]))
def test_discounted_sums(rewards, gamma):
    wanted, total = [], 0.0
    for reward in reversed(rewards):
        total = reward + gamma * total
        wanted.insert(0, total)
    np.testing.assert_allclose(discounted_sums(np.array(rewards), gamma), wanted, rtol=1e-9, atol=1e-9)


@given(batch=batches(), share=st.floats(0, 0.99))
def test_the_lowest_share(batch, share):
    values = [[one.streams[VALUES][:, 0] for one in group] for group in batch]
    chosen = select_lowest(batch, values, share)
    low, everything = (
        flatten_sampled(batch, [[m.astype(float) for m in masks] for masks in chosen]),
        flatten_sampled(batch, values),
    )
    assert low.sum() == math.floor(share * len(everything))
    picked = sorted(everything[low > 0])
    assert picked == sorted(everything)[: len(picked)]
    for group, masks in zip(batch, chosen, strict=True):
        for one, mask in zip(group, masks, strict=True):
            assert not mask[~one.segment.loss_mask].any()


def test_nothing_to_whiten_or_to_teach():
    assert whiten([], []) == [] == add_teacher_advantages([], [], {})


@given(batch=batches(), coefficient=st.sampled_from([0.5, 1.0]))
def test_what_teachers_think_likelier_is_better(batch, coefficient):
    config = AlgorithmConfig()
    own = ADVANTAGES.resolve("grpo")(batch, config)
    for group, before, after in zip(batch, own, add_teacher_advantages(batch, own, {"t": coefficient}), strict=True):
        for samples, old, new in zip(trajectories(group), read(group, before), read(group, after), strict=True):
            for (one, at, _, _), a, b in zip(tokens_of(samples), old, new, strict=True):
                said = one.streams.get(PROXIMAL_LOGPROBS, one.segment.logprobs)[at]
                assert b == pytest.approx(a + coefficient * (one.streams[TEACHER_LOGPROBS][at] - said), abs=1e-5)


# --- rewards and weights -------------------------------------------------------------------------------------------------

lengths = st.integers(0, 20)
graded = st.lists(
    st.lists(st.tuples(st.sampled_from([-1.0, 0.0, 0.25, 1.0, 2.0]), lengths, st.booleans()), min_size=1, max_size=5),
    min_size=1,
    max_size=4,
)
OVER = st.sampled_from(["none", "group", "task", "batch", "running"])


def metas(rows):
    return [
        [
            meta_of(AttemptId(g, i, 0), score, length, cut, task="ab"[g % 2])
            for i, (score, length, cut) in enumerate(group)
        ]
        for g, group in enumerate(rows)
    ]


# Groups that differ in their means, lengths on and beside every bound, one that was cut.
MANY = [
    [(1.0, 10, False), (0.0, 4, False), (0.25, 18, False)],
    [(0.0, 8, True), (-1.0, 9, False)],
    [(2.0, 20, False)] * 2,
]


@example(MANY, [0.5, 1.0], "none", "none", 0.5, 4)
@example(MANY, [0.5, 1.0], "group", "batch", 0.5, 20)
@example(MANY, [0.5, 1.0], "running", "running", 0.0, 4)
@example(MANY, [], "batch", "group", 0.0, 0)
@example(MANY, [1.0], "task", "task", 0.0, 0)
@given(
    rows=graded,
    earlier=st.lists(st.floats(-2, 2), max_size=5),
    baseline=OVER,
    scale=OVER,
    clip=st.sampled_from([0.0, 0.5]),
    overlong=st.sampled_from([0, 4, 20]),
)
def test_rewards(rows, earlier, baseline, scale, clip, overlong):
    config = RewardConfig(baseline=baseline, scale=scale, clip=clip, overlong_tokens=overlong, overlong_penalty=0.5)
    seen = Moments()
    seen.add(np.array(earlier))
    found = shape_rewards(metas(rows), config, seen, max_tokens=20)
    raw = [
        [s - 0.5 * min(1, max(0, (n - (20 - overlong)) / overlong)) if overlong else s for s, n, _ in g] for g in rows
    ]
    batch = [x for group in raw for x in group]
    for number, (group, (values, _)) in enumerate(zip(raw, found, strict=True)):
        task = [x for other in raw[number % 2 :: 2] for x in other]  # every second group is of the same
        over = {"none": [], "group": group, "task": task, "batch": batch, "running": earlier + batch}
        for x, got in zip(group, values, strict=True):
            x -= mean(over[baseline]) if over[baseline] else 0
            deviation = stdev(over[scale]) if len(over[scale]) > 1 else 0
            x = x / (deviation + EPSILON) if deviation > EPSILON else x
            x = max(-clip, min(clip, x)) if clip else x
            assert float(got) == pytest.approx(x, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("by", ["none", "difficulty", "length"])
@example(MANY, False, None, 0)
@example(MANY, True, (0.1, 0.9), 8)
@example([[(1.0, 0, False), (0.0, 0, False)]], False, (0.5, 0.9), 0)
@given(
    rows=graded,
    truncated=st.booleans(),
    difficulty=st.sampled_from([None, (0.1, 0.9)]),
    wrong_over=st.sampled_from([0, 8]),
)
def test_weights(by, rows, truncated, difficulty, wrong_over):
    config = LossWeightConfig(by=by, mask_truncated=truncated, mask_difficulty=difficulty, mask_wrong_over=wrong_over)
    averages = [mean(score for score, _, _ in group) for group in rows]
    assume(all(abs(average - bound) > 1e-9 for average in averages for bound in (0.1, 0.9)))  # else rounding decides
    found = trajectory_weights(metas(rows), config)
    longest = max(1, *(n for group in rows for _, n, _ in group))
    wanted = []
    for group in rows:
        average = mean(s for s, _, _ in group)
        for s, n, cut in group:
            dropped = truncated and cut
            dropped |= difficulty is not None and not difficulty[0] < average < difficulty[1]
            dropped |= bool(wrong_over) and s <= 0 and n > wrong_over
            weight = {
                "none": 1.0,
                "difficulty": 0.5 + 1.5 * (1 - min(1, max(0, average))),
                "length": 1.5 - n / longest,
            }[by]
            wanted.append(0.0 if dropped else weight)
    counted = [weight for weight in wanted if weight]
    scale = 1 / mean(counted) if counted and by != "none" else 1.0
    np.testing.assert_allclose(np.concatenate(found), [weight * scale for weight in wanted], rtol=1e-5)


@given(pieces=st.lists(st.lists(st.floats(-5, 5), max_size=6), max_size=6))
def test_running_moments(pieces):
    seen, values = Moments(), [x for piece in pieces for x in piece]
    for piece in pieces:
        seen.add(np.array(piece))
    assert seen.count == len(values)
    assert seen.mean == pytest.approx(mean(values) if values else 0, abs=1e-9)
    assert seen.deviation == pytest.approx(stdev(values) if len(values) > 1 else 0, abs=1e-7)


def test_the_coefficient_of_the_divergence_follows_its_target():
    config, memory = KlConfig(coefficient=0.2, place="reward", target=1.0, horizon=100.0), AlgorithmState()
    memory.adapt(config, seen=0.9, trajectories=10)
    assert memory.kl == pytest.approx(0.2 * (1 - 0.1 * 10 / 100))
    memory.adapt(config, seen=50.0, trajectories=10)
    assert memory.kl == pytest.approx(0.2 * 0.99 * (1 + 0.2 * 10 / 100))
    memory.rewards.add(np.array([1.0, 3.0]))
    assert restore_algorithm_state(asdict(memory)) == memory and restore_algorithm_state(None) == AlgorithmState()
    memory.adapt(config, seen=0.0, trajectories=10_000)  # never turned round, however many there are
    assert memory.kl == pytest.approx(0.2 * 0.99 * 1.02 * 0.8)


def test_every_name_is_in_the_documentation():
    page = (Path(__file__).parents[3] / "docs" / "algorithms.md").read_text()
    told = page.partition("The names of `algorithm.advantage` are")[2].partition("\n\n")[0]
    names = set(re.findall(r"`(\w+)`", told))
    assert names == {*ADVANTAGES.shipped, *LOSSES.shipped}
