"""Published benchmarks: tasks of lm-eval, answered by the engines and the learner of a configuration."""

import asyncio
import difflib
import itertools
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from antiphon.core.blocking import run_blocking
from antiphon.core.errors import ConfigError, DataError
from antiphon.core.optional_packages import import_optional
from antiphon.core.rng import derive
from antiphon.core.types import GenerateRequest, Pack, Sampling
from antiphon.learning.mesh_config import MeshConfig
from antiphon.run.config import RunConfig
from antiphon.run.device_assignment import device_assigner
from antiphon.run.dtypes import choose_dtypes
from antiphon.run.launch.context import LaunchContext, open_cluster
from antiphon.run.launch.engines import EngineStarter, start_engines
from antiphon.run.launch.model_directory import model_directory
from antiphon.run.model_files import model_shape
from antiphon.run.supervision import run_supervised

SCORER = "antiphon.learning.objectives.scoring:Scorer"
POSITIONS = 2048  # of a model whose configuration does not say how many it has, as in lm-eval
BUSY = 2  # requests for each slot of the engines, that are under way at once


def measure_suite(
    model: str,
    config: RunConfig,
    tasks: Sequence[str],
    *,
    folder: Path | None = None,
    limit: int = 0,
    shots: int | None = None,
    chat: bool = False,
) -> dict[str, dict[str, float]]:
    """Measure a model on tasks of lm-eval.

    Args:
        model: A directory or Hugging Face id.
        config: Engines, learner, cluster and devices; its own tasks are not used.
        tasks: Names of tasks or groups of tasks.
        folder: Folder with tasks of your own beside those of lm-eval, as its YAML files.
        limit: Number of documents of each task to use, from the first; 0 uses all.
        shots: Number of examples in each prompt; by default, as the task says.
        chat: Ask by the model's chat template.

    Returns:
        By task, each measure under the name that lm-eval gives it.

    Raises:
        ConfigError: lm-eval is not installed, or there is no such task.
        DataError: The data of a task cannot be loaded.
    """
    manager = _find_tasks(tasks, folder)
    for name in tasks:
        if not manager.match_tasks([name]):
            nearest = tuple(difflib.get_close_matches(name, manager.all_tasks, n=3))
            hint = f"; did you mean {', '.join(nearest)}?" if nearest else ""
            raise ConfigError(f"lm-eval has no task {name!r}{hint}", key="--suite", value=name, suggestions=nearest)
    asked = {"tasks": list(tasks), "task_manager": manager, "num_fewshot": shots, "limit": limit or None}
    return run_blocking(_measure(model, config, asked | {"apply_chat_template": chat}))


def _find_tasks(names: Sequence[str], folder: Path | None) -> Any:
    """Return lm-eval's manager of tasks. It reads thousands of files of its own tasks, for seconds, only if they are needed."""
    manager_type = import_optional("lm_eval.tasks", "--suite", "lm-eval").TaskManager
    if folder is not None:
        own = manager_type(include_path=str(folder), include_defaults=False)
        if {*names} <= {*own.all_subtasks}:  # groups may have tasks of lm-eval
            return own
    return manager_type(include_path=folder and str(folder))


async def _measure(model: str, config: RunConfig, asked: dict[str, Any]) -> dict[str, dict[str, float]]:
    from antiphon.run.suite_model import SuiteModel

    async with AsyncExitStack() as stack:
        cluster, placement = await stack.enter_async_context(open_cluster(config, None))
        config = choose_dtypes(config, placement, print)
        context = LaunchContext(cluster=cluster, config=config, placement=placement)
        directory = await model_directory(cluster, model, Path(), config.seed)
        assign = device_assigner(cluster, config, "engine")
        starter = EngineStarter(cluster, "engine", directory, config.engine, assign_devices=assign)
        rollout = config.rollout.model_copy(update={"placement": "spread"})  # what is asked is of no group
        pool, max_length = await start_engines(starter, rollout, context.deadlines, context.events, context.report)
        settings = config.learner.model_copy(update={"mesh": MeshConfig(), "cpu_offload": False})
        seed = derive(config.seed, "suite")
        scorer = cluster.spawn("scorer", SCORER, str(directory), settings, seed, place=placement.place("learner"))
        seats = asyncio.Semaphore(BUSY * sum(engine.slots for engine in config.engine.engine_kinds))
        numbers = itertools.count()

        async def generate(tokens: Sequence[int], sampling: Sampling) -> Sequence[int]:
            async with seats:
                number = next(numbers)
                drawn = replace(sampling, seed=derive(seed, number))
                request = GenerateRequest(id=f"suite/{number}", tokens=np.array(tokens, np.int32), sampling=drawn)
                return (await pool.generate(request)).tokens.tolist()

        async def score(packs: list[Pack]) -> list[np.ndarray]:
            answer: list[np.ndarray] = await context.deadlines.wait(
                scorer.call("score", packs),
                name="score",
                owner="run",
                on="the learner",
                deadline=config.learner.timeout,
                key="learner.timeout",
            )
            return answer

        asked_model = SuiteModel(
            directory,
            asyncio.get_running_loop(),
            generate=generate,
            score=score,
            max_length=max_length,
            positions=int(model_shape(directory).get("max_position_embeddings", POSITIONS)),
            tokens_per_pack=settings.tokens_per_pack,
        )
        return await run_supervised(
            [pool.watch(), scorer.died()], lambda _: asyncio.to_thread(_evaluate, asked_model, asked)
        )


def _evaluate(model: Any, asked: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Let lm-eval ask, and return its numbers."""
    import lm_eval
    from datasets.exceptions import DatasetsError

    try:
        found = lm_eval.simple_evaluate(model, log_samples=False, **asked)
    except (DatasetsError, OSError) as error:
        raise DataError(f"the data of {', '.join(asked['tasks'])} cannot be loaded: {error}") from error
    return {
        task: {name: value for name, value in measures.items() if isinstance(value, int | float)}
        for task, measures in found["results"].items()
    }
