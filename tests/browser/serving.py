"""A dashboard on a free port, and the chromium of the system.

Note for tests: Playwright's `has_text` trims a text and makes one space of white space, so that "version 2 " is found in
"version 24" too. A regular expression says where a text ends.
"""

import shutil
import socket
import threading
from contextlib import contextmanager

import uvicorn

from antiphon.dashboard.app import create_app
from antiphon.dashboard.site import Site
from tests.unit.dashboard.sites import TOKEN


@contextmanager
def served(folder, cache, model_server=None):
    """Serve a folder on a free port, with a model server for its chat page; yields the address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        app = create_app(Site.make(folder, cache, model_server), TOKEN)
        config = uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


@contextmanager
def launched():
    """Start the chromium of the system; yields the browser."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as tool:
        found = tool.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        yield found
        found.close()
