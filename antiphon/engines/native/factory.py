"""Opens the native engine in its worker process."""

import torch

from antiphon.core.errors import ConfigError
from antiphon.engines.base import Receive
from antiphon.engines.config import EngineKind
from antiphon.engines.native.engine import NativeEngine
from antiphon.engines.stops import read_decoder


def open_engine(model: str, config: EngineKind, receive: Receive) -> NativeEngine:
    """Return the engine for the model in a directory, with its tokenizer for stop strings."""
    if config.options:
        raise ConfigError(f"engine.options: the native engine has none, and was given {', '.join(config.options)}")
    torch.set_num_threads(config.threads)
    return NativeEngine(model, config, receive=receive, tokenizer=read_decoder(model))
