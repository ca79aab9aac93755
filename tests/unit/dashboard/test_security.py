"""The door of the dashboard: nobody reads without the token, nothing is written, and no request leads out of the folder."""

import os

import pytest

from antiphon.core.errors import ConfigError
from antiphon.dashboard.security import HEADERS, check_prefix
from antiphon.dashboard.server import is_local
from tests.raising import raises_with
from tests.unit.dashboard.sites import TOKEN, make_run, open_dashboard

PATHS = [f"/{page}/simulated" for page in ("run", "rollouts", "record", "timeline", "chat")] + ["/runs", "/compare"]
# Requests that try to leave the folder, to break the query language, or to exhaust the server.
OUTSIDE = [
    "/run/../../etc/passwd",
    "/run/..%2f..%2fetc%2fpasswd",
    "/run/%2e%2e/%2e%2e/etc",
    "/run//etc",
    "/run/simulated/../../secret",
    "/run/simulated%00",
    "/run/simulated%2fcheckpoints",
    "/run/.",
    "/run/",
    "/record/linked",
    "/run/%ff%fe",
    "/run/C:%5cwindows",
    "/static/../app.py",
    "/static/..%2fapp.py",
    "/static/%2e%2e/security.py",
    "/static//etc/passwd",
    "/attempt/../simulated?id=0:1.0.0",
    "/svg/chart/..%2fsecret?chart=reward",
    "/live/..%2f..%2fetc",
]
INVALID = [
    "/rollouts/simulated?step=1%20OR%201",
    "/rollouts/simulated?step=1;DROP%20TABLE%20attempts",
    "/rollouts/simulated?step=99999999999999999999",
    "/rollouts/simulated?score_min=nan",
    "/rollouts/simulated?score_min=inf",
    "/rollouts/simulated?status=trained'--",
    "/rollouts/simulated?sort=a.score%20DESC",
    "/rollouts/simulated?page=-1",
    "/rollouts/simulated?page=100000000",
    "/rollouts/simulated?q=%22",
    "/rollouts/simulated?q=***",
    "/rollouts/simulated?q=" + "x" * 500,
    "/attempt/simulated?id=../../etc/passwd",
    "/attempt/simulated?id=0:1.0.0'%20OR%20'1",
    "/attempt/simulated?id=1.2.3.4",
    "/group/simulated?group=all",
    "/svg/chart/simulated?chart=reward&smooth=0",
    "/svg/chart/simulated?chart=reward&smooth=1000000",
    "/svg/chart/simulated?chart=reward&x=price",
    "/timeline/simulated?start=5&stop=1",
    "/compare?" + "&".join(f"run={number}" for number in range(30)),
]
HARMLESS = [  # texts that the search must take as words
    "one' OR '1'='1",
    'one" OR text MATCH "two',
    "one NEAR(two, 5)",
    "one*",
    "text:one",
    "one AND NOT two",
    "^one",
    "one -two",
    "{one two}",
    "one\x00two",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run, a secret beside the folder, and links that lead to it."""
    base = tmp_path_factory.mktemp("base")
    run = make_run(base / "runs")
    make_run(base / "other", "secret")
    (base / "runs" / "linked").symlink_to(base / "other" / "secret")
    (run / "checkpoints" / "step_999999").symlink_to(base / "other" / "secret")
    return base / "runs"


@pytest.fixture(scope="module")
def dashboard(folder, tmp_path_factory):
    with open_dashboard(folder, tmp_path_factory.mktemp("cache")) as found:
        yield found


@pytest.fixture
def guarded(dashboard):
    """A client that was let in by nothing but its token: an address with the token leaves a cookie behind."""
    dashboard.cookies.clear()
    return dashboard


@pytest.mark.parametrize("path", [*PATHS, "/api/runs", "/static/style.css", "/live/simulated", "/svg/chart/simulated"])
def test_nothing_is_shown_without_the_token(guarded, path):
    for headers in ({"Authorization": ""}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {TOKEN}"}):
        answer = guarded.get(path, headers=headers, follow_redirects=False)
        assert answer.status_code == 401
        assert "simulated" not in answer.text
    assert guarded.get(f"{path}?token=wrong", headers={"Authorization": ""}).status_code == 401


def test_token_becomes_a_cookie_and_leaves_the_address(folder, tmp_path):
    with open_dashboard(folder, tmp_path) as client:
        client.headers.pop("Authorization")
        answer = client.get(f"/rollouts/simulated?status=trained&token={TOKEN}", follow_redirects=False)
        assert (answer.status_code, answer.headers["location"]) == (303, "/rollouts/simulated?status=trained")
        assert (
            "httponly" in answer.headers["set-cookie"].lower()
            and "samesite=lax" in answer.headers["set-cookie"].lower()
        )
        assert client.get("/runs").status_code == 200  # by the cookie


def test_token_does_not_lead_to_another_site(guarded):
    for path in ("//evil.example/", "/%5c%5cevil.example/", "///evil.example"):
        answer = guarded.get(f"http://testserver{path}?token={TOKEN}", follow_redirects=False)
        assert not answer.headers.get("location", "").startswith(("//", "http", "/\\\\", "/%5C"))


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"])
def test_only_reading_methods_are_allowed(guarded, method):
    answer = guarded.request(method, "/runs", headers={"Authorization": ""})  # whoever asks
    assert (answer.status_code, answer.headers["allow"]) == (405, "GET, HEAD")


@pytest.mark.parametrize("path", [*PATHS, "/api/runs", "/static/main.js", "/run/nothing", "/no/such/page"])
def test_every_answer_has_the_security_headers(guarded, path):
    answer = guarded.get(path)
    assert {name: answer.headers.get(name) for name in HEADERS} == HEADERS
    policy = answer.headers["Content-Security-Policy"]
    assert "unsafe" not in policy and "default-src 'none'" in policy and "frame-ancestors 'none'" in policy


@pytest.mark.parametrize("path", OUTSIDE)
def test_no_request_leads_out_of_the_folder(guarded, path):
    answer = guarded.get(path)
    assert answer.status_code == 404
    assert "secret" not in answer.text and "root:" not in answer.text


@pytest.mark.parametrize("path", INVALID)
def test_invalid_request_is_refused_in_one_line(guarded, path):
    answer = guarded.get(path)
    assert answer.status_code == 400
    as_json = guarded.get(path if path.startswith("/svg") else f"/api{path}")
    assert as_json.status_code == 400
    assert "Traceback" not in answer.text


@pytest.mark.parametrize("text", HARMLESS)
def test_search_takes_every_text_as_words(guarded, text):
    assert guarded.get("/api/rollouts/simulated", params={"q": text}).status_code == 200


def test_link_in_a_run_is_not_followed(guarded):
    found = {each["name"]: each["state"] for each in guarded.get("/api/record/simulated").json()["checkpoints"]}
    assert found["step_999999"] == "torn"
    assert [run["name"] for run in guarded.get("/api/runs").json()["runs"]] == ["simulated"]


def test_too_long_address_is_refused(guarded):
    assert guarded.get("/runs?q=" + "x" * 9000).status_code == 414


def test_nothing_is_written_into_a_run(folder, guarded):
    def stamp():
        run = folder / "simulated"
        return {path: path.lstat().st_mtime_ns for path in [run, *run.rglob("*")]}

    before = stamp()
    for path in [*PATHS, "/group/simulated?group=1", "/attempt/simulated?id=0:1.0.0", "/api/record/simulated?audit=1"]:
        assert guarded.get(path).status_code == 200
    assert stamp() == before


def test_prefix_of_a_proxy_is_in_every_link(folder, tmp_path):
    with open_dashboard(folder, tmp_path, prefix="/tools/antiphon") as client:
        for path in ("/run/simulated", "/tools/antiphon/run/simulated"):  # proxies strip it or not
            text = client.get(path).text
            links = [part.split('"')[0] for part in text.replace('src="', 'href="').split('href="')[1:]]
            assert links and all(link.startswith(("/tools/antiphon/", "#", "http")) for link in links)
        answer = client.get(f"/tools/antiphon/runs?token={TOKEN}", follow_redirects=False)
        assert answer.headers["location"] == "/tools/antiphon/runs"
        assert "Path=/tools/antiphon" in answer.headers["set-cookie"]


@pytest.mark.parametrize("prefix", ["antiphon", "/a b", "//evil.example", '/"onload', "/a/../b?"])
def test_invalid_prefix_is_named(prefix):
    with raises_with(ConfigError, key="--prefix", value=prefix):
        check_prefix(prefix)


@pytest.mark.parametrize(
    ("host", "local"), [("127.0.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False)]
)
def test_addresses_of_other_machines_are_known(host, local):
    assert is_local(host) is local


def test_unreadable_folders_and_odd_names_are_left_out(tmp_path):
    make_run(tmp_path, "fine")
    os.makedirs(os.fsencode(tmp_path) + b"/bad\xff/run")
    (tmp_path / "line\nbreak").mkdir()
    with open_dashboard(tmp_path, tmp_path / "cache") as client:
        assert [run["name"] for run in client.get("/api/runs").json()["runs"]] == ["fine"]
