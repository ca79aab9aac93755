"""The model service of an agent in a sandbox: a program for any Python from 3.8 on, with the standard library alone.

It listens at 127.0.0.1 as an OpenAI-compatible server, appends each request to a log file, and waits until the other side has
appended the response. The lines of the file have the format of ROCK's model service (rl-rock 1.11):

    LLM_REQUEST_START{request}LLM_REQUEST_END{"timestamp": 1700000000000, "index": 1}
    LLM_RESPONSE_START{response}LLM_RESPONSE_END{"timestamp": 1700000000000, "index": 1, "status": 200}
    LLM_REQUEST_CANCELLED{"index": 1}
    SESSION_END{"exit_code": 0}

The status, the exit code and the line of a client that has disconnected are extensions, which ROCK's programs ignore. A marker
in a request or response is written with an escape of JSON, because ROCK's programs search for markers in the whole line.

Commands, each with the directory of the log file as its next argument:

    start             run the agent that the file of settings describes; return once the server listens
    read FROM SECONDS print what was appended after byte FROM, as soon as there is something, or after the time
    append NAME       append the content of a file to the log file, and remove that file
    output            print the end of what the agent and the service have written
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LOG, SETTINGS, LOCK = "LLMService.log", "agent.json", "lock"
STDOUT, STDERR, ERRORS = "stdout", "stderr", "service.err"
REQUEST = ("LLM_REQUEST_START", "LLM_REQUEST_END")
RESPONSE = ("LLM_RESPONSE_START", "LLM_RESPONSE_END")
CANCELLED = "LLM_REQUEST_CANCELLED"
SESSION_END = "SESSION_END"
MARKERS = (*REQUEST, *RESPONSE, CANCELLED, SESSION_END)

LONGEST_LINE = 16 << 20  # bytes
MOST_READ = 1 << 19  # bytes that one `read` prints, in base64 at most 1 MiB
MOST_OUTPUT = 1 << 16  # bytes of each file that `output` prints
SHORTEST_PAUSE, LONGEST_PAUSE = 0.005, 0.1  # seconds between two looks at the log file
CHECK_SECONDS = 0.5  # between two looks whether a client has disconnected
PING_SECONDS = 10.0  # between signs of life in a stream; clients give up after a minute of silence

_DECODER = json.JSONDecoder()


# --- the format --------------------------------------------------------------------------------------------------------


def format_line(markers: tuple[str, str], body: Any, meta: dict[str, Any]) -> str:
    """Return the line of a request or response, in ASCII."""
    text = json.dumps(body)
    for marker in MARKERS:
        text = text.replace(marker, f"\\u{ord(marker[0]):04x}{marker[1:]}")
    return f"{markers[0]}{text}{markers[1]}{json.dumps(meta)}\n"


def parse_line(markers: tuple[str, str], line: str) -> tuple[Any, int, dict[str, Any]] | None:
    """Return body, index and metadata of the line of a request or response; None for any other line.

    The body is None if it cannot be read. Markers in the body are part of it.
    """
    if not line.startswith(markers[0]):
        return None
    text = line[len(markers[0]) :]
    try:
        body, end = _DECODER.raw_decode(text)
    except (ValueError, RecursionError):
        body, end = None, text.rfind(markers[1])
    if end < 0 or not text.startswith(markers[1], end):
        return None
    meta = _parse_object(text[end + len(markers[1]) :])
    index = meta.get("index")
    return (body, index, meta) if type(index) is int else None


def parse_number(line: str, marker: str, name: str) -> int | None:
    """Return the number that a line with only metadata has under a name; None for any other line."""
    number = _parse_object(line[len(marker) :]).get(name) if line.startswith(marker) else None
    return number if type(number) is int else None


def _parse_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


class LineSplitter:
    """Splits bytes that arrive in parts into lines. A line that is too long is dropped."""

    def __init__(self) -> None:
        self._partial = bytearray()
        self._dropping = False

    def split(self, content: bytes) -> Iterator[str]:
        """Yield the lines that `content` completes."""
        *lines, rest = content.split(b"\n")
        for line in lines:
            self._extend(line)
            if not self._dropping:
                yield self._partial.decode("utf-8", "replace")
            self.clear()
        self._extend(rest)

    def clear(self) -> None:
        """Forget the beginning of a line."""
        self._partial.clear()
        self._dropping = False

    def _extend(self, content: bytes) -> None:
        self._dropping = self._dropping or len(self._partial) + len(content) > LONGEST_LINE
        if self._dropping:
            self._partial.clear()
        else:
            self._partial += content


# --- the log file ------------------------------------------------------------------------------------------------------


def append_to_log(directory: str, content: bytes) -> None:
    """Append to the log file, in one call of the system if that writes everything."""
    descriptor = os.open(os.path.join(directory, LOG), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        while content:
            content = content[os.write(descriptor, content) :]
    finally:
        os.close(descriptor)


def read_log(directory: str, begin: int) -> tuple[int, bytes]:
    """Return bytes of the log file from `begin`, and where they begin: at 0 if the file has become shorter than that."""
    try:
        with open(os.path.join(directory, LOG), "rb") as file:
            begin = 0 if file.seek(0, os.SEEK_END) < begin else begin
            file.seek(begin)
            return begin, file.read(MOST_READ)
    except FileNotFoundError:  # ROCK's service removes it when it starts
        return 0, b""


def is_running(directory: str) -> bool:
    """Return True if the service runs: it has a lock as long as it does."""
    try:
        descriptor = os.open(os.path.join(directory, LOCK), os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


# --- the server --------------------------------------------------------------------------------------------------------


class RefusedError(Exception):
    """A request that is answered with an error: HTTP status and message."""


class Calls:
    """Model calls under way."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._changed = threading.Condition()
        self._waiting: dict[int, tuple[int, Any] | None] = {}  # index -> status and response, once there is one
        self._count = 0

    def ask(self, body: dict[str, Any]) -> int:
        """Append a request to the log file, and return its index."""
        with self._changed:
            meta = {"timestamp": int(time.time() * 1000), "index": self._count + 1}
            line = format_line(REQUEST, body, meta).encode("ascii")
            if len(line) > LONGEST_LINE:
                raise RefusedError(413, f"the request is larger than {LONGEST_LINE} bytes")
            self._count += 1
            self._waiting[self._count] = None
            append_to_log(self._directory, line)
            self._changed.notify_all()
            return self._count

    def wait(self, index: int, seconds: float) -> tuple[int, Any] | None:
        """Return status and body of a response; None if there is none after the time."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting[index] is not None, seconds)
            return self._waiting[index]

    def forget(self, index: int) -> None:
        """End a call; if it has no response yet, nobody waits for it any more."""
        with self._changed:
            if self._waiting.pop(index) is None:
                append_to_log(self._directory, f'{CANCELLED}{{"index": {index}}}\n'.encode("ascii"))

    def deliver_responses(self) -> None:
        """Read the log file while calls wait for their responses, for ever."""
        lines, position, pause = LineSplitter(), 0, SHORTEST_PAUSE
        while True:
            with self._changed:
                self._changed.wait_for(lambda: None in self._waiting.values())
            begin, content = read_log(self._directory, position)
            if begin != position:
                lines.clear()
            position = begin + len(content)
            for line in lines.split(content):
                self._deliver(line)
            pause = SHORTEST_PAUSE if content else min(2 * pause, LONGEST_PAUSE)
            time.sleep(pause)

    def _deliver(self, line: str) -> None:
        found = parse_line(RESPONSE, line)
        if found is None:
            return
        body, index, meta = found
        status = meta.get("status", 200)
        with self._changed:
            if index in self._waiting:
                self._waiting[index] = (status if type(status) is int and 200 <= status < 600 else 502, body)
                self._changed.notify_all()


class Server(ThreadingHTTPServer):
    """Answers each connection in a thread of its own."""

    daemon_threads = True
    request_queue_size = 1024


class Handler(BaseHTTPRequestHandler):
    """Answers the requests of one connection."""

    protocol_version = "HTTP/1.1"
    calls: Calls

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""

    def do_GET(self) -> None:
        """Answer what models there are, and that the service runs."""
        model = {"id": "policy", "object": "model", "created": 0, "owned_by": "antiphon"}
        known = {"/health": {"status": "healthy"}, "/v1/models": {"object": "list", "data": [model]}}
        path = self.path.partition("?")[0]
        self._send(*((200, known[path]) if path in known else (404, make_error(404, f"there is no {path}"))))

    def do_POST(self) -> None:
        """Answer a chat completion."""
        try:
            body = self._read_body()
            index = self.calls.ask(body)
        except RefusedError as error:
            self.close_connection = True  # the body may be unread
            self._send(error.args[0], make_error(*error.args))
            return
        try:
            if body.get("stream") is True:
                self._stream(index, body)
            elif (response := self._await_response(index)) is not None:
                self._send(*response)
        except ConnectionError:
            self.close_connection = True
        finally:
            self.calls.forget(index)

    def _read_body(self) -> dict[str, Any]:
        if self.path.partition("?")[0] not in ("/v1/chat/completions", "/chat/completions"):
            raise RefusedError(404, f"there is no {self.path}; model calls go to /v1/chat/completions")
        length = self.headers.get("Content-Length", "")
        if not length.isdigit():
            raise RefusedError(411, "a request needs a Content-Length")
        if int(length) > LONGEST_LINE:
            raise RefusedError(413, f"the request is larger than {LONGEST_LINE} bytes")
        try:
            body = json.loads(self.rfile.read(int(length)))
        except (ValueError, RecursionError) as error:
            raise RefusedError(400, f"the request is no JSON: {error}") from error
        if not isinstance(body, dict):
            raise RefusedError(400, "the request is no JSON object")
        return body

    def _await_response(self, index: int, ping: bytes = b"") -> tuple[int, Any] | None:
        """Return status and body of a response; None if the client has disconnected."""
        pinged = time.monotonic()
        while True:
            response = self.calls.wait(index, CHECK_SECONDS)
            if response is not None:
                return response
            if self._is_disconnected():
                self.close_connection = True
                return None
            if ping and time.monotonic() - pinged > PING_SECONDS:
                self.wfile.write(ping)
                pinged = time.monotonic()

    def _is_disconnected(self) -> bool:
        ready, _, _ = select.select([self.connection], [], [], 0)
        return bool(ready) and self.connection.recv(1, socket.MSG_PEEK) == b""

    def _stream(self, index: int, body: dict[str, Any]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        response = self._await_response(index, b": ping\n\n")
        if response is None:
            return
        options = body.get("stream_options")
        usage = isinstance(options, dict) and options.get("include_usage") is True
        for chunk in stream_chunks(*response, usage=usage):
            self.wfile.write(b"data: " + json.dumps(chunk).encode("ascii") + b"\n\n")
        self.wfile.write(b"data: [DONE]\n\n")

    def _send(self, status: int, body: Any) -> None:
        content = json.dumps(body).encode("ascii")
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Connection", "close" if self.close_connection else "keep-alive")
        self.end_headers()
        self.wfile.write(content)


def make_error(status: int, message: str) -> dict[str, Any]:
    """Return the body of an error in OpenAI's form."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}


