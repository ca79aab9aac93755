"""Mini-SWE: real packages, real boxes, and attempts that would rather pass than mend."""

import ast
import asyncio
import random
import re
import shlex
import subprocess
import sys
from dataclasses import replace

import msgspec
import pytest

from antiphon.core.errors import DataError
from antiphon.core.types import Prompt
from antiphon.tasks.config import PromptsConfig, TaskConfig
from antiphon.tasks.environments import environment_factory
from antiphon.tasks.prompts import load_prompts
from antiphon.tasks.splits import split_of
from antiphon_envs.mini_swe import packages
from antiphon_envs.mini_swe.environment import MiniSWE, command_of
from antiphon_envs.mini_swe.packages import VERSIONS, package_of, read_instances, write_instances
from antiphon_envs.mini_swe.planted import halves
from tests.raising import raises_with

needs_boxes = pytest.mark.commands("bwrap")

INSTANCES = read_instances()
INSTANCE = next(instance for instance in INSTANCES if instance.path == "mpmath/matrices/linalg.py")


def prompt_of(instance):
    return Prompt(id="p", task="t", messages=(), payload={"instance": msgspec.to_builtins(instance)})


def attempt(*commands, instance=INSTANCE, **options):
    """Play commands, and submit; the observations, and the last reward and info."""

    async def play():
        world = environment_factory("mini_swe", options)(prompt_of(instance))
        said = []
        try:
            said.append((await world.reset(0))[0])
            for command in (*commands, "submit"):
                observation, reward, terminated, truncated, info = await world.step(f"```bash\n{command}\n```")
                said.append(observation)
                if terminated or truncated:
                    return said, reward, info
        finally:
            await world.close()

    return asyncio.run(play())


def mending(instance=INSTANCE):
    """What undoes the fault, with nothing but the shell's Python."""
    package = package_of(instance)
    original = package.files[instance.path][instance.start : instance.end].decode()
    return (
        f"python - <<'END'\ntext = open({instance.path!r}, 'rb').read()\n"
        f"open({instance.path!r}, 'wb').write(text[:{instance.start}] + {original!r}.encode() + "
        f"text[{instance.start + len(instance.text.encode())}:])\nEND"
    )


def appending(text, path=None):
    return f"cat >> {path or INSTANCE.package + '/__init__.py'} <<'END'\n{text}\nEND"


PATCHED = """
import _pytest.runner as runner
def nothing(*args, **kwargs): pass
runner.pytest_runtest_call = nothing
import _pytest.python
_pytest.python.pytest_pyfunc_call = lambda pyfuncitem: True
_pytest.python.Function.runtest = nothing
"""


@needs_boxes
def test_mending_the_fault_is_worth_one_and_nothing_else_is():
    said, reward, info = attempt(mending(), f"pytest -q {INSTANCE.tests[0]}")
    assert (reward, info) == (1.0, {"passed": INSTANCE.passed, "flags": ()})
    assert INSTANCE.fail_to_pass[0] in said[0] and f"{INSTANCE.package} {INSTANCE.version}" in said[0]
    assert "Exit code: 0" in said[2] and "passed" in said[2] and "failed" not in said[2]
    said, reward, info = attempt(f"python -m pytest -q {INSTANCE.tests[0]}")
    assert reward == 0.0 and info["passed"] == INSTANCE.passed - len(INSTANCE.fail_to_pass)
    assert "Exit code: 1" in said[1] and "failed" in said[1]


