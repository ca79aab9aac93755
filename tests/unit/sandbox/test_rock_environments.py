"""Environments over HTTP by the names that ROCK's users know, from a service of real worlds in real processes."""

import asyncio

import httpx
import pytest
from fastapi import FastAPI

from antiphon.cli.serve import spawn_environment
from antiphon.sandbox.service.config import ServiceConfig
from antiphon.sandbox.service.environments import Environments
from antiphon.sandbox.service.metrics import Metrics
from antiphon.sandbox.service.routes import EnvironmentRoutes
from antiphon.tasks.environments import GEM_NAMES

# As gem registers them: rows of the room, boxes, turns.
REGISTERED = {"game:Sokoban-v0-easy": (6, 2, 20), "game:Sokoban-v0-hard": (8, 4, 50)}


@pytest.mark.parametrize("name", REGISTERED)
def test_the_sokoban_of_gem_is_played(name):
    size, boxes, turns = REGISTERED[name]

    async def main():
        async with Environments(ServiceConfig(), Metrics(), [*GEM_NAMES], spawn_environment) as environments:
            app = FastAPI()
            app.include_router(EnvironmentRoutes(environments).router())
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://rock/apis/v1/envs/gem") as client:

                async def ask(path, **body):
                    answer = await client.post(path, json=body, timeout=60)
                    assert answer.status_code == 200, answer.text
                    return answer.json()

                world = await ask("make", env_id=name)
                begun = await ask("reset", **world, seed=42)
                board = [line for line in begun["observation"].splitlines() if line.startswith("#")]
                assert len(board) == size and "".join(board).count("X") + "".join(board).count("√") == boxes
                steps = [await ask("step", **world, action="\\boxed{up}")]
                assert steps[0]["observation"] != begun["observation"]
                while not (steps[-1]["terminated"] or steps[-1]["truncated"]):
                    steps.append(await ask("step", **world, action="\\boxed{down}"))
                assert len(steps) <= turns
                await ask("close", **world)

    asyncio.run(main())
