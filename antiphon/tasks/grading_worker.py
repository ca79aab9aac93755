"""A process that grades. It may hang, crash or be killed at any moment; the pool on the other side knows what to do.

Frames on the socket are a length of 4 bytes and a pickle. First comes the set-up, answered by `Ready` or `Failed`; then
batches, each answered by one `Score` an item, in order and at once: the answer to one item announces the next.
"""

import ctypes
import logging
import os
import pickle
import signal
import socket
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from antiphon.config import see_gpus
from antiphon.tasks.base import GroupReward, Reward, Transcript, as_score
from antiphon.tasks.rewards import build_group_reward, build_reward
from antiphon.tasks.suspicions import suspicions
from antiphon.types import Prompt, Score, ScoreStatus

HEADER = struct.Struct("!I")


@dataclass(frozen=True, slots=True)
class SetUp:
    """What a worker must know: for each task the name of its reward, and the options; the same for rewards of groups."""

    rewards: Mapping[str, tuple[str, Mapping[str, Any]]]
    group_rewards: Mapping[str, tuple[str, Mapping[str, Any]]]
    parent: int  # process id


@dataclass(frozen=True, slots=True)
class Ready:
    """All rewards are built."""


@dataclass(frozen=True, slots=True)
class Failed:
    """A reward could not be built."""

    message: str


@dataclass(frozen=True, slots=True)
class Graded:
    """The verdict on one item, a transcript or a group; `raised` if the reward did not come to one itself."""

    score: Score  # of a group the first that is not scored, if there is one
    raised: bool = False
    siblings: tuple[Score, ...] = ()  # of a group that was judged


def frame(message: Any) -> bytes:
    """A message as it goes over the socket."""
    body = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return HEADER.pack(len(body)) + body


def main(descriptor: int, cores: Sequence[int] = (), gpu: str | None = None) -> None:
    """Serve the pool on the other side of the socket until it closes it, on these cores alone if there are any; see this GPU
    alone, or none if it is empty."""
    if cores:
        os.sched_setaffinity(0, cores)
    if gpu is not None:
        see_gpus([gpu] if gpu else [])
    with socket.socket(fileno=descriptor) as connection, connection.makefile("rb") as stream:
        set_up: SetUp = _read(stream)
        _die_with(set_up.parent)
        rewards: dict[tuple[str, bool], Any] = {}
        for together, build, named in (
            (False, build_reward, set_up.rewards),
            (True, build_group_reward, set_up.group_rewards),
        ):
            for task, (name, options) in named.items():
                try:
                    rewards[task, together] = build(name, options)
                except Exception as error:  # named boundary: user code; the pool ends the run with this message
                    logging.getLogger(__name__).debug("cannot build reward %r", name, exc_info=True)
                    connection.sendall(frame(Failed(f"task {task!r}, reward {name!r}: {one_line(error)}")))
                    return
        connection.sendall(frame(Ready()))
        while (batch := _read(stream)) is not None:
            for task, together, content in batch:
                connection.sendall(_grade(_together if together else _alone, rewards[task, together], content))


def _read(stream: Any) -> Any:
    """The next message; None when the pool is gone."""
    header = stream.read(HEADER.size)
    return pickle.loads(stream.read(HEADER.unpack(header)[0])) if len(header) == HEADER.size else None


def _grade(how: Callable[..., Graded], reward: Any, content: bytes) -> bytes:
    """Judge one pickled item. Here a reward's error becomes an ungraded score."""
    try:
        return frame(how(reward, *pickle.loads(content)))
    except (Exception, SystemExit) as error:  # noqa: BLE001 - named boundary: user code
        return frame(Graded(Score.ungraded(one_line(error)), raised=True))


def _alone(reward: Reward, prompt: Prompt, transcript: Transcript) -> Graded:
    return Graded(marked(as_score(reward(prompt, transcript)), transcript))


def _together(
    reward: GroupReward, prompt: Prompt, transcripts: Sequence[Transcript], scores: Sequence[Score]
) -> Graded:
    """A group is judged whole or not at all: siblings with and without the verdict cannot be compared."""
    verdicts = tuple(map(as_score, reward(prompt, transcripts, scores)))
    if len(verdicts) != len(transcripts):
        raise ValueError(f"the group reward gave {len(verdicts)} scores to {len(transcripts)} siblings")
    siblings = tuple(map(marked, verdicts, transcripts))
    return Graded(
        next((score for score in siblings if score.status is not ScoreStatus.SCORED), siblings[0]), siblings=siblings
    )


def marked(score: Score, transcript: Transcript) -> Score:
    """The score, with what is suspicious about the response among its parts."""
    found = suspicions(transcript.response)
    return replace(score, parts={**score.parts, **found}) if found else score


def one_line(error: BaseException) -> str:
    """An error in one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _die_with(parent: int) -> None:
    """On Linux, have the kernel kill this process when the pool's is killed, even in the middle of a hanging reward."""
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
        if os.getppid() != parent:  # it was faster
            os._exit(1)
