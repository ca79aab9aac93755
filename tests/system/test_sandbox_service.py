"""The sandbox service as its clients meet it: a real server process, real boxes, real environments."""

import asyncio
import base64
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from antiphon.core.errors import SandboxError
from antiphon.core.types import Message, Prompt
from antiphon.sandbox.backends import open_sandbox
from antiphon.sandbox.base import Limits, Status
from antiphon.sandbox.config import SandboxConfig
from antiphon.sandbox.isolation.forked_python import ForkedPython
from antiphon.tasks.base import Transcript
from antiphon.tasks.rewards.code.reward import Code
from benchmarks.sandbox_load import SANDBOX, Service, load

pytestmark = pytest.mark.commands("bwrap")

ROOT = Path(__file__).parents[2]
TOKEN = "a-token-for-tests"
GEM = "/apis/v1/envs/gem"

WORLDS = """
import os, time
import numpy

class Hangs:
    def reset(self, seed):
        return f"process {os.getpid()}", {}
    def step(self, action):
        if action == "die":
            os._exit(3)
        if action == "raise":
            raise KeyError("no such thing")
        if action == "nan":
            return "", float("nan"), False, False, {}
        time.sleep(600)
    def close(self):
        pass

class Async:
    async def reset(self, seed):
        return f"seed {seed}", {}
    async def step(self, action):
        info = {"odd": {1, 2}, "of_numpy": numpy.int64(3), "of_its_own": self}
        return action.upper(), numpy.float32(0.5), True, False, info
    async def close(self):
        pass
"""


class Server(Service):
    """A service, and a client of it."""

    def __init__(self, *arguments: str, token: str = TOKEN) -> None:
        self.code = Path(tempfile.mkdtemp())
        (self.code / "worlds_of_tests.py").write_text(WORLDS)
        super().__init__(*arguments, token=token, path=(str(self.code),))
        self.client = httpx.Client(base_url=self.url, headers={"Authorization": f"Bearer {TOKEN}"}, timeout=60)

    def close(self) -> None:
        """See `Service.close`."""
        self.client.close()
        super().close()
        shutil.rmtree(self.code)

    def post(self, route: str, **body) -> httpx.Response:
        return self.client.post(SANDBOX + route, json=body)

    def result(self, route: str, **body):
        answer = self.post(route, **body)
        assert answer.status_code == 200 and answer.json()["status"] == "Success", answer.text
        return answer.json()["result"]

    def start(self, **body) -> str:
        return self.result("/start_async", **{"image": "python:3.11", **body})["sandbox_id"]

    def items(self, **query) -> list[dict]:
        return self.client.get(f"{SANDBOX}/sandboxes", params=query).json()["result"]["items"]

    def refused(self, status: int, route: str, **body) -> str:
        answer = self.post(route, **body)
        assert answer.status_code == status and answer.json()["status"] == "Failed", answer.text
        return answer.json()["error"]

    def status(self, sandbox_id: str) -> dict:
        return self.client.get(f"{SANDBOX}/get_status", params={"sandbox_id": sandbox_id}).json()["result"]


@contextmanager
def serving(*arguments: str, token: str = TOKEN):
    server = Server(*arguments, token=token)
    try:
        yield server
    finally:
        server.close()


@pytest.fixture(scope="module")
def server():
    settings = (
        "warm=1",
        "memory=8192",
        "sandbox_memory=1024",
        "upload=1",
        "command_seconds=30",
        "environment_seconds=20",
    )
    with serving(*settings, "--environment=worlds_of_tests:Hangs", "--environment=worlds_of_tests:Async") as server:
        yield server
        assert server.end() == 0
        assert server.log.read_text() == ""
        assert server.left() == []


@pytest.fixture
def sandbox(server):
    sandbox_id = server.start()
    yield sandbox_id
    server.post("/stop", sandbox_id=sandbox_id)


# --- who may ask -------------------------------------------------------------------------------------------------------


def test_nothing_is_answered_without_the_token(server):
    routes = [(path, method) for path, methods in schema(server)["paths"].items() for method in methods]
    assert len(routes) > 20
    wrong = base64.b64encode(b"rock:wrong").decode()
    bad = ["", "Bearer", "Bearer wrong", f"Basic {wrong}", f"Digest {TOKEN}", TOKEN, f"Bearer {TOKEN}x", "Basic ***"]
    with httpx.Client(base_url=server.url) as stranger:
        for path, method in [*routes, ("/openapi.json", "get"), ("/nowhere", "get"), ("/", "delete")]:
            for credentials in bad:
                answer = stranger.request(method, path, headers={"Authorization": credentials} if credentials else {})
                assert answer.status_code == 401, (path, credentials)
                assert TOKEN not in answer.text


def test_the_token_comes_as_clients_send_it(server):
    for headers in ({"XRL-Authorization": f"Bearer {TOKEN}"}, {"authorization": f"bearer {TOKEN}"}):
        assert httpx.get(f"{server.url}/metrics", headers=headers).status_code == 200
    assert httpx.get(f"{server.url.replace('//', f'//rock:{TOKEN}@')}/metrics").status_code == 200


