"""Checks that a model can be trained on a mesh, with what is installed, before a rank is started.

Checks of what an algorithm needs are in `run/config_checks/algorithms.py`.
"""

from importlib.util import find_spec
from pathlib import Path

from antiphon.cluster.base import Cluster
from antiphon.core.errors import ConfigError, DataError
from antiphon.core.optional_packages import how_to_install
from antiphon.core.workers import Worker
from antiphon.learning.config import OPTIONS, LearnerConfig
from antiphon.run.config import RunConfig
from antiphon.run.model_files import model_shape
from antiphon.tasks.rendering import Renderer


def check_tokenizers(model: Path, other: Path) -> None:
    """Raise `DataError` unless two models have the same tokens: log-probs of other tokens cannot be compared."""
    ours, theirs = (Renderer(directory).vocabulary() for directory in (model, other))
    if ours != theirs:
        token = next(iter(sorted(ours.items() ^ theirs.items())))
        raise DataError(
            f"{other}: its tokenizer is not that of {model} ({token[0]!r} is token {ours.get(token[0])} there and "
            f"{theirs.get(token[0])} here), so what they say of tokens cannot be compared",
            path=other,
        )


def check_installed(kind: str) -> None:
    """Raise `ConfigError` if a kind of learner needs a package that is not installed."""
    if kind in OPTIONS and find_spec(kind) is None:
        package = "megatron-core" if kind == "megatron" else kind
        message = f"{kind!r} is not installed: {how_to_install(package)}"
        raise ConfigError(message, key="learner.kind", value=kind)


def check_mesh(model: Path, learner: LearnerConfig, key: str = "learner.mesh") -> None:
    """Raise `ConfigError` unless the shape of a model fits the mesh that is configured under `key`."""
    for inner, message in learner.incompatibilities(model_shape(model)):
        place = key + inner.removeprefix("mesh") if inner.startswith("mesh") else f"learner.{inner}"
        raise ConfigError(f"of the model at {model}, {message}", key=place)


def check_layers(model: Path, learner: LearnerConfig, key: str = "learner.mesh") -> None:
    """Raise `UnsupportedError` unless the layers of a model can be divided on a mesh; imports torch if it divides any."""
    if _divides_layers(learner):
        from antiphon.learning.model.loading import build_on_meta
        from antiphon.learning.parallel.tensor_parallel import check_division

        check_division(build_on_meta(model), learner.mesh, key)


def check_shares(model: Path, learner: LearnerConfig, key: str = "learner.mesh") -> None:
    """Raise `ConfigError` unless each rank of a mesh can read its share of the weights (`learning.model.loading`)."""
    if learner.forms_group and learner.kind not in OPTIONS and not any(model.glob("*.safetensors")):
        raise ConfigError(
            f"the model at {model} has no *.safetensors, of which each rank of the learner reads its "
            "share; transformers' save_pretrained writes them",
            key=key,
        )


def check_meshes(config: RunConfig, model: Path) -> None:
    """Check shape and layers of the policy in `model`, and of all other models of a run that are local."""
    critic, seen = config.critic.path if config.critic else "", list[tuple[Path, LearnerConfig]]()
    paths = [("learner", model), ("reference", model), ("critic", Path(critic) if critic else model)]
    for role, path in [*paths, *(("teacher", Path(teacher.path)) for teacher in config.teachers)]:
        settings, key = config.learner_of(role), config.mesh_of(role)
        if config.counts[role] and (path / "config.json").is_file() and (path, settings) not in seen:
            seen.append((path, settings))
            check_mesh(path, settings, key)
            check_layers(path, settings, key)


def _divides_layers(learner: LearnerConfig) -> bool:
    mesh = learner.mesh
    return learner.kind == "torch" and mesh.tensor * mesh.expert * mesh.pipeline > 1


class LayersChecker(Worker):
    """Checks layers in a process of its own, so that torch stays out of the controller."""

    def check(self, model: Path, learner: LearnerConfig, key: str) -> None:
        """Raise `UnsupportedError` unless the layers can be divided."""
        check_layers(model, learner, key)


async def check_model(cluster: Cluster, model: Path, learner: LearnerConfig, key: str = "learner.mesh") -> None:
    """Check shape, files and layers of a model against the mesh that is configured under `key`."""
    check_mesh(model, learner, key)
    check_shares(model, learner, key)
    if _divides_layers(learner):
        checker = cluster.spawn("layers", f"{__name__}:{LayersChecker.__name__}")
        await checker.call("check", model, learner, key)
        await checker.close()
