"""Weights as the files of a checkpoint name and divide them, for vLLM and for servers.

A learner uses the names of transformers. In files, a mixture of experts may have one tensor for each expert where
transformers stacks them.
"""

import functools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoConfig
from transformers.core_model_loading import revert_weight_conversion

from antiphon.core.errors import WeightsError
from antiphon.core.vision import model_class
from antiphon.weights.checkpoint_files import list_weight_files

Tensors = dict[str, torch.Tensor]

_IN_LAYER = re.compile(r"(\.\d+\.).*")


class CheckpointLayout:
    """Names and shapes of the tensors in the checkpoint of a model directory."""

    def __init__(self, model: str | Path, tied: bool) -> None:
        """Read the names and shapes. If the head is `tied` to the embedding, it is left out, in updates too."""
        self._model = str(model)
        self._shapes: dict[str, tuple[int, ...]] = {}
        for path in list_weight_files(Path(model)):
            with safe_open(path, "pt") as file:
                self._shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        self._left_out = {"lm_head.weight"} if tied else set[str]()
        self._shapes = {name: shape for name, shape in self._shapes.items() if name not in self._left_out}

    def validate(self, tensors: Mapping[str, torch.Tensor], version: int) -> None:
        """Raise `WeightsError` unless `convert` turns these tensors into exactly those of the checkpoint."""
        outlines = {name: torch.empty_like(tensor, device="meta") for name, tensor in tensors.items()}
        sent, wanted = {name: tuple(tensor.shape) for name, tensor in self.convert(outlines)}, self._shapes
        wrong = sorted(name for name in sent.keys() | wanted.keys() if sent.get(name) != wanted.get(name))
        if wrong:
            name = wrong[0]
            raise WeightsError(
                f"weights of version {version} are not the model's: not loaded. {len(wrong)} tensors differ; "
                f"{name!r} has shape {wanted.get(name, 'none')} here and {sent.get(name, 'none')} there",
                tensor=name,
                version=version,
            )

    def convert(self, tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield tensors as the checkpoint names and divides them, one layer at a time because some are copied.

        Args:
            tensors: Tensors by the names of transformers, or of the checkpoint.
        """
        layers: dict[str, Tensors] = {}
        for name, tensor in tensors.items():
            if name in self._left_out:
                continue
            layers.setdefault(_IN_LAYER.sub(r"\1", name), {})[name] = tensor
        for layer in layers.values():
            known = layer.keys() <= self._shapes.keys()
            yield from (layer if known else revert_weight_conversion(_meta_model(self._model), layer)).items()


@functools.cache
def _meta_model(model: str) -> Any:
    """Return the model of a directory on the meta device: without memory, but with the names of its parts."""
    with torch.device("meta"):
        config = AutoConfig.from_pretrained(model, trust_remote_code=False)
        return model_class(config).from_config(config)
