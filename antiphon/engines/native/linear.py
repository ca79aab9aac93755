"""Linear layers of a few rows on a CPU.

A decode step multiplies tens of rows by large weights. The library's product for x·Wᵀ then reaches about half of its own
peak; written as W·xᵀ, the same numbers come 1.2 to 1.8 times faster (float32, 8 to 96 rows, weights of a quarter million
elements and more; measured on AVX-512 machines, see benchmarks/engine.py). The result is a transposed view.
"""

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

_ROWS = range(8, 97)
_ELEMENTS = 2**18


def speed_up_linears(model: nn.Module) -> None:
    """Make the large linear layers of a CPU model multiply few rows as W·xᵀ."""
    for module in model.modules():
        if type(module) is nn.Linear and module.weight.device.type == "cpu" and module.weight.numel() >= _ELEMENTS:
            module.forward = MethodType(_forward, module)


def _forward(self: Any, x: Tensor) -> Tensor:
    if x.dim() != 3 or x.shape[0] != 1 or x.shape[1] not in _ROWS:
        return linear(x, self.weight, self.bias)
    product = torch.mm(self.weight, x[0].t()).t()[None]
    return product if self.bias is None else product + self.bias
