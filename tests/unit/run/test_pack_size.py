import json
import os

import pytest

from antiphon.core.config import dump
from antiphon.run.config import RunConfig
from antiphon.run.pack_size import choose_pack_size, keep_pack_size

GIB = 2**30
SMOLLM2 = {
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
    "vocab_size": 49152,
}


def make_config(**sections):
    task = {"name": "sums", "prompts": {"source": "jsonl", "path": "sums.jsonl"}, "reward": "math"}
    rollout = {"groups_per_step": 2, "sampling": {"max_tokens": 8}}
    given = {"name": "r", "steps": 1, "model": {"path": "m"}, "tasks": [task], "rollout": rollout}
    return RunConfig.model_validate(given | sections)


@pytest.fixture
def choose(tmp_path, monkeypatch):
    """Return what is chosen for SmolLM2-135M on a machine of some memory."""
    (tmp_path / "config.json").write_text(json.dumps(SMOLLM2))

    def run(memory, **learner):
        pages = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": memory // 4096}
        monkeypatch.setattr(os, "sysconf", pages.__getitem__)
        config = make_config(learner={"device": "cpu", **learner})
        return choose_pack_size(config, tmp_path).learner

    return run


@pytest.mark.parametrize(
    "memory, pack, chunk",
    # 30 layers of 7,488 numbers are 0.90 MB a token, and a token's logits are 0.59 MB.
    [(512 * GIB, 1024, 512), (24 * GIB, 1024, 512), (8 * GIB, 1024, 128), (4 * GIB, 512, 128), (GIB, 128, 128)],
)
def test_packs_fit_the_machine(choose, memory, pack, chunk):
    learner = choose(memory)
    assert (learner.tokens_per_pack, learner.logits_chunk) == (pack, chunk)


def test_sizes_that_are_named_are_kept(choose):
    learner = choose(GIB, tokens_per_pack=4096)
    assert (learner.tokens_per_pack, learner.logits_chunk) == (4096, 128)


def test_ranks_and_critics_share_the_machine(choose):
    assert choose(24 * GIB, mesh={"shard": 4}).tokens_per_pack == 512  # 6 GiB each


@pytest.mark.parametrize(
    ("cluster", "pack"), [({"kind": "ray"}, 1024), ({"kind": "ray", "address": "10.0.0.1:6379"}, 4096)]
)
def test_a_ray_that_the_run_starts_is_this_machine(tmp_path, cluster, pack):
    (tmp_path / "config.json").write_text(json.dumps(SMOLLM2))
    assert (
        choose_pack_size(make_config(learner={"device": "cpu"}, cluster=cluster), tmp_path).learner.tokens_per_pack
        == pack
    )


def test_learners_on_gpus_keep_the_defaults(choose):
    assert choose(GIB, device="cuda").tokens_per_pack == 4096


def test_a_resumed_run_keeps_its_sizes(tmp_path):
    record = {"directory": str(tmp_path)}
    begun = make_config(record=record, learner={"tokens_per_pack": 512, "logits_chunk": 128})
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "config.yaml").write_text(dump(begun))
    assert keep_pack_size(make_config(record=record)) == begun
    named = make_config(record=record, learner={"tokens_per_pack": 64})
    assert keep_pack_size(named).learner.tokens_per_pack == 64
