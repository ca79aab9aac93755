"""The model and the prompts of a run, as far as a plan needs them."""

import asyncio
import tempfile
from dataclasses import dataclass
from pathlib import Path

from antiphon.cluster.config import ClusterConfig
from antiphon.cluster.local import LocalCluster
from antiphon.run.config import RunConfig
from antiphon.run.launch.model_checks import check_meshes
from antiphon.run.launch.model_directory import model_directory
from antiphon.run.memory import DTYPE_BYTES, memory_estimate
from antiphon.simulate.model_shape import Architecture
from antiphon.tasks.mixture import Mixture
from antiphon.tasks.rendering import Renderer

SAMPLED_PROMPTS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """The facts of a run's model and prompts that a plan needs."""

    shape: Architecture
    prompt_tokens: tuple[int, ...]  # of some prompts

    def longest(self, config: RunConfig) -> int:
        """Return the tokens of the longest sequence."""
        longest = max(self.prompt_tokens) + config.rollout.max_turns * config.rollout.sampling.max_tokens
        return min(longest, config.engine.max_length or longest)

    def cache(self, config: RunConfig) -> int:
        """Return the bytes of the KV cache of an engine whose slots all hold the longest sequence."""
        return (
            config.engine.slots * self.longest(config) * self.shape.cached_per_token * dtype_bytes(config.engine.dtype)
        )

    def memory(self, config: RunConfig) -> dict[str, int]:
        """Return the bytes of each part of the run, without activations."""
        found, cache = memory_estimate(self.shape.parameters, config), config.engine.replicas * self.cache(config)
        return {"KV caches, at most": cache, **found, "all": found["all"] + cache}


def read_model_facts(config: RunConfig) -> ModelFacts:
    """Read the shape of a run's model and the lengths of its first prompts.

    The model is built or fetched if needed, without weights where possible.

    Raises:
        ConfigError: The mesh does not fit the model.
        UnsupportedError: The model cannot be divided so.
    """
    with tempfile.TemporaryDirectory() as scratch:
        return asyncio.run(_read_model_facts(config, Path(scratch) / "model"))


async def _read_model_facts(config: RunConfig, scratch: Path) -> ModelFacts:
    mixture = Mixture.load(config.tasks, config.seed)
    cluster = LocalCluster(ClusterConfig(), scratch.parent)
    try:
        template = config.model.chat_template
        model = await model_directory(
            cluster, config.model.path, scratch, config.seed, weights=False, chat_template=template
        )
    finally:
        await cluster.close()
    check_meshes(config, model)
    renderer = Renderer(model)
    return ModelFacts(
        shape=Architecture.read(model),
        prompt_tokens=tuple(len(renderer.encode_prompt(mixture.next().messages)) for _ in range(SAMPLED_PROMPTS)),
    )


def dtype_bytes(dtype: str) -> int:
    """Return the bytes of a number of a dtype."""
    return DTYPE_BYTES.get(dtype, 4)
