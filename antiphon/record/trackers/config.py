"""Options of the trackers. Importing it imports none of their libraries."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from antiphon.core.config import Config, unit
from antiphon.core.errors import ConfigError, Mistake, ValidatorError
from antiphon.core.registry import Registry

TRACKERS = Registry(
    "tracker",
    {
        "tensorboard": "antiphon.record.trackers.tensorboard:TensorBoardTracker",
        "wandb": "antiphon.record.trackers.wandb:WandbTracker",
        "mlflow": "antiphon.record.trackers.mlflow:MlflowTracker",
        "trackio": "antiphon.record.trackers.trackio:TrackioTracker",
        "swanlab": "antiphon.record.trackers.swanlab:SwanlabTracker",
    },
)


def _to_tuple(given: Any) -> Any:
    """Accept the list of a YAML, which `TrackersConfig._read_names` makes one of Python."""
    return tuple(given) if isinstance(given, list) else given


Tags = Annotated[tuple[str, ...], BeforeValidator(_to_tuple)]


class TensorBoardConfig(Config):
    """Event files in `<run>/tensorboard`."""


class WandbConfig(Config):
    """Weights & Biases."""

    project: str = "antiphon"
    """Project of the run."""
    entity: str | None = None
    """User or team; by default the one that is logged in."""
    name: str | None = None
    """Name of the run there; by default the run's own."""
    group: str | None = None
    """Group of runs that belong together."""
    tags: Tags = ()
    """Tags of the run."""
    mode: Literal["online", "offline"] = "online"
    """`offline` writes to `<run>/wandb`, for `wandb sync`."""
    weights: bool = False
    """Upload the trained model at the end; otherwise its folder is referenced."""


class MlflowConfig(Config):
    """MLflow."""

    uri: str | None = None
    """Tracking server, or a database such as `sqlite:////data/mlflow.db`; by default MLFLOW_TRACKING_URI if that is set,
    else `<run>/mlflow/mlflow.db`."""
    experiment: str = "antiphon"
    """Experiment of the run."""
    name: str | None = None
    """Name of the run there; by default the run's own."""
    tags: dict[str, str] = {}
    """Tags of the run."""
    weights: bool = False
    """Upload the trained model at the end; otherwise its folder is referenced."""


class TrackioConfig(Config):
    """Trackio."""

    project: str = "antiphon"
    """Project of the run."""
    name: str | None = None
    """Name of the run there, to which an id is appended; by default the run's own."""
    group: str | None = None
    """Group of runs that belong together."""
    space: str | None = None
    """Hugging Face Space that receives the run; by default it stays on this machine, in Trackio's own folder."""
    weights: bool = False
    """Store the trained model at the end; otherwise its folder is referenced."""


class SwanlabConfig(Config):
    """SwanLab."""

    project: str = "antiphon"
    """Project of the run."""
    workspace: str | None = None
    """User or organisation; by default the one that is logged in."""
    name: str | None = None
    """Name of the run there; by default the run's own."""
    tags: Tags = ()
    """Tags of the run."""
    mode: Literal["online", "offline"] = "online"
    """`offline` writes to `<run>/swanlab`, for `swanlab sync`."""


class TrackersConfig(Config):
    """Trackers besides `metrics.jsonl`, which is always written.

    In YAML a list of names, `[tensorboard, wandb]`, or a mapping from names to options, `{wandb: {project: mine}}`. A name
    may be `package.module:attribute` of your own.
    """

    tensorboard: TensorBoardConfig | None = None
    """TensorBoard, with its options; null: off."""
    wandb: WandbConfig | None = None
    """Weights & Biases, with its options; null: off."""
    mlflow: MlflowConfig | None = None
    """MLflow, with its options; null: off."""
    trackio: TrackioConfig | None = None
    """Trackio, with its options; null: off."""
    swanlab: SwanlabConfig | None = None
    """SwanLab, with its options; null: off."""
    custom: dict[str, dict[str, Any]] = {}
    """Trackers of your own: `package.module:attribute` and the keyword arguments of each."""

    @model_validator(mode="before")
    @classmethod
    def _read_names(cls, given: Any) -> Any:
        """Accept names alone, and trackers of the user's own beside the built-in ones."""
        if isinstance(given, list | tuple):
            _check_names({str(place): name for place, name in enumerate(given)})
            given = {name: {} for name in given}
        if not isinstance(given, Mapping):
            return given
        _check_names({str(name): name for name in given if name != "custom"})
        custom = {name: options or {} for name, options in given.items() if ":" in str(name)}
        built_in = {name: options for name, options in given.items() if ":" not in str(name)}
        return {**built_in, "custom": {**(built_in.get("custom") or {}), **custom}}

    def list_enabled(self) -> list[tuple[str, Config | dict[str, Any]]]:
        """Return the name and the options of each tracker that is on."""
        built_in = [(name, getattr(self, name)) for name in TRACKERS.known]
        return [(name, options) for name, options in built_in if options is not None] + list(self.custom.items())


def _check_names(by_key: Mapping[str, Any]) -> None:
    """Raise `ValidatorError` with all keys that do not hold the name of a tracker."""
    mistakes: list[Mistake] = []
    for key, name in by_key.items():
        try:
            TRACKERS.check(str(name), key)
        except ConfigError as error:
            mistakes += error.mistakes
    if mistakes:
        raise ValidatorError(mistakes)


class SamplesConfig(Config):
    """Tables of sample rollouts that trackers receive."""

    count: Annotated[int, unit("rollouts")] = Field(8, ge=0)
    """Rollouts in each table; 0: no tables."""
    every: Annotated[int, unit("steps")] = Field(10, ge=1)
    """Steps between tables; the first step has one."""
    characters: Annotated[int, unit("characters")] = Field(2000, ge=1)
    """Longest prompt or completion in a table; the middle of a longer one is left out."""