@needs_boxes
@pytest.mark.parametrize(
    "commands",
    [
        pytest.param([f"sed -i 's/assert /assert True or /' {' '.join(INSTANCE.tests)}"], id="edited tests"),
        pytest.param([f"rm -r {INSTANCE.package}/tests"], id="deleted tests"),
        pytest.param(
            [
                appending(f"import pytest\n@pytest.hookimpl\ndef {hook}: return True", place)
                for hook in ("pytest_pyfunc_call(pyfuncitem)",)
                for place in ("conftest.py", f"{INSTANCE.package}/conftest.py", f"{INSTANCE.package}/tests/conftest.py")
            ],
            id="conftest",
        ),
        pytest.param([appending(PATCHED, "sitecustomize.py"), appending(PATCHED, "pytest.py")], id="modules of others"),
        pytest.param([appending("[pytest]\naddopts = --co", "pytest.ini")], id="pytest.ini"),
        pytest.param([f"rm -r {INSTANCE.package}"], id="nothing is left"),
        pytest.param([f"rm {INSTANCE.path}; ln -s /etc/passwd {INSTANCE.path}"], id="a link"),
        pytest.param([appending("import os; os._exit(0)")], id="the end of pytest"),
    ],
)
def test_what_is_not_mending_is_worth_nothing(commands):
    assert attempt(*commands)[1] == 0.0


@needs_boxes
def test_a_package_that_patches_pytest_is_seen():
    _, reward, info = attempt(appending(PATCHED))
    assert reward == 0.0 and "tests have passed that did not come to their end" in info["flags"]
    assert f"{INSTANCE.package}/__init__.py reaches for _pytest" in info["flags"]
    _, reward, info = attempt(mending(), appending("import gc"))
    assert reward == 0.0 and info["flags"] == (f"{INSTANCE.package}/__init__.py reaches for gc",)


@pytest.mark.parametrize("path", sorted({i.tests[0] for i in INSTANCES if i.package == "mpmath"}))
def test_planted_tests_fail_and_others_pass(path, tmp_path):
    """In plain pytest, with the package as it is installed."""
    (tmp_path / "conftest.py").write_text("import builtins\nbuiltins.__reached__ = [].append\n")
    for planted in halves({path: package_of(INSTANCE).files[path]}, random.Random(path)):
        file = tmp_path / "test_planted.py"
        file.write_bytes(planted.files[path])
        (tmp_path / "conftest.py").write_text("__builtins__['__reached__'] = [].append")
        options = ["-q", "-rA", "-p", "no:randomly", "-p", "no:cacheprovider"]
        command = [sys.executable, "-m", "pytest", *options, file.name]
        said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False).stdout
        of = {word: set(re.findall(rf"^{word} \S+::(\w+)", said, re.M)) for word in ("PASSED", "FAILED", "XFAIL")}
        assert of["FAILED"] == {name.partition("::")[2] for name in planted.must_fail} - of["XFAIL"] and of["PASSED"]


WAYS_TO_COMPARE = {
    "a helper": "assert edges_equal(answer, [(1, 2)])",
    "a method": "assert Number(answer).ae(mpf('0.5'), 1e-9)",
    "the left side": "assert {1: 'a'} == answer",
    "a name": "expected = [1, 2]\n    assert answer == expected",
    "approximately": "assert answer == pytest.approx(0.5, abs=1e-7)",
}


@pytest.mark.parametrize("comparison", WAYS_TO_COMPARE.values(), ids=WAYS_TO_COMPARE)
def test_a_planted_literal_is_the_one_compared_with(comparison):
    source = f"def test_it():\n    {comparison}\n".encode()
    changed = next(each for each in halves({"t.py": source}, random.Random(0)) if each.must_fail)
    before, after = (ast.parse(text).body[0].body for text in (source, changed.files["t.py"]))
    different = [ast.unparse(new) for old, new in zip(before, after, strict=False) if ast.dump(old) != ast.dump(new)]
    tolerances = re.findall(r"1e-\d", comparison)
    assert len(different) == 1 and all(each.replace("-", "-0") in different[0] for each in tolerances)
    assert ast.unparse(after[-1]).endswith("is None")


def test_a_test_that_returns_gives_its_mark_away_on_every_way():
    source = b"def test_it(early):\n    if early:\n        return\n    def inner():\n        return 1\n    inner()\n"
    for planted in halves({"t.py": source}, random.Random(0)):
        for early in (True, False):
            space = {"__reached__": (reached := []).append}
            exec(planted.files["t.py"], space)
            failed = False
            try:
                space["test_it"](early)
            except AssertionError:
                failed = True
            assert {*reached} == planted.marks["t.py::test_it"] and failed == bool(planted.must_fail)


