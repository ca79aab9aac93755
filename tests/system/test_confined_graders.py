"""Graders that read what models write have little of the machine: as the kernel tells it, and as a reward that tries finds."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

from antiphon.core.deadlines import Deadlines
from antiphon.core.types import Message, Prompt, Score
from antiphon.sandbox.base import Level
from antiphon.sandbox.isolation import levels
from antiphon.tasks.base import Transcript
from antiphon.tasks.config import GradingConfig, PromptsConfig, TaskConfig
from antiphon.tasks.grading.router import RewardRouter
from antiphon.tasks.rewards import REWARDS, reads_only_text

ROOT = os.getuid() == 0
ROOT_FOLDER = str(Path(__file__).parents[2])
LEVEL = levels.probe().level or 0
pytestmark = pytest.mark.skipif(
    LEVEL < Level.CONFINED, reason=f"this machine has sandbox level {int(LEVEL)}, needed is 2"
)

SAME = "tests.system.test_confined_graders"
QUERY = {"query": "SELECT a FROM t WHERE a > 1", "databases": "CREATE TABLE t(a); INSERT INTO t VALUES (1), (2), (3);"}
PUZZLE = {"answer": "7", "dataset": {"name": "chain_sum", "size": 1, "seed": 0, "min_digits": 1, "max_digits": 1}}
FORM = {"instruction_id_list": ["keywords:existence"], "kwargs": [{"keywords": ["two"]}]}

# reward: options, payload, responses
ROWS = {
    "math": (
        {},
        {"answer": r"\{x \in \mathbb{R} : x > 1\}"},
        [r"\boxed{\{x \in \mathbb{R} : x > 1\}}", r"\boxed{(1, 2)}", "7"],
    ),
    "numeric": ({}, {"answer": "1250"}, ["It is 1,250.", "12"]),
    "exact_match": ({}, {"answer": "Paris"}, ["paris", "Rome"]),
    "multiple_choice": ({}, {"answer": "B"}, ["The answer is B", "A"]),
    "short_answer": ({}, {"answer": ["Paris"]}, ["The answer is Paris", "Rome"]),
    "regex": ({"pattern": r"\d+ apples"}, {}, ["12 apples", "apples"]),
    "sql": ({}, QUERY, ["SELECT a FROM t WHERE a >= 2", "SELECT 1", "DROP TABLE t"]),
    "length": ({"low": 2, "high": 20}, {}, ["a", "a b c"]),
    "repetition": ({}, {}, ["a b c d e f", "a b c d a b c d"]),
    "instruction_following": ({}, FORM, ["one, two", "one"]),
    "reasoning_gym": ({}, PUZZLE, ["7", "8"]),
}


def task(name: str, reward: str, options: dict[str, object], grading: GradingConfig | None = None) -> TaskConfig:
    prompts = PromptsConfig(source="jsonl")
    return TaskConfig(name=name, prompts=prompts, reward=reward, reward_options=options, grading=grading)


async def score(graders: RewardRouter, name: str, payload: object, response: str) -> Score:
    prompt = Prompt(id="p", task=name, messages=(), payload=payload)
    return await graders.score(prompt, Transcript((Message("assistant", response),)))


def workers() -> list[psutil.Process]:
    """The processes below this one that grade: at level 3 the child of the one that was started."""
    started = [each for each in psutil.Process().children() if "tasks.grading.worker" in " ".join(each.cmdline())]
    return [(each.children() or [each])[0] for each in started]


def test_all_rewards_that_are_confined_are_tried() -> None:
    assert ROWS.keys() == {name for name in REWARDS.known if reads_only_text(name, {})} - {
        "composed",  # of the others
        "agent_result",  # which reads no text
        "environment_return",  # neither does this one
    }


def test_built_in_rewards_judge_the_same_confined() -> None:
    rows = {name: row for name, row in ROWS.items() if name != "reasoning_gym" or find_spec(name)}

    async def verdicts(confine: str) -> list[Score]:
        tasks = [task(name, name, options) for name, (options, _, _) in rows.items()]
        async with RewardRouter(tasks, GradingConfig(confine=confine, deadline=60.0), Deadlines()) as graders:
            every = [(name, payload, each) for name, (_, payload, said) in rows.items() for each in said]
            return list(await asyncio.gather(*(score(graders, *each) for each in every)))

    free, confined = asyncio.run(verdicts("none")), asyncio.run(verdicts("built_in"))
    assert free == confined
    assert {each.value for each in free} >= {0.0, 1.0} and all(each.value is not None for each in free)


def test_the_kernel_says_that_a_grader_is_confined() -> None:
    async def look() -> tuple[list[dict[str, str]], list[dict[str, str]]]:
        tasks = [task("m", "math", {}), task("u", f"{SAME}:tries", {})]
        async with RewardRouter(tasks, GradingConfig(), Deadlines()) as graders:
            await score(graders, "m", {"answer": "1"}, r"\boxed{1}")
            found = workers()
            return [status(each.pid) for each in found], [namespaces(each.pid) if ROOT else {} for each in found]

    statuses, spaces = asyncio.run(look())
    assert len(statuses) == 2
    free, confined = sorted(range(2), key=lambda number: int(statuses[number]["Seccomp"]))
    assert statuses[free]["Seccomp"] == "0" and (not ROOT or spaces[free] == namespaces(os.getpid()))
    said = statuses[confined]
    assert (said["Seccomp"], said["NoNewPrivs"], int(said["CapEff"], 16), int(said["CapPrm"], 16)) == ("2", "1", 0, 0)
    assert "0" not in said["Uid"].split()
    if ROOT and LEVEL >= Level.ISOLATED:  # others may not look
        assert not set(spaces[confined].items()) & set(namespaces(os.getpid()).items())


def status(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}


def namespaces(pid: int) -> dict[str, str]:
    return {name: os.readlink(f"/proc/{pid}/ns/{name}") for name in ("mnt", "net", "ipc", "uts", "pid")}


def tries(prompt: Prompt, transcript: Transcript) -> Score:
    """A reward that takes what it can get of the machine, and tells what that was."""
    port, parent, folder = prompt.payload
    attempts = {
        "reads a file": lambda: Path("/etc/passwd").read_text(),
        "writes beside the run": lambda: Path(folder, "mine").write_text("x"),
        "writes to /tmp": lambda: Path("/tmp/antiphon-mine").write_text("x"),
        "reads the processes": lambda: Path(f"/proc/{parent}/environ").read_bytes(),
        "connects": lambda: socket.create_connection(("127.0.0.1", port), timeout=5).close(),
        "listens": lambda: socket.create_server(("127.0.0.1", 0)).close(),
        "signals": lambda: os.kill(parent, 0),
        "becomes root": lambda: os.setuid(0),
        "runs a command": lambda: subprocess.run(["/bin/sh", "-c", "id > /tmp/antiphon-mine"], check=True),
    }
    done = []
    for name, attempt in attempts.items():
        try:
            attempt()
        except (OSError, subprocess.SubprocessError):
            continue
        done.append(name)
    return Score.of(float(len(done)), **dict.fromkeys(done, 1.0))


@pytest.mark.parametrize("confine", ["all", "built_in"])
def test_a_reward_that_tries_gets_nothing_if_all_are_confined(confine: str, tmp_path: Path) -> None:
    async def attempt(port: int) -> Score:
        async with RewardRouter(
            [task("u", f"{SAME}:tries", {})], GradingConfig(confine=confine), Deadlines()
        ) as graders:
            return await score(graders, "u", (port, os.getpid(), str(tmp_path)), "")

    with socket.create_server(("127.0.0.1", 0)) as server:
        found = asyncio.run(attempt(server.getsockname()[1]))
    Path("/tmp/antiphon-mine").unlink(missing_ok=True)
    if confine == "all":
        assert (found.value, dict(found.parts)) == (0.0, {})
    else:
        assert found.parts.keys() >= {"reads a file", "writes beside the run", "connects", "signals"}


def tries_together(prompt: Prompt, transcripts: Sequence[Transcript], scores: Sequence[Score]) -> list[Score]:
    """A group reward that takes what it can get."""
    return [tries(prompt, transcript) for transcript in transcripts]


def test_a_group_reward_is_confined_as_its_own_task_says(tmp_path: Path) -> None:
    async def attempt(port: int) -> list[Score]:
        own, siblings = GradingConfig(confine="all"), [Transcript((Message("assistant", "x"),))] * 2
        judged = task("u", "length", {"low": 1, "high": 2}, own).model_copy(
            update={"group_reward": f"{SAME}:tries_together"}
        )
        async with RewardRouter([judged, task("v", f"{SAME}:tries", {})], GradingConfig(), Deadlines()) as graders:
            prompt = Prompt(id="p", task="u", messages=(), payload=(port, os.getpid(), str(tmp_path)))
            return list(await graders.score_group(prompt, siblings, [Score.of(1.0)] * 2))

    with socket.create_server(("127.0.0.1", 0)) as server:
        found = asyncio.run(attempt(server.getsockname()[1]))
    assert [(each.value, dict(each.parts)) for each in found] == [(0.0, {})] * 2


@pytest.mark.parametrize("level", [Level.CONFINED, Level.ISOLATED])
def test_a_process_confines_itself(level: Level, tmp_path: Path) -> None:
    if level > LEVEL:
        pytest.skip(f"this machine has sandbox level {int(LEVEL)}")
    with socket.create_server(("127.0.0.1", 0)) as server:
        program = f"""