@pytest.mark.parametrize(
    "headers, is_refused",
    [
        ({"Sec-Fetch-Site": "cross-site"}, True),
        ({"Sec-Fetch-Site": "same-site"}, True),  # a page of another port of this machine
        ({"Origin": "http://127.0.0.1:1"}, True),  # a browser that is not on this machine sends no more
        ({"Sec-Fetch-Site": "same-origin"}, False),
        ({}, False),
    ],
)
def test_requests_of_other_pages_are_refused(server, headers, is_refused):
    answer = server.client.post(f"{SANDBOX}/stop", json={"sandbox_id": "x"}, headers=headers)
    assert (answer.status_code == 403) == is_refused


def test_a_token_must_be_one(tmp_path):
    (tmp_path / "token").write_text("short\n")
    command = [sys.executable, "-m", "antiphon", "sandbox", "serve", f"--token-file={tmp_path / 'token'}"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and "at least 8 characters" in done.stderr and "short" not in done.stderr


# --- sandboxes ---------------------------------------------------------------------------------------------------------


def test_execute_keeps_no_shell_state(server, sandbox):
    def execute(command, **body):
        result = server.result("/execute", sandbox_id=sandbox, command=command, **body)
        return result["stdout"], result["stderr"], result["exit_code"]

    assert execute(["printf", "%s|", "a b", "$HOME", "'"]) == ("a b|$HOME|'|", "", 0)
    assert execute("echo out; echo err >&2; exit 7") == ("out\n", "err\n", 7)
    assert execute("cd /tmp; export A=1; exit") == ("", "", 0)
    assert execute('echo "$PWD $A"') == ("/box \n", "", 0)
    assert execute('echo "$PWD $A"', cwd="/tmp", env={"A": "it's"}) == ("/tmp it's\n", "", 0)
    assert execute("echo unbalanced )")[2] == 2
    assert execute(["no-such-program"])[2] == 127
    assert execute("pwd", cwd="/none")[2] != 0
    assert "A B" in server.refused(400, "/execute", sandbox_id=sandbox, command="x", env={"A B": ""})
    assert "NUL" in server.refused(400, "/execute", sandbox_id=sandbox, command="a\0b")
    assert "timeout" in server.refused(400, "/execute", sandbox_id=sandbox, command="x", timeout=0)
    late = server.post("/execute", sandbox_id=sandbox, command="sleep 20", timeout=0.3).json()
    assert late["status"] == "Failed" and "timeout" in late["error"] and late["result"]["status"] == "timeout"
    checked = server.post("/execute", sandbox_id=sandbox, command="echo why; false", check=True, error_msg="oh").json()
    assert checked["result"]["code"] == 6000 and "oh: exit code 1" in checked["error"] and "why" in checked["error"]


def test_sessions(server, sandbox):
    def run(command, **body):
        return server.post("/run_in_session", sandbox_id=sandbox, command=command, **body).json()

    assert "no session 'default'" in server.refused(404, "/run_in_session", sandbox_id=sandbox, command="true")
    server.result("/write_file", sandbox_id=sandbox, path="rc", content="B=2")
    server.result("/create_session", sandbox_id=sandbox, env={"A": "1"}, startup_source=["rc"])
    assert "already" in server.refused(409, "/create_session", sandbox_id=sandbox)
    assert "prepared" in server.refused(
        422, "/create_session", sandbox_id=sandbox, session="s", startup_source=["none"]
    )
    assert run("cd /tmp; echo $A $B")["result"]["output"] == "1 2"
    assert run("pwd; echo err >&2")["result"]["output"] in ("/tmp\nerr", "err\n/tmp")
    failed = run("echo said; false")
    assert failed["status"] == "Failed" and "exit code 1" in failed["error"] and "said" in failed["error"]
    assert run("false", check="silent")["result"]["exit_code"] == 1
    assert run("false", check="ignore")["result"]["exit_code"] is None
    assert run("exit 3", check="silent")["result"]["exit_code"] == 3
    assert run("pwd")["result"]["output"] == "/box"  # a new shell
    assert run("sleep 20", timeout=0.3, check="ignore")["status"] == "Failed"
    assert run("echo next")["result"]["output"] == "next"
    server.result("/close_session", sandbox_id=sandbox)
    server.refused(404, "/close_session", sandbox_id=sandbox)


def test_files_mean_what_they_mean_inside(server, sandbox):
    def read(path, **body):
        return server.result("/read_file", sandbox_id=sandbox, path=path, **body)["content"]

    server.result("/write_file", sandbox_id=sandbox, path="/box/deep/er/file", content="é\n")
    assert read("deep/er/file") == "é\n"
    assert read("deep/er/file", encoding="latin-1") == "Ã©\n"
    assert "ascii" in server.refused(400, "/read_file", sandbox_id=sandbox, path="deep/er/file", encoding="ascii")
    assert "zip" in server.refused(400, "/read_file", sandbox_id=sandbox, path="deep/er/file", encoding="zip")
    data, files = {"sandbox_id": sandbox, "target_path": "../box/up"}, {"file": ("../../etc/x", bytes(range(256)))}
    assert server.client.post(f"{SANDBOX}/upload", data=data, files=files).json()["result"]["file_name"] == "up"
    assert read("up", errors="surrogateescape").encode("utf-8", "surrogateescape") == bytes(range(256))
    outside = Path(tempfile.mkdtemp()) / "secret"
    outside.write_text("secret")
    for path in ("/etc/shadow", str(outside), "../" * 9 + str(outside), "nothing", "a" * 5000):
        assert server.refused(404, "/read_file", sandbox_id=sandbox, path=path)
    shutil.rmtree(outside.parent)
    assert read("../../etc/passwd").startswith("box:")
    for path in ("/etc/passwd", "/nowhere/file", "/proc/sys/kernel/core_pattern"):
        answer = server.post("/write_file", sandbox_id=sandbox, path=path, content="x")
        assert answer.status_code == 200 and answer.json()["result"]["code"] == 6000
    assert "larger" in server.refused(413, "/write_file", sandbox_id=sandbox, path="x", content="x" * (3 << 20))


def test_a_life(server):
    sandbox_id = server.start(sandbox_id="life.1", memory="64m", disk="8MiB")
    assert server.status(sandbox_id)["memory"] == "64m" and server.status(sandbox_id)["disk"] == "8m"
    assert "exists already" in server.refused(409, "/start_async", image="x", sandbox_id=sandbox_id)
    assert "stop it first" in server.refused(409, "/delete", sandbox_id=sandbox_id)
    assert "running" in server.refused(409, "/restart", sandbox_id=sandbox_id)
    server.result("/write_file", sandbox_id=sandbox_id, path="kept", content="here")
    for _ in range(2):
        server.result("/stop", sandbox_id=sandbox_id)
    assert "is stopped" in server.refused(409, "/execute", sandbox_id=sandbox_id, command="true")
    assert server.result("/restart", sandbox_id=sandbox_id)["is_alive"]
    assert server.result("/read_file", sandbox_id=sandbox_id, path="kept")["content"] == "here"
    server.result("/stop", sandbox_id=sandbox_id)
    for _ in range(2):
        server.result("/delete", sandbox_id=sandbox_id)
    assert "deleted" in server.refused(409, "/restart", sandbox_id=sandbox_id)
    states = [line["to_state"] for line in server.status(sandbox_id)["state_history"]]
    assert states == ["pending", "running", "stopped", "pending", "running", "stopped", "deleted"]
    assert server.start(sandbox_id="life.1") == "life.1"
    server.result("/stop", sandbox_id="life.1")


def test_a_box_that_is_killed_is_told_of(server, sandbox):
    server.result("/create_session", sandbox_id=sandbox)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(
            server.post, "/run_in_session", sandbox_id=sandbox, command="touch begun; sleep 25", check="ignore"
        )
        server.result("/execute", sandbox_id=sandbox, command="until [ -e begun ]; do :; done")
        everybody = psutil.Process(server.process.pid)
        while not (found := [child for child in everybody.children(recursive=True) if child.name() == "sleep"]):
            time.sleep(0.02)
        (box,) = found
        while box.parent().pid != server.process.pid:
            box = box.parent()
        box.kill()
        answer = waiting.result()
    assert answer.status_code == 410 and answer.json()["result"]["code"] == 5000
    assert "killed" in server.refused(409, "/execute", sandbox_id=sandbox, command="true")
    assert "files are lost" in server.refused(409, "/restart", sandbox_id=sandbox)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(
            ("num_gpus", 1),
            ("image_os", "windows"),
            ("memory", "lots"),
            ("memory", "1m"),
            ("memory", 8),
            ("disk", "-1g"),
        ),
        *(
            ("sandbox_id", "../x"),
            ("sandbox_id", ""),
            ("sandbox_id", "a\0"),
            ("limit_cpus", 1),
            ("use_kata_runtime", True),
        ),
        *(
            ("startup_timeout", -1),
            ("cpus", 0),
            ("image", ""),
            ("auto_clear_time_minutes", 0),
            ("auto_archive_seconds", 9),
        ),
    ],
)
def test_what_cannot_be_had_is_refused(server, field, value):
    assert field in server.refused(400, "/start_async", **{"image": "x", field: value})


