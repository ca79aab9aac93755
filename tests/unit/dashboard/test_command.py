"""`antiphon dashboard` as its users start it: in a process of its own, until Ctrl-C."""

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys

import httpx
import pytest

from antiphon.dashboard.server import _listen

COMMAND = [sys.executable, "-m", "antiphon", "dashboard"]


def start(*arguments, cache):
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    return subprocess.Popen(
        [*COMMAND, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def test_command_serves_until_it_is_interrupted(runs, tmp_path):
    process = start(runs, "--port", 0, cache=tmp_path)
    with httpx.Client(trust_env=False, follow_redirects=True) as client:
        try:
            address = process.stdout.readline().strip()
            assert re.fullmatch(r"http://127\.0\.0\.1:\d+/\?token=[\w-]{32}", address)
            base = address.partition("?")[0]
            assert client.get(base).status_code == 401
            assert "simulated" in client.get(address).text
            assert client.get(f"{base}rollouts/simulated").status_code == 200
            open_page = client.send(client.build_request("GET", f"{base}live/simulated"), stream=True)
            changes = open_page.iter_lines()
            assert next(changes) == "retry: 5000"
        finally:
            process.send_signal(signal.SIGINT)
            output, errors = process.communicate()
        assert not any(changes), "the stream has ended, and not in the middle"
    assert (process.returncode, output, errors) == (0, "", "")
    assert list((tmp_path / "antiphon" / "dashboard").glob("*.db"))


def test_answers_do_not_wait_for_acknowledgements():
    """Which the client's kernel delays by 40 ms."""

    async def main(listener):
        found = asyncio.get_running_loop().create_future()

        def accept(_, writer):
            found.set_result(writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        async with await asyncio.start_server(accept, sock=listener):
            _, writer = await asyncio.open_connection(*listener.getsockname())
            try:
                return await found
            finally:
                writer.close()

    with _listen("127.0.0.1", 0) as listener:
        assert asyncio.run(main(listener)) == 1


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["nothing_there"], "nothing_there"),
        ([".", "--prefix", "a b"], "--prefix"),
        ([".", "--host", "no.such.host.invalid"], "--host"),
    ],
)
def test_mistake_is_one_line_and_exit_code_2(tmp_path, arguments, named):
    process = start(*arguments, cache=tmp_path)
    _, errors = process.communicate()
    assert process.returncode == 2
    assert named in errors and errors.count("\n") == 1


def test_other_address_is_told_to_be_open(runs, tmp_path):
    process = start(runs, "--host", "0.0.0.0", "--port", 0, cache=tmp_path)
    try:
        assert "not encrypted" in process.stdout.readline()
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate()
