"""Published software tasks in real containers: the published solution is worth 1, and what is none 0."""

import asyncio
import json
import shutil
import subprocess
import textwrap
from importlib.metadata import files

import pytest

import antiphon
from antiphon.core.errors import DataError, SandboxError
from antiphon.core.types import (
    AttemptId,
    AttemptStatus,
    PolicyVersion,
)
from antiphon.rollout.config import RolloutConfig
from antiphon.rollout.episode import EpisodeRunner
from antiphon.rollout.episode_loop import EpisodeContext
from antiphon.rollout.prompt_encoding import PromptEncoder
from antiphon.tasks.config import PromptsConfig, TaskConfig
from antiphon.tasks.prompts import load_prompts
from antiphon.tasks.rewards.environment_return import environment_return
from antiphon_envs.task_images.environment import TaskImages
from antiphon_envs.task_images.instances import task_images
from tests.conftest import Project
from tests.raising import raises_with
from tests.system.test_mini_swe import Letters, spoken

pytestmark = pytest.mark.commands("docker", "git")

PACKAGES = ("pytest", "pluggy", "iniconfig", "packaging", "pygments")
SOURCE = "antiphon_envs.task_images.instances:task_images"
BASE = "antiphon-test-pytest"
TESTBED = "antiphon-test-testbed"

BUG = "def add(a, b):\n    return a - b\n\n\ndef twice(a):\n    return add(a, a)\n\n\ndef zero():\n    return 0\n"
OLD_TEST = "from calc import zero\n\n\ndef test_zero():\n    assert zero() == 0\n"
NEW_TESTS = {
    "tests/test_calc.py": "from calc import add, zero\n\n\ndef test_zero():\n    assert zero() == 0\n\n\n"
    "def test_add():\n    assert add(2, 3) == 5\n",
    "tests/test_twice.py": "import unittest\n\nfrom calc import twice\n\n\nclass Twice(unittest.TestCase):\n"
    "    def test_twice(self):\n        self.assertEqual(twice(4), 8)\n",
}


def write(directory, files):
    for name, text in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text).lstrip("\n"))
        path.chmod(0o755 if name.endswith(".sh") else 0o644)


def build(directory, name):
    subprocess.run(["docker", "build", "--quiet", "--tag", name, directory], check=True, capture_output=True)


@pytest.fixture(scope="module")
def pytest_image(docker_image, tmp_path_factory):
    """An image with pytest."""
    context = tmp_path_factory.mktemp("pytest")
    for package in PACKAGES:
        for file in files(package):
            if file.suffix != ".pyc" and ".." not in file.parts:
                target = context / "packages" / file
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file.locate(), target)
    lines = (
        f"FROM {docker_image}",
        "COPY packages /packages",
        "ENV PYTHONPATH=/packages",
        "WORKDIR /root",
        "WORKDIR /tmp",
    )
    write(context, {"Dockerfile": "\n".join(lines)})
    build(context, BASE)
    yield BASE
    subprocess.run(["docker", "rmi", "--force", BASE], check=True, capture_output=True)


def git(repository, *arguments):
    person = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    return subprocess.run(
        ["git", "-C", repository, *person, *arguments], check=True, capture_output=True, text=True
    ).stdout