def test_the_list(server, sandbox):
    headers = {"X-User-Id": "lister"}
    mine = server.client.post(f"{SANDBOX}/start_async", json={"image": "a:b"}, headers=headers).json()["result"]
    get = server.client.get

    def listed(**query):
        return get(f"{SANDBOX}/sandboxes", params=query).json()["result"]

    assert [item["sandbox_id"] for item in listed(user_id="lister")["items"]] == [mine["sandbox_id"]]
    assert {item["sandbox_id"] for item in listed(state="running")["items"]} == {mine["sandbox_id"], sandbox}
    assert len(listed(page_size=1)["items"]) == 1 and listed(page_size=1)["has_more"]
    assert get(f"{SANDBOX}/sandboxes", params={"colour": "red"}).status_code == 400
    both = server.result("/sandboxes/batch", sandbox_ids=[sandbox, mine["sandbox_id"], "none"])["statuses"]
    assert len(both) == 2
    used = get(f"{SANDBOX}/get_sandbox_statistics", params={"sandbox_id": sandbox}).json()["result"]
    assert 1 << 20 < used["memory_bytes"] < 1 << 28
    server.result("/stop", sandbox_id=mine["sandbox_id"])


def test_the_page_and_the_metrics(server, sandbox):
    evil = server.start(image="<script>alert(1)</script>")
    page = server.client.get("/")
    assert sandbox in page.text and "&lt;script&gt;" in page.text and "<script" not in page.text
    assert "default-src 'none'" in page.headers["Content-Security-Policy"]
    server.result("/stop", sandbox_id=evil)
    text = server.client.get("/metrics").text
    assert re.search(r'^antiphon_sandboxes\{state="running"\} 1$', text, re.MULTILINE)
    for line in text.splitlines():
        assert re.fullmatch(r'# TYPE \w+ (gauge|counter|histogram)|\w+(\{\w+="[^"]*"\})? [0-9.e+-]+', line), line


