"""Layers that keep less for the backward pass than transformers' own: same values, same gradients, less memory and time.

Two patterns that decoder models share are swapped in place: the root-mean-square norm, and the gated projection that ends
the feed-forward block, `down(silu(gate) * up)`. What they need again is cheap to compute again: no matrix product is. They
compute in the precision that the layers they replace do: of halves, norms in single precision.
"""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class _RMSNorm(torch.autograd.Function):
    """weight * x / sqrt(mean(x²) + eps); keeps x and one number a row. Source: Zhang and Sennrich 2019, eq. 4."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = _in_single(x)
        scale = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        normed = (wide * scale).to(x.dtype)
        return normed.mul_(weight) if x.dtype == weight.dtype else weight * normed

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        x, weight, scale = ctx.saved_tensors
        normed = _in_single(x) * scale
        grad_weight = (gradient * normed).reshape(-1, weight.numel()).sum(0).to(weight.dtype)
        grad = (gradient * weight).to(normed.dtype)
        inner = (grad * normed).mean(-1, keepdim=True)
        return grad.addcmul_(normed, inner, value=-1).mul_(scale).to(x.dtype), grad_weight, None


def _in_single(x: Tensor) -> Tensor:
    """Return `x` in single precision, or in its own if that is higher."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


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


class _Pattern(NamedTuple):
    makes: tuple[Make, ...]  # replacements, the best first
    width: int  # of the input
    dtypes: tuple[torch.dtype, ...]  # of inputs for which a replacement must compute the same


def use_memory_efficient_layers(model: nn.Module) -> None:
    """Swap the layers of `model` that are known, and turn out, to be of the two patterns. Others stay as they are."""
    found: dict[str | int, Make | None] = {}
    for module in model.modules():
        pattern = _pattern(module)
        if pattern is None:
            continue
        empty = any(parameter.is_meta for parameter in module.parameters())
        alike = _described(module) if empty else id(module)
        if alike not in found:
            tried = _with_numbers(module) if empty else module
            found[alike] = next((make for make in pattern.makes if _equal(tried, make, pattern)), None)
        if (make := found[alike]) is not None:
            module.forward = make(module)


def _pattern(module: Any) -> _Pattern | None:
    """Return the pattern that a module seems to be of."""
    kind = type(module).__name__
    if kind.endswith("RMSNorm") and hasattr(module, "variance_epsilon"):
        dtypes = (module.weight.dtype, torch.bfloat16)
        return _Pattern((_lean_norm, _lean_norm_but_of_halves), module.weight.shape[-1], dtypes)
    projections: list[Any] = [getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    if (
        kind.endswith("MLP")
        and all(isinstance(each, nn.Linear) for each in projections)
        and projections[-1].bias is None
    ):
        return _Pattern((_lean_feed_forward,), module.gate_proj.in_features, (module.gate_proj.weight.dtype,))
    return None


def _lean_norm(module: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: _RMSNorm.apply(x, module.weight, module.variance_epsilon)


def _lean_norm_but_of_halves(module: Any) -> Callable[[Tensor], Tensor]:
    """For norms that round halves elsewhere."""
    plain, lean = module.forward, _lean_norm(module)
    return lambda x: plain(x) if x.dtype in (torch.bfloat16, torch.float16) else lean(x)


def _lean_feed_forward(module: Any) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        gate = module.gate_proj(x)
        return _GatedProjection.apply(gate, module.up_proj(x), module.down_proj.weight.to(gate.dtype))

    return forward


def _described(module: nn.Module) -> str:
    """Return a key that is equal for modules which differ in weights alone; filling one of each kind takes seconds."""
    return f"{module} {[(name, value) for name, value in vars(module).items() if isinstance(value, int | float | str)]}"


def _equal(module: nn.Module, make: Make, pattern: _Pattern) -> bool:
    """Return True if the replacement computes what the module does."""
    device = next(module.parameters()).device
    probe = torch.linspace(-3, 3, 2 * pattern.width, device=device).view(2, pattern.width)
    with torch.no_grad():
        for dtype in pattern.dtypes:
            found, expected = make(module)(probe.to(dtype)), module(probe.to(dtype))
            if found.dtype != expected.dtype or not torch.allclose(found, expected, rtol=1e-4, atol=1e-5):
                return False
    return True


def _with_numbers(module: nn.Module) -> nn.Module:
    """A copy of a module that has no memory yet, with weights of its own."""
    found = copy.deepcopy(module).to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    for parameter in found.parameters():
        torch.nn.init.normal_(parameter, std=0.02, generator=generator)
    return found
