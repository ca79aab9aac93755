"""Rows of SWE-bench, and of data sets in its form: repair a repository until hidden tests pass.

The attempt works in a container of the row's image. Only its patch is taken from there; it is applied in a new container of the
image, where the row's evaluation script adds the hidden tests and runs them. The log decides (`grading`).
"""

import importlib
import json
import platform
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from antiphon.core.errors import DataError
from antiphon.sandbox.base import Status
from antiphon.sandbox.sessions.session import Session
from antiphon.sandbox.sessions.shell_sandbox import ShellSandbox
from antiphon_envs.task_images.containers import COPY_SECONDS, MOST_BYTES, copy_files, log_of, run_checked
from antiphon_envs.task_images.grading import END, START, grade, read_statuses, record_exit_code
from antiphon_envs.task_images.instance import LOGIN, Instance, StartContainer, Verdict, heredoc
from antiphon_envs.task_images.log_parsers import BY_REPOSITORY, get_parser

REPOSITORY = "/testbed"  # in the images of SWE-bench and of data sets in its form
SECONDS = 1800.0  # of an evaluation, as in the published harness
IMAGE_COLUMNS = ("image", "image_name", "docker_image")
NO_TESTS = (".json", ".png", "csv", ".txt", ".md", ".jpg", ".jpeg", ".pkl", ".yml", ".yaml", ".toml")

# The state of the repository as a tree of git, whatever is committed or staged.
_TREE = (
    f'cd {REPOSITORY} && index=$(mktemp) && cp "$(git rev-parse --git-dir)/index" $index && export GIT_INDEX_FILE=$index'
    " && git add --all && git write-tree"
)
_GIT = "export GIT_CONFIG_COUNT=1 GIT_CONFIG_KEY_0=safe.directory GIT_CONFIG_VALUE_0='*'\n"  # whoever owns the files
_CONDA = "/opt/miniconda3/bin/activate"


@dataclass(frozen=True, kw_only=True)
class SweBench(Instance):
    """One row."""

    eval_script: str
    log_parser: str
    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...]
    new_tests: tuple[str, ...] = ()
    """Files that the hidden tests add to the repository."""
    patch: str = ""
    """The published repair; empty if there is none."""

    @property
    def test_seconds(self) -> float:
        """Time limit of the tests, as in the published harness."""
        return SECONDS

    @property
    def login(self) -> str:
        """Script that a shell begins with."""
        return f"{LOGIN}; cd {REPOSITORY}"

    async def prepare(self, session: Session) -> str:
        """Return the tree of git before the attempt."""
        return (await run_checked(session, _GIT + _TREE, what=f"{self.id}: read the repository")).decode().strip()

    async def grade(
        self, box: ShellSandbox, session: Session, state: str, start: StartContainer, seconds: float
    ) -> Verdict:
        """Run the tests in a new container, with the attempt's patch."""
        patch = await self._take_patch(Session(box), state)
        if not patch:
            return Verdict(reward=0.0, info={"patch": "empty"})
        async with await start() as fresh:
            grader = Session(fresh)
            files = {"patch.diff": patch, "eval.sh": record_exit_code(self.eval_script).encode()}
            await copy_files(grader, files, "/tmp/antiphon")
            new = f" && rm -rf -- {shlex.join(self.new_tests)}" if self.new_tests else ""
            apply = f"{_GIT}cd {REPOSITORY} && git apply --whitespace=nowarn /tmp/antiphon/patch.diff{new}"
            if (await grader.run(f"({apply})")).exit_code != 0:
                return Verdict(reward=0.0, info={"patch": "does not apply"})
            result = await grader.run("bash /tmp/antiphon/eval.sh 2>&1", seconds=seconds, output=MOST_BYTES, stdin=b"")
        if result.status is Status.TIMEOUT:
            return Verdict(reward=0.0, info={"patch": "applied", "timed_out": True})
        report = grade(read_statuses(log_of(result), get_parser(self.log_parser)), self.fail_to_pass, self.pass_to_pass)
        shares = {"fail_to_pass": report.fail_to_pass, "pass_to_pass": report.pass_to_pass}
        return Verdict(reward=float(report.resolved), info={"patch": "applied", **shares})

    async def _take_patch(self, session: Session, before: str) -> bytes:
        """Return the difference to the tree `before`; none if the attempt left no repository or more than is taken."""
        difference = f"git diff --binary --no-ext-diff --no-textconv --no-color {before} $after"
        script = f"{_GIT}unset GIT_DIR GIT_WORK_TREE\nafter=$({_TREE}) && cd {REPOSITORY} && {difference}"
        result = await session.run(f"({script})", seconds=COPY_SECONDS, output=MOST_BYTES)
        return b"" if result.exit_code != 0 or result.dropped else result.raw(1)

    def solution(self) -> str:
        """Return a command that applies the published repair."""
        if not self.patch:
            raise DataError(f"task {self.id} has no published repair", column="patch")
        return heredoc(f"git -C {REPOSITORY} apply -", self.patch)