# --- environments ------------------------------------------------------------------------------------------------------


def test_environments(server):
    def gem(verb, status=200, **body):
        answer = server.client.post(f"{GEM}/{verb}", json=body)
        assert answer.status_code == status, answer.text
        return answer.json()

    listed = gem("list", sandbox_id="any")["env_id"]
    assert {"frozen_lake", "sokoban"} < set(listed) and not {"mini_swe", "gymnasium"} & set(listed)
    names = ["guess_number", "worlds_of_tests:Hangs", "worlds_of_tests:Async"]
    assert set(names) < set(listed)
    assert "did you mean 'guess_number'" in gem("make", 404, env_id="guess_numbers")["error"]
    gem("make", 404, env_id="os:system")
    with ThreadPoolExecutor() as pool:
        made = pool.map(lambda name: gem("make", env_id=name)["sandbox_id"], [*names, names[1], names[1], names[1]])
        guess, dies, speaks, raises, nan, closed = made
    gem("step", 409, sandbox_id=guess, action="5")
    assert gem("reset", sandbox_id=guess, seed=3) == gem("reset", sandbox_id=guess, seed=3)
    answer = gem("step", sandbox_id=guess, action="5")
    assert set(answer) == {"observation", "reward", "terminated", "truncated", "info"} and not answer["terminated"]
    assert gem("reset", sandbox_id=speaks, seed=7)["observation"] == "seed 7"
    assert gem("step", sandbox_id=speaks, action="hé")["observation"] == "HÉ"
    answer = gem("step", sandbox_id=speaks, action="objects")
    assert answer["info"]["of_numpy"] == 3 and "object at" in answer["info"]["of_its_own"]
    for world, action, message in ((dies, "die", "code 3"), (raises, "raise", "no such thing"), (nan, "nan", "nan")):
        gem("reset", sandbox_id=world)
        assert message in gem("step", 410, sandbox_id=world, action=action)["error"]
        gem("step", 404, sandbox_id=world, action=action)
    process = psutil.Process(int(gem("reset", sandbox_id=closed)["observation"].split()[1]))
    for world in (guess, speaks, closed):
        gem("close", sandbox_id=world)
        gem("close", 404, sandbox_id=world)
    process.wait(10)


# --- programs ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def programs(server, monkeypatch):
    monkeypatch.setenv("ANTIPHON_SANDBOX_TOKEN", TOKEN)
    sandbox = open_sandbox(SandboxConfig(service=server.url))
    yield sandbox
    sandbox.close()


def test_programs_run_in_the_service_as_they_do_here(programs):
    with ForkedPython() as here:
        for program, stdin, files, limits in (
            ("print(input()); print(open('f').read())", "\u00e9\n", {"f": b"\xc3\xa9"}, None),
            ("raise KeyError('x')", "", None, None),
            ("while True: pass", "", None, Limits(seconds=0.5)),
            ("print('x' * 10000)", "", None, Limits(output=100)),
            ("", "", {"../f": b""}, None),
        ):
            theirs = programs.run(program, stdin=stdin, files=files, limits=limits)
            try:
                ours = here.run(program, stdin=stdin, files=files, limits=limits)
            except ValueError as error:
                assert theirs.status is Status.REFUSED and str(error) in theirs.detail
            else:
                same = ("status", "level", "exit_code", "stdout", "stderr", "detail")
                assert [getattr(theirs, name) for name in same] == [getattr(ours, name) for name in same]
                assert theirs.usage.seconds > 0


def test_linked_programs_run_in_the_service(programs, server):
    linked = programs.run_linked(
        "import os\nprint(input(), os.read(3, 9))", "import os\nos.write(1, b'hi')", stdin="in\n"
    )
    assert (linked.status, linked.stdout) == (Status.OK, "in b'hi'\n")
    body = {"program": "", "partner": base64.b64encode(b"pass").decode(), "files": {"a": ""}}
    answer = server.client.post("/apis/antiphon/v1/python", json=body)
    assert answer.status_code == 400 and "files" in answer.json()["error"]


def test_code_rewards_of_several_threads_in_the_service(programs, server):
    reward = Code(sandbox={"service": server.url})
    prompt = Prompt(
        id="p", task="t", messages=(Message(role="user", content="?"),), payload={"tests": ["assert f(1) == 2"]}
    )

    def value(body: str) -> float:
        answer = f"```python\ndef f(x):\n    return {body}\n```"
        return reward(prompt, Transcript(messages=(Message(role="assistant", content=answer),))).value

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(value, ["x + 1", "x"] * 20)) == [1.0, 0.0] * 20
    reward.close()


