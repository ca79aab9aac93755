"""Python programs that run in a service, on this machine or another: the client, and what the two say to each other."""

import base64
from collections.abc import Mapping
from typing import Self

import httpx
from pydantic import BaseModel, ConfigDict, Field

from antiphon.core.config import read_secret
from antiphon.core.errors import SandboxError, UnsupportedError
from antiphon.sandbox.base import TOKEN_VARIABLE, Level, Limits, PythonSandbox, Result, Status, Usage
from antiphon.sandbox.config import SandboxConfig

PATH = "/apis/antiphon/v1/python"
PATIENCE_SECONDS = 60.0  # for a program to get its turn there, and for the answer to travel


class Program(BaseModel):
    """A program that is to run. Texts and files are in base64, because no byte of them may change."""

    model_config = ConfigDict(extra="forbid")

    program: str
    stdin: str = ""
    files: dict[str, str] = Field(default_factory=dict)
    limits: Limits | None = None
    """Of each is given what the service allows, where that is less."""
    partner: str = ""
    """A program that is linked to this one, if it is a judge: see `PythonSandbox.run_linked`."""

    @classmethod
    def of(cls, program: str, stdin: str, files: Mapping[str, bytes], limits: Limits) -> Self:
        """What `contents` gives back."""
        texts = [_encode(text.encode("utf-8", "surrogatepass")) for text in (program, stdin)]
        named = {name: _encode(content) for name, content in files.items()}
        return cls(program=texts[0], stdin=texts[1], files=named, limits=limits)

    @classmethod
    def of_two(cls, judge: str, partner: str, stdin: str, limits: Limits) -> Self:
        """A judge and the program that is linked to it."""
        text = _encode(partner.encode("utf-8", "surrogatepass"))
        return cls.of(judge, stdin, {}, limits).model_copy(update={"partner": text})

    def linked(self) -> str:
        """The program that is linked to this one, or nothing; `ValueError` for what is not in base64."""
        return _decode(self.partner).decode("utf-8", "surrogatepass")

    def contents(self) -> tuple[str, str, dict[str, bytes]]:
        """Program, standard input and files; `ValueError` for what is not in base64."""
        program, stdin = (_decode(text).decode("utf-8", "surrogatepass") for text in (self.program, self.stdin))
        return program, stdin, {name: _decode(content) for name, content in self.files.items()}


def _encode(content: bytes) -> str:
    return base64.b64encode(content).decode("ascii")


def _decode(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


class RemotePython(PythonSandbox):
    """A `PythonSandbox` that has its programs run by an `antiphon sandbox serve`.

    What the service refuses, and what is lost on the way, is `REFUSED`, and thereby no verdict on a program.
    """

    def __init__(self, config: SandboxConfig) -> None:
        """`SandboxError` if the service does not answer, `UnsupportedError` if it keeps programs apart too little."""
        headers = {"Authorization": f"Bearer {read_secret(TOKEN_VARIABLE)}"}
        self._client = httpx.Client(base_url=config.service, headers=headers, trust_env=False)
        self._config = config
        self.level = config.minimum_level
        tried = self.run("")
        if tried.status is Status.REFUSED:
            self.close()
            raise SandboxError(f"sandbox.service: {config.service} runs no programs: {tried.detail}")
        if tried.level < config.minimum_level:
            self.close()
            raise UnsupportedError(
                f"{config.service} runs untrusted code at level {tried.level}, but sandbox.minimum_level is "
                f"{config.minimum_level}"
            )
        self.level = tried.level

    def run(
        self, program: str, *, stdin: str = "", files: Mapping[str, bytes] | None = None, limits: Limits | None = None
    ) -> Result:
        """See `PythonSandbox`."""
        limits = limits or self._config.limits.limits
        return self._send(Program.of(program, stdin, files or {}, limits), limits.seconds)

    def run_linked(self, judge: str, partner: str, *, stdin: str = "", limits: Limits | None = None) -> Result:
        """Have the service run two programs that are linked there; see `PythonSandbox`."""
        limits = limits or self._config.limits.limits
        return self._send(Program.of_two(judge, partner, stdin, limits), limits.seconds)

    def _send(self, program: Program, seconds: float) -> Result:
        try:
            answer = self._client.post(
                PATH,
                content=program.model_dump_json(exclude_defaults=True),
                headers={"Content-Type": "application/json"},
                timeout=seconds + PATIENCE_SECONDS,
            )
            told = answer.json()
            if answer.is_error:
                return self._refused(str(told["error"]))
            level, usage = Level(told.pop("level")), Usage(**told.pop("usage"))
            return Result(status=Status(told.pop("status")), level=level, usage=usage, **told)
        except (httpx.HTTPError, ValueError, TypeError, KeyError, AttributeError) as error:
            return self._refused(f"{type(error).__name__}: {error}")

    def close(self) -> None:
        """Close the connections; what the service runs ends by its limits."""
        self._client.close()

    def _refused(self, detail: str) -> Result:
        return Result(status=Status.REFUSED, level=self.level, detail=detail)
