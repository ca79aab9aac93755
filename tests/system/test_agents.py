"""Whole runs in environments: what they become, and environments that hang, raise, exit and return garbage."""

import re
import sqlite3
import textwrap
from pathlib import Path

import pytest
import yaml

from antiphon.record.trajectories import read

CHAOS = """
    import itertools, os, random, threading
    from pathlib import Path

    class Chaotic:
        # The attempts of all processes meet these ends in turn; what goes well is worth 1.
        ends = ["hang", "raise", "garbage", "well", "well", "well"]

        def reset(self, seed):
            for number in itertools.count():
                try:
                    Path(__file__).with_name(f"{type(self).__name__}-{number}").touch(exist_ok=False)
                except FileExistsError:
                    continue
                self.end = self.ends[number % len(self.ends)]
                return "go", {"state_key": "begin"}

        def step(self, action):
            match self.end:
                case "hang":
                    threading.Event().wait()
                case "raise":
                    raise KeyError("no such room")
                case "exit":
                    os._exit(7)
                case "garbage":
                    return "nothing of the kind"
            return "on", 1.0, True, False, {"state_key": "end", "valid": True, "effective": action != "", "success": True}

        def close(self):
            pass

    class Exits(Chaotic):
        # A world of its own: its processes take with them the attempts that hang beside it.
        ends = ["exit", "well", "well"]

    class Silent:
        # Now and then it has nothing to say, so that there is no prompt.
        def reset(self, seed):
            return random.SystemRandom().choice(["", "go"]), {}

        def step(self, action):
            return "", 1.0, True, False, {}

        def close(self):
            pass

    class Shouts:
        # Says more than any model reads.
        def reset(self, seed):
            return "go", {}

        def step(self, action):
            return "o" * 5000, 1.0, False, False, {}

        def close(self):
            pass

    class Counts:
        # Three turns that block for a moment; each says how many are left.
        def reset(self, seed):
            self.left = 3
            return "3", {"state_key": "3"}

        def step(self, action):
            self.left -= 1
            reward = float(sum(character.isdigit() for character in action)) / 8
            return str(self.left), reward, self.left == 0, False, {"state_key": str(self.left), "valid": action != ""}

        def close(self):
            pass

    def nothing(split):
        for number in range(50):
            yield {"id": f"{split}-{number}", "prompt": ""}
"""


@pytest.fixture
def worlds(project):
    (project.folder / "worlds.py").write_text(textwrap.dedent(CHAOS))
    return project


AGENTS = """
    import json, os, urllib.request

    def ask(base_url, key, messages):
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
        body = json.dumps({"model": "policy", "messages": messages, "temperature": 1.0}).encode()
        request = urllib.request.Request(f"{base_url}/chat/completions", body, headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["choices"][0]["message"]["content"]

    def twice(base_url, api_key, prompt):
        # Asks, comments on the answer, asks again; forgets all of it, and asks once more.
        messages = [{"role": m.role, "content": m.content} for m in prompt.messages]
        for _ in range(2):
            said = ask(base_url, api_key, messages)
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "more="}]
        ask(base_url, api_key, [{"role": "user", "content": "new="}])
        return sum(map(str.isdigit, said))

    def fails(base_url, api_key, prompt):
        ask(base_url, api_key, [{"role": "user", "content": "1+1="}])
        if os.urandom(1)[0] < 64:
            raise RuntimeError("the agent gave up")
        return 0

    def result(prompt, transcript):
        return float(transcript.result)

    if __name__ == "__main__":
        task = json.loads(os.environ["ANTIPHON_TASK"])
        said = ask(os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"], task["messages"])
        print(sum(map(str.isdigit, said)))
"""


def in_world(world, **more):
    return [{"name": "world", "prompts": {"source": "worlds:nothing"}, "environment": f"worlds:{world}"} | more]


ROLLOUT = {"groups_per_step": 2, "group_size": 4, "timeout": 180, "sampling": {"max_tokens": 8}}


