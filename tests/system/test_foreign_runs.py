"""A run directory or a checkpoint from elsewhere: verbs that read it run nothing of it."""

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap

import pytest
import yaml

pytestmark = pytest.mark.system

SECONDS = 120  # no verb takes a tenth of it


@pytest.fixture
def elsewhere(tmp_path):
    return tmp_path / "elsewhere"


@pytest.fixture
def marker(tmp_path):
    """What exists once code of the run has been executed."""
    return tmp_path / "executed"


@pytest.fixture
def run(trained, elsewhere, marker):
    """A copy of the run with hostile modules beside its config, named as what readers and the run import."""
    copy = shutil.copytree(trained.folder / "runs" / "run", elsewhere / "run")
    code = f"open({str(marker)!r}, 'a').write(__name__)\n"
    for name in ("mytask", "sqlite3", "yaml", "msgspec", "sitecustomize"):
        (copy / f"{name}.py").write_text(code)
    return copy


def change(run, **sections):
    path = run / "config.yaml"
    config = yaml.safe_load(path.read_text())
    for key, value in sections.items():
        at = config
        *parts, last = key.split("__")
        for part in parts:
            at = at[int(part) if part.isdigit() else part]
        at[last] = value
    path.write_text(yaml.safe_dump(config))


def antiphon(*arguments, cwd=None, stdin=""):
    return subprocess.run(
        [sys.executable, "-m", "antiphon", *map(str, arguments)],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
    )


def named(verb, run):
    """What a verb is called with, so that it reads the configuration of a run."""
    return [run] if verb != "eval" else [run / "checkpoints" / "step_000002", run / "config.yaml"]


def refusal(done) -> str:
    assert done.returncode == 2, (done.returncode, done.stdout, done.stderr)
    lines = done.stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith("antiphon: "), done.stderr
    return lines[0]


@pytest.mark.parametrize("verb", ["audit", "why", "diff", "export"])
def test_a_verb_that_needs_no_name_does_its_work(trained, run, marker, elsewhere, verb):
    rest = {"why": ["0.0.0"], "diff": [trained.folder / "runs" / "run"], "export": [elsewhere / "exported"]}
    done = antiphon(verb, run, *rest.get(verb, ()))
    assert done.returncode == 0, done.stderr
    assert not marker.exists()
    done = antiphon(verb, ".", *rest.get(verb, ())[:1] if verb != "export" else [elsewhere / "again"], cwd=run)
    assert done.returncode == 0, done.stderr
    assert not marker.exists()


@pytest.mark.parametrize("verb", ["replay", "regrade", "eval"])
def test_names_of_a_run_are_refused_and_named(trained, run, marker, verb):
    arguments = named(verb, run)
    message = refusal(antiphon(verb, *arguments))
    assert "mytask:problems" in message and "--code DIR" in message and "--trust" in message
    assert not marker.exists()
    done = antiphon(verb, *arguments, "--code", trained.folder)
    assert done.returncode == 0, done.stderr
    assert not marker.exists()


@pytest.mark.parametrize("verb", ["replay", "regrade"])
def test_a_source_of_the_library_runs_no_command(trained, run, marker, verb):
    """The folder that is vouched for has no such module. A source is called with its split."""
    change(run, tasks__0__prompts__source="subprocess:getoutput", tasks__0__prompts__split=f"touch {marker}")
    for more in ((), ("--code", trained.folder)):
        message = refusal(antiphon(verb, run, *more))
        assert "tasks.0.prompts.source" in message and "subprocess:getoutput" in message
        assert not marker.exists()


HOSTILE = {  # a key of the configuration, what it is set to, and which verb resolves it
    "engine.python": ({"engine__python": "{program}", "tasks__0__judge": {"path": "{model}"}}, "regrade"),
    "engine.kind": (
        {"engine__kind": "server", "engine__options": {"urls": ["http://127.0.0.1:1"], "key": "HOME"}},
        "eval",
    ),
    "cluster.kind": ({"cluster__kind": "ray", "cluster__address": "127.0.0.1:1"}, "regrade"),
    "tasks.0.reward_options.sandbox": (
        {"tasks__0__reward": "code", "tasks__0__reward_options": {"sandbox": {"minimum_level": 0}}},
        "regrade",
    ),
    "tasks.0.prompts.source": (
        {"tasks__0__prompts__source": "huggingface", "tasks__0__prompts__path": "pandas"},
        "replay",
    ),
    "grading.workers": ({"grading__workers": 100_000}, "regrade"),
}


@pytest.mark.parametrize("key", HOSTILE)
def test_a_program_needs_trust_and_not_only_code(trained, run, marker, key, elsewhere):
    program = elsewhere / "python"
    program.write_text(f"#!/bin/sh\ntouch {marker}\n")
    program.chmod(0o755)
    changes, verb = HOSTILE[key]
    filled = json.loads(json.dumps(changes).replace("{program}", str(program)).replace("{model}", str(trained.model)))
    change(run, **filled)
    for more in ((), ("--code", trained.folder)):
        message = refusal(antiphon(verb, *named(verb, run), *more))
        assert key in message and "--trust" in message, message
        assert not marker.exists()