def test_a_service_that_runs_no_programs_is_named(server, monkeypatch):
    monkeypatch.setenv("ANTIPHON_SANDBOX_TOKEN", "another token")
    with pytest.raises(SandboxError, match=f"{server.url} runs no programs: the token"):
        open_sandbox(SandboxConfig(service=server.url))
    monkeypatch.setenv("ANTIPHON_SANDBOX_TOKEN", TOKEN)
    with serving() as other:
        sandbox = open_sandbox(SandboxConfig(service=other.url))
    lost = sandbox.run("print(1)")
    assert lost.status is Status.REFUSED and "Connect" in lost.detail
    sandbox.close()
    with pytest.raises(ValidationError, match="only one can be given"):
        SandboxConfig(service="http://127.0.0.1:1", image="x")


def test_program_limits_are_capped_by_the_service(monkeypatch):
    monkeypatch.setenv("ANTIPHON_SANDBOX_TOKEN", TOKEN)
    with serving("python.limits.seconds=0.5", "commands=1") as server:
        sandbox = open_sandbox(SandboxConfig(service=server.url))
        with ThreadPoolExecutor(2) as threads:
            results = list(threads.map(sandbox.run, ["while True: pass"] * 2))
        assert sorted(result.status for result in results) == [Status.REFUSED, Status.TIMEOUT]
        assert any("which is the limit" in result.detail for result in results)
        sandbox.close()


# --- quotas and ends ---------------------------------------------------------------------------------------------------


def test_a_token_is_made_and_told_where_none_is_given():
    with serving(token="") as server:
        token = server.process.stdout.readline().removeprefix("token: ").strip()
        assert len(token) >= 32
        assert server.client.get("/metrics").status_code == 401
        assert httpx.get(f"{server.url}/metrics", headers={"Authorization": f"Bearer {token}"}).status_code == 200
        assert server.end(signal.SIGINT) == 0 and server.left() == []


def test_quotas_and_idle_ends():
    settings = (
        "sandboxes=2",
        "memory=300",
        "sandbox_memory=200",
        "sessions=1",
        "commands=1",
        "environments=1",
        "warm=0",
    )
    times = ("idle_minutes=0.02", "environment_seconds=3", "stopped_minutes=0.02", "command_seconds=60")
    with serving(*settings, *times, "--environment=worlds_of_tests:Hangs") as server, ThreadPoolExecutor() as pool:
        first = server.start()
        server.result("/create_session", sandbox_id=first)
        waiting = pool.submit(server.post, "/run_in_session", sandbox_id=first, command="touch begun; sleep 50")
        assert "100 of the 300 MiB" in server.refused(429, "/start_async", image="x")
        second = server.start(memory="100m")
        assert "2 sandboxes" in server.refused(429, "/start_async", image="x", memory="40m")
        while server.post("/execute", sandbox_id=second, command="true").status_code != 429:
            time.sleep(0.02)  # the other command has not come yet
        make, world = f"{GEM}/make", {"env_id": "worlds_of_tests:Hangs"}
        made = server.client.post(make, json=world).json()
        assert "which is the limit" in server.client.post(make, json=world).json()["error"]
        server.client.post(f"{GEM}/reset", json=made)
        hung = server.client.post(f"{GEM}/step", json={**made, "action": "hang"})
        assert hung.status_code == 410 and "too long" in hung.json()["error"]
        server.result("/stop", sandbox_id=first)
        assert waiting.result().status_code == 410
        third = server.start(sandbox_id="third")
        server.result("/create_session", sandbox_id=third)
        assert "has 1 sessions" in server.refused(429, "/create_session", sandbox_id=third, session="two")
        while any(item["state"] == "running" for item in server.items()):
            time.sleep(0.02)
        while any(item["state"] == "stopped" for item in server.items()):
            time.sleep(0.02)
        events = [line["event"] for line in server.status(third)["state_history"]]
        assert events == ["start", "alive", "idle", "kept long enough"]


def test_nothing_outlives_a_service_that_is_killed():
    with serving("--environment=worlds_of_tests:Hangs") as server:
        sandbox = server.start()
        server.post("/execute", sandbox_id=sandbox, command="setsid sleep 600 & disown")
        made = server.client.post(f"{GEM}/make", json={"env_id": "worlds_of_tests:Hangs"}).json()
        server.client.post(f"{GEM}/reset", json=made)
        with ThreadPoolExecutor() as pool:
            hung = pool.submit(server.client.post, f"{GEM}/step", json={**made, "action": "hang"})
            assert len(server.children()) > 4
            server.end(signal.SIGKILL)
            assert isinstance(hung.exception(), httpx.HTTPError)
        left = server.left()
        assert left and not any(line.startswith("process ") for line in left)  # directories, which the next one removes
        with_same_folder = {**os.environ, "TMPDIR": str(server.folder)}
        sweep = "from antiphon.sandbox.sessions.runtime_dirs import RuntimeDirs; RuntimeDirs().close()"
        subprocess.run([sys.executable, "-c", sweep], env=with_same_folder, check=True, cwd=ROOT)
        assert server.left() == []


