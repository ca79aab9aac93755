"""A client that runs Python programs in a sandbox service, and the request that it sends."""

import base64
from collections.abc import Mapping
from typing import Self

import httpx
from pydantic import BaseModel, ConfigDict, Field
from typing_extensions import override

from antiphon.core.config import read_secret
from antiphon.core.errors import SandboxError, UnsupportedError
from antiphon.sandbox.base import TOKEN_VARIABLE, Level, Limits, PythonSandbox, Result, Status, Usage
from antiphon.sandbox.config import SandboxConfig

PATH = "/apis/antiphon/v1/python"
PATIENCE_SECONDS = 60.0  # for a program to wait its turn at the service, and for the answer to travel


class ProgramRequest(BaseModel):
    """A program to run. Texts and files are in base64, which preserves every byte."""

    model_config = ConfigDict(extra="forbid")

    program: str
    stdin: str = ""
    files: dict[str, str] = Field(default_factory=dict)
    limits: Limits | None = None
    """Limits of the program; the service reduces each to what it allows."""
    partner: str = ""
    """The partner if `program` is a judge; both run linked (`PythonSandbox.run_linked`)."""

    @classmethod
    def from_program(cls, program: str, stdin: str, files: Mapping[str, bytes], limits: Limits) -> Self:
        """Return the request for one program."""
        texts = [_encode(text.encode("utf-8", "surrogatepass")) for text in (program, stdin)]
        encoded = {name: _encode(content) for name, content in files.items()}
        return cls(program=texts[0], stdin=texts[1], files=encoded, limits=limits)

    @classmethod
    def from_linked(cls, judge: str, partner: str, stdin: str, limits: Limits) -> Self:
        """Return the request for a judge and its partner."""
        text = _encode(partner.encode("utf-8", "surrogatepass"))
        return cls.from_program(judge, stdin, {}, limits).model_copy(update={"partner": text})

    def decode_partner(self) -> str:
        """Return the partner program, or an empty string; raise `ValueError` for invalid base64."""
        return _decode(self.partner).decode("utf-8", "surrogatepass")

    def decode(self) -> tuple[str, str, dict[str, bytes]]:
        """Return program, standard input and files; raise `ValueError` for invalid base64."""
        program, stdin = (_decode(text).decode("utf-8", "surrogatepass") for text in (self.program, self.stdin))
        return program, stdin, {name: _decode(content) for name, content in self.files.items()}


def _encode(content: bytes) -> str:
    return base64.b64encode(content).decode("ascii")


def _decode(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


class RemotePython(PythonSandbox):
    """A `PythonSandbox` that runs its programs in an `antiphon sandbox serve`.

    A program that the service refuses, or that is lost on the way, has the status `REFUSED`, which says nothing about it.
    """

    def __init__(self, config: SandboxConfig) -> None:
        """Connect to the service and run an empty program as a trial.

        Raises:
            SandboxError: The service does not answer or runs no programs.
            UnsupportedError: It runs programs below the minimum level.
        """
        headers = {"Authorization": f"Bearer {read_secret(TOKEN_VARIABLE)}"}
        self._client = httpx.Client(base_url=config.service, headers=headers, trust_env=False)
        self._config = config
        self.level = config.minimum_level
        trial = self.run("")
        if trial.status is Status.REFUSED:
            self.close()
            raise SandboxError(f"sandbox.service: {config.service} runs no programs: {trial.detail}")
        if trial.level < config.minimum_level:
            self.close()
            raise UnsupportedError(
                f"{config.service} runs untrusted code at level {trial.level}, but sandbox.minimum_level is "
                f"{config.minimum_level}",
                key="sandbox.minimum_level",
                value=config.minimum_level,
            )
        self.level = trial.level

    @override
    def run(
        self, program: str, *, stdin: str = "", files: Mapping[str, bytes] | None = None, limits: Limits | None = None
    ) -> Result:
        """Have the service run `program` as `__main__`."""
        limits = limits or self._config.limits.limits
        return self._send(ProgramRequest.from_program(program, stdin, files or {}, limits), limits.seconds)

    @override
    def run_linked(self, judge: str, partner: str, *, stdin: str = "", limits: Limits | None = None) -> Result:
        """Have the service run two linked programs."""
        limits = limits or self._config.limits.limits
        return self._send(ProgramRequest.from_linked(judge, partner, stdin, limits), limits.seconds)

    def _send(self, request: ProgramRequest, seconds: float) -> Result:
        try:
            answer = self._client.post(
                PATH,
                content=request.model_dump_json(exclude_defaults=True),
                headers={"Content-Type": "application/json"},
                timeout=seconds + PATIENCE_SECONDS,
            )
            fields = answer.json()
            if answer.is_error:
                return self._refused(str(fields["error"]))
            level, usage = Level(fields.pop("level")), Usage(**fields.pop("usage"))
            return Result(status=Status(fields.pop("status")), level=level, usage=usage, **fields)
        except (httpx.HTTPError, ValueError, TypeError, KeyError, AttributeError) as error:
            return self._refused(f"{type(error).__name__}: {error}")

    @override
    def close(self) -> None:
        """Close the connections. Programs under way in the service end by their limits."""
        self._client.close()

    def _refused(self, detail: str) -> Result:
        return Result(status=Status.REFUSED, level=self.level, detail=detail)