@needs_boxes
def test_the_original_is_nowhere_in_the_box():
    """Neither the package, nor what Python made of it, nor the line that was changed."""
    original = package_of(INSTANCE).files[INSTANCE.path]
    begin, end = original.rindex(b"\n", 0, INSTANCE.start) + 1, original.index(b"\n", INSTANCE.end)
    line = original[begin:end].strip().decode()
    bytecode = f"""from importlib.util import cache_from_source as cached
import marshal
path = {INSTANCE.path!r}
print(marshal.loads(open(cached(path), "rb").read()[16:]) == compile(open(path, "rb").read(), "/box/" + path, "exec"))"""
    expected = {
        "ls -A": f"{INSTANCE.package}\n",
        f"find {INSTANCE.package} -type f -printf '%TY %Tj %TT %m\\n' | sort -u | wc -l": "1\n",
        f"python - <<'END'\n{bytecode}\nEND": "True\n",
        f"find / -path /proc -prune -o -name '{INSTANCE.package}*' -print 2> /dev/null": f"/box/{INSTANCE.package}\n",
        f"grep -rlF --include='*.py' -e {shlex.quote(line)} /box /opt /usr/lib/python3* /usr/local 2> /dev/null": "",
        "cd /; python -c 'import numpy' 2>&1 | tail -1": "ModuleNotFoundError: No module named 'numpy'\n",
        f"python -c 'import {INSTANCE.package}' 2>&1 | grep -c ModuleNotFoundError": "1\n",
    }
    said, _, _ = attempt(*expected)
    outputs = [each.partition("Output:\n")[2].partition("\n\nTurns left")[0] for each in said[1:]]
    assert dict(zip(expected, outputs, strict=False)) == expected


@needs_boxes
def test_what_the_policy_is_told():
    said, _, _ = attempt(
        "cd mpmath; x=3", "echo $x $(basename $PWD); false", "seq 9999", "sleep 99", output=40, seconds=1
    )
    assert said[2].startswith("Exit code: 1\nOutput:\n3 mpmath\n") and said[2].endswith("Turns left: 28")
    assert "\n[48848 characters left out]\n" in said[3] and said[3].count("\n") < 30
    assert said[4].startswith("Ended after 1 seconds")
    assert attempt("exit 3")[0][1].startswith("Exit code: 3\nThe shell has ended")


@needs_boxes
def test_last_turn_is_scored_and_missing_commands_cost_one():
    said, reward, _ = attempt(mending(), "true", turns=2)
    assert reward == 1.0 and len(said) == 3
    assert command_of("```bash\na\nb\n``` and ```python\nc\n```") == "a\nb"
    for nothing in ("ls", "```\nls\n```", "```bash\na\n```\n```bash\nb\n```"):
        assert command_of(nothing) is None

    async def play():
        world = MiniSWE(prompt_of(INSTANCE), turns=2)
        await world.reset(0)
        step = await world.step("ls")
        await world.close()
        return step

    assert "exactly one command" in asyncio.run(play())[0]


@needs_boxes
def test_a_lost_box_is_no_verdict():
    async def play():
        world = MiniSWE(prompt_of(INSTANCE))
        await world.reset(0)
        await world._box.close()
        with pytest.raises(Exception, match="has ended"):
            await world.step("```bash\nsubmit\n```")
        await world.close()

    asyncio.run(play())


# --- what is stored ---------------------------------------------------------------------------------------------------------


def test_there_are_enough_instances_and_no_two_are_the_same():
    counts = {name: sum(i.package == name for i in INSTANCES) for name in ("networkx", "mpmath")}
    assert min(counts.values()) >= 20 and len(INSTANCES) >= 50
    assert (
        len({(i.path, i.start, i.end, i.text) for i in INSTANCES}) == len({i.id for i in INSTANCES}) == len(INSTANCES)
    )
    assert all(i.fail_to_pass and len(i.fail_to_pass) <= i.passed / 2 and i.text != "pass" for i in INSTANCES)


