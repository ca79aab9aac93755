"""Simulate runs that crash, on a disk that loses writes: `antiphon simulate --crashes`.

A seed draws a scenario and the points at which its lineages crash. At each crash, what was not forced to disk may be torn,
lost, or done in another order; then the ledger must balance at once, and again after the resume. The database loses only the
current transaction, since each commit is forced to disk before anything relies on it.
"""

import shutil
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from antiphon.core import failpoints
from antiphon.core.errors import AntiphonError, RecordError, RolloutError, WorkerDiedError
from antiphon.core.rng import generator
from antiphon.inspect.audit import audit
from antiphon.learning.config import CheckpointConfig
from antiphon.record.checkpoint import NoCheckpointError, list_checkpoints
from antiphon.simulate.chaos_scenario import draw_scenario
from antiphon.simulate.invariants import InvariantError
from antiphon.simulate.run import simulate
from antiphon.simulate.scenario import ScenarioConfig

MAX_LINEAGES = 5  # the last is not crashed on purpose
POINTS = (
    "ledger.commit",
    "ledger.committed",
    "rollouts.write",
    "rollouts.written",
    "checkpoint.write",
    "checkpoint.publish",
    "checkpoint.published",
    "publish",
    "published",
    "sync",
)


class MachineCrashError(AntiphonError):
    """The simulated machine crashed."""


class UnreliableDisk:
    """Tracks what was forced to disk, and can lose the rest."""

    def __init__(self, folders: tuple[str, ...], run: Path) -> None:
        self._run = run
        self._folders = folders
        self._files: dict[int, bytes] = {}  # inode -> content when it was last forced to disk
        self._names: dict[int, dict[str, int]] = {}  # inode of a directory -> names in it at that time

    def record_sync(self, path: Path) -> None:
        """Record that a file, or the names in a directory, are on disk."""
        if path.is_dir():
            self._names[path.stat().st_ino] = {entry.name: entry.stat().st_ino for entry in path.iterdir()}
        else:
            self._files[path.stat().st_ino] = path.read_bytes()

    def lose_writes(self, rng: np.random.Generator) -> None:
        """Lose at random what was not forced to disk: renames and new names in a directory, each by itself, and contents."""
        for folder in self._folders:
            if (self._run / folder).is_dir():
                self._lose_in(self._run / folder, rng)
                for path in (self._run / folder, *(self._run / folder).rglob("*")):  # what is left is on disk
                    self.record_sync(path)

    def _lose_in(self, directory: Path, rng: np.random.Generator) -> None:
        before = self._names.get(directory.stat().st_ino, {})
        names = {number: name for name, number in before.items()}
        for entry in sorted(directory.iterdir()):
            number = entry.stat().st_ino
            if before.get(entry.name) != number and rng.random() < 0.5:  # the name was not forced to disk
                old = names.get(number, "")  # inodes are reused, so only a name that becomes this one is its own
                if old and _stem(old) == _stem(entry.name):
                    entry.rename(directory / old)
                    continue
                if entry.name not in before:
                    shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
                    continue
            if entry.is_dir():
                self._lose_in(entry, rng)
            elif self._files.get(number) != (content := entry.read_bytes()):
                self._tear(entry, content, rng)

    def _tear(self, file: Path, content: bytes, rng: np.random.Generator) -> None:
        match int(rng.integers(4)):
            case 0:
                file.write_bytes(b"")
            case 1:
                file.write_bytes(content[: int(rng.integers(len(content) + 1))])
            case 2 if content:
                torn = bytearray(content)
                torn[int(rng.integers(len(torn)))] ^= 1 << int(rng.integers(8))
                file.write_bytes(torn)
            case _:
                pass  # the write reached the disk


def _stem(name: str) -> str:
    """Return the part of a name that stays when its file is published or set aside."""
    return name.lstrip(".").partition(".")[0]


def run_crashes(seeds: Iterable[int], report: Callable[[str], None] = print) -> Counter[str]:
    """Simulate the crashing scenarios of many seeds, and count how lineages ended.

    Args:
        seeds: The seeds.
        report: Receives the command that repeats a seed whose run breaks an invariant.

    Raises:
        InvariantError: A run broke an invariant.
    """
    endings: Counter[str] = Counter()
    for seed in seeds:
        try:
            with TemporaryDirectory() as root:
                endings += crash_seed(seed, Path(root))
        except Exception:
            report(f"seed {seed} fails; again: antiphon simulate --crashes 1 --seed {seed}")
            raise
    return endings


def crash_seed(seed: int, root: Path) -> Counter[str]:
    """Simulate all lineages of a seed's scenario in `root`, and count how they ended."""
    rng, endings = generator(seed, "crashes"), Counter[str]()
    scenario = draw_scenario(seed)
    scenario = scenario.model_copy(
        update={
            "prompts": 1000,  # no epoch ends, so that no prompt may come twice
            "checkpoint": CheckpointConfig(every=int(rng.integers(1, 4)), keep_last=int(rng.integers(1, 4))),
        }
    )
    disk = UnreliableDisk(("rollouts", "checkpoints"), root / scenario.name)
    for number in range(MAX_LINEAGES):
        ending = _run_lineage(scenario, root, number > 0, disk, rng, crash=number < MAX_LINEAGES - 1)
        endings[ending] += 1
        if ending == "done":
            return endings
        disk.lose_writes(rng)
        if ending == "nothing to resume" or not (root / scenario.name / "ledger.db").is_file():
            break
        _check_run(root / scenario.name)
    return endings


def _run_lineage(
    scenario: ScenarioConfig, root: Path, resume: bool, disk: UnreliableDisk, rng: np.random.Generator, crash: bool
) -> str:
    """Simulate one lineage and return how it ended."""
    point, left = str(rng.choice(POINTS)), int(rng.integers(1, 12))

    def on_failpoint(reached: str, path: Path | None) -> None:
        nonlocal left
        if reached == "sync" and path is not None:
            disk.record_sync(path)
        left -= reached == point
        if crash and not left:
            raise MachineCrashError(point)

    failpoints.watch(on_failpoint)
    try:
        simulate(scenario, keep=root, resume=resume)
    except MachineCrashError:
        return f"crashed: {point}"
    except NoCheckpointError as error:
        if list_checkpoints(root / scenario.name / "checkpoints"):
            raise InvariantError(f"a checkpoint is torn where none may be: {error}") from error
        return "nothing to resume"
    except RecordError as error:
        raise InvariantError(f"the resume failed: {error}") from error
    except (WorkerDiedError, RolloutError):
        return "a fault ended it"
    finally:
        failpoints.watch(None)
    _check_run(root / scenario.name)
    return "done"


def _check_run(run: Path) -> None:
    violations = audit(run).violations
    if violations:
        raise InvariantError("\n".join(violations))
