"""The weights that adapters are added to, in four bits (QLoRA).

Source: Dettmers et al. 2023, "QLoRA: efficient finetuning of quantized LLMs". Scales are not quantised, so that weights that
were rounded to NF4 before stay what they are.
"""

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from antiphon.core.optional_packages import import_optional
from antiphon.core.vision import model_class_of
from antiphon.learning.model.hf_checkpoint import copy_tokenizer
from antiphon.learning.model.lora import frozen_linears

NF4 = {"quant_type": "nf4", "compress_statistics": False}


def hold_base_in_nf4(model: PreTrainedModel, device: torch.device) -> None:
    """Hold the frozen weights of linear layers in NF4 on a device: four bits each, and a scale for each block of 64.

    A head stays as it is: log-probs are computed from its rows.
    """
    layers = _import_bitsandbytes().nn
    for name, module in [*frozen_linears(model)]:
        if module is not model.get_output_embeddings():
            held = layers.Linear4bit(module.in_features, module.out_features, device="meta", **NF4)
            held.weight = layers.Params4bit(module.weight.detach(), module=held, **NF4)
            held.bias = module.bias
            model.set_submodule(name, held.to(device))  # which quantises it


def round_base_to_nf4(path: str, target: Path) -> None:
    """Write a model whose weights `hold_base_in_nf4` will not change, with its tokenizer, into a new directory.

    Weights keep the dtype of the files. A block's scale is its largest weight, so this dtype has it, and rounding keeps it.
    """
    functional = _import_bitsandbytes().functional
    model = model_class_of(path).from_pretrained(path, dtype="auto").requires_grad_(False)
    for _, module in frozen_linears(model):
        if module is not model.get_output_embeddings():
            packed, state = functional.quantize_4bit(module.weight.float(), **NF4)
            module.weight.copy_(functional.dequantize_4bit(packed, state))
    model.save_pretrained(target)
    copy_tokenizer(path, target)


def is_quantized(model: PreTrainedModel, name: str) -> bool:
    """Return True for the name of a weight that `hold_base_in_nf4` has quantised."""
    module, _, own = name.rpartition(".")
    return hasattr(getattr(model.get_submodule(module), own), "quant_state")


def _import_bitsandbytes() -> Any:
    return import_optional("bitsandbytes", "learner.lora.quantize: nf4")
