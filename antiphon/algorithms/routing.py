"""Routers of a mixture of experts in training: routing replay and load balancing.

Routing replay: the experts that computed a token where it was sampled compute it where it is trained.

Engine and learner round differently, so the router of a mixture-of-experts model sends about a token in ten elsewhere in one of
them, and the log-probs differ by more than those of a dense model do. Replayed, the learner takes the engine's choice of
experts, and weighs them by its own router, which so has a gradient. Source: rollout routing replay, arXiv 2510.11370.

The balance of each sequence over the experts is a loss that each router adds where its choice leaves it, so that it needs no
way of its own through a model that is cut into stages. Source: DeepSeek-V3, arXiv 2412.19437, equations 17 to 20.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from antiphon.core.errors import UnsupportedError

_NAME = re.compile(r"Top[kK]Router$")
_TOPK = (torch.topk, Tensor.topk)


def balance_loss(scores: Tensor, chosen: Tensor, members: Tensor) -> Tensor:
    """Return how unevenly the tokens of each sequence are spread over the experts, summed over sequences; 1 each where even.

    Args:
        scores: Router scores, [T, experts].
        chosen: 1 for experts that were taken and 0 for others, [T, experts].
        members: 1 for the tokens of each sequence, [S, T].
    """
    dtype = torch.promote_types(scores.dtype, torch.float32)
    with torch.autocast(scores.device.type, enabled=False):
        scores, chosen, members = scores.to(dtype), chosen.to(dtype), members.to(dtype)
        if (scores < 0).any():  # logits; else probabilities, or the sigmoids of DeepSeek-V3
            shares = F.softmax(scores, -1)
        else:
            shares = scores / scores.sum(-1, keepdim=True).clamp_min(torch.finfo(dtype).tiny)
        tokens = members.sum(1, keepdim=True)
        taken = members @ chosen / (tokens * chosen.sum(1).max())
        return scores.shape[1] * (taken * (members @ shares / tokens)).sum()


@dataclass(frozen=True, slots=True)
class Balance:
    """The balance loss that routers add in the next forward."""

    members: Tensor  # [S, T], see `balance_loss`
    weight: float  # of a sequence
    gather: Callable[[Tensor], Tensor]  # rows of all tokens, from those that are computed here
    found: dict[int, Tensor] = field(default_factory=dict)  # of each layer, the `balance_loss`

    def attach(self, layer: int, values: Tensor, scores: Tensor, indices: Tensor) -> Tensor:
        """Return `values` so that their gradient also brings that of the balance loss of a layer."""
        chosen = torch.zeros_like(scores).scatter(1, indices, 1.0)
        scores, chosen = self.gather(torch.cat([scores, chosen], 1)).chunk(2, 1)
        loss = balance_loss(scores, chosen, self.members)
        self.found[layer] = loss.detach()  # the same, where a layer is computed again
        attached: Tensor = _Attached.apply(values, self.weight * loss)
        return attached


class _Attached(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, values: Tensor, loss: Tensor) -> Tensor:
        return values.clone()  # which routers write to

    @staticmethod
    def backward(context: Any, *gradient: Any) -> Any:
        return gradient[0], torch.ones_like(gradient[0][0, 0])


def find_routers(model: nn.Module) -> list[nn.Module]:
    """Return the routers of a transformers model, one for each layer with experts, in order."""
    return [module for module in model.modules() if _NAME.search(type(module).__name__)]


class Routers:
    """Replays and balances the choices of routers (`...TopKRouter`), which take the best k experts by `torch.topk`.

    Each router is changed in place.

    Raises:
        UnsupportedError: There are no routers.
    """

    def __init__(self, routers: Sequence[nn.Module]) -> None:
        self.replayed: Tensor | None = (
            None  # [T, layers, k] numbers of experts in the next forwards; -1: the router's own
        )
        self.balance: Balance | None = None
        self._chosen: dict[int, Tensor] = {}
        if not routers:
            raise UnsupportedError("the model has no routers to experts whose choices could be recorded")
        for layer, router in enumerate(routers):
            router.forward = self._observed(router, layer)

    def chosen(self) -> Tensor:
        """Return the experts that computed each token of the last forward, [T, layers, k]."""
        return torch.stack([self._chosen[layer] for layer in sorted(self._chosen)], dim=1)

    def _observed(self, router: Any, layer: int) -> Callable[..., Any]:
        forward = router.forward

        def observed(*args: Any, **options: Any) -> Any:
            balance = self.balance if torch.is_grad_enabled() else None
            biases = (getattr(router, bias, None) for bias in ("e_score_correction_bias", "expert_bias"))
            if balance is not None and any(bias is not None for bias in biases):
                name = type(router).__name__
                raise UnsupportedError(
                    f"{name} balances its experts by a bias of its own: not with algorithm.expert_balance"
                )
            attach = None if balance is None else partial(balance.attach, layer)
            experts = len(router.weight)  # whole within its forward alone, where ranks have pieces of it
            choice = _Choice(experts, None if self.replayed is None else self.replayed[:, layer], attach)
            with choice:
                result = forward(*args, **options)
            if choice.chosen is None:
                raise UnsupportedError(f"{type(router).__name__} does not choose its experts by torch.topk")
            self._chosen[layer] = choice.chosen
            return result

        return observed


class _Choice(TorchFunctionMode):
    """Intercepts `torch.topk` over all `experts` of a layer: records the choice, and may replace it."""

    def __init__(self, experts: int, given: Tensor | None, attach: Callable[..., Tensor] | None) -> None:
        super().__init__()
        self.chosen: Tensor | None = None
        self._experts, self._given, self._attach = experts, given, attach

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func not in _TOPK or args[0].ndim != 2 or args[0].shape[1] != self._experts:
            return found
        values, indices = found
        if self._given is not None:
            indices = torch.where(self._given < 0, indices, self._given.to(indices.dtype))
            values = args[0].gather(1, indices)
        if self._attach is not None:
            values = self._attach(values, args[0], indices)
        self.chosen = indices.detach()
        return torch.return_types.topk((values, indices))