@pytest.fixture(scope="module")
def row(pytest_image, tmp_path_factory):
    """A row in the form of SWE-bench, whose image exists."""
    context = tmp_path_factory.mktemp("testbed")
    repository = context / "testbed"
    write(repository, {"calc.py": BUG, "tests/test_calc.py": OLD_TEST, ".gitignore": "__pycache__\n"})
    git(repository, "init", "--quiet")
    git(repository, "add", "--all")
    git(repository, "commit", "--quiet", "--message", "begin")
    base = git(repository, "rev-parse", "HEAD").strip()
    (repository / "calc.py").write_text(BUG.replace("a - b", "a + b"))
    patch = git(repository, "diff")
    git(repository, "checkout", "--quiet", ".")
    write(repository, NEW_TESTS)
    git(repository, "add", "--all")
    test_patch = git(repository, "diff", "--cached")
    git(repository, "reset", "--quiet", "--hard")
    (repository / "build.log").write_text("of the image, and in no commit\n")
    lines = (
        f"FROM {pytest_image}",
        "COPY testbed /testbed",
        "COPY bashrc /me/.bashrc",
        "ENV HOME=/me",
        "WORKDIR /testbed",
    )
    write(context, {"Dockerfile": "\n".join(lines), "bashrc": "export ACTIVE=testbed\n"})
    build(context, TESTBED)
    yield {
        "instance_id": "tiny__calc-1",
        "repo": "tiny/calc",
        "version": "1.0",
        "base_commit": base,
        "problem_statement": "add(2, 3) is -1.",
        "patch": patch,
        "test_patch": test_patch,
        "FAIL_TO_PASS": json.dumps(["tests/test_calc.py::test_add", "tests/test_twice.py::Twice::test_twice"]),
        "PASS_TO_PASS": json.dumps(["tests/test_calc.py::test_zero"]),
        "image_name": TESTBED,
        "test_cmd": "python3 -m pytest -rA -p no:cacheprovider",
    }
    subprocess.run(["docker", "rmi", "--force", TESTBED], check=True, capture_output=True)


TERMINAL_BENCH = {
    "task.yaml": """
        instruction: Serve the text hello at port 8000, in the file greeting.
        difficulty: easy
        parser_name: pytest
        max_test_timeout_sec: 100.0
        """,
    "docker-compose.yaml": """
        services:
          client:
            build: {dockerfile: Dockerfile}
            image: ${T_BENCH_TASK_DOCKER_CLIENT_IMAGE_NAME}
            command: [sh, -c, sleep infinity]
            environment:
              - TEST_DIR=${T_BENCH_TEST_DIR}
        """,
    "Dockerfile": f"FROM {BASE}\nWORKDIR /app\n",
    "run-tests.sh": "#!/bin/bash\npython3 -m pytest -rA -p no:cacheprovider $TEST_DIR/test_outputs.py\n",
    "tests/test_outputs.py": """
        import urllib.request


        def test_greeting():
            assert urllib.request.urlopen("http://127.0.0.1:8000/greeting", timeout=20).read() == b"hello\\n"


        def test_nothing():
            pass
        """,
    "solution.sh": """
        #!/bin/bash
        cd /app
        echo hello > greeting
        python3 -m http.server --bind 127.0.0.1 8000 > /dev/null 2>&1 &
        until (: < /dev/tcp/127.0.0.1/8000) 2> /dev/null; do sleep 0.1; done
        """,
}

HARBOR = {
    "task.toml": """
        schema_version = "1.1"
        [metadata]
        difficulty = "easy"
        [verifier]
        timeout_sec = 100.0
        env = {SCALE = "${SCALE:-2}"}
        [environment]
        memory_mb = 512
        """,
    "instruction.md": "Write the numbers 1 and 2 to numbers.txt, a line each.\n",
    "environment/Dockerfile": f"FROM {BASE}\nWORKDIR /app\n",
    "tests/test.sh": """
        #!/bin/bash
        found=$(grep -cx -e 1 -e 2 /app/numbers.txt)
        mkdir -p /logs/verifier
        python3 /tests/score.py ${found:-0} > /logs/verifier/reward.txt
        """,
    "tests/score.py": "import os, sys\nprint(int(sys.argv[1]) / int(os.environ['SCALE']))\n",
    "solution/solve.sh": "#!/bin/bash\npython3 /solution/numbers.py > numbers.txt\n",
    "solution/numbers.py": "print(1)\nprint(2)\n",
}


@pytest.fixture(scope="module")
def tasks(pytest_image, tmp_path_factory):
    """A directory with a task of Terminal-Bench and one of Harbor; their images exist."""
    directory = tmp_path_factory.mktemp("tasks")
    write(directory / "greet.now", TERMINAL_BENCH)
    write(directory / "numbers", HARBOR)
    with pytest.raises(DataError) as refused:
        list(task_images("train", str(directory)))
    commands = {line.partition(" needs ")[0]: line.partition(": ")[2] for line in str(refused.value).splitlines()[1:]}
    assert {*commands} == {"greet.now", "numbers"}  # and each command makes what was missing
    for command in commands.values():
        subprocess.run(command, shell=True, check=True, capture_output=True)
    yield directory
    images = [row["instance"]["image"] for row in task_images("train", str(directory))]
    subprocess.run(["docker", "rmi", "--force", *images], check=True, capture_output=True)


