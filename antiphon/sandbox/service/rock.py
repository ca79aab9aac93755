"""ROCK's HTTP interface (rl-rock 1.11): bodies of requests and responses.

A field that this service does not support is accepted if ignoring it does the client no harm (registries),
and refused if it would (GPUs, Windows, hard processor limits). Unknown fields are ignored, as ROCK does.
"""

import datetime
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from antiphon.sandbox.service.http_errors import Reason
from antiphon.sandbox.service.manager import Sandboxes
from antiphon.sandbox.service.records import Sandbox, SandboxRequest, State

BAD_REQUEST, LOST, COMMAND_FAILED = 4000, 5000, 6000  # codes of failures
STATUS_CODES = {  # HTTP status and ROCK's code
    Reason.INPUT: (400, BAD_REQUEST),
    Reason.UNKNOWN: (404, BAD_REQUEST),
    Reason.STATE: (409, BAD_REQUEST),
    Reason.LOST: (410, LOST),
    Reason.FAILED: (422, COMMAND_FAILED),
    Reason.QUOTA: (429, BAD_REQUEST),
    Reason.UNREACHABLE: (503, LOST),
}
UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,9})?)\s*([kmgt]?)i?b?", re.IGNORECASE | re.ASCII)


def parse_size(text: str) -> int:
    """Return the bytes of a size such as `8g`, `512MiB` or `1024`; raise `ValueError` if it is not one."""
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{text!r} is not a size; give a number and one of b, k, m, g, t, as in 512m")
    return int(float(found[1]) * UNITS[found[2].lower()])


def _refuse_unless(*accepted: object, reason: str) -> AfterValidator:
    def check(value: object) -> object:
        if value not in accepted:
            raise ValueError(f"{value!r} is not supported: {reason}")
        return value

    return AfterValidator(check)


def _checked_size(text: str) -> str:
    parse_size(text)
    return text


def _checked_text(text: str) -> str:
    text.encode()  # JSON can carry lone surrogates; this raises for them
    return text


Text = Annotated[str, AfterValidator(_checked_text)]
Name = Annotated[Text, Field(min_length=1, max_length=1024)]
FileName = Annotated[Text, Field(max_length=1 << 16)]
SessionName = Annotated[Text, Field(max_length=128)]
Size = Annotated[Text, AfterValidator(_checked_size)]


class Body(BaseModel):
    """Base of request bodies."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)


class StartBody(Body):
    """Request for a new sandbox."""

    image: Name | None = None
    image_os: Annotated[Text, _refuse_unless("linux", reason="sandboxes here run Linux")] = "linux"
    sandbox_id: Text | None = None
    memory: Size = "8g"
    disk: Size | None = None
    cpus: float = Field(2, gt=0)
    auto_clear_time_minutes: float | None = Field(None, gt=0)
    auto_delete_seconds: float | None = Field(None, ge=0)
    startup_timeout: float | None = Field(None, gt=0)
    num_gpus: Annotated[float | None, _refuse_unless(None, 0, reason="sandboxes here have no GPU")] = None
    accelerator_type: Annotated[Text | None, _refuse_unless(None, reason="sandboxes here have no GPU")] = None
    limit_cpus: Annotated[float | None, _refuse_unless(None, reason="sandboxes here share the processors")] = None
    use_kata_runtime: Annotated[bool, _refuse_unless(False, reason="sandboxes here are created by bubblewrap")] = False
    auto_archive_seconds: Annotated[float | None, _refuse_unless(None, reason="nothing is archived here")] = None

    def to_request(self, labels: Mapping[str, str]) -> SandboxRequest:
        """Return the request that `Sandboxes.start` takes."""
        return SandboxRequest(
            sandbox_id=self.sandbox_id,
            image=self.image,
            memory=parse_size(self.memory),
            disk=None if self.disk is None else parse_size(self.disk),
            idle_seconds=None if self.auto_clear_time_minutes is None else self.auto_clear_time_minutes * 60,
            start_seconds=self.startup_timeout,
            keep_seconds=self.auto_delete_seconds,
            cpus=self.cpus,
            labels=labels,
        )


class SandboxBody(Body):
    """Request about one sandbox or environment."""

    sandbox_id: Name


class CommitBody(SandboxBody):
    """Request to keep the work directory of a sandbox as an image. There is no registry to log in to."""

    image_tag: Annotated[Text, Field(min_length=1, max_length=1024, pattern=r"^[^\x00-\x1f\x7f-\x9f\u2028\u2029]+$")]


class ExecuteBody(SandboxBody):
    """Request to run a command without a session."""

    command: Text | list[Text]
    timeout: float | None = Field(None, gt=0)
    cwd: FileName | None = None
    env: dict[Text, Text] | None = None
    check: bool = False
    error_msg: Text = ""


class SessionBody(SandboxBody):
    """Request about a shell session."""

    session_type: Literal["bash"] = "bash"
    session: SessionName = "default"


class CreateSessionBody(SessionBody):
    """Request for a new shell session."""

    startup_source: list[Text] = []
    env: dict[Text, Text] | None = None
    remote_user: Annotated[Text | None, _refuse_unless(None, reason="a sandbox has one user")] = None


class ActionBody(SandboxBody):
    """Request to run a command in a session."""

    action_type: Literal["bash"] = "bash"
    command: Text
    session: SessionName = "default"
    timeout: float | None = Field(None, gt=0)
    check: Literal["silent", "raise", "ignore"] = "raise"
    error_msg: Text = ""
    is_interactive_command: bool = False
    """The command is one for a terminal, or a line for the program that runs there."""
    is_interactive_quit: bool = False
    """The command is a line that ends the program in the terminal."""
    expect: list[Annotated[Text, Field(max_length=1024)]] = Field([], max_length=64)
    """Regular expressions; what one of them matches ends the wait for a program in a terminal."""

    @model_validator(mode="after")
    def _check_kind(self) -> Self:
        if self.is_interactive_command and self.is_interactive_quit:
            raise ValueError("is_interactive_command and is_interactive_quit exclude each other")
        if self.expect and not (self.is_interactive_command or self.is_interactive_quit):
            raise ValueError("expect is for interactive commands; other commands end by themselves")
        return self


class ReadBody(SandboxBody):
    """Request to read a file as text."""

    path: FileName
    encoding: Annotated[Text, Field(max_length=64)] | None = None
    errors: Annotated[Text, Field(max_length=64)] | None = None


class WriteBody(SandboxBody):
    """Request to write a file."""

    path: FileName
    content: Text


class BatchBody(Body):
    """Request for the status of several sandboxes."""

    sandbox_ids: list[Text] = Field(max_length=1000)


class ListQuery(BaseModel):
    """Filter of a list of sandboxes; a sandbox must match every field that is given."""

    model_config = ConfigDict(extra="forbid")

    page: int = Field(1, ge=1, le=1_000_000)
    page_size: int = Field(500, ge=1, le=1000)
    state: State | None = None
    image: Text | None = None
    user_id: Text | None = None
    experiment_id: Text | None = None
    namespace: Text | None = None

    def matches(self, sandbox: Sandbox) -> bool:
        """Return True if a sandbox matches the filter."""
        labels = {name: getattr(self, name) for name in ("user_id", "experiment_id", "namespace")}
        wanted = {name: value for name, value in labels.items() if value is not None}
        is_right = self.state in (None, sandbox.state) and self.image in (None, sandbox.image)
        return is_right and wanted.items() <= sandbox.request.labels.items()


class MakeBody(Body):
    """Request for a new environment."""

    env_id: Name
    sandbox_id: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")] | None = None
    """Id of the new environment; an extension of ROCK's interface."""


