"""Software repair: the source of a real package with a seeded fault, its own tests, and a shell.

Each turn runs one command. `submit` or the last turn ends the attempt, which is judged by the package's published tests in
a sandbox that the attempt never saw: 1 if all of them pass, else 0. A lost sandbox raises, and never counts as a reward of 0.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field

from antiphon.core.errors import DataError
from antiphon.core.types import Prompt
from antiphon.sandbox.sessions.config import WORK
from antiphon.sandbox.sessions.session import Session
from antiphon.sandbox.sessions.shell_sandbox import ShellSandbox
from antiphon.tasks.base import Reset, Step
from antiphon.tasks.environments.base import BaseEnvironment, EnvironmentConfig
from antiphon_envs.mini_swe.boxes import judge, modules_in, open_box, turn
from antiphon_envs.mini_swe.packages import bytecode, instance_of, package_of
from antiphon_envs.mini_swe.shell_turns import MALFORMED, SUBMIT, command_of, describe_result

MOST_NAMED = 10  # failing tests that the task names

TASK = f"""The source of {{package}} {{version}} is in {WORK}/{{package}}. One of its modules has a small mistake, and these
tests fail:

{{tests}}

Find the mistake and mend it. Answer each time with one command for the shell, in a block:

```bash
python -m pytest -q {{file}}
```

You are told its exit code and its output. Directory and variables last; a command may take {{seconds:g}} seconds. Only changes
to modules that the package has count, and its tests are put back. When you are done, or after {{turns}} turns at the latest,
the tests decide. To be done, answer:

```bash
{SUBMIT}
```"""


class MiniSWE(BaseEnvironment):
    """Repair the fault of `prompt.payload["instance"]`, as the prompt source `mini_swe` yields it."""

    class Config(EnvironmentConfig):
        """Options of `mini_swe`."""

        turns: int = Field(30, ge=1)
        """Turns of an attempt; `rollout.max_turns` must allow as many."""
        seconds: float = Field(30.0, gt=0)
        """Time limit of a command."""
        output: int = Field(8000, ge=0)
        """Characters of a command's output that the policy sees, from its beginning and its end."""

    config: Config
    name: ClassVar[str] = "mini_swe"

    def __init__(self, prompt: Prompt, **options: Any) -> None:
        super().__init__(**options)
        if not isinstance(prompt.payload, Mapping) or "instance" not in prompt.payload:
            message = f"prompt {prompt.id} has no Mini-SWE instance: use the prompt source mini_swe"
            raise DataError(message, column="instance")
        self._instance = instance_of(prompt.payload["instance"])
        self._package = package_of(self._instance)
        self._box: ShellSandbox | None = None
        self._session: Session | None = None

    async def reset(self, seed: int) -> Reset:
        """Begin an attempt; the seed changes nothing."""
        instance = self._instance
        faulty = instance.faulty(self._package)
        cached, compiled = bytecode(instance.path, faulty)
        async with turn():
            self._box = await open_box(self._package.tar({instance.path: faulty, cached: compiled}))
        self._session, self._turns_left = Session(self._box), self.config.turns
        failing = list(instance.fail_to_pass[:MOST_NAMED])
        if len(instance.fail_to_pass) > MOST_NAMED:
            failing.append(f"and {len(instance.fail_to_pass) - MOST_NAMED} more")
        task = TASK.format(
            package=instance.package,
            version=instance.version,
            tests="\n".join(failing),
            file=instance.tests[0],
            seconds=self.config.seconds,
            turns=self.config.turns,
        )
        return task, {}

    async def step(self, action: str) -> Step:
        """Run a command, or end the attempt: then `info` has the number of `passed` tests, and `flags` of cheating."""
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

    async def close(self) -> None:
        """Close the sandbox."""
        if self._box is not None:
            await self._box.close()

    async def _end(self, observation: str, *, submitted: bool) -> Step:
        assert self._box is not None
        async with turn():
            modules = await modules_in(self._box, self._package)
        verdict = await judge(self._instance, modules)
        info = {"passed": verdict.passed, "flags": verdict.flags}
        return observation, float(verdict.solved), submitted, not submitted, info

    async def _run(self, session: Session, command: str) -> str:
        """Run a command; return its result as the policy reads it."""
        async with turn():
            result = await session.run(command, seconds=self.config.seconds)
        return describe_result(result, seconds=self.config.seconds, output=self.config.output, directory=WORK)
