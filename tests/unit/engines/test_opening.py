"""What an engine says that cannot be opened as it was asked for."""

import importlib.util
import pickle

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


def test_unsupported_option_of_an_engine_is_named_by_its_key():
    """An engine of one's own may raise it in its process; the text is what the user sees."""
    error = UnsupportedError("no block of 3 tokens", key="engine.options.block_size", value=3)
    copied = pickle.loads(pickle.dumps(error))
    assert (copied.key, copied.value, str(copied)) == (error.key, error.value, str(error))
    assert str(error) == "engine.options.block_size: no block of 3 tokens"
    assert str(UnsupportedError(str(error), key=error.key)) == str(error), "once is enough"
