"""Replay: what a run recorded drives the real orchestration to the same batches, and what differs is named."""

import shutil
import sqlite3
from contextlib import closing

import pyarrow as pa
import pyarrow.parquet as pq

ROLLOUT = {
    "groups_per_step": 2,
    "group_size": 4,
    "async_ratio": 1.5,
    "redundancy": 1,
    "extra_groups": 1,
    "order": "ready",
    "filter": "spread",
    "timeout": 180,
    "sampling": {"max_tokens": 4},
}


def test_a_replay_comes_to_the_same_batches_and_weights(project):
    """Fifty steps of an agent, asynchronous, with redundancy and a filter."""
    path = project.config(
        rollout=ROLLOUT | {"max_turns": 4},
        tasks=[
            {
                "name": "guess",
                "prompts": {"source": "mytask:problems"},
                "environment": "mytask:Lengths",
                "reward": "environment_return",
            }
        ],
        checkpoint={"every": 25, "keep_every": 25},
        engine={"dtype": "bfloat16"},  # in which weights travel, then
        learner={
            "optimizer": {"learning_rate": 1e-4}
        },  # slow: what has learned everything has groups to filter out only
    )
    assert project.run("train", path, "steps=30").returncode == 0
    resumed = project.run("train", path, "steps=55", "--resume")
    assert resumed.returncode == 0, resumed.stderr
    run = project.folder / "runs" / "run"
    same = project.run("replay", run, "--code", project.folder, "--weights")
    assert same.returncode == 0 and "55 steps, no difference" in same.stdout, same.stdout + same.stderr

    with closing(sqlite3.connect(run / "ledger.db")) as db:
        query = "SELECT grp, sibling, try FROM attempts WHERE lineage = 1 AND status = 'trained' AND step = 40"
        trained = ".".join(map(str, db.execute(query).fetchone()))
    told = " ".join(project.run("why", run, f"{trained}@2").stdout.split())
    assert "trained at step 40" in told and "task guess" in told and "on engine 0" in told and "token 2" in told
    nobody = project.run("why", run, "9999.0.0")
    assert nobody.returncode == 2 and "there is no attempt 9999.0.0" in nobody.stderr

    planted = shutil.copytree(run, project.folder / "planted")
    file = sorted((planted / "rollouts").iterdir())[5]
    table = pq.read_table(file)
    tokens = table.column("tokens").to_pylist()
    tokens[0][-1] += 1
    changed = table.set_column(table.schema.get_field_index("tokens"), "tokens", pa.array(tokens, pa.list_(pa.int32())))
    pq.write_table(changed, file)
    row = table.slice(0, 1).to_pylist()[0]
    other = project.run("replay", planted, "--code", project.folder)
    name = f"attempt {row['lineage']}:{row['grp']}.{row['sibling']}.{row['try']}"
    assert other.returncode == 1 and f"{name}: its trajectory in rollouts/{file.name}" in other.stdout
