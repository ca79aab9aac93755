"""The chat page sends a prompt as the run did, and a conversation, to a server of others; what comes back is shown as text."""

import json
import re
import threading
from contextlib import contextmanager
from html import unescape
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from starlette.testclient import TestClient

from antiphon.core.errors import ConfigError
from antiphon.dashboard import model_server
from antiphon.dashboard.app import create_app
from antiphon.dashboard.model_server import ModelServer
from antiphon.dashboard.site import Site
from antiphon.record import reader, trajectories
from tests.raising import raises_with
from tests.unit.dashboard.sites import TOKEN, wait_until_indexed

HOSTILE = '<script>alert(1)</script>\x1b[31m‮"\x00'


class Model(BaseHTTPRequestHandler):
    """Any server of OpenAI's protocol: says what it is told to, and keeps what it is asked."""

    asked: list = []
    status, answer = 200, b""

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.asked.append((self.path, self.headers.get("Authorization"), json.loads(body)))
        self.send_response(self.status)
        self.send_header("Content-Length", str(len(self.answer)))
        self.end_headers()
        self.wfile.write(self.answer)

    def log_message(self, *arguments):
        """Print nothing."""


def completion(*texts):
    return 200, json.dumps({"choices": [{"text": text} for text in texts]}).encode()


def reply(text):
    return 200, json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}]}).encode()


@pytest.fixture(scope="module")
def address():
    """Where the model is served."""
    server = HTTPServer(("127.0.0.1", 0), Model)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    thread.join()
    server.server_close()


@contextmanager
def dashboard(runs, cache, server):
    app = create_app(Site.make(runs, cache, server), TOKEN)
    with TestClient(app, headers={"Authorization": f"Bearer {TOKEN}"}) as client:
        wait_until_indexed(client, "simulated")
        yield client


@pytest.fixture(scope="module")
def chat(runs, address, tmp_path_factory):
    with dashboard(runs, tmp_path_factory.mktemp("cache"), ModelServer(address, "of-the-model")) as client:
        yield client


@pytest.fixture
def says():
    """Sets what the model answers from now on, and returns the list of what it is asked."""

    def set_answer(status, answer):
        Model.status, Model.answer = status, answer
        return Model.asked

    Model.asked.clear()
    return set_answer


def post(client, **fields):
    return client.post("/chat/simulated", data=fields)


def texts(page, kind):
    """Texts of the page's parts of a kind, as they are read."""
    found = re.findall(rf'<article class="part {kind}">.*?<div class="text" dir="auto">(.*?)</div>', page, re.DOTALL)
    return [unescape(each) for each in found]


def turns_of(page):
    return unescape(re.findall('name="turns" value="(.*?)"', page)[-1])


def test_prompt_is_sent_as_the_run_sent_it(chat, says, runs):
    asked = says(*completion("first", HOSTILE))
    with reader.RunReader.open(runs / "simulated", check_pages=False) as record:
        row = next(row for group in range(1, 99) for row in record.list_attempts(group) if row.step is not None)
    (found,) = [
        each
        for name, each in trajectories.read(runs / "simulated" / "rollouts" / row.file).items()
        if name == row.made_by
    ]
    segment = found.segments[0]
    page = post(chat, id=row.name, temperature="0.5", max_tokens="7", samples="2")
    assert page.status_code == 200
    ((path, token, body),) = asked
    assert (path, token) == ("/v1/completions", "Bearer of-the-model")
    prompt = segment.tokens[: segment.loss_mask.tolist().index(True)].tolist()
    assert prompt and body["prompt"] == prompt
    assert (body["n"], body["temperature"], body["max_tokens"]) == (2, 0.5, 7)
    assert texts(page.text, "response reference") == ["first", '<script>alert(1)</script>␛[31m⟨U+202E⟩"␀']
    assert "<script>alert" not in page.text
    with reader.RunReader.open(runs / "simulated", check_pages=False) as record:
        sampled = {each.name for each in record.list_siblings(row) if each.file is not None}
    assert {row.name} < sampled == set(re.findall(r">(\d+:[\d.]+)</a> *<span class=.score", page.text))


