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
from antiphon.sandbox.service.http_errors import Reason, RefusedError
from antiphon.sandbox.service.manager import Sandboxes
from antiphon.sandbox.service.records import Sandbox, State
from antiphon.sandbox.service.texts import text_as_json
from antiphon.sandbox.sessions.session import CommandResult

SANDBOX, GEM = "/apis/envs/sandbox/v1", "/apis/v1/envs/gem"

Label = Annotated[str, Header(max_length=1024)]


class Answer(Response):
    """A JSON response in ASCII, so that any output of a command can be sent."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Return the content as JSON."""
        return json.dumps(content, default=str).encode("ascii")


class SandboxRoutes:
    """The routes of `/apis/envs/sandbox/v1`."""

    COMMANDS = ("execute", "create_session", "run_in_session", "close_session", "read_file", "write_file", "upload")
    POST = ("start", "start_async", "stop", "delete", "restart", "commit", *COMMANDS)
    GET = ("is_alive", "get_status", "get_sandbox_statistics", "sandboxes", "get_token")

    def __init__(self, sandboxes: Sandboxes, commands: Commands) -> None:
        self._sandboxes = sandboxes
        self._commands = commands

    def router(self) -> APIRouter:
        """Return a router with all routes."""
        router = APIRouter(prefix=SANDBOX, default_response_class=Answer)
        for method, names in (("POST", self.POST), ("GET", self.GET)):
            for name in names:
                router.add_api_route(f"/{name}", getattr(self, name), methods=[method])
        router.add_api_route("/sandboxes/batch", self.batch, methods=["POST"])
        router.add_api_route("/commit/{sandbox_id}", self.get_commit, methods=["GET"])
        router.add_api_route("/sandboxes/{sandbox_id}/restart", self.restart_named, methods=["POST"])
        return router

    async def start_async(
        self,
        body: rock.StartBody,
        x_user_id: Label = "default",
        x_experiment_id: Label = "default",
        x_namespace: Label = "default",
    ) -> Answer:
        """Create a sandbox. It may still be pending."""
        labels = {"user_id": x_user_id, "experiment_id": x_experiment_id, "namespace": x_namespace}
        return self._status(await self._sandboxes.start(body.to_request(labels)))

    async def start(self, body: rock.StartBody) -> Answer:
        """Create a sandbox and wait until it runs or has failed to start."""
        return self._status(await self._sandboxes.start(body.to_request({}), self._sandboxes.config.start_seconds))

    async def stop(self, body: rock.SandboxBody) -> Answer:
        """Stop a sandbox."""
        await self._sandboxes.stop(body.sandbox_id)
        return Answer(rock.success(f"{body.sandbox_id} stopped"))

    async def delete(self, body: rock.SandboxBody) -> Answer:
        """Delete the files of a stopped sandbox."""
        await self._sandboxes.delete(body.sandbox_id)
        return Answer(rock.success(f"{body.sandbox_id} deleted"))

    async def commit(self, body: rock.CommitBody) -> Answer:
        """Keep the work directory of a sandbox as an image."""
        await self._sandboxes.commit(body.sandbox_id, body.image_tag)
        return await self.get_commit(body.sandbox_id)

    async def get_commit(self, sandbox_id: str) -> Answer:
        """Return the last commit of a sandbox."""
        sandbox = self._sandboxes.get(sandbox_id)
        if sandbox.committed is None:
            raise RefusedError(Reason.UNKNOWN, f"sandbox {sandbox_id!r} was not committed")
        return Answer(rock.success(rock.describe_commit(sandbox_id, *sandbox.committed)))

    async def restart(self, body: rock.SandboxBody) -> Answer:
        """Start a stopped sandbox again."""
        return await self.restart_named(body.sandbox_id)

    async def restart_named(self, sandbox_id: str) -> Answer:
        """Start a stopped sandbox again."""
        return self._status(await self._sandboxes.restart(sandbox_id))

    async def is_alive(self, sandbox_id: str) -> Answer:
        """Return True if a sandbox runs."""
        state = self._sandboxes.get(sandbox_id).state
        return Answer(rock.success({"is_alive": state is State.RUNNING, "message": state}))

    async def get_status(self, sandbox_id: str) -> Answer:
        """Return the status of a sandbox in any state. The request resets its idle time."""
        sandbox = self._sandboxes.get(sandbox_id)
        sandbox.used = self._sandboxes.now()
        return self._status(sandbox)

    async def get_sandbox_statistics(self, request: Request, sandbox_id: str) -> Answer:
        """Return the resources that a sandbox uses."""
        used = await run_while_connected(request.receive, self._commands.statistics(sandbox_id))
        return Answer(rock.success(used))

    async def get_token(self) -> Answer:
        """Answer ROCK's client that there is no object storage, through which it would pass files.

        The client treats any HTTP status but 200 as an error of its own and logs it.
        """
        message = "this service has no object storage; read_file with encoding latin-1 returns the bytes of a file"
        return Answer(rock.failure(message, rock.BAD_REQUEST))

    async def sandboxes(self, query: Annotated[rock.ListQuery, Query()]) -> Answer:
        """List the known sandboxes, oldest first."""
        found = [sandbox for sandbox in self._sandboxes.all() if query.matches(sandbox)]
        begin = (query.page - 1) * query.page_size
        items = [rock.describe(sandbox, self._sandboxes) for sandbox in found[begin : begin + query.page_size]]
        more = begin + len(items) < len(found)
        return Answer(rock.success({"items": items, "total": len(found), "has_more": more}))

    async def batch(self, body: rock.BatchBody) -> Answer:
        """Return the status of those of the given sandboxes that are pending or running."""
        wanted = set(body.sandbox_ids)
        found = [sandbox for sandbox in self._sandboxes.all() if sandbox.id in wanted and sandbox.live]
        return Answer(rock.success({"statuses": [rock.describe(sandbox, self._sandboxes) for sandbox in found]}))

    async def execute(self, request: Request, body: rock.ExecuteBody) -> Answer:
        """Run a command in a shell state of its own."""
        command = self._commands.execute(
            body.sandbox_id, body.command, seconds=body.timeout, cwd=body.cwd, env=body.env
        )
        result = await run_while_connected(request.receive, command)
        fields = {**_command_fields(result), "stdout": result.stdout, "stderr": result.stderr}
        return _outcome(result, "execute command", fields, body.check, body.error_msg)

    async def create_session(self, request: Request, body: rock.CreateSessionBody) -> Answer:
        """Create a shell session."""
        command = self._commands.create_session(
            body.sandbox_id, body.session, env=body.env, sources=body.startup_source
        )
        result = await run_while_connected(request.receive, command)
        return Answer(rock.success({"output": _output(result), "session_type": "bash"}))

    async def run_in_session(self, request: Request, body: rock.ActionBody) -> Answer:
        """Run a command in a session. With check `raise`, an exit code other than 0 is a failure."""
        if body.is_interactive_command or body.is_interactive_quit:
            return await self._interact(request, body)
        command = self._commands.run(body.sandbox_id, body.session, body.command, body.timeout)
        result = await run_while_connected(request.receive, command)
        fields = {**_command_fields(result), "output": _output(result), "expect_string": "", "session_type": "bash"}
        if body.check == "ignore":
            fields["exit_code"] = None
        return _outcome(result, "run in session", fields, body.check == "raise", body.error_msg)

    async def _interact(self, request: Request, body: rock.ActionBody) -> Answer:
        work = self._commands.interact(
            *(body.sandbox_id, body.session, body.command, body.expect, body.timeout), quits=body.is_interactive_quit
        )
        reply = await run_while_connected(request.receive, work)
        fields = {"exit_code": reply.exit_code or 0, "output": reply.output, "expect_string": reply.match or ""}
        if reply.match is None and reply.exit_code is None:
            reason = (
                "the program in the terminal was killed"
                if reply.ended
                else "timeout: it has said nothing that was expected"
            )
            return Answer(rock.failure(f"run in session failed: {reason}", rock.COMMAND_FAILED, **fields))
        return Answer(rock.success({**fields, "failure_reason": "", "session_type": "bash"}))

    async def close_session(self, body: rock.SessionBody) -> Answer:
        """End a session and everything that runs in it."""
        await self._commands.close_session(body.sandbox_id, body.session)
        return Answer(rock.success({"session_type": "bash"}))

    async def read_file(self, request: Request, body: rock.ReadBody) -> Response:
        """Read a file as text, in UTF-8 unless the request names another encoding."""
        literal = await run_while_connected(request.receive, self._read(body))
        begin, _, end = json.dumps(rock.success({"content": ""})).partition('""')
        return StreamingResponse(_iterate([begin.encode(), *literal, end.encode()]), media_type=Answer.media_type)

    async def _read(self, body: rock.ReadBody) -> list[bytes]:
        content = await self._commands.read(body.sandbox_id, body.path)
        try:
            return await text_as_json(content, body.encoding or "utf-8", body.errors or "strict")
        except RefusedError as refused:
            raise RefusedError(refused.reason, f"read {body.path}: {refused}") from refused

    async def write_file(self, request: Request, body: rock.WriteBody) -> Answer:
        """Write a text file in UTF-8."""
        return await self._write(request, body.sandbox_id, body.path, body.content.encode())

    async def upload(
        self,
        request: Request,
        file: UploadFile,
        target_path: Annotated[str, Form()],
        sandbox_id: Annotated[str, Form()],
    ) -> Answer:
        """Write the bytes of an uploaded file."""
        return await self._write(request, sandbox_id, target_path, await file.read())

    async def _write(self, request: Request, sandbox_id: str, path: str, content: bytes) -> Answer:
        try:
            await run_while_connected(request.receive, self._commands.write(sandbox_id, path, content))
        except RefusedError as refused:
            if refused.reason is not Reason.FAILED:
                raise
            return Answer(
                rock.failure(str(refused), rock.COMMAND_FAILED)
            )  # ROCK's clients look for this failure in the envelope
        return Answer(rock.success({"success": True, "message": "", "file_name": path.rpartition("/")[2]}))

    def _status(self, sandbox: Sandbox) -> Answer:
        return Answer(rock.success(rock.describe(sandbox, self._sandboxes)))


