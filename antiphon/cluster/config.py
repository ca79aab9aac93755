"""Configuration of clusters and device placement. Importing this module does not import torch."""

import re
from typing import Any, Self

from pydantic import model_validator

from antiphon.core.config import Config
from antiphon.core.errors import ValidatorError


class ClusterConfig(Config):
    """Cluster that a run's workers run on."""

    kind: str = "local"
    """`local`, `ray`, or package.module:attribute."""
    address: str = ""
    """Address of a running Ray cluster: host:port, or `auto` to find it. Without one, Ray is started for the run and stopped
    after it."""
    fork: bool = True
    """Fork local workers from one process that has imported torch and transformers, which saves seconds for each. This is done
    only where it is safe: on Linux without GPUs."""
    env: dict[str, str] = {}
    """Environment variables of all workers, on every node, such as `{NCCL_SOCKET_IFNAME: eth0}`. The record of the run has
    them, so give secrets to the shell instead."""
    debug: bool = False
    """Run workers as threads of this process, so that breakpoints work."""

    @property
    def one_machine(self) -> bool:
        """True if all workers run on this machine: as local processes, or on a Ray that the run starts."""
        return self.kind == "local" or (self.kind == "ray" and not self.address)

    @model_validator(mode="after")
    def _settable(self) -> Self:
        if "CUDA_VISIBLE_DEVICES" in self.env:
            raise ValidatorError(
                [("env", "CUDA_VISIBLE_DEVICES follows from placement, which names the GPUs of each role")]
            )
        for name, value in self.env.items():
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) or "\0" in value:
                raise ValidatorError([("env", f"{name!r} and its value cannot be an environment variable")])
        return self


class PlacementConfig(Config):
    """Devices of each role.

    Valid values are `gpu:0-7`, `node2.gpu:0-3`, `h800:0-31`, `cpu:0-3` (these cores), `cpu:16` (any sixteen), `with learner`
    and `anywhere`. A role without a value runs on the controller's machine and sees every device; graders (`reward`) without
    GPUs see none. An engine that shares a device with a training role sleeps during training; its requests continue elsewhere,
    or afterwards.
    """

    auto: bool = False
    """Let the planner divide the cores or GPUs of this machine between learner and engines. `placement: auto` is the same."""
    learner: str = ""
    """Devices of the learner."""
    engine: str = ""
    """Devices of the engines."""
    reference: str = ""
    """Devices of the reference model."""
    critic: str = ""
    """Devices of the critics."""
    teacher: str = ""
    """Devices of the teachers."""
    judge: str = ""
    """Devices of the judges' engines."""
    reward: str = ""
    """Devices of the grading workers."""
    reward_model: str = ""
    """Devices of the reward models' workers."""
    environment: str = ""
    """Devices of the environments' workers."""

    @property
    def roles(self) -> dict[str, str]:
        """The value of each role that has one."""
        return {role: text for role in ROLES if (text := getattr(self, role))}

    @model_validator(mode="before")
    @classmethod
    def _auto(cls, given: Any) -> Any:
        return {"auto": True} if given == "auto" else given


ROLES = tuple(name for name in PlacementConfig.model_fields if name != "auto")
