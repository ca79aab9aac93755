"""What the record costs: the ledger and its trajectories, a checkpoint, an audit; and what it saves in a crash.

    python benchmarks/record.py [--pairs 3] [--skip-smollm2]

Steps of the tiny recipe, and of SmolLM2-135M, with everything written and with nothing written, one after the other in each
pair; the control plane of `control_plane.py` likewise; how long a checkpoint of 135 million parameters keeps the learner from
its next step, against a plain copy of weights and optimiser state; an audit of a million attempts; and a run killed in a step,
gone on with: seconds of generation that were lost, against those that a restart from its checkpoint alone would have lost.
"""

import argparse
import asyncio
import json
import os
import signal
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import yaml
from _common import ROOT, WHOLE_RUN, smollm2, table, write_result

from antiphon.record.ledger import Ledger, run_synchronously
from antiphon.record.store import LedgerStore

MEASURES = (*WHOLE_RUN, "antiphon.record")

TINY, SMOLLM2 = (ROOT / "recipes" / name / "config.yaml" for name in ("tiny_arithmetic", "smollm2_arithmetic"))
WARM_UP = 5  # steps
HERE = Path(__file__)


def nothing_written() -> None:
    """Let stores forget what they are told to write."""
    LedgerStore.write = lambda self, lineage, batch: None  # type: ignore[method-assign]


# --- in processes of their own ------------------------------------------------------------------------------------------


def train(arguments: list[str], without: bool) -> None:
    """`antiphon train`, perhaps with nothing written."""
    from antiphon.cli import main

    if without:
        nothing_written()
    sys.argv = ["antiphon", "train", *arguments]
    main()


def control(without: bool) -> None:
    """The control plane at its smallest; prints attempts a second."""
    from control_plane import LIVE, point

    if without:
        nothing_written()
    found = point(LIVE[0], steps=8)
    print(found["attempts"] / found["seconds"])


def checkpoint() -> None:
    """Print seconds of a copy of weights and optimiser state, and of `save` until training may go on; megabytes copied."""
    import torch

    from antiphon.algorithms.config import AlgorithmConfig
    from antiphon.learning.config import LearnerConfig, OptimizerConfig
    from antiphon.learning.data_samples import supervised_batch
    from antiphon.learning.torch_learner import TorchLearner

    learner = TorchLearner(str(smollm2()), LearnerConfig(), 0)
    learner.emit = lambda event: None
    learner.begin(AlgorithmConfig(loss="sft"), OptimizerConfig(), 10)
    row = np.arange(20, dtype=np.int32)
    learner.step(supervised_batch([(row, row)], 64))
    state = learner.optimizer.state_dict()["state"].values()
    tensors = [*learner.model.parameters(), *(value for entry in state for value in entry.values())]
    copies, saves = [], []
    with tempfile.TemporaryDirectory() as place:
        for number in range(3):
            began = time.perf_counter()
            copied = [tensor.detach().to("cpu", copy=True) for tensor in tensors]
            copies.append(time.perf_counter() - began)
            size = sum(tensor.numel() * tensor.element_size() for tensor in copied) / 2**20
            del copied
            began = time.perf_counter()
            learner.save(Path(place) / str(number))
            saves.append(time.perf_counter() - began)
            while learner.advance():
                pass
    print(json.dumps([statistics.median(copies), statistics.median(saves), size, torch.get_num_threads()]))


# --- what is measured ---------------------------------------------------------------------------------------------------


def own(*arguments: str) -> str:
    """This script in a process of its own; returns what it printed."""
    done = subprocess.run([sys.executable, HERE, *arguments], capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1):  # 1: less accurate than the recipe demands
        sys.exit(f"{arguments} ended with {done.returncode}:\n{done.stdout[-500:]}{done.stderr[-2000:]}")
    return done.stdout


