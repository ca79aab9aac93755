"""What all tests share: no test depends on how fast the machine is. Whole runs, small: a model of a few thousand parameters,
real engines, real learners, real graders."""

import os

# One thread of arithmetic a process, set before anything imports numpy or torch: the machines that run the tests are small.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import importlib.util
import json
import re
import shutil
import signal
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from socketserver import TCPServer

import psutil
import pytest
import yaml
from hypothesis import settings

from antiphon.core.errors import ConfigError
from antiphon.engines.base import ENGINES
from antiphon.record.metric_descriptions import find_undescribed
from tests import warm

# A shell starts what it runs in the background with Ctrl-C ignored, and all processes that are started from there inherit it.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Five connections, the default, may wait for a test's server at once; one more is now and then reset, and tried again.
TCPServer.request_queue_size = 128

# derandomize: a red build is the change's fault and never the draw's; `make chaos` is where fresh seeds are tried.
settings.register_profile("antiphon", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("antiphon")

TASK = r"""
    def problems(split, count=40):
        for number in range(count):
            digit = number % 10
            text = {"prompt": f"{digit}+{number // 10}=", "answer": str(digit), "response": str(digit)}
            yield {"id": f"{split}-{number}", **text}

    def build(directory, seed, hidden_size=32, layers=1, pad=None):
        import string
        import torch
        from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
        from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

        characters = Tokenizer(models.WordLevel({c: i for i, c in enumerate(["<eos>", *string.printable])}, "?"))
        characters.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
        characters.decoder = decoders.Fuse()
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=characters, eos_token="<eos>")
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=hidden_size, intermediate_size=32, num_hidden_layers=layers,
            num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=512,
            eos_token_id=tokenizer.eos_token_id, bos_token_id=None, pad_token_id=pad,
        )
        LlamaForCausalLM(config).save_pretrained(directory)
        tokenizer.save_pretrained(directory)

    def build_wide(directory, seed):
        build(directory, seed, hidden_size=64)  # heads of 32, the narrowest that vLLM knows

    def build_deep(directory, seed):
        build(directory, seed, layers=2)

    def build_four(directory, seed):
        build(directory, seed, layers=4)

    def build_padded(directory, seed):
        build(directory, seed, layers=2, pad=1)  # the digit 0: prompts have it, and responses

    class Lengths:
        # Pays for digits, and goes on for as many turns as the seed says.
        def reset(self, seed):
            self.turns = 1 + seed % 3
            return "go", {}

        def step(self, action):
            self.turns -= 1
            return "on", sum(character.isdigit() for character in action) / 8, self.turns == 0, False, {}

        def close(self):
            pass

    def digits(prompt, transcript):
        return sum(character.isdigit() for character in transcript.response) / 8

    def places(prompt, transcripts, scores):
        # Their order, which depends on all of them; now and then no verdict.
        if sum(len(transcript.response) for transcript in transcripts) % 7 == 0:
            raise ValueError("a group that cannot be judged")
        order = sorted(range(len(scores)), key=lambda place: (scores[place].value, place))
        return [order.index(place) / 4 for place in range(len(scores))]

    def raises(prompt, transcript):
        raise KeyError("no such column in my table")

    def raises_on(group):
        raise KeyError("no such column in my table")
"""


def pytest_addoption(parser):
    parser.addoption("--kills", type=int, default=0, help="kills of the long chaos test")
    parser.addoption("--seed", type=int, default=0, help="of the long chaos test")
    parser.addoption("--cold", action="store_true", help="start each program by an interpreter, as users do")
    parser.addoption("--long", action="store_true", help="tests that take minutes, too")
    parser.addoption(
        "--engine",
        metavar="MODULE:ATTRIBUTE",
        help="an engine of your own, for tests/system/engine_contract alone",
    )
    parser.addoption("--engine-python", default="", metavar="PATH", help="the interpreter that has its packages")
    parser.addoption(
        "--engine-modes", default="", metavar="keep,…", help="the values of rollout.on_update that it knows"
    )
    parser.addoption("--engine-options", default="{}", metavar="JSON", help="its engine.options, an object")


def pytest_collection_modifyitems(config, items):
    for item in items:
        if "unit" in item.path.parts:
            item.add_marker("unit")
    left_out = []
    if not config.getoption("--long"):
        left_out += [item for item in items if item.get_closest_marker("long")]
    if config.getoption("--engine"):  # a mixture of experts is asked of the built-in engines alone
        left_out += [item for item in items if "mixture" in item.fixturenames]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Skip a test that needs what this system lacks and pip does not bring. Fork servers start cold where they are the unit."""
    forks = item.get_closest_marker("unit") and {"cluster", "processes"} & {*item.path.parts}
    warm.use(not forks and not item.config.getoption("--cold"))
    if item.get_closest_marker("reasoning_gym"):
        pytest.importorskip("reasoning_gym", reason="reasoning-gym needs a C compiler to be installed")
    needed = [name for marker in item.iter_markers("commands") for name in marker.args]
    if missing := [name for name in needed if shutil.which(name) is None]:
        pytest.skip(f"not installed on this system: {', '.join(missing)}")


class SkipReasons:
    """Counts skipped tests by reason, and fails the tests if a reason is not in tests/skips.txt."""

    def __init__(self):
        lines = (Path(__file__).parent / "skips.txt").read_text(encoding="utf-8").splitlines()
        self.known = [re.compile(line) for line in lines if line and not line.startswith("#")]
        self.counts = Counter()

    @property
    def unknown(self):
        return [reason for reason in self.counts if not any(each.fullmatch(reason) for each in self.known)]

    def pytest_runtest_logreport(self, report):
        if report.skipped and isinstance(report.longrepr, tuple):
            self.counts[" ".join(report.longrepr[2].removeprefix("Skipped: ").split())] += 1

    pytest_collectreport = pytest_runtest_logreport

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session):
        if self.unknown and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter):
        if self.counts:
            terminalreporter.section("skipped, by reason")
        for reason, count in self.counts.most_common():
            wrong = "  NOT IN tests/skips.txt" if reason in self.unknown else ""
            terminalreporter.line(f"{count:5}  {reason}{wrong}")


class Failures:
    """Prints each failure as it comes, too: a job that is stopped at its limit of time prints no summary."""

    def __init__(self, config):
        self.config = config

    def pytest_runtest_logreport(self, report):
        if report.failed:
            writer = self.config.get_terminal_writer()
            writer.line(f"\n{report.nodeid} failed in its {report.when}:\n{report.longreprtext[-5000:]}", red=True)


class LeftProcesses:
    """Fails the tests if a process that they started runs on although its parent has ended."""

    SECONDS = 60  # a worker ends within ten of its parent's end, on a machine that is not loaded

    def __init__(self):
        self.before = {*self.orphans()}
        self.left = []

    @staticmethod
    def orphans():
        """Of this session of processes, those that run: a thread can, although the first of its process has ended."""
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                runs = process.status() != psutil.STATUS_ZOMBIE or process.num_threads() > 1
                if runs and process.ppid() in (0, 1) and os.getsid(process.pid) == os.getsid(0) != process.pid:
                    yield process

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session):
        psutil.wait_procs({*self.orphans()} - self.before, self.SECONDS)
        self.left = {*self.orphans()} - self.before
        if self.left and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter):
        for process in self.left:
            terminalreporter.line(f"left by the tests: {process}")


def require_engine(name, python):
    """Raise a usage error unless an engine of your own can be imported, by another interpreter if one is named."""
    remedy = "PYTHONPATH=DIR puts a folder on the import path"
    if not python:
        try:
            ENGINES.resolve(name)
        except ConfigError as error:
            raise pytest.UsageError(f"--engine: {error}; {remedy}") from error
    elif ":" in name:
        code = "import importlib, sys; getattr(importlib.import_module(sys.argv[1]), sys.argv[2])"
        command = [python, "-c", code, *name.split(":", 1)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1])
        if done.returncode:
            raise pytest.UsageError(f"--engine {name}: {python}: {done.stderr.strip().splitlines()[-1]}; {remedy}")


def pytest_configure(config):
    if name := config.getoption("--engine"):
        require_engine(name, config.getoption("--engine-python"))
    try:
        options = json.loads(config.getoption("--engine-options"))
    except ValueError as error:
        raise pytest.UsageError(f"--engine-options: no JSON: {error}") from error
    if not isinstance(options, dict):
        raise pytest.UsageError(f'--engine-options: {options!r} is no JSON object, such as {{"size": 3}}')
    if not hasattr(config, "workerinput"):  # the workers of xdist report to its controller
        config.pluginmanager.register(SkipReasons())
        if os.environ.get("CI"):
            config.pluginmanager.register(Failures(config))
        # Whole runs. What tests of the system's commands start, such as docker, ends in its own time.
        if config.option.markexpr != "commands" and any("unit" not in Path(each).parts for each in config.args):
            config.pluginmanager.register(LeftProcesses())


@pytest.fixture(autouse=True, scope="module")
def restored_environment():
    """Undo what a module changes in the environment: with another one, programs of later modules would not start warm."""
    before = dict(os.environ)
    yield
    changed = {name for name in {*before, *os.environ} if before.get(name) != os.environ.get(name)}
    for name in changed - {"PYTEST_CURRENT_TEST"}:
        if name in before:
            os.environ[name] = before[name]
        else:
            del os.environ[name]


class Project:
    """A folder with a configuration and the user's code beside it."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder = folder
        self.model = model
        self._started: list[subprocess.Popen[str]] = []
        (folder / "mytask.py").write_text(textwrap.dedent(TASK))

    def config(self, **sections) -> Path:
        config = {
            "name": "run",
            "steps": 3,
            "model": {"path": str(self.model)},
            "tasks": [
                {
                    "name": "digits",
                    "prompts": {"source": "mytask:problems"},
                    "test": {"source": "mytask:problems", "split": "test", "limit": 8},
                    "reward": "mytask:digits",
                }
            ],
            "rollout": {"groups_per_step": 2, "group_size": 4, "timeout": 180, "sampling": {"max_tokens": 8}},
            "learner": {"optimizer": {"learning_rate": 1e-2}},
            "engine": {"slots": 16},
            "record": {"directory": str(self.folder / "runs")},
        }
        for name, section in sections.items():
            config[name] = {**config[name], **section} if isinstance(section, dict) and name in config else section
        path = self.folder / "config.yaml"
        path.write_text(yaml.safe_dump(config))
        return path

    def start(self, *arguments: str) -> "subprocess.Popen[str]":
        process = warm.start("-m", "antiphon", *arguments)
        self._started.append(process)
        return process

    def end(self) -> None:
        """End what a test that failed has left, which would fail others: those that look at processes or open files."""
        for process in self._started:
            process.kill()
            process.wait()
            process.stdout.close()
            process.stderr.close()

    def run(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        process = self.start(*arguments)
        out, err = process.communicate(timeout=240)
        return subprocess.CompletedProcess(arguments, process.returncode, out, err)

    def metrics(self, name: str = "run", own: tuple[str, ...] = ()) -> list[dict]:
        """Return the lines of a run's metrics; every metric but those of the test's `own` code must have a description."""
        lines = [json.loads(line) for line in (self.folder / "runs" / name / "metrics.jsonl").read_text().splitlines()]
        names = {name for line in lines for name in line} - {"step", "sft_step", "lineage", *own}
        assert find_undescribed(sorted(names)) == []
        return lines

    def summary(self, name: str = "run") -> dict:
        return json.loads((self.folder / "runs" / name / "summary.json").read_text())


@pytest.fixture(scope="session")
def vllm_python() -> str:
    """An interpreter that has vLLM: this one, or what ANTIPHON_VLLM_PYTHON names."""
    named = os.environ.get("ANTIPHON_VLLM_PYTHON", "")
    if not named and importlib.util.find_spec("vllm") is None:
        pytest.skip("no vLLM here; ANTIPHON_VLLM_PYTHON may name an interpreter that has it")
    return named


@pytest.fixture(scope="session")
def rock_python() -> str:
    """An interpreter that has ROCK's client: this one, or what ANTIPHON_ROCK_PYTHON names."""
    named = os.environ.get("ANTIPHON_ROCK_PYTHON", "")
    if not named and (importlib.util.find_spec("rock") is None or importlib.util.find_spec("oss2") is None):
        pytest.skip("no rl-rock here; ANTIPHON_ROCK_PYTHON may name an interpreter that has it")
    return named or sys.executable


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Path:
    """The model that `mytask:build` makes, made once."""
    return _made("build", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def wide_model(tmp_path_factory) -> Path:
    """The model that `mytask:build_wide` makes, made once."""
    return _made("build_wide", tmp_path_factory.mktemp("wide_model"))


def _made(function: str, directory: Path) -> Path:
    functions = {}
    exec(textwrap.dedent(TASK), functions)
    functions[function](directory, 0)
    return directory


@pytest.fixture
def project(tmp_path, model) -> Iterator[Project]:
    project = Project(tmp_path, model)
    yield project
    project.end()


@pytest.fixture
def collector():
    """A collector of OpenTelemetry's spans."""
    from tests.span_collector import Collector

    found = Collector()
    yield found
    found.server.shutdown()
    found.server.server_close()
