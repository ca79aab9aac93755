"""Log-probabilities and entropies of chosen tokens, without the logits of all tokens ever existing at once."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import distributed

from antiphon.learning.mesh import gather_from_group

EXCLUDED = -1e30  # logit of a token that cannot be sampled: its probability is 0, and 0 times it is no NaN


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The rows of an embedding or a head that this rank of a group has: those from `start` on. Others have the others."""

    group: Any
    sizes: Sequence[int]  # rows of each rank

    @property
    def start(self) -> int:
        """Number of the first row that this rank has."""
        return sum(self.sizes[: self.group.rank()])

    def rows(self, tokens: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the places of tokens among this rank's rows, 0 for those that are elsewhere, and which are here."""
        rows = tokens - self.start
        there = (rows >= 0) & (rows < count)
        return rows.where(there, 0), there

    def gather(self, own: torch.Tensor) -> torch.Tensor:
        """Return the rows [V, n] of all ranks, from those of this rank, which get the gradient of theirs."""
        most = max(self.sizes)
        parts = gather_from_group(F.pad(own, (0, 0, 0, most - len(own))), self.group).split(most)
        return torch.cat([part[:size] for part, size in zip(parts, self.sizes, strict=True)])


def token_logprobs(
    hidden: torch.Tensor,  # [N, H]
    weight: torch.Tensor,  # [V, H] of the language model head
    targets: torch.Tensor,  # [N]
    temperatures: torch.Tensor,  # [N], positive
    chunk: int,
    vocabulary: Vocabulary | None = None,
    support: torch.Tensor | None = None,  # [N, K], see `SAMPLING_SUPPORT`
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-softmax of `hidden @ weight.T / temperature` at the targets, and the entropies of the same distributions, [N] each.

    A distribution is that of its support alone, if it has one.

    Differentiable in hidden and weight. `chunk` bounds how many tokens' logits exist; up to that many are kept for the backward
    pass, beyond it they are computed again. Where each rank has some rows of the head, `vocabulary` says which: no rank ever
    sees the logits of the others. Under autocast matrix products, those of the backward pass too, are of the precision that it
    chooses, and all else is of single precision.
    """
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):
        hidden = hidden.to(torch.get_autocast_dtype(kind))
    with torch.autocast(kind, enabled=False):
        result: tuple[torch.Tensor, torch.Tensor] = _TokenLogprobs.apply(
            hidden, weight, targets, temperatures, chunk, vocabulary, support
        )
    return result


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        temperatures: torch.Tensor,
        chunk: int,
        vocabulary: Vocabulary | None,
        support: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scale = temperatures.to(_precision(hidden.dtype)).reciprocal()
        targets, there = (targets, None) if vocabulary is None else vocabulary.rows(targets, len(weight))
        head = weight.to(hidden.dtype)
        logprobs, entropies, normalisers = [], [], []
        probabilities = None
        for part in range(0, len(hidden), chunk):
            span = slice(part, part + chunk)
            logits = _logits(hidden[span], head, scale[span])
            _exclude(logits, support, span, vocabulary)
            normaliser = _normaliser(logits, vocabulary)
            probabilities = (logits - normaliser[:, None]).exp_()
            chosen = logits.gather(-1, targets[span, None])[:, 0]
            expected = torch.einsum("nv,nv->n", probabilities, logits)
            if vocabulary is not None and there is not None:
                chosen, expected = both = torch.stack([chosen * there[span], expected])
                distributed.all_reduce(both, group=vocabulary.group)
            logprobs.append(chosen - normaliser)
            entropies.append(normaliser - expected)
            normalisers.append(normaliser)
        kept = probabilities if len(hidden) <= chunk else None
        if not normalisers:
            logprobs = entropies = normalisers = [scale]  # of nothing
        entropy = torch.cat(entropies)
        ctx.save_for_backward(hidden, weight, targets, there, scale, torch.cat(normalisers), entropy, kept)
        ctx.chunk, ctx.vocabulary, ctx.support = chunk, vocabulary, support
        ctx.set_materialize_grads(False)
        return torch.cat(logprobs), entropy

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        grad_logprobs, grad_entropies = gradients
        hidden, weight, targets, there, scale, normalisers, entropies, kept = ctx.saved_tensors
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(entropies)
        head = weight.to(hidden.dtype)
        grad_hidden, grad_weight = torch.empty_like(hidden), None
        of_targets = grad_logprobs if there is None else grad_logprobs * there
        for part in range(0, len(hidden), ctx.chunk):
            span = slice(part, part + ctx.chunk)
            p = kept
            if p is None:
                p = _logits(hidden[span], head, scale[span])
                _exclude(p, ctx.support, span, ctx.vocabulary)
                p.sub_(normalisers[span, None]).exp_()
            # d logprob_y / d z = onehot_y - p;  d entropy / d z = -p (log p + entropy)
            gradient = p * -grad_logprobs[span, None]
            if grad_entropies is not None:
                gradient.sub_((torch.xlogy(p, p) + p * entropies[span, None]) * grad_entropies[span, None])
            gradient.scatter_add_(1, targets[span, None], of_targets[span, None])
            gradient = gradient.mul_(scale[span, None]).to(hidden.dtype)
            grad_hidden[span] = gradient @ head
            if not ctx.needs_input_grad[1]:
                continue
            if grad_weight is None:
                grad_weight = (gradient.T @ hidden[span]).to(weight.dtype)
            elif weight.dtype == hidden.dtype:
                grad_weight.addmm_(gradient.T, hidden[span])
            else:
                grad_weight += gradient.T @ hidden[span]
        if ctx.vocabulary is not None:
            distributed.all_reduce(grad_hidden, group=ctx.vocabulary.group)
        if grad_weight is None and ctx.needs_input_grad[1]:
            grad_weight = torch.zeros_like(weight)
        return grad_hidden, grad_weight, *[None] * 5


def _normaliser(logits: torch.Tensor, vocabulary: Vocabulary | None) -> torch.Tensor:
    """The logarithm of the sum of the exponentials of all logits, of which [n, V] are here, [n]."""
    if vocabulary is None:
        return logits.logsumexp(-1)
    most = logits.amax(-1)
    distributed.all_reduce(most, distributed.ReduceOp.MAX, group=vocabulary.group)
    total = (logits - most[:, None]).exp_().sum(-1)
    distributed.all_reduce(total, group=vocabulary.group)
    return total.log_() + most


def _exclude(logits: torch.Tensor, support: torch.Tensor | None, span: slice, vocabulary: Vocabulary | None) -> None:
    """Lower the logits [n, V] of what is not in the support of the tokens `span`, if they have one, so that nothing is left."""
    if support is None:
        return
    own, count = support[span].long(), logits.shape[1]
    start = 0 if vocabulary is None else vocabulary.start
    columns = own - start  # 0 is not a token of this rank, as are those above `count`
    columns = columns.where((columns > 0) & (columns <= count), 0)
    kept = torch.zeros(len(own), count + 1, dtype=torch.bool, device=logits.device).scatter_(1, columns, True)[:, 1:]
    logits.masked_fill_(~kept & (own > 0).any(1, keepdim=True), EXCLUDED)


def plain_logits(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`hidden @ weight.T` [n, V], in float32 at least."""
    logits = hidden @ weight.T
    return logits.to(_precision(logits.dtype))


def _logits(hidden: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Tempered logits [n, V]."""
    return plain_logits(hidden, weight).mul_(scale[:, None])


def _precision(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
