"""Learning from pairs of responses to one prompt: a policy (DPO, IPO), or a reward model (Bradley and Terry).

The two of a pair lie in one pack, and the coefficients of their tokens add up to one over the pairs of the update
(`batch.pair_mean_batch`), so that however an update is cut, its gradient is that of the mean over pairs.
"""

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from antiphon.algorithms.offline_config import PreferenceConfig
from antiphon.algorithms.preference_losses import bradley_terry, dpo, ipo
from antiphon.core.types import PAIR, REFERENCE_LOGPROBS, Pack
from antiphon.learning.config import LearnerConfig
from antiphon.learning.objectives.base import OfflineLearner
from antiphon.learning.objectives.critic import ScalarLearner
from antiphon.learning.torch_learner import TorchLearner


@dataclass(frozen=True, slots=True)
class Pairs:
    """The P pairs of a pack, and which response each of its N loss tokens is of."""

    weights: torch.Tensor  # [P] what each pair counts in the update
    response: torch.Tensor  # [N] 2 p of the better response of pair p, 2 p + 1 of the other
    tokens: torch.Tensor  # [2, P] loss tokens of each response

    @staticmethod
    def of(pair: torch.Tensor, advantages: torch.Tensor, coefficients: torch.Tensor) -> "Pairs":
        """From the number of its pair, its advantage and its coefficient of each loss token, [N] each."""
        numbers, index = pair.unique(return_inverse=True)
        response = 2 * index + (advantages < 0).long()
        return Pairs(
            weights=coefficients.new_zeros(len(numbers)).index_add(0, index, coefficients),
            response=response,
            tokens=response.bincount(minlength=2 * len(numbers)).view(-1, 2).T,
        )

    def sums(self, values: torch.Tensor) -> torch.Tensor:
        """Return sums of values [N] over the tokens of each response: [2, P], the better ones first."""
        return values.new_zeros(self.tokens.numel()).index_add(0, self.response, values).view(-1, 2).T


def _measures(chosen: torch.Tensor, rejected: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return measures of the rewards of responses, [P] each."""
    return {
        "accuracy": (chosen > rejected).float(),
        "margin": chosen - rejected,
        "reward_chosen": chosen,
        "reward_rejected": rejected,
    }


class _PairLearner(OfflineLearner):
    """A learner of pairs."""

    def _pairs(self, pack: Pack, targets: torch.Tensor) -> Pairs:
        arrays = (pack.streams[PAIR], pack.advantages, pack.coefficients)
        return Pairs.of(*(self._tensor(array)[targets] for array in arrays))


class PreferenceLearner(_PairLearner, TorchLearner):
    """Trains a policy on pairs by DPO or IPO, with the reference's log-probs as a stream."""

    def __init__(self, model_path: str, config: LearnerConfig, seed: int, preference: PreferenceConfig) -> None:
        super().__init__(model_path, config, seed)
        self.preference = preference

    def _loss(self, pack: Pack) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        targets = self._targets(pack)
        pairs = self._pairs(pack, targets)
        logprobs, _ = self.shards.run(self._forward, pack, targets)
        apart = pairs.sums(logprobs - self._tensor(pack.streams[REFERENCE_LOGPROBS])[targets])
        beta = self.preference.beta
        if self.preference.loss == "ipo":
            chosen, rejected = apart / pairs.tokens
            losses = ipo(chosen, rejected, beta)
        else:
            chosen, rejected = apart
            losses = dpo(chosen, rejected, beta, self.preference.label_smoothing)
        return (pairs.weights * losses).sum(), _measures(beta * chosen, beta * rejected)


class RewardLearner(_PairLearner, ScalarLearner):
    """Trains a reward model on pairs.

    Its score of a response is that at the last token, which is the only one of each response in the loss.
    """

    def _load(self) -> PreTrainedModel:
        model = super()._load()
        # transformers looks for the last token that is no padding, and so would miss the token that ends a response.
        text = model.config.get_text_config()
        ends = text.eos_token_id if isinstance(text.eos_token_id, list) else [text.eos_token_id]
        if text.pad_token_id in ends:
            text.pad_token_id = None
        return model

    def _loss(self, pack: Pack) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        targets = self._targets(pack)
        pairs = self._pairs(pack, targets)
        (scores,) = self.shards.run(self._forward, pack, targets)
        chosen, rejected = pairs.sums(scores)
        return (pairs.weights * bradley_terry(chosen, rejected)).sum(), _measures(chosen, rejected)

    def _forward(self, pack: Pack, targets: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Scores of the sequences at their last tokens, [N]."""
        with self._autocast():
            hidden, _ = self._hidden_states(pack)
        return self._split_over_context(hidden[targets], lambda own, _: (self._scores(own),))
