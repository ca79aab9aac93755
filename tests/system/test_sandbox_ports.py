"""Ports of sandboxes as clients reach them: real programs in real sandboxes, of one service, of workers and of hosts."""

import asyncio
import base64
import json
import time
from contextlib import ExitStack, suppress

import httpx
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect as connect_sync

from tests.system.test_sandbox_service import SANDBOX, TOKEN, Server
from tests.system.test_sandbox_service_hosts import SMALL, fleet

pytestmark = pytest.mark.commands("bwrap")

# Servers of a kind that needs nothing but Python: HTTP that says what it was asked, bytes that come back, and a websocket
# that says what it was told, by the standard's own words (RFC 6455).
PROGRAM = r"""
import base64, hashlib, http.server, json, socket, struct, sys, threading, time

class Web(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def answer(self):
        if self.headers.get("Upgrade") == "websocket":
            return self.websocket()
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        text = "" if self.path == "/size" else body.decode("latin-1")
        said = [self.command, self.path, {name.lower(): text for name, text in self.headers.items()}, text, len(body)]
        if self.path == "/moved":
            self.send_response(302)
            self.send_header("Location", "/to/here?a=1")
            self.send_header("Content-Length", "0")
            self.end_headers()
        elif self.path == "/slow":
            self.send_response(200)
            self.end_headers()
            self.close_connection = True
            for part in (b"one", b"two"):
                self.wfile.write(part)
                self.wfile.flush()
                time.sleep(1)
        else:
            content = json.dumps(said).encode()
            self.send_response(418)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("Set-Cookie", "a=1")
            self.send_header("X-Own", "yes")
            self.end_headers()
            self.wfile.write(content if self.command != "HEAD" else b"")
    do_GET = do_POST = do_PUT = do_DELETE = do_PATCH = do_HEAD = do_OPTIONS = answer
    def websocket(self):
        key = self.headers["Sec-WebSocket-Key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
        accept = base64.b64encode(hashlib.sha1(key.encode()).digest()).decode()
        self.wfile.write(("HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            f"Sec-WebSocket-Accept: {accept}\r\n\r\n").encode())
        self.wfile.flush()
        while True:
            first, second = self.rfile.read(2)
            size = second & 127
            if size > 125:
                size = struct.unpack(">H" if size == 126 else ">Q", self.rfile.read(2 if size == 126 else 8))[0]
            mask, content = self.rfile.read(4), self.rfile.read(size)
            content = bytes(byte ^ mask[place % 4] for place, byte in enumerate(content))
            if first & 15 == 8 or content == b"bye":
                self.wfile.write(b"\x88\x02\x03\xe8")
                break
            content = self.path.encode() + b" " + content[::-1]
            self.wfile.write(bytes([first, len(content)]) + content)
            self.wfile.flush()
        self.close_connection = True
    def log_message(self, *rest):
        pass

def echo(client):
    with client:
        while (content := client.recv(65536)) and content != b"end":
            client.sendall(content)

def nonsense(client):
    with client:
        client.recv(10)
        client.sendall(b"no HTTP at all\r\n\r\n")

def serve(port, answer):
    server = socket.create_server(("127.0.0.1", port))
    while True:
        threading.Thread(target=answer, args=(server.accept()[0],), daemon=True).start()

for port in (8080, 9000):
    threading.Thread(target=http.server.ThreadingHTTPServer(("127.0.0.1", port), Web).serve_forever, daemon=True).start()
threading.Thread(target=serve, args=(7001, nonsense), daemon=True).start()
threading.Thread(target=serve, args=(7000, echo), daemon=True).start()
time.sleep(1000)
"""


@pytest.fixture(scope="module", params=["one", "workers", "hosts"])
def server(request):
    with ExitStack() as stack:
        if request.param == "hosts":
            made = stack.enter_context(fleet())[0]
        else:
            made = Server(*SMALL, *(["workers=2"] if request.param == "workers" else []))
            stack.callback(made.close)
        yield made
        assert made.end() == 0
        assert made.log.read_text() == ""
        assert made.left() == []


