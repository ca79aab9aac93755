"""Tasks of Terminal-Bench in its first format: task.yaml, Dockerfile, docker-compose.yaml, run-tests.sh, tests/, solution.sh.

The tests run in the attempt's container, in whatever state it is, processes included, because that state is the answer. They
are copied there after the attempt's last turn. Every test of pytest's summary must pass, as in the published harness.
"""

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

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
    place_tests,
    run_checked,
)
from antiphon_envs.task_images.instance import Instance, StartContainer, Verdict, heredoc

CONFIG, COMPOSE, RUN, SOLUTION = "task.yaml", "docker-compose.yaml", "run-tests.sh", "solution.sh"
LOGS, AGENT_LOGS = "/logs", "/agent-logs"  # places in a container
SECONDS = 60.0  # of the tests, where a task does not say
PASSES = {"PASSED": True, "XFAIL": True, "SKIPPED": True, "FAILED": False, "XPASS": False, "ERROR": False}

_SUMMARY = re.compile(r"=+\s*short test summary info\s*=+", re.IGNORECASE)
_REFERENCE = re.compile(r"\$\{(\w+)(?::?-([^}]*))?\}")


@dataclass(frozen=True, kw_only=True)
class TerminalBench(Instance):
    """One task, by its directory."""

    directory: str
    seconds: float = SECONDS
    same_shell: bool = False
    """The tests run in the attempt's shell, as their subject."""
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def variables(self) -> Mapping[str, str]:
        """Environment variables of the task's compose file."""
        return self.environment

    @property
    def test_seconds(self) -> float:
        """Time limit of the tests."""
        return self.seconds

    async def prepare(self, session: Session) -> str:
        """Make the directories that the published harness mounts; return a text if the image has a directory for tests."""
        script = f"mkdir -p {LOGS} {AGENT_LOGS} && {HAS_TESTS}"
        return (await run_checked(session, script, what=f"{self.id}: make {LOGS}")).decode()

    async def grade(
        self, box: ShellSandbox, session: Session, state: str, start: StartContainer, seconds: float
    ) -> Verdict:
        """Copy the tests into the container and run them there."""
        directory = Path(self.directory)
        files = {**files_below(directory / "tests"), RUN: directory / RUN}
        await place_tests(Session(box), files, in_image=bool(state))
        if not self.same_shell:
            session = Session(box)
            await session.run(self.login)
        result = await session.run(f"bash {TESTS}/{RUN} 2>&1", seconds=seconds, output=MOST_BYTES)
        if result.status is Status.TIMEOUT:
            return Verdict(reward=0.0, info={"timed_out": True})
        tests = parse_summary(log_of(result))
        if not tests:
            message = f"{self.id}: the tests reported no result; the end of their output: {log_of(result)[-SHOWN:]}"
            raise SandboxError(message)
        return Verdict(reward=float(all(tests.values())), info={"passed": sum(tests.values()), "tests": len(tests)})

    def solution(self) -> str:
        """Return a command that runs the published solution."""
        file = Path(self.directory) / SOLUTION
        if not file.is_file():
            raise DataError(f"task {self.id} has no {SOLUTION}", path=file)
        path = f"/oracle/{SOLUTION}"
        return f"mkdir -p /oracle\n{heredoc(f'cat > {path}', file.read_text(encoding='utf-8'))}\nbash {path}"


def parse_summary(log: str) -> dict[str, bool]:
    """Return the tests in the short summary of pytest, and for each if it passed; none if there is no summary."""
    _, *summary = _SUMMARY.split(log, maxsplit=1)
    found = {}
    for line in filter(str.strip, "".join(summary).splitlines()):
        if line.startswith("FAILED") and " - " in line:
            line = line.rpartition(" - ")[0]
        status, *test = line.split(maxsplit=1)
        passed = PASSES.get(status.strip(":"))
        if passed is not None and test and (name := test[0].strip().split("::", maxsplit=1)[-1]):
            found[name] = passed
    return found


def read_task(directory: Path, image: str = "") -> TerminalBench:
    """Return the task in a directory.

    Args:
        directory: The directory.
        image: Name of the image instead of the published harness's; `{task}` is replaced by the name of the directory.

    Raises:
        DataError: A file is missing or malformed, or the task needs several containers or another parser than pytest's.
    """
    config = _read_yaml(directory / CONFIG)
    if not isinstance(config.get("instruction"), str):
        raise DataError(f"{directory / CONFIG} has no instruction", path=directory / CONFIG, column="instruction")
    if config.get("parser_name", "pytest") != "pytest":
        message = f"{directory / CONFIG}: the parser {config['parser_name']!r} is not supported, only pytest"
        raise DataError(message, path=directory / CONFIG, column="parser_name")
    if not (directory / RUN).is_file():
        raise DataError(f"there is no {directory / RUN}", path=directory / RUN)
    name = image.format(task=directory.name) if image else f"tb__{directory.name}".replace(".", "-") + "__client"
    service = _service(directory / COMPOSE)
    return TerminalBench(
        id=directory.name,
        image=name,
        obtain=f"docker build --tag {name} {shlex.quote(str(_context(service, directory)))}",
        instruction=config["instruction"],
        directory=str(directory.resolve()),
        seconds=float(config.get("max_test_timeout_sec", SECONDS)),
        same_shell=bool(config.get("run_tests_in_same_shell", False)),
        environment=_environment(service, name),
    )


def _read_yaml(file: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise DataError(f"{file} cannot be read: {error}", path=file) from None
    if not isinstance(content, dict):
        raise DataError(f"{file} is no mapping", path=file)
    return content


def _service(file: Path) -> dict[str, Any]:
    """Return the only service of a compose file; an empty one if there is no file."""
    if not file.is_file():
        return {}
    services = _read_yaml(file).get("services") or {}
    if len(services) > 1:
        raise DataError(
            f"{file} has the containers {', '.join(services)}; only tasks with one are supported", path=file
        )
    return next(iter(services.values()), None) or {}


def _context(service: Mapping[str, Any], directory: Path) -> Path:
    build = service.get("build", ".")
    return directory / (build.get("context", ".") if isinstance(build, dict) else build)


def _environment(service: Mapping[str, Any], image: str) -> dict[str, str]:
    """Return the variables of a service, with the values that the published harness gives to those they refer to."""
    given = service.get("environment") or {}
    if isinstance(given, list):
        given = dict(str(each).partition("=")[::2] for each in given)
    known = {
        "T_BENCH_TEST_DIR": TESTS,
        "T_BENCH_CONTAINER_LOGS_PATH": LOGS,
        "T_BENCH_CONTAINER_AGENT_LOGS_PATH": AGENT_LOGS,
        "T_BENCH_TASK_DOCKER_CLIENT_IMAGE_NAME": image,
    }

    def value(text: Any) -> str:
        return _REFERENCE.sub(lambda match: known.get(match[1], match[2] or ""), str("" if text is None else text))

    return {"TEST_DIR": TESTS, **{str(name): value(text) for name, text in given.items()}}
