"""One line about each run: its state, its progress, and what it has come to."""

import json
import re
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Generic, TypeVar

from antiphon.core.errors import AntiphonError
from antiphon.dashboard.errors import NotFoundError
from antiphon.record import notes, safe_files
from antiphon.record.safe_ledger import open_ledger

T = TypeVar("T")
KINDS = {
    "rl": "reinforcement learning",
    "sft": "supervised fine-tuning",
    "dpo": "preference optimisation",
    "reward-model": "reward modelling",
    "distill": "distillation",
}
STATES = ("running", "finished", "failed", "stopped", "damaged", "unread")
READ_SECONDS = 0.6  # for which a page waits for cards
TAIL = 1 << 18  # bytes at the end of `metrics.jsonl` that hold its last step
SPARK_POINTS = 32
QUIET_SECONDS = 180.0  # after the last write, a run whose lock cannot be seen counts as stopped
MOST_SUMMARY = 1 << 20
MOST_NOTE = 200  # characters of a note


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCard:
    """One run in the list of runs.

    Attributes:
        name: Path from the folder that is served.
        kind: One of `KINDS`: how it learns. Runs other than `rl` learn from data, and have no attempts.
        state: One of `STATES`; `stopped` means that its process is gone without an end on record.
        problem: The error that ended it, or the reason why it cannot be read.
        step: Last step; 0 if there is none.
        steps: Steps that it is to have; 0 if that is not known.
        started: When its directory was made, as ISO 8601 in UTC.
        updated: When it wrote its metrics last.
        seconds: Duration of training, from the summary or from start and last write.
        reward: Mean score of the last step.
        spark: Mean scores of up to 32 steps, evenly spaced.
        accuracy_before: Accuracy on the test prompts before training.
        accuracy_after: Accuracy after it; of a run that goes on, at the last evaluation.
        gain_interval: Confidence interval of the difference of both.
        alarms: Signals of reward hacking that are above their thresholds.
        tokens_per_second: Sampled tokens a second at the last step.
        model: The model that it began with.
        tasks: Names of its tasks.
        recipe: Recipe of the algorithm.
        tags: Tags that somebody gave it.
        note: First characters of the note about it.
    """

    name: str
    kind: str = "rl"
    state: str = "damaged"
    problem: str = ""
    step: int = 0
    steps: int = 0
    started: str = ""
    updated: str = ""
    seconds: float | None = None
    reward: float | None = None
    spark: list[float] = field(default_factory=list)
    accuracy_before: float | None = None
    accuracy_after: float | None = None
    gain_interval: list[float] | None = None
    alarms: int = 0
    tokens_per_second: float | None = None
    model: str = ""
    tasks: list[str] = field(default_factory=list)
    recipe: str = ""
    tags: list[str] = field(default_factory=list)
    note: str = ""


class KeptByRun(Generic[T]):
    """Keeps a result of reading each run until a file of the run changes. Requests that come together read it once."""

    def __init__(self) -> None:
        self._kept: dict[Path, tuple[Any, T]] = {}
        self._locks: dict[Path, threading.Lock] = {}

    def __contains__(self, run: Path) -> bool:
        """Return True if something was read of a run."""
        return run in self._kept

    def read(self, run: Path, read: Callable[[], T]) -> T:
        """Return what `read` returns, or has returned if no file of the run has changed since."""
        with self._locks.setdefault(run, threading.Lock()):
            signature = _sign(run)
            if run not in self._kept or self._kept[run][0] != signature:
                self._kept[run] = (signature, read())
            return self._kept[run][1]


