"""The errors of Antiphon.

A rollout that fails is data (`core.types.Failure`) and never raises. Everything here ends the run with one message, except
those of `REFUSALS` when an engine raises them about one request: then its attempt has failed.

AntiphonError
├── ConfigError        a key, a value or a combination in the configuration; names file, path, value and what is valid
├── DataError          a dataset, model or file that is missing or not what was promised
├── WorkerDiedError    a worker process is gone; carries the traceback it left, or the signal that ended it
├── StallError         a wait ran past its deadline; carries the table of who waits for whom, and the key of the deadline
├── BudgetError        the models that rewards ask have cost all that they may
├── NonFiniteError     a gradient is not finite, and such updates are not, or not any longer, to be skipped
├── FreshnessError     a group older than the asynchronous ratio allows was about to be trained on (a bug, never data)
├── UserCodeError      a function of the user that the configuration names raised an error; names file and line
├── RolloutError       no attempt succeeds any more; carries the last failure
├── StateError         a call or an event in a state that does not allow it, such as `sleep` while an engine runs requests
├── RecordError        the record of a run cannot be written, or is not one that can be gone on from
├── WeightsError       weights that arrived are not the weights that were sent
├── SandboxError       a sandbox could not be made, was lost, or could not do what it was asked
├── UnsupportedError   something this model, engine or platform cannot do
└── RequestError       one request that no engine can run as it is; it fails alone, and its engine goes on
"""

import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from os import PathLike
from typing import Any

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


