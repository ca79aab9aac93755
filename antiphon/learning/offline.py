"""What the learners of the offline verbs share: a loss of each pack that can also be looked at without learning from it."""

from collections import defaultdict

import torch

from antiphon.learning.torch_learner import PackLearner
from antiphon.types import Pack, TrainBatch


class OfflineLearner(PackLearner):
    """A learner whose packs hold all that its loss needs."""

    def _loss(self, pack: Pack) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The pack's part of the update's loss, and measures [n] of each of the n things that the loss is a mean over."""
        raise NotImplementedError

    def _backward(self, pack: Pack) -> dict[str, float]:
        loss, measures = self._loss(pack)
        loss.backward()
        return _sums(loss, measures)

    def evaluate(self, batch: TrainBatch) -> dict[str, float]:
        """The loss and the measures of a batch of one update, as `step` has them, and nothing is changed."""
        totals: dict[str, float] = defaultdict(float)
        (update,) = batch.updates
        with torch.no_grad():
            for pack in (pack for rank in update.packs for pack in rank):
                for name, value in _sums(*self._loss(pack)).items():
                    totals[name] += value
        count, loss = totals.pop("tokens"), totals.pop("loss")
        return {"loss": loss} | {name: value / count for name, value in totals.items()}


def _sums(loss: torch.Tensor, measures: dict[str, torch.Tensor]) -> dict[str, float]:
    (count,) = {len(values) for values in measures.values()}
    sums = {name: values.detach().sum().item() for name, values in measures.items()}
    return sums | {"loss": loss.item(), "tokens": float(count)}
