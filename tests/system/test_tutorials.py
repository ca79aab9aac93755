"""Each tutorial does what it says, when it is pasted into a shell."""

import json
import re

import pytest

from antiphon.core.config import load
from antiphon.inspect.options import list_options
from antiphon.run.config import RunConfig
from antiphon.simulate.devices import resolve_on_devices
from tests.pages import TUTORIALS, read_script, run_page

TINY = "sft.steps=2 sft.batch_size=8 steps=2 rollout.groups_per_step=2 rollout.group_size=4 evaluation.limit=4"
COLD = "steps=2 rollout.groups_per_step=2 rollout.group_size=4 evaluation.limit=4"  # for runs without a warm start


def summary_of(run):
    return json.loads((run / "summary.json").read_text())


def test_my_data(tmp_path):
    out = run_page("my_data.md", tmp_path, TINY)
    assert summary_of(tmp_path / "sorting" / "runs" / "sorting")["steps"] == 2
    assert "problems: 0" in out and "--- response" in out and "violations: 0" in out


def test_my_agent(tmp_path):
    out = run_page("my_agent.md", tmp_path, TINY)
    assert summary_of(tmp_path / "sums" / "runs" / "agent")["steps"] == 2
    assert "0.0.0" in out and "trained" in out


@pytest.mark.long
def test_why_not_learning(tmp_path):
    out = run_page("why_not_learning.md", tmp_path, COLD)
    assert "1 reward/mean 0.0 learner/grad_norm None " in out
    assert "siblings" in out.split("0.0.0")[-1] and "the runs differ" in out


@pytest.mark.ray
@pytest.mark.long
def test_cluster(tmp_path):
    out = run_page("cluster.md", tmp_path, TINY)
    assert summary_of(tmp_path / "growing" / "runs" / "ray")["steps"] == 2
    assert "h100" in out.lower()


def test_the_keys_of_a_real_cluster_fit_its_devices(tmp_path):
    (block,) = re.findall(r"```yaml\n(.*?)```", (TUTORIALS / "cluster.md").read_text(), re.DOTALL)
    base = TUTORIALS.parents[1] / "recipes" / "starter" / "run.yaml"
    (tmp_path / "run.yaml").write_text(f"base: {base}\n{block}")
    places = resolve_on_devices(load(tmp_path / "run.yaml", model=RunConfig), "h100").places
    assert {role: len(found) for role, found in places.items()} == {"learner": 4, "engine": 12}


def test_from_verl(tmp_path):
    out = run_page("from_verl.md", tmp_path, TINY)
    assert "problems: 0" in out
    assert summary_of(tmp_path / "ported" / "runs" / "asynchronous")["steps"] == 2


def test_from_roll(tmp_path):
    out = run_page("from_roll.md", tmp_path, TINY.replace("steps=2 r", "steps=2 rollout.filter=null r"))
    assert "problems: 0" in out and "violations: 0" in out


@pytest.mark.parametrize("page", ["from_verl.md", "from_roll.md"])
def test_our_keys_of_a_comparison_exist(page):
    rows = re.findall(r"^\| [^|]+ \| ([^|]*) \| [^|]* ?\|$", (TUTORIALS / page).read_text(), re.MULTILINE)
    keys = [key for cell in rows for key in re.findall(r"`([^`]+)`", cell)]
    known = [option.key for option in list_options(RunConfig)]
    assert len(keys) > 40
    assert [key for key in keys if key not in known and not any(each.startswith(f"{key}.") for each in known)] == []


def test_every_tutorial_has_a_test():
    tested = {name.removeprefix("test_") for name in globals()}
    pages = {page.stem for page in TUTORIALS.glob("*.md")} - {"README"}
    assert pages and pages <= tested


def test_files_are_written_where_commands_led():
    script = read_script("my_data.md")
    assert script.index("cd sorting") < script.index("cat > data.py") < script.index("python data.py")
    assert "cat > run.yaml" in script and "cat > reward.py" in script
