"""Opening the native engine in its worker."""

from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast

from antiphon.engines.config import EngineConfig
from antiphon.engines.native.engine import NativeEngine
from antiphon.types import WeightsUpdate


def open_engine(
    model: str, config: EngineConfig, receive: Callable[[WeightsUpdate], Iterable[tuple[str, torch.Tensor]]]
) -> NativeEngine:
    """The engine for the model in a directory, with its tokenizer for stop strings."""
    torch.set_num_threads(config.threads)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model) if (Path(model) / "tokenizer.json").is_file() else None
    return NativeEngine(model, config, receive=receive, tokenizer=tokenizer)
