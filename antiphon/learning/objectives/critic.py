"""Critics: models of a policy's kind that say one number of each state, the value."""

from collections.abc import Iterable

import torch
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from antiphon.algorithms.config import AlgorithmConfig
from antiphon.algorithms.losses import value_loss
from antiphon.core.errors import UnsupportedError
from antiphon.core.types import OLD_VALUE, RETURNS, Pack
from antiphon.learning.config import CriticConfig, LearnerConfig, OptimizerConfig
from antiphon.learning.host_device_copy import sum_measures
from antiphon.learning.model.loading import load_model
from antiphon.learning.model.logprobs import plain_logits
from antiphon.learning.pack_learner import PackLearner


class ScalarLearner(PackLearner):
    """Trains a model of a policy's kind with a head of one number: a sequence classifier of transformers with one label."""

    def _load(self) -> PreTrainedModel:
        model = load_model(
            self.model_path,
            attention=self.attention,
            device=self._load_device,
            kind=AutoModelForSequenceClassification,
            num_labels=1,
        )
        if not isinstance(getattr(model, "score", None), torch.nn.Linear):
            raise UnsupportedError(f"{type(model).__name__} has no head called score, as other decoders have")
        return model

    def begin(self, algorithm: AlgorithmConfig, optimizer: OptimizerConfig, total_updates: int) -> int:
        """Start a training phase; return the number of trained parameters."""
        if not self._layers_with_experts:  # the model may be dense where the policy has experts to balance
            algorithm = algorithm.model_copy(update={"expert_balance": 0.0})
        return super().begin(algorithm, optimizer, total_updates)

    def _parameters_beside_adapters(self) -> Iterable[torch.nn.Parameter]:
        return self.model.score.parameters()

    def _scores(self, rows: torch.Tensor) -> torch.Tensor:
        """The number [n] that the head says of each hidden state [n, H]."""
        return plain_logits(rows, self.score)[:, 0]

    @property
    def score(self) -> torch.Tensor:
        """The head [1, H]."""
        weight: torch.Tensor = self.model.score.weight
        return weight


class CriticLearner(ScalarLearner):
    """Trains a critic. Its score of a token is the value of the state in which the token was chosen."""

    def __init__(self, model_path: str, config: LearnerConfig, seed: int, critic: CriticConfig) -> None:
        super().__init__(model_path, config, seed)
        self.critic = critic

    def _load(self) -> PreTrainedModel:
        model = super()._load()
        # Before it has learned anything, it says nothing.
        model.score.weight = torch.nn.Parameter(torch.zeros(model.score.weight.shape, device=self.device))
        return model

    def _backward(self, pack: Pack) -> dict[str, torch.Tensor]:
        targets = self._targets(pack)
        (values,) = self.shards.run(self._forward, pack, targets)
        returns, old = (self._tensor(pack.streams[spec])[targets] for spec in (RETURNS, OLD_VALUE))
        loss = (
            self._tensor(pack.coefficients)[targets] * value_loss(values, old, returns, self.critic.value_clip)
        ).sum()
        if torch.is_grad_enabled():
            self.shards.backward(loss)
        with torch.no_grad():
            measures = {"value": values, "return": returns, "squared_error": (values - returns).square()}
            return sum_measures(loss, measures, len(values))

    def _forward(self, pack: Pack, targets: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Values of the states in which the loss tokens were chosen, [N]."""
        with self._autocast():
            hidden = self._hidden(pack, targets)
        return self._split_over_context(hidden, lambda own, _: (self._scores(own),))