def read_row(row: Mapping[str, Any], *, image: str = "", test_command: str = "", log_parser: str = "") -> SweBench:
    """Return the instance of a row.

    Args:
        row: A row as published. `FAIL_TO_PASS` and `PASS_TO_PASS` are lists, or lists as JSON.
        image: Name of the image instead of the row's; `{instance_id}` and other columns are replaced.
        test_command: Command that runs the tests instead of the row's; the files of the tests are added behind it.
        log_parser: Parser of the log instead of the row's.

    Raises:
        DataError: A column is missing or malformed, or the row does not say how its tests are run.
        ConfigError: There is no such parser, or it needs a package that is not installed.
    """
    missing = [name for name in ("instance_id", "problem_statement") if not isinstance(row.get(name), str)]
    if missing:
        raise DataError(
            f"the column {missing[0]!r} is missing or no text; the row has {', '.join(row)}", column=missing[0]
        )
    parser = log_parser or _parser_of(row)
    get_parser(parser)
    name = _image_of(row, image)
    test_patch = row.get("test_patch") or ""
    return SweBench(
        id=row["instance_id"],
        image=name,
        obtain=f"docker pull {name}",
        instruction=row["problem_statement"],
        eval_script=_script_of(row, test_command),
        log_parser=parser,
        fail_to_pass=_names(row, "FAIL_TO_PASS"),
        pass_to_pass=_names(row, "PASS_TO_PASS"),
        new_tests=tuple(re.findall(r"^--- /dev/null\n\+\+\+ b/(.*?)\t?$", test_patch, re.MULTILINE)),
        patch=row.get("patch") or "",
    )


def _image_of(row: Mapping[str, Any], template: str) -> str:
    if template:
        try:
            return template.format_map(row)
        except (KeyError, ValueError, IndexError) as error:
            raise DataError(f"the image {template!r} cannot be made of the row: {error!r}", column="image") from None
    for column in IMAGE_COLUMNS:
        if row.get(column):
            return str(row[column])
    machine = "arm64" if platform.machine() in ("aarch64", "arm64") else "x86_64"
    key = f"sweb.eval.{machine}.{row['instance_id'].lower()}".replace("__", "_1776_")  # a registry allows no `__`
    return f"swebench/{key}:latest"


def _names(row: Mapping[str, Any], column: str) -> tuple[str, ...]:
    value = row.get(column)
    try:
        names = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        names = None
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise DataError(f"{column} of {row['instance_id']} is {value!r:.80}, expected a list of tests", column=column)
    return tuple(names)


def _parser_of(row: Mapping[str, Any]) -> str:
    config = _install_config(row)
    if row.get("eval_type") == "fail_only":
        message = f"{row['instance_id']}: logs that name only failed tests (eval_type fail_only) are not supported"
        raise DataError(message, column="eval_type")
    return row.get("log_parser") or config.get("log_parser") or BY_REPOSITORY.get(row.get("repo", ""), "pytest")


def _install_config(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what SWE-rebench's rows say of an instance's environment, among it the test command."""
    config = row.get("install_config")
    try:
        config = json.loads(config) if isinstance(config, str) else config
    except ValueError:
        config = None
    return config if isinstance(config, Mapping) else {}


def _script_of(row: Mapping[str, Any], test_command: str) -> str:
    """Return the evaluation script: the row's, or one for a test command, or that of `swebench` for repository and version."""
    if row.get("eval_script") and not test_command:
        return str(row["eval_script"])
    config = _install_config(row)
    command = test_command or row.get("test_cmd") or config.get("test_cmd")
    if not command:
        return _published_script(row)
    for column in ("base_commit", "test_patch"):
        if not isinstance(row.get(column), str):
            raise DataError(f"{row['instance_id']} has no column {column!r}, which its tests need", column=column)
    commands = [command] if isinstance(command, str) else list(command)
    files = shlex.join(_test_files(row))
    return make_script(row["base_commit"], row["test_patch"], [f"{each} {files}".rstrip() for each in commands])


def _test_files(row: Mapping[str, Any]) -> list[str]:
    """Return the tests that a test patch changes, as arguments of the test command."""
    changed = re.findall(r"^diff --git a/.* b/(.*)$", row["test_patch"], re.MULTILINE)
    files = [path for path in changed if not path.endswith(NO_TESTS)]
    if row.get("repo") == "django/django":
        return [path.removesuffix(".py").removeprefix("tests/").replace("/", ".") for path in files]
    return files


def make_script(base_commit: str, test_patch: str, commands: list[str]) -> str:
    """Return a script that puts the hidden tests in their place and runs commands, between marks that `grading` looks for."""
    old = re.findall(r"^--- a/(.*?)\t?$", test_patch, re.MULTILINE)
    reset = f"git checkout {shlex.quote(base_commit)} -- {shlex.join(old)}" if old else ":"
    activate = f"[ -f {_CONDA} ] && source {_CONDA} && conda activate testbed"
    apply = heredoc("git apply --verbose -", test_patch) if test_patch else ":"
    parts = [_GIT.strip(), "set -uxo pipefail", f"set +u; {activate}; set -u", f"cd {REPOSITORY}", reset, apply]
    return "\n".join([*parts, f": '{START}'", *commands, f": '{END}'", reset, ""])


def _published_script(row: Mapping[str, Any]) -> str:
    """Return the script that `swebench` before version 5 makes for a repository and its version."""
    try:
        specs = importlib.import_module("swebench.harness.constants").MAP_REPO_VERSION_TO_SPECS
        make_commands = importlib.import_module("swebench.harness.test_spec.create_scripts").make_eval_script_list
    except (ImportError, AttributeError):
        message = (
            f"{row['instance_id']} does not say how its tests are run: the row needs a column eval_script or test_cmd, or the "
            "source the option test_command, or swebench<5 must be installed"
        )
        raise DataError(message, column="eval_script") from None
    try:
        of_version = specs[row["repo"]][row["version"]]
        commands = make_commands(row, of_version, "testbed", REPOSITORY, row["base_commit"], row["test_patch"])
    except KeyError as error:
        message = f"swebench has no test command for {row['instance_id']}: it knows nothing of {error}"
        raise DataError(message, column="version") from None
    return "\n".join(["#!/bin/bash", "set -uxo pipefail", *commands, ""])
