"""A run whose rewards ask a judge over HTTP: one client for all that grades, and a budget that outlives a stop."""

import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from antiphon.inspect.audit import audit

pytestmark = pytest.mark.system

COST = 0.5  # of a question


class Judge(BaseHTTPRequestHandler):
    """Gives as many points as the response has digits, and keeps what it was asked."""

    asked: list = []

    def do_POST(self):
        rules, question = (
            message["content"]
            for message in json.loads(self.rfile.read(int(self.headers["Content-Length"])))["messages"]
        )
        self.asked.append(question)
        response = question.rpartition("<response")[2].partition(">")[2].partition("</response")[0]
        verdict = f"{re.search('VERDICT [0-9a-f]+:', rules)[0]} {min(sum(map(str.isdigit, response)), 10)}"
        message = {"role": "assistant", "content": verdict}
        usage = {"prompt_tokens": 400_000, "completion_tokens": 50_000}
        body = json.dumps({"choices": [{"message": message}], "usage": usage}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        """Print nothing."""


@pytest.fixture
def judge():
    """Options of a reward that asks it."""
    Judge.asked.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    address = f"http://127.0.0.1:{server.server_port}/v1"
    yield {"address": address, "model": "m", "input_price": 1.0, "output_price": 2.0}
    server.shutdown()
    thread.join()
    server.server_close()


def config(project, judge, budget=0.0, **sections):
    tasks = [
        {"name": name, "prompts": {"source": "mytask:problems"}, "reward": "judge", "reward_options": judge}
        for name in ("one", "two")
    ]
    grading = {"deadline": 60, "judge_budget": budget}
    return project.config(tasks=tasks, grading=grading, check={"prompts": 0}, **sections)


@pytest.mark.parametrize("workers", [0, 2])
def test_all_that_grades_asks_one_client(project, judge, workers):
    sections = {"rollout": {"workers": workers, "timeout": 240}, "engine": {"replicas": 2, "slots": 4}}
    done = project.run("train", config(project, judge, steps=2, weights={"channel": "distributed"}, **sections))
    assert done.returncode == 0, done.stderr
    last = project.metrics()[-1]
    asked = len(Judge.asked)
    assert len({*Judge.asked}) == asked, "no question twice, whoever asks it"
    assert 0 < last["judge/requests"] <= asked, "the last step ends before the last attempts"
    assert last["judge/cost"] == pytest.approx(COST * last["judge/tokens"] / 450_000)
    assert last["reward/mean"] > 0
    assert not audit(project.folder / "runs" / "run").violations


def test_a_budget_ends_the_run_and_a_higher_one_goes_on(project, judge):
    sections = {"checkpoint": {"every": 1}, "steps": 6}
    first = project.run("train", config(project, judge, budget=12.0, **sections))
    assert first.returncode != 0 and "grading.judge_budget" in first.stderr
    spent, steps = len(Judge.asked), len(project.metrics())
    assert 24 <= spent < 24 + 2 * 64, "those under way were answered"
    assert 0 < steps < 6
    same = project.run("train", config(project, judge, budget=12.0, **sections), "--resume")
    assert same.returncode != 0 and "grading.judge_budget" in same.stderr
    assert len(Judge.asked) == spent, "nothing is paid for a second time"
    more = project.run("train", config(project, judge, budget=1000.0, **sections), "--resume")
    assert more.returncode == 0, more.stderr
    last = project.metrics()[-1]
    assert last["step"] == 6
    kept = json.loads((project.folder / "runs" / "run" / "judges.json").read_text())
    asked = len(Judge.asked)  # at the end requests are under way, which are not sent any more, or not answered
    assert asked <= kept["requests"] <= asked + 64 and kept["cost"] <= COST * asked
    assert 12.0 <= project.metrics()[steps]["judge/cost"] <= last["judge/cost"] <= kept["cost"]
    assert not audit(project.folder / "runs" / "run").violations