# --- several workers -----------------------------------------------------------------------------------------------------


def test_huge_command_is_refused_with_a_short_message(server, sandbox):
    answer = server.post("/execute", sandbox_id=sandbox, command=[1] * 1_000_000)
    assert answer.status_code == 413 and len(answer.content) < 1000


@pytest.mark.parametrize("content", [b"[" * 200_000, b'{"sandbox_id": "x", "command": ' + b"[" * 100_000])
def test_deep_bodies_are_refused_as_such(workers, content):
    assert workers.client.post(f"{SANDBOX}/execute", content=content).status_code == 413


@pytest.fixture
def workers(monkeypatch):
    monkeypatch.setenv("ANTIPHON_SANDBOX_TOKEN", TOKEN)
    with serving("workers=2", "warm=0", "upload=1", "sandbox_memory=512") as server:
        yield server
        assert server.end() == 0
        assert server.left() == []


def own(server) -> list[psutil.Process]:
    """The worker processes."""
    return [child for child in server.children(recursive=False) if "service.workers" in " ".join(child.cmdline())]


def test_workers_behind_one_address(workers):
    server = workers
    assert server.client.get("/metrics", headers={"Authorization": "Bearer wrong"}).status_code == 401
    ids = [server.start(sandbox_id="mine" if number == 0 else None) for number in range(4)]
    assert ids[0] == "mine" and len({*ids}) == 4
    homes = {box.parent().pid for process in own(server) for box in process.children() if box.name() == "bwrap"}
    assert len(homes) == 2  # both have some
    for sandbox_id in ids:
        server.result("/create_session", sandbox_id=sandbox_id, session="s")
        server.result(
            "/run_in_session", sandbox_id=sandbox_id, session="s", command=f"x={sandbox_id}", action_type="bash"
        )
    for sandbox_id in ids:
        told = server.result(
            "/run_in_session", sandbox_id=sandbox_id, session="s", command="echo $x", action_type="bash"
        )
        assert told["output"] == sandbox_id
        form = {"target_path": "f", "sandbox_id": sandbox_id}
        assert server.client.post(f"{SANDBOX}/upload", files={"file": b"\0\xff"}, data=form).json()["result"]["success"]
    assert [item["sandbox_id"] for item in server.items()] == ids
    assert [item["sandbox_id"] for item in server.items(page=2, page_size=3)] == ids[3:]
    assert server.client.get(f"{SANDBOX}/sandboxes", params={"page": 0}).status_code == 400
    batch = server.result("/sandboxes/batch", sandbox_ids=[*ids[1:3], "none"])["statuses"]
    assert {item["sandbox_id"] for item in batch} == {*ids[1:3]}
    assert 'antiphon_sandboxes{state="running"} 4\n' in server.client.get("/metrics").text
    assert all(sandbox_id in server.client.get("/").text for sandbox_id in ids)
    worlds = [server.client.post(f"{GEM}/make", json={"env_id": "guess_number"}).json()["sandbox_id"] for _ in range(3)]
    for world in worlds:
        assert server.client.post(f"{GEM}/reset", json={"sandbox_id": world, "seed": 1}).status_code == 200
    sandbox = open_sandbox(SandboxConfig(service=server.url))
    assert [sandbox.run(f"print({n})").stdout for n in range(3)] == ["0\n", "1\n", "2\n"]
    sandbox.close()
    assert server.client.post(f"{SANDBOX}/write_file", content=b"x" * (4 << 20)).status_code == 413
    assert server.post("/start_async", image=3).status_code == 400


def test_a_worker_that_is_killed_is_replaced(workers):
    server = workers
    ids = [server.start() for _ in range(4)]
    victim, other = own(server)
    with ThreadPoolExecutor(4) as threads:
        running = [threads.submit(server.post, "/execute", sandbox_id=name, command="sleep 30; echo x") for name in ids]
        while server.client.get("/metrics").text.count("antiphon_sandbox_commands_in_flight 4\n") == 0:
            time.sleep(0.02)
        victim.kill()
        statuses = []
        for future, name in zip(running, ids, strict=True):
            if server.client.get(f"{SANDBOX}/is_alive", params={"sandbox_id": name}).status_code == 200:
                server.result("/stop", sandbox_id=name)
            statuses.append(future.result().status_code)
    assert statuses.count(410) >= 2 and other.is_running()
    known = {item["sandbox_id"] for item in server.items()}
    assert len(known) == 2 and known < {*ids}
    again = [server.start() for _ in range(4)]
    assert {item["sandbox_id"] for item in server.items(state="running")} == {*again}


# --- what nobody would send --------------------------------------------------------------------------------------------


def schema(server) -> dict:
    return server.client.get("/openapi.json").json()


TEXT = st.one_of(
    st.text(max_size=20),
    st.sampled_from(
        ["", "\0", "../" * 5 + "etc/passwd", "/", "a" * 5000, "\ud800", "default", "8g", "'; rm -rf /box; '"]
    ),
)
ANYTHING = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), TEXT),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXT, inner, max_size=3)),
    max_leaves=5,
)