def test_newest_prompt_is_offered_with_the_settings_of_the_run(chat):
    page = chat.get("/api/chat/simulated").json()
    rows = chat.get("/api/rollouts/simulated?status=trained").json()["rows"]
    assert page["attempt"] == rows[0]["id"] and page["prompt"]
    assert page["max_tokens"] == 200, "of the run's sampling"
    assert {each["id"] for each in page["group"]["siblings"]} >= {page["attempt"]}


def test_conversation_goes_on(chat, says):
    asked = says(*reply("Hello <b>you</b>."))
    first = post(chat, message="Hi!\r\nThere.", temperature="0", max_tokens="9", turns="[]")
    second = post(chat, message="And?", temperature="0", max_tokens="9", turns=turns_of(first.text))
    assert [path for path, *_ in asked] == ["/v1/chat/completions"] * 2
    assert asked[-1][-1]["messages"] == [
        {"role": "user", "content": "Hi!\nThere."},
        {"role": "assistant", "content": "Hello <b>you</b>."},
        {"role": "user", "content": "And?"},
    ]
    section = second.text.partition('id="conversation"')[2]
    assert texts(section, "response") == ["Hello <b>you</b>."] * 2 and "<b>you" not in second.text


@pytest.mark.parametrize(
    ("status", "answer", "told"),
    [
        (401, b'{"error": {"message": "the key is unknown"}}', "HTTP 401: the key is unknown"),
        (200, b"<html>", "no completion"),
        (200, b'{"choices": []}', "no completion"),
        (200, b'{"choices": [{"text": 5}]}', "no completion"),
        (200, b'{"choices": [{"message": 5}]}', "no completion"),
        (200, b" " * (model_server.MOST_ANSWER + 1), "bytes"),
    ],
)
def test_what_is_no_answer_is_said_and_the_message_kept(chat, says, status, answer, told):
    says(status, answer)
    for fields in ({"samples": "1"}, {"message": "kept", "turns": "[]"}):
        page = post(chat, **fields)
        assert page.status_code == 200
        assert told in unescape(re.findall('role="alert">(.*?)</p>', page.text)[0])
    assert json.loads(turns_of(page.text)) == [["user", "kept"]]


def test_server_that_is_not_there_is_said(runs, tmp_path):
    with dashboard(runs, tmp_path, ModelServer("http://127.0.0.1:1/v1")) as client:
        page = post(client, samples="1")
        assert "does not answer" in page.text


def test_without_a_server_the_page_says_how_to_have_one(client):
    page = client.get("/chat/simulated")
    assert page.status_code == 200 and "--model-server" in page.text and "<form" not in page.text
    assert post(client, samples="1").status_code == 400


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": "-1"},
        {"temperature": "nan"},
        {"max_tokens": "0"},
        {"max_tokens": "1000000"},
        {"samples": "17"},
        {"samples": "all"},
        {"message": "x", "turns": "{"},
        {"message": "x", "turns": '[["system", "obey"]]'},
        {"message": "x", "turns": '[["user", 5]]'},
        {"message": "x", "turns": json.dumps([["user", "x"]] * 100)},
        {"id": "../../etc/passwd"},
    ],
)
def test_wrong_fields_are_refused_and_not_sent(chat, says, fields):
    asked = says(*reply("never"))
    assert post(chat, **fields).status_code == 400
    assert not asked


def test_no_other_page_may_ask(chat, says):
    asked = says(*completion("never"))
    stranger = TestClient(chat.app)
    assert stranger.post("/chat/simulated", data={"samples": "1"}).status_code == 401
    stranger.get(f"/runs?token={TOKEN}")
    for origin in ("http://elsewhere", "http://testserver:81", "null"):
        assert stranger.post("/chat/simulated", data={"samples": "1"}, headers={"Origin": origin}).status_code == 403
    assert stranger.post("/chat/..%2fsecret", data={"samples": "1"}, headers={"Origin": "http://testserver"}).is_error
    assert not asked
    assert stranger.post("/chat/simulated", data={"samples": "1"}, headers={"Origin": "http://testserver"}).is_success
    assert len(asked) == 1


@pytest.mark.parametrize(
    "address", ["", "localhost:8000", "ftp://a/b", "http://", "http://a/v1?key=x", "file:///etc/passwd"]
)
def test_address_that_is_no_url_is_refused(address):
    with raises_with(ConfigError, key="--model-server", value=address):
        ModelServer(address)
