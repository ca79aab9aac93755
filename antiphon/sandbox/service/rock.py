"""ROCK's HTTP interface (rl-rock 1.11): what its clients send, and what they are answered.

A field that has no meaning here is accepted if the client loses nothing by it (names of images, registries), and refused if
it does (GPUs, Windows, hard limits of processors). What is not named here is ignored, as ROCK does.
"""

import datetime
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from antiphon.sandbox.service.manager import Sandboxes
from antiphon.sandbox.service.records import Sandbox, State, Wish

BAD_REQUEST, LOST, COMMAND_FAILED = 4000, 5000, 6000  # codes of failures
UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,9})?)\s*([kmgt]?)i?b?", re.IGNORECASE | re.ASCII)


def size(text: str) -> int:
    """Bytes of a size as `8g`, `512MiB` or `1024`; `ValueError` if it is none."""
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{text!r} is no size; write a number and one of b, k, m, g, t, as in 512m")
    return int(float(found[1]) * UNITS[found[2].lower()])


def _no(*harmless: object, why: str) -> AfterValidator:
    def check(value: object) -> object:
        if value not in harmless:
            raise ValueError(f"{value!r} cannot be had: {why}")
        return value

    return AfterValidator(check)


def _checked_size(text: str) -> str:
    size(text)
    return text


def _checked_text(text: str) -> str:
    text.encode()  # JSON can carry halves of characters; their error says so
    return text


Text = Annotated[str, AfterValidator(_checked_text)]
Name = Annotated[Text, Field(min_length=1, max_length=1024)]
FileName = Annotated[Text, Field(max_length=1 << 16)]
SessionName = Annotated[Text, Field(max_length=128)]
Size = Annotated[Text, AfterValidator(_checked_size)]


class Body(BaseModel):
    """Base of what clients send."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)


class StartBody(Body):
    """A sandbox that is wanted."""

    image: Name
    image_os: Annotated[Text, _no("linux", why="sandboxes here run Linux")] = "linux"
    sandbox_id: Text | None = None
    memory: Size = "8g"
    disk: Size | None = None
    cpus: float = Field(2, gt=0)
    auto_clear_time_minutes: float | None = Field(None, gt=0)
    auto_delete_seconds: float | None = Field(None, ge=0)
    startup_timeout: float | None = Field(None, gt=0)
    num_gpus: Annotated[float | None, _no(None, 0, why="sandboxes here have no GPU")] = None
    accelerator_type: Annotated[Text | None, _no(None, why="sandboxes here have no GPU")] = None
    limit_cpus: Annotated[float | None, _no(None, why="sandboxes here share the processors")] = None
    use_kata_runtime: Annotated[bool, _no(False, why="sandboxes here are made by bubblewrap")] = False
    auto_archive_seconds: Annotated[float | None, _no(None, why="nothing is archived here")] = None

    def wish(self, labels: Mapping[str, str]) -> Wish:
        """The same, as `Sandboxes` takes it."""
        return Wish(
            sandbox_id=self.sandbox_id,
            memory=size(self.memory),
            disk=None if self.disk is None else size(self.disk),
            idle_seconds=None if self.auto_clear_time_minutes is None else self.auto_clear_time_minutes * 60,
            start_seconds=self.startup_timeout,
            keep_seconds=self.auto_delete_seconds,
            cpus=self.cpus,
            labels={"image": self.image, **labels},
        )


class SandboxBody(Body):
    """What is about one sandbox, or one environment."""

    sandbox_id: Name


class ExecuteBody(SandboxBody):
    """A command outside of sessions."""

    command: Text | list[Text]
    timeout: float | None = Field(None, gt=0)
    cwd: FileName | None = None
    env: dict[Text, Text] | None = None
    check: bool = False
    error_msg: Text = ""


class SessionBody(SandboxBody):
    """A shell session."""

    session_type: Literal["bash"] = "bash"
    session: SessionName = "default"


class CreateSessionBody(SessionBody):
    """A new shell session."""

    startup_source: list[Text] = []
    env: dict[Text, Text] | None = None
    remote_user: Annotated[Text | None, _no(None, why="a sandbox has one user")] = None


class ActionBody(SandboxBody):
    """A command in a session."""

    action_type: Literal["bash"] = "bash"
    command: Text
    session: SessionName = "default"
    timeout: float | None = Field(None, gt=0)
    check: Literal["silent", "raise", "ignore"] = "raise"
    error_msg: Text = ""
    is_interactive_command: Annotated[bool, _no(False, why="sessions here have no terminal")] = False
    is_interactive_quit: Annotated[bool, _no(False, why="sessions here have no terminal")] = False
    expect: Annotated[list[Text], _no([], why="sessions here have no prompt")] = []


class ReadBody(SandboxBody):
    """A file to be read as text."""

    path: FileName
    encoding: Annotated[Text, Field(max_length=64)] | None = None
    errors: Annotated[Text, Field(max_length=64)] | None = None


class WriteBody(SandboxBody):
    """A file to be written."""

    path: FileName
    content: Text


class BatchBody(Body):
    """Sandboxes to be told of."""

    sandbox_ids: list[Text] = Field(max_length=1000)


class ListQuery(BaseModel):
    """Which sandboxes are listed: those that have all of these."""

    model_config = ConfigDict(extra="forbid")

    page: int = Field(1, ge=1, le=1_000_000)
    page_size: int = Field(500, ge=1, le=1000)
    state: State | None = None
    image: Text | None = None
    user_id: Text | None = None
    experiment_id: Text | None = None
    namespace: Text | None = None

    def picks(self, sandbox: Sandbox) -> bool:
        """Whether a sandbox is one of them."""
        labels = {name: getattr(self, name) for name in ("image", "user_id", "experiment_id", "namespace")}
        wanted = {name: value for name, value in labels.items() if value is not None}
        return self.state in (None, sandbox.state) and wanted.items() <= sandbox.wish.labels.items()


class MakeBody(Body):
    """An environment that is wanted."""

    env_id: Name
    sandbox_id: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")] | None = None
    """What it is to be called; ours, not ROCK's."""


