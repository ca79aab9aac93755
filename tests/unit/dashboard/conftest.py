"""One simulated run and its dashboard for all tests of a worker that only read them."""

import pytest

from tests.unit.dashboard.sites import make_run, open_dashboard, wait_until_indexed


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """A folder with one run, `simulated`, that has events, texts and checkpoints."""
    folder = tmp_path_factory.mktemp("runs")
    make_run(folder)
    return folder


@pytest.fixture(scope="session")
def client(runs, tmp_path_factory):
    """A client of the dashboard of `runs`, with everything indexed."""
    with open_dashboard(runs, tmp_path_factory.mktemp("cache")) as found:
        wait_until_indexed(found, "simulated")
        yield found
