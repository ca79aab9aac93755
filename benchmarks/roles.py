"""Roles on several nodes, of which one is lost, and reward models that read in batches.

    python benchmarks/roles.py

A run whose graders, judge, reward model, environments and engines are on three other nodes of a Ray than the controller; one of
them is killed while it trains. `nodes` and `violations` of its audit are properties of the test that checks the run.

Graders: a reward that waits 50 ms, in workers of a cluster whose nodes are this machine. What is compared is the rate of
gradings with 2 and 4 nodes to that with 1, per node; graders that compute would share this machine's cores instead.

Reward models: conversations a second of one worker that reads all that wait in batches, over those of the same worker when it
reads one at a time, as a grader with a model of its own does. Conversations are groups of 16 responses of 32 to 64 tokens to
prompts of 256 tokens, as in a run; and `ungrouped` ones of 60 to 100 tokens that share nothing. Models are small, and `135m` of
the shape of SmolLM2-135M. Each figure is the median of pairs of one run.
"""

import argparse
import asyncio
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from xml.etree import ElementTree

import torch
from _common import ROOT, TINY_QWEN3, table, write_result
from transformers import Qwen3Config, Qwen3ForSequenceClassification

from antiphon.cluster.base import Node
from antiphon.cluster.config import ClusterConfig
from antiphon.cluster.local import LocalCluster
from antiphon.core.config import load
from antiphon.core.types import Message, Prompt, Score
from antiphon.learning.model.tiny import make_tokenizer
from antiphon.run.config import RunConfig
from antiphon.run.launch.context import LaunchContext
from antiphon.run.launch.graders import start_graders
from antiphon.run.placement import resolve_placement
from antiphon.tasks.base import Transcript

MEASURES = (
    "antiphon.tasks.grading",
    "antiphon.cluster",
    "antiphon.learning.classifier",
    "antiphon.core.worker_set",
    "antiphon.core.rpc",
)
NODES = (1, 2, 4)
WAIT_SECONDS = 0.05
PROCESSES = 2  # that grade on each node
GRADINGS = 200  # on each node
CONCURRENCY = 256
ROUNDS = 5
GROUP = 16  # responses to a prompt
SMALL = TINY_QWEN3 | {"vocab_size": 50_000, "hidden_size": 128, "intermediate_size": 384, "head_dim": 32}
# The shape of SmolLM2-135M.
LARGER = SMALL | {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
}


class Nodes(LocalCluster):
    """This machine as several nodes."""

    def nodes(self) -> list[Node]:
        """Return nodes with the cores that this machine has."""
        return [Node(f"node-{number}", cores=(0,)) for number in range(1 + max(NODES))]


def waits(prompt: Prompt, transcript: Transcript) -> Score:
    """Score after a while, in which nothing is computed."""
    time.sleep(WAIT_SECONDS)
    return Score.of(1.0)


def configured(reward: str, options: dict[str, object], placement: str = "", alone: bool = False) -> RunConfig:
    """Return a run of one task with this reward."""
    return load(
        {
            "name": "roles",
            "steps": 1,
            "model": {"path": "none"},
            "tasks": [
                {
                    "name": "t",
                    "prompts": {"source": "jsonl", "path": "none"},
                    "reward": reward,
                    "reward_options": options,
                }
            ],
            "grading": {"workers": PROCESSES, "deadline": 600.0, "concurrency": CONCURRENCY},
            "rollout": {
                "groups_per_step": 1,
                "group_size": 2,
                "sampling": {"max_tokens": 8},
                "deterministic": alone,  # each conversation is read alone
            },
            "placement": {"reward": placement},
        },
        model=RunConfig,
    )


async def rate(config: RunConfig, transcripts: list[Transcript]) -> float:
    """Return the gradings a second when all transcripts are put in at once, after a first one."""
    cluster, prompt = Nodes(ClusterConfig()), Prompt(id="p", task="t", messages=(), payload={})
    context = LaunchContext(cluster=cluster, config=config, placement=resolve_placement(cluster.nodes(), config))
    try:
        async with start_graders(context) as graders:
            score = graders.router.score
            await asyncio.gather(*(score(prompt, each) for each in transcripts[: 8 * max(NODES)]))
            began = time.perf_counter()
            scores = await asyncio.gather(*(score(prompt, each) for each in transcripts))
            assert all(each.value is not None for each in scores)
            return len(transcripts) / (time.perf_counter() - began)
    finally:
        await cluster.close()


