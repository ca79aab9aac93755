"""Reports of a service to a front: the sandboxes and environments that it holds, and its quotas."""

from enum import StrEnum

from pydantic import BaseModel, NonNegativeInt, PositiveInt

from antiphon.sandbox.service.config import ServiceConfig
from antiphon.sandbox.service.environments import Environments
from antiphon.sandbox.service.manager import Sandboxes
from antiphon.sandbox.service.records import State

HOLDINGS_PATH = "/apis/antiphon/v1/holdings"


class Kind(StrEnum):
    """Kinds of things that a service holds. Each value is also a field of `Holdings` and of `Quotas`."""

    SANDBOX = "sandboxes"
    ENVIRONMENT = "environments"


class Held(BaseModel):
    """A sandbox or an environment of a service."""

    state: State = State.RUNNING
    memory: NonNegativeInt = 0
    """Bytes that it may use; 0 for an environment."""

    @property
    def live(self) -> bool:
        """True while it counts against the quotas."""
        return self.state.live


class Quotas(BaseModel):
    """The quotas of a service, in the units of `ServiceConfig`."""

    sandboxes: PositiveInt
    memory: PositiveInt
    sandbox_memory: PositiveInt
    commands: PositiveInt
    environments: PositiveInt

    @classmethod
    def of(cls, config: ServiceConfig) -> "Quotas":
        """Return the quotas of a configuration."""
        return cls(**{name: getattr(config, name) for name in cls.model_fields})


class Holdings(BaseModel):
    """Everything that a service holds, by id, and its quotas."""

    sandboxes: dict[str, Held]
    environments: dict[str, Held]
    quotas: Quotas


def report_holdings(sandboxes: Sandboxes, environments: Environments) -> Holdings:
    """Return what a service holds that is no front."""
    return Holdings(
        sandboxes={
            each.id: Held(state=each.state, memory=each.backend_config.limits.memory) for each in sandboxes.all()
        },
        environments={each.id: Held() for each in environments.all()},
        quotas=Quotas.of(sandboxes.config),
    )