def test_broken_environments_never_block_or_score_zero(worlds):
    pool = {"workers": 2, "environments": 4}
    tasks = in_world("Chaotic", reward="environment_return", environment_pool=pool)
    tasks += [
        task | {"name": "exits"} for task in in_world("Exits", reward="environment_return", environment_pool=pool)
    ]
    rollout = ROLLOUT | {"max_turns": 2, "environment_timeout": 1.0, "max_attempts": 50}
    config = worlds.config(steps=6, tasks=tasks, rollout=rollout, record={"events": True})
    done = worlds.run("train", config)
    assert done.returncode == 0, done.stderr
    directory = worlds.folder / "runs" / "run"
    audit = worlds.run("audit", directory)
    assert audit.returncode == 0, audit.stdout
    with sqlite3.connect(directory / "ledger.db") as ledger:
        scores = ledger.execute("SELECT DISTINCT score FROM attempts WHERE status = 'trained'").fetchall()
        failures = " ".join(row[0] for row in ledger.execute("SELECT failure FROM attempts WHERE status = 'failed'"))
    assert scores == [(1.0,)]
    for reason in ("took more than 1 s", "no such room", "the process of the environment ended", "nothing of the kind"):
        assert reason in failures
    for task in ("world", "exits"):
        parts = {f"reward/part/{task}/{part}" for part in ("success", "valid")}
        values = [line[part] for line in worlds.metrics() for part in parts & line.keys()]
        assert set(values) == {1.0}


def test_an_environment_without_a_word_fails_its_attempt(worlds):
    rollout = ROLLOUT | {"max_turns": 2, "max_attempts": 50}
    tasks = in_world("Silent", reward="environment_return")
    done = worlds.run("train", worlds.config(tasks=tasks, rollout=rollout))
    assert done.returncode == 0, done.stderr
    assert "engines left" not in done.stdout
    with sqlite3.connect(worlds.folder / "runs" / "run" / "ledger.db") as ledger:
        failures = {row[0] for row in ledger.execute("SELECT failure FROM attempts WHERE status = 'failed'")}
    assert {failure.partition(":")[0] for failure in failures} == {"episode"}


def test_what_no_model_can_read_is_not_trained_on(worlds):
    tasks = in_world("Shouts", reward="environment_return")
    config = worlds.config(tasks=tasks, rollout=ROLLOUT | {"max_turns": 5}, engine={"max_length": 20})
    done = worlds.run("train", config)
    assert done.returncode == 0, done.stderr
    files = (worlds.folder / "runs" / "run" / "rollouts").glob("*.parquet")
    trajectories = [each for file in files for each in read(file).values()]
    assert max(len(segment.tokens) for each in trajectories for segment in each.segments) <= 20
    assert all(each.meta.truncated for each in trajectories)
    assert [line["length/truncated"] for line in worlds.metrics() if "length/truncated" in line] == [1.0] * 3


@pytest.mark.parametrize("samples", ["trajectory", "turn", "joined"])
def test_what_an_episode_becomes(worlds, samples):
    tasks = in_world("Counts", reward="environment_return")
    rollout = ROLLOUT | {"max_turns": 3, "samples": samples} | ({"history": 0} if samples == "turn" else {})
    done = worlds.run("train", worlds.config(tasks=tasks, rollout=rollout, algorithm={"recipe": "gigpo"}))
    assert done.returncode == 0, done.stderr
    directory = worlds.folder / "runs" / "run"
    assert worlds.run("audit", directory).returncode == 0
    trajectories = [each for file in (directory / "rollouts").glob("*.parquet") for each in read(file).values()]
    assert len(trajectories) >= 3 * 8
    for trajectory in trajectories:
        turns = [turn for segment in trajectory.segments for turn in segment.turns]
        whole = sum(int(segment.loss_mask.sum()) for segment in trajectory.segments)
        assert whole == sum(turn.stop - turn.start for turn in turns) == trajectory.meta.completion_tokens
        assert [turn.state_key for turn in turns] == ["3", "2", "1"][: len(turns)]
        if samples == "trajectory":
            assert len(trajectory.segments) == 1
        if samples == "turn":
            assert len(trajectory.segments) == len(turns)
            assert {segment.turns[0].start for segment in trajectory.segments} == {1}  # a digit, and no turn before it
    again = worlds.run("regrade", directory, "--code", worlds.folder)
    assert again.returncode == 0 and f"0 of {len(trajectories)} scores changed" in again.stdout, (
        again.stdout + again.stderr
    )


