"""Tasks in Harbor's format, as those of Terminal-Bench 2: task.toml, instruction.md, environment/, tests/ and solution/.

As in `terminal_bench`, the tests run in the attempt's container. The verifier is tests/test.sh; it writes its reward to
reward.json or reward.txt, which are removed before it starts.
"""

import base64
import json
import math
import re
import shlex
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from antiphon.core.errors import DataError, SandboxError
from antiphon.sandbox.base import Status
from antiphon.sandbox.sessions.session import Session
from antiphon.sandbox.sessions.shell_sandbox import ShellSandbox
from antiphon_envs.task_images.containers import (
    HAS_TESTS,
    MOST_BYTES,
    SHOWN,
    TESTS,
    files_below,
    log_of,
    pack_files,
    place_tests,
    run_checked,
)
from antiphon_envs.task_images.instance import LOGIN, Instance, StartContainer, Verdict, heredoc

CONFIG, INSTRUCTION, TEST, SOLVE = "task.toml", "instruction.md", "test.sh", "solve.sh"
SOLUTION, VERIFIER = "/solution", "/logs/verifier"  # places in a container
REWARDS = ("reward.json", "reward.txt")  # in the order in which they are looked for
SECONDS = 600.0  # of the verifier, where a task does not say

_REFERENCE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")
_COMPOSE = ("docker-compose.yaml", "docker-compose.yml")


@dataclass(frozen=True, kw_only=True)
class Harbor(Instance):
    """One task, by its directory."""

    directory: str
    seconds: float = SECONDS
    workdir: str = ""
    memory_mb: int = 0
    environment: dict[str, str] = field(default_factory=dict)
    verifier_environment: dict[str, str] = field(default_factory=dict)

    @property
    def variables(self) -> Mapping[str, str]:
        """Environment variables of the task."""
        return self.environment

    @property
    def memory(self) -> int:
        """MiB that the task asks for; 0 if it does not say."""
        return self.memory_mb

    @property
    def test_seconds(self) -> float:
        """Time limit of the verifier."""
        return self.seconds

    @property
    def login(self) -> str:
        """Script that a shell begins with."""
        return f"{LOGIN}; {self._enter}"

    @property
    def _enter(self) -> str:
        return f"cd {shlex.quote(self.workdir)}" if self.workdir else ":"

    async def prepare(self, session: Session) -> str:
        """Make the directories that the published harness mounts; return a text if the image has a directory for tests."""
        script = f"mkdir -p {VERIFIER} /logs/agent /logs/artifacts && {HAS_TESTS}"
        return (await run_checked(session, script, what=f"{self.id}: make /logs")).decode()

    async def grade(
        self, box: ShellSandbox, session: Session, state: str, start: StartContainer, seconds: float
    ) -> Verdict:
        """Copy the tests into the container, run the verifier, and read its reward."""
        verifier = Session(box)
        rewards = " ".join(f"{VERIFIER}/{name}" for name in REWARDS)
        await run_checked(
            verifier, f"mkdir -p {VERIFIER} && rm -rf -- {rewards}", what=f"{self.id}: remove old rewards"
        )
        await place_tests(verifier, files_below(Path(self.directory) / "tests"), in_image=bool(state))
        given = " ".join(f"{name}={shlex.quote(text)}" for name, text in self.verifier_environment.items())
        command = f"({self._enter}; chmod +x {TESTS}/{TEST}; env {given} {TESTS}/{TEST}) 2>&1"
        result = await verifier.run(command, seconds=seconds, output=MOST_BYTES)
        if result.status is Status.TIMEOUT:
            return Verdict(reward=0.0, info={"timed_out": True})
        read = f"for file in {rewards}; do [ -f $file ] && echo $file && cat $file && exit; done; true"
        name, _, text = (await run_checked(verifier, read, what=f"{self.id}: read the reward")).decode().partition("\n")
        if not name:
            message = f"{self.id}: the verifier wrote no reward; the end of its output: {log_of(result)[-SHOWN:]}"
            raise SandboxError(message)
        found = parse_rewards(text, is_json=name.endswith(".json"), task=self.id)
        return Verdict(reward=main_reward(found, self.id), info={"rewards": found})

    def solution(self) -> str:
        """Return a command that runs the published solution."""
        directory = Path(self.directory) / "solution"
        if not (directory / SOLVE).is_file():
            raise DataError(f"task {self.id} has no solution/{SOLVE}", path=directory / SOLVE)
        files, path = files_below(directory), f"{SOLUTION}/{SOLVE}"
        if len(files) == 1:
            unpack = heredoc(f"cat > {path}", files[SOLVE].read_text(encoding="utf-8"))
        else:
            packed = base64.b64encode(pack_files(files)).decode()
            unpack = f"base64 -d <<< {packed} | tar --no-same-owner -xf - -C {SOLUTION}"
        return f"mkdir -p {SOLUTION}\n{unpack}\n({self._enter}; bash {path})"


