"""Starting the workers of reward models: one set for all tasks that ask the same model."""

import itertools
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack

from antiphon.core.profiles import ProfiledHandles
from antiphon.core.rpc import Client
from antiphon.core.types import Message
from antiphon.core.worker_set import DeadlyCallError, WorkerSet
from antiphon.core.workers import WorkerHandle
from antiphon.run.device_assignment import AssignDevices, device_assigner, reassign
from antiphon.run.launch.context import LaunchContext
from antiphon.tasks.base import UnreachableError
from antiphon.tasks.rewards.reward_model import ClassifierOptions, Classify

CLASSIFIER_WORKER = "antiphon.learning.classifier:ClassifierWorker"


async def start_classifiers(context: LaunchContext, stack: AsyncExitStack) -> Mapping[ClassifierOptions, Classify]:
    """Return what asks each reward model of the run; `stack` ends its workers."""
    found: dict[ClassifierOptions, Classify] = {}
    first = 0  # device of the next model
    for number, options in enumerate(context.config.classifiers):
        assign = device_assigner(context.cluster, context.config, "reward_model", first)
        found[options] = await _start_set(context, number, options, assign, stack)
        first += options.workers
    return found


async def _start_set(
    context: LaunchContext, number: int, options: ClassifierOptions, assign: AssignDevices, stack: AsyncExitStack
) -> Classify:
    rollout, serials = context.config.rollout, itertools.count()
    handles: dict[int, WorkerHandle] = {}
    context.profiled.append(ProfiledHandles(handles.values))

    async def start(worker: int) -> Client:
        name = f"reward-model-{number}-{next(serials)}"
        place = reassign(assign, worker, name).place
        threads = max(len(place.cores), 1) if place else 1
        args = (options, threads, rollout.deterministic)
        handles[worker] = context.cluster.spawn(name, CLASSIFIER_WORKER, *args, place=place)
        client = Client(handles[worker])
        await client.started_or_killed()
        return client

    workers: WorkerSet[Client] = WorkerSet(
        f"workers of the reward model {options.path}",
        start,
        options.workers,
        context.deadlines,
        context.report,
        silence=rollout.engine_timeout,
        patience=rollout.timeout,
        patience_key="rollout.timeout",
    )
    await stack.enter_async_context(workers)

    async def classify(messages: Sequence[Message]) -> float:
        try:
            score: float = await workers.call("classify", messages)
        except DeadlyCallError as error:
            raise UnreachableError(str(error)) from error
        return score

    return classify
