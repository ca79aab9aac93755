"""The trainer: what `start` starts on the learner's node when rollouts are sharded, in a process and an event loop of its own.

The models are its processes. It reads the payloads that it is referred to, takes steps through their stages and builds the
batches; so tokens go from whoever made them to whoever learns from them. The controller asks questions, see `learning.remote`.
"""

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

from antiphon.algorithms.rewards import Controllers
from antiphon.cluster.base import CLUSTERS, Cluster
from antiphon.cluster.devices import as_seen
from antiphon.cluster.placement import TRAINING, Placement
from antiphon.core.rpc import AsyncWorker, Handler
from antiphon.core.types import Group
from antiphon.learning.learner import ModelRoles
from antiphon.learning.step import StepPipeline
from antiphon.record.payloads import PayloadReader
from antiphon.record.run_dir import RunDirectory
from antiphon.run.config import RunConfig
from antiphon.run.launch import TRAINER, start_models
from antiphon.run.loop import make_step_pipeline, run_supervised


class TrainerProcess(AsyncWorker):
    """Has the models of a run."""

    def __init__(self, model: str, config: RunConfig, directory: RunDirectory, placement: Placement) -> None:
        """All devices that `placement` gives the models are of this node, and its GPUs the only ones that are seen here."""
        self._model = Path(model)
        self._config = config
        self._directory = directory
        gpus = placement.training_gpus
        own = {role: tuple(as_seen(place, gpus) for place in placement.there(role)) for role in TRAINING}
        self._placement = Placement(own)
        super().__init__()

    async def _live(self) -> None:
        config = self._config
        async with AsyncExitStack() as stack:
            cluster: Cluster = CLUSTERS.resolve("local")(config.cluster, self._directory.logs / TRAINER)
            stack.push_async_callback(cluster.close)
            models, workers = await start_models(cluster, self._model, config, self._placement)
            training = make_step_pipeline(config, models.learner, models.reference, models.critics, models.teachers)
            does = _answers(models, training, PayloadReader(self._directory.rollouts))
            await run_supervised([worker.died() for worker in workers], partial(self._serve, does=does))


def _answers(models: ModelRoles, training: StepPipeline, payloads: PayloadReader) -> dict[str, Handler]:
    """What a `RemoteTrainer` asks."""
    saving: list[asyncio.Future[None]] = []

    async def learn(number: int, version: int, groups: Sequence[Group], controllers: Controllers) -> Any:
        training.controllers = controllers
        metrics, batch = await training.learn(number, version, payloads.fetch(groups))
        return metrics, batch, training.controllers

    async def save(place: Path) -> None:
        saving[:] = await models.save(place)

    async def saved() -> None:
        await asyncio.gather(*saving)

    learner = models.learner
    own: list[Handler] = [learn, save, saved, models.begin, models.restore, models.offload, models.reload]
    own += [learner.step, learner.publish]
    return {method.__name__: method for method in own} | {"begin_learner": learner.begin}
