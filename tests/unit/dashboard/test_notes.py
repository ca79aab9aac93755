"""Notes and tags: written by the page's own form into one file, and by nobody else's."""

import json
import os

import pytest

from antiphon.core.errors import ConfigError, RecordError
from antiphon.inspect.audit import audit
from antiphon.inspect.recorded_run import open_run
from antiphon.record.notes import FILE, MOST_TEXT, Notes, read_notes, write_notes
from tests.raising import raises_with
from tests.unit.dashboard.sites import TOKEN, copy_run, open_dashboard

FORM = {"tags": "good, baseline , good,", "text": "First line.\r\nSecond."}


@pytest.fixture(scope="module")
def folder(runs, tmp_path_factory):
    """Two runs without notes; each test that writes removes them."""
    found = tmp_path_factory.mktemp("noted")
    for name in ("one", "two"):
        copy_run(runs / "simulated", found, name)
    return found


@pytest.fixture(scope="module")
def dashboard(folder, tmp_path_factory):
    with open_dashboard(folder, tmp_path_factory.mktemp("cache")) as found:
        yield found


@pytest.fixture
def browser(dashboard, folder):
    """A client that has the token as browsers have it, and leaves no notes behind."""
    before = dict(dashboard.headers)
    dashboard.headers.pop("Authorization")
    dashboard.get(f"/runs?token={TOKEN}")
    yield dashboard
    dashboard.cookies.clear()
    dashboard.headers.update(before)
    for path in folder.glob(f"*/{FILE}"):
        path.unlink()


def post(client, path="/notes/one", form=FORM, **headers):
    return client.post(path, data=form, headers=headers, follow_redirects=False)


def list_files(run):
    return {path.name: path.stat().st_mtime_ns for path in run.iterdir()}


def test_form_of_the_page_writes_one_file(browser, folder):
    before = list_files(folder / "one")
    answer = post(browser, Origin="http://testserver")
    assert (answer.status_code, answer.headers["location"]) == (303, "/run/one#notes")
    after = list_files(folder / "one")
    assert after.pop(FILE) and after == before
    assert json.loads((folder / "one" / FILE).read_text()) == {
        "tags": ["baseline", "good"],
        "text": "First line.\nSecond.",
    }
    page = browser.get("/run/one").text
    assert "First line.\nSecond.</textarea>" in page and 'value="baseline, good"' in page
    assert audit(folder / "one").violations == []


def test_runs_are_filtered_by_tag_and_searched_by_note(browser):
    post(browser, Origin="http://testserver")

    def find(**params):
        return [run["name"] for run in browser.get("/api/runs", params=params).json()["runs"]]

    assert find(tag="good") == find(q="SECOND") == find(q="baseline") == ["one"]
    assert find(tag="goo") == [] and sorted(find()) == ["one", "two"]
    assert browser.get("/api/runs").json()["tags"] == {"baseline": 1, "good": 1}
    assert "/runs?tag=good" in browser.get("/runs").text


@pytest.mark.parametrize(
    "headers",
    [
        {},  # neither browsers nor programs with the token in a header
        {"Origin": "http://evil.example"},
        {"Origin": "http://testserver:81"},
        {"Origin": "http://testserver.evil.example"},
        {"Origin": "null"},
        {"Origin": "http://testserver", "Sec-Fetch-Site": "same-site"},
        {"Origin": "http://testserver", "Sec-Fetch-Site": "cross-site"},
    ],
)
def test_other_pages_cannot_write(browser, folder, headers):
    assert post(browser, **headers).status_code == 403
    assert not (folder / "one" / FILE).exists()


def test_writing_needs_the_token_and_its_own_path(browser, folder, tmp_path):
    own = {"Origin": "http://testserver", "Sec-Fetch-Site": "same-origin"}
    for path in ("/run/one", "/api/notes/one", "/notes", "/runs"):
        answer = post(browser, path, **own)
        assert (answer.status_code, answer.headers["allow"]) == (405, "GET, HEAD")
    for path in ("/notes/three", "/notes/", "/notes/../one", "/notes/one%2f..%2ftwo"):
        assert post(browser, path, **own).status_code in (404, 405)
    assert browser.get("/notes/one").status_code == 405
    browser.cookies.clear()
    assert post(browser, **own).status_code == 401
    assert post(browser, Authorization="Bearer wrong").status_code == 401
    assert not list(folder.glob(f"*/{FILE}"))
    assert post(browser, Authorization=f"Bearer {TOKEN}").status_code == 303  # a program
    with open_dashboard(folder, tmp_path, token="") as without:
        without.headers.pop("Authorization", None)
        assert post(without, **own).status_code == 405


