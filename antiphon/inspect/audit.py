"""Check that a run kept its promises, from its directory alone.

The audit shares nothing with the writer but the schema: it has queries and file formats of its own.
"""

import json
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from antiphon.core.errors import RecordError
from antiphon.inspect import audit_files, audit_ledger
from antiphon.record import safe_files, schema
from antiphon.record.safe_ledger import open_ledger

LARGEST_NUMBER = 1_000_000  # that a configuration may hold where the checks compute


@dataclass(frozen=True, slots=True)
class Audit:
    """The result of an audit."""

    balance: dict[int, dict[str, int]]  # lineage -> status -> attempts
    ends: dict[
        int, str
    ]  # lineage -> error that ended it, '' for none; lineages that were killed or still run are not in it
    violations: list[str]
    branch_point: dict[str, str] | None = None  # run, lineage, step, version and digest of the checkpoint it begins at

    @property
    def open(self) -> int:
        """Number of attempts that have not ended: their process still runs, or was killed and nobody resumed it."""
        return sum(balance.get(status, 0) for balance in self.balance.values() for status in schema.LIVE)


def audit(directory: Path) -> Audit:
    """Check a run.

    Raises:
        RecordError: There is no ledger that can be read.
    """
    with closing(open_ledger(directory)) as db, safe_files.convert_read_errors(directory / "ledger.db"):
        db.execute("BEGIN")  # all queries see the same moment of a run that goes on
        balance: dict[int, dict[str, int]] = {}
        for lineage, status, count in db.execute("SELECT lineage, status, count(*) FROM attempts GROUP BY 1, 2"):
            balance.setdefault(lineage, {})[status] = count
        ends = dict(db.execute("SELECT lineage, coalesce(detail ->> '$.error', '') FROM events WHERE kind = 'end'"))
        branch = db.execute("SELECT detail FROM events WHERE kind = 'branch' ORDER BY number").fetchone()
        audit_ledger.mark_surviving(db)
        rollout, curricula = _read_rollout(directory), _read_curricula(directory)
        checks = (
            audit_ledger.check_lineages(db),
            audit_ledger.check_statuses(db),
            audit_ledger.check_balance(db, balance),
            audit_ledger.check_steps(db, rollout),
            audit_ledger.check_repeats(db),
            audit_ledger.check_resumes(db, rollout, curricula),
            audit_ledger.check_freshness(db, rollout),
            audit_ledger.check_engine_versions(db),
            audit_ledger.check_evaluations(db),
            audit_files.check_trajectories(db, directory),
            audit_files.check_token_stats(db, directory),
            audit_files.check_checkpoints(db, directory),
        )
        violations = [violation for check in checks for violation in check]
        return Audit(balance, ends, violations, _read_branch_point(branch[0]) if branch else None)


def _read_branch_point(detail: str) -> dict[str, str]:
    """Return the fields of an event `branch`."""
    fields = json.loads(detail)
    return {name: str(fields[name]) for name in ("run", "lineage", "step", "version", "digest")}


def _read_curricula(directory: Path) -> list[str]:
    """Return the names of the tasks whose prompts are drawn by their solve rates."""
    with safe_files.convert_read_errors(directory / "config.yaml"):
        tasks = safe_files.read_config(directory).get("tasks", ())
        return [str(task["name"]) for task in tasks if task.get("curriculum") is not None]


def _read_rollout(directory: Path) -> dict[str, Any]:
    """Return the `rollout` section of the configuration, with valid numbers where the checks need them."""
    path = directory / "config.yaml"
    with safe_files.convert_read_errors(path):
        rollout: dict[str, Any] = dict(safe_files.read_config(directory)["rollout"])
        for key in ("groups_per_step", "group_size", "async_ratio"):
            if not isinstance(rollout[key], int | float) or not 0 <= rollout[key] <= LARGEST_NUMBER:
                message = f"{path}: rollout.{key}: {rollout[key]!r:.80} is not a number in range"
                raise RecordError(message, path=path)
        return rollout | {key: bool(rollout[key]) for key in ("deterministic", "sampler")}
