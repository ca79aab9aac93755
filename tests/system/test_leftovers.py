"""What killed runs leave in shared memory goes with the next start; what living runs have there stays."""

import signal
from uuid import uuid4

import psutil
import pytest

from antiphon.weights.shared_directory import SHARED_MEMORY

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(not SHARED_MEMORY.is_dir(), reason="this platform has no shared memory of this kind"),
]
ENDLESS = "steps=100000"


class Runs:
    """Real runs, which are killed with all their processes."""

    def __init__(self, project):
        self.project = project
        self.processes = []

    def start(self, name, *arguments):
        """A run that has published weights."""
        run = self.project.start("train", self.project.config(checkpoint={"every": 1}), f"name={name}", *arguments)
        self.processes.append(run)
        while not (line := run.stdout.readline()).startswith("step "):
            assert line, run.stderr.read()
        return run

    def kill(self, run):
        own = psutil.Process(run.pid)
        own.suspend()  # else it would tidy up after its workers
        for process in [*own.children(recursive=True), own]:
            process.send_signal(signal.SIGKILL)
        run.communicate()


@pytest.fixture
def runs(project):
    found = Runs(project)
    yield found
    for run in found.processes:
        if run.poll() is None:
            found.kill(run)


def left(name):
    return {path for path in SHARED_MEMORY.iterdir() if name in path.name}


@pytest.mark.parametrize("how", ["start", "resume", "doctor"])
def test_weights_of_a_killed_run_are_removed(project, runs, how):
    killed, living = (f"{word}-{uuid4().hex}" for word in ("killed", "living"))
    runs.start(living, ENDLESS)
    runs.kill(runs.start(killed, ENDLESS))
    of_killed, of_living = left(killed), left(living)
    assert len(of_killed) == len(of_living) == 1

    if how == "start":
        runs.start(f"next-{uuid4().hex}", ENDLESS)
    elif how == "resume":
        runs.start(killed, ENDLESS, "--resume")
    else:
        done = project.run("doctor", "--clean")
        assert done.returncode == 0, done.stderr
    assert not of_killed & left(killed)
    assert left(living) == of_living and any(next(iter(of_living)).glob("weights-*"))


def test_a_run_that_ends_leaves_nothing(project):
    name = f"ends-{uuid4().hex}"
    done = project.run("train", project.config(), f"name={name}")
    assert done.returncode == 0, done.stderr
    assert not left(name)
