"""The schema of a run directory's ledger and its version: all that the writer and the independent audit share.

A *lineage* is one uninterrupted execution of a run. A resume opens the next lineage at a *cut*: the step of the checkpoint
that it continues from. What the parent did after that step is marked undone, not deleted. Numbers of groups, attempts, steps
and versions belong to a lineage; a step or version up to the cut belongs to the parent.

The first lineage begins at step 0. In a run that branched off another one, it begins and ends at a checkpoint of that run,
which an event `branch` names.

Every attempt ends in exactly one terminal status. In each lineage, at every commit: attempts = terminal + live.
"""

from pathlib import Path

from antiphon.core.errors import RecordError

VERSION = 2
"""Version of the ledger's tables and of the files in `rollouts/`, kept as SQLite's `user_version`.

Version 0 is a ledger from before versions were written; its tables are those of version 1. Version 2 added `credit`.
"""

TERMINAL = ("trained", "filtered", "stale", "redundant", "cancelled", "failed", "lost")
LIVE = ("running", "finished")


def check_version(ledger: Path, version: int) -> None:
    """Raise `RecordError` if a ledger has a schema version that this code does not know."""
    if not 0 <= version <= VERSION:
        raise RecordError(
            f"{ledger} has schema version {version}, and this Antiphon reads versions up to {VERSION}: "
            "a newer one wrote it; use that",
            path=ledger,
        )


def tables(version: int = VERSION) -> str:
    """Return the SQL that creates the tables of a schema version."""
    return FIRST_TABLES if version < 2 else FIRST_TABLES + CREDIT_TABLE


FIRST_TABLES = """
CREATE TABLE lineages (
    lineage INTEGER PRIMARY KEY,  -- its number, from 0
    parent INTEGER,            -- NULL: the first lineage
    cut INTEGER NOT NULL,      -- step that it continues from, of the parent or of the run that it branched off
    version INTEGER NOT NULL,  -- policy version at the cut
    code TEXT NOT NULL,        -- version and digest of the code that wrote it
    state TEXT                 -- JSON: state of the scheduler and the prompt sources at the cut; NULL: their initial state
) STRICT;
CREATE TABLE prompts (
    prompt INTEGER PRIMARY KEY, -- in the order of their first draw, which is the same in every lineage
    task TEXT NOT NULL,        -- name of its task
    id TEXT NOT NULL,          -- its id, the same in every run
    epoch INTEGER NOT NULL,    -- pass over the data, from 0
    UNIQUE (task, id, epoch)
) STRICT;
CREATE TABLE groups (
    lineage INTEGER NOT NULL,  -- its lineage
    grp INTEGER NOT NULL,      -- its number in the lineage
    prompt INTEGER NOT NULL REFERENCES prompts,  -- its prompt
    version INTEGER NOT NULL,  -- policy version at its admission
    outcome TEXT,              -- NULL while it is live
    step INTEGER,              -- step that trained on it
    PRIMARY KEY (lineage, grp)
) STRICT, WITHOUT ROWID;
CREATE TABLE attempts (
    lineage INTEGER NOT NULL,  -- its lineage
    grp INTEGER NOT NULL,      -- its group, numbered in the lineage
    sibling INTEGER NOT NULL,  -- its place among the siblings of the group
    try INTEGER NOT NULL,      -- its place among the tries of the sibling, from 0
    status TEXT NOT NULL,      -- running, finished, or a terminal status
    started INTEGER NOT NULL,  -- policy version at its start
    begun REAL NOT NULL,       -- seconds on the lineage's clock
    newest INTEGER,            -- policy version that sampled its newest token
    step INTEGER,              -- step that trained on it
    score REAL,                -- NULL: there is none
    failure TEXT,              -- source: message; NULL: it did not fail
    prompt_tokens INTEGER,     -- tokens of its first prompt
    tokens INTEGER,            -- sampled tokens
    seconds REAL,              -- from its start to its score
    arrival INTEGER,           -- sequence number among arrivals, steps and publications
    file TEXT,                 -- file in rollouts/ that holds its trajectory
    digest INTEGER,            -- CRC-32 of the trajectory's tokens, mask, log-probs and versions
    origin TEXT,               -- lineage:group.sibling.try that sampled the trajectory, if it was reused after a resume
    PRIMARY KEY (lineage, grp, sibling, try)
) STRICT, WITHOUT ROWID;
CREATE TABLE steps (
    lineage INTEGER NOT NULL,  -- its lineage
    step INTEGER NOT NULL,     -- its number, from 1
    version INTEGER,           -- policy version that it published; NULL until then
    batch TEXT,                -- digest of the training batch
    taken REAL NOT NULL,       -- seconds on the lineage's clock
    published REAL,            -- seconds on the lineage's clock; NULL until then
    took INTEGER NOT NULL,     -- sequence number of its begin
    released INTEGER,          -- sequence number of its publication
    undone INTEGER NOT NULL DEFAULT 0,  -- 1: a resume began before it
    PRIMARY KEY (lineage, step)
) STRICT, WITHOUT ROWID;
CREATE TABLE versions (
    lineage INTEGER NOT NULL,  -- its lineage
    version INTEGER NOT NULL,  -- its number
    digest INTEGER,            -- digest of the weights that engines loaded
    PRIMARY KEY (lineage, version)
) STRICT, WITHOUT ROWID;
CREATE TABLE checkpoints (
    lineage INTEGER NOT NULL,  -- its lineage
    step INTEGER NOT NULL,     -- step after which it was cut
    version INTEGER NOT NULL,  -- policy version at the cut
    name TEXT NOT NULL,        -- directory in checkpoints/
    PRIMARY KEY (lineage, step)
) STRICT, WITHOUT ROWID;
CREATE TABLE events (
    number INTEGER PRIMARY KEY,  -- in the order in which they were recorded
    lineage INTEGER NOT NULL,  -- its lineage
    second REAL NOT NULL,      -- seconds on the lineage's clock
    kind TEXT NOT NULL,        -- a rare event, see record/events.py; or branch: the run begins at a checkpoint of another
    detail TEXT NOT NULL       -- JSON
) STRICT;
CREATE TABLE balance (         -- the scheduler's own counts, written in the transaction of the rows they count
    lineage INTEGER NOT NULL,  -- lineage of the attempts
    status TEXT NOT NULL,      -- a terminal status, or 'dispatched'
    attempts INTEGER NOT NULL,  -- their number
    PRIMARY KEY (lineage, status)
) STRICT, WITHOUT ROWID;
"""
CREDIT_TABLE = """
CREATE TABLE credit (          -- what a step made of each attempt that it trained on
    lineage INTEGER NOT NULL,  -- its lineage
    grp INTEGER NOT NULL,      -- its group, numbered in the lineage
    sibling INTEGER NOT NULL,  -- its place among the siblings of the group
    try INTEGER NOT NULL,      -- its place among the tries of the sibling, from 0
    reward REAL,               -- as the stages left it; NULL: it is no number, as below
    advantage REAL,            -- mean over its sampled tokens
    weight REAL,               -- mean over its sampled tokens of what each counts in the loss; 0: it is masked
    tokens INTEGER NOT NULL,   -- sampled
    signal INTEGER NOT NULL,   -- of these, with a weight and an advantage other than 0
    PRIMARY KEY (lineage, grp, sibling, try)
) STRICT, WITHOUT ROWID;
"""
