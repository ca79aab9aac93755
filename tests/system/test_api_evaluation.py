"""`antiphon eval --api`: a model behind an API is measured as the same model on engines is. Data can be sampled from it."""

import importlib
import json
import textwrap
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pyarrow.parquet as pq
import pytest

from antiphon.core.config import add_import_folder, load
from antiphon.core.errors import BudgetError, ConfigError, UnsupportedError
from antiphon.record.checkpoint import list_checkpoints
from antiphon.run import commands
from antiphon.run.chat_api import ChatAPI
from antiphon.run.config import RunConfig
from tests.raising import raises_with

GREEDY = ("cluster.debug=true", "rollout.max_turns=3", "rollout.sampling.max_tokens=6")
LENGTHS = {
    "name": "lengths",
    "weight": 0,
    "test": {"source": "mytask:problems", "split": "test", "limit": 6},
    "environment": "mytask:Lengths",
    "reward": "environment_return",
    "evaluation": {"success_at": 0.2},
}


def configure(project, *overrides):
    digits = load(project.config(), model=RunConfig).model_dump(mode="json")["tasks"][0]
    path = project.config(tasks=[digits, LENGTHS])
    add_import_folder(path)
    return load(path, (*GREEDY, *overrides), model=RunConfig)


class Echo(BaseHTTPRequestHandler):
    """Refuses questions of zero and cuts off those of one; answers others by their digits. Keeps what it was sent."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        asked = body["messages"][-1]["content"]
        if body["model"] != "hosted" or asked.startswith("0"):
            self.send_error(400, "no")
            return
        finish = "length" if asked.startswith("1") else "stop"
        message = {"role": "assistant", "content": asked if finish == "stop" else None}
        usage = {"prompt_tokens": 10, "completion_tokens": 2}
        text = json.dumps({"choices": [{"message": message, "finish_reason": finish}], "usage": usage}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *args): ...


@pytest.fixture
def echo():
    with ThreadingHTTPServer(("127.0.0.1", 0), Echo) as server:
        server.bodies = []
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def url_of(server):
    return f"http://127.0.0.1:{server.server_address[1]}/v1"


def test_the_same_model_has_the_same_accuracy(project, monkeypatch):
    """The model, which has learned to end its answers, is served by `antiphon serve` in a process of its own, and is greedy."""
    sft = {"steps": 40, "batch_size": 8, "optimizer": {"learning_rate": 1e-2}}
    done = project.run("sft", project.config(sft=sft, name="tuned"), "record.live=off")
    assert not done.returncode, done.stderr
    model = list_checkpoints(project.folder / "runs/tuned/checkpoints")[-1]
    config = configure(project)
    expected = commands.evaluate_model(str(model), config, limit=0)
    assert expected["means"].pop("lengths/samples") == 1.0  # segments to train on, which an API does not give
    server = project.start("serve", str(model), "port=0")
    token = server.stdout.readline().split()[-1]
    url, name = server.stdout.readline().split()[0], model.name
    monkeypatch.setenv("KEY_OF_THE_API", token)
    api = ChatAPI(url=url, key="KEY_OF_THE_API", concurrency=4)
    found = commands.evaluate_model(name, config, limit=0, api=api)
    usage = found.pop("api")
    assert found == expected
    assert found["means"]["lengths/turns"] > 1
    assert found["means"]["digits/score"] > 0 < found["means"]["lengths/score"]
    assert usage["requests"] > found["prompts"] and usage["output_tokens"] > 0 and not usage["retries"]


def test_requests_and_results_are_those_of_the_api(project, echo):
    settings = json.dumps({"max_tokens": None, "max_completion_tokens": 99, "reasoning_effort": "low"})
    done = project.run(
        *("eval", "hosted", str(project.config()), f"--api={url_of(echo)}", f"--api-settings={settings}"),
        *("--samples=2", "--temperature=0.5", "tasks.0.evaluation.sampling={top_p: 0.9, presence_penalty: 0.5}"),
    )
    assert not done.returncode, done.stderr
    rows = [line.split("│")[1:3] for line in done.stdout.splitlines() if line.startswith("│")]
    found = {name.strip(): value.strip() for name, value in rows}
    assert len(echo.bodies) == 16 and len({json.dumps(body) for body in echo.bodies}) == 8
    body = echo.bodies[0]
    assert list(body.pop("messages")[0]) == ["role", "content"]
    assert body == {
        **{"model": "hosted", "temperature": 0.5, "top_p": 0.9, "presence_penalty": 0.5},
        **{"max_completion_tokens": 99, "reasoning_effort": "low"},
    }
    assert (found["api.requests"], found["api.output_tokens"]) == ("16", "28")
    assert (found["ungraded"], found["truncated"]) == ("2", "0.1250")  # of the questions of zero and of one


def test_an_api_that_never_answers_is_no_accuracy_of_zero(project, echo):
    with raises_with(UnsupportedError, key="api.url") as raised:
        commands.evaluate_model("another", configure(project), limit=4, api=ChatAPI(url=url_of(echo)))
    assert "HTTP 400" in str(raised.value)


def test_what_an_api_cannot_do_is_refused_before_it_is_asked(project, echo, monkeypatch):
    api = ChatAPI(url=url_of(echo))
    for name, value in (("top_k", 5), ("repetition_penalty", 1.2), ("num_beams", 2)):
        config = configure(project, f"tasks.0.evaluation.sampling.{name}={value}")
        with raises_with(UnsupportedError, key=f"sampling.{name}"):
            commands.evaluate_model("hosted", config, limit=0, api=api)
    source = {"source": "mytask:problems"}
    agent = {"name": "calls", "prompts": source, "test": source, "agent": {"function": "mytask:digits"}}
    config = load(project.config(tasks=[{**agent, "reward": "mytask:digits"}]), GREEDY, model=RunConfig)
    with raises_with(ConfigError, key="tasks: calls"):
        commands.evaluate_model("hosted", config, limit=0, api=api)
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    with raises_with(ConfigError, value="NO_SUCH_KEY"):
        missing = ChatAPI(url=url_of(echo), key="NO_SUCH_KEY")
        commands.evaluate_model("hosted", configure(project), limit=0, api=missing)
    assert not echo.bodies


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--api-key=KEY"], "--api"),
        (["--api-settings=[1]"], "--api-settings"),
        (["--api-settings={"], "--api-settings"),
        (["--api=http://127.0.0.1:9/v1", "--suite=gsm8k"], "--suite"),
    ],
)
def test_wrong_options_are_named(project, options, word):
    done = project.run("eval", "hosted", str(project.config()), *options)
    assert done.returncode == 2 and word in done.stderr and "Traceback" not in done.stderr


WORLD = """
    class Alive:
        inline = True
        now = most = 0

        def reset(self, seed):
            Alive.now += 1
            Alive.most = max(Alive.most, Alive.now)
            return "5", {}

        def step(self, action):
            return "", 1.0, True, False, {}

        def close(self):
            Alive.now -= 1
