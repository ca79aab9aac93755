import asyncio
import inspect
import io
import os
import re
import secrets
import select
import shlex
import signal
import socket
import subprocess
import sys
import tarfile
import threading
import zipfile
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from antiphon.core.deadlines import Deadlines
from antiphon.core.errors import ConfigError, DataError, SandboxError
from antiphon.sandbox.base import Limits, Status
from antiphon.sandbox.sessions.archives import sanitize_archive
from antiphon.sandbox.sessions.config import ShellSandboxConfig
from antiphon.sandbox.sessions.egress import parse_hosts
from antiphon.sandbox.sessions.files import SandboxFiles
from antiphon.sandbox.sessions.pipe_reader import CHUNK, PAUSE_SECONDS
from antiphon.sandbox.sessions.runtime_dirs import RuntimeDirs
from antiphon.sandbox.sessions.session import Session
from antiphon.sandbox.sessions.shell_sandbox import ShellSandbox
from tests.raising import raises_with

pytestmark = pytest.mark.commands("bwrap")

LIMITS = Limits(
    seconds=30, cpu_seconds=60, memory=256 << 20, file_size=16 << 20, disk=32 << 20, processes=40, output=1 << 20
)
SHORT = 0.2  # seconds, for what must run into its time


@pytest.fixture(scope="module")
def rooms():
    made = RuntimeDirs()
    yield made
    made.close()
    assert not made.path.exists()


def boxed(test):
    """Run an asynchronous test in a box of its own."""

    def run(rooms, tmp_path):
        async def body():
            async with await ShellSandbox.start(rooms, ShellSandboxConfig(limits=LIMITS), Deadlines()) as box:
                known = {"box": box, "session": Session(box), "files": SandboxFiles(box), "tmp_path": tmp_path}
                await test(**{name: known[name] for name in inspect.signature(test).parameters})

        asyncio.run(asyncio.wait_for(body(), 100))

    run.__name__ = test.__name__
    return run


# --- what a session keeps -------------------------------------------------------------------------------------------------


@boxed
async def test_state_lasts_from_command_to_command(session):
    await session.run("cd /tmp; x=5; export y=6; f() { echo f$x; }; alias a='echo aliased'; shopt -s extglob")
    result = await session.run("pwd; f; a; echo $y; sh -c 'echo $y$x'; shopt -q extglob && echo on")
    assert result.stdout == "/tmp\nf5\naliased\n6\n6\non\n"
    assert (await session.run("(exit 7)")).exit_code == 7
    assert (await session.run("echo $?")).stdout == "7\n"
    assert (await session.run("declare -A m=([a]=b); local_or_not=1")).status is Status.OK
    assert (await session.run("echo ${m[a]}")).stdout == "b\n"


@boxed
async def test_processor_time_is_that_of_the_command(session):
    busy = await session.run("python3 -c 'import time\nwhile time.process_time() < 0.3: pass'")
    calm = await session.run("sleep 0.1")
    assert 0.25 <= busy.usage.cpu_seconds < busy.usage.seconds + 0.1 and calm.usage.cpu_seconds < 0.1
    stopped = await session.run("while :; do :; done", seconds=0.5)
    assert stopped.status is Status.TIMEOUT and stopped.usage.cpu_seconds > 0.1


@boxed
async def test_streams_are_kept_apart(session):
    result = await session.run("echo out; echo err >&2; printf 'a\\0\\xff\\r'")
    assert (result.raw(1), result.raw(2)) == (b"out\na\0\xff\r", b"err\n")
    assert (
        await session.run("for i in 1 2 3; do echo o$i; echo e$i >&2; done 2>&1")
    ).stdout == "o1\ne1\no2\ne2\no3\ne3\n"


@boxed
async def test_input_is_read_to_its_end(session):
    assert (await session.run("cat; echo end")).stdout == "end\n"
    content = os.urandom(200_000)
    assert (await session.run("cat", stdin=content)).raw() == content
    assert (await session.run("read line; echo got $line", stdin=b"one\ntwo\n")).stdout == "got one\n"


@boxed
async def test_output_is_seen_while_the_command_runs(session):
    heard, first = [], asyncio.Event()

    def receive(stream, content):
        heard.append((stream, content))
        first.set()

    running = asyncio.create_task(session.run("echo early; sleep 60; echo late", receive=receive))
    await first.wait()
    assert heard == [(1, b"early\n")] and not running.done()
    await session.interrupt()
    result = await running
    assert (result.exit_code, result.stdout) == (130, "early\n")
    assert (await session.run("echo next")).stdout == "next\n"


