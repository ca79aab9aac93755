"""Programs that clients of the service talk to in a terminal: real ones, of one service, of workers and of hosts."""

from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from tests.system.test_sandbox_ports import idle, server  # noqa: F401  # one service, workers, hosts
from tests.system.test_sandbox_service import Server

pytestmark = pytest.mark.commands("bwrap", "script")


@pytest.fixture
def sandbox(server: Server):  # noqa: F811
    sandbox_id = server.start()
    server.result("/create_session", sandbox_id=sandbox_id, session="s", env={"NAME": "a name"})
    yield sandbox_id
    server.post("/stop", sandbox_id=sandbox_id)


@pytest.fixture
def say(server, sandbox):  # noqa: F811
    def say(line, *expect, quits=False, timeout=20):
        body = {"is_interactive_quit": quits, "is_interactive_command": not quits, "expect": list(expect)}
        return server.post("/run_in_session", sandbox_id=sandbox, session="s", command=line, timeout=timeout, **body)

    return say


def said(answer):
    assert answer.status_code == 200 and answer.json()["status"] == "Success", answer.text
    result = answer.json()["result"]
    return result["output"], result["expect_string"]


def run(server, sandbox, command):  # noqa: F811
    return server.result("/run_in_session", sandbox_id=sandbox, session="s", command=command)["output"]


def test_an_interpreter_is_talked_to(server, sandbox, say):  # noqa: F811
    run(server, sandbox, "cd /tmp; export OTHER=x")
    output, matched = said(say("python3 -q", ">>> "))
    assert (output, matched) == ("", ">>> ")
    assert said(say("import os; x = 6 * 7; print(x)", ">>> ")) == ("42", ">>> ")
    assert (
        said(say("os.getcwd(), os.environ['OTHER'], os.isatty(0), os.isatty(1)", ">>> "))[0]
        == "('/tmp', 'x', True, True)"
    )
    assert said(say("for n in range(2): print(n)", r"\.\.\. ")) == ("", "... ")
    assert said(say("", ">>> "))[0] == "0\n1"
    assert said(say("1 / 0", ">>> "))[0].endswith("ZeroDivisionError: division by zero")
    assert said(say("exit()", quits=True)) == ("", "")
    assert run(server, sandbox, "echo $NAME $OTHER $PWD") == "a name x /tmp"


def test_patterns_are_regular_expressions_and_the_first_in_the_text_counts(say):
    assert said(say("printf 'one 1 two 22 three\\n'; cat", "22", r"\d ", "three"))[1] == "1 "
    assert said(say("the word 23", "24", r"w\S+d")) == ("the", "word")


def test_a_program_that_ends_ends_the_wait(server, sandbox, say):  # noqa: F811
    answer = say("echo out; exit 3", "never").json()["result"]
    assert (answer["output"], answer["expect_string"], answer["exit_code"]) == ("out", "", 3)
    assert run(server, sandbox, "echo again") == "again"
    assert say("no-such-program").json()["result"]["exit_code"] == 127


def test_colours_and_cursors_are_not_shown(say):
    assert said(say(r"printf '\033[1;31mred\033[0m \033]0;title\007and\033[2K \001more\b\n'"))[0] == "red and more"


def test_nothing_else_runs_meanwhile(server, sandbox, say):  # noqa: F811
    assert said(say("cat; echo over", "")) == ("", "")
    busy = {"sandbox_id": sandbox, "session": "s", "command": "echo"}
    assert "quit it first" in server.refused(409, "/run_in_session", **busy)
    assert server.result("/execute", sandbox_id=sandbox, command="echo other")["stdout"] == "other\n"
    assert said(say("\x04", quits=True))[0] == "over"  # Ctrl-D, the end of what is typed
    assert run(server, sandbox, "echo free") == "free"
    answer = say("echo", quits=True)
    assert answer.status_code == 409 and "no program runs" in answer.json()["error"]


def test_time_is_bounded_and_the_program_goes_on(server, sandbox, say):  # noqa: F811
    answer = say("sleep 1; echo ready; cat", "nothing", timeout=0.3)
    assert answer.status_code == 200 and answer.json()["status"] == "Failed" and "timeout" in answer.json()["error"]
    assert answer.json()["result"]["code"] == 6000
    assert said(say("x", "x"))[1] == "x"
    assert said(say("\x03", quits=True))[1] == ""  # Ctrl-C
    assert run(server, sandbox, "pgrep -c cat || true") == "0"