def start(server, program=PROGRAM, ready="(exec 3<>/dev/tcp/127.0.0.1/7000) 2>&-"):
    """Start a sandbox in which a program runs, which is ready once this command succeeds."""
    sandbox_id = server.start()
    server.result("/write_file", sandbox_id=sandbox_id, path="program.py", content=program)
    server.result("/create_session", sandbox_id=sandbox_id, session="s")
    command = f"python3 program.py & until {ready}; do sleep 0.1; done"
    server.result("/run_in_session", sandbox_id=sandbox_id, session="s", command=command)
    return sandbox_id


@pytest.fixture(scope="module")
def sandbox(server):
    return start(server)


def address(server, sandbox_id, rest):
    return f"{server.url.replace('http', 'ws', 1)}{SANDBOX}/sandboxes/{sandbox_id}/{rest}"


def opened(server, sandbox_id, rest, token=TOKEN, open_timeout=10, **more):
    headers = {"Authorization": f"Bearer {token}", **more}
    where, options = (
        address(server, sandbox_id, rest),
        {"compression": None, "proxy": None, "open_timeout": open_timeout},
    )
    return connect_sync(where, additional_headers=headers, **options)


def commands_under_way(server):
    found = [line for line in server.client.get("/metrics").text.splitlines() if "commands_in_flight" in line]
    return sum(float(line.rpartition(" ")[2]) for line in found if not line.startswith("#"))


def idle(server):
    """Wait until no command is under way."""
    while commands_under_way(server):
        time.sleep(0.02)
    return True


# --- bytes -------------------------------------------------------------------------------------------------------------


def test_bytes_go_there_and_back(server, sandbox):
    sent = bytes(range(256)) * 20_000  # more than pipes and sockets hold
    with opened(server, sandbox, "portforward?port=7000") as socket:
        assert commands_under_way(server) >= 1
        got = b""
        for begin in range(0, len(sent), 1 << 20):
            socket.send(sent[begin : begin + (1 << 20)])
            while len(got) < min(begin + (1 << 20), len(sent)):
                got += socket.recv()
        socket.send("as text")
        assert got == sent and socket.recv() == b"as text"
    assert idle(server)


def test_a_reader_that_stops_holds_its_program_back(server, sandbox):
    """What a program sends waits in the program, not in the service: 64 MiB to a client that reads none of it."""

    async def body():
        headers = {"Authorization": f"Bearer {TOKEN}"}
        place = address(server, sandbox, "portforward?port=7000")
        async with connect(place, additional_headers=headers, compression=None, proxy=None, max_queue=1) as socket:

            async def send():
                for _ in range(64):
                    await socket.send(b"x" * (1 << 20))

            sending = asyncio.create_task(send())
            done, _ = await asyncio.wait([sending], timeout=3)
            assert not done, "64 MiB are somewhere between"
            got = 0
            while got < 64 << 20:
                got += len(await socket.recv())
            await sending

    asyncio.run(body())


def test_either_side_can_end_it(server, sandbox):
    with opened(server, sandbox, "portforward?port=7000") as socket:
        socket.send(b"end")
        with pytest.raises(ConnectionClosed):
            socket.recv(timeout=20)
    with opened(server, sandbox, "portforward?port=7000") as socket:
        socket.send(b"hello")
        assert socket.recv() == b"hello"
    assert idle(server)
    said = server.result("/execute", sandbox_id=sandbox, command="ls /proc | grep -c '^[0-9]' ; ls /run/antiphon")
    assert ".to" not in said["stdout"] and ".back" not in said["stdout"]


def test_it_ends_with_its_sandbox(server):
    other = start(server)
    with opened(server, other, "portforward?port=7000") as socket:
        server.result("/stop", sandbox_id=other)
        with pytest.raises(ConnectionClosed):
            socket.recv(timeout=20)
    assert idle(server)


# --- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rest", "status", "said"),
    [
        ("portforward?port=7002", 422, "port 7002"),
        ("portforward?port=22", 400, "1024"),
        ("portforward?port=70000", 400, "65535"),
        ("portforward?port=x", 400, "'x'"),
        ("portforward", 400, "1024"),
        ("proxy/port/7002/x", 422, "port 7002"),
        ("proxy/port/7001/x", 422, "no websocket"),
    ],
)
def test_websockets_are_refused_with_the_reason(server, sandbox, rest, status, said):
    with pytest.raises(InvalidStatus) as refused, opened(server, sandbox, rest):
        pass
    response = refused.value.response
    assert response.status_code == status and said in json.loads(response.body)["error"]


