"""Every page by the rules of axe-core, in light, dark and on a phone; and every link and field reached by the keyboard."""

from pathlib import Path

import pytest

from tests.unit.dashboard.live_states import write_state
from tests.unit.dashboard.sites import TOKEN, make_run

pytest.importorskip("playwright.sync_api", reason="not installed on this system: playwright")
pytestmark = pytest.mark.commands("chromium")

AXE = Path(__file__).parent / "vendor" / "axe-core" / "axe.min.js"
PAGES = {
    "runs": "/runs",
    "no such run": "/runs?q=nothing",
    "now": "/now/two",
    "now, without a state": "/now/one",
    "run": "/run/one",
    "offline run": "/run/three",
    "offline rollouts": "/rollouts/three",
    "offline record": "/record/three",
    "rollouts": "/rollouts/one?status=trained",
    "no rollouts": "/rollouts/one?step=999",
    "group": "/group/one?group=1",
    "attempt": "/attempt/one?id=0:1.0.0&color=logprob",
    "timeline": "/timeline/one",
    "record": "/record/one",
    "chat": "/chat/one?id=0:1.0.0",
    "compare": "/compare?run=one&run=two",
    "compare nothing": "/compare",
    "error": "/run/nothing",
}
VIEWS = {"light": ("light", 1280), "dark": ("dark", 1280), "phone": ("light", 390)}
SERIOUS = ("serious", "critical")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the runs `one`, `two`, which has a live state, and `three`, which was fine-tuned."""
    found = tmp_path_factory.mktemp("runs")
    make_run(found, "one")
    write_state(make_run(found, "two", seed=7))
    (found / "three").mkdir()
    (found / "three" / "config.yaml").write_text("name: three\ndpo: {}\n")
    (found / "three" / "metrics.jsonl").write_text(
        '{"step": 1, "lineage": 0, "learner/loss": 0.7, "learner/margin": 0.1}\n'
    )
    return found


@pytest.fixture
def open_page(browser, address):
    """Return a function that opens a page of the dashboard in a view."""
    contexts = []

    def open_page(path, view):
        scheme, width = VIEWS[view]
        context = browser.new_context(viewport={"width": width, "height": 844}, color_scheme=scheme, bypass_csp=True)
        contexts.append(context)
        page = context.new_page()
        page.goto(f"{address}{path}{'&' if '?' in path else '?'}token={TOKEN}")
        page.wait_for_load_state("networkidle")
        return page

    yield open_page
    for context in contexts:
        context.close()


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("name", PAGES)
def test_page_has_no_serious_violation(open_page, name, view):
    page = open_page(PAGES[name], view)
    page.add_script_tag(content=AXE.read_text(encoding="utf-8"))
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    assert found["passes"], "axe looked at nothing"
    serious = [
        f"{each['id']}: {node['html'][:200]} ({node['failureSummary'][:300]})"
        for each in found["violations"]
        if each["impact"] in SERIOUS
        for node in each["nodes"][:3]
    ]
    assert serious == []
    assert page.locator("h1").count() == 1


def test_axe_notices_a_violation(open_page):
    page = open_page("/runs", "light")
    page.add_script_tag(content=AXE.read_text(encoding="utf-8"))
    page.evaluate("document.querySelector('[data-search]').removeAttribute('aria-label')")
    page.evaluate("document.querySelector('[data-search]').removeAttribute('placeholder')")
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    assert "label" in [each["id"] for each in found["violations"]]


@pytest.mark.parametrize("name", ["runs", "now", "run", "rollouts", "attempt", "timeline", "record"])
def test_all_that_acts_is_reached_by_the_keyboard(open_page, name):
    page = open_page(PAGES[name], "light")
    page.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    # Elements themselves are kept, not a mark on them: a live page takes away what it does not know. The squares of the
    # freshness window, of which there may be hundreds, are left out on purpose: Rollouts leads to the same groups.
    wanted = page.evaluate(
        """window.wanted = [...document.querySelectorAll('a[href], button, input:not([type=hidden]), select, summary')]
        .filter((each) => each.tabIndex >= 0 && each.getClientRects().length), window.wanted.length"""
    )
    reached = set()
    for _ in range(wanted + 20):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("window.wanted.indexOf(document.activeElement)"))
    assert reached - {-1} == set(range(wanted))  # wide tables take the focus, too


def test_focus_is_visible_and_skips_to_the_content(open_page):
    page = open_page("/runs", "light")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    assert page.evaluate("document.activeElement.getBoundingClientRect().top") >= 0
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    page.keyboard.press("Tab")
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline != "none"
