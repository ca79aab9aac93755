"""What an engine says that cannot be opened as it was asked for."""

import importlib.util

import pytest

from antiphon.core.errors import ConfigError, UnsupportedError
from antiphon.engines.base import ENGINES
from antiphon.engines.config import EngineConfig


def test_the_native_engine_has_no_options_of_its_own():
    with pytest.raises(ConfigError, match="the native engine has none, and was given block_size"):
        ENGINES.resolve("native")("model", EngineConfig(options={"block_size": 32}), None)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed here")
def test_without_vllm_its_engine_says_where_to_install_it():
    with pytest.raises(UnsupportedError, match=r"(?s)no module 'vllm'.*pip install vllm.*engine\.python"):
        ENGINES.resolve("vllm")
