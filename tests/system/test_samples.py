"""`antiphon samples` on a real run: what it shows is what the policy sampled."""

import json

import pandas
from transformers import PreTrainedTokenizerFast

from antiphon.inspect.samples import iterate_samples

STEPS = 2


def test_samples_are_shown_as_they_were_said(project):
    done = project.run("train", project.config(steps=STEPS))
    assert done.returncode == 0, done.stderr
    run = project.folder / "runs" / "run"
    rows = pandas.read_parquet(run / "rollouts").set_index(["grp", "sibling", "try"])
    tokenizer = PreTrainedTokenizerFast.from_pretrained(project.model)
    found = list(iterate_samples(run))
    assert len(found) == len(rows)
    for sample in found:
        row = rows.loc[tuple(sample.row.id)]
        assert sample.text == tokenizer.decode(list(row.tokens), skip_special_tokens=True)
        (_, prompt), (_, response) = sample.parts
        assert prompt.endswith("=") and len(response) <= 8  # most tokens of a response, a character each
    scores = [sample.row.score for sample in iterate_samples(run, order="worst")]
    assert scores == sorted(row.score for row in rows.itertuples())

    shown = project.run("samples", run, "--order", "best", "--limit", "1")
    assert shown.returncode == 0, shown.stderr
    head, prompt, response = shown.stdout.split("--- ")
    assert f"score {rows.score.max()}" in head
    assert prompt.startswith("prompt\n") and response.startswith("response\n")


def test_samples_are_selected(project):
    assert project.run("train", project.config(steps=STEPS)).returncode == 0
    run = project.folder / "runs" / "run"
    of_step = project.run("samples", run, "--step", "1", "--limit", "100").stdout
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert len(metrics) == STEPS
    assert of_step.count("=== ") == 8 and of_step.count("trained at step 1") == 8
    refused = project.run("samples", run, "--status", "no_such")
    assert refused.returncode == 2 and "stale" in refused.stderr, "it names those that are valid"
    assert project.run("samples", run, "--status", "stale").stdout == "0 samples\n"
    one = project.run("samples", run, "--prompt", "3+0=", "--limit", "100").stdout
    assert one.count("=== ") == one.count("3+0=")
    refused = project.run("samples", run, "--order", "oldest")
    assert refused.returncode == 2 and "newest, best, worst" in refused.stderr