@boxed
async def test_sessions_share_files_but_not_state(box, session):
    other = Session(box)
    await session.run("x=1; echo shared > file; cd /tmp")
    assert (await other.run("echo ${x-unset}; cat file; pwd")).stdout == "unset\nshared\n/box\n"
    begun = asyncio.Event()
    slow = asyncio.create_task(session.run("echo; read < <(sleep 60)", receive=lambda *_: begun.set()))
    await begun.wait()
    assert (await other.run("echo at once")).stdout == "at once\n"
    await session.interrupt()
    assert (await slow).exit_code == 130


# --- the four defects of other shells' protocols ----------------------------------------------------------------------------


@boxed
async def test_output_after_timeout_belongs_to_next_command(session):
    await session.run("x=kept; cd /tmp; f() { echo function; }")
    late = await session.run("sleep 60; echo late", seconds=SHORT)
    assert (late.status, late.exit_code, late.ended) == (Status.TIMEOUT, None, False)
    after = await session.run("echo after1 $x; pwd; f")
    assert (after.stdout, after.exit_code, after.shell) == ("after1 kept\n/tmp\nfunction\n", 0, 1)


@boxed
async def test_output_that_looks_like_the_protocol_is_output(session):
    nonce = secrets.token_hex(8)
    text = f"SHELLPS1PREFIX\nend {nonce} 3\ngone 0\nbegin {nonce} 1\nEXITCODESTART0EXITCODEEND\nbash-5.2$ \n"
    result = await session.run(f"printf %s {shlex.quote(text)}; echo tail")
    assert (result.stdout, result.exit_code) == (f"{text}tail\n", 0)


@boxed
async def test_an_exit_ends_the_shell_with_its_code(session):
    result = await session.run("x=1; echo said; exit 3")
    assert (result.stdout, result.exit_code, result.ended, result.status) == ("said\n", 3, True, Status.ERROR)
    fresh = await session.run("echo ${x-gone}")
    assert (fresh.stdout, fresh.shell) == ("gone\n", 2)


@boxed
async def test_a_slow_session_holds_nobody_up(box, session):
    """No wait blocks the event loop: not the start of a shell, nor a command."""
    ticks = []

    async def tick():
        while True:
            ticks.append(1)
            await asyncio.sleep(0.005)

    ticking = asyncio.create_task(tick())
    await session.run("sleep 0.2")
    ticking.cancel()
    assert len(ticks) >= 3


# --- what ends a shell, or tries to -----------------------------------------------------------------------------------------

ENDINGS = {
    "exec true": (Status.OK, 0),
    "set -e; false; echo no": (Status.ERROR, 1),
    "kill -9 $$": (Status.KILLED, None),
    "exit 200": (Status.ERROR, 200),
    "exit 255": (Status.ERROR, 255),
    "trap 'echo trapped' EXIT; exit 4": (Status.ERROR, 4),
    "exec /usr/bin/env sh -c 'exit 5'": (Status.ERROR, 5),
}


@pytest.mark.parametrize("command", ENDINGS)
def test_the_end_of_a_shell(rooms, tmp_path, command):
    @boxed
    async def test(session):
        result = await session.run(command)
        assert (result.status, result.exit_code) == ENDINGS[command] and result.ended and "no" not in result.stdout
        assert (await session.run("echo well")).stdout == "well\n"

    test(rooms, tmp_path)


@boxed
async def test_nothing_slips(session):
    """After each of these the next command gets its own output and code."""
    hostile = [
        "echo 'unclosed",
        "cat <<EOF\nunclosed",
        "if then",
        ")",
        'for i in {0..255}; do eval "exec $i>&-" 2>/dev/null; done',
        "exec > /tmp/elsewhere 2>&1; echo hidden",
        "trap 'echo debug' DEBUG; trap 'echo err' ERR; false",
        "IFS=0123456789; set -u; set -x; set -C",
        "alias builtin='echo no'; alias printf=false; alias eval=false; printf() { :; }; read() { :; }; source() { :; }",
        "kill -INT $$; echo no",
        "(kill -TERM $$); kill -HUP $$",
        "coproc cat; exec {out}>&${COPROC[1]}",
        "ulimit -n 10; ulimit -f 0",
        "PROMPT_COMMAND='echo prompt'; PS1='\\u$ '; PS4=zz; set -o vi",
        "return 5",
        "set -o posix; . /nonexistent; echo no",
        "while true; do echo x; done | head -1",
        "exec 3>/tmp/x; exec 10>&-; exec 11>&-; exec 12>&-",
        "cd /tmp; rmdir /tmp/gone 2>/dev/null; mkdir gone; cd gone; rmdir /tmp/gone",
    ]
    for command in hostile:
        await session.run(command, seconds=5)
        word = secrets.token_hex(4)
        result = await session.run(f"\\builtin echo {word}; (\\builtin exit 9)")
        assert re.sub("^err\n", "", result.stdout, flags=re.M) == f"{word}\n" and result.exit_code == 9, (
            command,
            result,
        )
        session.close()


