"""An agent whose command runs in a sandbox without a network, of this machine or of a sandbox service."""

import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path

from antiphon.core.errors import SandboxError, UnsupportedError
from antiphon.core.types import Prompt
from antiphon.rollout.agents import TASK_VARIABLE, Access, AgentError, describe_end, describe_task
from antiphon.rollout.log_file import model_service
from antiphon.rollout.log_file.exchange import LogFileSandbox, answer_requests, read_output
from antiphon.sandbox.base import CommandSandbox

DIRECTORY = "/tmp/antiphon"  # in the sandbox
COMMAND_NOT_FOUND = 127  # exit code of a shell


@dataclass(frozen=True, slots=True, kw_only=True)
class LogFileAgent:
    """A shell command in a sandbox of its own, which reaches the policy at an address of the sandbox and nothing else.

    The sandbox needs `python3` and bash. The key of the attempt stays outside.
    """

    command: str
    open_sandbox: Callable[[], AbstractAsyncContextManager[CommandSandbox]]

    async def __call__(self, access: Access, prompt: Prompt) -> str:
        """Run the attempt."""
        async with self.open_sandbox() as sandbox:
            box = LogFileSandbox(sandbox, f"{DIRECTORY}/model_service.py", DIRECTORY)
            await self._start(box, prompt)
            code = await answer_requests(box, access)
            output = await read_output(box)
        if code:
            raise AgentError(describe_end(f"exit code {code}", output[model_service.STDERR]))
        return output[model_service.STDOUT]

    async def _start(self, box: LogFileSandbox, prompt: Prompt) -> None:
        settings = {"command": self.command, "environment": {TASK_VARIABLE: describe_task(prompt)}}
        await box.sandbox.write(box.program, Path(model_service.__file__).read_text(encoding="ascii"))
        await box.sandbox.write(f"{box.directory}/{model_service.SETTINGS}", json.dumps(settings))
        done = await box.run("start")
        if done.exit_code == COMMAND_NOT_FOUND:
            raise UnsupportedError("agents that reach the model through a log file need python3 in their sandbox")
        if done.exit_code:
            raise SandboxError(f"the model service in the sandbox does not start: {done.stderr[-500:]}")
