"""Child processes, with real ones that are really killed."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile

import psutil
import pytest

from antiphon.core.processes.child import describe_exit, start_child, start_python


@pytest.mark.parametrize(
    "program, ending",
    [
        ("exit 0", "ended with exit code 0"),
        ("exit 7", "ended with exit code 7"),
        ("kill -KILL $$", "was killed by SIGKILL (signal 9)"),
    ],
)
def test_the_end_says_why(program, ending):
    async def main():
        child = start_child(["/bin/sh", "-c", program])
        assert await child.wait()
        return child.exit_code

    assert describe_exit(asyncio.run(main())) == ending


def test_a_wait_ends_in_time_and_leaves_the_child():
    async def main():
        child = start_child(["sleep", "60"])
        assert not await child.wait(0.01)
        waiting = asyncio.ensure_future(child.wait())
        await asyncio.wait([waiting], timeout=0)
        waiting.cancel()
        assert not child.has_ended and child.exit_code is None
        child.terminate()
        assert await child.wait(60)
        child.kill()  # after its end: nothing happens
        return child.exit_code

    assert asyncio.run(main()) == -signal.SIGTERM


@pytest.mark.parametrize("ends_first", [False, True])
def test_a_session_is_killed_with_all_that_is_in_it(ends_first):
    async def main():
        with tempfile.TemporaryFile() as out:
            program = f"sleep 60 & echo $!; {'exit' if ends_first else 'wait'}"
            child = start_child(["/bin/sh", "-c", program], stdout=out, own_session=True)
            while not (out.seek(0), printed := out.read())[1].endswith(b"\n"):
                await asyncio.sleep(0)
            if ends_first:
                await child.wait()
            left = psutil.Process(int(printed))
            child.kill()
            await child.wait()
            return left

    left = asyncio.run(main())
    assert not psutil.wait_procs([left], timeout=30)[1]


def test_what_cannot_be_run_is_an_error_at_once():
    with pytest.raises(FileNotFoundError):
        start_child(["/nowhere/python"])


def test_python_child_has_our_path_and_runs_its_prelude():
    async def main():
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                descriptor = theirs.fileno()
                child = start_python(
                    "os:write",
                    *(descriptor, b"called"),
                    descriptors=[descriptor],
                    prelude=f"import os; os.write({descriptor}, repr(sys.path).encode()); ",
                )
            await child.wait()
            return ours.recv(1 << 16)

    assert asyncio.run(main()) == repr(sys.path).encode() + b"called"


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent death signal is Linux's")
@pytest.mark.parametrize("parent", ["os.getppid()", "1 << 22"], ids=["known", "gone"])
def test_a_child_dies_with_its_parent(parent):
    child = f"""
import os, signal
from antiphon.core.processes.own_process import die_with_parent
die_with_parent({parent})
os.write(1, b"ready")
signal.pause()
"""
    program = f"""
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {child!r}], stdout=subprocess.PIPE)
os.write(1, child.stdout.read(5) or b"ended")
os.write(1, str(child.pid).encode())
os.kill(os.getpid(), 9)
"""
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, timeout=60)
    word, pid = done.stdout[:5], int(done.stdout[5:])
    assert word == (b"ready" if parent.startswith("os") else b"ended")
    left = [psutil.Process(pid)] if psutil.pid_exists(pid) else []
    assert not psutil.wait_procs(left, timeout=30)[1]
    assert done.returncode == -signal.SIGKILL and os.getpid() != pid
