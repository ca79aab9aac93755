"""Models and data sets of ModelScope: its own client, against a server that has the routes which that client asks for."""

import asyncio
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from antiphon.core.errors import ConfigError, DataError
from antiphon.core.modelscope import download, modelscope_id
from antiphon.run.launch.model_directory import WITHOUT_WEIGHTS, model_directory
from antiphon.tasks import sources

ROWS = [{"question": "1+1", "answer": "2"}, {"question": "2+2", "answer": "4"}]
FILES = {
    ("models", "owner/tiny"): {
        "config.json": b'{"model_type": "qwen3"}',
        "model.safetensors": b"\0" * 1000,
        "chat_template.jinja": b"{{ messages }}",
    },
    ("datasets", "owner/sums"): {
        "train.jsonl": "".join(json.dumps(row) + "\n" for row in ROWS).encode(),
        "test.jsonl": json.dumps(ROWS[0]).encode(),
        "README.md": b"# Sums\n",
    },
}


class Hub(BaseHTTPRequestHandler):
    asked: list[str] = []

    def do_GET(self):
        parts = urlsplit(self.path)
        self.asked.append(self.path)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        pieces = parts.path.split("/")  # /api/v1/KIND/OWNER/NAME/...
        kind, name, rest = pieces[3], "/".join(pieces[4:6]), "/".join(pieces[6:])
        files = FILES.get((kind, name))
        if files is None:
            return self._answer(404, {"Code": 10010205001, "Message": f"{name} is not there", "Success": False})
        if rest in ("repo/files", "repo/tree"):
            listed = [
                {
                    "Name": file,
                    "Path": file,
                    "Type": "blob",
                    "Size": len(content),
                    "Sha256": hashlib.sha256(content).hexdigest(),
                }
                for file, content in files.items()
            ]
            return self._answer(
                200, {"Code": 200, "Success": True, "Data": {"Files": listed, "TotalCount": len(listed)}}
            )
        if rest == "repo":
            return self._send(200, files[query["FilePath"]])
        return self._answer(200, {"Code": 200, "Success": True, "Data": {"RevisionMap": {"Branches": [], "Tags": []}}})

    do_HEAD = do_GET

    def _answer(self, status, content):
        self._send(status, json.dumps(content).encode())

    def _send(self, status, content):
        begin = 0
        if given := self.headers.get("Range"):
            begin, end = given.removeprefix("bytes=").split("-")
            begin, end = int(begin), int(end or len(content) - 1)
            content, size = content[begin : end + 1], len(content)
        self.send_response(206 if given else status)
        self.send_header("Content-Length", str(len(content)))
        if given:
            self.send_header("Content-Range", f"bytes {begin}-{begin + len(content) - 1}/{size}")
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *rest):
        pass


@pytest.fixture
def hub(monkeypatch, tmp_path):
    client = pytest.importorskip(
        "modelscope_hub", reason="modelscope-hub is not installed; it is in the extra `modelscope`"
    )
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("MODELSCOPE_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("MODELSCOPE_CACHE", str(tmp_path / "cache"))
        monkeypatch.setenv("MODELSCOPE_HOME", str(tmp_path / "home"))
        client.set_default_config(client.HubConfig())  # which it has read before
        Hub.asked.clear()
        yield Hub
        server.shutdown()


def content_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if not path.name.startswith(".")}


def test_a_model_is_downloaded_once(hub):
    first = download("owner/tiny", "model")
    assert content_of(first) == FILES["models", "owner/tiny"]
    asked = len([path for path in hub.asked if "FilePath=model.safetensors" in path])
    assert download("owner/tiny", "model") == first and asked == 1
    assert len([path for path in hub.asked if "FilePath=model.safetensors" in path]) == 1


async def _directory(weights):
    return await model_directory(None, "modelscope:owner/tiny", Path("/nowhere"), 0, weights=weights)  # type: ignore[arg-type]


def test_the_path_of_a_run_leads_there(hub):
    assert content_of(asyncio.run(_directory(weights=True))) == FILES["models", "owner/tiny"]


def test_a_plan_needs_no_weights(hub):
    found = content_of(download("owner/tiny", "model", WITHOUT_WEIGHTS))
    assert found.keys() == {"config.json", "chat_template.jinja"}
    assert not any("safetensors" in path for path in hub.asked if "FilePath" in path)


def test_rows_of_a_data_set(hub):
    assert list(sources.modelscope("train", "owner/sums")) == ROWS
    assert list(sources.modelscope("test", "owner/sums")) == ROWS[:1]


@pytest.mark.parametrize("kind", ["model", "dataset"])
def test_what_is_not_there_is_named(hub, kind):
    with pytest.raises(DataError) as error:
        download("owner/nothing", kind)
    assert error.value.path == "owner/nothing" and "ModelScope" in str(error.value)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("modelscope:owner/name", "owner/name"),
        ("modelscope:owner", ""),
        ("modelscope:function", ""),
        ("package.modelscope:owner/name", ""),
        ("modelscope:a/b/c", ""),
        ("owner/name", ""),
    ],
)
def test_paths(path, name):
    assert modelscope_id(path) == name


def test_a_data_set_has_an_owner_and_a_name():
    with pytest.raises(ConfigError) as error:
        list(sources.modelscope("train", "sums"))
    assert error.value.key == "path" and error.value.value == "sums"