def test_only_who_has_the_token_gets_there(server, sandbox):
    for rest in ("portforward?port=7000", "proxy/x"):
        for token, more, status in [("wrong", {}, 401), (TOKEN, {"Origin": "http://elsewhere.example"}, 403)]:
            with pytest.raises(InvalidStatus) as refused, opened(server, sandbox, rest, token, **more):
                pass
            assert refused.value.response.status_code == status
    path = f"{server.url}{SANDBOX}/sandboxes/{sandbox}/proxy/x"
    assert httpx.get(path).status_code == 401
    assert httpx.post(path, headers={**auth(), "Origin": "http://elsewhere.example"}).status_code == 403


def test_there_must_be_such_a_sandbox_and_it_must_run(server):
    stopped = server.start()
    server.result("/stop", sandbox_id=stopped)
    for name, status in (("nobody", 404), (stopped, 409)):
        with pytest.raises(InvalidStatus) as refused, opened(server, name, "portforward?port=7000"):
            pass
        assert refused.value.response.status_code == status
        assert httpx.get(f"{server.url}{SANDBOX}/sandboxes/{name}/proxy/", headers=auth()).status_code == status
    for place in ("/", "/metrics", f"{SANDBOX}/execute"):
        with pytest.raises(InvalidStatus) as refused:
            connect_sync(f"{server.url.replace('http', 'ws', 1)}{place}", additional_headers=auth(), proxy=None)
        assert refused.value.response.status_code == 404


# --- the proxy ---------------------------------------------------------------------------------------------------------


def auth():
    return {"Authorization": f"Bearer {TOKEN}"}


def ask(server, sandbox_id, rest, method="GET", headers=None, **more):
    path = f"{server.url}{SANDBOX}/sandboxes/{sandbox_id}/proxy{rest}"
    return httpx.request(method, path, headers={**auth(), **(headers or {})}, timeout=30, **more)


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_requests_reach_the_program_as_they_are(server, sandbox, method):
    content = b"" if method in ("GET", "DELETE", "OPTIONS") else bytes(range(256))
    answer = ask(
        server, sandbox, "/a%20b/c%2Fd?x=1&y=%26", method, {"X-Mine": "kept", "Cookie": "b=2"}, content=content
    )
    assert answer.status_code == 418 and answer.headers["x-own"] == "yes"
    got, path, headers, body, _ = answer.json()
    assert (got, path, body.encode("latin-1")) == (method, "/a%20b/c%2Fd?x=1&y=%26", content)
    assert headers["x-mine"] == "kept" and headers["host"] == "127.0.0.1:8080"


def test_neither_token_nor_cookies_get_there_or_back(server, sandbox):
    basic = base64.b64encode(f"rock:{TOKEN}".encode()).decode()
    for headers in ({}, {"XRL-Authorization": f"Bearer {TOKEN}", "Authorization": "Bearer of-the-program"}):
        answer = ask(server, sandbox, "/", headers={"Cookie": "b=2", **headers})
        got = answer.json()[2]
        assert TOKEN not in answer.text and basic not in answer.text and "cookie" not in got
        assert got.get("authorization") == (headers.get("Authorization") if headers else None)
        assert "set-cookie" not in answer.headers
    answer = httpx.get(f"{server.url.replace('//', f'//rock:{TOKEN}@')}{SANDBOX}/sandboxes/{sandbox}/proxy/")
    assert answer.status_code == 418 and basic not in answer.text


def test_a_page_has_an_origin_of_its_own(server, sandbox):
    assert ask(server, sandbox, "/").headers["content-security-policy"].startswith("sandbox ")
    assert "allow-same-origin" not in ask(server, sandbox, "/").headers["content-security-policy"]


