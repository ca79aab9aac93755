"""Published software tasks without their containers: formats, logs, and the verdict on them.

What runs in containers is in tests/system/test_task_images.py.
"""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from antiphon.core.errors import ConfigError, DataError, SandboxError
from antiphon.core.types import Prompt
from antiphon.tasks.config import PromptsConfig, TaskConfig
from antiphon.tasks.environments.base import OptionError
from antiphon.tasks.prompts import load_prompts
from antiphon_envs.mini_swe.shell_turns import command_of
from antiphon_envs.task_images import harbor, terminal_bench
from antiphon_envs.task_images.environment import TaskImages
from antiphon_envs.task_images.grading import grade, read_statuses, record_exit_code
from antiphon_envs.task_images.instance import heredoc
from antiphon_envs.task_images.instances import instance_of, task_images, to_row
from antiphon_envs.task_images.log_parsers import BY_REPOSITORY, PARSERS, get_parser
from antiphon_envs.task_images.swe_bench import read_row
from tests.raising import raises_with

ROW = {
    "instance_id": "psf__requests-1",
    "repo": "psf/requests",
    "version": "2.3",
    "base_commit": "0" * 40,
    "problem_statement": "It fails.",
    "patch": "a patch\n",
    "test_patch": "diff --git a/tests/test_x.py b/tests/test_x.py\n--- a/tests/test_x.py\n+++ b/tests/test_x.py\n@@ -1 +1 @@\n"
    "-old\n+new\ndiff --git a/tests/data.json b/tests/data.json\nnew file mode 100644\n--- /dev/null\n"
    "+++ b/tests/data.json\n@@ -0,0 +1 @@\n+{}\n",
    "FAIL_TO_PASS": '["a", "b"]',
    "PASS_TO_PASS": ["c"],
    "test_cmd": "pytest -rA",
}


def without(*columns, **changed):
    return {key: value for key, value in {**ROW, **changed}.items() if key not in columns}


# --- rows -------------------------------------------------------------------------------------------------------------------


def test_a_row_has_the_published_image_or_another():
    assert read_row(without(instance_id="django__django-11099")).image.startswith("swebench/sweb.eval.")
    assert read_row(without(instance_id="django__django-11099")).image.endswith(".django_1776_django-11099:latest")
    for column in ("image", "image_name", "docker_image"):
        assert read_row(without(**{column: "some/name:tag"})).image == "some/name:tag"
    instance = read_row(ROW, image="mine/{repo}:{version}")
    assert (instance.image, instance.obtain) == ("mine/psf/requests:2.3", "docker pull mine/psf/requests:2.3")


def test_test_command_gets_the_changed_tests():
    scripts = {
        "column": read_row(ROW).eval_script,
        "install_config": read_row(without("test_cmd", install_config={"test_cmd": "pytest -rA"})).eval_script,
        "as JSON": read_row(without("test_cmd", install_config='{"test_cmd": ["pytest -rA"]}')).eval_script,
        "option": read_row(without("test_cmd", eval_script="other"), test_command="pytest -rA").eval_script,
    }
    assert len({*scripts.values()}) == 1
    lines = scripts["column"].splitlines()
    assert lines[lines.index(": '>>>>> Start Test Output'") + 1] == "pytest -rA tests/test_x.py"
    assert lines.count(f"git checkout {'0' * 40} -- tests/test_x.py") == 2
    django = read_row(without(repo="django/django"))
    assert "pytest -rA test_x\n" in django.eval_script and django.log_parser == "django"
    assert read_row(ROW).new_tests == ("tests/data.json",)
    assert read_row(without(eval_script="its own")).eval_script == "its own"


@pytest.mark.parametrize(
    ("row", "column"),
    [
        (without("instance_id"), "instance_id"),
        (without(problem_statement=3), "problem_statement"),
        (without("FAIL_TO_PASS"), "FAIL_TO_PASS"),
        (without(PASS_TO_PASS="no list"), "PASS_TO_PASS"),
        (without(PASS_TO_PASS='{"a": 1}'), "PASS_TO_PASS"),
        (without("base_commit"), "base_commit"),
        (without(eval_type="fail_only"), "eval_type"),
        (without(image="--privileged"), "image"),
    ],
)
def test_a_malformed_row_is_refused(row, column):
    with raises_with(DataError, column=column):
        read_row(row)


