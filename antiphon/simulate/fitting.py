"""Changes of a configuration with which a run fits on its devices."""

from collections.abc import Callable, Iterator, Mapping

from antiphon.core.errors import ConfigError
from antiphon.run.config import RunConfig
from antiphon.simulate.device_memory import find_misfits
from antiphon.simulate.devices import Device
from antiphon.simulate.model_facts import ModelFacts

Load = Callable[[list[str]], RunConfig]

FEWEST_LOGITS = 256  # tokens whose logits exist at once
FEWEST_SLOTS = 8
LORA_RANK = 32


def find_changes(model: ModelFacts, load: Load, device: Device) -> list[str] | None:
    """Return changes with which a run fits on a device, none of which could be left out.

    Cheap ones are tried first: recomputed activations, those in host memory, fewer logits at once, packs of one sequence, fewer
    slots, moments of 8 bits, weights and optimiser in host memory, and at last adapters instead of all weights.

    Args:
        model: The run's model and prompts.
        load: Returns the run's configuration with changes, which are overrides such as `engine.slots=8`; raises `ConfigError`
            if they are not valid together.
        device: The kind of its devices.

    Returns:
        The changes; None if the run does not fit with all of them.
    """

    def fits(changes: Mapping[str, str]) -> bool | None:
        try:
            config = load([f"{key}={value}" for key, value in changes.items()])
        except ConfigError:
            return None
        return not any(find_misfits(model, config, device))

    chosen: dict[str, str] = {}
    for key, value in _changes(model, load([])):
        enough = fits(chosen | {key: value})
        if enough is not None:
            chosen[key] = value
        if enough:
            break
    else:
        return None
    for key in reversed([*chosen]):
        less = {other: chosen[other] for other in chosen if other != key}
        if fits(less):
            chosen = less
    return [f"{key}={value}" for key, value in chosen.items()]


def _changes(model: ModelFacts, config: RunConfig) -> Iterator[tuple[str, str]]:
    """Yield keys and values, the cheapest change first."""
    if not config.learner.gradient_checkpointing:
        yield "learner.gradient_checkpointing", "true"
    if not config.learner.activation_offload:
        yield "learner.activation_offload", "true"
    if config.learner.logits_chunk > FEWEST_LOGITS:
        yield "learner.logits_chunk", str(FEWEST_LOGITS)
    if (longest := model.longest(config)) < config.learner.tokens_per_pack:
        yield "learner.tokens_per_pack", str(longest)
    slots = config.engine.slots // 2
    while slots >= FEWEST_SLOTS:
        yield "engine.slots", str(slots)
        slots //= 2
    if config.learner.lora is None and config.learner.optimizer.moments == "float32":
        yield "learner.optimizer.moments", "8bit"
    if config.learner.lora and config.learner.lora.quantize == "none":
        yield "learner.lora.quantize", "nf4"
    if not config.learner.cpu_offload:
        yield "learner.cpu_offload", "true"
    if config.learner.lora is None:
        yield "learner.lora", f"{{rank: {LORA_RANK}}}"
