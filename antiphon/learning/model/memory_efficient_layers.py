"""Layers that keep less for the backward pass than transformers' own: same values, same gradients, less memory and time.

Two patterns that decoder models share are swapped in place: the root-mean-square norm, and the gated projection that ends
the feed-forward block, `down(silu(gate) * up)`. What they need again is cheap to compute again: no matrix product is. Under
autocast they compute in the precision that the layers they replace do.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class _RMSNorm(torch.autograd.Function):
    """weight * x / sqrt(mean(x²) + eps); keeps x and one number a row. Source: Zhang and Sennrich 2019, eq. 4."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        scale = x.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (x * scale).mul_(weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        x, weight, scale = ctx.saved_tensors
        normed = x * scale
        grad_weight = (gradient * normed).reshape(-1, weight.numel()).sum(0)
        grad = gradient * weight
        inner = (grad * normed).mean(-1, keepdim=True)
        return grad.addcmul_(normed, inner, value=-1).mul_(scale), grad_weight, None


class _GatedProjection(torch.autograd.Function):
    """(silu(gate) * up) @ weight.T; keeps gate and up. Source: Shazeer 2020, "GLU variants", SwiGLU."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up, weight)
        return F.silu(gate).mul_(up) @ weight.T

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        gate, up, weight = ctx.saved_tensors
        activated = F.silu(gate)
        flat = gradient.reshape(-1, gradient.shape[-1])
        grad_weight = flat.T @ (activated * up).reshape(-1, up.shape[-1])
        inner = gradient @ weight
        grad_up = inner * activated
        grad_gate = torch.ops.aten.silu_backward(inner.mul_(up), gate)
        return grad_gate, grad_up, grad_weight


Make = Callable[[Any], Callable[[Tensor], Tensor]]  # the forward to use instead, of a module


def use_memory_efficient_layers(model: nn.Module) -> None:
    """Swap the layers of `model` that are known, and turn out, to be of the two patterns. Others stay as they are."""
    found: dict[str | int, bool] = {}
    for module in model.modules():
        make, width = _pattern(module)
        if make is None:
            continue
        empty = any(parameter.is_meta for parameter in module.parameters())
        alike = _described(module) if empty else id(module)
        if alike not in found:
            found[alike] = _equal(_with_numbers(module) if empty else module, make, width)
        if found[alike]:
            module.forward = make(module)


def _pattern(module: Any) -> tuple[Make | None, int]:
    """Return the replacement of a module that seems to be of a pattern, and the width of its input."""
    kind = type(module).__name__
    if kind.endswith("RMSNorm") and hasattr(module, "variance_epsilon"):
        return _lean_norm, module.weight.shape[-1]
    projections: list[Any] = [getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    if (
        kind.endswith("MLP")
        and all(isinstance(each, nn.Linear) for each in projections)
        and projections[-1].bias is None
    ):
        return _lean_feed_forward, module.gate_proj.in_features
    return None, 0


def _lean_norm(module: Any) -> Callable[[Tensor], Tensor]:
    plain = module.forward

    def forward(x: Tensor) -> Tensor:
        if x.dtype in (torch.bfloat16, torch.float16):  # of which a norm of transformers computes in single precision
            return plain(x)
        return _RMSNorm.apply(x, module.weight, module.variance_epsilon)

    return forward


def _lean_feed_forward(module: Any) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        gate = module.gate_proj(x)
        return _GatedProjection.apply(gate, module.up_proj(x), module.down_proj.weight.to(gate.dtype))

    return forward


def _described(module: nn.Module) -> str:
    """Return a key that is equal for modules which differ in weights alone; filling one of each kind takes seconds."""
    return f"{module} {[(name, value) for name, value in vars(module).items() if isinstance(value, int | float | str)]}"


def _equal(module: nn.Module, make: Make, width: int) -> bool:
    """Return True if the replacement computes what the module does."""
    weight = next(module.parameters())
    with torch.no_grad():
        probe = torch.linspace(-3, 3, 2 * width, dtype=weight.dtype, device=weight.device).view(2, width)
        return torch.allclose(make(module)(probe), module(probe), rtol=1e-4, atol=1e-5)


def _with_numbers(module: nn.Module) -> nn.Module:
    """A copy of a module that has no memory yet, with weights of its own."""
    found = copy.deepcopy(module).to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    for parameter in found.parameters():
        torch.nn.init.normal_(parameter, std=0.02, generator=generator)
    return found
