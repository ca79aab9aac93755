"""The dashboard in a browser: pages draw, filter, zoom, compare and follow a run, and run nothing but our own scripts."""

import fcntl
import json

import pytest

from tests.browser.serving import served
from tests.unit.dashboard.sites import TOKEN, copy_run

pytest.importorskip("playwright.sync_api", reason="not installed on this system: playwright")
pytestmark = pytest.mark.commands("chromium")


@pytest.fixture
def page(browser, address):
    """A page that has the token; the test fails if the page reports an error or fetches anything from elsewhere."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    found, problems = context.new_page(), []
    found.on("pageerror", lambda error: problems.append(str(error)))
    found.on("console", lambda message: problems.append(message.text) if message.type in ("error", "warning") else None)
    found.on("request", lambda request: None if request.url.startswith(address) else problems.append(request.url))
    found.goto(f"{address}/?token={TOKEN}")
    yield found
    context.close()
    assert problems == []


def test_charts_are_drawn_and_zoom(page, address):
    page.goto(f"{address}/run/one")
    plot = page.locator("#chart-reward .u-over")
    plot.wait_for()
    box = plot.bounding_box()
    before = page.locator("#chart-reward .legend b").inner_text()
    page.mouse.move(box["x"] + 0.1 * box["width"], box["y"] + 30)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.5 * box["width"], box["y"] + 30, steps=5)
    page.mouse.up()
    page.mouse.move(box["x"] + 2, box["y"] + 30)
    assert page.locator("#chart-reward .legend b").inner_text() != before  # the value below the pointer


def test_runs_are_found_by_keyboard_and_compared(page, address):
    page.keyboard.press("/")
    page.keyboard.type("one")
    page.keyboard.press("Enter")
    page.wait_for_url("**q=one**")
    assert page.locator("[data-row]").all_inner_texts() == ["one"]
    page.goto(f"{address}/runs")
    page.keyboard.press("j")
    page.keyboard.press("j")
    assert page.evaluate("document.activeElement.textContent") == page.locator("[data-row]").nth(1).inner_text()
    for each in page.locator("input[name=run]").all():
        each.check()
    page.get_by_role("button", name="Compare selected").click()
    page.wait_for_url("**/compare?run=**")
    page.locator("#chart-reward .u-over").wait_for()
    assert page.locator("#chart-reward .legend .swatch").count() == 2


def test_rollout_is_searched_and_its_address_shared(page, address, browser):
    page.goto(f"{address}/rollouts/one?status=trained")
    page.locator(".texts .a").first.wait_for()  # texts come when they are indexed
    page.locator("[data-search]").fill('"four<b>five"')
    page.keyboard.press("Enter")
    page.wait_for_url("**q=**")
    page.locator("[data-row]").first.click()
    page.locator("select[name=color]").select_option("logprob")
    page.get_by_role("button", name="Apply").click()
    page.wait_for_url("**color=logprob**")
    shown = page.locator(".conversation").inner_text()
    assert "<b>five</b>" in shown
    other = browser.new_context()
    share = other.new_page()
    share.goto(f"{page.url}&token={TOKEN}")
    assert share.locator(".conversation").inner_text() == shown
    other.close()


@pytest.mark.parametrize("is_fetched_again", [False, True])
def test_timeline_zooms_by_dragging(page, address, is_fetched_again):
    page.goto(f"{address}/timeline/one")
    # Until events are in the index, the lanes are fetched again each second, which moves what lies below them.
    page.locator("[data-timeline]:not([data-poll])").wait_for()
    assert page.locator(".lane-name", has_text="engine 1").count() == 1
    if is_fetched_again:  # as a live page does with its parts
        page.evaluate("(part => part.replaceWith(part.cloneNode(true)))(document.querySelector('[data-timeline]'))")
    whole = page.locator("h1").inner_text()
    box = page.locator(".lane svg").first.bounding_box()
    page.mouse.move(box["x"] + 100, box["y"] + 10)
    page.mouse.down()
    page.mouse.move(box["x"] + 300, box["y"] + 10, steps=5)
    page.mouse.up()
    page.wait_for_url("**start=**")
    assert page.locator("h1").inner_text() != whole


def test_page_follows_a_run_that_goes_on(browser, folder, tmp_path):
    run = copy_run(folder / "one", tmp_path / "runs", "live")
    (run / "summary.json").unlink()
    with served(tmp_path / "runs", tmp_path / "cache") as address, (run / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        page = browser.new_context().new_page()
        with page.expect_request("**/live/live"):
            page.goto(f"{address}/run/live?token={TOKEN}")
        page.locator("#chart-reward .u-over").wait_for()
        page.evaluate("window.same = true")
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": 41, "lineage": 0, "reward/mean": 0.125}) + "\n")
        page.locator(".headline .value", has_text="41").wait_for()
        page.locator("#chart-reward .legend b", has_text="0.125").wait_for()
        assert page.evaluate("window.same")  # the page was not loaded again
        page.context.close()


@pytest.mark.parametrize(
    "path", ["/runs", "/run/one", "/rollouts/one", "/timeline/one", "/record/one", "/group/one?group=1"]
)
def test_page_fits_a_phone_and_is_readable_without_scripts(browser, address, path):
    for width, scripts in ((375, True), (1280, False)):
        context = browser.new_context(viewport={"width": width, "height": 800}, java_script_enabled=scripts)
        page = context.new_page()
        page.goto(f"{address}{path}{'&' if '?' in path else '?'}token={TOKEN}")
        assert "one" in page.locator("body").inner_text()
        if scripts:
            assert page.evaluate("document.documentElement.scrollWidth") <= width
        elif path.startswith("/run/"):
            image = page.locator("#chart-reward img")
            image.wait_for()
            assert image.get_attribute("src").startswith("/svg/chart/one")
        context.close()


def test_theme_is_chosen_and_kept(page, address):
    page.goto(f"{address}/runs")
    page.emulate_media(color_scheme="light")
    light = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.keyboard.press("t")
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert dark != light
    page.reload()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == dark