import sys
from antiphon.sandbox.isolation import levels
from antiphon.sandbox.isolation.confinement import confine
namespace = levels.probe().user_namespace
confine({int(level)}, [*levels.python_sources(), *sys.path], user_namespace=namespace)
from {SAME} import Prompt, Transcript, tries
payload = ({server.getsockname()[1]}, {os.getpid()}, {str(tmp_path)!r})
print(dict(tries(Prompt(id="p", task="t", messages=(), payload=payload), Transcript([])).parts))
sys.stdout.flush()
import os
os.kill(os.getpid(), 9) if {int(level)} == 2 else os._exit(7)
"""
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT_FOLDER, check=False
        )
    assert done.stdout == "{}\n", done.stderr
    assert done.returncode == (-9 if level == Level.CONFINED else 7)


def test_nothing_is_left_when_the_controller_is_killed() -> None:
    program = f"""
import asyncio, json, os, psutil
from {SAME} import GradingConfig, RewardRouter, Deadlines, score, task
async def main():
    async with RewardRouter([task("m", "math", {{}})], GradingConfig(), Deadlines()) as graders:
        await score(graders, "m", {{"answer": "1"}}, r"\\boxed{{1}}")
        print(json.dumps([each.pid for each in psutil.Process().children(recursive=True)]), flush=True)
        await asyncio.Event().wait()
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, cwd=ROOT_FOLDER) as controller:
        assert controller.stdout is not None
        found = [psutil.Process(pid) for pid in json.loads(controller.stdout.readline())]
        assert len(found) == (2 if LEVEL >= Level.ISOLATED else 1)
        controller.send_signal(signal.SIGKILL)
    _, alive = psutil.wait_procs(found, timeout=30)
    assert not [each for each in alive if each.status() != psutil.STATUS_ZOMBIE]
