"""Errors of a user's reward or environment, as a person sees them: one line with the file and line to look at."""

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from antiphon.record.reader import RunReader

CODE = """
    from antiphon.algorithms.declarations import stage
    from antiphon.core.types import StreamSpec


    def missing_column(prompt, transcript):
        return float(prompt.payload["no such column"])


    def text(prompt, transcript):
        return "0.5"


    def words(prompt, transcript):
        return first_word(transcript.response) == transcript.response == prompt.payload["answer"]


    def first_word(response):
        return response.split()[0]


    def moody(prompt, transcript):
        if sum(map(ord, transcript.response[:1])) % 4 == 0:
            raise ValueError("an odd response")
        return len(transcript.response) / 8


    async def judge(prompt, transcript):
        raise KeyError("no verdict")


    NUMBERS = StreamSpec("numbers", producer="engine")


    @stage(produces=[NUMBERS])
    async def add_too_few(step):
        step.add_stream(NUMBERS, {})


    @stage()  # it does not say that it reads the stream, so that nothing can be checked before
    async def read_missing(step):
        step.flat[0].streams[NUMBERS]


    def loss_out_of_range(inputs, config):
        return inputs.logprobs[:, 7], {}


    def advantage_of_none(samples, config):
        return samples.nothing


    async def sampler_that_divides(group):
        await group.generate(temperature=1 / (group.expected - group.expected))


    class Room:
        def reset(self, seed):
            return "go", {}

        def step(self, action):
            return "on", {}[action], True, False, {}

        def close(self):
            pass


    class Hall(Room):
        inline = True

        def step(self, action):
            return "nothing"


    class Cellar(Room):
        inline = True

        def __init__(self):
            raise OSError("no key")
"""


@pytest.fixture
def code(project):
    (project.folder / "user_code.py").write_text(textwrap.dedent(CODE).lstrip())
    return project


def place(project, text):
    """Return the file and line of the user's code that contains a text."""
    lines = (project.folder / "user_code.py").read_text().splitlines()
    return f"user_code.py:{1 + next(number for number, line in enumerate(lines) if text in line)}"


def unwrapped(table):
    """Return the text of a table's cells without the breaks of lines."""
    return re.sub(r"[\s│┃]", "", table)


def refused(done):
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    return done.stderr


@pytest.mark.parametrize(
    ("reward", "error", "line"),
    [
        ("missing_column", "KeyError", "no such column"),
        ("text", "TypeError", "def text"),
        ("judge", "KeyError", "no verdict"),
    ],
)
def test_a_failing_reward_is_placed_at_the_start(code, reward, error, line):
    message = refused(code.run("train", code.config(), f"tasks.0.reward=user_code:{reward}"))
    (told,) = [each for each in message.splitlines() if error in each]
    assert f"{place(code, line)})" in told


def test_a_failing_part_is_placed_and_named(code):
    parts = "{format: {reward: regex, options: {pattern: '.*'}}, content: {reward: 'user_code:text'}}"
    message = refused(
        code.run("train", code.config(), "tasks.0.reward=composed", f"tasks.0.reward_options.parts={parts}")
    )
    assert "content: TypeError" in message and f"{place(code, 'def text')})" in message


def test_a_reward_that_cannot_be_imported_is_placed(code):
    for source, line in (("\nimport no_such_module\nreward = max\n", 2), ("def reward(:\n", 1)):
        (code.folder / "broken.py").write_text(source)
        for command in ("train", "check"):
            assert f"broken.py:{line})" in refused(code.run(command, code.config(), "tasks.0.reward=broken:reward"))


def test_check_counts_errors_as_problems(code):
    done = code.run("check", code.config(), "tasks.0.reward=user_code:words")
    assert done.returncode == 1 and not done.stderr, (done.stdout, done.stderr)
    *_, problem, count = done.stdout.strip().splitlines()
    assert "IndexError" in problem and f"{place(code, 'split()[0]')})" in problem
    assert count == "problems: 1"


@pytest.mark.parametrize(
    ("environment", "error", "line"),
    [("Room", "KeyError", "{}[action]"), ("Hall", "TypeError", 'return "nothing"')],
)
def test_check_takes_a_step_in_an_environment(code, environment, error, line):
    task = {"environment": f"user_code:{environment}", "reward": "environment_return"}
    overrides = [f"tasks.0.{key}={value}" for key, value in task.items()]
    done = code.run("check", code.config(rollout={"max_turns": 2}), *overrides)
    assert done.returncode == 1 and not done.stderr, (done.stdout, done.stderr)
    *_, problem, count = done.stdout.strip().splitlines()
    if environment == "Hall":  # the value is wrong, not a line: the method is named
        expected = int(place(code, line).partition(":")[2]) - 1
        assert f"user_code.py:{expected})" in problem
    else:
        assert f"{place(code, line)})" in problem
    assert error in problem and count == "problems: 1"


