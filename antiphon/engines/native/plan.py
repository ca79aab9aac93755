"""Plans the work of one engine step from the slot table alone."""

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from antiphon.engines.native.slots import NO_MATCH, Indices, PrefixMatch, SlotTable

# A sequence waits for another that is being read if that spares it at least this many tokens.
_WORTH_WAITING = 16


class CacheCopier(Protocol):
    """The part of the KV cache that planning needs."""

    def copy(self, source: int, targets: list[int], tokens: int) -> None:
        """Copy the first `tokens` positions of slot `source` to the slots `targets`."""


@dataclass(slots=True)
class Plan:
    """The tokens that one step computes.

    `decode` are slots (ascending) of which the last token is computed, `chunks` pieces (slot, start, stop) that are prefilled.
    Chunks in `finishing` reach the end of their sequence. `followers` of such a slot have the very same tokens: they sample
    from its logits and then copy its cache.
    """

    decode: Indices
    chunks: list[tuple[int, int, int]] = field(default_factory=list)
    finishing: list[int] = field(default_factory=list)  # indices into chunks
    followers: dict[int, list[int]] = field(default_factory=dict)

    @property
    def empty(self) -> bool:
        """True if there is nothing to compute."""
        return not len(self.decode) and not self.chunks


def plan_step(table: SlotTable, cache: CacheCopier, budget: int, weights_id: int) -> Plan:
    """Decode whatever is ready and read at most `budget` tokens of what is not, first come first served.

    What another slot holds already is copied at once. What another slot reads in this very step is waited for, so that
    siblings which arrive together are read once.
    """
    todo = table.length - table.cached
    unread = np.flatnonzero(table.active & (todo > 1))
    if not len(unread):
        return Plan(np.flatnonzero(table.active))
    plan = Plan(np.empty(0, np.int64))
    finishing: dict[bytes, int] = {}
    for slot in unread[np.argsort(table.arrival[unread], kind="stable")].tolist():
        if budget <= 0:
            break
        budget -= _plan_slot(table, cache, plan, finishing, slot, budget, weights_id)
    plan.decode = np.flatnonzero(table.active & (table.length - table.cached == 1))
    return plan


def _plan_slot(
    table: SlotTable,
    cache: CacheCopier,
    plan: Plan,
    finishing: dict[bytes, int],
    slot: int,
    budget: int,
    weights_id: int,
) -> int:
    """Add a slot that has more than one token to compute to the plan; returns the tokens it takes of the budget."""
    length = int(table.length[slot])
    own = table.tokens[slot, :length]
    if not table.cached[slot]:
        leader = finishing.get(own.tobytes())
        if leader is not None:
            plan.followers.setdefault(leader, []).append(slot)
            return 0
        held = _match_cached(table, slot, weights_id)
        ahead = _match_pending(table, plan, slot, weights_id)
        if ahead.tokens - held.tokens >= _WORTH_WAITING:
            return 0
        if held.tokens:
            cache.copy(held.slot, [slot], held.tokens)
            table.cached[slot] = held.tokens
    start = int(table.cached[slot])
    stop = min(length, start + budget)
    if start == length - 1:
        return 0  # ready to decode
    if stop == length:
        plan.finishing.append(len(plan.chunks))
        if table.weights_id[slot] == weights_id:
            finishing.setdefault(own.tobytes(), slot)
    plan.chunks.append((slot, start, stop))
    return stop - start


def _match_cached(table: SlotTable, slot: int, weights_id: int) -> PrefixMatch:
    """The longest beginning of the slot's tokens that another slot holds, computed by the present weights."""
    length = int(table.length[slot])
    usable = (table.weights_id == weights_id) & (table.cached > 0)
    usable[slot] = False
    return table.match_prefix(table.tokens[slot, :length], np.flatnonzero(usable), table.cached, length - 1)


def _match_pending(table: SlotTable, plan: Plan, slot: int, weights_id: int) -> PrefixMatch:
    """The longest beginning of the slot's tokens that is being read in this step."""
    if not plan.chunks:
        return NO_MATCH
    length = int(table.length[slot])
    reading = np.array([chunk[0] for chunk in plan.chunks])
    reading = reading[table.weights_id[reading] == weights_id]
    return table.match_prefix(table.tokens[slot, :length], reading, table.length, length - 1)
