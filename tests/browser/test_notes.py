"""Notes in a browser: the page's own form writes, and a page of the same host at another port cannot."""

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from antiphon.record.notes import Notes, read_notes
from tests.browser.serving import launched, served
from tests.unit.dashboard.sites import TOKEN, make_run

pytest.importorskip("playwright.sync_api", reason="not installed on this system: playwright")
pytestmark = pytest.mark.commands("chromium")
NOTE = 'Reward falls at step 4:\n<b>"look"</b>'


class OtherPage(BaseHTTPRequestHandler):
    """A page that posts a form to `address` as soon as it is open."""

    address = ""

    def do_GET(self):
        body = (
            f'<form method="post" action="{self.address}/notes/one"><input name="tags" value="stolen">'
            '<input name="text" value="stolen"></form><script>document.forms[0].submit()</script>'
        )
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *arguments):
        """Print nothing."""


def test_notes_are_written_by_the_own_page_alone(tmp_path):
    run = make_run(tmp_path / "runs", "one", events=False)
    server = HTTPServer(("127.0.0.1", 0), OtherPage)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        with served(tmp_path / "runs", tmp_path / "cache") as address, launched() as browser:
            OtherPage.address = address
            page = browser.new_page()
            page.goto(f"{address}/run/one?token={TOKEN}")
            with page.expect_response(f"{address}/notes/one") as answer:
                page.goto(f"http://127.0.0.1:{server.server_port}/")
            assert answer.value.status == 403  # it is the same site, so the cookie came along
            assert read_notes(run) == Notes()
            page.goto(f"{address}/run/one")
            page.locator("[name=tags]").fill("good, baseline")
            page.locator("[name=text]").fill(NOTE)
            page.get_by_role("button", name="Save").click()
            page.wait_for_url("**/run/one#notes")
            assert page.locator("[name=text]").input_value() == NOTE
            page.goto(f"{address}/runs")
            page.get_by_role("link", name="baseline").click()
            page.wait_for_url("**/runs?tag=baseline")
            assert page.locator("[data-row]").all_inner_texts() == ["one"]
            browser.close()
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert read_notes(run) == Notes(("baseline", "good"), NOTE)
