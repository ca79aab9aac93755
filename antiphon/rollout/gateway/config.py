"""Configuration of serving a model. Importing it imports no machinery."""

from pydantic import Field

from antiphon.core.config import Config
from antiphon.engines.config import EngineConfig


class ServeConfig(Config):
    """Address and engines of a model server."""

    host: str = "127.0.0.1"
    """Address to listen at. The token travels unencrypted: beyond this machine, put a TLS proxy or a tunnel before it."""
    port: int = Field(8000, ge=0, le=65535)
    """0 takes a free one."""
    name: str = "policy"
    """Name of the model in the list of models that clients see; a request may name any."""
    tools: str = "hermes"
    """Format in which the model writes tool calls: `hermes`, `qwen3_coder`, or package.module:attribute."""
    timeout: float = Field(3600.0, gt=0.0)
    """Seconds that one reply may take, and the engines to start."""
    engine: EngineConfig = EngineConfig()
    """The engines; of a run, they are by default as those that it had, without their `python` and `options`."""
