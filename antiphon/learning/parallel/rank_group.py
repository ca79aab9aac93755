"""The workers that are one learner together, as one worker. Packs go to those alone that compute them."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from antiphon.core.errors import AntiphonError, WorkerDiedError
from antiphon.core.types import Pack, TrainBatch
from antiphon.core.workers import WorkerHandle
from antiphon.learning.mesh_config import MeshConfig

DEATH_SECONDS = 5.0  # in which the death of a rank is noticed after others have lost it


class RankGroup:
    """A `WorkerHandle` of several.

    What it is called, all do at once; the answer is that of the first, or what is said of all packs that were asked of. What
    one says is heard when all have said it, or said something else; the death of one is that of all.
    """

    def __init__(self, members: Sequence[WorkerHandle], mesh: MeshConfig) -> None:
        self.name = members[0].name
        self._members = members
        self._mesh = mesh

    async def rendezvous(self, host: str) -> None:
        """Have them find each other, the first listening on an address of its machine."""
        where = await self._members[0].call("host", host)
        await asyncio.gather(*(member.call("join", rank, where) for rank, member in enumerate(self._members)))

    async def call(self, method: str, *args: Any) -> Any:
        """Call a method on all ranks; return the answer of the first, or what is said of all packs."""
        shares = [args] * self._mesh.data
        match args:
            case (TrainBatch() as batch,):
                shares = [(_own(batch, data),) for data in range(self._mesh.data)]
            case ([Pack(), *_] as packs,):
                shares = [(_every(packs, data, self._mesh.data),) for data in range(self._mesh.data)]
        of_data = [self._mesh.data_rank(rank) for rank in range(len(self._members))]
        calls = (member.call(method, *shares[data]) for data, member in zip(of_data, self._members, strict=True))
        answers = await _gather([asyncio.ensure_future(call) for call in calls])
        match args:
            case ([Pack(), *_] as packs,):  # only where the last layers are is anything said
                said = {data: answer for data, answer in zip(of_data, answers, strict=True) if answer}
                return [said[number % len(shares)][number // len(shares)] for number in range(len(packs))]
        return answers[0]

    def send(self, method: str, *args: Any) -> None:
        """Send a message to all ranks."""
        for member in self._members:
            member.send(method, *args)

    def on_event(self, callback: Callable[[Any], None]) -> None:
        """Call back once all ranks have sent an event, with the first that is not empty."""
        said: list[deque[Any]] = [deque() for _ in self._members]

        def hear(own: deque[Any], event: Any) -> None:
            own.append(event)
            if all(said):
                events = [of_one.popleft() for of_one in said]
                callback(next(filter(None, events), events[0]))

        for member, own in zip(self._members, said, strict=True):
            member.on_event(partial(hear, own))

    def on_death(self, callback: Callable[[AntiphonError], None]) -> None:
        """Call back when the first rank dies."""
        told = False

        def tell(error: AntiphonError) -> None:
            nonlocal told
            if not told:
                told = True
                callback(error)

        for member in self._members:
            member.on_death(tell)

    async def died(self) -> None:
        """Return when all ranks have ended."""
        await asyncio.gather(*(member.died() for member in self._members))

    async def close(self) -> None:
        """Close all ranks."""
        await asyncio.gather(*(member.close() for member in self._members))

    def kill(self) -> None:
        """Kill all ranks."""
        for member in self._members:
            member.kill()


async def _gather(calls: Sequence[asyncio.Future[Any]]) -> list[Any]:
    """Return the answers of all ranks, or raise the first error.

    When a rank dies, the others lose its connections, and may say so before the death is noticed: then it is what is raised.
    """
    try:
        return await asyncio.gather(*calls)
    except Exception as error:
        with suppress(TimeoutError):
            async with asyncio.timeout(DEATH_SECONDS):
                while (waiting := [call for call in calls if not call.done()]) and not any(map(_death, calls)):
                    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if (death := next(filter(None, map(_death, calls)), None)) is None:
            raise
        raise death from error


def _death(call: asyncio.Future[Any]) -> WorkerDiedError | None:
    """Return the death of the rank that was called, if it ended a call so."""
    error = call.exception() if call.done() and not call.cancelled() else None
    return error if isinstance(error, WorkerDiedError) else None


def _own(batch: TrainBatch, data: int) -> TrainBatch:
    """A batch with the packs of one share alone."""

    def share(of_ranks: Sequence[tuple[Pack, ...]]) -> tuple[tuple[Pack, ...], ...]:
        return tuple(packs if number == data else () for number, packs in enumerate(of_ranks))

    updates = (replace(u, packs=share(u.packs), forward_only=share(u.forward_only)) for u in batch.updates)
    return TrainBatch(updates=tuple(updates))


def _every(packs: Sequence[Pack], data: int, shares: int) -> list[Pack]:
    """One share of packs: as many for each, because all compute at once, so here and there the last once more."""
    return [
        packs[min(number, len(packs) - 1)] for number in range(data, data + -(-len(packs) // shares) * shares, shares)
    ]
