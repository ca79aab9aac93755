"""Agents in the sandboxes of a service, and whole runs of agents whose model calls travel through a log file."""

import asyncio
import re
import signal
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import httpx
import pytest
import yaml

from antiphon.core.errors import ConfigError
from antiphon.core.types import FinishReason
from antiphon.record.trajectories import read
from antiphon.rollout.agents import run_agent
from antiphon.rollout.gateway.server import Gateway
from antiphon.rollout.log_file.agent import LogFileAgent
from antiphon.sandbox.base import TOKEN_VARIABLE
from antiphon.sandbox.remote_commands import PATH, open_remote_sandbox
from benchmarks.sandbox_load import Service
from tests.system.test_agents import ROLLOUT
from tests.system.test_log_file_agents import python
from tests.unit.rollout.gateway_support import TEMPLATES, Logger, attempt_inputs, make, model

pytestmark = pytest.mark.commands("bwrap", "/usr/bin/python3")

TOKEN = "a-token-for-tests"


@pytest.fixture(scope="module")
def renderer(tmp_path_factory):
    return make(tmp_path_factory.mktemp("chat"), TEMPLATES["plain"])


@contextmanager
def serving(*arguments):
    service = Service("warm=0", *arguments, token=TOKEN)
    try:
        yield service
    finally:
        service.close()


def sandboxes(service):
    """The states of all sandboxes that a service knows."""
    answer = httpx.get(f"{service.url}{PATH}/sandboxes", headers={"Authorization": f"Bearer {TOKEN}"})
    return [item["state"] for item in answer.json()["result"]["items"]]


def play(renderer, service, *commands, engine=None, seconds=120.0):
    """Let commands play attempts at the same time, each in a sandbox of the service."""

    async def run():
        async with Gateway(model(renderer, engine or Logger(renderer, ("42", FinishReason.STOP)))) as gateway:
            sandbox = partial(open_remote_sandbox, service.url)
            agents = [LogFileAgent(command=command, open_sandbox=sandbox) for command in commands]
            running = (run_agent(agent, gateway, attempt_inputs(), seconds=seconds) for agent in agents)
            return await asyncio.gather(*running)

    return asyncio.run(run())


def test_attempts_in_the_sandboxes_of_a_service(renderer, monkeypatch):
    """The service has a place for one sandbox at a time: the other attempt waits."""
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    agent = python("print(ask('Hi'), post('Hi', max_tokens=-1)[0], os.getcwd())")
    with serving("sandboxes=1") as service:
        outcomes = play(renderer, service, agent, agent)
        assert [outcome.failure for outcome in outcomes] == [None, None]
        assert {outcome.result for outcome in outcomes} == {"42 400 /box\n", "ok 400 /box\n"}
        assert all(outcome.captured.counts.turns == 1 for outcome in outcomes)
        (failed,) = play(renderer, service, "echo no >&2; exit 4")
        assert (failed.failure.source, failed.failure.message) == ("agent", "exit code 4: no")
        (late,) = play(renderer, service, "sleep 1000", seconds=3.0)
        assert late.failure.message == "took more than 3 s"
        assert set(sandboxes(service)) <= {"stopped", "deleted"}
        assert service.end() == 0 and service.left() == []


def test_a_service_that_dies_fails_the_attempt(renderer, monkeypatch):
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    with serving() as service:

        class Kills(Logger):
            async def __call__(self, request, on_delta=None):
                service.end(signal.SIGKILL)
                return await super().__call__(request)

        (outcome,) = play(renderer, service, python("print(ask('Hi'))"), engine=Kills(renderer))
        assert outcome.failure.source == "environment" and service.url in outcome.failure.message


def test_a_service_that_refuses_the_client(renderer, monkeypatch):
    with serving() as service:
        monkeypatch.setenv(TOKEN_VARIABLE, "another")
        (outcome,) = play(renderer, service, "true")
        assert outcome.failure.source == "environment" and "token" in outcome.failure.message
        monkeypatch.delenv(TOKEN_VARIABLE)
        with pytest.raises(ConfigError) as missing:
            play(renderer, service, "true")
        assert missing.value.value == TOKEN_VARIABLE


# --- whole runs --------------------------------------------------------------------------------------------------------


def trained(project, **more):
    """The trajectories of a run of the example on the page about the gateway, with `more` settings of its agent."""
    page = (Path(__file__).parents[2] / "docs" / "gateway.md").read_text()
    (example,) = (yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL))
    example["tasks"][0]["agent"].update(more)
    done = project.run("train", project.config(**example, steps=1, rollout=ROLLOUT))
    assert done.returncode == 0, done.stderr
    directory = project.folder / "runs" / "run"
    assert project.run("audit", directory).returncode == 0
    trajectories = [each for file in (directory / "rollouts").glob("*.parquet") for each in read(file).values()]
    assert len(trajectories) >= 8 and all(len(each.segments) == 1 for each in trajectories)
    assert project.metrics()[-1]["reward/part/digits/turns"] == 1


def test_a_run_of_agents_without_a_network(project):
    trained(project)


def test_a_run_of_agents_in_a_service(project, monkeypatch):
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    with serving() as service:
        trained(project, service=service.url)
        assert set(sandboxes(service)) <= {"stopped", "deleted"}
