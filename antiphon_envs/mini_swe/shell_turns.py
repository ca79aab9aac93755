"""Turns in a shell: the command in a response, and the observation of its end and its output."""

import re

from antiphon.sandbox.base import Status
from antiphon.sandbox.sessions.session import CommandResult

SUBMIT = "submit"
BLOCK = re.compile(r"```(?:bash|sh|shell)[ \t]*\n(.*?)```", re.DOTALL)
MALFORMED = "Answer with exactly one command, in a block that begins with ```bash and ends with ```. Nothing was run."


def command_of(action: str) -> str | None:
    """Return the command of a response that has exactly one block; else None."""
    blocks = BLOCK.findall(action)
    return blocks[0].strip() if len(blocks) == 1 else None


def describe_result(result: CommandResult, *, seconds: float, output: int, directory: str) -> str:
    """Return a command's result as the policy reads it.

    Args:
        result: The result.
        seconds: Time limit of the command.
        output: Characters that are kept, of the output's beginning and end.
        directory: Working directory of a new shell.
    """
    end = f"Exit code: {result.exit_code}"
    if result.status is Status.TIMEOUT:
        end = f"Ended after {seconds:g} seconds, which is what a command may take."
    elif result.exit_code is None:
        end = "Ended by a signal."
    if result.ended:
        end += f"\nThe shell has ended, too; the next command gets a new one, in {directory}."
    text = result.raw().decode("utf-8", "replace")
    return f"{end}\nOutput:\n{_cut(text, output, result.dropped)}"


def _cut(text: str, output: int, dropped: int) -> str:
    left_out = len(text) - output
    if left_out > 0:
        begin = output - output // 2
        text = f"{text[:begin]}\n[{left_out} characters left out]\n{text[begin + left_out :]}"
    return text + (f"\n[{dropped} bytes more]" if dropped else "")