def test_an_environment_that_cannot_be_made_is_placed(code):
    overrides = ["tasks.0.environment=user_code:Cellar", "tasks.0.reward=environment_return"]
    message = refused(code.run("train", code.config(rollout={"max_turns": 2}), *overrides))
    assert "OSError: no key" in message and f"{place(code, 'no key')})" in message


def test_a_failing_environment_is_placed_where_it_is_told(code):
    overrides = ["tasks.0.environment=user_code:Room", "tasks.0.reward=environment_return"]
    path = code.config(rollout={"max_turns": 2})
    message = refused(code.run("train", path, "tasks.0.test=null", *overrides))
    assert f"{place(code, '{}[action]')})" in message
    why = code.run("why", code.folder / "runs" / "run", "0.0.0")
    assert why.returncode == 0 and f"{place(code, '{}[action]')})" in unwrapped(why.stdout)


def test_why_and_samples_place_a_failing_reward(code):
    path = code.config(check={"prompts": 0}, rollout={"sampling": {"max_tokens": 8}})
    done = code.run("train", path, "tasks.0.reward=user_code:moody", "tasks.0.test=null", "steps=2")
    assert done.returncode == 0, done.stderr
    run = code.folder / "runs" / "run"
    where = f"{place(code, 'an odd response')})"
    with RunReader.open(run) as reader:
        failed = next(row for row in reader.iterate_attempts() if row.failure)
    assert where in unwrapped(code.run("why", run, failed.name).stdout)
    samples = code.run("samples", run, "--status", "failed")
    assert where in samples.stdout


@pytest.mark.parametrize("by", [pytest.param("-m antiphon", marks=pytest.mark.long), "antiphon"])
def test_a_file_named_like_a_standard_module_hides_nothing(code, by):
    for name in ("numbers", "queue", "code"):
        (code.folder / f"{name}.py").write_text("raise SystemError('imported in place of the library')\n")
    command = (
        [sys.executable, "-m", "antiphon"] if by == "-m antiphon" else [Path(sys.executable).with_name("antiphon")]
    )
    for reward, status in (("numbers:reward", 2), ("mytask:digits", 0)):
        arguments = ["train", code.config(), "steps=1", "tasks.0.test=null", f"tasks.0.reward={reward}"]
        done = subprocess.run([*command, *arguments], cwd=code.folder, capture_output=True, text=True, timeout=240)
        assert done.returncode == status and "Traceback" not in done.stderr, done.stderr
        assert (str(code.folder / "numbers.py") in done.stderr) == (status == 2)


def test_a_recipe_without_its_package_names_the_command(project):
    init = project.run("init", project.folder / "recipe", "--recipe", "agent_framework")
    assert init.returncode == 0, init.stderr
    # What importing it raises where it is not installed.
    missing = "raise ModuleNotFoundError(\"No module named 'agents'\", name='agents')\n"
    (project.folder / "recipe" / "agents.py").write_text(missing)
    root = project.folder / "runs"
    overrides = ["sft=null", f"record.directory={root}", "tasks.0.test=null"]
    message = refused(project.run("train", project.folder / "recipe" / "run.yaml", *overrides))
    assert message.count("\n") == 1 and "pip install openai-agents" in message
    assert not list(root.glob("*"))


@pytest.mark.parametrize(
    ("key", "function", "error", "line"),
    [
        ("algorithm.loss", "loss_out_of_range", "IndexError", "inputs.logprobs[:, 7]"),
        ("algorithm.advantage", "advantage_of_none", "AttributeError", "samples.nothing"),
        ("rollout.sampler", "sampler_that_divides", "ZeroDivisionError", "temperature=1 /"),
        ("learner.stages.1", "add_too_few", "ValueError: stream 'numbers' lacks 8 of 8", "add_stream(NUMBERS"),
        (
            "learner.stages.1",
            "read_missing",
            "KeyError: \"no stream 'numbers'; there are: mixed",
            "streams[NUMBERS]",
        ),
    ],
)
def test_function_that_raises_in_a_step_is_placed(code, key, function, error, line):
    name = f"user_code:{function}"
    stages = ["annotate", name, "rewards", "advantages", "update_critics", "update_actor"]
    given = f"learner.stages=[{', '.join(stages)}]" if key.startswith("learner") else f"{key}={name}"
    done = code.run("train", code.config(), given, "steps=2", "rollout.groups_per_step=2", "rollout.group_size=4")
    (told,) = refused(done).strip().splitlines()[-1:]
    assert told.startswith(f"antiphon: {key}: {name} failed: {error}"), told
    assert told.endswith(f"{place(code, line)})")