def step_seconds(config: Path, place: Path, steps: int, without: bool, *overrides: str) -> tuple[float, float]:
    """The median step, and the share of it in which the learner waits for a commit."""
    name = "without" if without else "with"
    order = [f"name={name}", f"record.directory={place}", f"steps={steps}", "evaluation.limit=10", *overrides]
    own("--train", *(["--without"] * without), "--", str(config), "--overwrite", *order)
    lines = map(json.loads, (place / name / "metrics.jsonl").read_text().splitlines())
    found = [line for line in lines if "step/seconds" in line][WARM_UP if steps > 2 * WARM_UP else 1 :]
    return tuple(statistics.median(line[key] for line in found) for key in ("step/seconds", "step/wait_commit_share"))


def pairs(number: int, measure, label: str) -> tuple[float, float]:
    """Medians with and without, of pairs in turning order."""
    found: dict[bool, list[float]] = {True: [], False: []}
    for pair in range(number):
        for without in (False, True) if pair % 2 else (True, False):
            found[without].append(measure(without))
        print(f"{label}: with {found[False][-1]:.4g}, without {found[True][-1]:.4g}", flush=True)
    return statistics.median(found[False]), statistics.median(found[True])


def audit_of_a_million(place: Path, attempts: int) -> float:
    """Seconds of an audit of so many attempts, trained on in steps of 256 groups of 16."""
    from antiphon.core.types import (
        AttemptId,
        AttemptStatus,
        GroupOutcome,
        PolicyVersion,
        Prompt,
        Score,
        Segment,
        Trajectory,
        TrajectoryMeta,
    )
    from antiphon.inspect.audit import audit
    from antiphon.record.events import Events
    from antiphon.record.resume import open_first_lineage

    groups, siblings = 256, 16
    rollout = {
        "groups_per_step": groups,
        "group_size": siblings,
        "async_ratio": 0.0,
        "sampler": None,
        "deterministic": False,
    }
    (place / "config.yaml").write_text(yaml.safe_dump({"rollout": rollout}))
    row = np.arange(8, dtype=np.int32)
    segment = Segment(
        tokens=row, loss_mask=row > 3, logprobs=row.astype(np.float32), versions=np.zeros_like(row), turns=()
    )

    async def write() -> None:
        store = LedgerStore(place)
        open_first_lineage(store)
        ledger, dispatched = Ledger(store, Events(), run=run_synchronously), 0
        for step in range(attempts // (groups * siblings)):
            version, taken = PolicyVersion(0, step), range(step * groups, (step + 1) * groups)
            names = [AttemptId(group, sibling, 0) for group in taken for sibling in range(siblings)]
            for group in taken:
                ledger.add_group(group, Prompt(id=f"p{group}", task="t", messages=()), version)
            for name in names:
                ledger.add_attempt(name, version)
                meta = TrajectoryMeta(
                    id=name,
                    prompt_id=f"p{name.group}",
                    task="t",
                    started=version,
                    newest=version,
                    status=AttemptStatus.FINISHED,
                    score=Score.of(1.0),
                    completion_tokens=4,
                )
                ledger.add_trajectory(Trajectory(meta=meta, payload=(segment,)))
            ledger.begin_step(taken)
            for group in taken:
                ledger.end_group(group, GroupOutcome.COMPLETE)
            for name in names:
                ledger.set_status(name, AttemptStatus.TRAINED)
            ledger.end_step(version.next())
            ledger.add_version(version.next(), None)
            dispatched += len(names)
            total = dispatched
            ledger.balance = lambda total=total: {"dispatched": total, "trained": total}
            await ledger.commit()
        await ledger.close()

    asyncio.run(write())
    (place / "checkpoints").mkdir()
    began = time.perf_counter()
    found = audit(place)
    seconds = time.perf_counter() - began
    assert not found.violations, found.violations
    return seconds


def crash(place: Path) -> tuple[float, float]:
    """Seconds of generation lost in a crash: with the ledger, and with the checkpoint alone."""
    arm = "from antiphon.core import failpoints; failpoints.arm('ledger.committed', 58)"
    arm += "; from antiphon.cli import main; main()"
    order = [
        str(TINY),
        "name=crash",
        f"record.directory={place}",
        "sft.steps=20",
        "sft.stop_accuracy=0",
        "checkpoint.every=5",
    ]
    order += ["evaluation.limit=10", "evaluation.minimum_accuracy=0"]
    killed = subprocess.run([sys.executable, "-c", arm, "train", *order, "steps=300"], capture_output=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    own("--train", "--", *order, "steps=70", "--resume")
    with closing(sqlite3.connect(place / "crash" / "ledger.db")) as db:
        (cut, died) = db.execute(
            "SELECT l.cut, max(coalesce(s.taken, 0), coalesce(s.published, 0)) FROM lineages l, steps s"
            " WHERE l.lineage = 1 AND s.lineage = 0 ORDER BY 2 DESC LIMIT 1"
        ).fetchone()
        (finished,) = db.execute(
            "SELECT sum(seconds) FROM attempts a LEFT JOIN steps s USING (lineage, step) WHERE a.lineage = 0"
            " AND file IS NOT NULL AND (a.status = 'lost' OR s.step > ?)",
            (cut,),
        ).fetchone()
        (running,) = db.execute(
            "SELECT sum(max(? - begun, 0)) FROM attempts WHERE lineage = 0 AND status = 'lost' AND file IS NULL",
            (died,),
        ).fetchone()
        (saved,) = db.execute("SELECT sum(seconds) FROM attempts WHERE lineage = 1 AND origin IS NOT NULL").fetchone()
    without = (finished or 0) + (running or 0)
    return without - (saved or 0), without


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--attempts", type=int, default=1_000_000)
    parser.add_argument("--skip-smollm2", action="store_true")
    parser.add_argument("--train", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--control", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--checkpoint", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--without", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("rest", nargs="*", help=argparse.SUPPRESS)
    options, extra = parser.parse_known_args()
    if options.train:
        return train([*options.rest, *extra], options.without)
    if options.control:
        return control(options.without)
    if options.checkpoint:
        return checkpoint()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as root:
        place, figures, shares = Path(root), {}, []
        warm = ("sft.steps=100", "sft.stop_accuracy=0", "evaluation.minimum_accuracy=0")

        def tiny(without: bool) -> float:
            seconds, share = step_seconds(TINY, place, options.steps, without, *warm)
            if not without:
                shares.append(share)
            return seconds

        kept, lean = pairs(options.pairs, tiny, "tiny_arithmetic, seconds a step")
        figures |= {
            "tiny_step_seconds_with": kept,
            "tiny_step_seconds_without": lean,
            "tiny_cost_share": kept / lean - 1,
        }
        figures["tiny_wait_commit_share"] = statistics.median(shares)
        kept, lean = pairs(
            options.pairs,
            lambda without: float(own("--control", *(["--without"] * without))),
            "control plane, attempts a second",
        )
        figures |= {"attempts_per_second_with": kept, "attempts_per_second_without": lean, "rate_share": kept / lean}
        copy, save, size, _ = json.loads(own("--checkpoint"))
        figures |= {"copy_seconds": copy, "checkpoint_stall_seconds": save, "copied_mib": size}
        (place / "million").mkdir()
        figures["audit_seconds"] = audit_of_a_million(place / "million", options.attempts)
        figures["audited_attempts"] = options.attempts
        with_ledger, without_ledger = crash(place)
        figures |= {"lost_seconds_with_ledger": with_ledger, "lost_seconds_checkpoint_alone": without_ledger}
        if not options.skip_smollm2:
            kept, lean = pairs(
                1, lambda without: step_seconds(SMOLLM2, place, 5, without)[0], "SmolLM2, seconds a step"
            )
            figures |= {"smollm2_step_seconds_with": kept, "smollm2_step_seconds_without": lean}
    print(table(["figure", "value"], [[key, f"{value:.4g}"] for key, value in figures.items()]))
    print("written:", write_result("record", figures, measures=MEASURES))


if __name__ == "__main__":
    main()
