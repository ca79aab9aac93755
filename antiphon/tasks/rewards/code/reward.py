"""Programs, judged by what they do in a sandbox.

The payload has one of

- `test` and `entry_point`, as HumanEval has them: a text that defines `check(candidate)`; `prompt` is what the code completes
- `tests`: statements that fail, as MBPP has them, each a case; with `setup`, if they need one
- `pytest`: a file of tests that imports the solution as `module` (`solution`); pytest must be in `sandbox.packages`
- `inputs` and `outputs`: standard input and output of whole programs, a pair a case; or `input_output`, the same in JSON

Tests of functions run in another sandbox than the solution (see `code.harness`), and take of it what their text names. For what
that does not say the payload may have `names` (more of the solution's names, or those of them that `setup` defines as well),
`methods` (operators and the like, as `__len__`, that an object of the solution may answer itself) and `in_place` (true: what
the solution changes of an argument is seen by the tests).
"""

import ast
import hashlib
import json
import re
import secrets
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from antiphon.core.types import Prompt, Score, ScoreStatus
from antiphon.sandbox.backends import open_sandbox
from antiphon.sandbox.base import Limits, Result, Status
from antiphon.sandbox.config import SandboxConfig
from antiphon.tasks.base import Transcript
from antiphon.tasks.rewards.code.names import find_imports, find_uses
from antiphon.tasks.rewards.code.programs import modules, programs
from antiphon.tasks.rewards.extract import zero_score
from antiphon.tasks.rewards.fences import last_block

TAGS = frozenset({"python", "py", "python3", "py3"})  # of blocks

REMEMBERED = 512  # verdicts
LINE = 4096  # bytes of the judge's output, at most, for each case

Outcome = tuple[str, str]  # passed, failed, timeout or broken; and why


class Code:
    """1 if the last fenced block of Python in the response (see `code_of`), or all of it, passes every case, else 0.

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
        """Make the reward.

        Args:
            partial_credit: Return the share of cases that pass; without, few cases run after one that fails.
            seconds: Time limit of all cases, less than `grading.deadline`; cases not done by then have failed.
            case_seconds: Time limit of one case.
            sandbox: Fields of `SandboxConfig`.

        Raises:
            UnsupportedError: This machine cannot isolate programs as `sandbox` demands.
        """
        self._partial = partial_credit
        self._seconds, self._case_seconds = seconds, case_seconds
        self._config = SandboxConfig.model_validate(dict(sandbox))
        self._sandbox = open_sandbox(self._config, modules())
        self._known: dict[bytes, Score] = {}  # by what was judged: payload and code
        self._elsewhere = bool(self._config.image or self._config.service)
        self._linked = programs(imported=not self._elsewhere)

    def __call__(self, prompt: Prompt, transcript: Transcript) -> Score:
        """Score a trajectory; `ValueError` if the payload has no tests, status infrastructure if the sandbox was lost."""
        payload = prompt.payload
        if not isinstance(payload, Mapping):
            raise ValueError(f"the payload of prompt {prompt.id} has no tests")
        if payload.get("pytest") and "pytest" not in self._config.packages and not self._elsewhere:
            raise ValueError(
                f"prompt {prompt.id} has tests for pytest: the reward needs `sandbox: {{packages: [pytest]}}`"
            )
        code = code_of(transcript.response)
        if not code.strip():
            return zero_score("the response has no code")
        if any("\ud800" <= character <= "\udfff" for character in code):  # which not every sandbox can be given
            return zero_score("the code is no text: it has half a character")
        key = hashlib.sha256(repr((payload, code)).encode("utf-8", "surrogatepass")).digest()
        if (known := self._known.get(key)) is not None:
            return known
        pairs = _pairs(payload)
        try:
            outcomes = list(
                self._programs(code, pairs) if pairs else self._functions(_job(payload, code, self._config))
            )
        except _LostProgramError as error:
            return Score(status=ScoreStatus.INFRASTRUCTURE, detail=str(error))
        score = self._judged(outcomes)
        if all(outcome != "timeout" for outcome, _ in outcomes):  # which may be the machine's fault
            self._remember(key, score)
        return score

    def close(self) -> None:
        """End the sandbox."""
        self._sandbox.close()

    def _remember(self, key: bytes, score: Score) -> None:
        """Siblings often give the same answer."""
        self._known[key] = score
        while len(self._known) > REMEMBERED:
            del self._known[next(iter(self._known))]

    def _judged(self, outcomes: list[Outcome]) -> Score:
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

    def _functions(self, job: dict[str, Any]) -> Iterator[Outcome]:
        """Have the tests run, and again after a case that took too long or ended the solution's process."""
        until, left = time.monotonic() + self._seconds, len(job.get("cases", " "))
        while left > 0:
            patience = until - time.monotonic()
            if patience <= 0:
                yield from [("timeout", "no time is left for this case")] * left
                return
            if "cases" in job:
                job["cases"] = job["cases"][-left:]
            told, lost = self._judge(job, patience)
            yield from told
            left -= len(told)
            if lost or not told:
                yield from [lost or ("failed", "no test ran")] * max(left, 1)
                return
            if "pytest" in job or told[-1][0] == "broken":
                yield from [told[-1]] * left
                return
            if not self._partial and told[-1][0] != "passed":
                return

    def _judge(self, job: dict[str, Any], patience: float) -> tuple[list[Outcome], Outcome | None]:
        """Return the outcomes that the judge reported, and that of the remaining cases if it did not finish.

        Lines without the nonce of this run are not the judge's.
        """
        nonce = secrets.token_hex(16)
        limits = self._limits(patience)
        limits = replace(limits, output=max(limits.output, LINE * (len(job.get("cases", "")) + 16)))
        asked = json.dumps(job | {"nonce": nonce, "seconds": self._case_seconds})
        result = self._checked(self._sandbox.run_linked(*self._linked, stdin=asked, limits=limits))
        told = [line for line in map(_read, result.stdout.splitlines()) if line.get("nonce") == nonce]
        if not told:  # whatever the solution is, it had not begun
            raise _LostProgramError(
                f"the tests did not start: {_last_line(result.stderr) or result.detail or result.status}"
            )
        outcomes = [(line["outcome"], line["detail"]) for line in told if line["kind"] == "case"]
        if told[-1]["kind"] == "end":
            return outcomes, None
        why = f"the tests were ended: {result.status}: {_last_line(result.stderr) or result.detail}"
        return outcomes, ("timeout" if result.status is Status.TIMEOUT else "failed", why)

    def _run(self, program: str, stdin: str, seconds: float) -> Result:
        return self._checked(self._sandbox.run(program, stdin=stdin, limits=self._limits(seconds)))

    def _limits(self, seconds: float) -> Limits:
        return replace(self._config.limits.limits, seconds=seconds, cpu_seconds=seconds)

    def _checked(self, result: Result) -> Result:
        if result.status is Status.REFUSED:
            raise _LostProgramError(f"the sandbox could not run it: {result.detail}")
        return result


