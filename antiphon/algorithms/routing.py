"""Routing replay: the experts that computed a token where it was sampled compute it where it is trained.

Engine and learner round differently, so the router of a mixture-of-experts model sends about a token in ten elsewhere in one of
them, and the log-probs differ by more than those of a dense model do. Replayed, the learner takes the engine's choice of
experts, and weighs them by its own router, which so has a gradient. Source: rollout routing replay, arXiv 2510.11370.
"""

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from antiphon.errors import UnsupportedError

_NAME = re.compile(r"Top[kK]Router$")
_TOPK = (torch.topk, Tensor.topk)


class Routers:
    """The routers of a model of transformers, one a layer that has experts: `...TopKRouter`, which score all experts of a layer
    and take the best k by `torch.topk`. Each is changed in place. `UnsupportedError` if the model has none."""

    def __init__(self, model: nn.Module) -> None:
        self.replayed: Tensor | None = (
            None  # [T, layers, k] numbers of experts in the next forwards; -1: the router's own
        )
        self._chosen: dict[int, Tensor] = {}
        routers = [module for module in model.modules() if _NAME.search(type(module).__name__)]
        if not routers:
            raise UnsupportedError(f"{type(model).__name__} has no routers to experts whose choices could be recorded")
        for layer, router in enumerate(routers):
            router.forward = self._observed(router, layer)

    def chosen(self) -> Tensor:
        """The experts that each token of the last forward was computed by, [T, layers, k]."""
        return torch.stack([self._chosen[layer] for layer in sorted(self._chosen)], dim=1)

    def _observed(self, router: Any, layer: int) -> Callable[..., Any]:
        forward, experts = router.forward, len(router.weight)

        def observed(*args: Any, **options: Any) -> Any:
            choice = _Choice(experts, None if self.replayed is None else self.replayed[:, layer])
            with choice:
                result = forward(*args, **options)
            if choice.chosen is None:
                raise UnsupportedError(f"{type(router).__name__} does not choose its experts by torch.topk")
            self._chosen[layer] = choice.chosen
            return result

        return observed


class _Choice(TorchFunctionMode):
    """Sees, and may change, what `torch.topk` finds among all `experts` of a layer."""

    def __init__(self, experts: int, given: Tensor | None) -> None:
        super().__init__()
        self.chosen: Tensor | None = None
        self._experts, self._given = experts, given

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func not in _TOPK or args[0].ndim != 2 or args[0].shape[1] != self._experts:
            return found
        values, indices = found
        if self._given is not None:
            indices = torch.where(self._given < 0, indices, self._given.to(indices.dtype))
            values = args[0].gather(1, indices)
        self.chosen = indices.detach()
        return torch.return_types.topk((values, indices))