STUBBORN = [("trap '' INT", "while :; do :; done"), ("true", "kill -STOP $$")]


@pytest.mark.parametrize(("before", "command"), STUBBORN)
def test_unresponsive_shell_is_replaced(rooms, tmp_path, before, command):
    @boxed
    async def test(session):
        assert (await session.run(before)).exit_code == 0
        result = await session.run(command, seconds=SHORT)
        assert result.status is Status.TIMEOUT and result.ended
        assert (await session.run("echo well")).stdout == "well\n"

    test(rooms, tmp_path)


LOOPS = [
    "while :; do sleep 1; done",
    "while :; do :; done",
    "g() { while :; do sleep 1; done; }; g",
    "sleep 60 | cat | cat",
    "y=$(sleep 60)",
    "read y < <(sleep 60)",
    "(sleep 60; sleep 60); sleep 60",
    "sleep 60 & wait",
    "sleep 60 || sleep 60 || sleep 60",
    "bash -c 'trap \"\" INT TERM; while :; do sleep 1; done'",
]


@boxed
async def test_a_time_out_leaves_the_shell_and_nothing_else(box, session):
    await session.run("kept=1; (sleep 1000 &); sleep 1000 &")  # not of the commands that are stopped
    before = {process.pid for process in box.processes.all()}
    for command in LOOPS:
        result = await session.run(f"{command}; echo no", seconds=SHORT)
        assert (result.status, result.stdout, result.ended) == (Status.TIMEOUT, "", False), (command, result)
        result = await session.run("echo $kept")
        assert (result.stdout, result.exit_code) == ("1\n", 0), command
    while {process.pid for process in box.processes.all()} != before:  # what was killed last may be on its way out
        await asyncio.sleep(0)


@boxed
async def test_background_output_is_not_mixed_into_next_command(session):
    first = await session.run("while :; do echo spam; echo spam >&2; done & echo started")
    assert "started\n" in first.stdout
    for _ in range(20):
        result = await session.run("echo clean")
        assert (result.stdout, result.stderr) == ("clean\n", "")
    assert (await session.run("kill %1; wait %1 2>/dev/null; echo over")).stdout == "over\n"


@boxed
async def test_a_flood_is_bounded_and_said(session):
    result = await session.run("head -c 5000000 /dev/zero; echo err >&2", output=1000)
    assert (result.status, result.exit_code, result.raw(1), result.stderr) == (
        Status.OUTPUT_LIMIT,
        0,
        bytes(1000),
        "err\n",
    )
    assert result.dropped == 5000000 - 1000 and "4999000 bytes" in result.detail
    endless = await session.run("yes", seconds=SHORT, output=1000)
    assert (endless.status, endless.stdout) == (Status.TIMEOUT, "y\n" * 500)
    assert (await session.run("echo dry")).stdout == "dry\n"


@boxed
async def test_a_flood_that_nobody_wants_is_read_slowly(session):
    loop = asyncio.get_running_loop()
    began = loop.time()
    number = (await session.run("yes & echo $! >&2", output=1000)).stderr.strip()
    await session.run("sleep 0.3")
    counts = (await session.run(f"cat /proc/{number}/io")).stdout
    written = int(re.search(r"wchar: (\d+)", counts)[1])
    assert 0 < written <= CHUNK * ((loop.time() - began) / PAUSE_SECONDS + 8)


@boxed
async def test_a_cancelled_command_is_ended(box, session):
    running, begun = None, asyncio.Event()
    running = asyncio.create_task(session.run("echo; sleep 1000", receive=lambda *_: begun.set()))
    await begun.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert (await session.run("pgrep -c sleep")).stdout == "0\n"


@boxed
async def test_what_is_no_command_is_refused(session):
    for text in ("a\0b", "\ud800"):
        result = await session.run(text)
        assert (result.status, result.exit_code) == (Status.ERROR, 2) and result.stderr


# --- the model --------------------------------------------------------------------------------------------------------------