def first_error(error: BaseException) -> BaseException:
    """Return the first error inside nested exception groups: the one that caused the others; any other error as it is."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


@dataclass(frozen=True, slots=True)
class Mistake:
    """One mistake in a configuration.

    Attributes:
        key: Dotted path of the value that is wrong; empty if it is no single one.
        message: What is wrong, and what would be valid.
        value: The wrong value, if there is one.
        valid: Valid values or keys, if they can be listed.
        path: Place of the value: file and line, or the override.
        suggestions: Valid values or keys that are probably meant.
    """

    key: str
    message: str
    value: Any = None
    valid: tuple[str, ...] = ()
    path: str = ""
    suggestions: tuple[str, ...] = ()

    def __str__(self) -> str:
        return ": ".join(part for part in (self.path, self.key, self.message) if part)


class ValidatorError(ValueError):
    """Mistakes found by the validators of a configuration model, with keys relative to that model.

    Validators raise it to report several mistakes at once, each with its key.
    """

    def __init__(self, mistakes: Iterable[Mistake | tuple[str, str]]) -> None:
        """Collect mistakes; a tuple is the key and the message of one."""
        self.mistakes = tuple(each if isinstance(each, Mistake) else Mistake(*each) for each in mistakes)
        super().__init__("\n".join(map(str, self.mistakes)))


class ConfigError(AntiphonError):
    """The configuration is wrong. The message names file, key, value and what would be valid.

    Cure: change the value that the message names; `antiphon options KEY` explains a key.

    `key`, `value`, `valid`, `path` and `suggestions` are those of the first mistake (see `Mistake`); `mistakes` has all.
    """

    def __init__(
        self,
        message: str,
        *,
        key: str = "",
        value: Any = None,
        valid: Iterable[str] = (),
        path: str = "",
        suggestions: Iterable[str] = (),
    ) -> None:
        mistake = Mistake(key, message, value, tuple(valid), path, tuple(suggestions))
        self._set(mistake)
        super().__init__(str(mistake))

    @classmethod
    def from_mistakes(cls, mistakes: Iterable[Mistake]) -> "ConfigError":
        """Return one error about several mistakes, with a line for each."""
        mistakes = tuple(mistakes)
        error = cls("\n".join(map(str, mistakes)))
        error._set(*mistakes)
        return error

    def _set(self, *mistakes: Mistake) -> None:
        self.mistakes = mistakes
        self.key, self.value, self.valid = mistakes[0].key, mistakes[0].value, mistakes[0].valid
        self.path, self.suggestions = mistakes[0].path, mistakes[0].suggestions


class DataError(AntiphonError):
    """A dataset, model or file is missing or malformed.

    Cure: mend or fetch the file that the message names; for a data set it names row and column too.

    Attributes:
        path: The file or directory, with the line where it is known.
        row: Number of the row of a dataset, from 1.
        column: The column of a dataset that is missing or malformed.
    """

    def __init__(
        self, message: str, *, path: str | PathLike[str] = "", row: int | None = None, column: str = ""
    ) -> None:
        super().__init__(message)
        self.path, self.row, self.column = str(path), row, column


class WorkerDiedError(AntiphonError):
    """A worker process or thread ended before it was told to.

    Cure: read the traceback or signal in the message and the log in `runs/<name>/logs/`; SIGKILL is mostly a lack of memory.
    Then resume with `--resume`.
    """


class StallError(AntiphonError):
    """A wait outlasted its deadline, which the configuration has under `key`, if anywhere.

    Cure: see in the message who waits for whom. If that is only slow, raise the deadline that it names and resume.

    Attributes:
        key: Dotted key of the deadline.
        owner: Who waited.
        on: What it waited for.
    """

    def __init__(self, message: str, key: str = "", *, owner: str = "", on: str = "") -> None:
        super().__init__(message)
        self.key, self.owner, self.on = key, owner, on


class BudgetError(AntiphonError):
    """The remote judges of a run have cost their budget, or do not say what they cost.

    Cure: raise `grading.judge_budget` and resume.
    """


class NonFiniteError(AntiphonError):
    """A gradient is not finite.

    Cure: lower the learning rate or clip gradients, or train in float32; check a loss of your own with `check_loss`.
    """


class FreshnessError(AntiphonError):
    """A group older than the asynchronous ratio allows reached the learner.

    Cure: none: this is a bug of Antiphon. Report it with the output of `antiphon audit RUN`.
    """


class UserCodeError(AntiphonError):
    """A function of yours that the configuration names, such as a loss, a stage or a filter, raised an error.

    Cure: look at the file and line in the message. If a reward or an environment raises, only the attempt fails.
    """

    def __init__(self, message: str, *, key: str = "", value: Any = None) -> None:
        super().__init__(message)
        self.key, self.value = key, value


class RolloutError(AntiphonError):
    """Rollouts fail, or are filtered out, one after another, so that training cannot go on.

    Cure: mend what the last failure in the message names: environment, grader or filter. `antiphon check` tries a reward.
    """


class StateError(AntiphonError):
    """A call or an event came in a state that does not allow it, such as `EngineCore.sleep` while requests run.

    Cure: none if it ends a run: callers check the state first, so this is a bug of Antiphon or of an engine of your own. Report
    it with the output of `antiphon audit RUN`.
    """


class RecordError(AntiphonError):
    """The ledger or a checkpoint cannot be written, or what is there cannot be gone on from; `path` names the file.

    Cure: free the disk or mend its rights, then resume; `antiphon audit RUN` says what is intact.
    """

    def __init__(self, message: str, *, path: str | PathLike[str] = "") -> None:
        super().__init__(message)
        self.path = str(path)


class WeightsError(AntiphonError):
    """Received weights are not those that were sent, or not the model's.

    Cure: load the model that the run trains; if digests differ, check memory and network, and resume from the last checkpoint.

    Attributes:
        tensor: Name of the first tensor that is wrong, if one is.
        version: Version of the weights, if it is known.
    """

    def __init__(self, message: str, *, tensor: str = "", version: int | None = None) -> None:
        super().__init__(message)
        self.tensor, self.version = tensor, version


class SandboxError(AntiphonError):
    """A sandbox could not be made, was lost, or could not do what it was asked. Says nothing about what ran in it.

    Cure: `antiphon doctor` says which levels this machine has, and what a missing one needs.
    """


class UnsupportedError(AntiphonError):
    """The model, engine or platform cannot do what was asked, by the configuration under `key` if by a single value.

    Cure: choose another value, engine or model; the message names what can.
    """

    def __init__(self, message: str, *, key: str = "", value: Any = None) -> None:
        super().__init__(message if key in message else f"{key}: {message}")
        self.key, self.value = key, value


class RequestError(AntiphonError):
    """A request to an engine is invalid. Only the request fails: a client gets status 400, an attempt of a run has failed.

    Cure: shorten the prompt or change the sampling parameters that the message names.
    """


REFUSALS = (RequestError, UnsupportedError)
"""Errors by which an engine refuses one request: the attempt has failed, and the engine goes on. Others end the engine or the
run (`docs/engines.md`, "Errors")."""