"""


def test_no_more_attempts_run_at_once_than_the_api_allows(project, echo):
    (project.folder / "alive_world.py").write_text(textwrap.dedent(WORLD))
    digits = load(project.config(), model=RunConfig).model_dump(mode="json")["tasks"][0]
    path = project.config(tasks=[digits | {"test": None}, LENGTHS | {"environment": "alive_world:Alive"}])
    add_import_folder(path)
    api = ChatAPI(url=url_of(echo), concurrency=2)
    found = commands.evaluate_model("hosted", load(path, GREEDY, model=RunConfig), limit=0, api=api)
    alive = importlib.import_module("alive_world").Alive
    assert (alive.most, alive.now, found["accuracy"]) == (2, 0, 1.0)


def test_data_is_sampled_from_it(project, echo):
    data, out, passed = (project.folder / name for name in ("data.jsonl", "out.parquet", "passed.jsonl"))
    prompts = ["1+1=", "2345678901", "0=", "3=", "12345678"]
    data.write_text("".join(json.dumps({"id": prompt, "prompt": prompt}) + "\n" for prompt in prompts))
    task = {"name": "digits", "prompts": {"source": "mytask:problems"}, "reward": "mytask:digits"}
    arguments = ("--config", project.config(tasks=[task]), "--data", data, "--out", out, "--passed", passed)
    done = project.run("generate", "hosted", *arguments, f"--api={url_of(echo)}", "--samples=2", "--temperature=1")
    assert done.returncode == 0, done.stderr
    rows = pq.read_table(out).to_pylist()
    told = [(row["prompt"][0]["content"], row["response"], row["score"], row["truncated"]) for row in rows[::2]]
    assert told == [
        ("1+1=", "", 0.0, True),
        ("2345678901", "2345678901", 1.25, False),
        ("0=", "", None, False),
        ("3=", "3=", 0.125, False),
        ("12345678", "", 0.0, True),
    ]
    assert "HTTP 400" in rows[4]["detail"] and {row["completion_tokens"] for row in rows} == {None}
    (good,) = map(json.loads, passed.read_text().splitlines())
    assert (good["id"], good["response"]) == ("digits/2345678901", "2345678901")


def test_data_of_an_api_need_a_configuration(project, echo):
    data = project.folder / "data.jsonl"
    data.write_text('{"prompt": "1="}\n')
    done = project.run("generate", "hosted", "--data", data, "--out", "out.parquet", f"--api={url_of(echo)}")
    assert done.returncode == 2 and "--config" in done.stderr and not echo.bodies


def test_the_budget_of_judges_ends_it(project, echo):
    judge = {"rubric": "Is it right?", "address": url_of(echo), "model": "hosted", "input_price": 1.0}
    task = load(project.config(), model=RunConfig).model_dump(mode="json")["tasks"][0]
    path = project.config(tasks=[task | {"reward": "judge", "reward_options": judge}], grading={"judge_budget": 1e-9})
    add_import_folder(path)
    config = load(path, GREEDY, model=RunConfig)
    with pytest.raises(BudgetError):
        commands.evaluate_model("hosted", config, limit=0, api=ChatAPI(url=url_of(echo), concurrency=1))