WORDS = st.text("abc EXITCODE$`'\"\\\n;&|<>(){}[]*?!#~=%\t\r\x01é€𝄞", max_size=20)


class SessionModel(RuleBasedStateMachine):
    """Random commands, against a few lines that know what a shell must answer."""

    rooms: RuntimeDirs

    def __init__(self):
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.box = self.loop.run_until_complete(
            ShellSandbox.start(self.rooms, ShellSandboxConfig(limits=LIMITS), Deadlines())
        )
        self.session = Session(self.box)
        self.forget()
        self.shell = 0

    def forget(self):
        self.directory, self.variables, self.code = "/box", {}, 0

    def run(self, command, **options):
        result = self.loop.run_until_complete(asyncio.wait_for(self.session.run(command, **options), 60))
        if result.shell != self.shell:
            self.shell = result.shell
        return result

    @rule(content=st.binary(max_size=3000), code=st.integers(0, 255))
    def write_bytes(self, content, code):
        result = self.run(f"cat; (exit {code})", stdin=content)
        assert (result.raw(1), result.stderr, result.exit_code) == (content, "", code)
        self.code = code

    @rule(text=WORDS, name=st.sampled_from("xyz"))
    def assign(self, text, name):
        assert self.run(f"{name}={shlex.quote(text)}").exit_code == 0
        self.variables[name], self.code = text, 0

    @rule(name=st.sampled_from("xyz"))
    def show(self, name):
        result = self.run(f'echo $? >&2; printf %s "${{{name}-none}}"; pwd >&2')
        assert result.raw(1).decode() == self.variables.get(name, "none")
        assert result.stderr == f"{self.code}\n{self.directory}\n"
        self.code = 0

    @rule(directory=st.sampled_from(["/", "/tmp", "/usr/bin", "/box"]))
    def change_directory(self, directory):
        assert self.run(f"cd {directory}").exit_code == 0
        self.directory, self.code = directory, 0

    @rule(command=st.sampled_from([*LOOPS[:4], "while :; do echo more; done"]))
    def run_out_of_time(self, command):
        result = self.run(command, seconds=0.05)
        assert result.status is Status.TIMEOUT and not result.ended
        result = self.run("(exit 0)")
        assert (result.stdout, result.exit_code) == ("", 0)
        self.code = 0

    @rule(code=st.integers(0, 127))
    def exit(self, code):
        result = self.run(f"echo bye; exit {code}")
        assert (result.stdout, result.exit_code, result.ended) == ("bye\n", code, True)
        self.forget()

    @rule()
    def kill(self):
        assert self.run("kill -9 $$").status is Status.KILLED
        self.forget()

    @rule(size=st.integers(0, 300_000))
    def flood(self, size):
        result = self.run(f"head -c {size} /dev/zero", output=100_000)
        assert (len(result.raw(1)), result.dropped) == (min(size, 100_000), max(0, size - 100_000))
        self.code = 0

    @rule()
    def chatter(self):
        # Disowned: else bash tells of its end on the stderr of a later command.
        command = "(for i in {1..200}; do echo noise; echo noise >&2; done) & disown"
        assert self.run(command).exit_code == 0
        self.code = 0

    @rule(text=WORDS)
    def mistake(self, text):
        result = self.run(f"echo 'unclosed {text.replace(chr(39), '')}")
        assert (result.stdout, result.exit_code) == ("", 2)
        self.code = 2

    def teardown(self):
        self.loop.run_until_complete(self.box.close())
        self.loop.close()


def test_framing_never_slips(rooms):
    SessionModel.rooms = rooms
    run_state_machine_as_test(SessionModel, settings=settings(max_examples=8, stateful_step_count=20, deadline=None))


# --- files ------------------------------------------------------------------------------------------------------------------


@boxed
async def test_files_go_in_and_come_out(files, session):
    content = os.urandom(300_000)
    for name in ("plain", "deep/er/file", "a b'c\"$x", "-n", "/tmp/outside", "naïve€"):
        await files.write(name, content, mode=0o640)
        assert await files.read(name) == content
    entries = {entry.name: entry for entry in await files.list()}
    assert entries["-n"].kind == "file" and entries["-n"].mode == 0o640 and entries["-n"].size == 300_000
    assert entries["deep"].kind == "directory" and "naïve€" in entries
    assert (await session.run("stat -c %a -- -n")).stdout == "640\n"
    with pytest.raises(SandboxError, match="larger than 1000"):
        await files.read("plain", largest=1000)
    with pytest.raises(SandboxError, match="No such file"):
        await files.read("missing")
    with pytest.raises(SandboxError):
        await files.read("deep")


