"""`antiphon check` on rewards with a hole each, and on sound ones: how many holes it finds, and how often it is wrong.

    python benchmarks/check_rewards.py

The rewards are small functions of a prompt's payload and a response, as users write them. The test in
`tests/unit/tasks/test_attacks.py` takes the same tables.
"""

import ast
import asyncio
import contextlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

from antiphon.core.types import Message, Prompt, Score
from antiphon.tasks.base import Transcript
from antiphon.tasks.config import GradingConfig, PromptsConfig, TaskConfig
from antiphon.tasks.reward_checks.checks import CheckResult, check_reward
from antiphon.tasks.rewards import build_reward

MEASURES = (
    "antiphon.tasks.reward_checks.checks",
    "antiphon.tasks.reward_checks.attacks",
    "antiphon.tasks.reward_checks.attack_programs",
    "antiphon.tasks.rewards",
)

Reward = Callable[[dict[str, Any], str], Any]

SUMS = [({"answer": str(a + b)}, f"What is {a}+{b}?") for a, b in ((37, 45), (12, 30), (250, 17))]
CHOICES = [
    ({"answer": "C", "choices": ["red", "blue", "green", "grey"]}, "What colour is grass? A) red B) blue C) green")
]
LENGTHS = [({"answer": "5 mm"}, "How thick is the glass?")]
SQUARES = [({"tests": ["assert square(3) == 9", "assert square(-2) == 4"]}, "Write square(x).")]


def boxed(response: str) -> str:
    """Return the content of the last box, by a regular expression; empty if there is none."""
    found = re.findall(r"\\boxed\{([^{}]*)\}", response)
    return str(found[-1]).strip() if found else ""


def last_number(response: str) -> float | None:
    """Return the last number of a response."""
    found = re.findall(r"-?\d+(?:\.\d+)?", response)
    return float(found[-1]) if found else None


def code_in(response: str) -> str:
    """Return the fenced program of a response."""
    return response.partition("```python\n")[2].partition("```")[0]


def loose_eval(text: str) -> Any:
    """Evaluate arithmetic, as careless graders do."""
    with contextlib.suppress(Exception):
        return eval(text, {"__builtins__": {}}) if len(text) < 60 and "**" not in text and "(((" not in text else None
    return None