def test_supervised_examples_of_their_own(worlds):
    """A task in an environment has no right answers: they come from elsewhere."""
    sft = {"steps": 40, "prompts": {"source": "mytask:problems"}, "optimizer": {"learning_rate": 1e-2}}
    tasks = in_world("Counts", reward="environment_return", test={"source": "worlds:nothing", "limit": 4})
    config = worlds.config(steps=1, tasks=tasks, sft=sft, rollout=ROLLOUT | {"max_turns": 3})
    done = worlds.run("sft", config)
    assert done.returncode == 0, done.stderr
    losses = [line["sft/loss"] for line in worlds.metrics() if "sft/loss" in line]
    assert losses[-1] < 0.7 * losses[0]
    summary = worlds.summary()
    assert summary["measures_before"].keys() == summary["measures_after"].keys() >= {"world/valid", "world/turns"}


# --- agents --------------------------------------------------------------------------------------------------------------


def played_by(project, agent, **rollout):
    (project.folder / "agents.py").write_text(textwrap.dedent(AGENTS))
    tasks = [{"name": "digits", "prompts": {"source": "mytask:problems"}, "agent": agent, "reward": "agents:result"}]
    done = project.run("train", project.config(tasks=tasks, rollout=ROLLOUT | {"async_ratio": 1} | rollout))
    assert done.returncode == 0, done.stderr
    directory = project.folder / "runs" / "run"
    assert project.run("audit", directory).returncode == 0
    return [each for file in (directory / "rollouts").glob("*.parquet") for each in read(file).values()]


def test_an_agent_that_is_a_function(project):
    trajectories = played_by(project, {"function": "agents:twice"})
    assert len(trajectories) >= 3 * 8
    for trajectory in trajectories:
        assert len(trajectory.segments) == 2  # what it forgot, and what it asked then
        turns = [turn for segment in trajectory.segments for turn in segment.turns]
        assert len(turns) == 3 == trajectory.meta.turns
        assert sum(int(segment.loss_mask.sum()) for segment in trajectory.segments) == sum(
            t.stop - t.start for t in turns
        )
    last = project.metrics()[-1]
    assert last["reward/part/digits/turns"] == 3 and last["reward/part/digits/forks"] == 1


def test_an_agent_that_fails_is_tried_again_and_never_worth_0(project):
    played_by(project, {"function": "agents:fails"}, max_attempts=50)
    with sqlite3.connect(project.folder / "runs" / "run" / "ledger.db") as ledger:
        failures = {row[0] for row in ledger.execute("SELECT failure FROM attempts WHERE status = 'failed'")}
    assert len(failures) == 1 and "the agent gave up" in failures.pop()


@pytest.mark.commands("bwrap", "/usr/bin/python3")
def test_an_agent_that_is_a_command_in_a_box(project):
    source = textwrap.dedent(AGENTS)
    trajectories = played_by(project, {"command": f"python3 - <<'END'\n{source}\nEND"})
    assert all(len(trajectory.segments) == 1 for trajectory in trajectories)


# --- the page ------------------------------------------------------------------------------------------------------------


def test_the_page_on_agents(project):
    """Its environment and its agent, each in a run of its own."""
    page = (Path(__file__).parents[2] / "docs" / "agents.md").read_text()
    for name, text in re.findall(r"```python\n# (\w+\.py)\n(.*?)```", page, re.DOTALL):
        (project.folder / name).write_text(text)
    world, agent = (yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL))
    done = project.run("train", project.config(**world))
    assert done.returncode == 0, done.stderr
    assert {"reward/part/higher/valid", "reward/part/higher/success"} <= project.metrics()[-1].keys()
    pytest.importorskip("openai")
    done = project.run("train", project.config(**agent, name="agent"))
    assert done.returncode == 0, done.stderr
    assert project.metrics("agent")[-1]["reward/part/digits/turns"] == 2