@boxed
async def test_a_planted_link_leads_nowhere_outside(files, session, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("of this machine")
    tmp_path.chmod(0o755)
    await session.run(f"ln -s {secret} link; ln -s {tmp_path} folder; ln -s / root")
    for path in ("link", "folder/secret", f"root{secret}", f"../..{secret}"):
        with pytest.raises(SandboxError):
            await files.read(path)
    for path in ("folder/new", f"root{tmp_path}/new", str(tmp_path / "new")):
        with suppress(SandboxError):  # it may come to lie in the box
            await files.write(path, b"planted")
    assert [path.name for path in tmp_path.iterdir()] == ["secret"]


def tar_of(*members, mode="w"):
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode=mode) as tar:
        for name, kind, content in members:
            member = tarfile.TarInfo(name)
            member.type = kind
            if kind == tarfile.REGTYPE:
                member.size = len(content)
            else:
                member.linkname = content
            tar.addfile(member, io.BytesIO(content) if kind == tarfile.REGTYPE else None)
    return packed.getvalue()


def zip_of(*members):
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content, mode in members:
            entry = zipfile.ZipInfo(name)
            entry.external_attr = mode << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            file.writestr(entry, content)
    return packed.getvalue()


FILE, LINK = tarfile.REGTYPE, tarfile.SYMTYPE
BAD_ARCHIVES = {
    "tar, up": tar_of(("../evil", FILE, b"x")),
    "tar, up in the middle": tar_of(("a/../../evil", FILE, b"x")),
    "tar, absolute": tar_of(("/tmp/evil", FILE, b"x")),
    "tar, link out": tar_of(("l", LINK, "../..")),
    "tar, absolute link": tar_of(("l", LINK, "/etc/passwd")),
    "tar, through a link": tar_of(("l", LINK, "."), ("l/evil", FILE, b"x")),
    "tar, through a link that comes later": tar_of(("l/evil", FILE, b"x"), ("l", LINK, ".")),
    "tar, links that add up": tar_of(("d/l", LINK, ".."), ("d/m", LINK, "l/..")),
    "tar, hard link": tar_of(("h", tarfile.LNKTYPE, "/etc/passwd")),
    "tar, device": tar_of(("d", tarfile.CHRTYPE, "")),
    "tar, pipe": tar_of(("p", tarfile.FIFOTYPE, "")),
    "tar, large": tar_of(("big", FILE, bytes(2 << 20))),
    "tar, bomb": tar_of(("big", FILE, bytes(50 << 20)), mode="w:gz"),
    "zip, up": zip_of(("../evil", b"x", 0o100644)),
    "zip, absolute": zip_of(("/tmp/evil", b"x", 0o100644)),
    "zip, link": zip_of(("l", b"/etc", 0o120777)),
    "zip, bomb": zip_of(("big", bytes(50 << 20), 0o100644)),
    "zip, many": zip_of(*((f"b{i}", bytes(1 << 18), 0o100644) for i in range(8))),
    "neither": b"neither",
    "empty": b"",
    "cut": tar_of(("f", FILE, bytes(2000)), mode="w:gz")[:40],
}


@pytest.mark.parametrize("name", BAD_ARCHIVES)
def test_bad_archives_are_refused(name):
    with pytest.raises(DataError):
        sanitize_archive(BAD_ARCHIVES[name], 1 << 20)


@boxed
async def test_archives_go_in_and_come_out(files, session):
    await files.upload(tar_of(("d/f", FILE, b"tar"), ("d/l", LINK, "../d/f"), mode="w:xz"), "one")
    await files.upload(zip_of(("d/", b"", 0o040755), ("d/run", b"#!/bin/sh\necho zip", 0o104755)), "two")
    assert (await session.run("cat one/d/l; two/d/run; stat -c %a two/d/run")).stdout == "tarzip\n755\n"
    with tarfile.open(fileobj=io.BytesIO(await files.download("one/d"))) as tar:
        assert sorted(tar.getnames()) == ["d", "d/f", "d/l"] and tar.extractfile("d/f").read() == b"tar"
    with pytest.raises(DataError):
        await files.upload(BAD_ARCHIVES["tar, up"])