def test_options_of_the_source_are_checked(tmp_path):
    with raises_with(ConfigError):
        get_parser("parse_log_of_nobody")
    with raises_with(DataError, column="image"):
        read_row(ROW, image="{no_such_column}")
    for options, key in (({"format": "swe"}, "format"), ({"path": ""}, "path")):
        with raises_with(ConfigError, key=key):
            list(task_images("train", **{"path": str(tmp_path), **options}))
    for format in ("terminal_bench", "harbor"):
        with raises_with(DataError, path=str(tmp_path)):
            list(task_images("train", str(tmp_path), format=format))


def test_rows_of_a_split_become_prompts(tmp_path):
    import pyarrow
    import pyarrow.parquet

    (tmp_path / "test.jsonl").write_text(json.dumps(ROW) + "\n")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([ROW]), tmp_path / "train-00000-of-00001.parquet")
    loaded = []
    for split in ("train", "test"):
        options = {"check_images": False}
        source = "antiphon_envs.task_images.instances:task_images"
        prompts = PromptsConfig(source=source, path=str(tmp_path), split=split, options=options)
        loaded += load_prompts(TaskConfig(name="t", prompts=prompts), prompts, 0)
    assert [prompt.id for prompt in loaded] == ["t/psf__requests-1"] * 2
    assert [prompt.messages[0].content for prompt in loaded] == ["It fails."] * 2
    assert [instance_of(json.loads(json.dumps(prompt.payload["instance"]))) for prompt in loaded] == [read_row(ROW)] * 2


def test_an_instance_is_plain_data(tmp_path):
    make_terminal_bench(tmp_path / "a"), make_harbor(tmp_path / "b")
    for instance in (read_row(ROW), terminal_bench.read_task(tmp_path / "a"), harbor.read_task(tmp_path / "b")):
        assert instance_of(json.loads(json.dumps(to_row(instance)))) == instance
    for row in ({}, {"format": "swe"}, {**to_row(read_row(ROW)), "id": 3}, "text"):
        with raises_with(DataError):
            instance_of(row)
    with raises_with(DataError, column="instance"):
        TaskImages(Prompt(id="p", task="t", messages=(), payload={}))
    prompt = Prompt(id="p", task="t", messages=(), payload={"instance": to_row(read_row(ROW))})
    with raises_with(OptionError, key="network"):
        TaskImages(prompt, network=["example.org"])
    with raises_with(DataError, column="patch"):
        replace(read_row(ROW), patch="").solution()


# --- directories ------------------------------------------------------------------------------------------------------------


def make_terminal_bench(directory, **files):
    given = {
        "task.yaml": "instruction: Do it.\nmax_test_timeout_sec: 7\n",
        "docker-compose.yaml": "services: {client: {build: {context: part}, environment: ['A=${T_BENCH_TEST_DIR}/x', B=b]}}",
        "run-tests.sh": "true\n",
        **files,
    }
    for name, text in given.items():
        if text is not None:
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            (directory / name).write_text(text)


def make_harbor(directory, config="", **files):
    given = {"task.toml": config, "instruction.md": "Do it.", "tests/test.sh": "true\n", **files}
    for name, text in given.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)


def test_a_task_of_terminal_bench_is_read(tmp_path):
    directory = tmp_path / "a.task"
    make_terminal_bench(directory)
    task = terminal_bench.read_task(directory)
    assert (task.id, task.image, task.test_seconds) == ("a.task", "tb__a-task__client", 7.0)
    assert task.obtain == f"docker build --tag tb__a-task__client {directory / 'part'}"
    assert task.variables == {"TEST_DIR": "/tests", "A": "/tests/x", "B": "b"}
    assert terminal_bench.read_task(directory, image="mine:{task}").image == "mine:a.task"
    make_terminal_bench(tmp_path / "plain", **{"docker-compose.yaml": None})
    assert terminal_bench.read_task(tmp_path / "plain").variables == {"TEST_DIR": "/tests"}


