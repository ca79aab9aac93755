"""Distillation: a teacher says how likely each next token of a response is, and a student learns to say the same.

Both read the same packs. What the teacher says travels beside the tokens as streams: its likeliest tokens and their log-probs,
or with `top_k: 0` those of the whole vocabulary.
"""

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint

from antiphon.algorithms.distillation_losses import DIVERGENCES, group_outcomes
from antiphon.algorithms.offline_config import DistillationConfig
from antiphon.core.types import TEACHER_DISTRIBUTION, TEACHER_TOKENS, Pack, Streams
from antiphon.learning.config import LearnerConfig
from antiphon.learning.mesh import copy_to_group
from antiphon.learning.model.logprobs import plain_logits
from antiphon.learning.objectives.base import OfflineLearner
from antiphon.learning.torch_learner import TorchLearner

LEAST = -1e4  # log-probs of what a model rules out: finite, and nothing to an exponential


class _Distilling(TorchLearner):
    """A model that is asked for distributions.

    `vocabulary` is how many tokens there are: rows of the head beyond are padding, of which two models of one tokenizer may
    have different numbers.
    """

    def __init__(
        self, model_path: str, config: LearnerConfig, seed: int, distillation: DistillationConfig, vocabulary: int
    ) -> None:
        super().__init__(model_path, config, seed)
        self.distillation = distillation
        self.vocabulary = vocabulary

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, V] of hidden states [n, H], also where each rank has some rows of the head."""
        if (split := self.shards.vocabulary) is None:
            return plain_logits(hidden, self.head[: self.vocabulary])
        own = plain_logits(copy_to_group(hidden, split.group), self.head)
        return split.gather(own.T)[: self.vocabulary].T


class Teacher(_Distilling):
    """Says, and does not learn."""

    def teach(self, packs: list[Pack]) -> list[Streams]:
        """Return `TEACHER_TOKENS` and `TEACHER_DISTRIBUTION` of each pack, 0 where no token is in the loss."""
        with torch.no_grad():
            return self.shards.run_packs(packs, self._pipeline_forward, self._teach)

    def _teach(self, pack: Pack) -> Streams:
        streams = {}
        said = self.shards.run(self._distributions, pack)
        for spec, rows in zip((TEACHER_TOKENS, TEACHER_DISTRIBUTION), said, strict=True):
            found = rows.cpu().numpy()
            streams[spec] = np.zeros((len(pack.tokens), found.shape[1]), dtype=found.dtype)
            streams[spec][pack.loss_mask] = found
        return Streams(streams)

    def _distributions(self, pack: Pack) -> tuple[torch.Tensor, ...]:
        """Return the two streams of the loss tokens, [N, K] and [N, K + 1]."""
        with self._autocast():
            chunks = self._hidden(pack, self._targets(pack)).split(self.config.logits_chunk)
            return tuple(map(torch.cat, zip(*map(self._distribution, chunks), strict=True)))

    def _distribution(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs = (self._logits(hidden) / self.distillation.teacher_temperature).log_softmax(-1)
        some = self.distillation.top_k if self.distillation.top_k < self.vocabulary else 0
        tokens = logprobs.topk(some).indices
        said = group_outcomes(logprobs, tokens) if some else logprobs
        return tokens.int(), said.clamp(min=LEAST).float()


class DistillationLearner(OfflineLearner, _Distilling):
    """Trains the student on (1 - w) · divergence - w · log-likelihood of each response token, w the `sft_weight`."""

    def _loss(self, pack: Pack) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        targets = self._targets(pack)
        divergence, likelihood, agreed = self.shards.run(self._compared_with_teacher, pack, targets)
        weight = self.distillation.sft_weight
        mixed = (1 - weight) * divergence + weight * likelihood
        loss = (self._tensor(pack.coefficients)[targets] * mixed).sum()
        return loss, {"divergence": divergence, "likelihood_loss": likelihood, "accuracy": agreed}

    def _compared_with_teacher(self, pack: Pack, targets: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return divergence, negative log-likelihood and agreement of the loss tokens of a pack, [N] each."""
        given = (pack.tokens, *(pack.streams[spec] for spec in (TEACHER_TOKENS, TEACHER_DISTRIBUTION)))
        tokens, likeliest, teacher = (self._tensor(array)[targets] for array in given)

        def compare(hidden: torch.Tensor, here: slice) -> list[torch.Tensor]:
            arrays = (hidden, tokens[here].long(), likeliest[here].long(), teacher[here])
            # Logits of a chunk are computed again for the backward pass: those of all tokens never exist at once.
            parts = [
                checkpoint(self._compared, *chunk, use_reentrant=False)
                for chunk in zip(*(array.split(self.config.logits_chunk) for array in arrays), strict=True)
            ]
            return [torch.cat(column) for column in zip(*parts, strict=True)]

        with self._autocast():
            return self._split_over_context(self._hidden(pack, targets), compare)

    def _compared(
        self,
        hidden: torch.Tensor,  # [n, H]
        tokens: torch.Tensor,  # [n] of the response
        likeliest: torch.Tensor,  # [n, K]
        teacher: torch.Tensor,  # [n, K + 1] log-probs; [n, V] where K is 0
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The divergence, the negative log-likelihood, and whether both models hold the same token most likely, [n] each."""
        distillation, some = self.distillation, likeliest.shape[1]
        logits = self._logits(hidden)
        student = (logits / distillation.student_temperature).log_softmax(-1)
        student = (group_outcomes(student, likeliest) if some else student).clamp(min=LEAST)
        divergence = DIVERGENCES[distillation.divergence](teacher.to(student.dtype), student, distillation.skew)
        likelihood = -logits.log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
        agreed = logits.argmax(-1) == (likeliest[:, 0] if some else teacher.argmax(-1))
        return divergence, likelihood, agreed.float()