@boxed
async def test_a_snapshot_brings_everything_back(box, files, session, tmp_path):
    listing = "find . -printf '%p %y %m %T@ %l\\n' | sort; md5sum $(find . -type f -readable | sort)"
    await session.run(
        "mkdir -p a/b; echo one > a/f; printf '\\0\\xff' > 'sp ace'; ln -s a/f l; ln -s /nowhere dangling; mkfifo p;"
        "chmod 4750 a/f; touch -d '2001-02-03 04:05:06.789' a/f a/b; chmod 500 a/b; truncate -s 5M holes"
    )
    before = (await session.run(listing)).stdout
    await files.snapshot(tmp_path / "kept")
    await session.run("rm l; echo two > a/f; touch new; mkdir -m 000 locked; chmod 000 a")
    await files.restore(tmp_path / "kept")
    assert (await session.run(listing)).stdout == before and "4750" in before
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


@boxed
async def test_a_snapshot_cannot_fill_this_machine(files, session, tmp_path):
    await session.run("for i in {1..8}; do head -c 15M /dev/zero | tr '\\0' x > f$i; done")  # until the box is full
    await files.snapshot(tmp_path / "full")
    assert (tmp_path / "full").stat().st_size < 2 * LIMITS.disk
    await session.run("rm *; mkfifo p; exec 5<>p; rm p; chmod 000 . ")
    with pytest.raises(SandboxError):
        await files.snapshot(tmp_path / "none")
    assert not (tmp_path / "none").exists()


# --- the wall ---------------------------------------------------------------------------------------------------------------


@boxed
async def test_what_the_box_is_not_given(session, tmp_path):
    (tmp_path / "secret").write_text("canary")
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.1)
        port = server.getsockname()[1]
        refused = {
            f"cat {tmp_path}/secret": "No such file",
            f"exec 3<>/dev/tcp/127.0.0.1/{port}": "refused",
            "exec 3<>/dev/tcp/192.0.2.1/80": "unreachable",
            "touch /usr/x /x /etc/x /dev/x /run/antiphon/x": "Read-only",
            "cat /etc/shadow": "No such file",
            "unshare -Ur true": "",
            "mount -t tmpfs none /tmp": "",
            "strace -p 1": "",
            "mkfifo x; mknod y c 1 3": "denied",
            "nsenter -t 1 -m true": "",
            f"kill -9 {os.getpid()}": "No such process",
        }
        for command, reason in refused.items():
            result = await session.run(f"({command})")
            assert result.exit_code != 0 and reason in result.stderr, (command, result)
        with pytest.raises(TimeoutError):
            server.accept()
    status = (await session.run("grep -E 'Cap|NoNew|Seccomp:' /proc/self/status; id -u; env")).stdout
    assert status.count("\t0000000000000000\n") == 5 and "NoNewPrivs:\t1" in status and "Seccomp:\t2" in status
    assert "\n1000\n" in status and not [
        name
        for name in os.environ
        if f"\n{name}={os.environ[name]}\n" in status and name not in ("LANG", "TERM", "PWD", "SHLVL", "_", "PATH")
    ]


def test_other_users_do_not_read_variables_or_pipes(rooms):
    """Every user of a machine can read the command lines of all processes: keys and the path of the pipes are in none."""

    async def test(box):
        assert (await Session(box).run("echo $KEY")).stdout == "hidden-canary\n"
        lines = {path: path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if os.access(path, os.R_OK)}
        assert sum(b"bwrap" in line for line in lines.values()), "the box runs"
        assert not [path for path, line in lines.items() if b"hidden-canary" in line or bytes(box.directory) in line]

    async def main():
        config = ShellSandboxConfig(limits=LIMITS, environment={"KEY": "hidden-canary"})
        async with await ShellSandbox.start(rooms, config, Deadlines()) as box:
            await asyncio.wait_for(test(box), 60)

    asyncio.run(main())


FORKS = """
import os, time
for number in range(1000):
    try:
        if os.fork() == 0:
            time.sleep(1000)
    except OSError:
        break
print(number)
"""


@boxed
async def test_a_box_has_only_what_it_may_have(box, session):
    forks = await session.run("python3 -I -S -", stdin=FORKS.encode())
    assert 0 < int(forks.stdout) < LIMITS.processes
    assert (await Session(box).run("echo well")).stdout == "well\n"  # there is room to start another session
    session.close()
    full = await session.run("for i in {1..10}; do head -c 10M /dev/zero > f$i; done")
    assert "No space left" in full.stderr
    await session.run("rm f*")
    big = await session.run("head -c 20M /dev/zero > big")
    assert big.exit_code != 0
    memory = await session.run("rm big; head -c 400M /dev/zero | tail")
    assert memory.status in (Status.MEMORY, Status.KILLED, Status.ERROR), memory
    assert (await session.run("echo well")).stdout == "well\n"


