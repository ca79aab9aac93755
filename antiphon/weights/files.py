"""What an update is to those who read weights as the files of a checkpoint have them: vLLM, and servers.

A learner has transformers' names. In files a mixture of experts may have a tensor for each expert, where these are stacked.
"""

import functools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion

from antiphon.core.errors import WeightsError
from antiphon.weights.base import weight_files

Tensors = dict[str, torch.Tensor]

_IN_LAYER = re.compile(r"(\.\d+\.).*")


class Files:
    """Those of a model directory's checkpoint. A head that is the embedding, `tied`, is passed over, in an update too."""

    def __init__(self, model: str | Path, tied: bool) -> None:
        self._model = str(model)
        self._shapes: dict[str, tuple[int, ...]] = {}
        for path in weight_files(Path(model)):
            with safe_open(path, "pt") as file:
                self._shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        self._passed_over = {"lm_head.weight"} if tied else set[str]()
        self._shapes = {name: shape for name, shape in self._shapes.items() if name not in self._passed_over}

    def require(self, tensors: Mapping[str, torch.Tensor], version: int) -> None:
        """`WeightsError` unless `named` makes of these the tensors of the files, all of them and no others."""
        outlines = {name: torch.empty_like(tensor, device="meta") for name, tensor in tensors.items()}
        sent, wanted = {name: tuple(tensor.shape) for name, tensor in self.named(outlines)}, self._shapes
        wrong = sorted(name for name in sent.keys() | wanted.keys() if sent.get(name) != wanted.get(name))
        if wrong:
            name = wrong[0]
            raise WeightsError(
                f"weights of version {version} are not the model's: not loaded. {len(wrong)} tensors differ; "
                f"{name!r} has shape {wanted.get(name, 'none')} here and {sent.get(name, 'none')} there"
            )

    def named(self, tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """Tensors of a learner, or of the files, as the files name and divide them; a layer at a time, for some are copied."""
        layers: dict[str, Tensors] = {}
        for name, tensor in tensors.items():
            if name in self._passed_over:
                continue
            layers.setdefault(_IN_LAYER.sub(r"\1", name), {})[name] = tensor
        for layer in layers.values():
            known = layer.keys() <= self._shapes.keys()
            yield from (layer if known else revert_weight_conversion(_outline(self._model), layer)).items()


@functools.cache
def _outline(model: str) -> Any:
    """The model of a directory, without memory: it knows how files name its parts."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model, trust_remote_code=False))