def test_a_port_is_named_in_one_place(server, sandbox):
    assert ask(server, sandbox, "/x").json()[2]["host"].endswith(":8080")
    for rest, headers in [
        ("/port/9000/x", {}),
        ("/x", {"X-ROCK-Target-Port": "9000"}),
        ("/x?rock_target_port=9000", {}),
        ("/x?a=1&rock_target_port=9000", {}),
    ]:
        _, path, got, *_ = ask(server, sandbox, rest, headers=headers).json()
        assert got["host"].endswith(":9000") and path == ("/x?a=1" if "a=1" in rest else "/x")
    assert ask(server, sandbox, "/port/9000/x", headers={"X-ROCK-Target-Port": "9000"}).status_code == 400
    assert ask(server, sandbox, "/port/80/x").status_code == 400


def test_redirections_lead_through_the_proxy(server, sandbox):
    moved = ask(server, sandbox, "/port/9000/moved")
    assert moved.status_code == 302
    assert moved.headers["location"] == f"{SANDBOX}/sandboxes/{sandbox}/proxy/port/9000/to/here?a=1"
    assert httpx.get(server.url + moved.headers["location"], headers=auth()).json()[1] == "/to/here?a=1"


def test_an_answer_comes_as_it_is_made(server, sandbox):
    path = f"{server.url}{SANDBOX}/sandboxes/{sandbox}/proxy/slow"
    with httpx.stream("GET", path, headers=auth(), timeout=30) as answer:
        parts = answer.iter_raw()
        assert next(parts) == b"one"
        assert commands_under_way(server) >= 1  # it is not over
        assert b"".join(parts) == b"two"
    with suppress(httpx.ReadTimeout), httpx.stream("GET", path, headers=auth(), timeout=0.2):
        pass  # a client that leaves
    assert idle(server)


def test_what_is_no_http_is_refused(server, sandbox):
    for port, said in ((7001, "HTTP"), (7002, "listens"), (7000, "HTTP")):
        answer = ask(server, sandbox, f"/port/{port}/")
        assert answer.status_code == 422 and f"port {port}" in answer.json()["error"] and said in answer.json()["error"]
    plain = httpx.get(f"{server.url}{SANDBOX}/sandboxes/{sandbox}/portforward?port=7000", headers=auth())
    assert plain.status_code == 400
    assert ask(server, sandbox, "/", "POST", content=b"x" * ((65 << 20) + 1)).status_code == 413


def test_websockets_reach_the_program(server, sandbox):
    with opened(server, sandbox, "proxy/port/9000/chat?a=1") as socket:
        socket.send("abc")
        assert socket.recv() == "/chat?a=1 cba"
        socket.send(b"\x00\x01")
        assert socket.recv() == b"/chat?a=1 \x01\x00"
        socket.send("bye")
        with pytest.raises(ConnectionClosed):
            socket.recv(timeout=20)
    assert idle(server)


# --- programs and clients that mean harm -------------------------------------------------------------------------------

# What a hostile program answers to any request at its port.
ANSWERS = {
    "an address that is none": b"HTTP/1.1 302 Found\r\nLocation: http://[::1\r\nContent-Length: 0\r\n\r\n",
    "a strange status": b"HTTP/1.1 999 Odd\r\nContent-Length: 0\r\n\r\n",
    "two lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nabcde\r\n0\r\n\r\n",
    "less than it says": b"HTTP/1.1 200 OK\r\nContent-Length: 30\r\n\r\nabc",
    "another place for a websocket": b"HTTP/1.1 302 Found\r\nLocation: ws://[::1/x\r\nContent-Length: 0\r\n\r\n",
    "what holds for a whole site": b'HTTP/1.1 200 OK\r\nClear-Site-Data: "*"\r\nStrict-Transport-Security: max-age=9\r\n'
    b"WWW-Authenticate: Basic\r\nContent-Length: 0\r\n\r\n",
}
HOSTILE = f"""
import socket, threading, time
def answering(answer):
    def serve(client):
        with client:
            client.recv(65536)
            client.sendall(answer)
    return serve
def pinging(client):  # a websocket that pings and reads no pong
    head = client.recv(65536)
    import base64, hashlib, re
    key = re.search(rb"Sec-WebSocket-Key: (.*?)\\r", head, re.I)[1] + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
    accept = base64.b64encode(hashlib.sha1(key).digest())
    client.sendall(b"HTTP/1.1 101 S\\r\\nUpgrade: websocket\\r\\nConnection: Upgrade\\r\\n")
    client.sendall(b"Sec-WebSocket-Accept: " + accept + b"\\r\\n\\r\\n")
    while True:
        client.sendall((b"\\x89\\x7d" + b"p" * 125) * 500)
def reads_nothing(client):
    time.sleep(1000)
def counting(client):  # slowly, so that much waits on the way
    got = 0
    with client:
        while content := client.recv(65536):
            got += len(content)
            time.sleep(0.02)
            open("/tmp/got", "w").write(str(got))
def listen(port, serve, backlog=100):
    server = socket.create_server(("127.0.0.1", port), backlog=backlog)
    while serve is not None:
        threading.Thread(target=serve, args=(server.accept()[0],), daemon=True).start()
    time.sleep(1000)
serving = [answering(answer) for answer in {list(ANSWERS.values())!r}] + [pinging, reads_nothing, counting, None]
for number, serve in enumerate(serving):
    threading.Thread(target=listen, args=(7100 + number, serve, 100 if serve else 0), daemon=True).start()
time.sleep(0.2)
open("/tmp/ready", "w").close()
time.sleep(1000)
"""
PINGING, READS_NOTHING, COUNTING, TAKES_NONE = range(7100 + len(ANSWERS), 7104 + len(ANSWERS))


