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
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from antiphon.tasks.base import Reward, Transcript, as_score
from antiphon.tasks.rewards import build_reward
from antiphon.tasks.suspicions import suspicions
from antiphon.types import Score

HEADER = struct.Struct("!I")


@dataclass(frozen=True, slots=True)
class SetUp:
    """What a worker must know: for each task the name of its reward, and the options."""

    rewards: Mapping[str, tuple[str, Mapping[str, Any]]]
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
    """The verdict on one item; `raised` if the reward did not come to one itself."""

    score: Score
    raised: bool = False


def frame(message: Any) -> bytes:
    """A message as it goes over the socket."""
    body = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return HEADER.pack(len(body)) + body


def main(descriptor: int) -> None:
    """Serve the pool on the other side of the socket until it closes it."""
    with socket.socket(fileno=descriptor) as connection, connection.makefile("rb") as stream:
        set_up: SetUp = _read(stream)
        _die_with(set_up.parent)
        rewards: dict[str, Reward] = {}
        for task, (name, options) in set_up.rewards.items():
            try:
                rewards[task] = build_reward(name, options)
            except Exception as error:  # named boundary: user code; the pool ends the run with this message
                logging.getLogger(__name__).debug("cannot build reward %r", name, exc_info=True)
                connection.sendall(frame(Failed(f"task {task!r}, reward {name!r}: {one_line(error)}")))
                return
        connection.sendall(frame(Ready()))
        while (batch := _read(stream)) is not None:
            for task, content in batch:
                connection.sendall(_grade(rewards[task], content))


def _read(stream: Any) -> Any:
    """The next message; None when the pool is gone."""
    header = stream.read(HEADER.size)
    return pickle.loads(stream.read(HEADER.unpack(header)[0])) if len(header) == HEADER.size else None


def _grade(reward: Reward, content: bytes) -> bytes:
    """Judge one pickled (prompt, transcript). Here a reward's error becomes an ungraded score."""
    try:
        prompt, transcript = pickle.loads(content)
        return frame(Graded(marked(as_score(reward(prompt, transcript)), transcript)))
    except (Exception, SystemExit) as error:  # noqa: BLE001 - named boundary: user code
        return frame(Graded(Score.ungraded(one_line(error)), raised=True))


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
