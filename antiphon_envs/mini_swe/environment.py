"""A world of software repair: the source of a real package with a seeded fault, its own tests, and a shell.

Each turn runs one command. The end, by `submit` or with the last turn, is judged by the package's tests as they were published,
in a box that the attempt never saw: 1 if all of them pass, else 0. A box that is lost raises, and is never worth 0.
"""

import re
from collections.abc import Mapping

from antiphon.core.errors import DataError
from antiphon.core.types import Prompt
from antiphon.sandbox.base import Status
from antiphon.sandbox.sessions.config import WORK
from antiphon.sandbox.sessions.session import Session
from antiphon.sandbox.sessions.shell_sandbox import ShellSandbox
from antiphon.tasks.base import Reset, Step
from antiphon_envs.mini_swe.boxes import judge, modules_in, open_box, turn
from antiphon_envs.mini_swe.packages import bytecode, instance_of, package_of

SUBMIT = "submit"
NAMED = 10  # failing tests that the task names
BLOCK = re.compile(r"```(?:bash|sh|shell)[ \t]*\n(.*?)```", re.DOTALL)

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
MALFORMED = "Answer with exactly one command, in a block that begins with ```bash and ends with ```. Nothing was run."


class MiniSWE:
    """Mend the fault of `prompt.payload["instance"]`, as the prompt source `mini_swe` gives it."""

    def __init__(self, prompt: Prompt, turns: int = 30, seconds: float = 30.0, output: int = 8000) -> None:
        """An attempt has `turns`; `rollout.max_turns` must allow as many, or one that runs out of them is not judged and is
        worth 0. A command may take `seconds`, and so many characters of `output` are told, from its begin and its end."""
        if not isinstance(prompt.payload, Mapping) or "instance" not in prompt.payload:
            raise DataError(f"prompt {prompt.id} has no Mini-SWE instance: use the prompt source mini_swe")
        if turns < 1 or seconds <= 0 or output < 0:
            raise ValueError(f"there is nothing to do with turns={turns}, seconds={seconds}, output={output}")
        self._instance = instance_of(prompt.payload["instance"])
        self._package = package_of(self._instance)
        self._left, self._seconds, self._output = turns, seconds, output
        self._box: ShellSandbox | None = None
        self._session: Session | None = None

    async def reset(self, seed: int) -> Reset:
        """Begin; the seed changes nothing."""
        instance = self._instance
        faulty = instance.faulty(self._package)
        cached, compiled = bytecode(instance.path, faulty)
        async with turn():
            self._box = await open_box(self._package.tar({instance.path: faulty, cached: compiled}))
        self._session = Session(self._box)
        failing = list(instance.fail_to_pass[:NAMED])
        if len(instance.fail_to_pass) > NAMED:
            failing.append(f"and {len(instance.fail_to_pass) - NAMED} more")
        task = TASK.format(
            package=instance.package,
            version=instance.version,
            tests="\n".join(failing),
            file=instance.tests[0],
            seconds=self._seconds,
            turns=self._left,
        )
        return task, {}

    async def step(self, action: str) -> Step:
        """Run the command in `action`, or be done. At the end `info` says how many tests passed, and why the attempt was
        flagged."""
        if self._session is None or not self._left:
            raise RuntimeError("the attempt is over, or was never begun: call reset first")
        self._left -= 1
        command = command_of(action)
        if command == SUBMIT:
            self._left = 0
            return await self._end("", submitted=True)
        said = MALFORMED if command is None else await self._run(self._session, command)
        if not self._left:
            return await self._end(said, submitted=False)
        return f"{said}\n\nTurns left: {self._left}", 0.0, False, False, {}

    async def close(self) -> None:
        """End the box, and all that was in it."""
        if self._box is not None:
            await self._box.close()

    async def _end(self, said: str, *, submitted: bool) -> Step:
        assert self._box is not None
        async with turn():
            modules = await modules_in(self._box, self._package)
        verdict = await judge(self._instance, modules)
        info = {"passed": verdict.passed, "flags": verdict.flags}
        return said, float(verdict.solved), submitted, not submitted, info

    async def _run(self, session: Session, command: str) -> str:
        """What the policy is told of a command."""
        async with turn():
            result = await session.run(command, seconds=self._seconds)
        end = f"Exit code: {result.exit_code}"
        if result.status is Status.TIMEOUT:
            end = f"Ended after {self._seconds:g} seconds, which is what a command may take."
        elif result.exit_code is None:
            end = "Ended by a signal."
        if result.ended:
            end += f"\nThe shell has ended, too; the next command gets a new one, in {WORK}."
        text = result.raw().decode("utf-8", "replace")
        return f"{end}\nOutput:\n{self._cut(text, result.dropped)}"

    def _cut(self, text: str, dropped: int) -> str:
        left_out = len(text) - self._output
        if left_out > 0:
            begin = self._output - self._output // 2
            text = f"{text[:begin]}\n[{left_out} characters left out]\n{text[begin + left_out :]}"
        return text + (f"\n[{dropped} bytes more]" if dropped else "")


def command_of(action: str) -> str | None:
    """The command in the one block of an answer; None if there is no block, or more than one."""
    blocks = BLOCK.findall(action)
    return blocks[0].strip() if len(blocks) == 1 else None