@pytest.mark.parametrize(
    "files",
    [
        {"task.yaml": "difficulty: easy"},
        {"task.yaml": "[1, 2"},
        {"task.yaml": "instruction: x\nparser_name: swebench"},
        {"docker-compose.yaml": "services: {client: {}, server: {}}"},
        {"run-tests.sh": None},
    ],
)
def test_a_task_of_terminal_bench_that_cannot_run_is_refused(tmp_path, files):
    make_terminal_bench(tmp_path, **files)
    with raises_with(DataError):
        terminal_bench.read_task(tmp_path)


def test_a_task_of_harbor_is_read(tmp_path):
    make_harbor(tmp_path / "A")
    task = harbor.read_task(tmp_path / "A")
    assert (task.image, task.test_seconds, task.memory, task.instruction) == ("hb__a", 600.0, 0, "Do it.")
    assert task.obtain == f"docker build --tag hb__a {tmp_path / 'A' / 'environment'}"
    config = """
        [verifier]
        timeout_sec = 9
        env = {X = "${Y:-3}"}
        [environment]
        docker_image = "some/name:1"
        memory = "2G"
        workdir = "/a b"
        env = {Z = "z"}
    """
    make_harbor(tmp_path / "A", config)
    task = harbor.read_task(tmp_path / "A")
    assert (task.image, task.obtain, task.test_seconds) == ("some/name:1", "docker pull some/name:1", 9.0)
    assert (task.memory, task.variables, task.verifier_environment) == (2048, {"Z": "z"}, {"X": "3"})
    assert task.login.endswith("cd '/a b'")


@pytest.mark.parametrize(
    "config",
    [
        "[[steps]]\nname = 'a'",
        "[environment]\nos = 'windows'",
        "[environment]\ngpus = 1",
        "[environment.healthcheck]\ncommand = 'true'",
        "[verifier]\nenvironment_mode = 'separate'",
        "[agent]\nuser = 'agent'",
        "[verifier]\nenv = {KEY = '${SECRET}'}",
        "[verifier",
    ],
)
def test_a_task_of_harbor_that_cannot_run_is_refused(tmp_path, config):
    make_harbor(tmp_path, config)
    with raises_with(DataError):
        harbor.read_task(tmp_path)


def test_tasks_are_found_by_split(tmp_path):
    for name in ("train/a", "train/b", "test/c"):
        make_harbor(tmp_path / name)
    make_terminal_bench(tmp_path / "train" / "d")

    def ids(split, path=tmp_path, **options):
        return [row["id"] for row in task_images(split, str(path), check_images=False, **options)]

    assert ids("train") == ["a", "b", "d"] and ids("test") == ["c"]
    assert ids("train", format="terminal_bench") == ["d"] and ids("train", format="harbor") == ["a", "b"]
    assert ids("train", tmp_path / "train") == ["a", "b", "d"] and ids("train", tmp_path / "test" / "c") == ["c"]
    with raises_with(ConfigError, key="log_parser"):
        ids("train", log_parser="pytest")


# --- logs -------------------------------------------------------------------------------------------------------------------

TESTS = """
import pytest, unittest

def test_good(): pass
def test_bad(): assert 1 == 2, "a - b"
def test_error(missing): pass
@pytest.mark.skip(reason="why - so")
def test_skipped(): pass
@pytest.mark.xfail
def test_expected(): assert False
@pytest.mark.xfail
def test_unexpected(): pass
@pytest.mark.parametrize("a", ["x y", "/one/two", "[1]"])
def test_many(a): print("PASSED by nobody")
"""
UNIT = """
import unittest

class T(unittest.TestCase):
    def test_good(self): pass
    def test_bad(self): self.fail()
    def test_error(self): 1 / 0
    @unittest.skip("why")
    def test_skipped(self): pass
    @unittest.expectedFailure
    def test_expected(self): self.fail()
    @unittest.expectedFailure
    def test_unexpected(self): pass
"""


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    """Logs of real runs of pytest and unittest."""
    directory = tmp_path_factory.mktemp("logs")
    (directory / "test_a.py").write_text(TESTS)
    (directory / "unit.py").write_text(UNIT)
    options = ["-rA", "-p", "no:cacheprovider", "-p", "no:randomly", "--rootdir=."]
    commands = {"pytest": ["pytest", *options, "test_a.py"], "unittest": ["unittest", "-v", "unit"]}
    output = {
        name: subprocess.run(
            [sys.executable, "-m", *command], cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ).stdout
        for name, command in commands.items()
    }
    return {**output, "django": output["unittest"]}


