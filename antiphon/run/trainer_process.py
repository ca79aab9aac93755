"""The trainer process: the models of a run with rollout workers, on the learner's node, on an event loop of its own.

The models are its child processes. It reads the payloads that groups refer to, takes steps through their stages and builds
the batches; so tokens go from their rollout worker straight to the learner. `learning.remote.RemoteTrainer` calls it.
"""

from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

from antiphon.cluster.base import CLUSTERS, Cluster
from antiphon.cluster.devices import with_visible_gpus
from antiphon.cluster.placement import TRAINING, Placement
from antiphon.core.rpc import AsyncWorker, handlers_of
from antiphon.record.payloads import PayloadReader
from antiphon.record.run_dir import RunLineage
from antiphon.run.config import RunConfig
from antiphon.run.launch.context import LaunchContext
from antiphon.run.launch.models import TRAINER, make_local_training, start_models
from antiphon.run.supervision import run_supervised


class TrainerProcess(AsyncWorker):
    """Serves the calls of a `TrainBackend`."""

    def __init__(self, model: str, config: RunConfig, record: RunLineage, placement: Placement) -> None:
        """Prepare to start models on devices of this node; the GPUs placed for models are the only visible ones."""
        self._model = Path(model)
        self._config = config
        self._record = record
        gpus = placement.training_gpus
        own = {
            role: tuple(with_visible_gpus(place, gpus) for place in placement.known_places(role)) for role in TRAINING
        }
        self._placement = Placement(own)
        super().__init__()

    async def _live(self) -> None:
        config = self._config
        async with AsyncExitStack() as stack:
            cluster: Cluster = CLUSTERS.resolve("local")(config.cluster, self._record.directory.logs / TRAINER)
            stack.push_async_callback(cluster.close)
            context = LaunchContext(cluster=cluster, config=config, placement=self._placement)
            models, workers = await start_models(context, self._model)
            fetch = PayloadReader(self._record.directory.rollouts).fetch
            roles = {name: partial(self._ask, name) for name in config.roles}
            training = make_local_training(
                config, models, workers, fetch=fetch, record=self._record, roles=roles, model=self._model
            )
            await run_supervised([training.died()], partial(self._serve, handlers=handlers_of(training)))