def test_a_module_of_the_library_is_not_taken_for_the_users(run, trained, tmp_path):
    """A file of the same name in the vouched folder does not let the standard library in; `posix` is part of Python itself."""
    code = shutil.copytree(trained.folder, tmp_path / "code", ignore=shutil.ignore_patterns("runs"))
    for name in ("subprocess:getoutput", "posix:system"):
        (code / f"{name.partition(':')[0]}.py").write_text("")
        change(run, tasks__0__prompts__source=name)
        message = refusal(antiphon("replay", run, "--code", code))
        assert "tasks.0.prompts.source" in message and name in message


def test_a_reward_that_the_user_names_needs_no_trust(trained, run):
    done = antiphon("regrade", run, "--code", trained.folder, "--reward", "mytask:raises")
    assert done.returncode == 0 and re.search(r"\b(\d+) of \1 scores changed", done.stdout), done.stdout + done.stderr
    change(run, tasks__0__reward="elsewhere:digits")
    assert "elsewhere:digits" in refusal(antiphon("regrade", run, "--code", trained.folder))
    assert antiphon("regrade", run, "--code", trained.folder, "--reward", "mytask:digits").returncode == 0


def test_a_regrading_is_not_written_elsewhere(trained, run, elsewhere):
    (elsewhere / "aim").mkdir()
    (run / "regraded").symlink_to(elsewhere / "aim")
    refusal(antiphon("regrade", run, "--code", trained.folder))
    assert list((elsewhere / "aim").iterdir()) == []


def test_serving_a_run_takes_no_program_of_it(run, marker, elsewhere):
    program = elsewhere / "python"
    program.write_text(f"#!/bin/sh\ntouch {marker}\n")
    program.chmod(0o755)
    change(run, engine__python=str(program), engine__options={"hf_overrides": {}}, engine__slots=3)
    command = [sys.executable, "-m", "antiphon", "serve", str(run), "port=0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        lines = []
        for line in process.stdout:
            lines.append(line)
            if line.startswith("http://"):
                break
        process.terminate()
        _, err = process.communicate(timeout=SECONDS)
    assert lines and lines[-1].startswith("http://"), (lines, err)
    said = "".join(lines)
    assert "engine.python" in said and "engine.options" in said and "engine.slots" not in said
    assert not marker.exists()


@pytest.mark.parametrize("verb", ["eval", "serve"])
def test_code_beside_a_checkpoint_is_not_loaded(trained, run, marker, verb):
    """Not even for who answers the question of transformers whether it may be."""
    checkpoint = run / "checkpoints" / "step_000002"
    (checkpoint / "evil.py").write_text(
        textwrap.dedent(f"""
        from transformers import PretrainedConfig, PreTrainedModel
        open({str(marker)!r}, "a").write("executed")
        class Config(PretrainedConfig): model_type = "evil"
        class Model(PreTrainedModel): config_class = Config
        """)
    )
    config = json.loads((checkpoint / "config.json").read_text())
    auto_map = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    (checkpoint / "config.json").write_text(json.dumps({**config, "model_type": "evil", "auto_map": auto_map}))
    (checkpoint / "MANIFEST.json").unlink()
    arguments = [checkpoint, trained.folder / "config.yaml"] if verb == "eval" else [checkpoint, "port=0"]
    done = antiphon(verb, *arguments, stdin="y\n" * 20)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert not marker.exists()


def test_pickles_of_a_checkpoint_are_not_unpickled(trained, run, marker):
    """Optimiser state that would run a command when it is loaded as any pickle."""

    class Bomb:
        def __reduce__(self):
            return os.system, (f"touch {marker}",)

    import torch

    for checkpoint in (run / "checkpoints").iterdir():
        torch.save({"moments": {}, "updates": 0, "bomb": Bomb()}, checkpoint / "training_state" / "0.pt")
    done = antiphon("replay", run, "--code", trained.folder, "--weights")
    assert done.returncode != 0
    assert not marker.exists()


def test_export_copies_what_the_manifest_lists(run, elsewhere):
    checkpoint = run / "checkpoints" / "step_000002"
    (elsewhere / "secret").write_text("secret")
    (checkpoint / "notes.json").symlink_to(elsewhere / "secret")
    os.mkfifo(checkpoint / "pipe.json")
    done = antiphon("export", run, elsewhere / "exported")
    assert done.returncode == 0, done.stderr
    exported = {path.name for path in (elsewhere / "exported").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= exported
    assert not exported & {"notes.json", "pipe.json", "MANIFEST.json", "state.json", "training_state"}
