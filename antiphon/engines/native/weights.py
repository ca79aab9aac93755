"""Copying published tensors into a model."""

from collections import deque
from collections.abc import Collection, Iterable
from concurrent.futures import Future, wait

from torch import Tensor
from transformers import PreTrainedModel

from antiphon.core.errors import WeightsError
from antiphon.weights.digest import copy_threads

AHEAD = 8  # tensors that wait to be copied, at most

Named = Iterable[tuple[str, Tensor]]


def copy_weights(model: PreTrainedModel, tensors: Named) -> None:
    """Copy named `tensors` into the parameters of `model`, converting dtype and device.

    Every parameter must be among them, under any of its tied names or its name in checkpoint files; buffers are optional.
    Tensors are copied in turn, several at once on a CPU, so a failure leaves the model half written.

    Raises:
        WeightsError: A tensor is unknown, misshapen or missing; the message names it.
    """
    state: dict[str, Tensor] = model.state_dict(keep_vars=True)
    missing = {id(parameter): name for name, parameter in model.named_parameters()}
    copies: deque[Future[Tensor]] = deque()
    try:
        for name, tensor in _to_model_names(model, state.keys(), tensors):
            own = state[name]
            if own.shape != tensor.shape:
                shapes = f"of shape {tuple(tensor.shape)}, expected {tuple(own.shape)}"
                raise WeightsError(f"received tensor {name!r} {shapes}")
            missing.pop(id(own), None)
            if own.is_cuda:
                own.detach().copy_(tensor)
                continue
            copies.append(copy_threads().submit(own.detach().copy_, tensor))
            if len(copies) > AHEAD:
                copies.popleft().result()
    finally:  # after a failure, too: a copy that ends later would write into the next update
        wait(copies)
    for copy in copies:
        copy.result()
    if missing:
        names = sorted(missing.values())
        more = f" and {len(names) - 8} more" if len(names) > 8 else ""
        raise WeightsError(f"the update lacks {', '.join(names[:8])}{more}")


def _to_model_names(model: PreTrainedModel, known: Collection[str], tensors: Named) -> Named:
    """Tensors under the names of the model. Of files, which adapters are added to, those of experts have others."""
    of_files = {}
    for name, tensor in tensors:
        if name in known:
            yield name, tensor
        else:
            of_files[name] = tensor
    if not of_files:
        return
    part, found = type(model).from_pretrained(None, config=model.config, state_dict=of_files, output_loading_info=True)
    if unknown := sorted(found["unexpected_keys"]):
        raise WeightsError(f"received tensor {unknown[0]!r}, which the model does not have")
    for name, parameter in part.named_parameters():
        if name not in found["missing_keys"]:
            yield name, parameter