def test_statuses_of_a_run_of_pytest(logs):
    by_name = {name.partition("::")[2]: status for name, status in get_parser("pytest")(logs["pytest"]).items()}
    expected = {"test_good": "PASSED", "test_bad": "FAILED", "test_error": "ERROR", "test_expected": "XFAIL"}
    assert expected.items() <= by_name.items() and "SKIPPED" not in by_name.values()
    assert {"test_many[/one/two]", "test_many[x"} < {*by_name}
    assert "test_a.py::test_many[/two]" in get_parser("parse_log_requests")(logs["pytest"])
    whole = get_parser("scikit")(logs["pytest"])
    assert whole["test_a.py::test_many[x y]"] == "PASSED" and whole["test_a.py::test_bad"] == "FAILED"


def test_statuses_of_a_run_of_unittest(logs):
    found = {name.partition(" ")[0]: status for name, status in get_parser("unittest")(logs["unittest"]).items()}
    assert found == {
        "test_good": "PASSED",
        "test_bad": "FAILED",
        "test_error": "ERROR",
        "test_skipped": "SKIPPED",
        "test_expected": "XFAIL",
        "test_unexpected": "FAILED",
    }


NAMES = st.sampled_from(
    ["a.py::t", "a.py::t[x y]", "b.py::u[/p/q]", "b.py::u[//p]", "c.py::C::v", "test_d (m.D)", "[100%]"]
)
SUMMARY = (
    st.builds("{} {}".format, st.sampled_from(["PASSED", "FAILED", "ERROR", "SKIPPED", "XFAIL"]), NAMES),
    st.builds("FAILED {} - assert 1 - {}".format, NAMES, NAMES),
    st.builds("{} {}".format, NAMES, st.sampled_from(["PASSED", "FAILED", "x"])),
    st.builds("\x1b[32mPASSED\x1b[0m {}".format, NAMES),
    st.sampled_from(["ok", "SKIPPED [3] a.py:3: why", "", "== 3 passed ==", "PASSED"]),
)
INTERRUPTIONS = ["System check identified no issues (0 silenced)", "a", "b ... c", "Internal Server Error: /x/"]
RESULTS = ["ok", "OK", " OK", "FAIL", "ERROR", "skipped 'x'", "some output"]
RUNNER = (
    st.builds("{} ... {}".format, NAMES, st.sampled_from(RESULTS)),
    st.builds("{}: {} (x)".format, st.sampled_from(["FAIL", "ERROR"]), NAMES),
    st.builds("{} ... {}\nok".format, NAMES, st.sampled_from(INTERRUPTIONS)),
    st.builds("{} ... Testing against Django installed in '/d'\nmore ... silenced).\nok".format, NAMES),
    st.builds("Applying sites.0002_alter_domain_unique...test_no_migrations {} ... ok".format, NAMES),
    st.sampled_from(["--version is equivalent to version ... ", "ok", "okay", "a line"]),
)


@pytest.mark.parametrize("name", sorted({*PARSERS} - {"unittest"}))
@given(data=st.data())
def test_parsers_agree_with_swebench(name, data):
    published = pytest.importorskip("swebench.harness.log_parsers.python", reason="swebench is not installed")
    lines = st.one_of(*SUMMARY, *RUNNER) if name == "django" else st.one_of(*SUMMARY)
    log = "\n".join(data.draw(st.lists(lines, max_size=12)))
    assert get_parser(name)(log) == vars(published)[f"parse_log_{name}"](log, None)


