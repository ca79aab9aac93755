"""`why` says the cause of every end of an attempt, and whether one that was trained on left a gradient."""

import json
import re
import shutil
import sqlite3
from contextlib import closing
from dataclasses import replace

import pytest
import yaml

from antiphon.core.errors import RecordError, RolloutError
from antiphon.inspect.why import why
from antiphon.learning.batch import digest_batches
from antiphon.record import trajectories
from antiphon.record.reader import RunReader
from antiphon.simulate.run import simulate
from antiphon.simulate.scenario import ScenarioConfig

PLAIN = {
    "name": "plain",
    "steps": 3,
    "rollout": {"groups_per_step": 2, "group_size": 2, "async_ratio": 1, "sampling": {"max_tokens": 50}},
    "response_tokens": {"kind": "lognormal", "mean": 20, "spread": 0.8},
}
DROPS = {  # all ways to end without being trained on, but an error
    "name": "drops",
    "steps": 8,
    "rollout": {
        "groups_per_step": 4,
        "group_size": 3,
        "async_ratio": 1.5,
        "redundancy": 1,
        "extra_groups": 2,
        "order": "ready",
        "filter": "spread",
        "max_attempts": 1,
        "sampling": {"max_tokens": 200},
    },
    "engines": {"count": 2, "speed": {"slots": 8}},
    "learner": {"step": 1.0},
    "response_tokens": {"kind": "lognormal", "mean": 60, "spread": 0.8},
    "faults": [{"point": "reward.lost", "chance": 0.15}],
}


def played(root, scenario, **changes):
    simulate(ScenarioConfig.model_validate(scenario | changes), keep=root)
    return root / scenario["name"]


def find(run, condition):
    """The names of the attempts that a condition in SQL selects."""
    with closing(sqlite3.connect(run / "ledger.db")) as db:
        query = "SELECT a.lineage || ':' || grp || '.' || sibling || '.' || try FROM attempts a JOIN groups g"
        return [name for (name,) in db.execute(f"{query} USING (lineage, grp) WHERE {condition}")]


def change(run, statement):
    with closing(sqlite3.connect(run / "ledger.db")) as db:
        db.executescript(statement)


@pytest.fixture(scope="module")
def dropped(tmp_path_factory):
    return played(tmp_path_factory.mktemp("drops"), DROPS)


CAUSES = {
    "status = 'filtered'": "rollout.filter (spread) rejected its complete group, with scores",
    "status = 'stale'": "its group became too old: its oldest attempt started at version",
    "status = 'redundant'": "3 siblings had finished before it",
    "status = 'failed' AND failure IS NOT NULL": "it failed itself, the last of 1 tries",
    "status = 'failed' AND failure IS NULL": "its group failed, because sibling",
    "status = 'cancelled'": "the run was over",
}


@pytest.mark.parametrize("condition", CAUSES)
def test_cause_is_told_of_each_end(dropped, condition):
    names = find(dropped, condition)
    assert names, "the scenario has such attempts"
    for name in names:
        assert CAUSES[condition] in dict(why(dropped, name))["cause"]
        assert CAUSES[condition] in dict(why(dropped, name.rpartition(".")[0]))[name], "the list has it too"


@pytest.mark.parametrize(
    ("bounds", "own", "cause"),
    [
        (
            [0.2, 0.8],
            None,
            "mean_range of its task ([0.2, 0.8]) rejected its complete group, with scores {scores}: the mean",
        ),
        ([0.2, 0.8], "my:own", "mean_range of its task ([0.2, 0.8]) rejected"),
        ([0.0, 1.0], "my:own", "rollout.filter (my:own) rejected its complete group, with scores {scores} and lengths"),
    ],
)
def test_filtered_attempt_names_the_rule_that_rejected_it(dropped, tmp_path, bounds, own, cause):
    """In the run all scores of a filtered group are equal, so that its mean is 0 or 1."""
    run = shutil.copytree(dropped, tmp_path / "run")
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["rollout"]["filter"] = own
    (run / "config.yaml").write_text(yaml.safe_dump(config | {"tasks": [{"name": "simulated", "mean_range": bounds}]}))
    for name in find(run, "status = 'filtered'"):
        told = dict(why(run, name))
        score = told["score"].removeprefix("scored ")
        assert score in ("0", "1") and told["cause"].startswith(cause.format(scores=f"{score}, {score}, {score}"))


def test_dropped_attempt_names_what_scored_its_group(dropped, tmp_path):
    run = shutil.copytree(dropped, tmp_path / "run")
    change(run, "UPDATE attempts SET score = NULL WHERE status = 'filtered';")
    for name in find(run, "status = 'filtered'"):
        assert "gave this group no scores" in dict(why(run, name))["cause"]