class _LostProgramError(Exception):
    """The sandbox did not run a program."""


def code_of(response: str) -> str:
    """Return the last fenced block of Python, else the last of no named language; all of the response if it has none."""
    block = last_block(response, TAGS)
    return response if block is None else block


def _read(line: str) -> dict[str, Any]:
    """A line of the judge's; an empty one if it is not."""
    try:
        found = json.loads(line)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _job(payload: Mapping[str, Any], code: str, config: SandboxConfig) -> dict[str, Any]:
    """Make the job of the judge; `ValueError` if there are no tests, or no Python in them."""
    declared = [str(name) for name in payload.get("names") or ()]
    common = {
        "methods": [str(name) for name in payload.get("methods") or ()],
        "in_place": payload.get("in_place") is True,
    }
    if payload.get("pytest"):
        module = payload.get("module", "solution")
        uses = find_imports(payload["pytest"], module)
        asked = {"solution": code, "pytest": payload["pytest"], "module": module}
    else:
        asked = _cases(payload, code)
        uses = find_uses(asked["setup"], tuple(asked["cases"]), config.packages)
        declared += [entry_point] if (entry_point := payload.get("entry_point")) else []
    return {
        **asked,
        **common,
        "names": sorted({*uses.names, *declared}),
        "declared": declared,
        "modules": {name: module for name, module in uses.modules.items() if name not in declared},
        "attributes": sorted(uses.attributes),
        "caught": sorted(uses.caught),
    }


def _cases(payload: Mapping[str, Any], code: str) -> dict[str, Any]:
    entry_point = payload.get("entry_point") or ""
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
    """Return lines without spaces at their ends and without empty lines at the end, for comparison."""
    return [line.rstrip() for line in output.rstrip().split("\n")]


def _last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2][:200]