def stream_chunks(status: int, response: Any, *, usage: bool) -> Iterator[Any]:
    """Yield the chunks of a stream for a complete response, or the one of an error."""
    if status != 200 or not isinstance(response, dict) or not isinstance(response.get("choices"), list):
        yield response if isinstance(response, dict) and "error" in response else make_error(502, "no completion")
        return
    head = {name: response.get(name) for name in ("id", "created", "model")}
    head["object"] = "chat.completion.chunk"
    for number, choice in enumerate(response["choices"]):
        message = choice["message"]
        delta = {"role": "assistant", "content": message.get("content") or ""}
        if message.get("tool_calls"):
            delta["tool_calls"] = [{"index": at, **call} for at, call in enumerate(message["tool_calls"])]
        place = {"index": choice.get("index", number)}
        first = {**place, "delta": delta, "logprobs": choice.get("logprobs"), "finish_reason": None}
        last = {**place, "delta": {}, "logprobs": None, "finish_reason": choice.get("finish_reason")}
        yield {**head, "choices": [first]}
        yield {**head, "choices": [last]}
    if usage:
        yield {**head, "choices": [], "usage": response.get("usage")}


# --- commands ----------------------------------------------------------------------------------------------------------


def start(directory: str) -> None:
    """Start the server and the agent in a process of their own."""
    with open(os.path.join(directory, SETTINGS), encoding="utf-8") as file:
        settings = json.load(file)
    Handler.calls = Calls(directory)
    server = Server(("127.0.0.1", 0), Handler)
    append_to_log(directory, b"")
    lock = os.open(os.path.join(directory, LOCK), os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    if os.fork():
        os._exit(0)
    os.setsid()
    _redirect_streams(os.path.join(directory, ERRORS))
    for work in (server.serve_forever, Handler.calls.deliver_responses):
        threading.Thread(target=work, daemon=True).start()
    code = _run_agent(directory, settings, server.server_address[1])
    append_to_log(directory, f'{SESSION_END}{{"exit_code": {code}}}\n'.encode("ascii"))


def _redirect_streams(path: str) -> None:
    nothing, errors = os.open(os.devnull, os.O_RDWR), os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for target, source in enumerate((nothing, errors, errors)):
        os.dup2(source, target)


def _run_agent(directory: str, settings: dict[str, Any], port: int) -> int:
    """Run the agent's command, and return its exit code."""
    added = {
        "OPENAI_BASE_URL": f"http://127.0.0.1:{port}/v1",
        "OPENAI_API_KEY": "none-is-needed",
        "NO_PROXY": "127.0.0.1",
        "no_proxy": "127.0.0.1",
        "ROCK_MODEL_SERVICE_DATA_DIR": directory,
        **settings["environment"],
    }
    with open(os.path.join(directory, STDOUT), "wb") as out, open(os.path.join(directory, STDERR), "wb") as err:
        command = ["env", *(f"{name}={value}" for name, value in added.items()), "bash", "-c", settings["command"]]
        return subprocess.call(command, stdin=subprocess.DEVNULL, stdout=out, stderr=err)


def read(directory: str, begin: str, seconds: str) -> None:
    """Print what was appended, as soon as there is something; `running` is False if no more can come from the service."""
    end, pause, first = time.monotonic() + float(seconds), SHORTEST_PAUSE, int(begin)
    while True:
        running = is_running(directory)  # its last line was appended before it ended
        at, content = read_log(directory, first)
        if content or not running or time.monotonic() >= end:
            break
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)
    _print({"begin": at, "content": base64.b64encode(content).decode("ascii"), "running": running})


def append(directory: str, name: str) -> None:
    """Append the content of a file to the log file."""
    path = os.path.join(directory, name)
    with open(path, "rb") as file:
        append_to_log(directory, file.read())
    os.unlink(path)


def output(directory: str) -> None:
    """Print the end of each output file."""
    _print({name: _read_end(os.path.join(directory, name)) for name in (STDOUT, STDERR, ERRORS)})


def _read_end(path: str) -> str:
    try:
        with open(path, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - MOST_OUTPUT))
            return base64.b64encode(file.read(MOST_OUTPUT)).decode("ascii")
    except FileNotFoundError:
        return ""


def _print(fields: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")


def main(arguments: list[str]) -> None:
    """Run a command."""
    commands: dict[str, Callable[..., None]] = {"start": start, "read": read, "append": append, "output": output}
    commands[arguments[0]](*arguments[1:])


if __name__ == "__main__":
    main(sys.argv[1:])
