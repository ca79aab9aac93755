"""In a browser: a prompt of a run is asked of a model that is really served, and a conversation with it goes on."""

import string
from contextlib import contextmanager

import pytest

from antiphon.dashboard.model_server import ModelServer
from tests.browser.serving import launched, served
from tests.system.parrot import serving, write_parrot
from tests.unit.dashboard.sites import TOKEN, make_run

pytest.importorskip("playwright.sync_api", reason="not installed on this system: playwright")
pytestmark = pytest.mark.commands("chromium")


def test_a_checkpoint_is_asked_what_the_run_asked(tmp_path):
    make_run(tmp_path / "runs", "one", events=False)
    (tmp_path / "parrot").mkdir()
    parrot = write_parrot(tmp_path / "parrot")
    with (
        contextmanager(serving)(parrot, tmp_path) as (url, token),
        served(tmp_path / "runs", tmp_path / "cache", ModelServer(url, token)) as address,
        launched() as browser,
    ):
        page = browser.new_page()
        page.goto(f"{address}/rollouts/one?token={TOKEN}&status=trained")
        page.locator("[data-row]").first.click()
        page.get_by_role("link", name="ask a checkpoint").click()
        page.wait_for_url("**/chat/one?id=*")
        asked = page.locator("#prompt .prompt .text").inner_text()
        page.get_by_label("answers").fill("3")
        page.locator("#prompt").get_by_label("tokens at most").fill("5")
        page.get_by_role("button", name="Sample answers").click()
        page.locator(".answers").wait_for()
        assert page.locator(".answers article").count() == 3
        assert page.locator("#prompt .prompt .text").inner_text() == asked
        talk = page.locator("#conversation")
        for count in (1, 2):
            talk.get_by_label("Message").fill(f"Say it, {count}!")
            talk.get_by_label("temperature").fill("0")
            talk.get_by_label("tokens at most").fill("26")
            talk.get_by_role("button", name="Send").click()
            said = talk.locator(".response .text").nth(count - 1)
            said.wait_for()
            assert said.inner_text() == string.ascii_lowercase
        assert talk.locator(".prompt .text").all_inner_texts() == ["Say it, 1!", "Say it, 2!"]
        talk.get_by_role("link", name="begin anew").click()
        page.wait_for_url("**#conversation")
        assert talk.locator("article").count() == 0
        browser.close()
