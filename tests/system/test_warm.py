"""A program of the warm process against the same one in a new interpreter: whole runs of the tests are such programs."""

import json
import os
import signal
import subprocess
import sys
import textwrap

import pytest

from tests import warm

STATE = """
import json, os, signal, sys
names = ("SIGINT", "SIGTERM", "SIGHUP", "SIGPIPE", "SIGCHLD", "SIGUSR1")
print(json.dumps({
    "arguments": sys.argv,
    "path": sys.path,
    "name": __name__,
    "folder": os.getcwd(),
    "environment": {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "TORCHINDUCTOR_", "LINES", "COLUMNS"))},
    "signals": [str(signal.getsignal(getattr(signal, name))) for name in names],
    "blocked": [int(each) for each in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
    "input": sys.stdin.read(),
    "files": sorted(int(each) for each in os.listdir("/proc/self/fd") if int(each) < 3),
    "terminal": [os.isatty(number) for number in range(3)],
    "limits": __import__("resource").getrlimit(__import__("resource").RLIMIT_NOFILE),
    "mask": os.umask(0),
    "main": "__main__" in sys.modules,
}))
"""


def cold(*arguments, **settings):
    command = [sys.executable, *arguments]
    pipes = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True, "timeout": 120}
    return subprocess.run(command, check=False, **pipes, **settings)


@pytest.fixture(autouse=True)
def is_warm(request):
    if request.config.getoption("--cold"):
        pytest.skip("nothing is warm with --cold")


def test_it_begins_as_an_interpreter_does(tmp_path):
    found = warm.run("-c", STATE, "one", "--two", directory=tmp_path)
    expected = cold("-c", STATE, "one", "--two", cwd=tmp_path)
    assert json.loads(found.stdout) == json.loads(expected.stdout)
    assert found.stderr == expected.stderr == ""


def test_it_has_what_an_interpreter_has_not_imported_yet():
    """Else it would not be warm, and the others here would compare nothing."""
    assert warm.run("-c", "import sys; print('torch' in sys.modules)").stdout == "True\n"
    assert cold("-c", "import sys; print('torch' in sys.modules)").stdout == "False\n"


@pytest.mark.parametrize(
    "program",
    [
        "pass",
        "import sys; sys.exit(3)",
        "import sys; sys.exit('a reason')",
        "import os; os._exit(4)",
        "raise ValueError('wrong')",
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
        "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
        "import os, signal; os.kill(os.getpid(), signal.SIGINT)",
        "import atexit; atexit.register(print, 'at exit'); print('first')",
        "import threading, time; threading.Thread(target=lambda: (time.sleep(0.1), print('last'))).start()",
        "import sys; print('out'); print('err', file=sys.stderr)",
    ],
)
def test_it_ends_as_an_interpreter_does(program):
    found, expected = warm.run("-c", program), cold("-c", program)
    assert found.stdout == expected.stdout
    assert found.stderr.splitlines()[-1:] == expected.stderr.splitlines()[-1:]
    assert found.returncode == expected.returncode


def test_a_module_is_run_by_its_name():
    found, expected = warm.run("-m", "antiphon", "recipes"), cold("-m", "antiphon", "recipes")
    assert (found.stdout, found.stderr, found.returncode) == (expected.stdout, expected.stderr, expected.returncode)
    found, expected = warm.run("-m", "antiphon", "trian"), cold("-m", "antiphon", "trian")
    assert (found.stdout, found.stderr, found.returncode) == (expected.stdout, expected.stderr, expected.returncode)


def test_a_changed_environment_starts_an_interpreter():
    """Packages read theirs as they are imported."""
    program = "import os, sys; print(os.environ['OF_A_TEST'], 'torch' in sys.modules)"
    assert warm.run("-c", program, environment={**os.environ, "OF_A_TEST": "1"}).stdout == "1 False\n"


def test_programs_share_nothing():
    assert warm.run("-c", "import torch; torch.mark = 1; print('done')").stdout == "done\n"
    assert warm.run("-c", "import torch; print(hasattr(torch, 'mark'))").stdout == "False\n"


def test_its_output_is_read_as_it_comes_and_signals_reach_it():
    program = textwrap.dedent("""
        import time
        try:
            print("ready", flush=True)
            time.sleep(600)
        except KeyboardInterrupt:
            print("left")
    """)
    with warm.start("-c", program) as process:
        assert process.stdout.readline() == "ready\n" and process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=60)[0] == "left\n" and process.returncode == 0
    with warm.start("-c", program) as process:
        assert process.stdout.readline() == "ready\n"
        process.kill()
        process.communicate(timeout=60)
        assert process.returncode == -signal.SIGKILL