def grader_rates() -> dict[int, float]:
    """Return the rate of gradings a node, by the number of nodes."""
    empty = Transcript([Message("assistant", "")])
    found = {}
    for nodes in NODES:
        placement = ", ".join(f"node{number}.cpu:0-0" for number in range(1, nodes + 1))
        found[nodes] = (
            asyncio.run(rate(configured(f"{Path(__file__).stem}:waits", {}, placement), [empty] * nodes * GRADINGS))
            / nodes
        )
    return found


def lose_a_node() -> dict[str, float]:
    """Run the test of a lost node; return its properties."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        test = "tests/chaos/test_nodes.py::test_other_nodes_run_every_role_and_one_is_lost"
        options = [
            "-q",
            "--long",
            "-p",
            "no:randomly",
            "-p",
            "no:cacheprovider",
            "-o",
            "junit_family=legacy",
            f"--junitxml={report}",
        ]
        subprocess.run([sys.executable, "-m", "pytest", *options, test], cwd=ROOT, check=True)
        found = ElementTree.parse(report).iter("property")
        return {each.attrib["name"]: float(each.attrib["value"]) for each in found}


def save_classifier(shape: Mapping[str, int], folder: Path) -> str:
    """Save a classifier of random weights with a tokenizer of characters."""
    tokenizer = make_tokenizer("0123456789 ")
    torch.manual_seed(0)
    config = Qwen3Config(**{**shape, "vocab_size": len(tokenizer), "num_labels": 1, "pad_token_id": None})
    Qwen3ForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def make_transcripts(conversations: int, grouped: bool) -> list[Transcript]:
    """Return conversations of digits, one token each."""
    draw = random.Random(0)

    def text(low: int, high: int) -> str:
        return "".join(draw.choices("0123456789", k=draw.randint(low, high)))

    if not grouped:
        return [Transcript([Message("user", "1"), Message("assistant", text(60, 100))]) for _ in range(conversations)]
    prompts = [Message("user", text(256, 256)) for _ in range(conversations // GROUP)]
    return [Transcript([prompt, Message("assistant", text(32, 64))]) for prompt in prompts for _ in range(GROUP)]


def model_rates(path: str, transcripts: list[Transcript]) -> tuple[float, float]:
    """Return the conversations a second that one worker reads in batches, and one at a time."""
    batched, alone = (
        asyncio.run(rate(configured("reward_model", {"path": path}, alone=alone), transcripts))
        for alone in (False, True)
    )
    return batched, alone


def main() -> None:
    """Measure, print a table, write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    figures = lose_a_node()
    rounds = [grader_rates() for _ in range(ROUNDS)]
    for nodes in NODES[1:]:
        figures[f"grader_efficiency_{nodes}"] = statistics.median(each[nodes] / each[1] for each in rounds)
    figures["gradings_per_second_1"] = statistics.median(each[1] for each in rounds)
    with tempfile.TemporaryDirectory() as folder:
        for name, shape, conversations in (("", SMALL, 256), ("135m_", LARGER, 32)):
            path = save_classifier(shape, Path(folder, f"model_{name}"))
            for kind in ("", "ungrouped_"):
                transcripts = make_transcripts(conversations, grouped=not kind)
                pairs = [model_rates(path, transcripts) for _ in range(ROUNDS)]
                figures[f"reward_model_{name}{kind}speedup"] = statistics.median(one / other for one, other in pairs)
                figures[f"reward_model_{name}{kind}per_second"] = statistics.median(batched for batched, _ in pairs)
    print(table(["figure", "value"], [[name, f"{value:.3f}"] for name, value in figures.items()]))
    print("written:", write_result("roles", figures, options.out, measures=MEASURES))


if __name__ == "__main__":
    main()
