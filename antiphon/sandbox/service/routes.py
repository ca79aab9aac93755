"""The routes of the service: ROCK's for sandboxes and for environments."""

import json
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Form, Header, Query, Request, UploadFile
from fastapi.responses import Response, StreamingResponse

from antiphon.sandbox.base import Status
from antiphon.sandbox.service import rock
from antiphon.sandbox.service.bounds import run_while_connected
from antiphon.sandbox.service.commands import Commands
from antiphon.sandbox.service.environments import Environments
from antiphon.sandbox.service.http_errors import Reason, Refused
from antiphon.sandbox.service.manager import Sandboxes
from antiphon.sandbox.service.records import Sandbox, State
from antiphon.sandbox.service.texts import text_as_json
from antiphon.sandbox.sessions.session import CommandResult

Label = Annotated[str, Header(max_length=1024)]


class Answer(Response):
    """JSON in ASCII: whatever bytes a command wrote, the answer can be sent."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return json.dumps(content, default=str).encode("ascii")


class SandboxRoutes:
    """The routes of `/apis/envs/sandbox/v1`."""

    POST = (
        *("start", "start_async", "stop", "delete", "restart", "execute", "create_session", "run_in_session"),
        *("close_session", "read_file", "write_file", "upload"),
    )
    GET = ("is_alive", "get_status", "get_sandbox_statistics", "sandboxes", "get_token")

    def __init__(self, sandboxes: Sandboxes, commands: Commands) -> None:
        self._sandboxes = sandboxes
        self._commands = commands

    def router(self) -> APIRouter:
        """All of them."""
        router = APIRouter(prefix="/apis/envs/sandbox/v1", default_response_class=Answer)
        for method, names in (("POST", self.POST), ("GET", self.GET)):
            for name in names:
                router.add_api_route(f"/{name}", getattr(self, name), methods=[method])
        router.add_api_route("/sandboxes/batch", self.batch, methods=["POST"])
        router.add_api_route("/sandboxes/{sandbox_id}/restart", self.restart_named, methods=["POST"])
        return router

    async def start_async(
        self,
        body: rock.StartBody,
        x_user_id: Label = "default",
        x_experiment_id: Label = "default",
        x_namespace: Label = "default",
    ) -> Answer:
        """A new sandbox; it may still be pending."""
        labels = {"user_id": x_user_id, "experiment_id": x_experiment_id, "namespace": x_namespace}
        return self._status(await self._sandboxes.start(body.wish(labels)))

    async def start(self, body: rock.StartBody) -> Answer:
        """A new sandbox; it is running, or has failed to start."""
        return self._status(await self._sandboxes.start(body.wish({}), self._sandboxes.config.start_seconds))

    async def stop(self, body: rock.SandboxBody) -> Answer:
        """End what runs in a sandbox."""
        await self._sandboxes.stop(body.sandbox_id)
        return Answer(rock.success(f"{body.sandbox_id} stopped"))

    async def delete(self, body: rock.SandboxBody) -> Answer:
        """Remove what a stopped sandbox has left."""
        await self._sandboxes.delete(body.sandbox_id)
        return Answer(rock.success(f"{body.sandbox_id} deleted"))

    async def restart(self, body: rock.SandboxBody) -> Answer:
        """Start a stopped sandbox again."""
        return await self.restart_named(body.sandbox_id)

    async def restart_named(self, sandbox_id: str) -> Answer:
        """Start a stopped sandbox again."""
        return self._status(await self._sandboxes.restart(sandbox_id))

    async def is_alive(self, sandbox_id: str) -> Answer:
        """Whether a sandbox runs."""
        state = self._sandboxes.get(sandbox_id).state
        return Answer(rock.success({"is_alive": state is State.RUNNING, "message": state}))

    async def get_status(self, sandbox_id: str) -> Answer:
        """All that is known of a sandbox, whatever its state. It counts as use."""
        sandbox = self._sandboxes.get(sandbox_id)
        sandbox.used = self._sandboxes.now()
        return self._status(sandbox)

    async def get_sandbox_statistics(self, request: Request, sandbox_id: str) -> Answer:
        """What a sandbox uses."""
        used = await run_while_connected(request.receive, self._commands.statistics(sandbox_id))
        return Answer(rock.success(used))

    async def get_token(self) -> Answer:
        """Where ROCK's client would pass files through Alibaba's object storage. It takes any status of HTTP but 200 for an
        error of its own, and logs that."""
        message = "this service has no object storage; read_file with encoding latin-1 has the bytes of a file"
        return Answer(rock.failure(message, rock.BAD_REQUEST))

    async def sandboxes(self, query: Annotated[rock.ListQuery, Query()]) -> Answer:
        """The sandboxes that are known, oldest first."""
        found = [sandbox for sandbox in self._sandboxes.all() if query.picks(sandbox)]
        begin = (query.page - 1) * query.page_size
        items = [rock.describe(sandbox, self._sandboxes) for sandbox in found[begin : begin + query.page_size]]
        more = begin + len(items) < len(found)
        return Answer(rock.success({"items": items, "total": len(found), "has_more": more}))

    async def batch(self, body: rock.BatchBody) -> Answer:
        """Those of some sandboxes that live."""
        wanted = set(body.sandbox_ids)
        found = [sandbox for sandbox in self._sandboxes.all() if sandbox.id in wanted and sandbox.live]
        return Answer(rock.success({"statuses": [rock.describe(sandbox, self._sandboxes) for sandbox in found]}))

    async def execute(self, request: Request, body: rock.ExecuteBody) -> Answer:
        """Run a command that leaves nothing to the next."""
        command = self._commands.execute(
            body.sandbox_id, body.command, seconds=body.timeout, cwd=body.cwd, env=body.env
        )
        result = await run_while_connected(request.receive, command)
        told = {**_told(result), "stdout": result.stdout, "stderr": result.stderr}
        return _outcome(result, "execute command", told, body.check, body.error_msg)

    async def create_session(self, request: Request, body: rock.CreateSessionBody) -> Answer:
        """A new shell session."""
        command = self._commands.create_session(
            body.sandbox_id, body.session, env=body.env, sources=body.startup_source
        )
        result = await run_while_connected(request.receive, command)
        return Answer(rock.success({"output": _output(result), "session_type": "bash"}))

    async def run_in_session(self, request: Request, body: rock.ActionBody) -> Answer:
        """Run a command in a session. With check `raise` an exit code other than 0 is a failure."""
        command = self._commands.run(body.sandbox_id, body.session, body.command, body.timeout)
        result = await run_while_connected(request.receive, command)
        told = {**_told(result), "output": _output(result), "expect_string": "", "session_type": "bash"}
        if body.check == "ignore":
            told["exit_code"] = None
        return _outcome(result, "run in session", told, body.check == "raise", body.error_msg)

    async def close_session(self, body: rock.SessionBody) -> Answer:
        """End a session and what runs in it."""
        await self._commands.close_session(body.sandbox_id, body.session)
        return Answer(rock.success({"session_type": "bash"}))

    async def read_file(self, request: Request, body: rock.ReadBody) -> Response:
        """A file as text; UTF-8 unless it is told otherwise."""
        literal = await run_while_connected(request.receive, self._read(body))
        begin, _, end = json.dumps(rock.success({"content": ""})).partition('""')
        return StreamingResponse(_each([begin.encode(), *literal, end.encode()]), media_type=Answer.media_type)

    async def _read(self, body: rock.ReadBody) -> list[bytes]:
        content = await self._commands.read(body.sandbox_id, body.path)
        try:
            return await text_as_json(content, body.encoding or "utf-8", body.errors or "strict")
        except Refused as refused:
            raise Refused(refused.reason, f"read {body.path}: {refused}") from refused

    async def write_file(self, request: Request, body: rock.WriteBody) -> Answer:
        """Write a file, in UTF-8."""
        return await self._write(request, body.sandbox_id, body.path, body.content.encode())

    async def upload(
        self,
        request: Request,
        file: UploadFile,
        target_path: Annotated[str, Form()],
        sandbox_id: Annotated[str, Form()],
    ) -> Answer:
        """Write a file as it is."""
        return await self._write(request, sandbox_id, target_path, await file.read())

    async def _write(self, request: Request, sandbox_id: str, path: str, content: bytes) -> Answer:
        try:
            await run_while_connected(request.receive, self._commands.write(sandbox_id, path, content))
        except Refused as refused:
            if refused.reason is not Reason.FAILED:
                raise
            return Answer(rock.failure(str(refused), rock.COMMAND_FAILED))  # clients look for it in the envelope
        return Answer(rock.success({"success": True, "message": "", "file_name": path.rpartition("/")[2]}))

    def _status(self, sandbox: Sandbox) -> Answer:
        return Answer(rock.success(rock.describe(sandbox, self._sandboxes)))


async def _each(parts: list[bytes]) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


class EnvironmentRoutes:
    """The routes of `/apis/v1/envs/gem`: no envelope, unless something is refused."""

    def __init__(self, environments: Environments) -> None:
        self._environments = environments

    def router(self) -> APIRouter:
        """All of them."""
        router = APIRouter(prefix="/apis/v1/envs/gem", default_response_class=Answer)
        for name in ("make", "reset", "step", "close", "list"):
            router.add_api_route(f"/{name}", getattr(self, name), methods=["POST"])
        return router

    async def make(self, body: rock.MakeBody) -> Answer:
        """A new environment."""
        return Answer({"sandbox_id": await self._environments.make(body.env_id, body.sandbox_id)})

    async def reset(self, body: rock.ResetBody) -> Answer:
        """Begin."""
        observation, info = await self._environments.reset(body.sandbox_id, body.seed)
        return Answer({"observation": observation, "info": info})

    async def step(self, body: rock.StepBody) -> Answer:
        """Act."""
        names = ("observation", "reward", "terminated", "truncated", "info")
        return Answer(dict(zip(names, await self._environments.step(body.sandbox_id, body.action), strict=True)))

    async def close(self, body: rock.SandboxBody) -> Answer:
        """End an environment."""
        await self._environments.close(body.sandbox_id)
        return Answer({"sandbox_id": body.sandbox_id})

    async def list(self) -> Answer:
        """The names of what can be made."""
        return Answer({"env_id": list(self._environments.names)})


def _told(result: CommandResult) -> dict[str, Any]:
    """What an answer says of every command; the last three lines are ours, not ROCK's."""
    return {
        "exit_code": result.exit_code,
        "failure_reason": "" if result.status in (Status.OK, Status.ERROR) else result.detail or result.status,
        "status": result.status,
        "level": result.level,
        "seconds": result.usage.seconds,
    }


def _output(result: CommandResult) -> str:
    """As ROCK gives it: both streams in one, without the last line ends."""
    return result.raw().decode("utf-8", "replace").rstrip("\n")


def _outcome(result: CommandResult, what: str, told: dict[str, Any], check: bool, error_msg: str) -> Answer:
    """The envelope of a command that has run: a failure if its end is none of its own, or is checked and not 0."""
    if result.status is Status.TIMEOUT:
        message = f"{what} failed: timeout after {result.usage.seconds:.1f} s"
    elif result.exit_code is None:
        message = f"{what} failed: {result.status}, {result.detail}"
    elif check and result.exit_code != 0:
        said = told.get("output") or f"{result.stdout}{result.stderr}"
        message = (
            f"{what} failed: {error_msg + ': ' if error_msg else ''}exit code {result.exit_code}; output: {said!r}"
        )
    else:
        return Answer(rock.success(told))
    return Answer(rock.failure(message, rock.COMMAND_FAILED, **{**told, "failure_reason": message}))
