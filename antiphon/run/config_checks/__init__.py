"""Checks of combinations of configuration keys, by topic; each check yields the problems it finds."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from antiphon.run.config_checks.algorithms import (
    check_advantage,
    check_critics,
    check_stages,
    check_teachers,
    check_token_stats,
    check_turns,
)
from antiphon.run.config_checks.common import Problem
from antiphon.run.config_checks.devices import (
    check_cluster,
    check_dtypes,
    check_placement,
    check_server_placement,
    check_weights,
)
from antiphon.run.config_checks.learner import check_meshes, check_profile, check_ranks
from antiphon.run.config_checks.names import check_names
from antiphon.run.config_checks.scheduling import (
    check_evaluation_sampling,
    check_minimum_engines,
    check_rollout_workers,
    check_sampling,
    check_scheduling,
    check_update_interval,
)
from antiphon.run.config_checks.tasks import check_accuracy, check_tasks

if TYPE_CHECKING:
    from antiphon.run.config import RunConfig

CHECKS = (
    check_names,
    check_tasks,
    check_cluster,
    check_weights,
    check_dtypes,
    check_placement,
    check_server_placement,
    check_sampling,
    check_evaluation_sampling,
    check_ranks,
    check_meshes,
    check_profile,
    check_scheduling,
    check_update_interval,
    check_minimum_engines,
    check_rollout_workers,
    check_critics,
    check_token_stats,
    check_turns,
    check_advantage,
    check_stages,
    check_teachers,
    check_accuracy,
)


def find_problems(config: "RunConfig") -> Iterator[Problem]:
    """Yield the dotted key and a message for each combination of keys that cannot work."""
    for check in CHECKS:
        yield from check(config)
