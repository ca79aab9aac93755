"""Two programs that are linked: what they share, and that it is nothing else."""

import ast
import contextlib

import pytest

from antiphon.core.errors import UnsupportedError
from antiphon.sandbox.base import LINK_READ, LINK_WRITE, Level, Limits, PythonSandbox, Status
from antiphon.sandbox.isolation import levels
from antiphon.sandbox.isolation.forked_python import ForkedPython
from antiphon.sandbox.sessions.system_python import SystemPython

LEVELS = [level for level in Level if level <= (levels.probe().level or 0)]
BACKENDS = [*LEVELS, pytest.param("box", marks=pytest.mark.commands("bwrap"))]

# Upper case of what the partner is asked; and what else the two have.
ABOUT = "[[n for n in range(64) if there(n)], os.getuid(), os.getcwd(), os.listdir()]"
THERE = """
import os
def there(n):
    try:
        return bool(os.fstat(n))
    except OSError:
        return False
"""
JUDGE = f"""{THERE}
import sys
about = {ABOUT}
os.write({LINK_WRITE}, sys.stdin.read().encode())
print(open({LINK_READ}).read())
print(about)
"""
PARTNER = f"""{THERE}
about = {ABOUT}
open("left", "w").write("something")
os.write(1, os.read(0, 1000).upper() + b"\\n" + repr(about).encode())
"""


@pytest.fixture(scope="module", params=BACKENDS, ids=str)
def sandbox(request):
    made = SystemPython() if request.param == "box" else ForkedPython(level=request.param)
    with contextlib.closing(made):
        yield made


def test_linked_programs_share_two_pipes(sandbox):
    result = sandbox.run_linked(JUDGE, PARTNER, stdin="hello")
    assert result.status is Status.OK, result
    answer, *about = result.stdout.splitlines()
    theirs, ours = map(ast.literal_eval, about)
    assert answer == "HELLO"
    assert ours[0] == [0, 1, 2, LINK_READ, LINK_WRITE] and theirs[0] == [0, 1, 2]
    assert [name for name in ours[3] if name != ".bash_history"] == []
    if isinstance(sandbox, ForkedPython) and sandbox.level is Level.CONFINED and levels.probe().own_user:
        assert ours[1] != theirs[1] and ours[2] != theirs[2]
    if isinstance(sandbox, ForkedPython) and sandbox.level is Level.ISOLATED and levels.probe().own_user:
        assert ours[1] != theirs[1]


def test_the_result_is_the_judges(sandbox):
    result = sandbox.run_linked("print('mine')\nraise SystemExit(3)", "print('theirs')\nraise SystemExit(4)")
    assert (result.status, result.exit_code, result.stdout) == (Status.ERROR, 3, "mine\n")


def test_the_end_of_a_partner_is_the_end_of_its_pipe(sandbox):
    result = sandbox.run_linked(f"import os\nprint(os.read({LINK_READ}, 9))", "import os\nos._exit(0)")
    assert result.stdout == "b''\n"


def test_a_partner_ends_with_its_judge(sandbox):
    for _ in range(3):
        result = sandbox.run_linked(
            "print('done')", "import time\nwhile True: time.sleep(1)", limits=Limits(seconds=60)
        )
        assert (result.status, result.stdout) == (Status.OK, "done\n")
    assert sandbox.run("print(1)").stdout == "1\n"


def test_a_judge_that_waits_in_vain_is_timed_out(sandbox):
    program = f"import os\nos.read({LINK_READ}, 1)"
    result = sandbox.run_linked(program, "import time\ntime.sleep(60)", limits=Limits(seconds=1))
    assert result.status is Status.TIMEOUT


def test_a_closed_sandbox_links_nothing():
    sandbox = ForkedPython(level=LEVELS[-1])
    sandbox.close()
    assert sandbox.run_linked("", "").status is Status.REFUSED


def test_what_cannot_link_says_so():
    class Alone(PythonSandbox):
        level = Level.LIMITS

    with pytest.raises(UnsupportedError, match="Alone"):
        Alone().run_linked("", "")
