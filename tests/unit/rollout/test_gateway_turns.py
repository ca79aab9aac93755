"""The turns of an agent's attempt: how many it has had."""

import asyncio

import pytest

from antiphon.rollout.gateway import openai
from antiphon.rollout.gateway.chat import ApiError
from tests.unit.rollout.gateway_support import TEMPLATES, Logger, attempt, make


def test_turns_are_replies_and_requests_in_flight(tmp_path):
    """What got no reply takes no turn: a request that was refused, or that the client gave up."""
    plain, waits = make(tmp_path, TEMPLATES["plain"]), asyncio.Event()
    engine = Logger(plain)

    async def generate(request, on_delta=None):
        await waits.wait()
        return await engine(request)

    async def main():
        session = attempt(plain, generate, max_turns=2)
        body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
        with pytest.raises(ApiError, match="its 2 turns"):
            session.prepare(openai.parse_request({**body, "n": 3}))
        for _ in range(3):
            given_up = asyncio.create_task(session.answer(session.prepare(openai.parse_request(body))))
            await asyncio.sleep(0)
            given_up.cancel()
            await asyncio.wait([given_up])
        late = session.prepare(openai.parse_request(body))
        both = asyncio.create_task(session.answer(session.prepare(openai.parse_request({**body, "n": 2}))))
        await asyncio.sleep(0)
        for refused in (lambda: session.answer(late), lambda: session.answer(session.prepare(late.chat))):
            with pytest.raises(ApiError, match="its 2 turns"):
                await refused()
        waits.set()
        assert len(await both) == 2 and session.captured().counts.turns == 2
        with pytest.raises(ApiError, match="its 2 turns"):
            session.prepare(late.chat)

    asyncio.run(main())
