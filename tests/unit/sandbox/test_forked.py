"""Python programs in forked processes: how each ends, what is kept, and what is left behind: nothing."""

import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from antiphon.core.errors import ConfigError
from antiphon.sandbox.base import Level, Limits, Status
from antiphon.sandbox.config import SandboxConfig
from antiphon.sandbox.isolation.forked_python import ForkedPython
from antiphon.sandbox.isolation.levels import probe
from tests.raising import raises_with

LEVELS = [level for level in Level if not probe().missing_for(level)]

pytestmark = pytest.mark.skipif(not LEVELS, reason="there is no sandbox on this platform")


@pytest.fixture(scope="module", params=LEVELS, ids=lambda level: level.name.lower())
def sandbox(request):
    with ForkedPython(level=request.param) as made:
        yield made


@pytest.fixture
def own():
    """One that may be broken."""
    with ForkedPython(level=LEVELS[-1]) as made:
        yield made


def until(condition):
    """Wait until it holds: no test depends on how fast the machine is."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "waited a minute in vain"
        time.sleep(0.005)


def gone(pid):
    """Whether the process has ended, reaped or not."""
    try:
        return select.select([os.pidfd_open(pid)], [], [], 0)[0] != []
    except ProcessLookupError:
        return True


def children(pid):
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return []


ENDS = {
    "print('hello')": (Status.OK, 0, "hello\n", ""),
    "import sys; sys.exit(3)": (Status.ERROR, 3, "", ""),
    "import sys; sys.exit()": (Status.OK, 0, "", ""),
    "raise SystemExit('no')": (Status.ERROR, 1, "", "no\n"),
    "import os; os._exit(5)": (Status.ERROR, 5, "", ""),
    "1 +": (Status.ERROR, 1, "", "SyntaxError: invalid syntax\n"),
    "def f():\n    raise ValueError('bad')\nf()": (
        Status.ERROR,
        1,
        "",
        'line 3, in <module>\n  File "program.py", line 2',
    ),
    "x = b'x' * (1 << 40)": (Status.MEMORY, 1, "", "MemoryError"),
    "x = []\nwhile True: x.append(bytes(1 << 20))": (Status.MEMORY, 1, "", "MemoryError"),
    "import time; time.sleep(60)": (Status.TIMEOUT, None, "", ""),
    "import os; os.kill(os.getpid(), 9)": (Status.KILLED, None, "", ""),
    "import os; os.abort()": (Status.KILLED, None, "", ""),
    "import ctypes; ctypes.string_at(8)": (Status.KILLED, None, "", ""),
    "while True: print('x' * 1000)": (Status.OUTPUT_LIMIT, None, "xxx", ""),
    "import os\nif os.fork() == 0:\n    import time; time.sleep(60)\nprint('mine')": (Status.OK, 0, "mine\n", ""),
    "import atexit; atexit.register(print, 'last'); print('first')": (Status.OK, 0, "first\nlast\n", ""),
    "import threading; threading.Timer(0.05, print, ['late']).start()": (Status.OK, 0, "late\n", ""),
    "print(__name__, [n for n in dir() if n[0] != '_'])": (Status.OK, 0, "__main__ []\n", ""),
    "import os, sys; os._exit = sys.exit = lambda code: None; raise KeyError(1)": (Status.ERROR, 1, "", "KeyError"),
    "import os\nos._exit = None\nprint(1)": (Status.OK, 0, "1\n", ""),
    "import os\nfor _ in range(1200): os.mkdir('d'); os.chdir('d')": (Status.OK, 0, "", ""),
    "import asyncio; print(asyncio.run(asyncio.sleep(0, 4)))": (Status.OK, 0, "4\n", ""),
    "import sqlite3, ssl, zlib, lzma, csv, uuid, unittest; print(len(str(uuid.uuid4())))": (Status.OK, 0, "36\n", ""),
}


@pytest.mark.parametrize("program", ENDS)
def test_ends(sandbox, program):
    status, code, stdout, stderr = ENDS[program]
    result = sandbox.run(program, limits=Limits(seconds=0.5 if status is Status.TIMEOUT else 30, memory=64 << 20))
    assert (result.status, result.exit_code, result.level) == (status, code, sandbox.level), result
    assert result.stdout.startswith(stdout)
    assert stderr in result.stderr
    assert "zygote" not in result.stderr
    assert result.usage.seconds > 0


def test_processor_time(own):
    result = own.run("while True: pass", limits=Limits(seconds=60, cpu_seconds=1))
    assert result.status is Status.TIMEOUT
    assert "processor" in result.detail


def test_input_and_files(sandbox):
    files = {"data.bin": bytes(range(256)), "package/__init__.py": b"", "package/inner.py": b"value = 7"}
    program = """
        import os, pathlib, sys
        from package.inner import value
        print(value, sorted(os.listdir()), pathlib.Path("data.bin").read_bytes() == bytes(range(256)), sys.argv)
        print(input(), sys.stdin.read(), end="")
    """
    result = sandbox.run(textwrap.dedent(program), stdin="one\ntwo\nthrée", files=files)
    assert result.stdout == "7 ['data.bin', 'package'] True ['program.py']\none two\nthrée"
    assert sandbox.run("import os; print(os.listdir())").stdout == "[]\n"


@pytest.mark.parametrize("name", ["../out", "/etc/passwd", "a/../../b", ""])
def test_files_outside_the_directory_raise(sandbox, name):
    with pytest.raises(ValueError, match="relative to the working directory"):
        sandbox.run("", files={name: b""})


def test_output_is_cut_where_the_limit_is(sandbox):
    limits = Limits(output=1000)
    assert sandbox.run("print('x' * 999)", limits=limits).status is Status.OK
    result = sandbox.run("import sys; print('x' * 1000); print('y' * 5, file=sys.stderr)", limits=limits)
    assert (result.status, len(result.stdout)) == (Status.OUTPUT_LIMIT, 1000)


def test_random_numbers_differ_from_run_to_run(sandbox):
    assert len({sandbox.run("import random; print(random.random())").stdout for _ in range(5)}) == 5


def test_many_at_once(sandbox):
    with ThreadPoolExecutor(8) as threads:
        results = list(threads.map(lambda n: sandbox.run(f"print({n}); open('x', 'x')").stdout, range(40)))
    assert results == [f"{n}\n" for n in range(40)]


@pytest.mark.skipif(LEVELS[-1:] != [Level.ISOLATED], reason="without namespaces only root gives programs a user")
def test_sandboxes_share_no_user(own):
    with ForkedPython(level=own.level) as other:
        users = [sandbox.run("import os; print(os.getuid())").stdout for sandbox in (own, other)]
    assert len(set(users)) == 2


BUSY_USER = """
import threading
from antiphon.sandbox.base import Level, Limits
from antiphon.sandbox.isolation.forked_python import ForkedPython
from antiphon.sandbox.isolation.levels import probe
if probe().missing_for(Level.CONFINED):
    raise SystemExit("none")