def test_stale_attempt_names_the_schedule(dropped):
    (name, *_) = find(dropped, "status = 'stale'")
    cause = dict(why(dropped, name))["cause"]
    assert all(key in cause for key in ("rollout.async_ratio", "order: ready", "on_expiry: abort", "extra_groups: "))


def test_failed_attempt_names_its_next_try(tmp_path):
    run = played(tmp_path, DROPS, rollout=DROPS["rollout"] | {"max_attempts": 3})
    (name, *_) = find(run, "status = 'failed' AND failure IS NOT NULL AND try = 0")
    assert f"tried again as {name[:-1]}1" in dict(why(run, name))["cause"]


def test_lost_attempt_names_the_error(tmp_path):
    with pytest.raises(RolloutError):
        played(tmp_path, PLAIN, rollout=PLAIN["rollout"] | {"filter": "spread"}, success={"mean": 1.0}, prompts=2000)
    run = tmp_path / "plain"
    name = find(run, "status = 'lost'")[0]
    assert "an error ended the run: RolloutError" in dict(why(run, name))["cause"]
    change(run, "DELETE FROM events")
    assert "the process was killed" in dict(why(run, name))["cause"]
    change(run, "UPDATE attempts SET status = 'running' WHERE status = 'lost'")
    assert "has not ended" in dict(why(run, name))["cause"]


def test_reused_trajectory_is_found_from_its_old_id(tmp_path):
    scenario = PLAIN | {"checkpoint": {"every": 1}, "learner": {"step": 60.0}}
    run = played(tmp_path, scenario, steps=2)
    simulate(ScenarioConfig.model_validate(scenario | {"steps": 4}), keep=tmp_path, resume=True)
    (new, *_) = find(run, "origin IS NOT NULL AND status = 'trained'")
    origin = dict(why(run, new))["reused from"].partition(",")[0]
    assert dict(why(run, origin))["reused as"].startswith(f"{new}, trained at step")


def told_of_trained(run, step=2):
    return [dict(why(run, name)) for name in find(run, f"status = 'trained' AND a.step = {step}")]


def test_trained_attempts_come_with_their_steps(tmp_path):
    run = played(tmp_path, PLAIN)
    with RunReader.open(run) as reader:
        found = [(step.step, row.name) for step, row in reader.iterate_trained()]
    for step in (1, 2, 3):
        assert {name for number, name in found if number == step} == set(find(run, f"a.step = {step}"))
    assert len(found) == 3 * 2 * 2


def test_gradient_of_a_trained_attempt_is_told(tmp_path):
    run = played(tmp_path, PLAIN)
    told = [each for step in (1, 2, 3) for each in told_of_trained(run, step)]
    assert len(told) == 3 * 2 * 2
    for each in told:
        zero = "mean advantage 0," in each["update"]
        assert ("all siblings scored the same" in each["gradient"]) is zero
        assert zero or each["gradient"].startswith("possible at ")
    assert {"mean advantage 0," in each["update"] for each in told} == {True, False}


def test_masked_attempt_names_its_mask(tmp_path):
    run = played(tmp_path, PLAIN, algorithm={"weight": {"mask_difficulty": [0.9, 1.1]}})
    (zero, *_) = [each for each in told_of_trained(run) if "mean weight 0 " in each["update"]]
    assert zero["gradient"].startswith("none: algorithm.weight masks it (mask_difficulty)")


def test_only_masks_that_apply_are_named(tmp_path):
    masks = {"mask_truncated": True, "mask_difficulty": [0.1, 1.1], "mask_wrong_over": 1}
    rollout = PLAIN["rollout"] | {"group_size": 4, "sampling": {"max_tokens": 20}}
    run = played(tmp_path, PLAIN, algorithm={"weight": masks}, rollout=rollout, steps=8)
    found = set()
    for name in find(run, "status = 'trained' AND grp % 2 = 0"):
        told = dict(why(run, name))
        scored, length = told["score"] != "scored 0", int(told["update"].split(" of its ")[1].split()[0])
        scores = [dict(why(run, f"{name.rpartition('.')[0].rpartition('.')[0]}.{n}.0"))["score"] for n in range(4)]
        expected = [
            key
            for key, applies in (
                ("mask_truncated", "ended by length" in told["segment 0, turn 0"]),
                ("mask_difficulty", set(scores) == {"scored 0"}),
                ("mask_wrong_over", not scored and length > 1),
            )
            if applies
        ]
        if expected:
            assert told["gradient"].startswith(f"none: algorithm.weight masks it ({', '.join(expected)})")
            found.add(tuple(expected))
        else:
            assert "masks it" not in told["gradient"]
    assert {("mask_truncated",), ("mask_wrong_over",)} <= found and len(found) > 3
    masked = next(name for name in find(run, "status = 'trained'") if "masks it" in dict(why(run, name))["gradient"])
    assert "a stage of your own masks it" in explain_weight_zero(run)
    shutil.copytree(run, tmp_path / "bare").joinpath("rollouts").rename(tmp_path / "elsewhere")
    group = masked.partition(":")[2].partition(".")[0]
    assert "(mask_truncated, mask_difficulty, mask_wrong_over)" in dict(why(tmp_path / "bare", group))[masked]
    change(run, f"UPDATE credit SET tokens = 0, weight = 0 WHERE grp = {group}")
    assert dict(why(run, masked))["gradient"].startswith("none: it has no sampled tokens")


