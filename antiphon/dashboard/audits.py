"""Audits in the background: one at a time, each kept until the ledger changes."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from antiphon.core.errors import AntiphonError
from antiphon.inspect.audit import audit


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditResult:
    """The result of an audit, or its state.

    Attributes:
        state: `unasked`, `running`, `clean`, `broken` or `unreadable`.
        balance: Number of attempts by lineage and status.
        violations: Guarantees that are broken.
        open: Attempts that have not ended.
        problem: The reason why the run cannot be audited.
        outdated: True if the run has gone on since.
    """

    state: str
    balance: dict[int, dict[str, int]] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)
    open: int = 0
    problem: str = ""
    outdated: bool = False


class Audits:
    """Audits runs in the background."""

    def __init__(self, run_audit: Callable[[Path], Any] = audit) -> None:
        self._run_audit = run_audit
        self._results: dict[Path, tuple[Any, AuditResult]] = {}
        self._running: set[Path] = set()
        self._lock = threading.Lock()
        self._one = threading.Semaphore(1)

    def read(self, run: Path, *, ask: bool) -> AuditResult:
        """Return the newest result; `ask` begins an audit if there is none of the ledger as it is now."""
        signature = sign_ledger(run)
        with self._lock:
            known = self._results.get(run)
            if known is not None and known[0] == signature:
                return known[1]
            if run in self._running:
                return AuditResult(state="running")
            if ask:
                self._running.add(run)
                threading.Thread(target=self._audit, args=(run, signature), daemon=True, name="audit").start()
                return AuditResult(state="running")
        if known is None:
            return AuditResult(state="unasked")
        return AuditResult(**{name: getattr(known[1], name) for name in AuditResult.__slots__} | {"outdated": True})

    def run_now(self, run: Path) -> None:
        """Audit a run in this thread."""
        self._audit(run, sign_ledger(run))

    def _audit(self, run: Path, signature: Any) -> None:
        try:
            with self._one:
                found = self._run_audit(run)
            result = AuditResult(
                state="broken" if found.violations else "clean",
                balance={lineage: dict(sorted(balance.items())) for lineage, balance in found.balance.items()},
                violations=[violation[:1000] for violation in found.violations[:200]],
                open=found.open,
            )
        except AntiphonError as error:
            result = AuditResult(state="unreadable", problem=str(error)[:1000])
        with self._lock:
            self._results[run] = (signature, result)
            self._running.discard(run)


def sign_ledger(run: Path) -> Any:
    """Return what changes when the ledger of a run does."""
    found = []
    for name in ("ledger.db", "ledger.db-wal"):
        path = run / name
        if path.exists() and path.stat().st_size:
            found.append((name, path.stat().st_size, path.stat().st_mtime_ns))
    return tuple(found)