COUNT_LAYERS = """
import ctypes, struct, sys
numbers = (444, 446)
call = ctypes.CDLL(None, use_errno=True).syscall
ctypes.CDLL(None).prctl(38, 1, 0, 0, 0)
rules = call(numbers[0], struct.pack("Q", 1), 8, 0)
print(sum(call(numbers[1], rules, 0) == 0 for _ in range(32)))
"""


@boxed
async def test_landlock_is_there_beside_the_mounts(session):
    """The kernel stacks sixteen of its layers and no more: one is the box's."""
    result = await session.run(f"python3 -c {shlex.quote(COUNT_LAYERS)}; echo x > /box/file; mv /box/file /box/other")
    assert (result.stdout, result.stderr) == ("15\n", "")
    layers = subprocess.run([sys.executable, "-c", COUNT_LAYERS], capture_output=True, text=True, check=True).stdout
    assert int(layers) == 16, "outside there is none"


@pytest.fixture
def in_the_background():
    """As of a program that a script has started with `&`."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("in_the_background")
@boxed
async def test_no_signal_is_ignored_from_the_beginning(session):
    ignored = int((await session.run("(sed -n 's/^SigIgn:\t//p' /proc/self/status)")).stdout, 16)
    assert not [number for number in signal.valid_signals() if ignored >> number - 1 & 1]
    assert "Broken pipe" not in (await session.run("yes | head -1")).stderr


@boxed
async def test_nobody_inside_can_end_the_keeper(box, session):
    await session.run("for i in {1..64}; do kill -$i 1; done; kill -9 -1")
    assert (await Session(box).run("echo well")).stdout == "well\n"


# The numbers of the processes that keep a session going: the first of the box, and the parent of the shell.
STOPS = {
    "the_first": "for i in STOP TSTP TTIN TTOU; do kill -$i 1; done",
    "the_parent": "kill -STOP $PPID",
    "the_parent_and_then_the_shell_ends": "kill -STOP $PPID; exit",
    "all": "for i in /proc/[0-9]*; do kill -STOP ${i#/proc/}; done",
    "all_at_once": "kill -STOP -1",
}


@pytest.mark.parametrize("stop", STOPS)
def test_stopped_keepers_hold_no_caller(rooms, tmp_path, stop):
    @boxed
    async def test(box):
        result = await Session(box).run(f"{STOPS[stop]}; exec sleep 1000", seconds=SHORT)
        assert result.status is Status.TIMEOUT
        assert (await Session(box).run("echo well")).stdout == "well\n"

    test(rooms, tmp_path)


THIEF = """
import os
pipe = os.open("/run/antiphon/keeper", os.O_RDONLY | os.O_NONBLOCK)
os.set_blocking(pipe, True)
if os.fork() == 0:
    os.setsid()
    while True:
        os.read(pipe, 100)
"""


@boxed
async def test_keeper_pipe_cannot_be_read_inside(box, session):
    said = await session.run(f"python3 -c {shlex.quote(THIEF)}")
    assert "PermissionError" in said.stderr
    assert (await Session(box).run("echo well")).stdout == "well\n"


GET = """
import sys, urllib.request
try:
    print(urllib.request.urlopen(sys.argv[1], timeout=10).read().decode())
except Exception as error:
    print(error)
