"""Programs, judged by what they do in a sandbox.

The payload has one of

- `test` and `entry_point`, as HumanEval has them: a text that defines `check(candidate)`; `prompt` is what the code completes
- `tests`: statements that fail, as MBPP has them, each a case; with `setup`, if they need one
- `pytest`: a file of tests that imports the solution as `module` (`solution`); pytest must be in `sandbox.packages`
- `inputs` and `outputs`: standard input and output of whole programs, a pair a case; or `input_output`, the same in JSON

Functions are tested from another process than theirs (see `code_harness`): a solution sees neither its tests nor what they
expect.
"""

import ast
import json
import marshal
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import antiphon.tasks.rewards.code_harness as harness
from antiphon.sandbox.backends import open_sandbox
from antiphon.sandbox.base import Result, Status
from antiphon.sandbox.config import SandboxConfig
from antiphon.tasks.base import Transcript
from antiphon.tasks.rewards.extract import wrong
from antiphon.types import Prompt, Score, ScoreStatus

HARNESS = Path(harness.__file__).read_text(encoding="utf-8")
# Compiled once for the Python of this machine, for what has 250 lines takes longer to compile than to run.
_COMPILED = f"import marshal\nexec(marshal.loads({marshal.dumps(compile(HARNESS, 'harness.py', 'exec'))!r}))"
FENCED = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL | re.IGNORECASE)

REMEMBERED = 512  # verdicts

Outcome = tuple[str, str]  # passed, failed, timeout, broken or untestable; and why


