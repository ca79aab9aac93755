"""Policy losses: pure functions of per-token tensors, one value a token. A user's own loss looks the same: `docs/new_loss.md`.

The learner multiplies each value with the token's coefficient and sums, so a loss knows nothing of batches, padding or
normalisation. Here r is the ratio of a token's probability under the policy being trained to that under the policy that
sampled it (or, with `algorithm.correction`, under the proximal policy), A is its advantage, and sg stops the gradient. Log
ratios are clipped to ±20, so no ratio and no gradient of one is ever infinite.

Importing this module imports no torch, because the checks of a configuration read what each loss declares.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from antiphon.algorithms.config import AlgorithmConfig
from antiphon.algorithms.declarations import loss
from antiphon.algorithms.divergence import MAX_LOG_RATIO
from antiphon.core.errors import ConfigError
from antiphon.core.types import StreamSpec

if TYPE_CHECKING:
    import torch

Metrics = dict[str, "torch.Tensor"]  # name -> one value a token


class LossStreams(dict[StreamSpec, "torch.Tensor"]):
    """The streams of the loss tokens, [N, …] each: those that the loss declares, and those of the terms beside it."""

    def __missing__(self, spec: StreamSpec) -> torch.Tensor:
        raise ConfigError(
            f"the loss reads the stream {spec.name!r}, which it does not declare: @loss(needs=[…]) of "
            "antiphon.algorithms.declarations names the streams that it reads",
            key="algorithm.loss",
            value=spec.name,
            valid=sorted(known.name for known in self),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """The inputs of a loss: the N loss tokens of one pack, sequence after sequence."""

    logprobs: (
        torch.Tensor
    )  # [N] of the policy being trained, differentiable; `Segment.logprobs` are `old_logprobs` here
    entropies: torch.Tensor  # [N] of the same distributions, differentiable
    old_logprobs: torch.Tensor  # [N] of the policy that sampled; with `correction` of the proximal policy
    advantages: torch.Tensor  # [N]
    sequence: torch.Tensor  # [N] which sequence of the pack each token belongs to
    turn: torch.Tensor  # [N] which turn of the pack: tokens sampled in a row
    streams: Mapping[
        StreamSpec, torch.Tensor
    ]  # [N, …]; a stream that is not there is a `ConfigError`, see `LossStreams`

    def __post_init__(self) -> None:
        object.__setattr__(self, "streams", LossStreams(self.streams))


Loss = Callable[[LossInputs, AlgorithmConfig], tuple["torch.Tensor", Metrics]]


@loss(zero_at_zero_advantage=True)
def ppo_clip(inputs: LossInputs, config: AlgorithmConfig) -> tuple[torch.Tensor, Metrics]:
    """-min(r A, clip(r, 1 - low, 1 + high) A); with `dual_clip` c at most -c A where A < 0.

    `ratio_level` chooses r: the ratio of the token (PPO), or its geometric mean over the sequence (GSPO) or the turn.

    Source: Schulman et al. 2017, "Proximal policy optimization algorithms", eq. 7; unequal bounds as in DAPO (Yu et al.
    2025), section 3.1; dual clip as in Ye et al. 2020, "Mastering complex control in MOBA games"; the sequence's ratio
    as in Zheng et al. 2025, "Group sequence policy optimization".

    >>> inputs = example(logprobs=[-1.0, -2.0], old_logprobs=[-1.4, -1.0], advantages=[1.0, -1.0])
    >>> inputs.logprobs.sub(inputs.old_logprobs).exp()  # the ratios: one above 1.2, one below 0.8
    tensor([1.4918, 0.3679], dtype=torch.float64)
    >>> ppo_clip(inputs, AlgorithmConfig())[0]  # -1.2 · 1, and 0.8 · 1
    tensor([-1.2000,  0.8000], dtype=torch.float64)
    """
    ratio = per_level(clipped_log_ratio(inputs.logprobs, inputs.old_logprobs), inputs, config.ratio_level).exp()
    free = ratio * inputs.advantages
    clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high) * inputs.advantages
    gained = free.minimum(clipped)
    if config.dual_clip:
        bounded = gained.maximum(config.dual_clip * inputs.advantages)
        gained = bounded.where(inputs.advantages < 0, gained)
    return -gained, {"clip_fraction": (clipped < free).float()}


@loss(zero_at_zero_advantage=True)
def policy_gradient(inputs: LossInputs, config: AlgorithmConfig) -> tuple[torch.Tensor, Metrics]:
    """-A log pi: the gradient of REINFORCE, whoever sampled the token.

    Source: Williams 1992, "Simple statistical gradient-following algorithms".

    >>> policy_gradient(example(logprobs=[-1.5], old_logprobs=[-1.0], advantages=[2.0]), AlgorithmConfig())[0]
    tensor([3.], dtype=torch.float64)
    """
    return -inputs.advantages * inputs.logprobs, {}


@loss(zero_at_zero_advantage=True)
def tis(inputs: LossInputs, config: AlgorithmConfig) -> tuple[torch.Tensor, Metrics]:
    """-sg(clip(r, `ratio_low`, `ratio_high`)) A log pi: truncated importance sampling.

    Source: Espeholt et al. 2018, "IMPALA"; the bounds 0 and 1 are those of Le Roux et al. 2025, "Tapered off-policy
    REINFORCE".

    >>> tis(example(logprobs=[-1.0, -2.0], old_logprobs=[-2.0, -1.0], advantages=[1.0, 1.0]), AlgorithmConfig())[0]
    tensor([1.0000, 0.7358], dtype=torch.float64)
    """
    ratio = clipped_log_ratio(inputs.logprobs, inputs.old_logprobs).exp().detach()
    bounded = ratio.clamp(config.ratio_low, config.ratio_high)
    return -bounded * inputs.advantages * inputs.logprobs, {"clip_fraction": (bounded != ratio).float()}


@loss(zero_at_zero_advantage=True)
def topr(inputs: LossInputs, config: AlgorithmConfig) -> tuple[torch.Tensor, Metrics]:
    """`positive_weight` times the loss of `policy_gradient` where A > 0, `negative_weight` times that of `tis` elsewhere.

    Source: Le Roux et al. 2025, "Tapered off-policy REINFORCE", taken a token at a time; the sign is that of the
    reward above its baseline. With other weights than 1 it is what ROLL calls weighted TOPR.

    >>> inputs = example(logprobs=[-2.0, -2.0], old_logprobs=[-1.0, -1.0], advantages=[1.0, -1.0])
    >>> topr(inputs, AlgorithmConfig())[0]
    tensor([ 2.0000, -0.7358], dtype=torch.float64)
    """
    free, _ = policy_gradient(inputs, config)
    truncated, metrics = tis(inputs, config)
    positive = inputs.advantages > 0
    value = (config.positive_weight * free).where(positive, config.negative_weight * truncated)
    return value, {"clip_fraction": metrics["clip_fraction"] * ~positive}


@loss(zero_at_zero_advantage=True)
def cispo(inputs: LossInputs, config: AlgorithmConfig) -> tuple[torch.Tensor, Metrics]:
    """-sg(clip(r, 1 - low, 1 + high)) A log pi: every token keeps a gradient, whatever its ratio.

    With `cispo_mask` those lose it whose ratio has gone beyond the bounds where the advantage leads it, as in `ppo_clip`.

    Source: MiniMax 2025, "MiniMax-M1", eq. 4, and with the mask eq. 7.

    >>> inputs = example(logprobs=[-1.0, -1.0], old_logprobs=[-3.0, -1.0], advantages=[1.0, 1.0])
    >>> cispo(inputs, AlgorithmConfig())[0]
    tensor([1.2000, 1.0000], dtype=torch.float64)
    """
    ratio = clipped_log_ratio(inputs.logprobs, inputs.old_logprobs).exp().detach()
    bounded = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    value = -bounded * inputs.advantages * inputs.logprobs
    if config.cispo_mask:
        value = value.where((bounded - ratio) * inputs.advantages >= 0, 0.0)
    return value, {"clip_fraction": (bounded != ratio).float()}


@loss()
def kimi(inputs: LossInputs, config: AlgorithmConfig) -> tuple[torch.Tensor, Metrics]:
    """-A log pi + (`kimi_tau` / 2) (log r)²: the policy gradient, held near the policy that sampled.

    Source: Kimi 2025, "Kimi k1.5", taken a token at a time.

    >>> kimi(example(logprobs=[-1.0], old_logprobs=[-3.0], advantages=[1.0]), AlgorithmConfig())[0]  # 1 + 0.05 · 4
    tensor([1.2000], dtype=torch.float64)
    """
    free, metrics = policy_gradient(inputs, config)
    return free + config.kimi_tau / 2 * clipped_log_ratio(inputs.logprobs, inputs.old_logprobs).square(), metrics


@loss()
def sft(inputs: LossInputs, config: AlgorithmConfig) -> tuple[torch.Tensor, Metrics]:
    """Negative log-likelihood of the target tokens.

    >>> sft(example(logprobs=[-1.5], old_logprobs=[0.0], advantages=[0.0]), AlgorithmConfig())[0]
    tensor([1.5000], dtype=torch.float64)
    """
    return -inputs.logprobs, {}


def value_loss(values: torch.Tensor, old: torch.Tensor, returns: torch.Tensor, clip: float) -> torch.Tensor:
    """(V - R)² / 2 of each token [N]; with `clip` the larger of that and what V would come to within so much of the old value.

    Source: Schulman et al. 2017, "Proximal policy optimization algorithms", eq. 9; clipped as in its public code.

    >>> import torch
    >>> values, returns = torch.tensor([1.0, 1.0]), torch.tensor([2.0, 0.0])
    >>> value_loss(values, torch.zeros(2), returns, 0.0)
    tensor([0.5000, 0.5000])
    >>> value_loss(values, torch.zeros(2), returns, 0.5)  # the first has moved far enough towards 2: half of (0.5 - 2)²
    tensor([1.1250, 0.5000])
    """
    errors = (values - returns).square()
    if clip:
        bounded = old + (values - old).clamp(-clip, clip)
        errors = errors.maximum((bounded - returns).square())
    return errors / 2


# --- ratios --------------------------------------------------------------------------------------------------------------


def clipped_log_ratio(numerator: torch.Tensor, denominator: torch.Tensor) -> torch.Tensor:
    """Return the log ratio of probabilities [N], clipped to ±`MAX_LOG_RATIO`; 0 where both are impossible."""
    return (numerator - denominator).nan_to_num(nan=0.0).clip(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def per_level(values: torch.Tensor, inputs: LossInputs, level: str) -> torch.Tensor:
    """Return the log ratio, or another value, of each token, its turn or its sequence, [N].

    For `turn` and `sequence` it is the mean over their tokens, for `product`, of log ratios alone, the sum over the sequence.
    """
    if level == "token":
        return values
    _, member = (inputs.turn if level == "turn" else inputs.sequence).unique(return_inverse=True)
    count = int(member.max()) + 1 if len(member) else 0
    together = values.new_zeros(count).index_add(0, member, values)
    if level == "product":
        return together[member].clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return (together / member.bincount(minlength=count))[member]


def example(
    logprobs: Sequence[float],
    old_logprobs: Sequence[float],
    advantages: Sequence[float],
    streams: Mapping[StreamSpec, Any] | None = None,
) -> LossInputs:
    """Return the inputs of one sequence of one turn, in double precision, to try a loss by hand.

    Args:
        logprobs: Of each of N tokens, under the policy that is trained.
        old_logprobs: Of each, under the policy that sampled it.
        advantages: Of each.
        streams: Numbers of each stream that the loss reads, [N, …].
    """
    import torch  # here alone, see the module

    new, old, gained = (torch.tensor(column, dtype=torch.float64) for column in (logprobs, old_logprobs, advantages))
    nowhere = torch.zeros(len(logprobs), dtype=torch.long)
    return LossInputs(
        logprobs=new,
        entropies=-new,
        old_logprobs=old,
        advantages=gained,
        sequence=nowhere,
        turn=nowhere,
        streams={
            spec: torch.as_tensor(numbers).to(torch.float64 if "float" in spec.dtype else getattr(torch, spec.dtype))
            for spec, numbers in (streams or {}).items()
        },
    )
