"""Two simulated runs, their dashboard and a browser, for all tests of a module; a module may have a `folder` of its own."""

import pytest

from antiphon.dashboard.model_server import ModelServer
from tests.browser.serving import launched, served
from tests.unit.dashboard.sites import make_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the runs `one` and `two`."""
    found = tmp_path_factory.mktemp("runs")
    make_run(found, "one")
    make_run(found, "two", seed=7)
    return found


@pytest.fixture(scope="module")
def address(folder, tmp_path_factory):
    """The address of a dashboard of `folder`; its model server does not answer."""
    server = ModelServer("http://127.0.0.1:1/v1")
    with served(folder, tmp_path_factory.mktemp("cache"), server) as found:
        yield found


@pytest.fixture(scope="module")
def browser(folder):  # runs are simulated first: the tool keeps an event loop running in this thread
    """A browser."""
    with launched() as found:
        yield found
