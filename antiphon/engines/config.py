"""Configuration of generating tokens. Importing it imports no torch."""

from typing import Any

from pydantic import Field

from antiphon.config import Config


class EngineConfig(Config):
    """An engine pool of equal engines."""

    kind: str = "native"
    """`native`, `vllm`, or package.module:attribute."""
    python: str = ""
    """The interpreter that runs the engines, such as envs/vllm/bin/python: for an engine whose packages cannot be ours. Empty
    is the one that runs everything else."""
    replicas: int = Field(1, gt=0)
    """Engines in the pool."""
    slots: int = Field(64, gt=0)
    """Sequences that one engine decodes at once."""
    max_length: int = Field(0, ge=0)
    """Longest prompt and completion together; 0 takes the model's own limit."""
    prefill_tokens: int = Field(512, gt=0)
    """Most prompt tokens that one engine step reads, so that prefill never stalls decoding for long."""
    dtype: str = "float32"
    device: str = "auto"
    """`cpu`, `cuda`, `cuda:1`, or `auto`."""
    threads: int = Field(1, gt=0)
    """CPU threads of one engine process."""
    routed_experts: bool = False
    """Record which experts computed each token, and have the learner take the same (routing replay): for models with a
    mixture of experts, in the native engine."""
    options: dict[str, Any] = {}
    """What is special to this kind of engine: of `vllm`, fields of its EngineArgs."""
