"""Questions about a run that went wrong, answered in a browser by following links, with at most five clicks each."""

import json
import re

import pytest

from antiphon.record import trajectories
from tests.browser.troubled import CUT, DETAIL, FALL, HACK, make_runs
from tests.unit.dashboard.sites import TOKEN

pytest.importorskip("playwright.sync_api", reason="not installed on this system: playwright")
pytestmark = pytest.mark.commands("chromium")

MOST_CLICKS = 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("runs")
    (found / "facts.json").write_text(json.dumps(make_runs(found)))
    return found


@pytest.fixture(scope="module")
def facts(folder):
    """What is true of the run."""
    return json.loads((folder / "facts.json").read_text())


class Reader:
    """Somebody who knows the list of runs, and clicks."""

    def __init__(self, page):
        self.page = page
        self.clicks = 0

    def follow(self, name, place=None):
        """Click the link, button or field with a name, in a part of the page."""
        self.click((place or self.page.locator("main, header")).get_by_role("link", name=name).first)

    def click(self, what):
        what.click()
        self.clicks += 1
        assert self.clicks <= MOST_CLICKS
        self.page.wait_for_load_state()

    def sees(self, text, place="main"):
        """Return True once the text is there; fail if it does not come."""
        self.page.locator(place).get_by_text(text).first.wait_for()
        return True

    def row(self, text):
        """Return the row of a table that has a text."""
        return self.page.get_by_role("row").filter(has_text=text)


@pytest.fixture
def reader(browser, address):
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()
    page.goto(f"{address}/runs?token={TOKEN}")
    yield Reader(page)
    context.close()


def test_show_a_reward_hack(reader, facts):
    reader.follow("1", reader.row("troubled"))  # its alarms
    reader.follow(re.compile("reward hacking.*repetition"))
    reader.click(reader.page.locator("tbody [data-row]").first)  # the best paid of the step
    assert reader.page.locator("h1").inner_text() == facts["hack"]
    assert reader.sees(re.compile("repeats"), "aside")


def test_how_its_siblings_were_paid(reader, facts):
    reader.follow("1", reader.row("troubled"))
    reader.follow(re.compile("reward hacking.*repetition"))
    reader.click(reader.page.locator("tbody [data-row]").first)
    reader.follow("siblings side by side")
    assert reader.page.locator("article.reference h2 a").inner_text() == facts["hack"]
    scores = [float(each) for each in reader.page.locator("article .score b").all_inner_texts() if each != "–"]
    assert max(scores) == 2 and sorted(scores)[-2] < 2


def test_why_reward_fell(reader):
    reader.follow("troubled")
    reader.follow(re.compile(f"Reward fell most at step {FALL}"))
    reader.click(reader.page.locator("tbody [data-row]").first)
    assert reader.sees(DETAIL, "aside")


def test_which_engine_was_slow(reader, facts):
    reader.follow("troubled")
    reader.follow("Timeline")
    reader.page.locator(".lane-name", has_text="engine 2").wait_for()  # events are in the index
    slow = reader.page.locator(".lane-name", has=reader.page.locator(".worry")).all_inner_texts()
    assert len(slow) == 1 and slow[0].startswith(f"engine {facts['slow']}")


def test_which_samples_were_stale_and_why(reader):
    reader.follow("troubled")
    reader.follow(re.compile("became too old"))
    reader.click(reader.page.locator("tbody [data-row]").first)
    assert reader.sees(re.compile("rollout.async_ratio .* lets no later step use it"), "aside")


def test_which_answers_were_cut_off(reader):
    reader.follow("troubled")
    reader.follow(re.compile(f"75% of the attempts of step {CUT} ended at a limit"))
    reader.click(reader.page.locator("tbody [data-row]").first)
    assert reader.sees(re.compile("ended by a limit"), "aside")


def test_whether_the_newest_checkpoint_is_whole(reader):
    reader.follow("troubled")
    reader.follow("Record")
    newest = reader.page.get_by_role("row").filter(has_text="step_0").first.inner_text()
    assert "step_000008" in newest and "torn" in newest and "bytes instead of" in newest


def test_what_a_resume_undid(reader):
    reader.follow("troubled")
    reader.follow(re.compile("2 steps between 5 and 6 were undone"))
    assert reader.sees("Resumed from lineage 0 after step 4")


def test_why_attempts_failed(reader, folder):
    reader.follow("troubled")
    reader.follow("Rollouts")
    reader.follow(re.compile("^failed"))
    reasons = reader.page.locator(".failure").all_inner_texts()
    assert reasons and all(each.startswith("reward: ") for each in reasons)


def test_in_which_settings_two_runs_differ(reader):
    reader.click(reader.row("troubled").get_by_role("checkbox"))
    reader.click(reader.row("healthy").get_by_role("checkbox"))
    reader.click(reader.page.get_by_role("button", name="Compare selected"))
    rows = reader.page.locator("table.settings tbody tr").all_inner_texts()
    assert [sorted(row.split()[1:]) for row in rows if row.startswith("seed")] == [["0", "7"]]


def test_which_engine_and_version_made_an_answer(reader, folder, facts):
    reader.follow("1", reader.row("troubled"))
    reader.follow(re.compile("reward hacking.*repetition"))
    reader.click(reader.page.locator("tbody [data-row]").first)
    found = {}
    for file in (folder / "troubled" / "rollouts").glob("*.parquet"):
        found |= {f"0:{name}": each for name, each in trajectories.read(file).items()}
    trajectory = found[facts["hack"]]
    engine = trajectory.segments[0].turns[0].engines[0]
    assert f"engine {engine}" in reader.page.locator(".part.response .facts").inner_text().replace("\n", " ")
    assert reader.sees(f"version {trajectory.meta.started.n}", "aside")


def test_whether_the_learner_waits(reader, folder):
    reader.follow("troubled")
    last = json.loads((folder / "troubled" / "metrics.jsonl").read_text().splitlines()[-1])
    shown = reader.page.locator(".headline div", has_text="waiting").inner_text()
    assert f"{last['step/wait_groups_share']:.1%}" in shown


def test_numbers_of_the_planted_run_are_those_that_were_planted(folder, facts):
    lines = [json.loads(line) for line in (folder / "troubled" / "metrics.jsonl").read_text().splitlines()]
    first = {line["step"]: line for line in lines if line["lineage"] == 0}
    assert first[FALL]["reward/mean"] == 0 < first[HACK]["reward/mean"]