@pytest.fixture(scope="module")
def hostile(server):
    return start(server, HOSTILE, "[ -e /tmp/ready ]")


def test_hostile_answers_break_nothing(server, hostile):
    found = {}
    for number, name in enumerate(ANSWERS):
        try:
            answer = ask(server, hostile, f"/port/{7100 + number}/")
            found[name] = answer.status_code, answer.text if answer.status_code == 200 else ""
            assert not {"clear-site-data", "strict-transport-security", "www-authenticate"} & answer.headers.keys()
        except httpx.RemoteProtocolError:
            found[name] = "cut"
        with pytest.raises(InvalidStatus) as refused, opened(server, hostile, f"proxy/port/{7100 + number}/"):
            pass
        assert refused.value.response.status_code == 422
    assert found == {
        "an address that is none": (302, ""),
        "a strange status": (422, ""),
        "two lengths": (200, "abcde"),
        "less than it says": "cut",
        "another place for a websocket": (302, ""),
        "what holds for a whole site": (200, ""),
    }
    assert ask(server, hostile, "/port/7100/", "CONNECT").status_code == 405


def test_pongs_that_nobody_reads_are_bounded(server, hostile):
    """The service ends such a connection before the pongs take more than a connection may."""
    with opened(server, hostile, f"proxy/port/{PINGING}/") as socket, pytest.raises(ConnectionClosed):
        socket.recv(timeout=60)
    assert idle(server)


def test_a_client_that_leaves_frees_its_place(server, hostile):
    """Also while its program takes no connection."""
    for _ in range(4):  # of which the kernel takes some by itself
        with suppress(TimeoutError, InvalidStatus):
            opened(server, hostile, f"portforward?port={TAKES_NONE}", open_timeout=0.3).close()
    assert idle(server)


def test_what_was_sent_before_the_end_arrives(server, hostile):
    with opened(server, hostile, f"portforward?port={COUNTING}") as socket:
        for _ in range(128):  # more than a connection inside the sandbox holds
            socket.send(b"x" * (1 << 16))
    command = f'until [ "$(cat /tmp/got)" = {128 << 16} ]; do sleep 0.05; done'
    assert server.post("/execute", sandbox_id=hostile, command=command, timeout=20).json()["status"] == "Success"


def test_large_requests_pass(server, sandbox):
    answer = ask(server, sandbox, "/port/9000/size", "POST", content=b"x" * (20 << 20))
    assert answer.status_code == 418 and answer.json()[4] == 20 << 20


def test_a_connection_may_last_longer_than_a_request():
    """And the service ends in order while clients are connected, one of which has begun to close and reads nothing."""
    made = Server(*SMALL, "request_seconds=1")
    try:
        with opened(made, start(made), "portforward?port=7000") as socket:
            for number in range(4):
                time.sleep(0.5)  # longer in all than a request may take to arrive
                socket.send(f"{number}")
                assert socket.recv() == f"{number}".encode()
            assert made.end() == 0
        assert "Traceback" not in made.log.read_text()
    finally:
        made.close()
