"""Policy losses: pure functions of per-token tensors, one value a token. The learner multiplies each with the token's
coefficient and sums, so no loss knows of batches, padding or normalisation."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from antiphon.algorithms.config import AlgorithmConfig
from antiphon.errors import ConfigError
from antiphon.types import REFERENCE_LOGPROBS, StreamSpec

Metrics = dict[str, torch.Tensor]  # name -> one value a token


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """What a loss may look at: the N loss tokens of one pack, sequence after sequence."""

    logprobs: torch.Tensor  # [N] of the policy being trained, differentiable
    entropies: torch.Tensor  # [N] of the same distributions, differentiable
    behaviour: torch.Tensor  # [N] log-probs the tokens were sampled with
    advantages: torch.Tensor  # [N]
    sequence: torch.Tensor  # [N] which sequence of the pack each token belongs to
    streams: Mapping[StreamSpec, torch.Tensor]  # [N, …]


Loss = Callable[[LossInputs, AlgorithmConfig], tuple[torch.Tensor, Metrics]]


def ppo_clip(inputs: LossInputs, config: AlgorithmConfig) -> tuple[torch.Tensor, Metrics]:
    """-min(r A, clip(r, 1 - low, 1 + high) A) with r = exp(logprob - behaviour logprob).

    Source: Schulman et al. 2017, "Proximal policy optimization algorithms", eq. 7; unequal bounds as in DAPO (Yu et al.
    2025), section 3.1.
    """
    ratio = (inputs.logprobs - inputs.behaviour).exp()
    free = ratio * inputs.advantages
    clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high) * inputs.advantages
    return -torch.minimum(free, clipped), {"clip_fraction": (clipped < free).float()}


def sft(inputs: LossInputs, config: AlgorithmConfig) -> tuple[torch.Tensor, Metrics]:
    """Negative log-likelihood of the target tokens."""
    return -inputs.logprobs, {}


def k3_divergence(logprobs: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """exp(ref - logp) - (ref - logp) - 1: unbiased and non-negative estimate of KL(policy ‖ reference) a token.

    Source: Schulman 2020, "Approximating KL divergence", estimator k3.
    """
    difference = reference - logprobs
    return difference.exp() - difference - 1


def total_loss(loss: Loss, inputs: LossInputs, config: AlgorithmConfig) -> tuple[torch.Tensor, Metrics]:
    """The chosen loss with the entropy bonus and the divergence from the reference around it, [N]."""
    value, metrics = loss(inputs, config)
    if value.shape != inputs.logprobs.shape:
        raise ConfigError(
            f"loss {config.loss!r} returned shape {tuple(value.shape)}, expected {tuple(inputs.logprobs.shape)}"
        )
    if config.entropy_coefficient:
        value = value - config.entropy_coefficient * inputs.entropies
    if config.kl_coefficient:
        divergence = k3_divergence(inputs.logprobs, inputs.streams[REFERENCE_LOGPROBS])
        value = value + config.kl_coefficient * divergence
        metrics = {**metrics, "reference_kl": divergence.detach()}
    return value, metrics
