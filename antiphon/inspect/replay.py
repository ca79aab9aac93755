"""Replay a run: its recorded events, in their order, drive the real scheduler and stages once more.

Nothing is generated and nothing is graded. Every decision is taken again (which groups are admitted, filtered, taken,
dropped) and every batch is built again; each must be identical to the recorded one, byte for byte. With `weights`, the weights
of every version must be identical too, from the first checkpoint that was kept. The first difference ends the replay.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from antiphon.cluster.base import CLUSTERS, Cluster
from antiphon.core.errors import RecordError
from antiphon.core.types import REFERENCE_LOGPROBS, TEACHER_LOGPROBS
from antiphon.inspect.recorded_config import has_model
from antiphon.inspect.recorded_lineage import ReplayMismatchError, read_lineages
from antiphon.inspect.replayer import SAMPLER_ERROR, Replayer
from antiphon.learning.learner import ModelRoles
from antiphon.record.reader import RunReader
from antiphon.run.config import RunConfig
from antiphon.run.launch.context import LaunchContext
from antiphon.run.launch.model_directory import model_directory
from antiphon.run.launch.models import start_models
from antiphon.weights.base import TransferContext
from antiphon.weights.shared_directory import shared_directory

__all__ = ["ReplayMismatchError", "replay", "requires_models"]


def replay(run: Path, config: RunConfig, *, weights: bool = False, report: Callable[[str], None] = print) -> int:
    """Replay a run.

    Args:
        run: Run directory.
        config: The run's configuration.
        weights: Train again too, and compare the weights of every version.
        report: Receives a line for each lineage.

    Returns:
        The number of steps.

    Raises:
        ReplayMismatchError: The first difference.
        RecordError: The record is damaged, or does not hold what a replay of this run needs.
    """
    return asyncio.run(_replay(run, config, weights, report))


async def _replay(run: Path, config: RunConfig, weights: bool, report: Callable[[str], None]) -> int:
    if config.rollout.sampler:
        raise RecordError(SAMPLER_ERROR)
    steps = 0
    async with AsyncExitStack() as stack:
        reader = stack.enter_context(RunReader.open(run))
        models = await stack.enter_async_context(_start_models(run, config, weights))
        context = TransferContext(
            stack.enter_context(shared_directory("replay")), dtype=config.weights_dtype, senders=config.weight_senders
        )
        replayer = Replayer(reader, config, models, context if weights else None)
        for lineage in read_lineages(reader):
            done = await replayer.replay_lineage(lineage)
            report(f"lineage {lineage.number}: {done} steps, identical")
            steps += done
    return steps


def requires_models(config: RunConfig, weights: bool) -> bool:
    """Return True if a replay needs models: to compare weights, or for log-probs of models other than the policy."""
    return weights or bool({REFERENCE_LOGPROBS, TEACHER_LOGPROBS} & config.algorithm.required_streams)


@asynccontextmanager
async def _start_models(run: Path, config: RunConfig, weights: bool) -> AsyncIterator[ModelRoles | None]:
    if not requires_models(config, weights):
        yield None
        return
    cluster: Cluster = CLUSTERS.resolve(config.cluster.kind)(config.cluster, None)
    try:
        path = str(run / "model") if has_model(run) else config.model.path
        model = await model_directory(cluster, path, Path(), config.seed)
        yield (await start_models(LaunchContext(cluster=cluster, config=config), model))[0]
    finally:
        await cluster.close()
