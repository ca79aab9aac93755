"""The parts of a run that hold up others, from the waits and loads that it recorded."""

from collections.abc import Mapping
from dataclasses import dataclass

from antiphon.dashboard.live_file import LiveState, Wait

# What the learner does while its loop is in a wait of this name, and whether it works or waits for others.
LEARNER: Mapping[str, tuple[str, bool]] = {
    "step": ("trains", True),
    "publish": ("publishes weights", True),
    "begin": ("sets up its optimizer", True),
    "restore": ("loads a checkpoint", True),
    "checkpoint": ("saves a checkpoint", True),
    "teach": ("asks the teachers", True),
    "groups": ("waits for groups", False),
    "commit": ("waits for the disk", False),
    "load": ("waits for engines", False),
    "turn": ("waits for its devices", False),
    "quiesce": ("waits for all other tasks to be idle", False),
}
BETWEEN = ("is between steps", True)
# Names of waits, and whom the waiting side waits for. A check of an engine's health is none.
AWAITED = {
    "generation": "engines",
    "queue": "a free slot",
    "grade": "graders",
    "siblings": "siblings",
    "groups": "groups",
    "commit": "the ledger",
    "load": "weights to load",
    "turn": "shared devices",
    "step": "the learner",
    "publish": "the learner",
    "begin": "the learner",
    "restore": "the learner",
    "checkpoint": "a checkpoint",
    "respawn": "a new engine",
    "empty": "an engine to end its requests",
    "worker": "a rollout worker",
}
BY_ATTEMPTS = ("generation", "queue", "grade", "siblings")
UNSEEN = ("health",)


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldUp:
    """One part of a run that holds up another, and why."""

    holder: str
    waiter: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitLine:
    """One line of the wait-for graph: who waits for whom, how many, the oldest in seconds, and the share of its deadline."""

    waiter: str
    awaited: str
    count: int
    seconds: float
    deadline: float
    share: float


def describe_learner(state: LiveState) -> tuple[str, bool, float]:
    """Return what the learner does, whether it works, and for how many seconds it has."""
    wait = find_learner_wait(state)
    if wait is None:
        return (*BETWEEN, 0.0)
    return (*LEARNER.get(wait.name, (f"waits for {AWAITED.get(wait.name, wait.on)}", False)), wait.seconds)


def find_learner_wait(state: LiveState) -> Wait | None:
    """Return the newest wait of the learner's loop."""
    waits = [wait for wait in state.waits if wait.owner == "learner"]
    return waits[-1] if waits else None


def list_waits(state: LiveState, in_environments: int) -> list[WaitLine]:
    """Return the lines of the wait-for graph, the learner's first, then the most frequent."""
    found = [
        _make_line("attempts" if wait.name in BY_ATTEMPTS else _name_owner(wait.owner), wait)
        for wait in state.waits
        if wait.name not in UNSEEN
    ]
    if in_environments:
        line = WaitLine(
            waiter="attempts", awaited="environments", count=in_environments, seconds=0.0, deadline=0.0, share=0.0
        )
        found.append(line)
    return sorted(found, key=lambda line: (line.waiter != "learner", line.waiter, -line.count))


def _make_line(waiter: str, wait: Wait) -> WaitLine:
    return WaitLine(
        waiter=waiter,
        awaited=AWAITED.get(wait.name, wait.on),
        count=wait.count,
        seconds=wait.seconds,
        deadline=wait.deadline,
        share=min(wait.seconds / wait.deadline, 1.0) if wait.deadline > 0 else 0.0,
    )


def _name_owner(owner: str) -> str:
    """Return a party's name in the graph: the loop of the learner works through a process of its own."""
    return {"pool": "engine pool", "learner": "learner"}.get(owner, owner.split(" ")[0])


def find_hold_ups(state: LiveState, in_environments: int) -> list[HoldUp]:
    """Return who holds up whom now, the worst first; none while engines and learner both work."""
    found = []
    wait = find_learner_wait(state)
    name = wait.name if wait is not None else ""
    if name == "groups":
        holder, why = _find_slowest(state, in_environments)
        found.append(HoldUp(holder=holder, waiter="learner", why=why))
    elif name == "commit":
        found.append(HoldUp(holder="disk", waiter="learner", why="the step's attempts are being written"))
    elif name in ("load", "turn"):
        found.append(HoldUp(holder="engines", waiter="learner", why="they load the last weights"))
    elif _is_window_full(state):
        why = f"all {state.capacity:,} slots are taken until it publishes"
        found.append(HoldUp(holder="learner", waiter="engines", why=why))
    if state.queue:
        found.append(HoldUp(holder="engines", waiter="queue", why=_explain_queue(state)))
    return found


def _find_slowest(state: LiveState, in_environments: int) -> tuple[str, str]:
    """Return what most of the running attempts wait for."""
    grading = count_waits(state, "grade")
    generating = sum(engine.running for engine in state.engines) + state.queue
    most = max(grading, in_environments, generating)
    if not most:
        return "admission", "no attempt runs"
    if most == generating:
        return "engines", f"{generating:,} requests generate or queue"
    if most == grading:
        return "graders", f"{grading:,} attempts are graded"
    return "environments", f"{in_environments:,} attempts are in environments"


def count_waits(state: LiveState, name: str) -> int:
    """Return how many waits have a name."""
    return sum(wait.count for wait in state.waits if wait.name == name)


def _is_window_full(state: LiveState) -> bool:
    """Return True if no group may be admitted and none runs, so that engines have nothing to do."""
    is_full = state.capacity > 0 and state.alive >= state.capacity
    return is_full and not state.queue and not any(engine.running for engine in state.engines)


def _explain_queue(state: LiveState) -> str:
    if all(engine.state == "asleep" for engine in state.engines):
        return "the learner has their devices"
    behind = sum(engine.behind > 0 for engine in state.engines)
    if behind:
        return f"{behind:,} of {len(state.engines):,} have yet to load version {state.version:,}"
    return "their slots are taken"
