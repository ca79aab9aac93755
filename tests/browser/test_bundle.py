"""A bundle opens in a browser from a disk, without a server and without a network."""

import pytest

from antiphon.dashboard.bundle import write_bundle
from tests.browser.serving import launched
from tests.unit.dashboard.sites import make_run

pytest.importorskip("playwright.sync_api", reason="not installed on this system: playwright")
pytestmark = pytest.mark.commands("chromium")


def test_bundle_opens_from_a_disk(tmp_path):
    found = write_bundle(make_run(tmp_path, "one"), tmp_path / "a bundle", tmp_path / "cache")
    with launched() as browser:
        page = browser.new_context(offline=True).new_page()
        problems, fetched = [], []
        page.on("console", lambda message: problems.append(message.text))
        page.on("requestfailed", lambda request: problems.append(request.url))
        page.on("request", lambda request: fetched.append(request.url))
        page.goto((found.folder / "index.html").as_uri())
        chart = page.locator("#chart-reward img")
        assert chart.evaluate("image => image.complete && image.naturalWidth") == 640
        assert page.evaluate("getComputedStyle(document.querySelector('.headline')).display") == "flex"
        page.get_by_role("link", name="Rollouts", exact=True).click()
        page.get_by_role("link", name="best", exact=True).click()
        page.locator("[data-row]").first.click()
        assert page.locator(".conversation .t.l9, .conversation .t.l5, .conversation .t.l0").count()
        page.get_by_role("link", name="version", exact=True).click()
        assert page.locator(".scale").inner_text().startswith("version")
        page.get_by_role("link", name="Timeline", exact=True).click()
        assert page.locator(".lane").count() > 2
    assert problems == []
    assert all(url.startswith("file://") for url in fetched)