"""


class Site(BaseHTTPRequestHandler):
    def do_GET(self):
        body = f"{self.path} for {self.headers['Host']}".encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        pass


def test_only_what_is_on_the_list_can_be_reached(rooms):
    with (
        ThreadingHTTPServer(("127.0.0.1", 0), Site) as open_site,
        ThreadingHTTPServer(("127.0.0.1", 0), Site) as closed,
    ):
        for server in (open_site, closed):
            threading.Thread(target=server.serve_forever).start()
        here, there = (f"127.0.0.1:{server.server_port}" for server in (open_site, closed))

        async def body():
            config = ShellSandboxConfig(limits=LIMITS, network=(here,))
            async with await ShellSandbox.start(rooms, config, Deadlines()) as box:
                session = Session(box)
                await SandboxFiles(box).write("get.py", GET.encode())
                assert (await session.run(f"python3 get.py http://{here}/a?b")).stdout == f"/a?b for {here}\n"
                for url in (
                    f"http://{there}/",
                    f"http://localhost:{open_site.server_port}/",
                    f"http://{here}@{there}/",
                ):
                    assert "403" in (await session.run(f"python3 get.py {url}")).stdout, url
                assert "403" in (await session.run(f"python3 get.py https://{there}/")).stdout
                assert "refused" in (await session.run(f"env -u http_proxy python3 get.py http://{here}/")).stdout
                talk = "exec 5<>/dev/tcp/127.0.0.1/3128; printf '%b' {} >&5; timeout 5 cat <&5; exec 5>&-"
                through = f"CONNECT {here} HTTP/1.1\\r\\n\\r\\nGET /tunnel HTTP/1.0\\r\\nHost: {there}\\r\\n\\r\\n"
                answer = await session.run(talk.format(shlex.quote(through)))
                assert "200 connected" in answer.stdout and f"/tunnel for {there}" in answer.stdout
                for wrong in (
                    "nonsense",
                    "GET / HTTP/1.1",
                    "GET ftp://a/ HTTP/1.1",
                    "CONNECT :0 HTTP/1.1",
                    "CONNECT a:b HTTP/1.1",
                ):
                    assert " 400 " in (await session.run(talk.format(shlex.quote(f"{wrong}\\r\\n\\r\\n")))).stdout, (
                        wrong
                    )

        try:
            asyncio.run(body())
        finally:
            open_site.shutdown()
            closed.shutdown()


@pytest.mark.parametrize(
    "text", ["example.org", "example.org:", ":443", "*.org:443", "example.org:x", "http://example.org:80", "a:70000"]
)
def test_what_is_no_host_and_port_is_refused(text):
    with raises_with(ConfigError, key="network", value=text):
        parse_hosts([text])


# --- ends -------------------------------------------------------------------------------------------------------------------


def processes_of(mark):
    return [
        int(entry.name)
        for entry in Path("/proc").iterdir()
        if entry.name.isdigit() and mark.encode() in Path(f"/proc/{entry.name}/cmdline").read_bytes()
        if (entry / "cmdline").exists()
    ]


def test_closing_leaves_nothing(rooms):
    mark = f"10{secrets.randbelow(10**9)}"

    async def body():
        box = await ShellSandbox.start(rooms, ShellSandboxConfig(limits=LIMITS), Deadlines())
        session = Session(box)
        await session.run(f"sleep {mark} & setsid sleep {mark} & (trap '' HUP TERM; sleep {mark}) & disown -a")
        running = asyncio.create_task(session.run("echo; sleep 1000"))
        await asyncio.sleep(0)
        descriptors = len(os.listdir("/proc/self/fd"))
        room = box.directory
        await box.close()
        result = (await asyncio.gather(running, return_exceptions=True))[0]
        assert isinstance(result, SandboxError) or result.ended
        assert not room.exists() and len(os.listdir("/proc/self/fd")) < descriptors
        with pytest.raises(SandboxError, match="has ended"):
            await session.run("echo")
        await box.close()

    asyncio.run(body())
    assert subprocess.run(["pgrep", "-f", f"sleep {mark}"], capture_output=True).returncode == 1


CONTROLLER = """
import asyncio, sys
sys.path.insert(0, {path!r})
from antiphon.sandbox.sessions.shell_sandbox import *
from antiphon.sandbox.sessions.session import *
async def main():
    runtime_dirs = RuntimeDirs()
    box = await ShellSandbox.start(runtime_dirs, ShellSandboxConfig(), Deadlines())
    await Session(box).run("sleep {mark} & setsid sleep {mark} &")
    print(runtime_dirs.path, flush=True)
    await asyncio.sleep(1000)
asyncio.run(main())
"""


def test_a_killed_controller_leaves_nothing():
    mark = f"20{secrets.randbelow(10**9)}"
    program = CONTROLLER.format(path=str(Path(__file__).parents[3]), mark=mark)
    controller = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    left = Path(controller.stdout.readline().strip())
    watched = []
    for number in subprocess.check_output(["pgrep", "-f", f"sleep {mark}"]).split():
        with suppress(ProcessLookupError):
            watched.append(os.pidfd_open(int(number)))
    assert watched and left.exists()
    group = Path((left / "cgroup").read_text()) if (left / "cgroup").exists() else None
    assert group is None or group.exists()
    controller.send_signal(signal.SIGKILL)
    controller.communicate()
    for descriptor in watched:
        assert select.select([descriptor], [], [], 30)[0]
        os.close(descriptor)
    later = RuntimeDirs()
    try:
        assert not left.exists() and later.path.exists()
        assert group is None or not group.exists()
    finally:
        later.close()