class CardReader:
    """Reads cards and keeps each until a file of its run changes."""

    def __init__(self) -> None:
        self._cards: KeptByRun[RunCard] = KeptByRun()

    def read_all(self, runs: Mapping[str, Path], budget: float = READ_SECONDS) -> list[RunCard]:
        """Return the cards of runs; those that cannot be read in `budget` seconds have the state `unread`."""
        until, found = time.monotonic() + budget, []
        for name, run in sorted(runs.items(), key=lambda each: -_last_write(each[1])):
            in_time = run in self._cards or time.monotonic() < until
            found.append(self.read(name, run) if in_time else RunCard(name=name, state="unread"))
        return found

    def read(self, name: str, run: Path) -> RunCard:
        """Return the card of a run; a run that cannot be read has the state `damaged`."""
        return self._cards.read(run, lambda: _read_or_tell(name, run))


def _read_or_tell(name: str, run: Path) -> RunCard:
    try:
        with safe_files.convert_read_errors(run):
            return _read_card(name, run)
    except AntiphonError as error:
        return RunCard(name=name, problem=str(error)[:500])


def _sign(run: Path) -> tuple[Any, ...]:
    """Return what changes when a run writes something."""
    found: list[Any] = [is_locked(run)]
    for name in ("config.yaml", "metrics.jsonl", "summary.json", "ledger.db", "ledger.db-wal", notes.FILE):
        with suppress(OSError):
            stat = (run / name).stat()
            quiet = time.time() - stat.st_mtime > QUIET_SECONDS
            found.append((name, stat.st_ino, stat.st_size, stat.st_mtime_ns, quiet))
    return tuple(found)


def _read_card(name: str, run: Path) -> RunCard:
    config = safe_files.read_config(run)
    last, spark = _read_steps(run)
    summary = read_summary(run)
    kind, (state, problem) = _find_kind(run, config, summary), _find_state(run, summary)
    if state == "stopped" and kind != "rl":
        problem = "its process is gone without an end on record; --overwrite starts it anew"
    first = datetime.fromtimestamp((run / "config.yaml").stat().st_mtime, UTC)
    wrote = datetime.fromtimestamp(_last_write(run), UTC)
    alarms = summary.get("alarms") if summary else None
    written = read_notes(run)
    return RunCard(
        name=name,
        kind=kind,
        state=state,
        problem=problem,
        step=int(last.get("step") or last.get("sft_step") or summary.get("steps") or 0),
        steps=int(number) if isinstance(number := config.get("steps"), int | float) else 0,
        started=first.isoformat(timespec="seconds"),
        updated=wrote.isoformat(timespec="seconds"),
        seconds=_number(summary.get("train_seconds"), max((wrote - first).total_seconds(), 0.0)),
        reward=_number(last.get("reward/mean")),
        spark=spark,
        accuracy_before=_number(summary.get("accuracy_before"), summary.get("validation_before")),
        accuracy_after=_number(
            summary.get("accuracy_after"), _number(last.get("evaluation/accuracy"), summary.get("validation_after"))
        ),
        gain_interval=_interval(summary.get("gain_interval")),
        alarms=len(alarms) if isinstance(alarms, dict) else int(_number(last.get("reward/alarms")) or 0),
        tokens_per_second=_number(last.get("tokens/per_second")),
        model=str((config.get("model") or {}).get("path", ""))[:200],
        tasks=[str(task.get("name", ""))[:100] for task in config.get("tasks") or []][:20],
        recipe=str((config.get("algorithm") or {}).get("recipe", ""))[:100],
        tags=list(written.tags),
        note=written.text[:MOST_NOTE],
    )


def read_notes(run: Path) -> notes.Notes:
    """Return the notes of a run; empty if they cannot be read."""
    try:
        return notes.read_notes(run)
    except AntiphonError:
        return notes.Notes()


def _number(value: Any, other: Any = None) -> float | None:
    if isinstance(value, int | float):
        return float(value)
    return _number(other) if other is not None else None


def _interval(value: Any) -> list[float] | None:
    if isinstance(value, list) and len(value) == 2 and all(isinstance(each, int | float) for each in value):
        return [float(each) for each in value]
    return None