async def _iterate(parts: list[bytes]) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


class EnvironmentRoutes:
    """The routes of `/apis/v1/envs/gem`. Their answers have no envelope, except for refusals."""

    POST = ("make", "reset", "step", "close", "list")

    def __init__(self, environments: Environments) -> None:
        self._environments = environments

    def router(self) -> APIRouter:
        """Return a router with all routes."""
        router = APIRouter(prefix=GEM, default_response_class=Answer)
        for name in self.POST:
            router.add_api_route(f"/{name}", getattr(self, name), methods=["POST"])
        return router

    async def make(self, body: rock.MakeBody) -> Answer:
        """Create an environment."""
        return Answer({"sandbox_id": await self._environments.make(body.env_id, body.sandbox_id)})

    async def reset(self, body: rock.ResetBody) -> Answer:
        """Reset an environment."""
        observation, info = await self._environments.reset(body.sandbox_id, body.seed)
        return Answer({"observation": observation, "info": info})

    async def step(self, body: rock.StepBody) -> Answer:
        """Step an environment."""
        names = ("observation", "reward", "terminated", "truncated", "info")
        return Answer(dict(zip(names, await self._environments.step(body.sandbox_id, body.action), strict=True)))

    async def close(self, body: rock.SandboxBody) -> Answer:
        """Close an environment."""
        await self._environments.close(body.sandbox_id)
        return Answer({"sandbox_id": body.sandbox_id})

    async def list(self) -> Answer:
        """List the names of environments that can be made."""
        return Answer({"env_id": list(self._environments.names)})


