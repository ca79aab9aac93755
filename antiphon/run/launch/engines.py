"""Starting a pool of engines."""

from collections.abc import Callable, Mapping

from antiphon.core.deadlines import Deadlines
from antiphon.record.events import Events
from antiphon.rollout.config import RolloutConfig
from antiphon.rollout.engine_supervisor import EngineSupply
from antiphon.rollout.pool import EnginePool
from antiphon.run.device_assignment import EngineStarter


async def start_engines(
    starter: EngineStarter,
    rollout: RolloutConfig,
    deadlines: Deadlines,
    events: Events,
    report: Callable[[str], None],
    prefers: Mapping[str, str] | None = None,
) -> tuple[EnginePool, int]:
    """Start a pool of engines; returns it with the number of tokens that a sequence may have in all of them."""
    engines = await starter.first(deadlines, rollout.timeout, report)
    pool = EnginePool(
        engines,
        deadlines,
        rollout,
        events=events,
        on_loss=report,
        supply=EngineSupply(start=starter.another, target=starter.wanted, scaling=starter.scaling),
        preferred_devices=prefers,
    )
    starter.turn = pool.hold_devices
    return pool, min(engine.max_length for engine in engines)