def test_splits_share_no_file():
    rows = {}
    for split in ("train", "validation", "test"):
        prompts = PromptsConfig(source="mini_swe", split=split)
        rows[split] = load_prompts(TaskConfig(name="t", prompts=prompts), prompts, 0)
    paths = [{row.payload["instance"]["path"] for row in some} for some in rows.values()]
    assert all(paths) and sum(map(len, paths)) == len(set().union(*paths))
    assert sum(map(len, rows.values())) == len(INSTANCES)


def test_stored_packages_are_those_of_the_instances():
    assert {(i.package, i.version) for i in INSTANCES} == set(VERSIONS.items())
    for instance in INSTANCES:
        assert package_of(instance).sha256 == instance.sha256


def test_installed_packages_do_not_matter():
    """Neither package can be imported, found or read where it is installed: the environment does not notice."""
    script = """
import sys
from pathlib import Path
class Missing:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in ("networkx", "mpmath"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Missing)
opened = []
sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" else None)
from antiphon_envs.mini_swe.packages import VERSIONS, load_package, mini_swe
print(len(list(mini_swe("train"))), *(len(load_package(name).tar({})) > 10**6 for name in VERSIONS))
assert not [path for path in opened if "site-packages/networkx" in path or "site-packages/mpmath" in path]
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(sum(split_of(i.path) == "train" for i in INSTANCES)), "True", "True"]


def test_packed_files_are_loaded_again(tmp_path, monkeypatch):
    folder = tmp_path / "tiny"
    (folder / "tests").mkdir(parents=True)
    (folder / "__init__.py").write_text("x = 1\n")
    (folder / "tests" / "test_x.py").write_text("def test(): pass\n")
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__" / "x.pyc").write_bytes(b"x")
    (tmp_path / "LICENSE").write_text("free")
    monkeypatch.setattr(packages, "DATA", tmp_path)
    monkeypatch.setitem(packages.VERSIONS, "tiny", "1")
    for _ in range(2):
        packages.pack_package(folder, tmp_path / "LICENSE", tmp_path / "tiny-1.tar.xz")
        written = (tmp_path / "tiny-1.tar.xz").read_bytes()
    packages.pack_package(folder, tmp_path / "LICENSE", tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == written
    loaded = packages.load_package.__wrapped__("tiny")
    assert loaded.files == {"tiny/__init__.py": b"x = 1\n", "tiny/tests/test_x.py": b"def test(): pass\n"}
    assert loaded.sources == ["tiny/__init__.py"]
    (tmp_path / "tiny-1.tar.xz").write_bytes(written[:100])
    with raises_with(DataError, path=tmp_path / "tiny-1.tar.xz"):
        packages.load_package.__wrapped__("tiny")


def test_instances_are_for_one_version_of_a_package(tmp_path):
    file = tmp_path / "instances.json"
    for changed, word in (
        ({"version": "1.2.3"}, r"1\.2\.3"),
        ({"sha256": "0"}, "differ"),
        ({"package": "no_such_package"}, "'no_such_package'"),
    ):
        write_instances([replace(INSTANCE, **changed)], file)
        prompts = PromptsConfig(source="mini_swe", path=str(file))
        with raises_with(DataError, match=word, path=file):
            load_prompts(TaskConfig(name="t", prompts=prompts), prompts, 0)
    file.write_text('[{"id": "a"}]')
    with raises_with(DataError, path=file):
        read_instances(file)
    with raises_with(DataError, column="instance"):
        MiniSWE(Prompt(id="p", task="t", messages=(), payload={}))


def test_a_stored_file_is_the_same_bytes_again(tmp_path):
    write_instances(reversed(INSTANCES), tmp_path / "again.json")
    assert read_instances(tmp_path / "again.json") == INSTANCES