def _command_fields(result: CommandResult) -> dict[str, Any]:
    """Return the fields of every command's answer. The last three extend ROCK's interface."""
    return {
        "exit_code": result.exit_code,
        "failure_reason": "" if result.status in (Status.OK, Status.ERROR) else result.detail or result.status,
        "status": result.status,
        "level": result.level,
        "seconds": result.usage.seconds,
    }


def _output(result: CommandResult) -> str:
    """Return both streams in one, without line ends at the end, as ROCK does."""
    return result.raw().decode("utf-8", "replace").rstrip("\n")


def _outcome(result: CommandResult, action: str, fields: dict[str, Any], check: bool, error_msg: str) -> Answer:
    """Return the answer of a command that has run.

    It is a failure if the command did not end by itself, or if `check` is set and its exit code is not 0.
    """
    if result.status is Status.TIMEOUT:
        message = f"{action} failed: timeout after {result.usage.seconds:.1f} s"
    elif result.exit_code is None:
        message = f"{action} failed: {result.status}, {result.detail}"
    elif check and result.exit_code != 0:
        output = fields.get("output") or f"{result.stdout}{result.stderr}"
        message = (
            f"{action} failed: {error_msg + ': ' if error_msg else ''}exit code {result.exit_code}; output: {output!r}"
        )
    else:
        return Answer(rock.success(fields))
    return Answer(rock.failure(message, rock.COMMAND_FAILED, **{**fields, "failure_reason": message}))
