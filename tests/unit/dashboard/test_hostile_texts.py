"""Texts of models, prompts, graders and files are shown as text, whatever is in them."""

import json
import re
import sqlite3
from contextlib import closing
from html.parser import HTMLParser

import numpy as np
import pytest

from antiphon.dashboard.rendering import clean
from tests.unit.dashboard.sites import (
    change_tokens,
    copy_run,
    make_run,
    open_dashboard,
    wait_until_indexed,
    write_tokenizer,
)

HOSTILE = [
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "</script><script>alert(1)</script>",
    '"><svg onload=alert(1)>',
    "' onmouseover='alert(1)",
    "</div></article></main><h1>owned</h1>",
    "<iframe src=javascript:alert(1)></iframe>",
    '<a href="javascript:alert(1)">x</a>',
    "<style>*{display:none}</style>",
    "<link rel=stylesheet href=//evil.example/x.css>",
    "<meta http-equiv=refresh content=0;url=//evil.example>",
    "<base href=//evil.example>",
    "<form action=//evil.example><input name=token>",
    "<!-- ",
    "-->",
    "]]>",
    "<![CDATA[",
    "{{ 7 * 7 }}",
    "{% for x in y %}",
    "${7*7}",
    "&lt;script&gt;",
    "&#x3c;script&#x3e;",
    "\x1b[31mred\x1b[0m\x1b]0;title\x07",
    "\x1b[2J\x1b[H",
    "nul\x00byte",
    "\u202egnp.exe\u202c",
    "\u2066isolate\u2069",
    "\u0627\u0644\u0639\u0631\u0628\u064a\u0629",
    "zero\u200bwidth\ufeff",
    "a\u0301" + "\u0301" * 200,
    "line\u2028separator\u2029",
    "back\x08space\x7f",
    "<textarea>",
    "<plaintext>",
    '<noscript><p title="</noscript><img src=x onerror=alert(1)>">',
    '<math><mtext></mtext><mglyph><style><!--</style><img title="--&gt;&lt;img src=1 onerror=alert(1)&gt;">',
    "=cmd|' /C calc'!A0",
    "x" * 20_000,
]
# Elements that the templates write; anything else came from a text.
OURS = re.findall(
    r"\w+",
    "html head meta title link script body a header img span button main footer kbd nav form input select option label p "
    "div table thead tbody tr th td h1 h2 h3 code progress svg rect polyline polygon text section article aside dl dt dd "
    "bdi b small figure figcaption noscript details summary ul ol li mark pre",
)
INVISIBLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff]")


class Inspector(HTMLParser):
    """Collects what a browser would run or fetch."""

    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.problems, self.text = [], []

    def handle_starttag(self, tag, attrs):
        is_note = (tag, dict(attrs).get("name")) == ("textarea", "text")  # of the form of notes
        if tag not in OURS and not is_note:
            self.problems.append(f"element {tag}")
        for name, value in attrs:
            if name.startswith("on") or name in ("style", "srcdoc", "formaction", "ping", "http-equiv"):
                self.problems.append(f"attribute {name}")
            if name in ("href", "src", "action") and not (value or "").startswith(
                ("/", "#", "https://ui.perfetto.dev")
            ):
                self.problems.append(f"{name} {value}")
            if name in ("href", "src", "action") and (value or "").startswith("//"):
                self.problems.append(f"{name} {value}")

    def handle_comment(self, data):
        self.problems.append("a comment")

    def handle_data(self, data):
        self.text.append(data)


