"""What clients of the sandbox service cannot use up: places of commands, memory, the event loop, connections."""

import json
import socket
import time
from contextlib import closing, contextmanager

import pytest

from tests.system.test_sandbox_service import SANDBOX, TOKEN, Server

pytestmark = pytest.mark.commands("bwrap")

SETTINGS = ("warm=0", "commands=8", "sandbox_commands=3", "command_seconds=25", "upload=32", "request_seconds=5")


@pytest.fixture(scope="module", params=[1, 2], ids=lambda number: f"workers-{number}")
def server(request):
    made = Server(*SETTINGS, f"workers={request.param}")
    yield made
    try:
        assert made.client.get("/metrics").status_code == 200
        assert made.end() == 0
        assert "Traceback" not in made.log.read_text()
    finally:
        made.close()


@pytest.fixture
def sandbox(server):
    sandbox_id = server.start()
    yield sandbox_id
    server.post("/stop", sandbox_id=sandbox_id)


def send(server, request: bytes) -> socket.socket:
    """A connection on which these bytes have been sent."""
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=40)
    try:
        connection.sendall(request)
    except BaseException:
        connection.close()
        raise
    return connection


def raw(server, line: bytes, body: bytes = b"", content_type: bytes = b"application/json") -> int:
    """The status of the answer to a request that no library has made."""
    headers = b"Host: x\r\nAuthorization: Bearer " + TOKEN.encode()
    headers += b"\r\nContent-Type: " + content_type + b"\r\nContent-Length: " + str(len(body)).encode()
    request = line + b" HTTP/1.1\r\n" + headers + b"\r\n\r\n" + body
    with closing(send(server, request)) as connection, connection.makefile("rb") as answer:
        return int(answer.readline().split()[1])


def metric(server, name: str) -> float:
    lines = [line for line in server.client.get("/metrics").text.splitlines() if line.startswith(f"{name} ")]
    return float(lines[0].split()[1]) if lines else 0.0


@contextmanager
def abandoned(server, sandbox_id: str, route: str, number: int, **body):
    """So many requests, under way within; their clients leave at its end."""
    content = json.dumps({"sandbox_id": sandbox_id, **body}).encode()
    head = f"POST {SANDBOX}{route} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    connections = [send(server, head.encode() + content) for _ in range(number)]
    while metric(server, "antiphon_sandbox_commands_in_flight") < number:
        time.sleep(0.02)
    yield
    for connection in connections:
        connection.close()


@pytest.mark.parametrize("route", ["/execute", "/run_in_session"])
def test_abandoned_commands_end(server, sandbox, route):
    server.result("/create_session", sandbox_id=sandbox)
    late = 'antiphon_sandbox_commands_total{status="timeout"}'
    before = metric(server, late)
    with abandoned(server, sandbox, route, 3, command="sleep 1000"):
        pass
    while metric(server, "antiphon_sandbox_commands_in_flight"):
        time.sleep(0.02)
    assert metric(server, late) == before
    assert server.result("/execute", sandbox_id=sandbox, command="pgrep -c sleep")["stdout"] == "0\n"
    assert server.result("/run_in_session", sandbox_id=sandbox, command="echo well")["output"] == "well"


def test_a_sandbox_takes_no_place_of_another(server, sandbox):
    other = server.start()
    with abandoned(server, sandbox, "/execute", 3, command="sleep 1000"):
        server.refused(429, "/execute", sandbox_id=sandbox, command="true")
        server.result("/execute", sandbox_id=other, command="true")
    server.result("/stop", sandbox_id=other)


def test_a_pipe_holds_no_file_request(server, sandbox):
    server.result("/write_file", sandbox_id=sandbox, path="kept", content="here")
    server.result("/execute", sandbox_id=sandbox, command="mkfifo pipe; ln -s pipe link; mkdir directory")
    for path in ("pipe", "link", "/dev/zero", "directory"):
        assert "regular" in server.refused(404, "/read_file", sandbox_id=sandbox, path=path)
        answer = server.post("/write_file", sandbox_id=sandbox, path=path, content="x").json()
        assert answer["result"]["code"] == 6000 and "regular" in answer["error"]
    form = {"target_path": "pipe", "sandbox_id": sandbox}
    answer = server.client.post(f"{SANDBOX}/upload", files={"file": b"x"}, data=form).json()
    assert answer["result"]["code"] == 6000 and "regular" in answer["error"]
    server.result("/stop", sandbox_id=sandbox)
    assert server.result("/restart", sandbox_id=sandbox)["is_alive"]
    assert server.result("/read_file", sandbox_id=sandbox, path="kept")["content"] == "here"


