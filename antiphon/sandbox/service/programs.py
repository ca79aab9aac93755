"""Runs single Python programs of clients, each in a fresh process of the configured sandbox."""

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from types import TracebackType
from typing import Self

from antiphon.core.errors import UnsupportedError
from antiphon.sandbox.backends import open_sandbox
from antiphon.sandbox.base import Limits, PythonSandbox, Result
from antiphon.sandbox.remote import ProgramRequest
from antiphon.sandbox.service.config import ServiceConfig
from antiphon.sandbox.service.http_errors import Reason, RefusedError
from antiphon.sandbox.service.metrics import Metrics
from antiphon.sandbox.service.quotas import check_under_way

PROGRAMS_PER_CORE = 2  # under way at once; further programs wait


class Programs:
    """Runs programs. Use it as `async with`; leaving the block ends them. The sandbox is opened for the first program."""

    def __init__(self, config: ServiceConfig, metrics: Metrics) -> None:
        self._config = config
        self._metrics = metrics
        self._threads = ThreadPoolExecutor(
            PROGRAMS_PER_CORE * len(os.sched_getaffinity(0)), thread_name_prefix="program"
        )
        self._opening: asyncio.Task[PythonSandbox] | None = None
        self.busy = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._opening is not None:
            with suppress(UnsupportedError):
                (await self._opening).close()
        self._threads.shutdown(cancel_futures=True)

    async def run(self, request: ProgramRequest) -> Result:
        """Run a program.

        Raises:
            RefusedError: The request is invalid, too many programs wait, or there is no sandbox.
        """
        try:
            program, stdin, files = request.decode()
            partner = request.decode_partner()
            if partner and files:
                raise ValueError("linked programs cannot have files")
            limits = self._cap_limits(request.limits)
        except ValueError as error:
            raise RefusedError(Reason.INPUT, f"invalid program: {error}") from error
        check_under_way("programs", self.busy, self._config.commands)
        self.busy += 1
        try:
            sandbox = await self._open()
            self._metrics.count("antiphon_sandbox_programs")
            return await asyncio.get_running_loop().run_in_executor(
                self._threads,
                lambda: (
                    sandbox.run_linked(program, partner, stdin=stdin, limits=limits)
                    if partner
                    else sandbox.run(program, stdin=stdin, files=files, limits=limits)
                ),
            )
        except (
            UnsupportedError,
            ValueError,
        ) as error:  # there is no sandbox, or a file lies outside the working directory
            raise RefusedError(Reason.FAILED, str(error)) from error
        finally:
            self.busy -= 1

    async def _open(self) -> PythonSandbox:
        if self._opening is None or (self._opening.done() and self._opening.exception()):
            self._opening = asyncio.create_task(asyncio.to_thread(open_sandbox, self._config.python))
        return await asyncio.shield(self._opening)

    def _cap_limits(self, wanted: Limits | None) -> Limits:
        """Return the wanted limits, each at most what the service allows."""
        given = asdict(self._config.python.limits.limits)
        found = {name: min(most, getattr(wanted, name)) for name, most in given.items()} if wanted else given
        if not all(value > 0 for value in found.values()):
            raise ValueError("limits: each must be above 0")
        return Limits(**found)
