"""The dashboard over runs that learn from data: each page shows what there is, or says that such a run has none."""

import json
import re
import time

import pytest
import yaml

from antiphon.dashboard.bundle import write_bundle
from tests.conftest import Project
from tests.unit.dashboard.sites import open_dashboard

pytestmark = pytest.mark.system

KINDS = {"sft": "supervised fine-tuning", "dpo": "preference optimisation", "reward-model": "reward modelling"}
KINDS |= {"distill": "distillation"}
CHARTS = {"sft": {"sft_loss", "sft_gradient"}}
CHARTS["dpo"] = {"loss", "gradient", "rate", "ranked", "margin", "pair_rewards", "validation_loss"}
CHARTS["reward-model"] = CHARTS["dpo"]
CHARTS["distill"] = {"loss", "gradient", "rate", "divergence", "validation_loss"}


@pytest.fixture(scope="module")
def project(tmp_path_factory, model):
    """A real run of each offline command, of a few steps."""
    project = Project(tmp_path_factory.mktemp("offline"), model)
    rows = [{"prompt": f"{n % 10}+{n // 10}=", "chosen": str(n % 10), "rejected": "xy"} for n in range(24)]
    (project.folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = project.config(name="sft", sft={"steps": 3, "batch_size": 4})
    assert (done := project.run("sft", config)).returncode == 0, done.stderr
    pairs = {"source": "jsonl", "path": str(project.folder / "pairs.jsonl")}
    responses = pairs | {"response_column": "chosen"}
    for name in ("dpo", "reward-model", "distill"):
        data = responses if name == "distill" else pairs
        given = {
            "name": name,
            "model": {"path": str(model)},
            "data": data,
            "validation": data | {"limit": 8},
            "batch_size": 8,
            "learner": {"tokens_per_pack": 40},
            "record": {"directory": str(project.folder / "runs")},
        }
        if name == "distill":
            given["distill"] = {"teacher": str(model)}
        (project.folder / f"{name}.yaml").write_text(yaml.safe_dump(given))
        assert (done := project.run(name, project.folder / f"{name}.yaml")).returncode == 0, done.stderr
    return project


@pytest.fixture(scope="module")
def client(project, tmp_path_factory):
    with open_dashboard(project.folder / "runs", tmp_path_factory.mktemp("cache")) as found:
        yield found


def test_list_names_what_each_run_does(client):
    runs = {run["name"]: run for run in client.get("/api/runs").json()["runs"]}
    assert {name: run["kind"] for name, run in runs.items()} == {name: name for name in KINDS}
    assert {run["state"] for run in runs.values()} == {"finished"} and runs["dpo"]["step"] == 3
    page = client.get("/runs").text
    assert all(kind in page for kind in KINDS.values())


@pytest.mark.parametrize("name", KINDS)
def test_run_has_its_curves_and_only_the_tabs_that_apply(client, name):
    found = client.get(f"/api/run/{name}").json()
    assert {chart["id"] for chart in found["charts"]} == CHARTS[name]
    for chart in CHARTS[name]:
        curves = client.get(f"/api/chart/{name}?chart={chart}").json()
        assert any(len(series["x"]) == (1 if chart == "validation_loss" else 3) for series in curves["series"])
    page = client.get(f"/run/{name}").text
    tabs = re.findall(r'href="(/\w+/)[^"]*"', page.partition('class="tabs"')[2].partition("</nav>")[0])
    assert tabs == ["/run/", "/record/"]
    assert "needs <code>algorithm" not in page and "needs <code>evaluation" not in page


@pytest.mark.parametrize(
    "path", ["now/{}", "rollouts/{}", "timeline/{}", "chat/{}", "group/{}?group=0", "attempt/{}?id=0:0.0.0"]
)
@pytest.mark.parametrize("name", KINDS)
def test_pages_of_attempts_say_that_there_are_none(client, name, path):
    for prefix in ("/", "/api/"):
        answer = client.get(prefix + path.format(name))
        assert answer.status_code == 404
        assert f"A run of {KINDS[name]} has no attempts, groups or timeline" in answer.text
    assert f'href="/run/{name}"' in client.get("/" + path.format(name)).text


@pytest.mark.parametrize("name", KINDS)
def test_record_shows_what_there_is(client, name):
    client.get(f"/record/{name}")
    while (found := client.get(f"/api/record/{name}").json())["audit"]["state"] == "running":
        time.sleep(0.02)
    page = client.get(f"/record/{name}").text
    assert "model" in {part.rstrip("/") for part, _ in found["files"]} or name == "sft"
    assert found["problem"] == "" and "notice bad" not in page
    assert found["has_ledger"] == (name == "sft") == ("no ledger to audit" not in page)
    if name == "sft":
        assert found["audit"]["state"] == "clean" and found["checkpoints"][0]["state"] == "whole"


def test_bundle_of_an_offline_run_has_no_dead_pages(project, tmp_path):
    made = write_bundle(project.folder / "runs" / "dpo", tmp_path / "pages", tmp_path / "cache")
    names = {path.name for path in made.folder.glob("*.html")}
    assert names == {"index.html", "record.html", "not_in_bundle.html"}
    assert "Nothing here" not in "".join(path.read_text() for path in made.folder.glob("*.html"))
