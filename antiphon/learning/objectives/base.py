"""Base of the learners of the offline verbs: a loss of each pack that can also be measured without learning from it."""

import torch

from antiphon.core.types import Pack
from antiphon.learning.host_device_copy import sum_measures, to_floats
from antiphon.learning.pack_learner import PackLearner


class OfflineLearner(PackLearner):
    """A learner whose packs hold all that its loss needs."""

    def _loss(self, pack: Pack) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the pack's part of the update's loss, and measures [n] of the n things that the loss is a mean over."""
        raise NotImplementedError

    def _backward(self, pack: Pack) -> dict[str, torch.Tensor]:
        loss, measures = self._loss(pack)
        self.shards.backward(loss)
        return _sums(loss, measures)

    def measure(self, packs: list[Pack]) -> list[dict[str, float]]:
        """Return of each pack its part of the loss, the sums of its measures, and the number of `tokens` in these sums."""
        with torch.no_grad():
            return self.shards.run_packs(
                packs, self._pipeline_forward, lambda pack: to_floats(_sums(*self._loss(pack)))
            )


def _sums(loss: torch.Tensor, measures: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    (count,) = {len(values) for values in measures.values()}
    return sum_measures(loss, measures, count)