def values(part: dict, schemas: dict, sandbox_id: str) -> st.SearchStrategy:
    """What a part of the schema allows, and now and then something else."""
    if "$ref" in part:
        part = schemas[part["$ref"].rpartition("/")[2]]
    if "anyOf" in part:
        fitting = st.one_of(*(values(choice, schemas, sandbox_id) for choice in part["anyOf"]))
    elif part.get("type") == "object" and "properties" in part:
        fields = {
            name: st.one_of(st.just(sandbox_id), TEXT) if name == "sandbox_id" else values(field, schemas, sandbox_id)
            for name, field in part["properties"].items()
        }
        required = {name: fields.pop(name) for name in part.get("required", ())}
        fitting = st.fixed_dictionaries(required, optional=fields)
    elif part.get("type") == "array":
        fitting = st.lists(values(part.get("items", {}), schemas, sandbox_id), max_size=3)
    elif part.get("type") == "object":
        fitting = st.dictionaries(TEXT, TEXT, max_size=3)
    else:
        low, high = part.get("minimum", -1), part.get("maximum", 10)
        fitting = {
            "integer": st.integers(low, high),
            "number": st.floats(allow_nan=True),
            "boolean": st.booleans(),
            "null": st.none(),
            "string": st.one_of(TEXT, st.sampled_from(part.get("enum", [part.get("const", "x")]))),
        }.get(part.get("type"), ANYTHING)
    return st.one_of(fitting, fitting, fitting, ANYTHING)


def test_nothing_that_can_be_sent_breaks_it(server, sandbox):
    described = schema(server)
    schemas = described["components"]["schemas"]
    operations = [
        (path, method, operation)
        for path, methods in described["paths"].items()
        for method, operation in methods.items()
    ]
    server.result("/create_session", sandbox_id=sandbox)
    seen = set()

    @settings(max_examples=300, suppress_health_check=list(HealthCheck), deadline=None)
    @given(st.data())
    def send(data):
        path, method, operation = data.draw(st.sampled_from(operations))
        if path.endswith("/make"):
            return  # each costs a process
        content = operation.get("requestBody", {}).get("content", {})
        query = {
            parameter["name"]: str(data.draw(values(parameter["schema"], schemas, sandbox)))
            for parameter in operation.get("parameters", ())
            if parameter["in"] == "query" and data.draw(st.booleans())
        }
        arguments: dict = {"params": {key: value.encode("utf-8", "replace") for key, value in query.items()}}
        if "multipart/form-data" in content:
            body = data.draw(values(next(iter(content.values()))["schema"], schemas, sandbox))
            fields = body if isinstance(body, dict) else {}
            form = {
                str(name): str(value).encode("utf-8", "replace") for name, value in fields.items() if name != "file"
            }
            arguments |= {"data": {key.encode("utf-8", "replace").decode(): value for key, value in form.items()}}
            arguments |= {"files": {"file": ("name", b"content")}} if "file" in fields else {}
        elif content:
            body = data.draw(values(next(iter(content.values()))["schema"], schemas, sandbox))
            if isinstance(body, dict) and isinstance(body.get("timeout"), float | int):
                body["timeout"] = min(body["timeout"], 0.5)
            arguments |= {"content": json.dumps(body), "headers": {"Content-Type": "application/json"}}
        path = path.replace("{sandbox_id}", data.draw(st.sampled_from([sandbox, "none", "%00", "..%2f", "a" * 2000])))
        answer = server.client.request(method, path, **arguments)
        assert answer.status_code < 500, (method, path, arguments, answer.text)
        seen.add(answer.status_code)
        if answer.status_code >= 400:
            assert answer.json()["status"] == "Failed" and answer.json()["error"]
        stop_all(server, sandbox)

    send()
    assert seen >= {200, 400, 404}
    for garbage in (b"", b"{", b"\xff\xfe", b"[" * 100_000, b"1" * 10_000, b'{"sandbox_id": 1e999}', b"null"):
        for path in ("/stop", "/execute", "/upload"):
            headers = {"Content-Type": "application/json"}
            answer = server.client.post(SANDBOX + path, content=garbage, headers=headers)
            assert 400 <= answer.status_code < 500 and answer.json()["status"] == "Failed"
    broken = {"Content-Type": "multipart/form-data; boundary=x"}
    assert server.client.post(f"{SANDBOX}/upload", content=b"--x\r\nnonsense", headers=broken).status_code == 400
    assert server.client.get("/metrics").status_code == 200


def stop_all(server, but: str) -> None:
    for item in server.items(state="running"):
        if item["sandbox_id"] != but:
            server.post("/stop", sandbox_id=item["sandbox_id"])


# --- ROCK's own client -------------------------------------------------------------------------------------------------