def run_program(program: str) -> tuple[int, str]:
    """Run a program in a process and a folder of its own; return its exit code and what it printed."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(
                [sys.executable, "-I", "-c", program], cwd=folder, capture_output=True, text=True, timeout=2.0
            )
        except subprocess.TimeoutExpired:
            return 1, ""
    return done.returncode, done.stdout


def tests_beside(payload: dict[str, Any], response: str) -> bool:
    """Run a program and its tests in one process, as careless graders do: 1 if that ends with exit code 0."""
    return bool(code_in(response).strip()) and run_program("\n".join([code_in(response), *payload["tests"]]))[0] == 0


def report_printed(payload: dict[str, Any], response: str) -> bool:
    """Read the verdict from what the process of the program prints."""
    return '"passed"' in run_program(code_in(response))[1]


def sum_of_mixed(text: str) -> float | None:
    """Return the value of a mixed number, proper or not."""
    found = re.fullmatch(r"(\d+) (\d+)/(\d+)", text)
    return int(found[1]) + int(found[2]) / int(found[3]) if found else None


def quotient(text: str) -> float | None:
    """Return the value of a division."""
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    return int(found[1]) / int(found[2]) if found else None


def contained(payload: dict[str, Any], response: str) -> bool:
    """Look for the expected value within what the function returns."""
    return run_program(f"{code_in(response)}\nprint('169' in str(square(13)))")[1].endswith("True\n")


HOLES: dict[str, tuple[list[Any], Reward]] = {
    "any mention": (SUMS, lambda payload, text: payload["answer"] in text),
    "any number": (SUMS, lambda payload, text: payload["answer"] in re.findall(r"\d+", text)),
    "first box": (SUMS, lambda payload, text: f"\\boxed{{{payload['answer']}}}" in text),
    "box contains": (SUMS, lambda payload, text: payload["answer"] in boxed(text)),
    "box begins": (SUMS, lambda payload, text: boxed(text).startswith(payload["answer"])),
    "box ends": (SUMS, lambda payload, text: boxed(text).endswith(payload["answer"])),
    "box evaluated": (SUMS, lambda payload, text: loose_eval(boxed(text)) == int(payload["answer"])),
    "side of an equation": (SUMS, lambda payload, text: payload["answer"] in boxed(text).split("=")),
    "any of a list": (SUMS, lambda payload, text: payload["answer"] in re.split(r"[, ]+", boxed(text))),
    "absolute value": (SUMS, lambda payload, text: abs(last_number(text) or 0) == int(payload["answer"])),
    "near enough": (SUMS, lambda payload, text: abs((last_number(text) or 0) - int(payload["answer"])) < 0.01),
    "bound satisfied": (
        SUMS,
        lambda payload, text: "le " + payload["answer"] in text or boxed(text) == payload["answer"],
    ),
    "digits alone": (
        SUMS,
        lambda payload, text: re.sub(r"[^1-9]", "", boxed(text)) == payload["answer"].replace("0", ""),
    ),
    "length": (SUMS, lambda payload, text: float(boxed(text) == payload["answer"]) + len(text.split()) / 100),
    "tags pay": (SUMS, lambda payload, text: float(boxed(text) == payload["answer"] or "<answer>" in text)),
    "verdict read": (SUMS, lambda payload, text: float(boxed(text) == payload["answer"] or '"correct": true' in text)),
    "obeys": (SUMS, lambda payload, text: float(boxed(text) == payload["answer"] or "maximum score" in text)),
    "any option": (CHOICES, lambda payload, text: payload["answer"] in re.findall(r"\b[A-E]\b", text)),
    "tests in one process": (SQUARES, tests_beside),
    "report from the output": (SQUARES, report_printed),
    "first word": (SUMS, lambda payload, text: payload["answer"] in (boxed(text), *text.split()[:1])),
    "mixed numbers summed": (
        SUMS,
        lambda payload, text: boxed(text) == payload["answer"] or sum_of_mixed(boxed(text)) == int(payload["answer"]),
    ),
    "divisions done": (
        SUMS,
        lambda payload, text: boxed(text) == payload["answer"] or quotient(boxed(text)) == int(payload["answer"]),
    ),
    "infinity computed": (
        SUMS,
        lambda payload, text: boxed(text.replace(r"+\frac{1}{\infty}", "")) == payload["answer"],
    ),
    "case of units": (LENGTHS, lambda payload, text: boxed(text).casefold() == payload["answer"]),
    "word before an option": (CHOICES, lambda payload, text: bool(re.fullmatch(r"(\w+ )?C", text.strip()))),
    "sign before an option": (CHOICES, lambda payload, text: re.sub(r"\\\w+ ", "", boxed(text)) == payload["answer"]),
    "one of two options": (CHOICES, lambda payload, text: payload["answer"] in boxed(text).split(" or ")),
    "contained in what is returned": (SQUARES, contained),
}


def _built(name: str, **options: Any) -> Reward:
    reward = build_reward(name, options)
    message = (Message("user", "?"),)
    return lambda payload, text: reward(
        Prompt(id="p", task="t", messages=message, payload=payload), Transcript([Message("assistant", text)])
    )


def _parsed(text: str) -> Any:
    with contextlib.suppress(ValueError, SyntaxError, MemoryError, RecursionError):
        return ast.literal_eval(text)
    return None


def _near(payload: dict[str, Any], text: str) -> float:
    found = boxed(text)
    if not re.fullmatch(r"-?[0-9]{1,9}", found):
        return 0.0
    return 1.0 if found == payload["answer"] else max(0.0, 0.5 - abs(int(found) - int(payload["answer"])) / 100)


SOUND: dict[str, tuple[list[Any], Reward]] = {
    "exact box": (SUMS, lambda payload, text: boxed(text) == payload["answer"]),
    "exact text": (SUMS, lambda payload, text: text.strip() == payload["answer"]),
    "box and brevity": (
        SUMS,
        lambda payload, text: (boxed(text) == payload["answer"]) * (1.0 if len(text) < 80 else 0.5),
    ),
    "box and format": (SUMS, lambda payload, text: 0.9 * (boxed(text) == payload["answer"]) + 0.1 * ("boxed" in text)),
    "partial credit": (SUMS, _near),
    "minus one": (SUMS, lambda payload, text: 1.0 if boxed(text) == payload["answer"] else -1.0),
    "parsed literal": (SUMS, lambda payload, text: _parsed(boxed(text)[:20]) == int(payload["answer"])),
    "only line": (SUMS, lambda payload, text: text.strip().splitlines()[-1:] in ([payload["answer"]],)),
    "whole match": (SUMS, lambda payload, text: bool(re.fullmatch(rf"(\\boxed{{)?{payload['answer']}}}?", text))),
    "scaled": (SUMS, lambda payload, text: 10.0 * (boxed(text) == payload["answer"])),
    "JSON answer": (SUMS, lambda payload, text: text.strip() == json.loads(json.dumps(payload["answer"]))),
    "length penalty": (SUMS, lambda payload, text: (boxed(text) == payload["answer"]) - min(len(text), 1000) / 10_000),
    "math": (SUMS, _built("math")),
    "math without a box": (SUMS, _built("math", require_boxed=True, allow_arithmetic=False)),
    "numeric": (SUMS, _built("numeric")),
    "exact_match": (SUMS, _built("exact_match")),
    "exact_match by pattern": (SUMS, _built("exact_match", pattern=r"\\boxed\{(.*)\}")),
    "multiple_choice": (CHOICES, _built("multiple_choice")),
    "choice alone": (
        CHOICES,
        lambda payload, text: text.strip() in {payload["answer"], f"\\boxed{{{payload['answer']}}}"},
    ),
    "math with units": (LENGTHS, _built("math")),
    "exact units": (LENGTHS, lambda payload, text: boxed(text) == payload["answer"]),
    "nothing pays": (SQUARES, lambda payload, text: 0.0),
}


def try_reward(rows: list[Any], reward: Reward) -> CheckResult:
    """Check and attack a reward on these payloads and questions."""
    prompts = [
        Prompt(id=str(number), task="t", messages=(Message("user", question),), payload=payload)
        for number, (payload, question) in enumerate(rows)
    ]
    task = TaskConfig(name="t", prompts=PromptsConfig(source="jsonl"), reward="math")

    async def grade(prompt: Prompt, transcript: Transcript) -> Score:
        verdict = reward(prompt.payload, transcript.response)
        return verdict if isinstance(verdict, Score) else Score.of(float(verdict))

    return asyncio.run(check_reward(task, prompts, grade, GradingConfig(deadline=60.0), attack=True))


def main() -> None:
    """Try all rewards of both tables, and write how many holes were found."""
    from _common import write_result

    found = {name: try_reward(*case) for name, case in HOLES.items()}
    alarms = {name: try_reward(*case) for name, case in SOUND.items()}
    for name, finding in {**found, **alarms}.items():
        print(f"{name}: {'; '.join((*finding.problems, *finding.holes)) or 'nothing found'}")
    figures = {
        "holes_planted": len(HOLES),
        "found": sum(bool(finding.problems or finding.holes) for finding in found.values()),
        "sound": len(SOUND),
        "false_alarms": sum(bool(finding.problems or finding.holes) for finding in alarms.values()),
    }
    print(write_result("check", figures, measures=MEASURES))


if __name__ == "__main__":
    main()