def test_a_flood_is_bounded(server, sandbox, say):  # noqa: F811
    answer = say("head -c 30000000 /dev/zero | tr '\\0' x; echo; echo done", timeout=60)
    output = answer.json()["result"]["output"]
    assert output.endswith("done") and len(output) <= 1 << 20


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"is_interactive_command": True, "is_interactive_quit": True}, "exclude"),
        ({"expect": ["x"]}, "expect"),
        ({"is_interactive_command": True, "expect": ["("]}, "expect"),
        ({"is_interactive_command": True, "expect": ["x"] * 65}, "expect"),
    ],
)
def test_what_makes_no_sense_is_refused(server, sandbox, body, field):  # noqa: F811
    assert field in server.refused(400, "/run_in_session", sandbox_id=sandbox, session="s", command="true", **body)


def test_a_pattern_cannot_stop_the_service(server, sandbox, say):  # noqa: F811
    answer = say(f"echo {'a' * 60}b; cat", "(a|aa|a+)+$", timeout=10)
    assert answer.status_code == 400 and "expect" in answer.json()["error"]
    assert server.result("/execute", sandbox_id=sandbox, command="echo alive")["stdout"] == "alive\n"


def test_it_ends_with_its_session_and_with_its_sandbox(server, sandbox, say):  # noqa: F811
    said(say("sleep 1000 & cat", ""))
    server.result("/close_session", sandbox_id=sandbox, session="s")
    left = server.result("/execute", sandbox_id=sandbox, command="pgrep -c 'cat|script' ; ls /run/antiphon")["stdout"]
    assert left.startswith("0\n") and ".to" not in left
    server.result("/create_session", sandbox_id=sandbox, session="s")
    said(say("cat", ""))
    server.result("/stop", sandbox_id=sandbox)
    assert idle(server)


def test_a_lost_program_is_no_success(server, sandbox, say):  # noqa: F811
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(say, "echo up; cat", "never", timeout=60)
        while not server.result("/execute", sandbox_id=sandbox, command="pgrep -c cat || true")["stdout"].startswith(
            "1"
        ):
            pass
        server.result("/close_session", sandbox_id=sandbox, session="s")
        answer = waiting.result()
        assert answer.json()["status"] == "Failed" and "killed" in answer.json()["error"]
        server.result("/create_session", sandbox_id=sandbox, session="s")
        waiting = thread.submit(say, "echo up; cat", "never", timeout=60)
        while not server.result("/execute", sandbox_id=sandbox, command="pgrep -c cat || true")["stdout"].startswith(
            "1"
        ):
            pass
        server.result("/stop", sandbox_id=sandbox)
        assert waiting.result().status_code == 410


def test_a_program_that_reads_nothing_holds_a_request_no_longer(server, sandbox, say):  # noqa: F811
    said(say("stty -icanon -echo; sleep 1000", ""))
    answer = say("x" * 3_000_000, "zz", timeout=1)
    assert answer.json()["status"] == "Failed" and "timeout" in answer.json()["error"]


def test_a_process_that_keeps_the_pipe_open_keeps_nothing_else(server, sandbox, say):  # noqa: F811
    """The end of the program is the end of its terminal, whoever else has opened the pipe to the service."""
    steal = (
        "import os, time\n"
        "held = []\n"
        "open('/tmp/ready', 'w').close()\n"
        "while True:\n"
        "    for number in os.listdir('/proc'):\n"
        "        try:\n"
        "            target = os.readlink(f'/proc/{number}/fd/5')\n"
        "            if target.endswith('.back') and target not in held:\n"
        "                os.open(target, os.O_WRONLY | os.O_NONBLOCK)\n"
        "                held.append(target)\n"
        "                open('/tmp/held', 'w').write(str(len(held)))\n"
        "        except OSError:\n"
        "            pass\n"
        "    time.sleep(0.01)\n"
    )
    server.result("/write_file", sandbox_id=sandbox, path="steal.py", content=steal)
    run(server, sandbox, "python3 steal.py & until [ -e /tmp/ready ]; do sleep 0.1; done")
    before = psutil.Process(server.process.pid).num_fds()
    for _ in range(5):
        assert said(say("until [ -e /tmp/held ]; do sleep 0.01; done; rm /tmp/held; echo over")) == ("over", "")
        assert run(server, sandbox, "echo free") == "free"
    assert psutil.Process(server.process.pid).num_fds() < before + 5


@pytest.mark.parametrize("pattern", ["(" * 400 + ")" * 400, "[", "(?P<a", "a{99999999999}"])
def test_a_pattern_that_is_none_is_refused_before_anything_runs(server, sandbox, pattern):  # noqa: F811
    body = {"sandbox_id": sandbox, "session": "s", "is_interactive_command": True, "expect": [pattern]}
    assert "expect" in server.refused(400, "/run_in_session", **body, command="touch /tmp/ran")
    assert run(server, sandbox, "ls /tmp") == ""
