"""Configuration of how weights travel. Importing it imports no torch."""

from typing import Annotated, Literal

from pydantic import Field

from antiphon.core.config import Config, unit


class WeightSyncConfig(Config):
    """Transfer of weights from the learner to engines."""

    channel: str = "shared_memory"
    """`shared_memory`: files that both ends see; `device_memory`: memory of the GPU that learner and engines share, by CUDA
    IPC, which holds one more copy of the weights; `distributed`: broadcast by torch.distributed; `object_store`: Ray's, with
    `cluster.kind: ray`; or package.module:attribute."""
    dtype: Literal["engine", "float32"] = "engine"
    """`engine`: if all engines are native and have the same dtype, weights travel in that dtype; engines load the same values,
    and bfloat16 halves the bytes. Otherwise, and with `float32`, weights travel in the learner's dtype."""
    encoding: Literal["whole", "delta"] = "whole"
    """`delta`, on `distributed` and `object_store`: engines that hold the previous version receive only the changes, in
    lossless compression; the others receive all weights. For this, engines keep a copy of the weights in host memory."""
    senders: Literal["auto", "first", "all"] = "auto"
    """Ranks of a learner with a mesh that send weights. `first`: one, which gathers each tensor. `all`: each sends the pieces
    that it holds, at the same time as the others, and engines put them together; not with `weights.channel: device_memory`, and
    only with `learner.kind: torch` without LoRA. `auto`: `all` with such a learner and `weights.channel: distributed`, else
    `first`."""
    every: Annotated[int, unit("training steps")] = Field(1, gt=0)
    """Training steps between two updates of the engines. `rollout.async_ratio` must be at least this less 1. Engines are also
    updated before each evaluation and by a resume."""
    directory: str = ""
    """Directory of the files; by default in the shared memory of this machine."""
    host: str = "127.0.0.1"
    """Address at which a learner that broadcasts is reached, and where its ranks meet; it listens there."""
    timeout: Annotated[float, unit("seconds")] = Field(3600.0, gt=0.0)
    """Seconds that the learner may take to publish a version, that engines may take to load it, and that shared devices may
    take to pass from one to the other; then the run ends. With `rollout.on_update: drain`, engines load when their requests
    have ended."""
