"""Configuration of how weights travel. Importing it imports no torch."""

from typing import Annotated, Literal

from pydantic import Field

from antiphon.core.config import Config, unit


class WeightSyncConfig(Config):
    """Transfer of weights from the learner to engines."""

    channel: str = "shared_memory"
    """`shared_memory`: files that both ends see; `device_memory`: that of the GPU which learner and engines share, by CUDA IPC,
    where the weights are once more then; `distributed`: broadcast by torch.distributed; `object_store`: Ray's, with
    `cluster.kind: ray`; or package.module:attribute."""
    dtype: Literal["engine", "float32"] = "engine"
    """`engine`: weights travel in the dtype of the engines if all are native and have the same, which changes nothing of what
    engines load and, for bfloat16, halves the bytes; otherwise, and with `float32`, as the learner holds them."""
    encoding: Literal["whole", "delta"] = "whole"
    """`delta`, with `weights.channel: distributed`: engines that have the version before are sent what changed since, without
    loss and compressed; the others all of it. Engines keep a copy of the weights in host memory for it."""
    directory: str = ""
    """Directory of the files; by default in the shared memory of this machine."""
    host: str = "127.0.0.1"
    """Address at which a learner that broadcasts is reached, and where its ranks meet; it listens there."""
    timeout: Annotated[float, unit("seconds")] = Field(3600.0, gt=0.0)
    """Seconds that the learner may take to publish a version, engines to load it, and shared devices to change hands; then the
    run ends. With `rollout.on_update: drain`, engines load when their requests have ended."""
