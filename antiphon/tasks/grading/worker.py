"""A process that grades. It may hang, crash or be killed at any moment; the pool on the other side knows what to do.

Messages are frames (`antiphon.core.processes.framing`). First comes the set-up, answered by `Ready` or `Failed`; then batches,
each answered by one `Graded` an item, in order and at once: the answer to one item announces the next. Between batches come
orders to begin and end a profile; the end is answered by `Profiled`. What the pool sends is a
pickle. What a worker sends is MessagePack of these types and nothing else: it has seen a model's text, so the pool reads plain
data from it and runs none of it.
"""

import cProfile
import io
import logging
import os
import pickle
import pstats
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from antiphon.core.config import set_visible_gpus
from antiphon.core.objects import receive_objects
from antiphon.core.processes.framing import read_frame, write_frame
from antiphon.core.processes.own_process import die_with_parent
from antiphon.core.types import Prompt, Score, ScoreStatus
from antiphon.core.user_errors import describe_error
from antiphon.tasks.base import GroupReward, Reward, Transcript, as_score
from antiphon.tasks.reward_checks.reward_hacking_signals import flag_response
from antiphon.tasks.rewards import build_group_reward, build_reward

LONGEST_ANSWER = 16 << 20  # bytes


@dataclass(frozen=True, slots=True)
class SetUp:
    """First message to a worker: name and options of the reward of each task, and of its group reward."""

    rewards: Mapping[str, tuple[str, Mapping[str, Any]]]
    group_rewards: Mapping[str, tuple[str, Mapping[str, Any]]]
    parent: int  # process id
    objects: Mapping[str, bytes]  # that rewards are named by, see `core.objects`


class Ready(msgspec.Struct, frozen=True, tag=True):
    """All rewards are built."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """A reward could not be built."""

    reward: str  # its name
    message: str


class Profiled(msgspec.Struct, frozen=True, tag=True):
    """The profile of the process, as text; empty if nothing was profiled."""

    text: str


class Graded(msgspec.Struct, frozen=True, tag=True):
    """The verdict on one item, a transcript or a group."""

    score: Score  # of a group the first that is not scored, if there is one
    siblings: tuple[Score, ...] = ()  # of a group that was judged
    number: int = -1  # of the item, as the pool gave it


Answer = Ready | Failed | Profiled | Graded
START_PROFILE, END_PROFILE = "start profile", "end profile"  # orders; all others are batches
decode_answer: Callable[[bytes], Answer] = msgspec.msgpack.Decoder(Answer).decode
_ENCODER = msgspec.msgpack.Encoder(enc_hook=float)  # numbers of numpy


def _send_answer(connection: socket.socket, answer: Answer) -> None:
    content = _ENCODER.encode(answer)
    if len(content) > LONGEST_ANSWER:
        detail = f"the verdict has {len(content)} bytes, more than {LONGEST_ANSWER}"
        number = getattr(answer, "number", -1)
        content = _ENCODER.encode(Graded(Score.ungraded(detail, raised=True), number=number))
    write_frame(connection, content)


def main(descriptor: int, cores: Sequence[int] = (), gpu: str | None = None) -> None:
    """Serve the pool on the other side of the socket until it closes the socket.

    Args:
        descriptor: The socket.
        cores: CPU cores to run on; empty is all.
        gpu: The only GPU to see; empty hides all GPUs, None leaves them as they are.
    """
    if cores and hasattr(os, "sched_setaffinity"):  # not on macOS
        os.sched_setaffinity(0, cores)
    if gpu is not None:
        set_visible_gpus([gpu] if gpu else [])
    with socket.socket(fileno=descriptor) as connection:
        set_up: SetUp = _read(connection)
        die_with_parent(set_up.parent)
        receive_objects(set_up.objects)
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
                    message = f"task {task!r}, reward {name!r}: {describe_error(error)}"
                    _send_answer(connection, Failed(name, message))
                    return
        _send_answer(connection, Ready())
        _serve(connection, rewards)


def _serve(connection: socket.socket, rewards: Mapping[tuple[str, bool], Any]) -> None:
    """Grade batches, and profile this from one order to another, until the pool is gone."""
    profile: cProfile.Profile | None = None
    while (order := _read(connection)) is not None:
        if order == START_PROFILE:
            profile = cProfile.Profile()
        elif order == END_PROFILE:
            _send_answer(connection, Profiled(_describe_profile(profile)))
            profile = None
        else:
            with profile or nullcontext():
                for number, task, together, content in order:
                    graded = _grade(_together if together else _alone, rewards[task, together], content)
                    _send_answer(connection, msgspec.structs.replace(graded, number=number))


def _describe_profile(profile: cProfile.Profile | None) -> str:
    """Return the functions of a profile in a table, those that took longest with all that they called first."""
    text = io.StringIO()
    if profile is not None and profile.getstats():
        pstats.Stats(profile, stream=text).sort_stats(pstats.SortKey.CUMULATIVE).print_stats()
    return text.getvalue()


def _read(connection: socket.socket) -> Any:
    """The next message; None when the pool is gone."""
    content = read_frame(connection)
    return None if content is None else pickle.loads(content)


def _grade(how: Callable[..., Graded], reward: Any, content: bytes) -> Graded:
    """Judge one pickled item. Here a reward's error becomes an ungraded score."""
    try:
        return how(reward, *pickle.loads(content))
    except (Exception, SystemExit) as error:  # noqa: BLE001 - named boundary: user code
        return Graded(Score.ungraded(describe_error(error, reward), raised=True))


def _alone(reward: Reward, prompt: Prompt, transcript: Transcript) -> Graded:
    return Graded(marked(as_score(reward(prompt, transcript)), prompt, transcript))


def _together(
    reward: GroupReward, prompt: Prompt, transcripts: Sequence[Transcript], scores: Sequence[Score]
) -> Graded:
    """A group is judged whole or not at all: siblings with and without the verdict cannot be compared."""
    verdicts = tuple(map(as_score, reward(prompt, transcripts, scores)))
    if len(verdicts) != len(transcripts):
        raise ValueError(f"the group reward gave {len(verdicts)} scores to {len(transcripts)} siblings")
    siblings = tuple(
        marked(verdict, prompt, transcript) for verdict, transcript in zip(verdicts, transcripts, strict=True)
    )
    return Graded(
        next((score for score in siblings if score.status is not ScoreStatus.SCORED), siblings[0]), siblings=siblings
    )


def marked(score: Score, prompt: Prompt, transcript: Transcript) -> Score:
    """The score, with what is suspicious about the response among its parts."""
    found = flag_response(prompt, transcript.response)
    return replace(score, parts={**score.parts, **found}) if found else score