def prompts_of(path, **options):
    prompts = PromptsConfig(source=SOURCE, path=str(path), options=options)
    return load_prompts(TaskConfig(name="t", prompts=prompts), prompts, 0)


@pytest.fixture(scope="module")
def prompts(row, tasks, tmp_path_factory):
    """A prompt of each format."""
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    return {prompt.payload["instance"]["format"]: prompt for prompt in prompts_of(path) + prompts_of(tasks)}


async def play(prompt, commands, **options):
    world = TaskImages(prompt, **{"seconds": 100.0, **options})
    observations = []
    try:
        observations.append((await world.reset(0))[0])
        for command in commands:
            action = world.expert() if command is EXPERT else f"```bash\n{command}\n```"
            observation, reward, terminated, truncated, info = await world.step(action)
            observations.append(observation)
            if terminated or truncated:
                return reward, info, observations
    finally:
        await world.close()


EXPERT = object()


def attempt(prompt, *commands, **options):
    return asyncio.run(play(prompt, (*commands, "submit"), **options))


FORMATS = ("swe_bench", "terminal_bench", "harbor")


@pytest.mark.parametrize("format", FORMATS)
def test_published_solution_is_worth_one(prompts, format):
    reward, info, _ = asyncio.run(play(prompts[format], (EXPERT, EXPERT)))
    assert reward == 1.0 and info["success"]


@pytest.mark.parametrize("format", FORMATS)
def test_nothing_is_worth_nothing(prompts, format):
    reward, info, _ = attempt(prompts[format], "true")
    assert reward == 0.0 and not info["success"]


FORGED = """
cat > {place}/conftest.py <<'END'
import pytest
@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    return True
END
"""


PATCHED = """
echo 'Function.runtest = lambda self: None' >> /packages/_pytest/python.py
echo 'TestCaseFunction.runtest = lambda self: None' >> /packages/_pytest/unittest.py
echo '# changed' >> calc.py
"""


@pytest.mark.parametrize(
    ("format", "command"),
    [
        pytest.param("swe_bench", "sed -i 's/assert .*/pass/' tests/*.py; git add -A", id="edited tests"),
        pytest.param("swe_bench", "rm -rf .git calc.py", id="no repository"),
        pytest.param("swe_bench", "rm /usr/bin/git; cp /usr/bin/true /usr/bin/git", id="another git"),
        pytest.param("swe_bench", PATCHED, id="packages"),
        pytest.param("terminal_bench", "mkdir /tests" + FORGED.format(place="/tests"), id="conftest"),
        pytest.param("terminal_bench", "mkdir /tests; echo 'exit 0' > /tests/run-tests.sh", id="another run-tests.sh"),
        pytest.param("harbor", "echo 1 > /logs/verifier/reward.txt", id="a reward"),
        pytest.param("harbor", "echo '{\"reward\": 1}' > /logs/verifier/reward.json", id="a reward in JSON"),
        pytest.param(
            "harbor", "mkdir /tests; echo 'print(1)' > /tests/score.py; chmod 0 /tests", id="another verifier"
        ),
    ],
)
def test_changed_tests_are_worth_nothing(prompts, format, command):
    reward, _, observations = attempt(prompts[format], command)
    assert "Exit code: 0" in observations[1] and reward == 0.0


def test_a_repair_counts_however_it_is_left(prompts):
    mend = "sed -i 's/a - b/a + b/' calc.py"
    commit = "git add -A; git -c user.name=a -c user.email=a@b commit -qm x; git checkout -q -b other"
    for commands in ((mend,), (mend, commit), (f"{mend}; cd /; exit 3", "echo $ACTIVE $PWD")):
        reward, info, observations = attempt(prompts["swe_bench"], *commands)
        assert (reward, info["fail_to_pass"], info["pass_to_pass"]) == (1.0, 1.0, 1.0)
    assert "/testbed" in observations[1] and observations[2].startswith("Exit code: 0\nOutput:\ntestbed /testbed\n")


