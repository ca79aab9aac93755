"""An agent of a framework that knows nothing of us: what is trained is what was sampled, on every trajectory of a run."""

import json
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytest.importorskip("agents", reason="openai-agents is not installed; it is in the extra `dev`")
pytestmark = pytest.mark.system

ROOT = Path(__file__).parents[2]
PARTS = ROOT / "benchmarks" / "agent_framework"
SMALL = (
    "steps=3",
    "rollout.groups_per_step=4",
    "rollout.group_size=4",
    "sft.steps=60",
    "sft.batch_size=48",
    "tasks.0.test.limit=8",
)


def altered_engine(witnesses, record):
    """A token that was sampled is another."""
    (path,) = witnesses.glob("engine-*.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    chosen = next(line for line in lines if not line["request"].startswith("-"))  # those of evaluations
    chosen["tokens"][0] += 1
    path.write_text("\n".join(map(json.dumps, lines)))


def altered_agent(witnesses, record):
    """The framework got other words."""
    path = witnesses / "agent.jsonl"
    path.write_text(path.read_text().replace("calculator", "abacus"))


def altered_mask(witnesses, record):
    """A token of the prompt is trained on."""
    path = next(record.glob("*.parquet"))
    masks = pq.read_table(path)["loss_mask"].to_pylist()
    masks[0][0] = True
    replace_column(path, "loss_mask", masks)


def altered_logprobs(witnesses, record):
    """Log-probs are off, in what the engine wrote and in the record alike."""
    (path,) = witnesses.glob("engine-*.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        line["logprobs"] = less(line["logprobs"])
    path.write_text("\n".join(map(json.dumps, lines)))
    for file in record.glob("*.parquet"):
        table = pq.read_table(file)
        columns = (table[name].to_pylist() for name in ("logprobs", "loss_mask"))
        rows = [np.where(mask, less(values), 0.0).tolist() for values, mask in zip(*columns, strict=True)]
        replace_column(file, "logprobs", rows)


def less(logprobs):
    return (np.array(logprobs, np.float32) - np.float32(0.25)).tolist()


def replace_column(path, name, values):
    table = pq.read_table(path)
    at = table.schema.get_field_index(name)
    field = table.schema.field(at)
    pq.write_table(table.set_column(at, field, pa.array(values, field.type)), path)


SIGNS = {
    altered_engine: "no engine has sampled",
    altered_agent: "no run of the agent was told",
    altered_mask: "is not what was sampled",
    altered_logprobs: "off",
}


def test_every_trajectory_of_an_agents_sdk_is_exact(project, monkeypatch):
    """Under a chat template that writes history anew; and what is not exact is noticed."""
    monkeypatch.syspath_prepend(str(PARTS))
    from exactness import verify

    witnesses, run = project.folder / "witnesses", project.folder / "runs" / "agent_framework"
    witnesses.mkdir()
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(PARTS)]))
    monkeypatch.setenv("EXACTNESS", str(witnesses))
    overrides = (
        "model.path=rewriting:build",
        f"record.directory={run.parent}",
        "engine.kind=engine_witness:open_engine",
        "tasks.0.agent.function=agent_witness:agent",
        "checkpoint={every: 1, keep_last: 100}",
    )
    done = project.run("train", ROOT / "recipes" / "agent_framework" / "config.yaml", *SMALL, *overrides)
    assert done.returncode == 0, done.stderr
    assert project.run("audit", run).returncode == 0
    found = verify(run, witnesses)
    assert found.mismatches == []
    assert found.trajectories >= 3 * 16 and found.turns > found.trajectories
    assert found.sampled_tokens == found.recomputed_tokens + found.mixed_cache_tokens
    assert found.rendered_otherwise > 0  # had prompts been rendered anew
    for alter, sign in SIGNS.items():
        kept = {path: path.read_bytes() for folder in (witnesses, run / "rollouts") for path in folder.iterdir()}
        alter(witnesses, run / "rollouts")
        assert any(sign in mismatch for mismatch in verify(run, witnesses).mismatches)
        for path, content in kept.items():
            path.write_bytes(content)