def test_a_stop_keeps_files_that_a_program_withholds(server, sandbox):
    server.result("/write_file", sandbox_id=sandbox, path="kept", content="here")
    stops = "setsid bash -c 'while :; do kill -STOP -1; done' > /dev/null 2>&1 &"
    server.post("/execute", sandbox_id=sandbox, command=stops, timeout=1)
    server.result("/stop", sandbox_id=sandbox)
    assert server.result("/restart", sandbox_id=sandbox)["is_alive"]
    assert server.result("/read_file", sandbox_id=sandbox, path="kept")["content"] == "here"


MANY = 1_000_000
TOO_MUCH = {
    "numbers_as_command": ("/execute", {"command": [1] * MANY}),
    "texts_as_command": ("/execute", {"command": ["x"] * MANY}),
    "variables": ("/execute", {"command": "x", "env": {f"v{n}": "1" for n in range(20_000)}}),
    "unknown_field": ("/execute", {"command": "x", "other": [[]] * MANY}),
    "sources": ("/create_session", {"startup_source": [{}] * MANY}),
    "identifiers": ("/sandboxes/batch", {"sandbox_ids": [None] * MANY}),
}


@pytest.mark.parametrize("name", TOO_MUCH)
def test_bodies_of_many_values_are_refused(server, sandbox, name):
    route, body = TOO_MUCH[name]
    server.refused(413, route, sandbox_id=sandbox, **body)


@pytest.mark.parametrize("route", ["/execute", "/start_async", "/stop"])
@pytest.mark.parametrize("part", [b"[", b'{"a":'])
def test_deep_bodies_are_refused(server, route, part):
    for content in (part * 200_000, b'{"sandbox_id": "x", "command": ' + part * 100 + b"1"):
        assert raw(server, b"POST " + (SANDBOX + route).encode(), content) == 413


LARGE = "a" * (20 << 20)


@pytest.mark.parametrize(
    ("route", "field"),
    [
        *(("/read_file", field) for field in ("encoding", "errors", "path", "sandbox_id")),
        *(("/execute", field) for field in ("cwd", "timeout", "sandbox_id")),
        *(("/start_async", field) for field in ("image", "memory", "image_os", "sandbox_id", "accelerator_type")),
        *(("/run_in_session", field) for field in ("session", "check", "action_type")),
    ],
)
def test_refusals_do_not_echo_the_request(server, sandbox, route, field):
    answer = server.post(route, **{"sandbox_id": sandbox, "image": "x", "command": "x", "path": "x", field: LARGE})
    assert answer.status_code == 400 and len(answer.content) < 10_000


def test_names_of_fields_are_not_echoed_at_length(server, sandbox):
    answer = server.post("/execute", sandbox_id=sandbox, command="x", env={LARGE: 1})
    assert answer.status_code == 400 and len(answer.content) < 10_000
    answer = server.post("/execute", sandbox_id=sandbox, command="x", env={f"{LARGE} ": "1"})
    assert answer.status_code == 400 and len(answer.content) < 10_000


@pytest.mark.parametrize("errors", ["strict", "backslashreplace", "replace"])
def test_large_files_are_decoded(server, sandbox, errors):
    server.result("/execute", sandbox_id=sandbox, command="head -c 5000000 /dev/zero | tr '\\0' '\\377' > file")
    answer = server.post("/read_file", sandbox_id=sandbox, path="file", encoding="ascii", errors=errors)
    if errors == "strict":
        assert answer.status_code == 400 and len(answer.content) < 10_000
    else:
        assert answer.json()["result"]["content"] == b"\xff".decode("ascii", errors) * 5_000_000


@pytest.mark.parametrize("name", ["no_such", "utf_7", "unicode_escape", "zip", "rot13", "punycode", "../x", "é"])
def test_unknown_encodings_are_refused(server, sandbox, name):
    server.result("/write_file", sandbox_id=sandbox, path="f", content="x")
    server.refused(400, "/read_file", sandbox_id=sandbox, path="f", encoding=name)


def test_unknown_error_handlers_are_refused(server, sandbox):
    server.result("/write_file", sandbox_id=sandbox, path="f", content="\xe9")
    for name in ("xmlcharrefreplace", "none"):
        server.refused(400, "/read_file", sandbox_id=sandbox, path="f", encoding="ascii", errors=name)


