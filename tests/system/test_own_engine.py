"""A run on an engine that a user wrote, named by its import path or by the name that its package registers."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from antiphon.inspect.audit import audit
from tests.packages import install

ROOT = Path(__file__).parents[2]
EXAMPLE = "tests.example_engine:ExampleEngine"
CONTRACT = ("tests/system/engine_contract",)
OTHER_PYTHON = ("--engine-python", sys.executable)


def test_engine_named_by_import_path_trains(project):
    ran = project.run("train", project.config(engine={"kind": EXAMPLE}, rollout={"async_ratio": 1, "timeout": 120}))
    assert ran.returncode == 0, ran.stderr
    steps = project.metrics()
    assert len(steps) == 3 and project.summary()["versions"] == 3
    assert abs(steps[0]["learner/mismatch_kl"]) < 1e-6, "its log-probs are the learner's"
    found = audit(project.folder / "runs" / "run")
    assert found.violations == [] and found.balance[0]["trained"] == 3 * 2 * 4


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A package that registers the engine `plain`, installed from its folder."""
    code, entry = (ROOT / "tests" / "example_engine.py").read_text(), 'plain = "plain_engine:ExampleEngine"'
    install(tmp_path, monkeypatch, module="plain_engine", code=code, group="antiphon.engines", entry=entry)


@pytest.mark.usefixtures("installed")
def test_engine_of_an_installed_package_trains_by_its_name(project):
    ran = project.run("train", project.config(engine={"kind": "plain"}, steps=1))
    assert ran.returncode == 0, ran.stderr
    assert abs(project.metrics()[0]["learner/mismatch_kl"]) < 1e-6


def test_without_its_package_an_engine_has_no_name(project):
    shown = project.run("train", project.config(engine={"kind": "plain"}), "--dry-run")
    assert shown.returncode == 2 and "engine.kind" in shown.stderr and "'plain'" in shown.stderr


def run_contract(engine, *options, files=CONTRACT, tests="all_requests or mixture", path=ROOT):
    """Run the documented command on some of the contract's tests, the one that no engine of one's own is asked included."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:randomly"]
    command += [*files, "-k", tests, "--engine", engine, *options]
    environment = {**os.environ, "PYTHONPATH": str(path)}
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)


def test_contract_command_succeeds_for_a_correct_engine():
    ran = run_contract(EXAMPLE)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "passed" in ran.stdout and "skipped" not in ran.stdout


@pytest.mark.parametrize(
    ("engine", "options"),
    [
        ("no_such_module:Engine", ()),
        ("tests.example_engine:ExampleEngin", OTHER_PYTHON),
        pytest.param("no_such_module:Engine", OTHER_PYTHON, marks=pytest.mark.long),
        pytest.param("tests.example_engine:ExampleEngin", (), marks=pytest.mark.long),
    ],
)
def test_contract_command_names_a_missing_engine(engine, options):
    ran = run_contract(engine, *options)
    assert ran.returncode == pytest.ExitCode.USAGE_ERROR
    (line,) = (ran.stdout + ran.stderr).strip().splitlines()
    assert engine in line and "PYTHONPATH" in line


@pytest.mark.parametrize("options", ["{size: 3}", pytest.param("[3]", marks=pytest.mark.long)])
def test_contract_command_refuses_options_of_another_form(options):
    ran = run_contract(EXAMPLE, "--engine-options", options)
    assert ran.returncode == pytest.ExitCode.USAGE_ERROR and "--engine-options" in ran.stdout + ran.stderr


BROKEN = {  # part of the example engine -> what breaks it
    "torch.multinomial(logprobs.exp()": "torch.multinomial(torch.ones_like(logprobs)",
    "derive(sampling.seed, len(tokens))": "derive(sampling.seed, len(running.sampled))",
    "self.capacity = config.slots": "self.capacity = 64",
    "config.slots, start": "config.slots + 1, start",
    "max_sequence_length(self.model, config.max_length)": "max_sequence_length(self.model, 0)",
    "check_sampling_supported(request.sampling": "str.format(request.id",
    "if count := len(self._queue.running)": "if count := 0",
}


def test_contract_notices_each_defect_of_an_engine(tmp_path):
    """Tests after the one that leaves the engine asleep get another engine, so that those without a defect pass."""
    code = (ROOT / "tests" / "example_engine.py").read_text()
    for part, broken in BROKEN.items():
        assert code.count(part) == 1, part
        code = code.replace(part, broken)
    (tmp_path / "broken_engine.py").write_text(code)
    found = [
        "draws_follow",
        "continued_request",
        "limits_are",
        "no_more_requests",
        "invalid_requests",
        "truncated",
        "sleeping",
    ]
    tests = " or ".join([*found, "deltas_come", "sleep_frees", "weights_that_are_not_what"])
    files = [f"{CONTRACT[0]}/test_{name}.py" for name in ("weights", "requests")]
    ran = run_contract("broken_engine:ExampleEngine", "-rA", files=files, tests=tests, path=tmp_path)
    failed, passed = (set(re.findall(rf"^{word} \S+::test_(\w+)", ran.stdout, re.M)) for word in ("FAILED", "PASSED"))
    assert len(failed) == len(found) and all(any(map(name.startswith, found)) for name in failed), ran.stdout
    assert len(passed) == 3, ran.stdout
