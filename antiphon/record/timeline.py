"""When engines and the learner worked, read from the events of a real or simulated run."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import fmean

from antiphon.core.types import AttemptStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """One request on an engine."""

    request: str  # group.sibling.try/turn
    engine: int
    placed: float
    served: float
    prompt: int
    tokens: int

    @property
    def group(self) -> str:
        """The group of its attempt."""
        return self.request.partition(".")[0]

    @property
    def attempt(self) -> str:
        """Its attempt."""
        return _attempt(self.request)


@dataclass(slots=True)
class Timeline:
    """Requests, training steps and weight loads in the order of their ends, in seconds on the run's clock."""

    served: list[Served] = field(default_factory=list)
    busy: list[tuple[int, float, float]] = field(
        default_factory=list
    )  # engine, begin and end of a request there, aborted or not
    steps: list[tuple[float, float]] = field(default_factory=list)  # begin, publication
    loads: list[float] = field(default_factory=list)  # from a publication to each engine's first use of it
    finished: dict[str, float] = field(default_factory=dict)  # attempt -> time of its score

    @classmethod
    def read(cls, lines: Iterable[str]) -> "Timeline":
        """Read the lines of a file of events."""
        timeline, taken, published = cls(), 0.0, 0.0
        placed: dict[str, tuple[float, int, int]] = {}  # by attempt: time, engine, prompt tokens
        for line in lines:
            what = json.loads(line)
            now: float = what["t"]
            match what["event"]:
                case "place":
                    placed[_attempt(what["request"])] = now, what["engine"], what["prompt"]
                case "served" if _attempt(what["request"]) in placed:
                    request = what["request"]
                    since, engine, prompt = placed.pop(_attempt(request))
                    timeline.busy.append((engine, since, now))
                    timeline.served.append(
                        Served(
                            request=request,
                            engine=engine,
                            placed=since,
                            served=now,
                            prompt=prompt,
                            tokens=what["tokens"],
                        )
                    )
                case "attempt":
                    if (left := placed.pop(what["attempt"], None)) is not None:  # aborted
                        timeline.busy.append((left[1], left[0], now))
                    if what["status"] == AttemptStatus.FINISHED:
                        timeline.finished[what["attempt"]] = now
                case "take":
                    taken = now
                case "publish":
                    published = now
                    timeline.steps.append((taken, published))
                case "load" if timeline.steps:
                    timeline.loads.append(now - published)
        timeline.busy += [(engine, since, float("inf")) for since, engine, _ in placed.values()]
        return timeline

    def within(self, since: float, until: float) -> list[Served]:
        """Return the requests that began and ended between two times."""
        return [request for request in self.served if since <= request.placed and request.served <= until]

    def step_seconds(self, skip: int) -> float:
        """Return the mean seconds between publications, after the first `skip`."""
        ends = [published for _, published in self.steps[skip:]]
        return (ends[-1] - ends[0]) / (len(ends) - 1)

    def learner_idle(self, skip: int) -> float:
        """Return the share of time without a step, after the first `skip` steps."""
        since, until = self.steps[skip][1], self.steps[-1][1]
        return 1 - sum(published - taken for taken, published in self.steps[skip + 1 :]) / (until - since)

    def engines_idle(self, skip: int) -> float:
        """Return the share of time in which an engine had no request, averaged over engines, after the first `skip` steps."""
        since, until = self.steps[skip][1], self.steps[-1][1]
        spans: dict[int, list[tuple[float, float]]] = {}
        for engine, start, stop in self.busy:
            if stop > since and start < until:
                spans.setdefault(engine, []).append((max(start, since), min(stop, until)))
        return fmean(1 - union_length(found) / (until - since) for found in spans.values()) if spans else 1.0


def _attempt(request: str) -> str:
    return request.partition("/")[0]


def union_length(spans: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of intervals."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(stop - max(start, end), 0.0)
        end = max(end, stop)
    return total