def test_partial_figures_are_reported(prompts):
    reward, info, _ = attempt(
        prompts["swe_bench"], "sed -i -e 's/return add(a, a)/return 2 * a/' -e 's/return 0/return 1/' calc.py"
    )
    assert (reward, info["fail_to_pass"], info["pass_to_pass"]) == (0.0, 0.5, 0.0)
    reward, info, _ = attempt(prompts["terminal_bench"], "true")
    assert (reward, info["passed"], info["tests"]) == (0.0, 1, 2)
    reward, info, _ = attempt(prompts["harbor"], "echo 2 > numbers.txt")
    assert (reward, info["rewards"], info["success"]) == (0.5, {"reward": 0.5}, False)


def test_evaluation_script_and_parser_of_a_row(row, tmp_path):
    """As rows of SWE-bench have them from version 5 of its harness on."""
    script = f"""#!/bin/bash
set -uxo pipefail
cd /testbed
git apply -v - <<'EOF_1'
{row["test_patch"]}
EOF_1
: '>>>>> Start Test Output'
python3 -m unittest -v tests.test_twice
: '>>>>> End Test Output'
"""
    names = ["test_twice (tests.test_twice.Twice.test_twice)"]
    changed = {"eval_script": script, "log_parser": "unittest", "FAIL_TO_PASS": names, "PASS_TO_PASS": []}
    (tmp_path / "rows.jsonl").write_text(json.dumps({**row, **changed}))
    (prompt,) = prompts_of(tmp_path / "rows.jsonl")
    assert attempt(prompt, "sed -i 's/a - b/a + b/' calc.py")[0] == 1.0
    assert attempt(prompt, "sed -i 's/a - b/a * b/' calc.py")[0] == 0.0
    forged = NEW_TESTS["tests/test_twice.py"].replace(
        "8", "0"
    )  # that the hidden tests will have such a file was guessed
    assert attempt(prompt, f"cat > tests/test_twice.py <<'END'\n{forged}END")[0] == 0.0


def test_time_limits_end_commands_and_tests(row, tmp_path, tasks):
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    (prompt,) = prompts_of(tmp_path / "rows.jsonl", test_command="sleep 1000; :")
    reward, info, observations = attempt(prompt, "sleep 1000", "touch new", seconds=1.0, test_seconds=1.0)
    assert observations[1].startswith("Ended after 1 seconds") and (reward, info["timed_out"]) == (0.0, True)
    for task, file in (("greet.now", "run-tests.sh"), ("numbers", "tests/test.sh")):
        shutil.copytree(tasks / task, tmp_path / task)
        (tmp_path / task / file).write_text("#!/bin/bash\nsleep 1000\n")
        (prompt,) = prompts_of(tmp_path / task)
        reward, info, _ = attempt(prompt, test_seconds=1.0)
        assert (reward, info["timed_out"]) == (0.0, True)


def test_tests_without_a_result_are_no_verdict(prompts):
    for format, command in (("terminal_bench", "rm -r /packages"), ("harbor", "mv /usr/bin/python3 /p")):
        with raises_with(SandboxError):
            attempt(prompts[format], command)


def test_a_container_has_its_image_and_no_network(prompts):
    commands = {
        "echo $ACTIVE $PWD $PYTHONPATH": "testbed /testbed /packages",
        "touch /usr/new && id -u": "0",
        "ls /sys/class/net": "lo",
        "(: < /dev/tcp/192.0.2.1/80) 2>&1 | grep -o unreachable | head -n 1": "unreachable",
        "mknod /dev/new b 7 0 2>&1 | grep -c permitted": "1",
        "unshare --user true 2>&1 | grep -c permitted": "1",
        "cat /sys/fs/cgroup/pids/pids.max /sys/fs/cgroup/pids.max 2> /dev/null": "2048",
    }
    _, _, observations = attempt(prompts["swe_bench"], *commands)
    outputs = [each.partition("Output:\n")[2].partition("\n\nTurns")[0].strip() for each in observations[1:]]
    assert dict(zip(commands, outputs, strict=False)) == commands


