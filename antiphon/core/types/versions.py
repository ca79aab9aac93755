"""Policy versions, published weights, and the parameters of sampling."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal

from antiphon.core.types.pickling import quick_to_pickle

MAX_SUPPORT = 1024  # tokens that a truncated distribution may keep for its support to be recorded


@quick_to_pickle
@dataclass(frozen=True, slots=True, order=True)
class PolicyVersion:
    """The weights after `n` published updates of a lineage.

    A resume after a rollback opens a new lineage, so that undone versions never look like the future.
    """

    lineage: int
    n: int

    def age(self, now: "PolicyVersion") -> int:
        """Return the number of versions published since this one."""
        if now.lineage < self.lineage or now.n < self.n:
            raise ValueError(f"{self} lies in the future of {now}")
        return now.n - self.n

    def next(self) -> "PolicyVersion":
        """Return the version after one more published update."""
        return PolicyVersion(self.lineage, self.n + 1)


@quick_to_pickle
@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Parameters of token sampling, recorded with every completion; `temperature` 0 is greedy.

    The learner applies the same temperature to its log-probs. Penalties and beams are for evaluations and served models:
    nothing that is sampled with them is trained on.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: no limit
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_tokens: tuple[int, ...] = ()
    seed: int = 0
    repetition_penalty: float = (
        1.0  # of tokens in prompt or completion: divides positive logits, multiplies negative ones
    )
    presence_penalty: float = 0.0  # of tokens in the completion: subtracted from their logits
    frequency_penalty: float = 0.0  # the same, as often as they are there
    num_beams: int = 1  # above 1: beam search, see `rollout.beam_search`
    length_penalty: float = 1.0  # of beams: scores are divided by the length to this power
    early_stopping: bool | Literal["never"] = False  # of beams

    @property
    def truncated(self) -> bool:
        """True if sampling drops part of the distribution, so that plain log-probs do not describe it."""
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0

    @property
    def counts_output(self) -> bool:
        """True if a penalty counts the tokens of the completion alone, so that these must be told from the prompt's."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def penalized(self) -> bool:
        """True if a penalty changes the distribution."""
        return self.repetition_penalty != 1.0 or self.counts_output

    @property
    def support_size(self) -> int:
        """Most tokens of the support, which is then recorded, see `SAMPLING_SUPPORT`; 0 where it is not."""
        return self.top_k if self.temperature > 0.0 and self.top_k <= MAX_SUPPORT else 0


class OnUpdate(StrEnum):
    """Treatment of requests in flight when an engine loads new weights."""

    KEEP = "keep"  # go on with the old KV cache; later tokens are flagged
    RECOMPUTE = "recompute"  # re-prefill prompt and tokens under the new weights
    RESTART = "restart"  # drop the tokens and start again
    DRAIN = "drain"  # finish what runs, then load


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsUpdate:
    """Published weights: the version, the location, and the manifest that a receiver verifies them with."""

    version: int
    location: str  # what the channel's receiver opens
    manifest: Any  # weights.base.Manifest
    sent: int = 0  # bytes that go to an engine which has the version before; 0: the channel does not say
