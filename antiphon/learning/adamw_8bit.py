"""AdamW whose moments take one byte each. Importing it needs bitsandbytes, whose kernels it uses.

Source: Dettmers et al. 2022, "8-bit optimizers via block-wise quantization". Moments of small parameters stay in float32.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from bitsandbytes import functional
from torch.distributed.tensor import DTensor
from typing_extensions import override

BLOCK = 256  # moments that have a scale in common; fixed in the kernels
SMALLEST = 4096  # parameters of a tensor whose moments are quantised
SIGNED = {"exp_avg": True, "exp_avg_sq": False}  # the moments, under torch's names


class AdamW8bit(torch.optim.AdamW):
    """Keeps the moments of each large parameter in blocks of bytes; of a divided one, those of this rank's piece."""

    @override
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and _local(parameter).numel() >= SMALLEST:
                    self._step(parameter, group)
                    parameter.grad = None
        return super().step(closure)  # all others

    def _step(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        if not (state := self.state[parameter]):
            zeros = torch.zeros_like(_local(parameter))
            self.restore(parameter, {"step": torch.zeros(())} | dict.fromkeys(SIGNED, zeros))
            state = self.state[parameter]
        state["step"] += 1
        first, second = (state[key] for key in SIGNED)
        functional.optimizer_update_8bit_blockwise(
            "adam",
            _local(parameter.grad),
            _local(parameter.detach()),
            first,
            second,
            *group["betas"],
            beta3=0.0,
            alpha=0.0,
            eps=group["eps"],
            step=state["step"],
            lr=group["lr"],
            qmap1=state["exp_avg_values"],
            qmap2=state["exp_avg_sq_values"],
            absmax1=state["exp_avg_scales"],
            absmax2=state["exp_avg_sq_scales"],
            weight_decay=group["weight_decay"],
        )

    def restore(
        self, parameter: torch.Tensor, state: dict[str, torch.Tensor], scales: Mapping[str, torch.Tensor] | None = None
    ) -> None:
        """Set the state of a parameter from a step count and moments in float32.

        With the `scales` from which these moments were computed, their bytes are those that they were computed from.
        """
        if _local(parameter).numel() < SMALLEST:
            self.state[parameter] = state
            return
        found: dict[str, Any] = {"step": int(state["step"])}
        for key, signed in SIGNED.items():
            values = functional.create_dynamic_map(signed).to(parameter.device)  # that the bytes stand for
            moment = _local(state[key])
            if scales is None:
                codes, quantized = functional.quantize_blockwise(moment, values, blocksize=BLOCK)
                own = quantized.absmax
            else:
                own = scales[key].to(parameter.device)
                codes = _find_codes(moment, own, values)
            found |= {key: codes, f"{key}_scales": own, f"{key}_values": values}
        self.state[parameter] = found

    def scales(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the scales of the blocks of each moment; empty if they are in float32."""
        state = self.state.get(parameter, {})
        return {key: state[f"{key}_scales"] for key in SIGNED if f"{key}_scales" in state}

    def read(self, parameter: torch.Tensor, key: str) -> torch.Tensor:
        """Return the step count of a parameter or a moment, in float32."""
        state = self.state[parameter]
        if isinstance(state["step"], torch.Tensor):
            return state[key]
        if key == "step":
            return torch.tensor(float(state["step"]))
        given = {"absmax": state[f"{key}_scales"], "code": state[f"{key}_values"], "blocksize": BLOCK}
        moment = functional.dequantize_blockwise(state[key], **given)
        if not isinstance(parameter, DTensor):
            return moment
        given = {"run_check": False, "shape": parameter.shape, "stride": parameter.stride()}
        return DTensor.from_local(moment, parameter.device_mesh, parameter.placements, **given)


def _find_codes(moment: torch.Tensor, scales: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return the bytes that stand for the values next to those of a moment."""
    per_element = scales.repeat_interleave(BLOCK)[: moment.numel()].view_as(moment)
    relative = torch.where(per_element > 0, moment / per_element, 0.0)
    return torch.bucketize(relative, (values[1:] + values[:-1]) / 2).to(torch.uint8)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
