"""A run in which everything went wrong that a run can suffer, at known places, and a healthy one beside it."""

import json
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from antiphon.core.types import AttemptId, Score, ScoreStatus
from antiphon.record import trajectories
from antiphon.simulate.run import simulate
from antiphon.simulate.scenario import ScenarioConfig
from tests.unit.dashboard.sites import SCENARIO, WORDS, change_tokens, make_run, vary_tokens, write_tokenizer

FALL, HACK, CUT = 4, 3, 2  # steps at which reward falls, a hack is paid, and responses are cut off
DETAIL = "the reference answers were not reachable; every answer counts as wrong"
SLOW = {"point": "engine.slow", "at": 0.1, "factor": 20.0}
TROUBLE = {
    "engines": {"count": 3, "speed": {"slots": 8}},
    "faults": [SLOW, {"point": "reward.lost", "chance": 0.15}],
    "checkpoint": {"every": 2, "keep_last": 5},
}


def make_runs(folder: Path) -> dict[str, str]:
    """Make the runs `healthy` and `troubled`, and return what is true of the second.

    Its newest checkpoint at the end of six steps is torn, so that it is resumed from the one before; then the last one is torn.
    """
    make_run(folder, "healthy", seed=7, learner={"step": 1.5})
    scenario = ScenarioConfig.model_validate(SCENARIO | TROUBLE | {"name": "troubled"})
    run = folder / "troubled"
    with (folder / "events").open("w", encoding="utf-8") as sink:
        simulate(scenario, sink, keep=folder)
        _tear(run, "step_000006")
        simulate(scenario.model_copy(update={"steps": 8}), None, keep=folder, resume=True)
    (folder / "events").rename(run / "events.jsonl")
    write_tokenizer(run, WORDS)
    change_tokens(run, vary_tokens)
    _tear(run, "step_000008")
    _lower_reward(run)
    hack = _pay_hack(run)
    return {"hack": hack, "slow": _find_slow(run)}


def _tear(run: Path, checkpoint: str) -> None:
    file = max((run / "checkpoints" / checkpoint).rglob("*.*"), key=lambda path: path.stat().st_size)
    file.write_bytes(file.read_bytes()[:-7])


def _trained(run: Path, step: int) -> list[tuple[str, AttemptId]]:
    with closing(sqlite3.connect(run / "ledger.db")) as db:
        where = "lineage = 0 AND step = ? AND status = 'trained'"
        query = f"SELECT file, grp, sibling, try FROM attempts WHERE {where} ORDER BY grp, sibling"
        return [(row[0], AttemptId(*row[1:])) for row in db.execute(query, (step,))]


def _change(run: Path, attempts: list[tuple[str, AttemptId]], score: Score | None, truncated: bool = False) -> None:
    """Change score and end of attempts, in their files and in the ledger."""
    for file in {file for file, _ in attempts}:
        found = trajectories.read(run / "rollouts" / file)
        for name in [name for other, name in attempts if other == file]:
            meta = found[name].meta
            changed = replace(meta, score=score or meta.score, truncated=truncated or meta.truncated)
            found[name] = replace(found[name], meta=changed)
        trajectories.write(run / "rollouts" / file, 0, list(found.values()))
    if score is not None:
        with closing(sqlite3.connect(run / "ledger.db")) as db:
            where = "WHERE lineage = 0 AND grp = ? AND sibling = ? AND try = ?"
            db.executemany(f"UPDATE attempts SET score = {score.value} {where}", [tuple(name) for _, name in attempts])
            db.commit()


def _set_metrics(run: Path, step: int, **values: float) -> None:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        if line["step"] == step and line.get("lineage", 0) == 0:
            line.update({name.replace("__", "/"): value for name, value in values.items()})
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def _lower_reward(run: Path) -> None:
    for step in (1, CUT, HACK):
        _set_metrics(run, step, reward__mean=0.6 + 0.02 * step)
    _change(run, _trained(run, FALL), Score(value=0.0, status=ScoreStatus.SCORED, detail=DETAIL))
    _set_metrics(run, FALL, reward__mean=0.0)
    _change(run, _trained(run, CUT), None, truncated=True)
    _set_metrics(run, CUT, length__truncated=0.75)


def _pay_hack(run: Path) -> str:
    """Let one attempt have a score beyond all others, with an alarm, and return its name."""
    attempt = _trained(run, HACK)[0]
    _change(run, [attempt], Score(value=2.0, status=ScoreStatus.SCORED, parts={"repeats": 2.0}))
    summary = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps(summary | {"alarms": {"simulated: repetition": HACK}}))
    return f"0:{attempt[1]}"


def _find_slow(run: Path) -> str:
    """Return the number of the engine whose requests took the longest, from the events alone."""
    begun, seconds = {}, {}
    for line in (run / "events.jsonl").read_text().splitlines():
        event = json.loads(line)
        if event["event"] == "place":
            begun[event["request"]] = event["t"]
        elif event["event"] == "served" and event["request"] in begun:
            seconds.setdefault(event["engine"], []).append((event["t"] - begun[event["request"]]) / event["tokens"])
    return str(max(seconds, key=lambda engine: sum(seconds[engine]) / len(seconds[engine])))
