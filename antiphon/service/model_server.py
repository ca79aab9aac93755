"""Serving a model that was trained, or any other: its engines, and the gateway before them."""

import asyncio
import json
import re
import signal
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from antiphon.cluster.config import ClusterConfig
from antiphon.cluster.local import LocalCluster
from antiphon.core.config import load
from antiphon.core.deadlines import Deadlines
from antiphon.core.errors import ConfigError
from antiphon.engines.config import EngineConfig
from antiphon.inspect.recorded_config import load_recorded
from antiphon.record import reading
from antiphon.record.checkpoint import newest_checkpoint
from antiphon.record.events import Events
from antiphon.rollout.config import RolloutConfig
from antiphon.rollout.gateway.config import ServeConfig
from antiphon.rollout.gateway.served_model import ServedModel
from antiphon.rollout.gateway.server import Gateway
from antiphon.run.launch.engines import EngineStarter, start_engines
from antiphon.run.launch.model_directory import model_directory
from antiphon.run.supervision import run_supervised
from antiphon.tasks.rendering import Renderer
from antiphon.tasks.tool_calls import TOOL_FORMATS

# What an engine of a run may say of the engines that serve it: kinds and numbers, up to these. A program, an address or options
# of a library are for whoever serves to give.
KINDS = ("native", "vllm")
NUMBERS = {"replicas": 64, "slots": 65_536, "max_length": 1 << 24, "prefill_tokens": 1 << 20, "threads": 256}
WORDS = {"dtype": r"[a-z]+[0-9]+", "device": r"[a-z]+(:[0-9]+)?"}


def load_serving_config(
    target: str, path: Path | None, overrides: Sequence[str], tell: Callable[[str], None] = print
) -> tuple[str, ServeConfig]:
    """Where the model lies that `target`, a model or the directory of a run, means, and how it is to be served: as the file and
    the overrides say, with the engines of the run by default. `tell` hears what of them is not taken over."""
    if ":" in target:
        raise ConfigError(
            f"model {target!r}: a function that makes a model cannot be served; give the directory it made"
        )
    run = Path(target)
    if not ((run / "config.yaml").exists() and (run / "checkpoints").is_dir()):
        return target, load(path, overrides, model=ServeConfig)
    usual, had = EngineConfig().model_dump(mode="json"), load_recorded(run).engine.model_dump(mode="json")
    changed = {key: value for key, value in had.items() if value != usual[key]}
    taken = {key: value for key, value in changed.items() if _is_harmless(key, value)}
    for key in changed.keys() - taken.keys():
        tell(f"engine.{key} of the run is not taken over; engine.{key}=... gives one")
    engine = [f"engine.{key}={json.dumps(value)}" for key, value in taken.items()]
    model = newest_checkpoint(reading.resolve_path(run, "checkpoints"), tell)
    return str(model), load(path, [*engine, *overrides], model=ServeConfig)


def _is_harmless(key: str, value: Any) -> bool:
    """Return True if a setting of a run's engine starts no program, and asks for no more than a machine may have."""
    if key in NUMBERS:
        return bool(value <= NUMBERS[key])
    return (key == "kind" and value in KINDS) or (key in WORDS and re.fullmatch(WORDS[key], value) is not None)


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
        deadlines, cluster = Deadlines(), LocalCluster(ClusterConfig())
        stack.push_async_callback(cluster.close)
        directory = await model_directory(cluster, target, Path(), 0)
        renderer = Renderer(directory)
        rollout = RolloutConfig.model_validate(
            {"groups_per_step": 1, "timeout": config.timeout, "sampling": {"max_tokens": 1}}
        )
        starter = EngineStarter(cluster, "engine", directory, config.engine)
        pool, longest = await start_engines(starter, rollout, deadlines, Events(), announce)
        model = ServedModel(
            generate=pool.generate, tokenizer=renderer, max_length=longest, tools=config.tools, name=config.name
        )
        gateway = await stack.enter_async_context(Gateway(model, host=config.host, port=config.port))
        gateway.issue_key(token)
        announce(gateway.address)
        await run_supervised([pool.watch()], lambda _: stop.wait())
