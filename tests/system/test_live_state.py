"""`live.json` of a real run: written while it goes on, and in agreement with what else the run records."""

import json
import sqlite3
import time
from contextlib import closing

from antiphon.dashboard.live_file import read_live_state


def test_run_says_what_it_does_while_it_goes_on(project):
    process = project.start(
        "train", project.config(steps=10_000, rollout={"async_ratio": 1.5, "timeout": 120}, engine={"replicas": 2})
    )
    run, seen = project.folder / "runs" / "run", []
    try:
        while len({state["version"] for state in seen}) < 4:
            assert process.poll() is None
            time.sleep(0.02)
            if (run / "live.json").exists():
                state = json.loads((run / "live.json").read_text())  # replaced at once: never half of one
                if not seen or state["second"] > seen[-1]["second"]:
                    seen.append(state)
        assert read_live_state(run) is not None
    finally:
        process.kill()
        process.communicate()
    with closing(sqlite3.connect(run / "ledger.db")) as db:
        admitted = dict(db.execute("SELECT grp, version FROM groups"))
    assert all(state["capacity"] == 5 and state["max_age"] == 2 for state in seen)  # ceil(2.5 · 2) and ceil(1.5)
    for state in seen:
        assert len(state["engines"]) == 2
        assert len(state["groups"]) == state["groups_alive"] <= 5
        for group, age, _, finished in state["groups"]:
            assert 0 <= age <= 2 and 0 <= finished <= 4
            if group in admitted:  # the last rows were not written when it was killed
                assert age == state["version"] - admitted[group]
    versions = [state["version"] for state in seen]
    assert versions == sorted(versions) and all(state["step"] - state["version"] in (0, 1) for state in seen)
    sampled = [moment[1] for moment in seen[-1]["history"]]
    assert sampled == sorted(sampled) and sampled[-1] > 0
