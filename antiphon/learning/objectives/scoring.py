"""Log-probs of given texts, and whether a model would have written them greedily: what benchmarks ask of a model."""

import torch

from antiphon.core.types import FloatArray, Pack
from antiphon.learning.model.logprobs import plain_logits
from antiphon.learning.torch_learner import TorchLearner


class Scorer(TorchLearner):
    """A policy on one rank that is asked and does not learn."""

    def score(self, packs: list[Pack]) -> list[FloatArray]:
        """Return the log-prob of each loss token, and 1 where it is the likeliest, 0 elsewhere: [T, 2] a pack."""
        return self._query(packs, lambda outputs: torch.stack(outputs, -1))

    def _forward(self, pack: Pack, targets: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return log-probs, and whether they are the highest of their distributions, [N] each."""
        tokens = self._tensor(pack.tokens).long()[targets]
        with self._autocast():
            hidden = self._hidden(pack, targets)
            parts = [
                self._compare(*part)
                for part in zip(
                    hidden.split(self.config.logits_chunk), tokens.split(self.config.logits_chunk), strict=True
                )
            ]
        logprobs, likeliest = (torch.cat(column) for column in zip(*parts, strict=True))
        return logprobs, likeliest

    def _compare(self, hidden: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = plain_logits(hidden, self.head)
        logprobs = logits.log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
        return logprobs, (logits.argmax(-1) == tokens).to(logprobs.dtype)
