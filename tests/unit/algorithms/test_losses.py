"""Losses and advantages against formulas written out independently, in plain Python."""

import doctest
import math
from dataclasses import replace
from statistics import mean

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from antiphon.algorithms import advantages, losses, rewards, turn_advantages, value_targets
from antiphon.algorithms import divergence as divergences
from antiphon.algorithms import token_loss as token_losses
from antiphon.algorithms.config import AlgorithmConfig
from antiphon.algorithms.declarations import declaration_of
from antiphon.algorithms.divergence import estimate_kl
from antiphon.algorithms.examples import example as groups_of
from antiphon.algorithms.losses import LossInputs, example, ppo_clip, value_loss
from antiphon.algorithms.recipes import RECIPES
from antiphon.algorithms.registry import ADVANTAGES, LOSSES
from antiphon.algorithms.rewards import EPSILON
from antiphon.algorithms.sections import CorrectionConfig, FilterConfig
from antiphon.algorithms.testing import check_loss
from antiphon.algorithms.token_loss import correction, token_loss
from antiphon.core.errors import ConfigError
from antiphon.core.types import ENTROPY_WEIGHT, PROXIMAL_LOGPROBS, REFERENCE_LOGPROBS, TOKEN_AGE

logprobs = st.floats(-8, -0.01)
tokens = st.lists(
    st.tuples(logprobs, logprobs, logprobs, logprobs, st.floats(-3, 3), st.booleans()), min_size=1, max_size=8
)
configs = st.builds(
    AlgorithmConfig,
    clip_low=st.floats(0.01, 0.9),
    clip_high=st.floats(0.01, 2),
    dual_clip=st.sampled_from([0.0, 1.5, 3.0]),
    ratio_level=st.sampled_from(["token", "sequence", "turn"]),
    ratio_low=st.floats(0, 0.5),
    ratio_high=st.floats(0.5, 4),
    positive_weight=st.floats(0, 2),
    negative_weight=st.floats(0, 2),
    kimi_tau=st.floats(0, 1),
    cispo_mask=st.booleans(),
)
LOSS_NAMES = sorted(set(LOSSES.known) - {"sft"})


def inputs(rows, requires_grad=False, proximal=True) -> LossInputs:
    """Rows of log-probs (new, sampled, reference, proximal), an advantage, and whether a turn ends; two turns a sequence."""
    *columns, ends = zip(*rows, strict=True)
    new, old, reference, before, advantages = (torch.tensor(column, dtype=torch.float64) for column in columns)
    turn = torch.tensor([sum(ends[:i]) for i in range(len(rows))])
    return LossInputs(
        logprobs=new.requires_grad_(requires_grad),
        entropies=-new.detach(),
        old_logprobs=old,
        advantages=advantages,
        sequence=turn // 2,
        turn=turn,
        streams={REFERENCE_LOGPROBS: reference} | ({PROXIMAL_LOGPROBS: before} if proximal else {}),
    )


def clipped_loss(ratio: float, advantage: float, config: AlgorithmConfig) -> float:
    bounded = max(1 - config.clip_low, min(1 + config.clip_high, ratio))
    loss = -min(ratio * advantage, bounded * advantage)
    return min(loss, -config.dual_clip * advantage) if config.dual_clip and advantage < 0 else loss


