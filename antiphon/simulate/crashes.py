"""Runs that crash, on a disk that forgets: what was not forced to it may be torn, gone, or done in another order.

A seed draws a scenario, and where its lives end; between two of them the disk loses what it may. Whatever it loses, the ledger
must balance at once, and again after the resume. Databases lose the transaction in hand and nothing else, since each commit is
forced to disk before anybody relies on it.
"""

import shutil
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from antiphon.core import failpoints as points
from antiphon.core.errors import AntiphonError, RecordError, RolloutError, WorkerDied
from antiphon.core.rng import generator
from antiphon.inspect.audit import audit
from antiphon.learning.config import CheckpointConfig
from antiphon.simulate.chaos import InvariantBroken, draw_scenario
from antiphon.simulate.scenario import ScenarioConfig, simulate

LIVES = 5  # at most; the last is not ended on purpose
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


class Crashed(AntiphonError):
    """The machine is gone."""


class Disk:
    """Remembers what was forced to disk, and can forget the rest."""

    def __init__(self, folders: tuple[str, ...], run: Path) -> None:
        self._run = run
        self._folders = folders
        self._files: dict[int, bytes] = {}  # inode -> content when it was last forced
        self._names: dict[int, dict[str, int]] = {}  # inode of a directory -> its names then

    def synced(self, path: Path) -> None:
        """A file, or the names in a directory, are on disk."""
        if path.is_dir():
            self._names[path.stat().st_ino] = {entry.name: entry.stat().st_ino for entry in path.iterdir()}
        else:
            self._files[path.stat().st_ino] = path.read_bytes()

    def forget(self, draw: np.random.Generator) -> None:
        """Lose, as chance has it, what was not forced: renames and new names of a directory, each by itself; contents."""
        for folder in self._folders:
            if (self._run / folder).is_dir():
                self._forget_in(self._run / folder, draw)
                for path in (self._run / folder, *(self._run / folder).rglob("*")):  # what is left is what is on disk
                    self.synced(path)

    def _forget_in(self, directory: Path, draw: np.random.Generator) -> None:
        before = self._names.get(directory.stat().st_ino, {})
        names = {number: name for name, number in before.items()}
        for entry in sorted(directory.iterdir()):
            number = entry.stat().st_ino
            if before.get(entry.name) != number and draw.random() < 0.5:  # the name was not on disk
                old = names.get(number, "")  # numbers are given again, so only a name that becomes this one is its own
                if old and _stem(old) == _stem(entry.name):
                    entry.rename(directory / old)
                    continue
                if entry.name not in before:
                    shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
                    continue
            if entry.is_dir():
                self._forget_in(entry, draw)
            elif self._files.get(number) != (content := entry.read_bytes()):
                self._tear(entry, content, draw)

    def _tear(self, file: Path, content: bytes, draw: np.random.Generator) -> None:
        match int(draw.integers(4)):
            case 0:
                file.write_bytes(b"")
            case 1:
                file.write_bytes(content[: int(draw.integers(len(content) + 1))])
            case 2 if content:
                torn = bytearray(content)
                torn[int(draw.integers(len(torn)))] ^= 1 << int(draw.integers(8))
                file.write_bytes(torn)
            case _:
                pass  # it came through


def _stem(name: str) -> str:
    """What a name keeps when its file is put in place or out of the way."""
    return name.lstrip(".").partition(".")[0]


def run_crashes(seeds: Iterable[int], tell: Callable[[str], None] = print) -> Counter[str]:
    """Play the crashing scenarios of many seeds; returns what happened, and how often. A seed that breaks a promise is told of,
    with the command that plays it again, and raised."""
    seen: Counter[str] = Counter()
    for seed in seeds:
        try:
            with TemporaryDirectory() as root:
                seen += crashes(seed, Path(root))
        except Exception:
            tell(f"seed {seed} fails; again: antiphon simulate --crashes 1 --seed {seed}")
            raise
    return seen


def crashes(seed: int, root: Path) -> Counter[str]:
    """Play the scenario of a seed through all its lives in `root`; returns counts of what happened."""
    draw, seen = generator(seed, "crashes"), Counter[str]()
    scenario = draw_scenario(seed)
    scenario = scenario.model_copy(
        update={
            "prompts": 1000,  # no epoch ends, so that a prompt that comes twice is one too many
            "checkpoint": CheckpointConfig(every=int(draw.integers(1, 4)), keep_last=int(draw.integers(1, 4))),
        }
    )
    disk = Disk(("rollouts", "checkpoints"), root / scenario.name)
    for life in range(LIVES):
        end = _live(scenario, root, life > 0, disk, draw, crash=life < LIVES - 1)
        seen[end] += 1
        if end == "done":
            return seen
        disk.forget(draw)
        if end == "nothing to resume" or not (root / scenario.name / "ledger.db").is_file():
            break
        _check(root / scenario.name)
    return seen


def _live(
    scenario: ScenarioConfig, root: Path, resume: bool, disk: Disk, draw: np.random.Generator, crash: bool
) -> str:
    """One life; returns how it ended."""
    point, left = str(draw.choice(POINTS)), int(draw.integers(1, 12))

    def look(reached: str, path: Path | None) -> None:
        nonlocal left
        if reached == "sync" and path is not None:
            disk.synced(path)
        left -= reached == point
        if crash and not left:
            raise Crashed(point)

    points.watch(look)
    try:
        simulate(scenario, keep=root, resume=resume)
    except Crashed:
        return f"crashed: {point}"
    except RecordError as error:
        if "no checkpoint is whole" not in str(error):
            raise InvariantBroken(f"the resume failed: {error}") from error
        if list((root / scenario.name / "checkpoints").glob("step_??????")):
            raise InvariantBroken(f"a checkpoint is torn where none may be: {error}") from error
        return "nothing to resume"
    except (WorkerDied, RolloutError):
        return "a fault ended it"
    finally:
        points.watch(None)
    _check(root / scenario.name)
    return "done"


def _check(run: Path) -> None:
    violations = audit(run).violations
    if violations:
        raise InvariantBroken("\n".join(violations))
