"""The page of statuses is complete: every name of the code has a row, and every row a name of the code."""

import re
from pathlib import Path
from typing import get_args, get_type_hints

from antiphon.algorithms.sections import LossWeightConfig
from antiphon.core.types import AttemptStatus, Failure, GroupOutcome, ScoreStatus
from antiphon.record import schema

PAGE = (Path(__file__).parents[2] / "docs" / "statuses.md").read_text()


def rows(section):
    """The names in the first column of the table of a section."""
    (text,) = re.findall(rf"^## {section}\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE)
    return re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)


def test_page_has_every_status_of_attempts():
    assert rows("Attempts") == [str(status) for status in AttemptStatus]
    assert {*rows("Attempts")} == {*schema.LIVE, *schema.TERMINAL}


def test_page_has_every_source_of_failures():
    assert rows("Failures") == [*get_args(get_type_hints(Failure)["source"])]


def test_page_has_every_status_of_scores():
    assert rows("Scores") == [str(status) for status in ScoreStatus]


def test_page_has_every_outcome_of_groups():
    assert rows("Groups") == [str(outcome) for outcome in GroupOutcome]


def test_page_has_every_mask_of_the_loss():
    masks = [name for name in LossWeightConfig.model_fields if name.startswith("mask_")]
    assert masks and [name for name in masks if f"`algorithm.weight.{name}`" not in PAGE] == []