def expected(name: str, rows: list, config: AlgorithmConfig) -> list[tuple[float, float]]:
    """Of each token: the loss, and its slope in the log-prob of the token alone where ratios are the token's own."""
    ends = [row[5] for row in rows]
    turns = [sum(ends[:i]) for i in range(len(rows))]
    shares = {"token": range(len(rows)), "turn": turns, "sequence": [turn // 2 for turn in turns]}[config.ratio_level]
    found = []
    for i, (new, old, _, _, advantage, _) in enumerate(rows):
        mates = [row[0] - row[1] for row, share in zip(rows, shares, strict=True) if share == shares[i]]
        level = math.exp(mean(mates))
        ratio = math.exp(new - old)
        truncated = max(config.ratio_low, min(config.ratio_high, ratio))
        match name:
            case "ppo_clip":
                loss = clipped_loss(level, advantage, config)
                slope = -level * advantage if loss == -level * advantage else 0
            case "policy_gradient":
                loss, slope = -advantage * new, -advantage
            case "tis":
                loss, slope = -truncated * advantage * new, -truncated * advantage
            case "topr":
                weight = config.positive_weight if advantage > 0 else config.negative_weight * truncated
                loss, slope = -weight * advantage * new, -weight * advantage
            case "cispo":
                weight = max(1 - config.clip_low, min(1 + config.clip_high, ratio))
                gone = ratio > 1 + config.clip_high if advantage > 0 else ratio < 1 - config.clip_low
                weight = 0.0 if config.cispo_mask and gone else weight
                loss, slope = -weight * advantage * new, -weight * advantage
            case "kimi":
                loss = -advantage * new + config.kimi_tau / 2 * (new - old) ** 2
                slope = -advantage + config.kimi_tau * (new - old)
        found.append((loss, slope))
    return found


@pytest.mark.parametrize("name", LOSS_NAMES)
@given(rows=tokens, config=configs)
def test_values_and_slopes(name, rows, config):
    given_ = inputs(rows, requires_grad=True)
    loss, metrics = LOSSES.resolve(name)(given_, config)
    values = expected(name, rows, config)
    np.testing.assert_allclose(loss.detach(), [value for value, _ in values], rtol=1e-9, atol=1e-9)
    assert all(metric.shape == loss.shape for metric in metrics.values())
    if config.ratio_level == "token" or name != "ppo_clip":
        (slopes,) = torch.autograd.grad(loss.sum(), given_.logprobs)
        np.testing.assert_allclose(slopes, [slope for _, slope in values], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", LOSS_NAMES)
@settings(max_examples=15)
@given(config=configs, seed=st.integers(0, 2**32))
def test_what_the_learner_takes_for_granted(name, config, seed):
    """However it is set: slopes are those of small steps, of shared ratios too, and no token looks beyond its sequence."""
    check_loss(LOSSES.resolve(name), config, seeds=(seed,))


@pytest.mark.parametrize("name", LOSS_NAMES)
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("new, old", [(0.0, -1e4), (-1e4, 0.0), (-math.inf, -1.0), (-1.0, -math.inf)])
def test_what_has_no_probability_makes_nothing_infinite(name, level, new, old):
    given_ = inputs([(new, old, old, old, 1.0, False), (-1.0, -1.0, -1.0, -1.0, -1.0, True)], requires_grad=True)
    loss, _ = LOSSES.resolve(name)(given_, AlgorithmConfig(ratio_level=level))
    if math.isfinite(new):
        assert loss.isfinite().all()
    (slopes,) = torch.autograd.grad(loss.sum(), given_.logprobs)
    assert slopes.isfinite().all()


def test_what_is_impossible_for_both_is_no_reason_to_move():
    loss, _ = ppo_clip(example(logprobs=[-math.inf], old_logprobs=[-math.inf], advantages=[2.0]), AlgorithmConfig())
    assert loss.tolist() == [-2.0]


@pytest.mark.parametrize("name", LOSS_NAMES)
def test_no_tokens_and_no_advantages(name):
    loss = LOSSES.resolve(name)
    none = replace(example([], [], []), streams={})
    assert loss(none, AlgorithmConfig())[0].shape == (0,)
    still = inputs([(-1.0, -2.0, -1.0, -1.5, 0.0, False)] * 3, requires_grad=True)
    (slopes,) = torch.autograd.grad(loss(still, AlgorithmConfig(loss=name))[0].sum(), still.logprobs)
    assert declaration_of(loss).zero_at_zero_advantage == (not slopes.any())


filters = st.builds(
    FilterConfig,
    level=st.sampled_from(["token", "turn", "sequence", "product"]),
    keep_low=st.floats(0, 1),
    keep_high=st.floats(1, 5),
    keep_difference=st.sampled_from([1.0, 0.0, 0.05, 0.3]),
)
corrections = st.builds(
    CorrectionConfig,
    filters=st.lists(filters, max_size=2).map(tuple),
    level=st.sampled_from([None, "token", "turn", "sequence", "product"]),
    high=st.floats(0.1, 5),
    filter_level=st.sampled_from([None, "token", "turn", "sequence", "product"]),
    keep_low=st.floats(0, 1),
    keep_high=st.floats(1, 5),
    keep_difference=st.sampled_from([1.0, 0.0, 0.05, 0.3]),
)


def ratios(rows: list, level: str) -> list[float]:
    """Of each token, at this level: the policy before the step to the one that sampled."""
    ends = [row[5] for row in rows]
    turns = [sum(ends[:i]) for i in range(len(rows))]
    own = [row[3] - row[1] for row in rows]
    if level == "token":
        return [math.exp(each) for each in own]
    shares = turns if level == "turn" else [turn // 2 for turn in turns]
    together = [[each for each, share in zip(own, shares, strict=True) if share == mine] for mine in shares]
    combined = [sum(each) if level == "product" else mean(each) for each in together]
    return [math.exp(max(-20, min(20, each))) for each in combined]


def differences(rows: list, level: str) -> list[float]:
    """Of each token, by how much its probability has changed; the mean over its turn or its sequence."""
    ends = [row[5] for row in rows]
    turns = [sum(ends[:i]) for i in range(len(rows))]
    shares = {"token": range(len(rows)), "turn": turns}.get(level, [turn // 2 for turn in turns])
    own = [math.exp(row[3]) - math.exp(row[1]) for row in rows]
    return [abs(mean(each for each, share in zip(own, shares, strict=True) if share == mine)) for mine in shares]


@given(rows=tokens, config=corrections)
def test_corrections(rows, config):
    """The loss is against the policy before the step, times the weight; what is filtered has none."""
    given_ = inputs(rows, requires_grad=True)
    loss, metrics = token_loss(ppo_clip, given_, AlgorithmConfig(correction=config))
    weights = [min(ratio, config.high) for ratio in ratios(rows, config.level)] if config.level else [1.0] * len(rows)
    bounds = [(each.level, each.keep_low, each.keep_high, each.keep_difference) for each in config.filters]
    if config.filter_level:
        bounds.append((config.filter_level, config.keep_low, config.keep_high, config.keep_difference))
    for i, row in enumerate(rows):
        found = [(ratios(rows, each)[i], differences(rows, each)[i], *limits) for each, *limits in bounds]
        if any(
            min(abs(kept - low), abs(kept - high), abs(apart - most)) < 1e-9 for kept, apart, low, high, most in found
        ):
            continue  # either
        inside = all(low <= kept <= high and apart <= most for kept, apart, low, high, most in found)
        weight = weights[i] if inside else 0.0
        against = row[3] if config.on else row[1]
        wanted = weight * clipped_loss(math.exp(row[0] - against), row[4], AlgorithmConfig())
        assert float(loss.detach()[i]) == pytest.approx(wanted, rel=1e-9, abs=1e-9)
    assert ("correction_weight" in metrics) == (config.level is not None)
    assert not any(value.requires_grad for name, value in metrics.items() if name.startswith("correction"))


@given(rows=tokens)
def test_a_step_of_one_update_is_its_own_proximal_policy(rows):
    given_ = inputs(rows, proximal=False)
    own = replace(given_, streams={PROXIMAL_LOGPROBS: given_.logprobs})
    config = AlgorithmConfig.model_validate("decoupled_ppo")
    np.testing.assert_array_equal(token_loss(ppo_clip, given_, config)[0], token_loss(ppo_clip, own, config)[0])


@given(rows=tokens, low=st.floats(0.01, 0.9), high=st.floats(0.01, 2))
def test_what_is_clipped(rows, low, high):
    _, metrics = ppo_clip(inputs(rows), AlgorithmConfig(clip_low=low, clip_high=high))
    for (new, old, _, _, advantage, _), clipped in zip(rows, metrics["clip_fraction"], strict=True):
        outside = math.exp(new - old) > 1 + high if advantage > 0 else math.exp(new - old) < 1 - low
        assert bool(clipped) == (outside and advantage != 0)


@pytest.mark.parametrize("name", ["tis", "cispo", "topr"])
@given(rows=tokens, config=configs)
def test_whose_weight_is_bounded(name, rows, config):
    low, high = (
        (1 - config.clip_low, 1 + config.clip_high) if name == "cispo" else (config.ratio_low, config.ratio_high)
    )
    _, metrics = LOSSES.resolve(name)(inputs(rows), config)
    for (new, old, _, _, advantage, _), clipped in zip(rows, metrics["clip_fraction"], strict=True):
        outside = not low <= math.exp(new - old) <= high
        assert bool(clipped) == (outside and not (name == "topr" and advantage > 0))


@given(rows=tokens, entropy=st.floats(0, 1), kl=st.floats(0.001, 1))
def test_terms_around_the_loss(rows, entropy, kl):
    config = AlgorithmConfig(entropy_coefficient=entropy, kl={"coefficient": kl})
    loss, metrics = token_loss(ppo_clip, inputs(rows), config)
    for value, apart, row in zip(loss, metrics["reference_kl"], rows, strict=True):
        new, old, reference, _, advantage, _ = row
        k3 = math.exp(reference - new) - (reference - new) - 1
        assert float(apart) == pytest.approx(k3, rel=1e-9, abs=1e-12)
        wanted = clipped_loss(math.exp(new - old), advantage, config) + entropy * new + kl * k3
        assert float(value) == pytest.approx(wanted, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_estimates_of_the_divergence_without_bias(estimator):
    policy = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    reference = torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64)
    expected = float((policy * (policy / reference).log()).sum())
    estimates = estimate_kl(policy.log(), reference.log(), estimator, torch)
    assert float((policy * estimates).sum()) == pytest.approx(expected)


@given(rows=tokens)
@pytest.mark.parametrize("library", [np, torch])
def test_estimators(rows, library):
    of = (
        (lambda column: np.array(column))
        if library is np
        else (lambda column: torch.tensor(column, dtype=torch.float64))
    )
    policy, reference = of([row[0] for row in rows]), of([row[2] for row in rows])
    apart = [row[0] - row[2] for row in rows]
    wanted = {
        "k1": apart,
        "abs": [abs(d) for d in apart],
        "k2": [d * d / 2 for d in apart],
        "mse": [d * d / 2 for d in apart],
        "k3": [math.exp(-d) - 1 + d for d in apart],
    }
    for name, values in wanted.items():
        np.testing.assert_allclose(estimate_kl(policy, reference, name, library), values, rtol=1e-9, atol=1e-9)


@given(rows=tokens, ages=st.lists(st.integers(0, 5), min_size=8, max_size=8))
def test_the_policy_before_the_step_may_be_interpolated(rows, ages):
    """d / (d + 1) of the way from sampling to now, and no gradient flows that way."""
    given_ = inputs(rows, requires_grad=True)
    age = torch.tensor(ages[: len(rows)], dtype=torch.float64)
    given_ = replace(given_, streams=given_.streams | {TOKEN_AGE: age})
    config = AlgorithmConfig(correction={"level": "token", "high": 1e9, "proximal": "interpolated"})
    loss, _ = token_loss(ppo_clip, given_, config)
    (slopes,) = torch.autograd.grad(loss.sum(), given_.logprobs)
    for row, d, value, slope in zip(rows, ages, loss, slopes, strict=False):
        new, old, _, _, advantage, _ = row
        before = old + d / (d + 1) * (new - old)
        against = clipped_loss(math.exp(new - before), advantage, config)
        weight = math.exp(before - old)
        assert float(value.detach()) == pytest.approx(weight * against, rel=1e-9, abs=1e-9)
        unclipped = against == -math.exp(new - before) * advantage
        assert float(slope) == pytest.approx(weight * against if unclipped else 0, rel=1e-9, abs=1e-9)


@given(rows=tokens, clip=st.sampled_from([0.0, 0.3]))
def test_the_loss_of_values(rows, clip):
    values, old, returns = (torch.tensor([row[i] for row in rows], dtype=torch.float64) for i in (0, 1, 2))
    for value, before, target, loss in zip(values, old, returns, value_loss(values, old, returns, clip), strict=True):
        bounded = min(max(value, before - clip), before + clip)
        worst = max((value - target) ** 2, (bounded - target) ** 2) if clip else (value - target) ** 2
        assert float(loss) == pytest.approx(float(worst) / 2, rel=1e-9, abs=1e-12)


@given(rows=tokens)
def test_an_entropy_that_is_not_rewarded(rows):
    config, plain = AlgorithmConfig(entropy_coefficient=0.5), inputs(rows)
    weight = torch.tensor([float(i % 2) for i in range(len(rows))], dtype=torch.float64)
    masked = replace(plain, streams=plain.streams | {ENTROPY_WEIGHT: weight})
    difference = token_loss(ppo_clip, masked, config)[0] - token_loss(ppo_clip, plain, config)[0]
    np.testing.assert_allclose(difference, 0.5 * (1 - weight) * plain.entropies, atol=1e-12)


def test_a_loss_that_aggregates_itself_is_refused():
    with pytest.raises(ConfigError, match=r"returned shape \(\), expected \(2,\)"):
        token_loss(lambda i, c: (i.logprobs.mean(), {}), inputs([(-1, -1, -1, -1, 1, False)] * 2), AlgorithmConfig())


@pytest.mark.parametrize("recipe", sorted(RECIPES))
def test_recipes(recipe):
    """What a recipe sets can be set otherwise; its name alone is enough; what it comes to can be written out and read again."""
    config = AlgorithmConfig.model_validate(recipe)
    assert config == AlgorithmConfig.model_validate({"recipe": recipe})
    assert AlgorithmConfig.model_validate(config.model_dump()) == config
    stated = config.model_dump()
    for name, value in RECIPES[recipe].items():
        assert stated[name] == (stated[name] | value if isinstance(value, dict) else value)
    ADVANTAGES.resolve(config.advantage)
    LOSSES.resolve(config.loss)
    assert AlgorithmConfig.model_validate({"recipe": recipe, "clip_high": 0.5}).clip_high == 0.5
    other = AlgorithmConfig.model_validate({"recipe": recipe, "correction": {"high": 3.0}})
    assert other.correction == config.correction.model_copy(update={"high": 3.0})


# As the papers, or the code that goes with them, have it.
PUBLISHED = {
    "grpo": {"clip_low": 0.2, "clip_high": 0.2, "kl": {"coefficient": 0}, "dual_clip": 0, "advantage_clip": 0},
    "dapo": {"clip_low": 0.2, "clip_high": 0.28, "weight": {"mask_truncated": True}},
    "gspo": {"clip_low": 3e-4, "clip_high": 4e-4},
    "cispo": {"clip_low": 1.0, "clip_high": 0.28},
    "tis": {"ratio_low": 0.0, "ratio_high": 1.0},
    "topr": {"ratio_low": 0.0, "ratio_high": 1.0, "positive_weight": 1.0, "negative_weight": 1.0},
    "kimi": {"kimi_tau": 0.1},
    "asyppo": {"agreement_mask": 0.2, "disagreement_mask": 0.2, "entropy_coefficient": 1e-3, "gae_lambda": 1.0},
    "gigpo": {"step_weight": 1.0, "turn_gamma": 0.95},
    "rhythm": {
        "rhythm": {
            "amplification": 1.5,
            "share": 0.4,
            "window": 10,
            "horizon_low": 10,
            "horizon_high": 100,
            "lookback": 3,
        }
    },
}


@pytest.mark.parametrize("recipe", PUBLISHED)
def test_published_numbers(recipe):
    stated = AlgorithmConfig.model_validate(recipe).model_dump()
    for name, value in PUBLISHED[recipe].items():
        assert stated[name] == (stated[name] | value if isinstance(value, dict) else value)


def test_bounds_of_the_correction_and_what_counts_as_no_spread():
    assert EPSILON == 1e-4
    assert CorrectionConfig() == CorrectionConfig(level=None, high=2.0, filter_level=None, keep_low=0.5, keep_high=2.0)
    assert AlgorithmConfig.model_validate("decoupled_ppo").correction == CorrectionConfig(level="token", high=5.0)


@pytest.mark.parametrize(
    "wrong, key",
    [
        ({"recipe": "gpro"}, "recipe"),
        ({"dual_clip": 0.5}, "dual_clip"),
        ({"dual_clip": 1.0}, "dual_clip"),
        ({"ratio_low": 2.0}, "ratio_low"),
        ({"kl": {"coefficient": 0.1, "target": 0.1}}, "target"),
        ({"kl": {"place": "reward", "target": 0.1}}, "target"),
    ],
)
def test_what_cannot_be(wrong, key):
    with pytest.raises(ValidationError) as refused:
        AlgorithmConfig.model_validate(wrong)
    assert refused.value.errors()[0]["ctx"]["error"].mistakes[0].key == key


def test_examples_in_docstrings():
    torch.set_printoptions(precision=4)
    modules = (losses, token_losses, advantages, turn_advantages, value_targets, rewards, divergences)
    for module in modules:
        found = doctest.testmod(module, extraglobs={} if module is losses else {"example": groups_of})
        assert found.attempted and not found.failed


def test_a_ratio_on_a_bound_is_kept():
    inputs = example(logprobs=[-1.0, -1.0], old_logprobs=[-1.0, -1.5], advantages=[1.0, 1.0])  # ratios 1 and more
    for low, high in ((1.0, 1.2), (0.5, 1.0)):
        weight, _ = correction(inputs, CorrectionConfig(filter_level="token", keep_low=low, keep_high=high))
        assert weight.tolist() == [1.0, 0.0]
