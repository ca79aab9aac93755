"""The page of a run's record: audit, lineages, checkpoints and versions."""

import os
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from antiphon.core.errors import AntiphonError
from antiphon.dashboard.audits import AuditResult
from antiphon.dashboard.cards import RunCard
from antiphon.dashboard.params import Params
from antiphon.dashboard.site import Site
from antiphon.record import checkpoint, safe_files
from antiphon.record.reader import RunReader
from antiphon.record.safe_ledger import open_ledger

SMALL = 32 << 20  # bytes of a ledger that is audited at once
MOST_CHECKPOINTS = 500
MOST_LINEAGES = 500
MOST_FILES = 100_000  # of a checkpoint whose sizes are compared


@dataclass(frozen=True, slots=True, kw_only=True)
class Lineage:
    """One lineage.

    Attributes:
        lineage: Its number.
        parent: The lineage that it continues; None for the first.
        depth: Number of its ancestors.
        cut: Step of the parent after which it begins.
        version: Policy version at the cut.
        steps: Steps that it did.
        undone: Of these, steps that a later lineage undid.
        first: Its first step.
        last: Its last step.
        attempts: Attempts that it dispatched.
        end: How it ended.
        code: Version and digest of the code that wrote it.
    """

    lineage: int
    parent: int | None
    depth: int
    cut: int
    version: int
    steps: int
    undone: int
    first: int | None
    last: int | None
    attempts: int
    end: str
    code: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """One checkpoint.

    Attributes:
        name: Its directory.
        state: `whole`, `torn`, `partial` (it is being written, or its writing broke off) or `removed`.
        reason: The first file that is wrong.
        bytes: Its size.
        lineage: Lineage that wrote it; None if the ledger does not have it.
        version: Policy version in it.
        written: When it was completed, as seconds since 1970.
    """

    name: str
    state: str
    reason: str
    bytes: int | None
    lineage: int | None
    version: int | None
    written: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordPage:
    """The record of a run.

    Attributes:
        card: The run.
        has_ledger: False for runs of offline training, which have no ledger, no lineages and no checkpoints but the model.
        audit: Result of the audit.
        lineages: Its lineages.
        checkpoints: Its checkpoints, the newest first.
        branch: The checkpoint of another run that it begins at; empty if it begins at its model.
        versions: Number of policy versions whose weights have a digest.
        files: Size of each part of the directory in bytes.
        problem: The reason why the ledger cannot be read.
    """

    card: RunCard
    has_ledger: bool
    audit: AuditResult
    lineages: list[Lineage]
    checkpoints: list[Checkpoint]
    branch: str
    versions: int
    files: list[tuple[str, int]]
    problem: str


def query_record(site: Site, params: Params) -> RecordPage:
    """Return the record of a run; `audit=1` begins an audit, which small runs get by themselves."""
    run = site.folder.find(params.name)
    ledger = run / "ledger.db"
    is_small = ledger.exists() and ledger.stat().st_size < SMALL
    ask = bool(params.choice("audit", ("1",))) or (is_small and site.read_card(params.name).state != "running")
    card = site.read_card(params.name)
    has_ledger = ledger.exists() or card.kind in ("rl", "sft")
    lineages: list[Lineage] = []
    written: dict[str, tuple[int, int]] = {}
    versions, problem, branch = 0, "", ""
    try:
        with closing(open_ledger(run, check_pages=False)) as db, safe_files.convert_read_errors(ledger):
            lineages = _read_lineages(db)
            rows = db.execute(
                "SELECT name, lineage, version FROM checkpoints ORDER BY step DESC LIMIT ?", (MOST_CHECKPOINTS,)
            )
            written = {name: (lineage, version) for name, lineage, version in rows}
            (versions,) = db.execute("SELECT count(*) FROM versions").fetchone()
            if (point := RunReader(run, db).find_branch_point()) is not None:
                branch = f"step {point.step} of {point.run}, version {point.version}"
    except AntiphonError as error:
        problem = str(error) if has_ledger else ""
    return RecordPage(
        card=card,
        has_ledger=has_ledger,
        audit=site.audits.read(run, ask=ask) if ledger.exists() else AuditResult(state="unreadable", problem=problem),
        lineages=lineages,
        checkpoints=_list_checkpoints(run, written),
        branch=branch,
        versions=versions,
        files=_measure(run),
        problem=problem,
    )


