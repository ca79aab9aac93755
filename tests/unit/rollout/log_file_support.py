"""Agents that tests trust, whose model calls travel through a log file of this machine."""

import asyncio
import json
from pathlib import Path

from antiphon.rollout.agents import Access
from antiphon.rollout.gateway.server import Gateway
from antiphon.rollout.log_file import model_service
from antiphon.rollout.log_file.exchange import LogFileSandbox, answer_requests, read_output
from antiphon.sandbox.base import Execution
from tests.unit.rollout.gateway_support import attempt_inputs


class Processes:
    """Runs commands of this machine, and writes its files."""

    async def execute(self, command, seconds):
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe)
        out, err = await process.communicate()
        return Execution(exit_code=process.returncode, stdout=out.decode(), stderr=err.decode())

    async def write(self, path, content):
        Path(path).write_text(content, encoding="ascii")


async def start_here(command: str, directory: Path) -> LogFileSandbox:
    """Start a command with a model service, whose log file is in `directory`."""
    (directory / model_service.SETTINGS).write_text(json.dumps({"command": command, "environment": {}}))
    box = LogFileSandbox(Processes(), model_service.__file__, str(directory))
    assert (await box.run("start")).exit_code == 0
    return box


async def play_here(command: str, directory: Path, model, *, max_turns: int = 0):
    """Let a command play an attempt; return its exit code, its output, and what was recorded."""
    async with Gateway(model) as gateway:
        key = gateway.open_attempt(attempt_inputs(), max_turns=max_turns)
        box = await start_here(command, directory)
        code = await answer_requests(box, Access(gateway.address, key))
        return code, await read_output(box), gateway.close_attempt(key)