def test_parsers_of_repositories_are_those_of_swebench(logs):
    module = pytest.importorskip("swebench.harness.log_parsers.python", reason="swebench is not installed")
    for repository, name in BY_REPOSITORY.items():
        assert vars(module)[f"parse_log_{name}"] is module.MAP_REPO_TO_PARSER_PY[repository]
        get_parser(name)(logs["pytest"])  # also those that only swebench has
    others = {name for name, parse in module.MAP_REPO_TO_PARSER_PY.items() if name not in BY_REPOSITORY}
    assert all(module.MAP_REPO_TO_PARSER_PY[name] is module.parse_log_pytest for name in others)


CASES = ["a", "b", "c[1", "c[1-2]", "c[1-3]", "d"]
STATUSES = st.dictionaries(st.sampled_from(CASES), st.sampled_from(["PASSED", "FAILED", "SKIPPED", "ERROR", "XFAIL"]))


@given(
    statuses=STATUSES,
    wanted=st.lists(st.sampled_from(CASES), min_size=1, unique=True),
    kept=st.lists(st.sampled_from(CASES), unique=True),
    code=st.sampled_from([None, 0, 1]),
    broken=st.sampled_from(["", "", "", ">>>>> Tests Timed Out", "without marks"]),
)
def test_verdicts_agree_with_swebench(statuses, wanted, kept, code, broken, tmp_path_factory):
    grading = pytest.importorskip("swebench.harness.grading", reason="swebench is not installed")
    spec = pytest.importorskip("swebench.types", reason="swebench is not installed").TestSpec(
        instance_id="i",
        image="",
        eval_script_list=[],
        repo="r",
        version="1",
        FAIL_TO_PASS=wanted,
        PASS_TO_PASS=kept,
        log_parser="parse_log_pytest",
        eval_type="pass_and_fail",
    )
    lines = [f"{status} {name}" for name, status in statuses.items()]
    marks = (
        ([], []) if broken == "without marks" else (["+ : '>>>>> Start Test Output'"], ["+ : '>>>>> End Test Output'"])
    )
    ends = [] if code is None else [f">>>>> Test Exit Code: {code}"]
    log = "\n".join([*marks[0], *lines, *marks[1], *ends, *([broken] if broken.startswith(">") else [])])
    file = tmp_path_factory.getbasetemp() / "swebench.log"
    file.write_text(log)
    report = grading.get_eval_report(spec, {"instance_id": "i", "model_patch": "x"}, str(file), True)["i"]
    ours = grade(read_statuses(log, get_parser("pytest")), wanted, kept)
    assert ours.resolved == report["resolved"]
    for name, share in (("FAIL_TO_PASS", ours.fail_to_pass), ("PASS_TO_PASS", ours.pass_to_pass)):
        tests = report.get("tests_status", {}).get(name, {"success": [], "failure": kept if name[0] == "P" else wanted})
        total = len(tests["success"]) + len(tests["failure"])
        assert share == (len(tests["success"]) / total if total else 1)


def test_a_verdict_needs_all_tests():
    def verdict(lines, code=0, wanted=("a",), kept=("b",)):
        log = "\n".join([">>>>> Start Test Output", *lines, ">>>>> End Test Output", f">>>>> Test Exit Code: {code}"])
        report = grade(read_statuses(log, get_parser("pytest")), wanted, kept)
        return report.resolved, report.fail_to_pass, report.pass_to_pass

    assert verdict(["PASSED a", "PASSED b"]) == (True, 1.0, 1.0)
    assert verdict(["PASSED a", "SKIPPED b"]) == (True, 1.0, 1.0)
    assert verdict(["SKIPPED a", "PASSED b"]) == (False, 0.0, 1.0)
    assert verdict(["PASSED a"]) == (False, 1.0, 0.0)
    assert verdict(["PASSED a", "FAILED c", "XFAIL b"], code=1) == (True, 1.0, 1.0)
    assert verdict(["PASSED a", "PASSED b"], code=1) == (False, 0.0, 0.0)  # something printed what tests print
    assert verdict([], wanted=(), kept=()) == (False, 1.0, 1.0)
    assert verdict(["PASSED a[1-2]"], wanted=("a[1",), kept=()) == (True, 1.0, 1.0)
    assert verdict(["PASSED a[1-2]", "FAILED a[1-3]"], wanted=("a[1",), kept=()) == (False, 0.0, 1.0)