def _read_lineages(db: Any) -> list[Lineage]:
    rows = db.execute(
        "SELECT lineage, parent, cut, version, code FROM lineages ORDER BY lineage LIMIT ?", (MOST_LINEAGES,)
    )
    steps = {
        row[0]: row[1:]
        for row in db.execute("SELECT lineage, count(*), sum(undone), min(step), max(step) FROM steps GROUP BY lineage")
    }
    counts = dict(db.execute("SELECT lineage, attempts FROM balance WHERE status = 'dispatched'"))
    query = "SELECT lineage, coalesce(detail ->> '$.error', '') FROM events WHERE kind = 'end'"
    ends, depths, found = dict(db.execute(query)), dict[int, int](), []
    for lineage, parent, cut, version, code in rows:
        depths[lineage] = depths.get(parent, -1) + 1 if parent is not None else 0
        done, undone, first, last = steps.get(lineage, (0, 0, None, None))
        end = ends.get(lineage)
        found.append(
            Lineage(
                lineage=lineage,
                parent=parent,
                depth=depths[lineage],
                cut=cut,
                version=version,
                steps=done,
                undone=undone or 0,
                first=first,
                last=last,
                attempts=counts.get(lineage, 0),
                end="no end on record" if end is None else end[:500] or "ended by itself",
                code=code[:200],
            )
        )
    return found


def _list_checkpoints(run: Path, written: dict[str, tuple[int, int]]) -> list[Checkpoint]:
    """Return the checkpoints on disk and in the ledger. Sizes are compared; digests are what the audit compares."""
    folder = run / "checkpoints"
    names = set(written)
    try:
        safe_files.resolve_path(run, "checkpoints")
        names |= {path.name for path in folder.iterdir() if path.name.startswith("step_")} if folder.is_dir() else set()
    except (AntiphonError, OSError):
        pass
    found = []
    for name in sorted(names, reverse=True)[:MOST_CHECKPOINTS]:
        lineage, version = written.get(name.removesuffix(".partial"), (None, None))
        state, reason, size, moment = _check_checkpoint(run, name)
        found.append(
            Checkpoint(
                name=name, state=state, reason=reason, bytes=size, lineage=lineage, version=version, written=moment
            )
        )
    return found


def _check_checkpoint(run: Path, name: str) -> tuple[str, str, int | None, float | None]:
    path = run / "checkpoints" / name
    try:
        safe_files.resolve_path(run, f"checkpoints/{name}")
        if not path.is_dir():
            return "removed", "", None, None
        moment = path.stat().st_mtime
        if name.endswith(".partial"):
            return "partial", "it is being written, or its writing broke off", None, moment
        total = 0
        for file, (size, _) in list(checkpoint.list_files(path).items())[:MOST_FILES]:
            have = safe_files.resolve_file(path, file).stat().st_size
            if have != size:
                return "torn", f"{file} has {have:,} bytes instead of {size:,}", None, moment
            total += size
    except (AntiphonError, OSError) as error:
        return "torn", str(error).replace(f"{path}/", "")[:500], None, None
    return "whole", "", total, moment


def _measure(run: Path) -> list[tuple[str, int]]:
    """Return the sizes of the parts of a run directory; links are not followed."""
    found: list[tuple[str, int]] = []
    with os.scandir(run) as entries:
        for entry in sorted(entries, key=lambda each: each.name)[:200]:
            if entry.is_dir(follow_symlinks=False):
                sizes = [
                    os.lstat(os.path.join(folder, name)).st_size
                    for folder, _, names in os.walk(entry.path)
                    for name in names[:MOST_FILES]
                ]
                found.append((f"{entry.name}/", sum(sizes)))
            elif entry.is_file(follow_symlinks=False):
                found.append((entry.name, entry.stat(follow_symlinks=False).st_size))
    return sorted(found, key=lambda each: -each[1])[:12]