def parse_rewards(text: str, *, is_json: bool, task: str) -> dict[str, float]:
    """Return the rewards in a file of a verifier: one number as `reward`, or an object of numbers.

    Raises:
        SandboxError: The file is empty, or has something else than finite numbers.
    """
    try:
        found = json.loads(text) if is_json else {"reward": float(text)}
    except ValueError:
        found = None
    found = found if isinstance(found, dict) else {}
    numbers = all(isinstance(value, int | float) and math.isfinite(value) for value in found.values())
    if not found or not numbers:
        raise SandboxError(f"{task}: the verifier wrote {text[:SHOWN]!r}, expected a number or an object of numbers")
    return {str(name): float(value) for name, value in found.items()}


def main_reward(rewards: Mapping[str, float], task: str) -> float:
    """Return the one named `reward`, or the only one; `SandboxError` if there are several others."""
    if "reward" not in rewards and len(rewards) > 1:
        raise SandboxError(f"{task}: the verifier gave the rewards {', '.join(rewards)}, and none is named reward")
    return rewards.get("reward", next(iter(rewards.values())))


def read_task(directory: Path, image: str = "") -> Harbor:
    """Return the task in a directory.

    Args:
        directory: The directory.
        image: Name of the image instead of the task's own; `{task}` is replaced by the name of the directory.

    Raises:
        DataError: A file is missing or malformed, or the task needs something that is not supported.
    """
    file = directory / CONFIG
    try:
        config = tomllib.loads(file.read_text(encoding="utf-8"))
        instruction = (directory / INSTRUCTION).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise DataError(f"the task {directory} cannot be read: {error}", path=directory) from None
    environment, verifier = config.get("environment", {}), config.get("verifier", {})
    _check_supported(config, directory)
    built = f"hb__{directory.name.lower()}"
    name = image.format(task=directory.name) if image else environment.get("docker_image") or built
    build = f"docker build --tag {name} {shlex.quote(str(directory / 'environment'))}"
    return Harbor(
        id=directory.name,
        image=name,
        obtain=f"docker pull {name}" if environment.get("docker_image") and not image else build,
        instruction=instruction,
        directory=str(directory.resolve()),
        seconds=float(verifier.get("timeout_sec", SECONDS)),
        workdir=environment.get("workdir") or "",
        memory_mb=_memory(environment),
        environment=_variables(environment.get("env", {}), file),
        verifier_environment=_variables(verifier.get("env", {}), file),
    )


def _check_supported(config: Mapping[str, Any], directory: Path) -> None:
    """Raise `DataError` for a task that this environment would not run as it is meant."""
    environment, verifier, agent = (config.get(name, {}) for name in ("environment", "verifier", "agent"))
    reasons = {
        "steps": bool(config.get("steps")),
        "environment.os": str(environment.get("os", "linux")).lower() != "linux",
        "environment.gpus": bool(environment.get("gpus")),
        "environment.tpu": bool(environment.get("tpu")),
        "environment.mcp_servers": bool(environment.get("mcp_servers")),
        "environment.healthcheck": bool(environment.get("healthcheck")),
        "verifier.environment": bool(verifier.get("environment"))
        or verifier.get("environment_mode", "shared") != "shared",
        "agent.user": agent.get("user") not in (None, "root", 0),
        "verifier.user": verifier.get("user") not in (None, "root", 0),
        "environment/docker-compose.yaml": any((directory / "environment" / name).exists() for name in _COMPOSE),
    }
    for key, given in reasons.items():
        if given:
            message = f"task {directory.name} has {key}, which is not supported"
            raise DataError(message, path=directory / CONFIG, column=key)
    if not (directory / "tests" / TEST).is_file():
        raise DataError(f"there is no {directory / 'tests' / TEST}", path=directory / "tests" / TEST)


def _memory(environment: Mapping[str, Any]) -> int:
    """Return the task's MiB; older tasks give a size such as `4G`."""
    old = re.fullmatch(r"([\d.]+)([GM])B?", str(environment.get("memory", "")).strip().upper())
    size = environment.get("memory_mb") or (float(old[1]) * (1024 if old[2] == "G" else 1) if old else 0)
    return int(size)


def _variables(given: Mapping[str, Any], file: Path) -> dict[str, str]:
    """Return variables whose references to those of this machine have defaults; none of this machine are given to tasks."""

    def value(match: re.Match[str]) -> str:
        if match[2] is None:
            message = f"{file} refers to the variable {match[1]} of this machine, which tasks are not given"
            raise DataError(message, path=file, column=match[1])
        return match[2]

    return {name: _REFERENCE.sub(value, str(text)) for name, text in given.items()}
