"""A dashboard on a free port, and the chromium of the system.

Note for tests: Playwright's `has_text` trims a text and makes one space of white space, so that "version 2 " is found in
"version 24" too. A regular expression says where a text ends.
"""

import shutil
from contextlib import contextmanager

from antiphon.dashboard.app import create_app
from antiphon.dashboard.site import Site
from tests.servers import served as serve_app
from tests.unit.dashboard.sites import TOKEN


@contextmanager
def served(folder, cache, model_server=None):
    """Serve a folder on a free port, with a model server for its chat page; yields the address."""
    with serve_app(create_app(Site.make(folder, cache, model_server), TOKEN)) as url:
        yield url


@contextmanager
def launched():
    """Start the chromium of the system; yields the browser."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as tool:
        found = tool.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        yield found
        found.close()