class Code:
    """What the last fenced block of the response, or all of it, does: 1 if every case passes, else 0.

    `parts` has the share of cases that passed, and the isolation level of the sandbox.
    """

    def __init__(
        self,
        *,
        partial_credit: bool = False,
        seconds: float = 8.0,
        case_seconds: float = 2.0,
        sandbox: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """With `partial_credit` the value is the share of cases that pass; without, little is run after one that does not. All
        cases together have `seconds`, which must be less than `grading.deadline`; what is not done by then has failed.
        `sandbox` is a `SandboxConfig`. `UnsupportedError` if this machine cannot keep programs apart as it demands."""
        self._partial = partial_credit
        self._seconds, self._case_seconds = seconds, case_seconds
        self._config = SandboxConfig.model_validate(dict(sandbox))
        self._sandbox = open_sandbox(self._config)
        self._known: dict[tuple[str, str], Score] = {}
        self._elsewhere = bool(self._config.image or self._config.service)

    def __call__(self, prompt: Prompt, transcript: Transcript) -> Score:
        """The verdict; `ValueError` if the payload has no tests, infrastructure if the sandbox was lost."""
        payload = prompt.payload
        if not isinstance(payload, Mapping):
            raise ValueError(f"the payload of prompt {prompt.id} has no tests")
        if payload.get("pytest") and "pytest" not in self._config.packages and not self._elsewhere:
            raise ValueError(
                f"prompt {prompt.id} has tests for pytest: the reward needs `sandbox: {{packages: [pytest]}}`"
            )
        code = code_of(transcript.response)
        if not code.strip():
            return wrong("the response has no code")
        if (known := self._known.get((prompt.id, code))) is not None:
            return known
        pairs = _pairs(payload)
        try:
            outcomes = list(self._programs(code, pairs) if pairs else self._functions(_asked(payload, code)))
        except _Lost as error:
            return Score(status=ScoreStatus.INFRASTRUCTURE, detail=str(error))
        score = self._judged(outcomes)
        if all(outcome != "timeout" for outcome, _ in outcomes):  # which may be the machine's fault
            self._remember((prompt.id, code), score)
        return score

    def close(self) -> None:
        """End the sandbox."""
        self._sandbox.close()

    def _remember(self, key: tuple[str, str], score: Score) -> None:
        """Siblings often give the same answer."""
        self._known[key] = score
        while len(self._known) > REMEMBERED:
            del self._known[next(iter(self._known))]

    def _judged(self, outcomes: list[Outcome]) -> Score:
        for number, (outcome, detail) in enumerate(outcomes):
            if outcome == "untestable":
                return Score.ungraded(f"case {number}: {detail}")
        failed = [
            f"case {n}: {outcome}: {detail}" for n, (outcome, detail) in enumerate(outcomes) if outcome != "passed"
        ]
        share = 1 - len(failed) / len(outcomes)
        return Score(
            status=ScoreStatus.SCORED,
            value=share if self._partial else float(not failed),
            parts={"passed": share, "sandbox_level": float(self._sandbox.level)},
            detail=failed[0] if failed else "",
        )

    def _programs(self, code: str, pairs: list[tuple[str, str]]) -> Iterator[Outcome]:
        """Run the program once a pair."""
        until = time.monotonic() + self._seconds
        for stdin, expected in pairs:
            left = until - time.monotonic()
            if left <= 0:
                yield "timeout", "no time is left for this case"
                continue
            result = self._run(code, stdin, min(left, self._case_seconds))
            if result.status is not Status.OK:
                outcome = "timeout" if result.status is Status.TIMEOUT else "failed"
                yield outcome, f"{result.status}: {_last_line(result.stderr) or result.detail}"
            elif _lines(result.stdout) != _lines(expected):
                yield "failed", "another output"
            else:
                yield "passed", ""
                continue
            if not self._partial:
                return

    def _functions(self, asked: dict[str, Any]) -> Iterator[Outcome]:
        """Run the harness, and again after a case that took too long."""
        until, left = time.monotonic() + self._seconds, len(asked.get("cases", " "))
        while left > 0:
            patience = until - time.monotonic()
            if patience <= 0:
                yield from [("timeout", "no time is left for this case")] * left
                return
            if "cases" in asked:
                asked["cases"] = asked["cases"][-left:]
            result = self._run(
                HARNESS if self._elsewhere else _COMPILED, json.dumps(asked | {"seconds": self._case_seconds}), patience
            )
            told = [(each["outcome"], each["detail"]) for each in map(json.loads, result.stdout.splitlines())]
            yield from told
            left -= len(told)
            if not told or told[-1][0] != "timeout":  # the harness itself was ended, or the solution cannot be loaded
                why = told[-1] if told else ("failed", f"{result.status}: {_last_line(result.stderr) or result.detail}")
                yield from [why] * left
                return
            if not self._partial:
                return

    def _run(self, program: str, stdin: str, seconds: float) -> Result:
        limits = replace(self._config.limits.limits, seconds=seconds, cpu_seconds=seconds)
        result = self._sandbox.run(program, stdin=stdin, limits=limits)
        if result.status is Status.REFUSED:
            raise _Lost(f"the sandbox could not run it: {result.detail}")
        return result


class _Lost(Exception):
    """The sandbox did not run a program."""


def code_of(response: str) -> str:
    """The last fenced block of Python, or of no named language; all of the response if it has none."""
    blocks = FENCED.findall(response)
    return blocks[-1] if blocks else response


def _asked(payload: Mapping[str, Any], code: str) -> dict[str, Any]:
    """What the harness is told; `ValueError` if there are no tests."""
    if payload.get("pytest"):
        return {"solution": code, "pytest": payload["pytest"], "module": payload.get("module", "solution")}
    entry_point = payload.get("entry_point", "")
    if payload.get("test"):
        cases = [f"{payload['test']}\ncheck({entry_point})"]
    else:
        cases = list(payload.get("tests") or payload.get("test_list") or ())
    if not cases:
        raise ValueError(
            f"the payload has none of test, tests, pytest, inputs: it has {', '.join(payload) or 'nothing'}"
        )
    begun = payload.get("prompt", "") if payload.get("test") else ""  # else it is what was asked, in words
    again = re.search(rf"^(?:async )?def {re.escape(entry_point)}\b", code, re.MULTILINE)
    return {
        "solution": f"{_whole(begun) if again else begun}\n{code}",
        "setup": payload.get("setup") or payload.get("test_setup_code") or _whole(begun),
        "cases": cases,
        "entry_point": entry_point,
    }


def _whole(begun: str) -> str:
    """A text that ends in the head of a function, made one that can be run."""
    try:
        ast.parse(begun)
    except SyntaxError:
        return f"{begun}\n    pass"
    return begun


def _pairs(payload: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Standard input and output, a pair a case; none if the payload tests functions."""
    given = payload.get("input_output") or payload
    given = json.loads(given) if isinstance(given, str) else given
    return list(zip(given.get("inputs") or (), given.get("outputs") or (), strict=True))


def _lines(output: str) -> list[str]:
    """What is compared: lines without spaces at their ends, without empty lines at the end."""
    return [line.rstrip() for line in output.rstrip().splitlines()]


def _last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2][:200]
