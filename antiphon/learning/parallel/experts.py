"""Expert parallelism: the tokens of all ranks go to where their experts are, and come back."""

from collections.abc import Callable
from typing import Any

import torch
from torch import distributed, nn

from antiphon.learning.mesh import all_to_all_rows


def dispatch_to_experts(module: Any, group: Any) -> Callable[..., torch.Tensor]:
    """The forward of a layer's experts, of which each rank of a group has as many as any other, one rank's after another's.

    All ranks call it at once, each with tokens [T, H] of its own, their experts and the weights of these [T, k].
    """
    compute, here, ranks = module.forward, module.num_experts, group.size()

    def forward(hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        order = index.flatten().argsort(stable=True)
        chosen, token = index.flatten()[order], order // index.shape[1]
        leaving = (chosen // here).bincount(minlength=ranks)
        coming = torch.empty_like(leaving)
        distributed.all_to_all_single(coming, leaving, group=group)
        leave, come = leaving.tolist(), coming.tolist()
        rows = all_to_all_rows(hidden[token], group, leave, come)
        local = all_to_all_rows((chosen % here)[:, None], group, leave, come)
        if len(rows):
            found = compute(rows, local, torch.ones_like(local, dtype=rows.dtype))
        else:  # that all may go backwards at once, everything has a gradient
            found = rows + sum(parameter.sum() * 0 for parameter in nn.Module.parameters(module))
        back = all_to_all_rows(found, group, come, leave) * weights.flatten()[order][:, None].to(found.dtype)
        return torch.zeros_like(hidden).index_add(0, token, back.to(hidden.dtype))

    return forward
