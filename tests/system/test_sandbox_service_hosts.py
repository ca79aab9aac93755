"""Many sandboxes on several hosts: a front and its hosts are real services, which are really killed and stopped."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest

from tests.system.test_sandbox_bounds import (  # noqa: F401  # these hold for a front as they do for one service
    raw,
    send,
    test_abandoned_commands_end,
    test_bodies_of_many_values_are_refused,
    test_half_requests_are_closed,
    test_odd_requests_are_refused_as_such,
)
from tests.system.test_sandbox_service import (  # noqa: F401
    GEM,
    ROOT,
    SANDBOX,
    TOKEN,
    Server,
    test_a_life,
    test_environments,
    test_execute_keeps_no_shell_state,
    test_files_mean_what_they_mean_inside,
    test_nothing_is_answered_without_the_token,
    test_requests_of_other_pages_are_refused,
    test_sessions,
    test_the_list,
    test_what_cannot_be_had_is_refused,
    test_what_the_clients_of_rock_send,
)

pytestmark = pytest.mark.commands("bwrap")

SMALL = ("warm=0", "sandbox_memory=64", "sandbox_disk=8")


class Host(Server):
    """A host, with a client that has its token."""

    def __init__(self, *arguments: str, token: str = "") -> None:
        self.token = token or f"token-of-a-host-{id(self)}"
        super().__init__(*arguments, token=self.token)
        self.client.headers["Authorization"] = f"Bearer {self.token}"

    def running(self) -> set[str]:
        return {item["sandbox_id"] for item in self.items(state="running")}


def front(hosts, *arguments: str) -> Server:
    """A front of these hosts."""
    with tempfile.NamedTemporaryFile("w") as file:
        file.write("\n".join(host.token for host in hosts))
        file.flush()
        addresses = ",".join(host.url for host in hosts)
        return Server(f"hosts=[{addresses}]", f"--host-token-file={file.name}", *arguments)


@contextmanager
def fleet(*arguments: str, of_hosts=SMALL, number: int = 2):
    """A front and its hosts."""
    with ExitStack() as stack:
        hosts = []
        for _ in range(number):
            hosts.append(Host(*of_hosts))
            stack.callback(hosts[-1].close)
        made = front(hosts, *arguments)
        stack.callback(made.close)
        yield made, hosts


@pytest.fixture(scope="module")
def server():
    settings = ("memory=8192", "sandbox_memory=1024", "upload=1", "command_seconds=30", "environment_seconds=20")
    worlds = ("--environment=worlds_of_tests:Hangs", "--environment=worlds_of_tests:Async")
    with fleet("upload=1", "request_seconds=5", of_hosts=("warm=0", *settings, *worlds)) as (made, hosts):
        yield made
        assert made.end() == 0
        assert "Traceback" not in made.log.read_text()
        for host in hosts:
            assert host.end() == 0
            assert host.log.read_text() == "" and host.left() == []


@pytest.fixture
def sandbox(server):
    sandbox_id = server.start()
    yield sandbox_id
    server.post("/stop", sandbox_id=sandbox_id)


def wait_for_hosts(server, number: int) -> None:
    while f'antiphon_sandbox_hosts{{state="up"}} {number}\n' not in server.client.get("/metrics").text:
        time.sleep(0.02)


def wait_for_commands(server, *commands) -> None:
    """Wait until these commands, and no others, are under way."""
    while f"antiphon_sandbox_commands_in_flight {len(commands)}\n" not in server.client.get("/metrics").text:
        assert not any(command.done() for command in commands)


def status_of(server, sandbox_id: str) -> int:
    return server.client.get(f"{SANDBOX}/is_alive", params={"sandbox_id": sandbox_id}).status_code


def start_all(server, number: int, **body) -> list[int]:
    """The statuses of so many starts at once."""
    with ThreadPoolExecutor(number) as threads:
        starts = [threads.submit(server.post, "/start", image="x", **body) for _ in range(number)]
    return sorted(start.result().status_code for start in starts)


# --- where sandboxes are -------------------------------------------------------------------------------------------------


def test_a_new_front_finds_what_the_killed_one_started():
    with fleet() as (first, hosts):
        ids = [first.start(sandbox_id="mine" if number == 0 else None) for number in range(4)]
        assert [len(host.running()) for host in hosts] == [2, 2]  # each went to the host with the most room
        for name in ids:
            first.result("/create_session", sandbox_id=name)
            first.result("/run_in_session", sandbox_id=name, command=f"x={name}")
        world = first.client.post(f"{GEM}/make", json={"env_id": "guess_number"}).json()
        assert first.client.post(f"{GEM}/reset", json={**world, "seed": 1}).status_code == 200
        first.end(signal.SIGKILL)
        second = front(hosts)
        try:
            assert [item["sandbox_id"] for item in second.items()] == ids
            for name in ids:
                assert second.result("/run_in_session", sandbox_id=name, command="echo $x")["output"] == name
            step = second.client.post(f"{GEM}/step", json={**world, "action": "1"})
            assert step.status_code == 200 and "observation" in step.json()
            assert "exists already" in second.refused(409, "/start", image="x", sandbox_id="mine")
            assert "no sandbox 'none'" in second.refused(404, "/stop", sandbox_id="none")
        finally:
            second.close()


def test_a_host_with_workers_and_a_front_of_fronts():
    with fleet(of_hosts=(*SMALL, "workers=2", "sandboxes=2"), number=1) as (inner, hosts):
        inner.token = TOKEN
        outer = front([inner])
        try:
            assert start_all(outer, 4) == [200, 200, 429, 429]
            (first, second) = (item["sandbox_id"] for item in outer.items())
            outer.result("/stop", sandbox_id=first)
            assert hosts[0].running() == {second}
            assert outer.result("/restart", sandbox_id=first)["sandbox_id"] == first
        finally:
            outer.close()


# --- hosts that do not answer ----------------------------------------------------------------------------------------------


def test_a_killed_host_is_replaced_by_others_until_it_is_back():
    with fleet("check_seconds=5") as (server, hosts):
        ids = [server.start() for _ in range(4)]
        lost, kept = (host.running() for host in hosts)
        with ThreadPoolExecutor() as threads:
            name = next(iter(lost))
            under_way = threads.submit(server.post, "/execute", sandbox_id=name, command="sleep 100")
            wait_for_commands(hosts[0], under_way)
            hosts[0].end(signal.SIGKILL)
            answer = under_way.result()
        assert answer.status_code == 503 and answer.json()["result"]["code"] == 5000
        for name in lost:
            assert hosts[0].url in server.refused(503, "/execute", sandbox_id=name, command="true")
        wait_for_hosts(server, 1)
        assert {status_of(server, name) for name in kept} == {200}
        new = {server.start() for _ in range(2)}
        assert hosts[1].running() == kept | new
        listed = server.client.get(f"{SANDBOX}/sandboxes").json()["result"]
        assert {item["sandbox_id"] for item in listed["items"]} == kept | new
        assert listed["unreachable"] == [f"host {hosts[0].url}"]
        assert hosts[0].url in server.client.get("/").text
        again = Host(*SMALL, f"port={hosts[0].url.rpartition(':')[2]}", token=hosts[0].token)
        try:
            wait_for_hosts(server, 2)
            assert {status_of(server, name) for name in lost} == {404}  # they died with the host
            new = {server.start() for _ in range(2)}
            assert again.running() == new and len({*ids, *new}) == 6
        finally:
            again.close()


def test_a_hung_host_holds_no_request_and_keeps_its_sandboxes():
    with fleet("check_seconds=5") as (server, hosts):
        first, second = server.start(), server.start()
        assert [host.running() for host in hosts] == [{first}, {second}]
        server.result("/create_session", sandbox_id=first)
        server.result("/run_in_session", sandbox_id=first, command="x=kept")
        with ThreadPoolExecutor() as threads:
            under_way = threads.submit(server.post, "/execute", sandbox_id=first, command="sleep 100")
            wait_for_commands(hosts[0], under_way)
            os.kill(hosts[0].process.pid, signal.SIGSTOP)
            try:
                assert under_way.result().status_code == 503
                third = server.start()
                assert hosts[1].running() == {second, third}
                assert "check_seconds" in server.refused(503, "/restart", sandbox_id=first)
            finally:
                os.kill(hosts[0].process.pid, signal.SIGCONT)
        wait_for_hosts(server, 2)
        assert server.result("/run_in_session", sandbox_id=first, command="echo $x")["output"] == "kept"


def test_without_any_host_everything_is_refused():
    with fleet("check_seconds=5", number=1) as (server, hosts):
        name = server.start()
        hosts[0].end(signal.SIGKILL)
        while server.client.get("/metrics").status_code != 503:
            time.sleep(0.02)
        for route in ("/start_async", "/stop", "/restart", "/execute"):
            server.refused(503, route, image="x", sandbox_id=name, command="true")
        assert server.client.get(f"{SANDBOX}/sandboxes").status_code == 503
        assert server.client.post(f"{GEM}/list").status_code == 503


def test_a_front_that_starts_beside_a_dead_host_denies_nothing():
    with fleet() as (first, hosts):
        names = [first.start() for _ in range(2)]
        first.end()
        hosts[0].end(signal.SIGKILL)
        second = front(hosts)
        try:
            assert hosts[0].url in second.refused(503, "/stop", sandbox_id=names[0])  # it may be there
            assert status_of(second, names[1]) == 200
            second.start(sandbox_id="named")
        finally:
            second.close()


# --- quotas ----------------------------------------------------------------------------------------------------------------


def test_quotas_hold_over_all_hosts():
    with fleet("sandboxes=5", "memory=400", "commands=2", "environments=3") as (server, hosts):
        assert start_all(server, 12, memory="64m") == [200] * 5 + [429] * 7
        assert sum(len(host.running()) for host in hosts) == 5
        ids = [item["sandbox_id"] for item in server.items(state="running")]
        server.result("/stop", sandbox_id=ids[0])
        assert start_all(server, 4, memory="64m") == [200] + [429] * 3
        assert "5 sandboxes" in server.refused(429, "/restart", sandbox_id=ids[0])
        server.result("/stop", sandbox_id=ids[1])
        with ThreadPoolExecutor() as threads:
            again = [threads.submit(server.post, "/restart", sandbox_id=name) for name in ids[:2]]
            assert sorted(each.result().status_code for each in again) == [200, 429]
            running = [threads.submit(server.post, "/execute", sandbox_id=ids[2], command="sleep 100")]
            running += [threads.submit(server.post, "/execute", sandbox_id=ids[3], command="sleep 100")]
            wait_for_commands(server, *running)
            server.refused(429, "/execute", sandbox_id=ids[4], command="true")
            for name in ids[2:4]:
                server.result("/stop", sandbox_id=name)
            assert [each.result().status_code for each in running] == [410, 410]
            make = [threads.submit(server.client.post, f"{GEM}/make", json={"env_id": "guess_number"}) for _ in "12345"]
            assert sorted(each.result().status_code for each in make) == [200] * 3 + [429] * 2


def test_memory_is_counted_as_the_hosts_grant_it():
    with fleet("memory=150") as (server, _):
        assert start_all(server, 5, memory="8g") == [200] * 2 + [429] * 3  # a host grants 64 MiB
        assert "22 of the 150 MiB" in server.refused(429, "/start", image="x", memory="8g")


def test_all_places_of_all_hosts_can_be_had():
    with fleet(of_hosts=(*SMALL, "sandboxes=2")) as (server, hosts):
        assert start_all(server, 8) == [200] * 4 + [429] * 4
        assert [len(host.running()) for host in hosts] == [2, 2]


# --- what a host gets to see -------------------------------------------------------------------------------------------------


class Recorder(BaseHTTPRequestHandler):
    """A host of other make: records each request, and gives each but one for a report the same answer."""

    protocol_version = "HTTP/1.1"
    answer = (200, b'{"status": "Success", "result": {}}')

    def _handle(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        status, content = self.answer
        if self.path == "/apis/antiphon/v1/holdings":
            quotas = dict.fromkeys(("sandboxes", "memory", "sandbox_memory", "commands", "environments"), 100)
            report = {"sandboxes": {"a": {"state": "stopped", "memory": 1}}, "environments": {}, "quotas": quotas}
            status, content = 200, json.dumps(report).encode()
        else:
            self.server.seen.append((self.command, self.path, self.headers.items(), body))
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Set-Cookie", "a=b")
        self.send_header("Location", "http://elsewhere")
        self.send_header("WWW-Authenticate", "Basic")
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = _handle

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextmanager
def recorder(answer=Recorder.answer):
    """A front of a host that records, and the requests that the host has seen."""
    made = ThreadingHTTPServer(("127.0.0.1", 0), type("Answers", (Recorder,), {"answer": answer}))
    made.daemon_threads, made.seen = True, []
    made.url, made.token = f"http://127.0.0.1:{made.server_address[1]}", "token-of-the-recorder"
    threading.Thread(target=made.serve_forever, daemon=True).start()
    try:
        server = front([made])
        try:
            yield server, made.seen
        finally:
            server.close()
    finally:
        made.shutdown()
        made.server_close()


def test_a_host_sees_its_token_and_known_headers_only():
    with recorder() as (server, seen):
        headers = {"X-User-Id": "me", "X-Forwarded-For": "1.2.3.4", "Cookie": "a=b", "Connection": "X-User-Id, close"}
        bodies = {"sandbox_id": "a", "image": "x", "command": "true"}
        for route in ("/start", "/stop", "/restart", "/execute"):
            answer = server.client.post(f"{SANDBOX}{route}", json=bodies, headers=headers)
            assert answer.status_code == 200, answer.text
            assert not {"set-cookie", "location", "www-authenticate"} & {*answer.headers}
        server.client.post(f"{SANDBOX}/upload", data={"sandbox_id": "a", "target_path": "x"}, files={"file": b"\0\r\n"})
        server.client.get(f"{SANDBOX}/is_alive?sandbox_id=a%26x=1%23&sandbox_id=a%0d%0ab")
        assert len(seen) == 6 and seen[-1][1] == f"{SANDBOX}/is_alive?sandbox_id=a%0D%0Ab"
        for _, _, given, body in seen:
            given = {name.lower(): value for name, value in given}
            assert given.pop("authorization") == "Bearer token-of-the-recorder"
            assert given.pop("host").startswith("127.0.0.1:")
            for allowed in ("content-type", "content-length", "x-user-id", "accept", "accept-encoding"):
                given.pop(allowed, None)
            assert {*given} <= {"connection", "user-agent"} and given.get("connection", "keep-alive") == "keep-alive"
            assert TOKEN not in str(given) and TOKEN.encode() not in body


PATHS = [
    *("/..", "/../metrics", f"{SANDBOX}/../../../metrics", f"{SANDBOX}/stop/..", f"{SANDBOX}/%2e%2e/stop", "//stop"),
    *(
        f"{SANDBOX}/sandboxes/{name}/restart"
        for name in ("..", "%2e%2e", "a%2f..%2fb", "a%0d%0ab", "a b", "%00", "a?/b")
    ),
    *(
        f"{SANDBOX}/stop;x",
        f"{SANDBOX}//stop",
        f"{SANDBOX}/stop%00",
        f"{SANDBOX}/stop%0d%0aX: y",
        "/apis/antiphon/v1/x",
    ),
    *("http://127.0.0.1:1/metrics", "http://x@127.0.0.1/", "*", "127.0.0.1:1"),
]


def test_no_path_leads_to_anything_but_a_route():
    with recorder() as (server, seen):
        for method in (b"GET", b"POST", b"PUT", b"CONNECT"):
            for path in PATHS:
                line = method + b" " + path.encode()
                assert 400 <= raw(server, line) < 500, (method, path)
        for method in (b"PUT", b"DELETE", b"TRACE", b"PATCH"):
            assert raw(server, method + f" {SANDBOX}/stop".encode()) == 405
        assert seen == []


HEAD = f"POST {SANDBOX}/stop HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n".encode()
INNER = f"POST {SANDBOX}/smuggled HTTP/1.1\r\nHost: x\r\n\r\n".encode()
SMUGGLED = {
    "two_lengths": b"Content-Length: 0\r\nContent-Length: %d\r\n\r\n" % len(INNER) + INNER,
    "length_and_chunks": b"Content-Length: %d\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" % (len(INNER) + 5)
    + INNER,
    "line_end_in_a_value": b"X-User-Id: a\rX-Other: b\r\nContent-Length: 0\r\n\r\n",
    "folded_value": b"X-User-Id: a\r\n Authorization: Bearer other\r\nContent-Length: 0\r\n\r\n",
    "nul_in_a_value": b"X-User-Id: a\0b\r\nContent-Length: 0\r\n\r\n",
    "space_before_the_colon": b"Transfer-Encoding : chunked\r\nContent-Length: %d\r\n\r\n" % len(INNER) + INNER,
}


def test_no_request_hides_in_another():
    with recorder() as (server, seen):
        for name, rest in SMUGGLED.items():
            connection = send(server, HEAD + b"Content-Type: application/json\r\n" + rest)
            with connection, connection.makefile("rb") as answer:
                status = int(answer.readline().split()[1])
                assert 200 <= status < 500, name
        assert all("smuggled" not in path for _, path, _, _ in seen)
        for _, _, given, _ in seen:
            names = [each.lower() for each, _ in given]
            assert names.count("content-length") <= 1 and names.count("authorization") == 1
            assert "transfer-encoding" not in names and "x-other" not in names


def test_the_first_content_type_counts_for_bounds_and_host():
    with recorder() as (server, seen):
        content = b"[" * 100_000
        types = [("Content-Type", "application/json"), ("Content-Type", "multipart/form-data; boundary=x")]
        headers = [("Authorization", f"Bearer {TOKEN}"), *types]
        answer = httpx.post(f"{server.url}{SANDBOX}/execute", content=content, headers=headers)
        assert answer.status_code == 413 and seen == []


@pytest.mark.parametrize(
    ("answer", "status"),
    [((401, b"{}"), 503), ((302, b"{}"), 302), ((200, b"x" * (400 << 20)), 503)],
    ids=["refuses", "redirects", "endless"],
)
def test_odd_answers_of_a_host(answer, status):
    with recorder(answer) as (server, seen):
        got = server.post("/stop", sandbox_id="a")
        assert got.status_code == status and len(seen) == 1 and "location" not in got.headers


# --- configuration -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "tokens", "words"),
    [
        (["hosts=[http://127.0.0.1:1]"], "", ["hosts", "tokens"]),
        (["hosts=[http://127.0.0.1:1]"], "first-token second-token", ["hosts", "2"]),
        (["hosts=[http://127.0.0.1:1]"], "short", ["at least 8 characters"]),
        ([], "unused-token", ["hosts", "0"]),
        (["hosts=[http://a:1/path]"], "first-token", ["hosts", "http://HOST:PORT"]),
        (["hosts=['http://name:secret@a:1']"], "first-token", ["hosts", "http://HOST:PORT"]),
        (["hosts=[file:///etc]"], "first-token", ["hosts", "http://HOST:PORT"]),
        (["hosts=[http://a:1,http://a:1]"], "first-token second-token", ["hosts", "twice"]),
        (["hosts=[http://127.0.0.1:1]", "warm=2", "workers=2"], "first-token", ["warm", "workers"]),
        (["hosts=[http://127.0.0.1:1]", "--environment=a:B"], "first-token", ["--environment"]),
        (["hosts=[http://127.0.0.1:1]"], "first-token", ["http://127.0.0.1:1", "does not answer"]),
    ],
)
def test_a_front_that_cannot_be_is_named(arguments, tokens, words):
    environment = {**os.environ, "ANTIPHON_SANDBOX_HOST_TOKENS": tokens}
    command = [sys.executable, "-m", "antiphon", "sandbox", "serve", "port=0", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=120)
    said = re.sub(r"\s+", " ", done.stderr)
    assert done.returncode != 0 and "Traceback" not in said and all(word in said for word in words), said
    assert not any(token in said for token in tokens.split())


def test_a_wrong_token_of_a_host_is_named(tmp_path):
    host = Host(*SMALL)
    try:
        (tmp_path / "tokens").write_text("not-its-token\n")
        options = [f"hosts=[{host.url}]", f"--host-token-file={tmp_path / 'tokens'}"]
        command = [sys.executable, "-m", "antiphon", "sandbox", "serve", "port=0", *options]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120)
        assert done.returncode != 0 and "refuses the token" in done.stderr and "not-its-token" not in done.stderr
        (tmp_path / "tokens").write_text(f"{host.token}\n")
        server = Server(*options)
        assert server.items() == []
        server.close()
    finally:
        host.close()


def test_quotas_of_workers_are_those_of_the_service():
    server = Server(*SMALL, "workers=2", "sandboxes=3")
    try:
        assert start_all(server, 8) == [200] * 3 + [429] * 5
    finally:
        server.close()
