"""Python programs that clients have run, each by itself, in the sandbox that the configuration names."""

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
from antiphon.sandbox.remote import Program
from antiphon.sandbox.service.config import ServiceConfig
from antiphon.sandbox.service.http_errors import Reason, Refused
from antiphon.sandbox.service.metrics import Metrics

FOR_EACH_CORE = 2  # programs under way; the others wait for their turn


class Programs:
    """Use as `async with`; leaving it ends what runs. The sandbox is opened for the first program."""

    def __init__(self, config: ServiceConfig, metrics: Metrics) -> None:
        self._config = config
        self._metrics = metrics
        self._threads = ThreadPoolExecutor(FOR_EACH_CORE * len(os.sched_getaffinity(0)), thread_name_prefix="program")
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

    async def run(self, asked: Program) -> Result:
        """Run it. `Refused` if it is none, if too many wait, or if there is no sandbox."""
        try:
            program, stdin, files = asked.contents()
            partner = asked.linked()
            if partner and files:
                raise ValueError("two programs that are linked have no files")
            limits = self._within(asked.limits)
        except ValueError as error:
            raise Refused(Reason.INPUT, f"no program: {error}") from error
        if self.busy >= self._config.commands:
            raise Refused(Reason.QUOTA, f"{self.busy} programs are under way, and there may be no more; ask later")
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
        except (UnsupportedError, ValueError) as error:  # no sandbox here, or a file outside the working directory
            raise Refused(Reason.FAILED, str(error)) from error
        finally:
            self.busy -= 1

    async def _open(self) -> PythonSandbox:
        if self._opening is None or (self._opening.done() and self._opening.exception()):
            self._opening = asyncio.create_task(asyncio.to_thread(open_sandbox, self._config.python))
        return await asyncio.shield(self._opening)

    def _within(self, wanted: Limits | None) -> Limits:
        """What is wanted, as far as it is given."""
        given = asdict(self._config.python.limits.limits)
        found = {name: min(most, getattr(wanted, name)) for name, most in given.items()} if wanted else given
        if not all(value > 0 for value in found.values()):
            raise ValueError("limits: all are above 0")
        return Limits(**found)