def read_summary(run: Path) -> dict[str, Any]:
    """Return the summary of a run; empty if it has none yet."""
    if not (run / "summary.json").exists():
        return {}
    found = safe_files.read_json(run, "summary.json", MOST_SUMMARY)
    return found if isinstance(found, dict) else {}


def _read_steps(run: Path) -> tuple[dict[str, Any], list[float]]:
    """Return the metrics of the last step, and mean scores of steps that are evenly spaced in the file."""
    path = run / "metrics.jsonl"
    if not path.exists():
        return {}, []
    spark: list[float] = []
    with safe_files.resolve_file(run, path.name).open("rb") as file:
        size = file.seek(0, 2)
        for place in range(SPARK_POINTS) if size else ():
            file.seek(size * place // SPARK_POINTS)
            if place:
                file.readline(TAIL)  # the rest of a line
            found = _parse(file.readline(TAIL)).get("reward/mean")
            if isinstance(found, int | float):
                spark.append(float(found))
        file.seek(max(size - TAIL, 0))
        lines = file.read(TAIL).split(b"\n")
    last: dict[str, Any] = {}
    for line in lines[-64:-1]:
        # Evaluations and alarms are not in every line.
        last |= {key: value for key, value in _parse(line).items() if value is not None}
    return last, spark


def _parse(line: bytes) -> Mapping[str, Any]:
    with suppress(ValueError, RecursionError):
        found = json.loads(line)
        if isinstance(found, dict):
            return found
    return {}


def _find_kind(run: Path, config: Mapping[str, Any], summary: Mapping[str, Any]) -> str:
    """Return how a run learns; one of supervised fine-tuning alone is told from a warm start by its end."""
    if "rollout" not in config and not (run / "ledger.db").exists():
        return next((kind for kind in ("dpo", "distill") if kind in config), "reward-model")
    if config.get("sft") and summary and (run / "ledger.db").exists():
        with closing(open_ledger(run, check_pages=False)) as db:
            return "rl" if db.execute("SELECT 1 FROM groups LIMIT 1").fetchone() else "sft"
    return "rl"


def require_attempts(card: RunCard) -> None:
    """Raise `NotFoundError` if a run is of a kind that has no attempts."""
    if card.kind != "rl":
        message = f"A run of {KINDS[card.kind]} has no attempts, groups or timeline: it learns from data"
        raise NotFoundError(f"{message}. Its page has its curves.")


def _find_state(run: Path, summary: Mapping[str, Any]) -> tuple[str, str]:
    """Return the state of a run, and the error that ended it."""
    locked = is_locked(run)
    if locked:
        return "running", ""
    error: str | None = None
    if (run / "ledger.db").exists():
        with open_ledger(run, check_pages=False) as db:
            (lineage,) = db.execute("SELECT max(lineage) FROM lineages").fetchone()
            query = "SELECT coalesce(detail ->> '$.error', '') FROM events WHERE kind = 'end' AND lineage = ?"
            row = db.execute(query, (lineage,)).fetchone()
            error = None if row is None else str(row[0])
        db.close()
    if error:
        return "failed", error[:500]
    if summary or error == "":
        return "finished", ""
    if locked is None and time.time() - _last_write(run) < QUIET_SECONDS:
        return "running", ""
    return "stopped", "its process is gone without an end on record; --resume continues it"


def _last_write(run: Path) -> float:
    times = []
    for name in ("metrics.jsonl", "ledger.db-wal", "ledger.db", "summary.json", "config.yaml"):
        with suppress(OSError):
            stat = (run / name).stat()
            if stat.st_size:  # readers leave empty ones
                times.append(stat.st_mtime)
    return max(times, default=0.0)


def is_locked(run: Path) -> bool | None:
    """Return True if a process on this machine writes to a run; None if the system does not list its locks.

    The lock is not tried: a run that begins at that moment would be refused.
    """
    try:
        inode = (run / "lock").stat().st_ino
        locks = Path("/proc/locks").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    return re.search(rf"FLOCK .*:{inode} ", locks) is not None