def test_tests_run_in_the_shell_of_the_attempt_if_asked(pytest_image, tasks, tmp_path):
    shutil.copytree(tasks / "greet.now", tmp_path / "greet.now")
    (tmp_path / "greet.now" / "task.yaml").write_text("instruction: Say it.\nrun_tests_in_same_shell: true\n")
    (tmp_path / "greet.now" / "tests" / "test_outputs.py").write_text(
        "import os\n\n\ndef test_it():\n    assert os.environ['SAID'] == 'it'\n"
    )
    (prompt,) = prompts_of(tmp_path)
    assert attempt(prompt, "export SAID=it")[0] == 1.0 and attempt(prompt, "SAID=it")[0] == 0.0


@pytest.mark.parametrize("format", FORMATS)
def test_a_scripted_agent_solves_one_in_an_episode(prompts, format):
    script = {
        "swe_bench": ["python3 -c 'import calc; print(calc.add(2, 3))'", "sed -i 's/a - b/a + b/' calc.py"],
        "terminal_bench": [
            "echo hello > greeting",
            "python3 -m http.server --bind 127.0.0.1 8000 > /dev/null 2>&1 &\n"
            "until (: < /dev/tcp/127.0.0.1/8000) 2> /dev/null; do sleep 0.1; done; echo serving",
        ],
        "harbor": ["pwd", "printf '1\\n2\\n' > numbers.txt"],
    }[format]
    shown = {"swe_bench": "-1\n", "terminal_bench": "serving\n", "harbor": "/app\n"}[format]

    async def generate(request):
        return spoken(f"```bash\n{[*script, 'submit'][int(request.id.rpartition('/')[2])]}\n```")

    async def grade(prompt, transcript):
        messages.extend(message.content for message in transcript.messages)
        return environment_return(prompt, transcript)

    messages = []
    episodes = EpisodeRunner(
        EpisodeContext(
            encoder=PromptEncoder(Letters()),
            generate=generate,
            config=RolloutConfig(
                groups_per_step=1, max_turns=30, sampling={"max_tokens": 1000}, environment_timeout=300
            ),
            max_length=100_000,
            seed=0,
        ),
        grade=grade,
        environments={"t": TaskImages},
    )
    prompt = prompts[format]
    trajectory = asyncio.run(episodes.run(prompt, AttemptId(0, 0, 0), PolicyVersion(0, 0)))
    assert trajectory.meta.status is AttemptStatus.FINISHED
    assert (trajectory.meta.score.value, trajectory.meta.turns) == (1.0, len(script) + 1)
    assert messages[0] == prompt.payload["instance"]["instruction"]
    assert any(shown in message for message in messages[2:])


def test_containers_end_with_their_attempts(prompts):
    running = ["docker", "ps", "--quiet", "--filter", f"ancestor={TESTBED}"]
    attempt(prompts["swe_bench"], "echo x > new")
    assert subprocess.check_output(running, text=True) == ""


@pytest.mark.long
def test_a_run_needs_the_images_and_then_trains(tasks, tmp_path, model):
    """The policy is a tiny model that says nothing of use: its rewards are 0, and none of its attempts fails."""
    long = shutil.copytree(model, tmp_path / "model")
    settings = json.loads((long / "config.json").read_text())
    (long / "config.json").write_text(json.dumps({**settings, "max_position_embeddings": 4096}))
    project = Project(tmp_path, long)

    def config(**options):
        task = {
            "name": "published",
            "prompts": {"source": SOURCE, "path": str(tasks), "options": options},
            "environment": "antiphon_envs.task_images.environment:TaskImages",
            "environment_options": {"turns": 1},
            "reward": "environment_return",
        }
        rollout = {"groups_per_step": 2, "group_size": 2, "max_turns": 2, "environment_timeout": 300}
        return project.config(tasks=[task], steps=1, rollout=rollout)

    refused = project.run("train", config(image="antiphon-test-none:{task}"))
    assert refused.returncode == 2
    assert "numbers needs the image antiphon-test-none:numbers: docker build --tag" in refused.stderr.replace("\n", " ")
    trained = project.run("train", config())
    assert trained.returncode == 0, trained.stderr
    rows = antiphon.open_run(tmp_path / "runs" / "run").attempts("trained")
    assert {row.prompt.id for row in rows} == {"published/numbers", "published/greet.now"}
    assert {(row.score, row.failure) for row in rows} == {(0.0, None)}
