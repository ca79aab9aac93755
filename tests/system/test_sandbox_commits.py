"""Work directories that clients keep as images, and hosts that sandboxes can reach: of one service, of workers and of hosts."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.system.test_sandbox_service import SANDBOX, Server
from tests.system.test_sandbox_service_hosts import SMALL, fleet

pytestmark = pytest.mark.commands("bwrap")


class Page(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"reached")

    def log_message(self, *rest):
        pass


@pytest.fixture(scope="module")
def pages():
    """The ports of two web servers of this machine."""
    with ExitStack() as stack:
        servers = [stack.enter_context(ThreadingHTTPServer(("127.0.0.1", 0), Page)) for _ in range(2)]
        for server in servers:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            stack.callback(server.shutdown)
        yield [server.server_port for server in servers]


@pytest.fixture(scope="module", params=["one", "workers", "hosts"])
def server(request, tmp_path_factory, pages):
    folder = tmp_path_factory.mktemp("commits") / "inside"
    settings = (*SMALL, f"commit_directory={folder}", "commits=2", f"network=[127.0.0.1:{pages[0]}]")
    with ExitStack() as stack:
        if request.param == "hosts":
            made = stack.enter_context(fleet(of_hosts=settings))[0]
        else:
            made = Server(*settings, *(["workers=2"] if request.param == "workers" else []))
            stack.callback(made.close)
        made.commits = folder
        yield made
        assert made.end() == 0
        assert made.log.read_text() == ""
        assert made.left() == []
    assert len([*folder.glob("*.tar")]) == len([*folder.glob("*.json")]), (
        "the commits are still there, and nothing else"
    )
    assert folder.stat().st_mode & 0o77 == 0


def run(server, sandbox_id, command):
    return server.result("/execute", sandbox_id=sandbox_id, command=command)["stdout"]


def commit(server, sandbox_id, tag):
    return server.result("/commit", sandbox_id=sandbox_id, image_tag=tag, username="", password="")


def test_a_commit_is_an_image(server):
    first = server.start()
    run(
        server,
        first,
        "mkdir d; echo one > d/f; ln -s d/f link; printf '#!/bin/sh\necho ran' > x; chmod 700 x; sleep 60 &",
    )
    told = commit(server, first, "registry.example/mine:1")
    assert told["phase"] == "SUCCEEDED" and told["image_tag"] == "registry.example/mine:1" and told["started_at"]
    assert server.client.get(f"{SANDBOX}/commit/{first}").json()["result"] == told
    run(server, first, "echo two > d/f")
    sandboxes = [server.start(image="registry.example/mine:1") for _ in range(3)]
    for sandbox_id in sandboxes:
        assert run(server, sandbox_id, "cat link; ./x; pgrep -c sleep") == "one\nran\n0\n"
        assert server.status(sandbox_id)["image"] == "registry.example/mine:1"
    run(server, sandboxes[0], "echo own > d/f")
    assert run(server, sandboxes[1], "cat d/f") == "one\n"
    server.result("/stop", sandbox_id=sandboxes[0])
    server.result("/restart", sandbox_id=sandboxes[0])
    assert run(server, sandboxes[0], "cat d/f") == "own\n", "a restart goes on with its own files"
    commit(server, first, "registry.example/mine:1")
    assert run(server, server.start(image="registry.example/mine:1"), "cat d/f") == "two\n"
    assert len([*server.commits.glob("*.tar")]) == 1, "what was replaced is gone"
    for item in server.items(state="running"):
        server.result("/stop", sandbox_id=item["sandbox_id"])


def test_what_cannot_be_committed_is_refused(server):
    sandbox_id = server.start()
    commit(server, sandbox_id, "../../a/b")
    commit(server, sandbox_id, "registry.example/mine:1")
    body = {"sandbox_id": sandbox_id, "image_tag": "third"}
    assert "commits" in server.refused(429, "/commit", **body)
    assert (
        server.client.get(f"{SANDBOX}/commit/{sandbox_id}").json()["result"]["image_tag"] == "registry.example/mine:1"
    )
    assert "image_tag" in server.refused(400, "/commit", sandbox_id=sandbox_id, image_tag="a\nb")
    assert "image_tag" in server.refused(400, "/commit", sandbox_id=sandbox_id)
    assert "nobody" in server.refused(404, "/commit", sandbox_id="nobody", image_tag="a")
    run(server, sandbox_id, "mkdir closed; touch closed/f; chmod 0 closed")
    assert "closed" in server.refused(422, "/commit", **{**body, "image_tag": "registry.example/mine:1"})
    server.result("/stop", sandbox_id=sandbox_id)
    assert "stopped" in server.refused(409, "/commit", **body)
    other = server.start()
    assert server.client.get(f"{SANDBOX}/commit/{other}").status_code == 404
    server.result("/stop", sandbox_id=other)
    assert not [name for name in os.listdir(server.commits.parent) if name != server.commits.name]


def test_commits_and_starts_at_once(server):
    """Of one name: each start has the files of one of the commits, none is refused, and one archive is left."""
    first = server.start()
    commit(server, first, "registry.example/mine:1")

    def save(number):
        made = server.start()
        run(server, made, f"echo {number} > number")
        status = server.post("/commit", sandbox_id=made, image_tag="registry.example/mine:1").status_code
        server.result("/stop", sandbox_id=made)
        return status

    def begin(_):
        made = server.start(image="registry.example/mine:1")
        content = run(server, made, "cat number 2> /dev/null || echo none")
        server.result("/stop", sandbox_id=made)
        return content.strip()

    with ThreadPoolExecutor(8) as threads:
        saving, starting = threads.map(save, range(8)), threads.map(begin, range(12))
        assert {*saving} == {200} and {*starting} <= {*map(str, range(8)), "none"}
    assert len([*server.commits.glob("*.tar")]) == len([*server.commits.glob("*.json")])
    server.result("/stop", sandbox_id=first)


def test_the_limit_holds_for_commits_at_once(server):
    sandboxes = [server.start() for _ in range(4)]
    with ThreadPoolExecutor(4) as threads:
        names = [f"name-{number}" for number in range(4)]
        answers = [
            *threads.map(
                lambda pair: server.post("/commit", sandbox_id=pair[0], image_tag=pair[1]),
                zip(sandboxes, names, strict=True),
            )
        ]
    assert {answer.status_code for answer in answers} <= {200, 429}
    assert len([*server.commits.glob("*.json")]) == len([*server.commits.glob("*.tar")]) <= 2
    for sandbox_id in sandboxes:
        server.result("/stop", sandbox_id=sandbox_id)


def test_only_the_operators_hosts_are_reached(server, pages):
    sandbox_id = server.start()
    script = "import urllib.request as u; print(u.urlopen('http://127.0.0.1:{}/').read().decode())"
    assert run(server, sandbox_id, ["python3", "-c", script.format(pages[0])]) == "reached\n"
    refused = server.result("/execute", sandbox_id=sandbox_id, command=["python3", "-c", script.format(pages[1])])
    assert refused["exit_code"] == 1 and "403" in refused["stderr"]
    server.result("/stop", sandbox_id=sandbox_id)


def test_without_a_directory_none_are_kept():
    made = Server(*SMALL)
    try:
        sandbox_id = made.start()
        assert "commit_directory" in made.refused(400, "/commit", sandbox_id=sandbox_id, image_tag="a")
    finally:
        made.close()
