"""The loss of each token as the learner computes it: the configured loss, its correction, the entropy bonus and the KL term."""

from dataclasses import replace

import torch

from antiphon.algorithms.config import AlgorithmConfig
from antiphon.algorithms.divergence import estimate_kl
from antiphon.algorithms.losses import Loss, LossInputs, Metrics, clipped_log_ratio, per_level
from antiphon.algorithms.sections import CorrectionConfig
from antiphon.core.errors import ConfigError
from antiphon.core.types import ENTROPY_WEIGHT, PROXIMAL_LOGPROBS, REFERENCE_LOGPROBS, TOKEN_AGE


def token_loss(loss: Loss, inputs: LossInputs, config: AlgorithmConfig) -> tuple[torch.Tensor, Metrics]:
    """Return the loss of each token, with its correction, the entropy bonus and the KL term, [N]."""
    weight, corrected = correction(inputs, config.correction) if config.correction.on else (1.0, {})
    if config.correction.on:
        inputs = replace(inputs, old_logprobs=_proximal_logprobs(inputs, config.correction))
    value, metrics = loss(inputs, config)
    if value.shape != inputs.logprobs.shape:
        message = f"{config.loss!r} returned shape {tuple(value.shape)}, expected {tuple(inputs.logprobs.shape)}"
        raise ConfigError(message, key="algorithm.loss", value=config.loss)
    value, metrics = weight * value, metrics | corrected
    if config.entropy_coefficient:
        value = value - config.entropy_coefficient * inputs.streams.get(ENTROPY_WEIGHT, 1.0) * inputs.entropies
    if config.kl.in_loss:
        apart = estimate_kl(inputs.logprobs, inputs.streams[REFERENCE_LOGPROBS], config.kl.estimator, torch)
        value = value + config.kl.coefficient * apart
        metrics = metrics | {"reference_kl": apart.detach()}
    return value, metrics


def correction(inputs: LossInputs, config: CorrectionConfig) -> tuple[torch.Tensor, Metrics]:
    """Return the correction weight of each token: its proximal probability over the probability with which it was sampled, [N].

    The weight is bounded by `high`, and is 0 where a filter leaves the token out: where the ratio is not between `keep_low` and
    `keep_high`, or the probabilities differ by more than `keep_difference`. Weight and filters each have a level of their own.

    The proximal policy is the policy before the first update of the step. In a step of one update it is the policy being
    trained, which costs no forward pass; `proximal: interpolated` never costs one. The loss takes its own ratio against the
    proximal policy, so `ppo_clip` with `level: token` is decoupled PPO.

    Source: Hilton et al. 2022, "Batch size-invariance for policy optimization"; for asynchronous training Fu et al. 2025,
    "AReaL"; the levels as in ROLL and in Liu et al. 2025, "When speed kills stability"; the interpolation as in Li et al. 2025,
    "A-3PO".

    >>> from antiphon.algorithms.losses import example
    >>> inputs = example(logprobs=[-1.0, -1.0], old_logprobs=[-1.4, -3.0], advantages=[1.0, 1.0])
    >>> correction(inputs, CorrectionConfig(level="token", high=5.0))[0]  # exp(0.4), and exp(2) cut off
    tensor([1.4918, 5.0000], dtype=torch.float64)
    >>> correction(inputs, CorrectionConfig(filter_level="token", keep_high=2.0))[0]
    tensor([1., 0.], dtype=torch.float64)
    """
    proximal = _proximal_logprobs(inputs, config)
    difference = clipped_log_ratio(proximal, inputs.old_logprobs)
    weight, metrics = torch.ones_like(difference), {}
    if config.level is not None:
        weight = per_level(difference, inputs, config.level).exp().clamp(max=config.high)
        metrics["correction_weight"] = weight
    if filters := config.all_filters:
        kept = torch.ones_like(weight, dtype=torch.bool)
        for each in filters:
            ratio = per_level(difference, inputs, each.level).exp()
            kept &= (ratio >= each.keep_low) & (ratio <= each.keep_high)
            if each.keep_difference < 1.0:
                level = "sequence" if each.level == "product" else each.level
                apart = per_level(proximal.exp() - inputs.old_logprobs.exp(), inputs, level)
                kept &= apart.abs() <= each.keep_difference
        metrics["correction_kept"] = kept.to(weight.dtype)
        weight = weight * metrics["correction_kept"]
    return weight, metrics


def _proximal_logprobs(inputs: LossInputs, config: CorrectionConfig) -> torch.Tensor:
    """Return the log-probs under the proximal policy, [N].

    Interpolated, they lie d / (d + 1) of the way from the log-probs of sampling to the current ones; d is the age of the token.
    """
    now = inputs.logprobs.detach()
    if config.proximal == "interpolated":
        age = inputs.streams[TOKEN_AGE]
        return inputs.old_logprobs + age / (age + 1) * clipped_log_ratio(now, inputs.old_logprobs)
    return inputs.streams.get(PROXIMAL_LOGPROBS, now)
