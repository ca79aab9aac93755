"""Published software tasks, each in a container of its own image: SWE-bench, Terminal-Bench and Harbor.

Each turn runs one command. `submit` or the last turn ends the attempt; then the hidden tests of the task decide. A lost
container, or tests that give no result, raise, and never count as a reward of 0.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field, field_validator

from antiphon.core.errors import ConfigError, DataError
from antiphon.core.types import Prompt
from antiphon.sandbox.sessions.egress import parse_hosts
from antiphon.sandbox.sessions.session import Session
from antiphon.sandbox.sessions.shell_sandbox import ShellSandbox
from antiphon.tasks.base import Reset, Step
from antiphon.tasks.environments.base import BaseEnvironment, EnvironmentConfig, require
from antiphon_envs.mini_swe.shell_turns import MALFORMED, SUBMIT, command_of, describe_result
from antiphon_envs.task_images.containers import start_container
from antiphon_envs.task_images.instances import instance_of

MEMORY = 4096  # MiB, where neither the task nor the option says
SHELL = f"""You have a shell in a Linux container. Answer each time with one command for it, in a block:

```bash
ls
```

You are told its exit code and its output. Directory and variables last; a command may take {{seconds:g}} seconds. When you are
done, or after {{turns}} turns at the latest, hidden tests decide. To be done, answer:

```bash
{SUBMIT}
```"""


class TaskImages(BaseEnvironment):
    """Solve the task of `prompt.payload["instance"]`, as the prompt source `task_images` yields it."""

    class Config(EnvironmentConfig):
        """Options of `task_images`."""

        turns: int = Field(30, ge=1)
        """Turns of an attempt; `rollout.max_turns` must allow as many."""
        seconds: float = Field(60.0, gt=0)
        """Time limit of a command."""
        test_seconds: float = Field(0.0, ge=0)
        """Time limit of the hidden tests; 0 is the task's own. `rollout.environment_timeout` must allow as much."""
        output: int = Field(8000, ge=0)
        """Characters of a command's output that the policy sees, from its beginning and its end."""
        memory: int = Field(0, ge=0)
        """MiB of a container; 0 is what the task says, or 4096."""
        network: list[str] = []
        """Hosts, each as `host:port`, that commands and tests reach by HTTP and HTTPS; the image then needs python3."""

        @field_validator("network")
        @classmethod
        def _are_hosts(cls, hosts: list[str]) -> list[str]:
            try:
                parse_hosts(hosts)
            except ConfigError as error:
                require(False, "network", error.value, "hosts, each with a port, such as example.org:443")
            return hosts

    config: Config
    name: ClassVar[str] = "task_images"

    def __init__(self, prompt: Prompt, **options: Any) -> None:
        super().__init__(**options)
        if not isinstance(prompt.payload, Mapping) or "instance" not in prompt.payload:
            message = f"prompt {prompt.id} has no task in an image: use the prompt source task_images"
            raise DataError(message, column="instance")
        self._instance = instance_of(prompt.payload["instance"])
        self._box: ShellSandbox | None = None
        self._session: Session | None = None
        self._state = self._directory = ""
        self._solved = False  # the expert has run the solution

    async def reset(self, seed: int) -> Reset:
        """Begin an attempt; the seed changes nothing."""
        self._box = await self._start()
        self._state = await self._instance.prepare(Session(self._box))
        self._session, self._turns_left = Session(self._box), self.config.turns
        await self._log_in(self._session)
        return SHELL.format(seconds=self.config.seconds, turns=self.config.turns), {}

    async def step(self, action: str) -> Step:
        """Run a command, or end the attempt: then `info` has `success` and the partial figures of the task's tests."""
        self._check_running()
        assert self._session is not None
        self._turns_left -= 1
        command = command_of(action)
        if command == SUBMIT:
            self._turns_left = 0
            return await self._end("", submitted=True)
        observation = MALFORMED if command is None else await self._run(self._session, command)
        if not self._turns_left:
            return await self._end(observation, submitted=False)
        return f"{observation}\n\nTurns left: {self._turns_left}", 0.0, False, False, {}

    def expert(self) -> str:
        """Return the published solution as the first action, then `submit`; `DataError` if none was published."""
        command = SUBMIT if self._solved else self._instance.solution()
        self._solved = True
        return f"```bash\n{command}\n```"

    async def close(self) -> None:
        """Remove the container."""
        if self._box is not None:
            await self._box.close()

    async def _start(self) -> ShellSandbox:
        task = self._instance
        memory = self.config.memory or task.memory or MEMORY
        return await start_container(
            task.image, memory=memory, variables=task.variables, network=tuple(self.config.network)
        )

    async def _end(self, observation: str, *, submitted: bool) -> Step:
        assert self._box is not None and self._session is not None
        seconds = self.config.test_seconds or self._instance.test_seconds
        verdict = await self._instance.grade(self._box, self._session, self._state, self._start, seconds)
        return observation, verdict.reward, submitted, not submitted, {"success": verdict.reward == 1, **verdict.info}

    async def _log_in(self, session: Session) -> None:
        self._directory = (
            await session.run(f"{self._instance.login}; pwd", seconds=self.config.seconds)
        ).stdout.strip()

    async def _run(self, session: Session, command: str) -> str:
        """Run a command; return its result as the policy reads it."""
        result = await session.run(command, seconds=self.config.seconds)
        if result.ended:
            await self._log_in(session)
        return describe_result(
            result, seconds=self.config.seconds, output=self.config.output, directory=self._directory
        )