def inspect(text):
    found = Inspector()
    found.feed(text)
    found.close()
    assert found.problems == []
    assert INVISIBLE.findall(text) == []
    assert "49" not in re.findall(r"\{\{ 7 \* 7 \}\}|\b49\b", "".join(found.text)) or "{{ 7 * 7 }}" in "".join(
        found.text
    )
    return "".join(found.text)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    """A dashboard of a run in which every text is hostile, and the names of its attempts."""
    folder = tmp_path_factory.mktemp("runs")
    run = make_run(folder, "<img src=x onerror=alert(1)>")
    write_tokenizer(run, HOSTILE)
    change_tokens(run, lambda number, tokens: np.arange(len(tokens)) % len(HOSTILE))
    with closing(sqlite3.connect(run / "ledger.db")) as db:
        groups = [row[0] for row in db.execute("SELECT DISTINCT prompt FROM prompts")]
        for number, prompt in enumerate(groups):
            text = HOSTILE[number % len(HOSTILE)].replace("\0", "")
            values = (f"{number} {text}", HOSTILE[(number + 7) % len(HOSTILE)].replace("\0", ""), prompt)
            db.execute("UPDATE prompts SET id = ?, task = ? WHERE prompt = ?", values)
        db.execute("UPDATE attempts SET failure = ? WHERE failure IS NOT NULL", (HOSTILE[1],))
        db.execute("UPDATE lineages SET code = ?", (HOSTILE[0],))
        db.execute("UPDATE events SET detail = ? WHERE kind = 'end'", (json.dumps({"error": HOSTILE[3]}),))
        db.commit()
    names = {f"{text.replace(chr(0), '')[:100]}/x": 1.0 for text in HOSTILE}
    lines = [
        {"step": 1, "lineage": 0, "reward/mean": 0.5, **names},
        {"step": 2, "lineage": 0, "reward/mean": 0.7, **names},
    ]
    with (run / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write(
            "not json \x00\n[1]\n{}\n"
            + "".join(json.dumps(line | {"step": line["step"] + 50}) + "\n" for line in lines)
        )
    config = (run / "config.yaml").read_text().replace("path: simulated", f"path: {json.dumps(HOSTILE[2])}", 1)
    (run / "config.yaml").write_text(config)
    copy_run(run, folder, "copy")
    with open_dashboard(folder, tmp_path_factory.mktemp("cache")) as client:
        quoted = run.name.replace("<", "%3C").replace(">", "%3E").replace(" ", "%20")
        wait_until_indexed(client, quoted)
        page = client.get(f"/api/rollouts/{quoted}?status=trained").json()
        yield client, quoted, [row["id"] for row in page["rows"]]


def test_hostile_conversation_is_only_text(hostile):
    client, name, attempts = hostile
    for attempt in attempts[:12]:
        for color in ("", "logprob", "version"):
            shown = inspect(client.get(f"/attempt/{name}", params={"id": attempt, "color": color}).text)
            assert "<script>alert(1)</script>" in shown


@pytest.mark.parametrize(
    "path", ["/runs", "/run/{}", "/rollouts/{}", "/record/{}", "/timeline/{}", "/compare?run={}&run=copy"]
)
def test_hostile_run_is_only_text(hostile, path):
    client, name, _ = hostile
    answer = client.get(path.format(name))
    assert answer.status_code == 200
    assert "<img src=x onerror=alert(1)>" in inspect(answer.text)


def test_hostile_group_is_only_text(hostile):
    client, name, attempts = hostile
    group = attempts[0].split(":")[1].split(".")[0]
    inspect(client.get(f"/group/{name}", params={"group": group}).text)


@pytest.mark.parametrize("number", range(len(HOSTILE)))
def test_hostile_text_is_cleaned(number):
    shown = clean(HOSTILE[number])
    assert INVISIBLE.findall(shown) == []
    assert len(shown) < 110_000


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_search_and_filter_are_only_text(hostile, text):
    client, name, _ = hostile
    for path, key in ((f"/rollouts/{name}", "task"), (f"/rollouts/{name}", "q"), ("/runs", "q")):
        answer = client.get(path, params={key: text[:300]})
        assert answer.status_code in (200, 400)
        inspect(answer.text)


def test_hostile_error_is_only_text(hostile):
    client, name, _ = hostile
    for text in HOSTILE:
        answer = client.get(f"/attempt/{name}", params={"id": text[:300]})
        assert answer.status_code == 400
        inspect(answer.text)


def test_hostile_chart_is_only_text(hostile):
    client, name, _ = hostile
    for text in HOSTILE:
        metric = f"{text.replace(chr(0), '')[:100]}/x"
        answer = client.get(f"/svg/chart/{name}", params={"chart": metric})
        assert answer.status_code in (200, 400)
        assert not re.search(r"<(script|img|iframe|foreignObject|style|a)\b", answer.text)
        table = client.get(f"/csv/chart/{name}", params={"chart": metric})
        assert not any(line.startswith(("=", "+", "-", "@")) for line in table.text.splitlines()[1:])


def test_json_is_ascii_and_says_its_type(hostile):
    client, name, attempts = hostile
    answer = client.get(f"/api/attempt/{name}", params={"id": attempts[0]})
    assert answer.headers["content-type"] == "application/json"
    assert answer.content.isascii() and HOSTILE[0] in "".join(
        token["text"] for part in answer.json()["parts"] for token in part["tokens"]
    )
