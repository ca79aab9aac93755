"""Going on with a run that has ended in any way: at the newest checkpoint that is whole, with all that its ledger has.

What earlier lives did after that step is undone. Attempts that were alive are lost, and their prompts are offered again. A
finished trajectory whose tokens come from versions that still stand is not sampled again: `ReusableRollouts` hands it to the
group that asks for its prompt.
"""

import hashlib
import json
import sqlite3
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from antiphon import __version__
from antiphon.core.errors import RecordError
from antiphon.core.types import AttemptId, PayloadReference, Prompt, Trajectory
from antiphon.record import reading, schema, trajectories
from antiphon.record.checkpoint import newest_checkpoint, read_state, set_aside_newer
from antiphon.record.ledger import LedgerStore

Identity = tuple[str, str, int]  # of a prompt: task, id, epoch


@dataclass(frozen=True, slots=True)
class ReusableRollout:
    """A trajectory that an earlier life of the run has finished."""

    started: int  # version
    origin: str
    file: str
    _trajectory: Trajectory

    def trajectory(self, attempt: AttemptId) -> Trajectory:
        """The trajectory, under the name that it has from now on."""
        return trajectories.with_id(self._trajectory, attempt)


@dataclass(slots=True)
class ReusableRollouts:
    """Trajectories that wait for their prompts to be offered again."""

    by_prompt: dict[Identity, dict[int, ReusableRollout]] = field(default_factory=dict)  # by prompt and sibling

    def exclude_tasks(self, tasks: Collection[str]) -> None:
        """Do without those of `tasks`."""
        self.by_prompt = {identity: found for identity, found in self.by_prompt.items() if identity[0] not in tasks}

    def take(self, prompt: Prompt, oldest: int) -> Mapping[int, ReusableRollout]:
        """Hand out those of a prompt that started at version `oldest` or later, by sibling."""
        found = self.by_prompt.pop((prompt.task, prompt.id, prompt.epoch), {})
        return {sibling: kept for sibling, kept in found.items() if kept.started >= oldest}


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeState:
    """Where a run goes on."""

    checkpoint: Path
    lineage: int  # the new one
    state: Mapping[str, Any]  # that the checkpoint was saved with
    reusable: ReusableRollouts
    lost: int  # attempts


class Lineages:
    """Which version is which: one number can name several, of which later lives undid all but one."""

    def __init__(self, rows: Mapping[int, tuple[int | None, int]]) -> None:
        """`rows` maps each lineage to its parent and the version at its cut."""
        self._rows = rows

    def origin(self, lineage: int, version: int) -> tuple[int, int]:
        """The lineage that published the version which `lineage` knows by this number, and the number."""
        parent, cut = self._rows[lineage]
        while parent is not None and version <= cut:
            lineage = parent
            parent, cut = self._rows[lineage]
        return lineage, version

    def is_current(self, lineage: int, version: int, now: int) -> bool:
        """Whether a version of `lineage` is still one of the lineage `now`."""
        return self.origin(lineage, version) == self.origin(now, version)


def open_first_lineage(store: LedgerStore) -> None:
    """Open the first lineage of a run."""
    with store.connection as db:
        db.execute("INSERT INTO lineages VALUES (0, NULL, 0, 0, ?, NULL)", (code_version(),))


def open_next_lineage(
    store: LedgerStore, checkpoints: Path, max_age: int, tell: Callable[[str], None], *, refer: bool = False
) -> ResumeState:
    """Open the next lineage. `max_age` is the age up to which a trajectory may be trained on; `tell` hears what was passed
    over; with `refer` the payloads of what returns stay where they are. `RecordError` if no checkpoint is whole."""
    checkpoint = newest_checkpoint(checkpoints, tell)
    set_aside_newer(checkpoint)
    state = read_state(checkpoint)
    if "scheduler" not in state:
        raise RecordError(
            f"{checkpoint} is of supervised fine-tuning alone, which is not resumed; --overwrite starts anew"
        )
    step, version, parent = state["step"], state["version"], state["lineage"]
    with store.connection as db:
        (last,) = db.execute("SELECT max(lineage) FROM lineages").fetchone()
        lineage, live = last + 1, f"status IN {schema.LIVE}"
        lost = db.execute(f"SELECT lineage, count(*) FROM attempts WHERE {live} GROUP BY lineage").fetchall()
        db.executemany("INSERT INTO balance VALUES (?, 'lost', ?)", lost)
        db.execute(f"UPDATE attempts SET status = 'lost' WHERE {live}")
        db.execute("UPDATE groups SET outcome = 'lost' WHERE outcome IS NULL")
        db.execute("UPDATE steps SET undone = 1 WHERE step > ?", (step,))
        kept = json.dumps({name: state.get(name) for name in ("mixture", "scheduler", "controllers")})
        db.execute(
            "INSERT INTO lineages VALUES (?, ?, ?, ?, ?, ?)", (lineage, parent, step, version, code_version(), kept)
        )
    return ResumeState(
        checkpoint=checkpoint,
        lineage=lineage,
        state=state,
        reusable=find_reusable(store.connection, store.rollouts, lineage, version, version - max_age, refer=refer),
        lost=sum(count for _, count in lost),
    )


def find_reusable(
    db: sqlite3.Connection, rollouts: Path, lineage: int, newest_version: int, oldest_start: int, *, refer: bool = False
) -> ReusableRollouts:
    """What lives before `lineage` have finished with versions up to `newest_version` that still stand, started at
    `oldest_start` or later; with `refer`, by reference."""
    rows = db.execute("SELECT lineage, parent, version FROM lineages").fetchall()
    lineages = Lineages({number: (parent, version) for number, parent, version in rows})
    finished = db.execute(
        "SELECT a.lineage, a.grp, a.sibling, a.try, a.started, a.newest, a.file, a.digest, a.origin, p.task, p.id, p.epoch"
        " FROM attempts a JOIN groups USING (lineage, grp) JOIN prompts p USING (prompt)"
        " WHERE a.lineage < ? AND a.started >= ? AND a.newest <= ? AND a.file IS NOT NULL AND a.score IS NOT NULL"
        " ORDER BY a.lineage, a.grp, a.sibling, a.try",
        (lineage, oldest_start, newest_version),
    )
    content = cache(lambda file: trajectories.read(reading.resolve_file(rollouts, file)))
    metas = cache(lambda file: trajectories.read_metas(reading.resolve_file(rollouts, file)))
    found_all = ReusableRollouts()
    for life, group, sibling, attempt, started, newest_token, file, digest, origin, *identity in finished:
        if not lineages.is_current(life, newest_token, lineage):
            continue
        origin = origin or f"{life}:{group}.{sibling}.{attempt}"
        made_by = AttemptId(*map(int, origin.partition(":")[2].split(".")))
        lies = PayloadReference(file, made_by, digest)
        found = Trajectory(meta=metas(file)[made_by], payload=lies) if refer else content(file)[made_by]
        kept = ReusableRollout(started, origin, file, found)
        task, name, epoch = identity
        found_all.by_prompt.setdefault((task, name, epoch), {}).setdefault(sibling, kept)
    return found_all


@cache
def code_version() -> str:
    """The version of this package, and a digest of its sources."""
    root = Path(__file__).parent.parent
    digest = hashlib.blake2b(digest_size=8)
    for file in sorted(root.rglob("*.py")):
        digest.update(file.relative_to(root).as_posix().encode() + file.read_bytes())
    return f"{__version__}+{digest.hexdigest()}"
