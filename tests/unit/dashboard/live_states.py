"""States of runs as `live.json` has them, for tests of those who read it."""

import fcntl
import json
import os
import time
from contextlib import contextmanager

STATE = {
    "second": 100.0,
    "interval": 2.0,
    "lineage": 0,
    "step": 7,
    "version": 6,
    "capacity": 8,
    "max_age": 2,
    "groups_per_step": 4,
    "group_size": 3,
    "engines": [
        {"name": "engine 0", "running": 5, "capacity": 8, "version": 6, "state": "ready"},
        {"name": "engine 1", "running": 2, "capacity": 8, "version": 5, "state": "loading"},
    ],
    "queue": 0,
    "graders": 2,
    "has_environments": False,
    "waits": [
        {"owner": "learner", "name": "step", "on": "the learner", "count": 1, "seconds": 1.5, "deadline": 60.0},
        {"owner": "pool", "name": "generation", "on": "an engine", "count": 7, "seconds": 4.0, "deadline": 300.0},
        {"owner": "pool", "name": "health", "on": "an engine", "count": 2, "seconds": 0.1, "deadline": 60.0},
    ],
    "history": [[80.0, 0, 3, 0, "groups"], [90.0, 1000, 6, 0, "step"], [100.0, 3000, 7, 0, "step"]],
    "groups": [[20, 2, "taken", 3], [21, 1, "complete", 3], [22, 1, "running", 2], [23, 0, "running", 0]],
    "groups_alive": 4,
    "attempts": 9,
}


def wait_of(name, count=1, owner="pool", seconds=1.0):
    """Return waits of one name."""
    return {"owner": owner, "name": name, "on": "x", "count": count, "seconds": seconds, "deadline": 100.0}


def write_state(run, quiet=0.0, **changes):
    """Write the state of a run, as if that was `quiet` seconds ago."""
    path = run / "live.json"
    path.write_text(json.dumps(STATE | changes))
    os.utime(path, (time.time() - quiet,) * 2)


@contextmanager
def held(run):
    """Hold the lock of a run, as its process does."""
    with (run / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
