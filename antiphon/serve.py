"""Serving a model that was trained, or any other: its engines, and the gateway before them."""

import asyncio
import json
import signal
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from antiphon.cluster.config import ClusterConfig
from antiphon.cluster.local import LocalCluster
from antiphon.config import load
from antiphon.engines.config import EngineConfig
from antiphon.errors import ConfigError
from antiphon.loop import supervised
from antiphon.record.checkpoint import newest
from antiphon.record.events import Events
from antiphon.rollout.config import RolloutConfig
from antiphon.rollout.gateway.config import ServeConfig
from antiphon.rollout.gateway.server import Gateway
from antiphon.rollout.gateway.sessions import Model
from antiphon.run_config import RunConfig
from antiphon.seats import EngineStarter
from antiphon.start import model_directory, start_engines
from antiphon.tasks.rendering import Renderer
from antiphon.tasks.tool_calls import TOOL_FORMATS
from antiphon.waits import Waits


def configured(target: str, path: Path | None, overrides: Sequence[str]) -> tuple[str, ServeConfig]:
    """Where the model lies that `target`, a model or the directory of a run, means, and how it is to be served: as the file and
    the overrides say, with the engines of the run by default."""
    if ":" in target:
        raise ConfigError(
            f"model {target!r}: a function that makes a model cannot be served; give the directory it made"
        )
    run = Path(target, "config.yaml")
    if not (run.is_file() and Path(target, "checkpoints").is_dir()):
        return target, load(path, overrides, model=ServeConfig)
    usual, had = EngineConfig().model_dump(mode="json"), load(run, model=RunConfig).engine.model_dump(mode="json")
    engine = [f"engine.{key}={json.dumps(value)}" for key, value in had.items() if value != usual[key]]
    return str(newest(Path(target, "checkpoints"), print)), load(path, [*engine, *overrides], model=ServeConfig)


def serve(target: str, config: ServeConfig, token: str, announce: Callable[[str], None]) -> None:
    """Serve the model at `target` to who has the token, until SIGTERM or SIGINT; `announce` is told the address when all is
    ready."""
    TOOL_FORMATS.resolve(config.tools)
    asyncio.run(_serve(target, config, token, announce))


async def _serve(target: str, config: ServeConfig, token: str, announce: Callable[[str], None]) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with AsyncExitStack() as stack:
        waits, cluster = Waits(), LocalCluster(ClusterConfig())
        stack.push_async_callback(cluster.close)
        directory = await model_directory(cluster, target, Path(), 0)
        renderer = Renderer(directory)
        rollout = RolloutConfig.model_validate(
            {"groups_per_step": 1, "timeout": config.timeout, "sampling": {"max_tokens": 1}}
        )
        starter = EngineStarter(cluster, "engine", directory, config.engine)
        pool, longest = await start_engines(starter, rollout, waits, Events(), announce)
        model = Model(
            generate=pool.generate, tokenizer=renderer, max_length=longest, tools=config.tools, name=config.name
        )
        gateway = await stack.enter_async_context(Gateway(model, host=config.host, port=config.port))
        gateway.invite(token)
        announce(gateway.address)
        await supervised([pool.watch()], lambda _: stop.wait())
