"""Serve a model over HTTP: its engines and the gateway in front of them."""

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
from antiphon.record import safe_files
from antiphon.record.checkpoint import newest_checkpoint
from antiphon.record.events import Events
from antiphon.rollout.config import RolloutConfig
from antiphon.rollout.gateway.config import ServeConfig
from antiphon.rollout.gateway.served_model import ServedModel
from antiphon.rollout.gateway.server import Gateway
from antiphon.run.dtypes import choose_engine_dtypes
from antiphon.run.launch.engines import EngineStarter, start_engines
from antiphon.run.launch.model_directory import model_directory
from antiphon.run.supervision import run_supervised
from antiphon.tasks.rendering import Renderer
from antiphon.tasks.tool_calls import TOOL_FORMATS

# The settings of a run's engines that are used to serve it: kinds, and numbers up to a limit. Programs, addresses and options
# of a library must come from the user.
ALLOWED_KINDS = ("native", "vllm")
MAX_VALUES = {"replicas": 64, "slots": 65_536, "max_length": 1 << 24, "prefill_tokens": 1 << 20, "threads": 256}
ALLOWED_PATTERNS = {"dtype": r"[a-z]+[0-9]+", "device": r"[a-z]+(:[0-9]+)?"}


def load_serving_config(
    target: str, path: Path | None, overrides: Sequence[str], report: Callable[[str], None] = print
) -> tuple[str, ServeConfig]:
    """Find the model to serve and load its settings.

    Args:
        target: Model directory, or run directory: its newest checkpoint is served with the run's engine settings by default.
        path: YAML file of settings.
        overrides: Settings that replace those of the file.
        report: Receives a line for each engine setting of the run that is not used.

    Returns:
        The model directory and the settings.
    """
    if ":" in target:
        message = f"model {target!r}: a function that makes a model cannot be served; give the directory that it made"
        raise ConfigError(message, value=target)
    run = Path(target)
    if not ((run / "config.yaml").exists() and (run / "checkpoints").is_dir()):
        return target, load(path, overrides, model=ServeConfig)
    defaults, recorded = EngineConfig().model_dump(mode="json"), load_recorded(run).engine.model_dump(mode="json")
    changed = {key: value for key, value in recorded.items() if value != defaults[key]}
    used = {key: value for key, value in changed.items() if _is_harmless(key, value)}
    for key in changed.keys() - used.keys():
        report(f"engine.{key} of the run is not used; set it with engine.{key}=...")
    engine = [f"engine.{key}={json.dumps(value)}" for key, value in used.items()]
    model = newest_checkpoint(safe_files.resolve_path(run, "checkpoints"), report)
    return str(model), load(path, [*engine, *overrides], model=ServeConfig)


def _is_harmless(key: str, value: Any) -> bool:
    """Return True if a setting of a run's engine starts no program and asks for no more than a machine may have."""
    if key in MAX_VALUES:
        return bool(value <= MAX_VALUES[key])
    pattern = ALLOWED_PATTERNS.get(key)
    return (key == "kind" and value in ALLOWED_KINDS) or (
        pattern is not None and re.fullmatch(pattern, value) is not None
    )


def serve(target: str, config: ServeConfig, token: str, announce: Callable[[str], None]) -> None:
    """Serve a model to clients that have the token, until SIGTERM or SIGINT.

    Args:
        target: Model directory.
        config: Settings.
        token: Token of the clients.
        announce: Receives the base URL, in a line of its own, with name and endpoints when the server is ready.
    """
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
        engines = choose_engine_dtypes(config.engine, announce)
        starter = EngineStarter(cluster, "engine", directory, engines)
        pool, longest = await start_engines(starter, rollout, deadlines, Events(), announce)
        model = ServedModel(
            generate=pool.generate, tokenizer=renderer, max_length=longest, tools=config.tools, name=config.name
        )
        gateway = await stack.enter_async_context(Gateway(model, host=config.host, port=config.port))
        gateway.issue_key(token)
        announce(gateway.describe(config.name))
        await run_supervised([pool.watch()], lambda _: stop.wait())