FORM = b"multipart/form-data; boundary=x"
PART = b'--x\r\nContent-Disposition: form-data; name="'
ODD = {
    "no_parts": (b"POST /apis/envs/sandbox/v1/upload", b"--x\r\nnonsense", FORM),
    "no_boundary": (b"POST /apis/envs/sandbox/v1/upload", b"--x\r\n", b"multipart/form-data"),
    "endless_header": (b"POST /apis/envs/sandbox/v1/upload", b"--x\r\nA: " + b"a" * (30 << 20), FORM),
    "many_parts": (b"POST /apis/envs/sandbox/v1/upload", (PART + b'a"\r\n\r\n1\r\n') * 100_000 + b"--x--", FORM),
    "lines_in_a_name": (
        b"POST /apis/envs/sandbox/v1/upload",
        PART + b'sandbox_id"\r\n\r\na\r\nb\r\n' + PART + b'a%0D%0A"\r\n\r\n1\r\n--x--\r\n',
        FORM,
    ),
    "form": (b"POST /apis/envs/sandbox/v1/upload", b"a&" * (10 << 20), b"application/x-www-form-urlencoded"),
    "lines_in_the_path": (b"POST /apis/envs/sandbox/v1/sandboxes/a%0d%0ab/restart", b"", b"application/json"),
    "controls_in_the_path": (b"POST /apis/envs/sandbox/v1/sandboxes/a%00%01%7f%ffb/restart", b"", b"application/json"),
    "lines_in_another_path": (b"GET /a%0d%0aHost:%20b%0d%0a%0d%0a", b"", b"application/json"),
    "lines_in_a_file_name": (
        b"POST /apis/envs/sandbox/v1/upload",
        PART + b'file"; filename="a\r\nb%0D%0A"\r\n\r\n1\r\n' + PART + b'sandbox_id"\r\n\r\nx\r\n--x--\r\n',
        FORM,
    ),
    "lines_in_a_world": (
        b"POST /apis/v1/envs/gem/make",
        b'{"env_id": "a\\r\\nb", "sandbox_id": "a\\n"}',
        b"application/json",
    ),
    "lines_in_a_worlds_name": (
        b"POST /apis/v1/envs/gem/step",
        b'{"action": "x", "sandbox_id": "a\\r\\n"}',
        b"application/json",
    ),
    "lines_in_the_query": (b"GET /apis/envs/sandbox/v1/is_alive?sandbox_id=a%0d%0ab", b"", b"application/json"),
    "lines_in_the_body": (b"POST /apis/envs/sandbox/v1/stop", b'{"sandbox_id": "a\\r\\nb"}', b"application/json"),
    "lines_in_a_new_name": (
        b"POST /apis/envs/sandbox/v1/start_async",
        b'{"image": "x", "sandbox_id": "a\\r\\nb"}',
        b"application/json",
    ),
    "no_path": (b"OPTIONS *", b"", b"application/json"),
    "another_host": (b"GET http://127.0.0.1:1/metric", b"", b"application/json"),
    "two_slashes": (b"GET //127.0.0.1:1/metric", b"", b"application/json"),
    "fragment": (b"GET /metric#x", b"", b"application/json"),
    "wide_text": (b"POST /apis/envs/sandbox/v1/stop", '{"sandbox_id": "x"}'.encode("utf-16"), b"application/json"),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_requests_are_refused_as_such(server, name):
    assert 400 <= raw(server, *ODD[name]) < 500


HALVES = {
    "nothing": b"",
    "half_a_line": b"POST /apis",
    "half_the_headers": b"POST /apis HTTP/1.1\r\nHost: x\r\n",
    "half_a_body": f"POST {SANDBOX}/stop HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n".encode()
    + b"Content-Length: 100\r\n\r\n{",
    "half_a_body_of_a_stranger": b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{",
    "half_a_second": f"GET /metrics HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n\r\nGET".encode(),
    "line_ends": f"GET /metrics HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n\r\n\r\n".encode(),
}


@pytest.mark.parametrize("name", HALVES)
def test_half_requests_are_closed(server, name):
    with closing(send(server, HALVES[name])) as connection, connection.makefile("rb") as answer:
        answer.read()  # to the end of the connection; its own time-out is an error


def test_a_long_answer_is_waited_for(server, sandbox):
    told = server.result("/execute", sandbox_id=sandbox, command="sleep 6; echo well")  # longer than a request may take
    assert told["stdout"] == "well\n"
