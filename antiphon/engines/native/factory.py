"""Opens the native engine in its worker process."""

import torch

from antiphon.core.errors import ConfigError
from antiphon.engines.base import Receive
from antiphon.engines.config import EngineKind
from antiphon.engines.native.engine import NativeEngine
from antiphon.engines.stops import read_decoder


def open_engine(
    model: str, config: EngineKind, receive: Receive, *, engine_class: type[NativeEngine] = NativeEngine
) -> NativeEngine:
    """Return the engine for the model in a directory, with its tokenizer for stop strings.

    Args:
        model: The directory.
        config: The engine's part of the configuration.
        receive: Yields the tensors of new weights.
        engine_class: Class of the engine: a subclass for an engine of your own, which finds `engine.options` in
            `self.config.options`.
    """
    if config.options and engine_class is NativeEngine:
        raise ConfigError(f"engine.options: the native engine has none, and was given {', '.join(config.options)}")
    torch.set_num_threads(config.threads)
    return engine_class(model, config, receive=receive, tokenizer=read_decoder(model))