class ResetBody(SandboxBody):
    """An environment to begin."""

    seed: int | None = Field(None, ge=0, lt=1 << 63)


class StepBody(SandboxBody):
    """What to do in an environment."""

    action: Text


def success(result: object = None) -> dict[str, object]:
    """The envelope of what was done."""
    return {"status": "Success", "message": None, "error": None, "result": result}


def failure(message: str, code: int, **result: object) -> dict[str, object]:
    """The envelope of what was not done."""
    return {
        "status": "Failed",
        "message": message.partition(":")[0],
        "error": message,
        "result": {"code": code, "failure_reason": message, **result},
    }


def describe(sandbox: Sandbox, sandboxes: Sandboxes) -> dict[str, Any]:
    """The status of one sandbox."""
    limits, running = sandbox.box_config.limits, sandbox.state is State.RUNNING
    phase = {State.PENDING: "running", State.RUNNING: "success"}.get(sandbox.state, "stopped")
    ending = sandboxes.idle_left(sandbox) if running else None
    now = datetime.datetime.now(datetime.UTC).timestamp()
    return {
        "sandbox_id": sandbox.id,
        "status": {"start": {"status": "failed" if sandbox.failure else phase, "message": sandbox.failure}},
        "state": sandbox.state,
        "is_alive": running,
        "host_name": "",
        "host_ip": "",
        "port_mapping": {},
        "cpus": sandbox.wish.cpus,
        "memory": f"{limits.memory >> 20}m",
        "disk": f"{limits.disk >> 20}m",
        **{name: sandbox.wish.labels.get(name) for name in ("image", "user_id", "experiment_id", "namespace")},
        "create_time": _when(sandbox.history[0].at),
        "start_time": _when(sandbox.since(State.RUNNING)),
        "stop_time": _when(sandbox.since(State.STOPPED)),
        "delete_time": _when(sandbox.since(State.DELETED)),
        "auto_stop_time": None if ending is None else _when(now + max(ending, 0)),
        "state_history": [
            {"from_state": line.before, "to_state": line.after, "event": line.event, "timestamp": _when(line.at)}
            for line in sandbox.history
        ],
    }


def _when(at: float | None) -> str | None:
    return None if at is None else datetime.datetime.fromtimestamp(at, datetime.UTC).isoformat(timespec="milliseconds")