@pytest.mark.parametrize("code", [0, 3])
def test_the_exit_code_of_the_tests_is_recorded(tmp_path, code):
    script = f": '>>>>> Start Test Output'\n(exit {code})\n: '>>>>> End Test Output'\ntrue\n"
    done = subprocess.run(
        ["bash", "-xc", record_exit_code(script)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert f"\n>>>>> Test Exit Code: {code}\n" in done.stdout
    assert record_exit_code("no mark") == "no mark"


SUMMARIES = st.lists(
    st.one_of(
        st.builds("{} {}".format, st.sampled_from([*terminal_bench.PASSES, "UNKNOWN", "ERROR:"]), NAMES),
        st.builds("FAILED {} - a - b".format, NAMES),
        st.sampled_from(["", "PASSED", "==== 1 passed in 0.1s ====", " PASSED\ta::b ", "FAILED - x", "PASSED a::"]),
    )
)


@given(lines=SUMMARIES)
def test_summaries_agree_with_terminal_bench(lines):
    module = pytest.importorskip("terminal_bench.parsers.pytest_parser", reason="terminal-bench is not installed")
    log = "\n".join(["FAILED before", "=== short test summary info ===", *lines])
    published = {name: status.value == "passed" for name, status in module.PytestParser().parse(log).items()}
    assert terminal_bench.parse_summary(log) == published


def test_summary_of_a_run_of_pytest(logs):
    assert terminal_bench.parse_summary(logs["pytest"]) == {
        "test_good": True,
        "test_bad - AssertionError: a": False,  # only the last part is taken for the message
        "test_error": False,
        "test_expected": True,
        "test_unexpected": False,
        **{f"test_many[{each}]": True for each in ("x y", "/one/two", "[1]")},
        "[1] test_a.py:7: why - so": True,
    }
    assert terminal_bench.parse_summary("PASSED a::b") == {}


def test_rewards_are_finite_numbers():
    assert harbor.parse_rewards("0.5\n", is_json=False, task="t") == {"reward": 0.5}
    assert harbor.parse_rewards('{"reward": 1, "speed": 0.2}', is_json=True, task="t") == {"reward": 1.0, "speed": 0.2}
    assert harbor.main_reward({"speed": 0.2, "reward": 1.0}, "t") == 1.0 and harbor.main_reward({"a": 0.2}, "t") == 0.2
    with raises_with(SandboxError):
        harbor.main_reward({"a": 0.2, "b": 1.0}, "t")
    wrong = [
        ("", False),
        ("yes", False),
        ("nan", False),
        ("1e999", False),
        ("NaN", True),
        ("1", True),
        ('{"a": "1"}', True),
        ("{}", True),
    ]
    for text, is_json in wrong:
        with raises_with(SandboxError):
            harbor.parse_rewards(text, is_json=is_json, task="t")


@example(text="a\n```\nb")
@given(text=st.text(st.sampled_from("ab`'\"$\\\n #"), max_size=30))
def test_a_solution_is_one_command_of_an_action(text):
    command = heredoc("cat", text)
    given = command_of(f"```bash\n{command}\n```")
    done = subprocess.run(["bash", "-c", given], capture_output=True, text=True)
    assert done.stdout.rstrip("\n") == text.rstrip("\n") and done.returncode == 0


def test_scripts_of_swebench_for_repository_and_version():
    reason = "swebench<5 is not installed"
    pytest.importorskip("swebench.harness.test_spec.create_scripts", reason=reason)
    script = read_row(without("test_cmd")).eval_script
    assert ": '>>>>> Start Test Output'\npytest -rA tests/test_x.py\n: '>>>>> End Test Output'" in script
    with raises_with(DataError, column="version"):
        read_row(without("test_cmd", version="99"))
