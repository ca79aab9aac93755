"""Configuration of where things run. Importing it imports no torch."""

from typing import Any

from pydantic import model_validator

from antiphon.core.config import Config


class ClusterConfig(Config):
    """Workers of a run."""

    kind: str = "local"
    """`local`, `ray`, or package.module:attribute."""
    address: str = ""
    """Of a Ray that this machine belongs to: host:port, or `auto` to find it. Without one, a Ray is started, and in the end
    stopped."""
    fork: bool = True
    """Let local workers be forks of one process that has imported torch and transformers, which takes seconds, where that is
    safe: on Linux, without GPUs."""
    debug: bool = False
    """Run engine and learner as threads of this process, so that breakpoints work."""


class PlacementConfig(Config):
    """The devices of each role: `gpu:0-7`, `node2.gpu:0-3`, `h800:0-31`, `cpu:0-3` (these cores), `cpu:16` (any sixteen), `with
    learner`, `anywhere`. A role without any runs beside the controller and sees every device; graders (`reward`) without GPUs
    see none. Where what generates shares a device with what trains, it sleeps meanwhile, and its requests go on elsewhere or
    afterwards."""

    auto: bool = False
    """Let the planner divide the cores or GPUs of this machine between learner and engines; `placement: auto` says the same."""
    learner: str = ""
    engine: str = ""
    reference: str = ""
    critic: str = ""
    teacher: str = ""
    judge: str = ""
    reward: str = ""
    environment: str = ""

    @property
    def roles(self) -> dict[str, str]:
        """What each role that has something asks for."""
        return {role: text for role in ROLES if (text := getattr(self, role))}

    @model_validator(mode="before")
    @classmethod
    def _auto(cls, given: Any) -> Any:
        return {"auto": True} if given == "auto" else given


ROLES = tuple(name for name in PlacementConfig.model_fields if name != "auto")
