"""Log-probabilities and entropies of chosen tokens, without the logits of all tokens ever existing at once."""

from typing import Any

import torch


def token_logprobs(
    hidden: torch.Tensor,  # [N, H]
    weight: torch.Tensor,  # [V, H] of the language model head
    targets: torch.Tensor,  # [N]
    temperatures: torch.Tensor,  # [N], positive
    chunk: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-softmax of `hidden @ weight.T / temperature` at the targets, and the entropies of the same distributions, [N]
    each. Differentiable in hidden and weight. `chunk` bounds how many tokens' logits exist; up to that many are kept
    for the backward pass, beyond it they are computed again."""
    result: tuple[torch.Tensor, torch.Tensor] = _TokenLogprobs.apply(hidden, weight, targets, temperatures, chunk)
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
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scale = temperatures.to(_precision(hidden.dtype)).reciprocal()
        logprobs, entropies, normalisers = [], [], []
        for part in range(0, len(hidden), chunk):
            span = slice(part, part + chunk)
            logits = _logits(hidden[span], weight, scale[span])
            normaliser = logits.logsumexp(-1)
            logprobs.append(logits.gather(-1, targets[span, None])[:, 0] - normaliser)
            probabilities = (logits - normaliser[:, None]).exp_()
            entropies.append(normaliser - torch.einsum("nv,nv->n", probabilities, logits))
            normalisers.append(normaliser)
        kept = probabilities if len(hidden) <= chunk else None
        entropy = torch.cat(entropies)
        ctx.save_for_backward(hidden, weight, targets, scale, torch.cat(normalisers), entropy, kept)
        ctx.chunk = chunk
        return torch.cat(logprobs), entropy

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_logprobs, grad_entropies = gradients
        hidden, weight, targets, scale, normalisers, entropies, kept = ctx.saved_tensors
        with_entropy = bool(grad_entropies.any())
        grad_hidden, grad_weight = torch.empty_like(hidden), None
        for part in range(0, len(hidden), ctx.chunk):
            span = slice(part, part + ctx.chunk)
            p = kept
            if p is None:
                p = _logits(hidden[span], weight, scale[span]).sub_(normalisers[span, None]).exp_()
            # d logprob_y / d z = onehot_y - p;  d entropy / d z = -p (log p + entropy)
            gradient = p * -grad_logprobs[span, None]
            if with_entropy:
                gradient.sub_((torch.xlogy(p, p) + p * entropies[span, None]) * grad_entropies[span, None])
            gradient.scatter_add_(1, targets[span, None], grad_logprobs[span, None])
            gradient = gradient.mul_(scale[span, None]).to(hidden.dtype)
            grad_hidden[span] = gradient @ weight
            if not ctx.needs_input_grad[1]:
                continue
            if grad_weight is None:
                grad_weight = gradient.T @ hidden[span]
            else:
                grad_weight.addmm_(gradient.T, hidden[span])
        return grad_hidden, grad_weight, None, None, None


def plain_logits(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`hidden @ weight.T` [n, V], in float32 at least."""
    logits = hidden @ weight.T
    return logits.to(_precision(logits.dtype))


def _logits(hidden: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Tempered logits [n, V]."""
    return plain_logits(hidden, weight).mul_(scale[:, None])


def _precision(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
