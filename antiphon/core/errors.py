"""The errors of Antiphon.

A rollout that fails is data (`core.types.Failure`) and never raises. Everything here but `RequestError` ends
the run with one message:

AntiphonError
├── ConfigError        a key, a value or a combination in the configuration; names file, path, value and what is valid
├── DataError          a dataset, model or file that is missing or not what was promised
├── WorkerDied         a worker process is gone; carries the traceback it left, or the signal that ended it
├── StallError         a wait ran past its deadline; carries the table of who waits for whom, and the key of the deadline
├── NonFiniteError     a gradient is not finite, and such updates are not, or not any longer, to be skipped
├── FreshnessError     a group older than the asynchronous ratio allows was about to be trained on (a bug, never data)
├── RolloutError       no attempt succeeds any more; carries the last failure
├── StateError         a transition the admission state machine does not have (a bug, never data)
├── RecordError        the record of a run cannot be written, or is not one that can be gone on from
├── WeightsError       weights that arrived are not the weights that were sent
├── SandboxError       a sandbox could not be made, was lost, or could not do what it was asked
├── UnsupportedError   something this model, engine or platform cannot do
└── RequestError       one request that no engine can run as it is; it fails alone, and its engine goes on
"""

import unicodedata

_CONTROL = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})  # controls, bidi overrides, lone surrogates, line separators
MOST_PRINTED = 10_000  # characters of one text


def printable(text: str, keep: str = "\n") -> str:
    """Return `text` as a terminal may be given it: control characters but those of `keep` are escaped, and a long text is cut.

    What models, environments and damaged files say can hold escape sequences that rewrite what a terminal shows.
    """
    if len(text) > MOST_PRINTED:
        text = f"{text[:MOST_PRINTED]}… ({len(text) - MOST_PRINTED} more characters)"
    shown = (
        each if each in keep or unicodedata.category(each) not in _CONTROL else f"\\u{{{ord(each):x}}}" for each in text
    )
    return "".join(shown)


class AntiphonError(Exception):
    """Base of all errors that users see as one message without a traceback."""


class ConfigError(AntiphonError):
    """The configuration is wrong. The message names file, key, value and what would be valid."""


class DataError(AntiphonError):
    """A dataset, model or file is missing or malformed."""


class WorkerDied(AntiphonError):
    """A worker process or thread ended before it was told to."""


class StallError(AntiphonError):
    """A wait outlasted its deadline, which the configuration has under `key`, if anywhere."""

    def __init__(self, message: str, key: str = "") -> None:
        super().__init__(message)
        self.key = key


class NonFiniteError(AntiphonError):
    """A gradient is not finite."""


class FreshnessError(AntiphonError):
    """A group older than the asynchronous ratio allows reached the learner."""


class RolloutError(AntiphonError):
    """Rollouts fail, or are filtered out, one after another, so that training cannot go on."""


class StateError(AntiphonError):
    """An event arrived in a state that does not allow it."""


class RecordError(AntiphonError):
    """The ledger or a checkpoint cannot be written, or what is there cannot be gone on from."""


class WeightsError(AntiphonError):
    """Received weights do not have the digest they were sent with."""


class SandboxError(AntiphonError):
    """A sandbox could not be made, was lost, or could not do what it was asked. Says nothing about what ran in it."""


class UnsupportedError(AntiphonError):
    """The model, engine or platform cannot do what was asked."""


class RequestError(AntiphonError):
    """A request to an engine is invalid. Only the request fails: a client gets status 400, an attempt of a run has failed."""