end = threading.Event()
for _ in range(40):
    threading.Thread(target=end.wait, daemon=True).start()
with ForkedPython(level=Level.CONFINED) as sandbox:
    print(sandbox.run("import threading; threading.Thread(target=print, args=('ran',)).start()", limits=Limits(processes=10)))
"""


@pytest.mark.commands("setpriv")
def test_other_threads_of_an_ordinary_user_do_not_count():
    """The limit of processes is of a user on the machine, so what the user runs beside the program is added."""
    own = 200_000 + os.getpid()  # whom nobody else runs anything as
    user = [f"--reuid={own}", f"--regid={own}", "--clear-groups", "--inh-caps=+dac_read_search"]
    before = ["setpriv", *user, "--ambient-caps=+dac_read_search"] if os.getuid() == 0 else []
    done = subprocess.run([*before, sys.executable, "-c", BUSY_USER], capture_output=True, text=True, check=False)
    if done.stderr.strip() == "none":
        pytest.skip("an ordinary user has no level 2 here")
    assert "stdout='ran" in done.stdout, done


def test_packages():
    config = SandboxConfig(packages=("numpy",))
    with ForkedPython(config, level=LEVELS[-1]) as sandbox:
        result = sandbox.run("import numpy as np; print((np.arange(6).reshape(2, 3) @ np.ones(3)).tolist())")
    assert result.stdout == "[3.0, 12.0]\n", result


def test_packages_are_not_there_unasked(sandbox):
    assert "No module named 'numpy'" in sandbox.run("import numpy").stderr


def test_unknown_packages():
    with raises_with(ConfigError, key="sandbox.packages", value="no-such-thing"):
        ForkedPython(SandboxConfig(packages=("no-such-thing",)), level=LEVELS[-1])


def test_a_killed_worker_costs_the_run_it_had(own):
    own.run("")
    zygote, worker = own.processes()
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(own.run, "import time; time.sleep(60)", limits=Limits(seconds=60))
        until(lambda: children(worker))
        program = int(children(worker)[0])
        os.kill(worker, signal.SIGKILL)
        result = running.result(60)
    assert (result.status, result.detail) == (Status.REFUSED, "the worker ended")
    if own.level >= Level.ISOLATED:
        until(lambda: gone(program))
    else:
        os.kill(program, signal.SIGKILL)
    assert own.run("print(1)").stdout == "1\n"
    assert own.processes()[0] == zygote


def test_a_killed_zygote_is_replaced(own):
    own.run("")
    zygote, worker = own.processes()
    for pid in (zygote, worker):
        os.kill(pid, signal.SIGKILL)
    until(lambda: gone(zygote) and gone(worker))
    assert own.run("print(1)").stdout == "1\n"
    assert own.processes()[0] != zygote


def test_closing_ends_what_runs(own):
    own.run("")
    processes = own.processes()
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(own.run, "import time; time.sleep(60)", limits=Limits(seconds=60))
        until(lambda: children(processes[1]))
        own.close()
        assert running.result(60).status is Status.REFUSED
    until(lambda: all(gone(pid) for pid in processes))
    assert own.run("").status is Status.REFUSED


@pytest.mark.parametrize("level", LEVELS)
def test_no_process_outlives_the_client(level):
    script = f"""
        import threading, time
        from antiphon.sandbox.base import Level, Limits
        from antiphon.sandbox.isolation.forked_python import ForkedPython
        sandbox = ForkedPython(level=Level({level:d}))
        sandbox.run("")
        limits = Limits(seconds=600)
        program = "import os, time; os.fork() or os.setsid(); time.sleep(600)"
        threading.Thread(target=sandbox.run, args=(program,), kwargs=dict(limits=limits)).start()
        print(*sandbox.processes(), flush=True)
        time.sleep(600)
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))  # no user but this one may enter pytest's
        folder.chmod(0o711)
        environment = {"TMPDIR": str(folder), "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
        asking = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment))
        try:
            zygote, worker = map(int, asking.stdout.readline().split())
            until(lambda: children(worker) and children(children(worker)[0]))
            programs = [int(pid) for child in children(worker) for pid in [child, *children(child)]]
            assert len(programs) == 2
        finally:
            asking.kill()
        until(lambda: all(gone(pid) for pid in [zygote, worker, *programs]))
        assert list(folder.iterdir()) == []
        assert list(Path("/sys/fs/cgroup").glob(f"**/antiphon-{zygote}")) == []


def test_threads_come_and_go_with_the_sandbox_still_there(own):
    """The zygote does not depend on the thread that started it."""
    made = []
    starter = threading.Thread(target=lambda: made.append(ForkedPython(level=own.level)))
    starter.start()
    starter.join()
    with made[0] as sandbox:
        assert sandbox.run("print(1)").stdout == "1\n"