def explain_weight_zero(run):
    """The cause that is told of an attempt that no mask applies to, if its weight is 0 nevertheless."""
    for name in find(run, "status = 'trained'"):
        if "masks it" not in dict(why(run, name))["gradient"]:
            lineage, grp, sibling, number = re.split(r"[:.]", name)
            place = f"lineage = {lineage} AND grp = {grp} AND sibling = {sibling} AND try = {number}"
            change(run, f"UPDATE credit SET weight = 0, signal = 0 WHERE {place}")
            return dict(why(run, name))["gradient"]
    raise AssertionError("all are masked")


def test_score_that_is_the_mean_of_its_group_has_no_advantage(tmp_path):
    run = played(tmp_path, PLAIN, rollout=PLAIN["rollout"] | {"group_size": 3})
    (name, *_) = find(run, "status = 'trained' AND sibling = 0")
    group = name.partition(":")[2].partition(".")[0]
    change(run, f"UPDATE credit SET signal = 0 WHERE grp = {group}")
    cases = {
        (0.5, 0.25, 0.5): "at every token. KL",
        (0.5, 0.25, 0.75): "since its score is the mean of its group",
        (0.5, 0.5, 0.5): "since all siblings scored the same",
    }
    for scores, cause in cases.items():
        for sibling, score in enumerate(scores):
            change(run, f"UPDATE attempts SET score = {score} WHERE grp = {group} AND sibling = {sibling}")
        assert cause in dict(why(run, name))["gradient"]


def test_step_without_an_update_is_told(tmp_path):
    run = played(tmp_path, PLAIN)
    change(run, f"UPDATE steps SET batch = '{digest_batches([])}' WHERE step = 2")
    assert all(each["gradient"].startswith("none: the policy was not updated") for each in told_of_trained(run))


def test_skipped_updates_and_corrections_are_told(tmp_path):
    run = played(tmp_path, PLAIN)
    with (run / "metrics.jsonl").open("a") as file:
        losses = {"learner/skipped_updates": 1.0, "learner/correction_kept": 0.75}
        print(json.dumps({"step": 2, "lineage": 0} | losses), file=file)
    for each in told_of_trained(run):
        assert "1 updates of this step were skipped" in each["gradient"] and "kept 75.0%" in each["gradient"]
    assert not any("skipped" in each["gradient"] for each in told_of_trained(run, 3))


def test_runs_before_credit_was_recorded_are_told(tmp_path):
    run = shutil.copytree(played(tmp_path, PLAIN), tmp_path / "old")
    change(run, "DROP TABLE credit; PRAGMA user_version = 1")
    assert all(each["update"].startswith("not recorded") for each in told_of_trained(run))


def test_token_of_a_later_segment_is_told(tmp_path):
    run = played(tmp_path, PLAIN)
    with closing(sqlite3.connect(run / "ledger.db")) as db:
        *attempt, file = db.execute("SELECT grp, sibling, try, file FROM attempts WHERE status = 'trained'").fetchone()
    found = trajectories.read(run / "rollouts" / file)
    (segment,) = found[tuple(attempt)].segments
    later = replace(segment, versions=segment.versions + 5)
    found[tuple(attempt)] = replace(found[tuple(attempt)], payload=(segment, later))
    trajectories.write(run / "rollouts" / file, 0, list(found.values()))
    name, token = ".".join(map(str, attempt)), len(segment.tokens) - 1
    for asked, version in ((f"{token}", segment.versions[token]), (f"1:{token}", later.versions[token])):
        assert f"by version {version}, log-prob" in dict(why(run, f"{name}@{asked}"))[f"token {token}"]
    with pytest.raises(RecordError, match="no segment 2"):
        list(why(run, f"{name}@2:0"))


def test_attempts_of_a_group_are_listed(dropped):
    (name, *_) = find(dropped, "status = 'failed' AND failure IS NOT NULL")
    numbers = name.partition(":")[2]
    group, sibling, _ = numbers.split(".")
    tries = dict(why(dropped, f"{group}.{sibling}"))
    assert [*tries] == find(dropped, f"grp = {group} AND sibling = {sibling}")
    assert tries[name].startswith("failed") and "reward" in tries[name]
    assert [*dict(why(dropped, group))] == sorted(find(dropped, f"grp = {group}"))
    for wrong in ("1000000", f"{group}@3", f"{numbers}.0", ""):
        with pytest.raises(RecordError):
            dict(why(dropped, wrong))