def test_what_the_clients_of_rock_send(server):
    """The bodies that rl-rock 1.11.0 sends, as they were recorded; the test after this one lets it send them itself."""
    headers = {"X-Cluster": "vpc-nt-a", "X-User-Id": "me"}
    wanted = {
        **{"image": "python:3.11", "image_os": "linux", "auto_clear_time": 5, "auto_clear_time_minutes": 5},
        **{"startup_timeout": 180, "memory": "8g", "cpus": 2, "num_gpus": None, "accelerator_type": None},
        **{"registry_username": None, "registry_password": None, "use_kata_runtime": False, "limit_cpus": None},
        **{"sandbox_id": None, "auto_archive_seconds": None, "auto_delete_seconds": None, "disk": "50G"},
    }

    def post(verb, **body):
        told = server.client.post(f"{SANDBOX}/{verb}", json=body, headers=headers).json()
        assert told["status"] == "Success", told
        return told["result"]

    sandbox = post("start_async", **wanted)["sandbox_id"]
    status = server.client.get(f"{SANDBOX}/get_status?sandbox_id={sandbox}&include_all_states=False").json()["result"]
    assert status["is_alive"] and status["user_id"] == "me" and status["memory"] == "1024m"
    said = post("execute", command=["echo", "a"], sandbox_id=sandbox, timeout=1200, cwd=None, env=None)
    assert (said["stdout"], said["stderr"], said["exit_code"]) == ("a\n", "", 0)
    session = {"session_type": "bash", "session": "default", "startup_source": [], "env_enable": False}
    post("create_session", sandbox_id=sandbox, **session, env=None, remote_user=None)
    action = {"action_type": "bash", "session": "default", "check": "raise", "timeout": None}
    assert post("run_in_session", sandbox_id=sandbox, command="echo b", **action)["output"] == "b"
    assert post("write_file", content="c", path="f", sandbox_id=sandbox)["success"]
    assert post("read_file", path="f", encoding=None, errors=None, sandbox_id=sandbox)["content"] == "c"
    post("close_session", sandbox_id=sandbox, session_type="bash", session="default")
    post("stop", sandbox_id=sandbox)
    post("delete", sandbox_id=sandbox)
    refused = server.client.get("/apis/envs/sandbox/v1/get_token", params={"account": "primary"})
    assert (refused.status_code, refused.json()["status"]) == (200, "Failed")


def test_the_clients_of_rock(server, tmp_path, rock_python):
    (tmp_path / "file").write_text("up")
    script = tmp_path / "client.py"
    script.write_text(ROCK)
    address = server.url.replace("//", f"//rock:{TOKEN}@")
    environment = {**os.environ, "ROCK_BASE_URL": address}
    done = subprocess.run(
        [rock_python, str(script)], capture_output=True, text=True, env=environment, timeout=120, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == "done"


ROCK = """
import asyncio, logging

from rock.actions import BashAction, Command, CreateBashSessionRequest, ReadFileRequest, UploadRequest, WriteFileRequest
from rock.actions import CloseBashSessionRequest
from rock.sdk.envs.rock_env import RockEnv
from rock.sdk.sandbox.client import Sandbox
from rock.sdk.sandbox.config import SandboxConfig

async def main():
    sandbox = Sandbox(SandboxConfig(image="python:3.11", memory="8g", cpus=2.0, user_id="me"))
    await sandbox.start()
    assert await sandbox.is_alive()
    assert (await sandbox.execute(Command(command=["echo", "a b"]))).stdout == "a b\\n"
    await sandbox.create_session(CreateBashSessionRequest(session="default", env={"A": "1"}))
    assert (await sandbox.arun("cd /tmp; echo $A", session="default")).output == "1"
    assert (await sandbox.run_in_session(BashAction(command="pwd"))).output == "/tmp"
    assert (await sandbox.run_in_session(BashAction(command="false", check="silent"))).exit_code == 1
    try:
        await sandbox.arun("echo said; exit 5", session="default")
    except Exception as error:
        assert "exit code 5" in str(error) and "said" in str(error)
    else:
        raise AssertionError
    assert (await sandbox.arun("echo tmp")).output == "tmp"
    await sandbox.close_session(CloseBashSessionRequest(session="default"))
    assert (await sandbox.write_file(WriteFileRequest(path="/box/d/f", content="text"))).success
    assert (await sandbox.read_file(ReadFileRequest(path="d/f"))).content == "text"
    assert not (await sandbox.write_file(WriteFileRequest(path="/proc/nothing", content="text"))).success
    assert (await sandbox.upload(UploadRequest(source_path="file", target_path="/box/up"))).success
    assert (await sandbox.execute(Command(command="cat up"))).stdout == "up"
    await sandbox.stop()
    await sandbox.restart()
    assert (await sandbox.read_file(ReadFileRequest(path="d/f"))).content == "text"
    again = Sandbox(SandboxConfig())
    await again.attach(sandbox.sandbox_id)
    assert again.config.image == "python:3.11"
    await sandbox.stop()
    await sandbox.delete()
    assert (await sandbox.get_status(include_all_states=True)).state == "deleted"

asyncio.run(main())
env = RockEnv("guess_number")
observation, info = env.reset(seed=3)
assert env.reset(seed=3) == (observation, info)
observation, reward, terminated, truncated, info = env.step("5")
assert observation in ("higher", "lower", "right") and not truncated
env.close()
print("done")
"""


# --- load --------------------------------------------------------------------------------------------------------------


def test_a_thousand_requests_while_boxes_are_killed():
    outcome = asyncio.run(load(requests=1000, clients=32, kills=15, seed=0))
    assert outcome.lost == 0 and outcome.left == []
    assert sum(outcome.answers.values()) == 1000
    assert outcome.kills == 15
    assert not any(status >= 500 for _, status in outcome.answers)
