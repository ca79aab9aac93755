"""Copying published tensors into a model."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from antiphon.errors import WeightsError


def copy_weights(model: nn.Module, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Copy named `tensors` into the parameters of `model`, converting dtype and device.

    Every parameter must come, under one of its names if it is tied to another; buffers may. `WeightsError` names what is
    unknown, misshapen or missing. Tensors are taken one at a time, so a failure leaves the model half written.
    """
    state: dict[str, Tensor] = model.state_dict(keep_vars=True)
    missing = {id(parameter): name for name, parameter in model.named_parameters()}
    for name, tensor in tensors:
        own = state.get(name)
        if own is None:
            raise WeightsError(f"received tensor {name!r}, which the model does not have")
        if own.shape != tensor.shape:
            raise WeightsError(f"received tensor {name!r} of shape {tuple(tensor.shape)}, expected {tuple(own.shape)}")
        with torch.no_grad():
            own.copy_(tensor)
        missing.pop(id(own), None)
    if missing:
        names = sorted(missing.values())
        more = f" and {len(names) - 8} more" if len(names) > 8 else ""
        raise WeightsError(f"the update lacks {', '.join(names[:8])}{more}")