@pytest.mark.parametrize(
    ("body", "kind", "status"),
    [
        (b"tags=a&text=" + b"x" * (1 << 17), "application/x-www-form-urlencoded", 413),
        (b"tags=a&text=" + b"x" * (MOST_TEXT + 1), "application/x-www-form-urlencoded", 400),
        (b"tags=" + b"x" * 41 + b"&text=", "application/x-www-form-urlencoded", 400),
        (b"tags=" + b",".join(b"%d" % n for n in range(21)) + b"&text=", "application/x-www-form-urlencoded", 400),
        (b"tags=a%1bb&text=", "application/x-www-form-urlencoded", 400),
        (b"tags=a&text=%ff", "application/x-www-form-urlencoded", 400),
        (b"tags=a\xff&text=", "application/x-www-form-urlencoded", 400),
        (b"tags=a", "application/x-www-form-urlencoded", 400),
        (b"tags=a&text=b" + b"&c=d" * 20, "application/x-www-form-urlencoded", 400),
        (b'{"tags": "a", "text": "b"}', "application/json", 415),
        (b"tags=a&text=b", "text/plain", 415),
    ],
)
def test_invalid_bodies_are_refused(browser, folder, body, kind, status):
    headers = {"Origin": "http://testserver", "Content-Type": kind}
    assert browser.post("/notes/one", content=body, headers=headers).status_code == status
    assert not (folder / "one" / FILE).exists()


def test_hostile_notes_are_shown_as_text(browser, folder):
    hostile = '</textarea><script>alert(1)</script>"\u202e'
    post(browser, form={"tags": '"><img src=x onerror=a>', "text": hostile}, Origin="http://testserver")
    for path in ("/runs", "/run/one"):
        text = browser.get(path).text
        assert "<script>alert" not in text and "<img src=x" not in text and "\u202e" not in text
        assert "&lt;script&gt;alert(1)" in text


def test_notes_are_kept_in_python_and_removed_when_empty(runs, tmp_path):
    run = copy_run(runs / "simulated", tmp_path, "run")
    assert open_run(run).notes == Notes()
    open_run(run).write_notes(["b", "a"], "text")
    assert open_run(run).notes == read_notes(run) == Notes(("a", "b"), "text")
    write_notes(run, [], " ")
    assert not (run / FILE).exists()
    with raises_with(ConfigError, key="tags", value="a,b"):
        write_notes(run, ["a,b"], "")
    with pytest.raises(RecordError):
        write_notes(tmp_path, ["a"], "")
    assert os.listdir(tmp_path) == ["run"]


def test_links_in_place_of_notes_lead_nowhere(runs, tmp_path):
    run = copy_run(runs / "simulated", tmp_path, "run")
    secret = tmp_path / "secret.json"
    secret.write_text('{"tags": [], "text": "secret"}')
    (run / FILE).symlink_to(secret)
    with pytest.raises(RecordError):
        read_notes(run)
    write_notes(run, ["a"], "mine")
    assert read_notes(run) == Notes(("a",), "mine")
    assert "secret" in secret.read_text()


@pytest.mark.parametrize("content", ["{", "[]", '{"tags": 1, "text": ""}', '{"tags": [], "text": 1}', '{"tags": [[]]}'])
def test_damaged_notes_do_not_hide_a_run(browser, folder, content):
    (folder / "one" / FILE).write_text(content)
    with pytest.raises(RecordError):
        read_notes(folder / "one")
    (card,) = [run for run in browser.get("/api/runs").json()["runs"] if run["name"] == "one"]
    assert (card["state"], card["tags"]) == ("finished", [])
    assert browser.get("/run/one").status_code == 200