class ResetBody(SandboxBody):
    """Request to reset an environment."""

    seed: int | None = Field(None, ge=0, lt=1 << 63)


class StepBody(SandboxBody):
    """Request to step an environment."""

    action: Text


def success(result: object = None) -> dict[str, object]:
    """Return ROCK's envelope of a success."""
    return {"status": "Success", "message": None, "error": None, "result": result}


def failure(message: str, code: int, **result: object) -> dict[str, object]:
    """Return ROCK's envelope of a failure."""
    return {
        "status": "Failed",
        "message": message.partition(":")[0],
        "error": message,
        "result": {"code": code, "failure_reason": message, **result},
    }


def describe(sandbox: Sandbox, sandboxes: Sandboxes) -> dict[str, Any]:
    """Return ROCK's description of one sandbox."""
    limits, running = sandbox.backend_config.limits, sandbox.state is State.RUNNING
    phase = {State.PENDING: "running", State.RUNNING: "success"}.get(sandbox.state, "stopped")
    ending = sandboxes.idle_seconds_left(sandbox) if running else None
    now = datetime.datetime.now(datetime.UTC).timestamp()
    return {
        "sandbox_id": sandbox.id,
        "status": {"start": {"status": "failed" if sandbox.failure else phase, "message": sandbox.failure}},
        "state": sandbox.state,
        "is_alive": running,
        "host_name": "",
        "host_ip": "",
        "port_mapping": {},
        "cpus": sandbox.request.cpus,
        "memory": f"{limits.memory >> 20}m",
        "disk": f"{limits.disk >> 20}m",
        "image": sandbox.image,
        **{name: sandbox.request.labels.get(name) for name in ("user_id", "experiment_id", "namespace")},
        "create_time": _format_time(sandbox.history[0].at),
        "start_time": _format_time(sandbox.since(State.RUNNING)),
        "stop_time": _format_time(sandbox.since(State.STOPPED)),
        "delete_time": _format_time(sandbox.since(State.DELETED)),
        "auto_stop_time": None if ending is None else _format_time(now + max(ending, 0)),
        "state_history": [
            {"from_state": line.before, "to_state": line.after, "event": line.event, "timestamp": _format_time(line.at)}
            for line in sandbox.history
        ],
    }


def describe_commit(sandbox_id: str, tag: str, began: float, ended: float) -> dict[str, Any]:
    """Return ROCK's description of a commit, which has ended when it is answered."""
    times = {"started_at": _format_time(began), "completed_at": _format_time(ended)}
    return {"sandbox_id": sandbox_id, "image_tag": tag, "phase": "SUCCEEDED", "exit_code": 0, **times}


def _format_time(at: float | None) -> str | None:
    return None if at is None else datetime.datetime.fromtimestamp(at, datetime.UTC).isoformat(timespec="milliseconds")
