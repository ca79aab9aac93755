"""Real processes, killed at named points: after every resume the ledger balances, and nothing is trained on twice or lost."""

import random
import sys

import pytest

from tests.chaos.lives import POINTS, Lives


@pytest.mark.chaos
@pytest.mark.parametrize(
    "kills",
    [
        [("controller", "rollouts.written", 3), ("learner", "learner.publish", 3), ("engine", "engine.load", 2)],
        pytest.param(
            [
                ("controller", "ledger.commit", 3),
                ("controller", "checkpoint.published", 2),
                ("controller", "token_stats.write", 2),
                ("learner", "learner.saved", 2),
                ("grader", "grade", 1),
            ],
            marks=pytest.mark.long,
        ),
    ],
    ids=["controller, learner, engine", "other points, grader"],
)
def test_a_run_survives_one_kill_after_another(project, kills):
    lives = Lives(project)
    for who, point, count in kills:
        lives.live(who, point, count)


@pytest.mark.chaos
def test_a_run_survives_many_kills_at_random(project, request):
    """Drawn points, and now and then a checkpoint that was torn in between; `make chaos` asks for it, and keeps the result."""
    kills = request.config.getoption("--kills")
    if not kills:
        pytest.skip("takes a while; --kills says how many")
    draw, lives, torn = random.Random(request.config.getoption("--seed")), Lives(project), 0
    for number in range(kills):
        damaged = lives.tear(draw) if draw.random() < 0.25 else None
        who = draw.choices(list(POINTS), weights=[4, 4, 1, 1])[0] if number else "controller"
        point, most = draw.choice(list(POINTS[who].items()))
        said = lives.live(who, point, draw.randint(1, most))
        if damaged:
            assert f"checkpoint skipped: {damaged}" in said
            torn += 1
    sys.path.insert(0, str(request.config.rootpath / "benchmarks"))
    from _common import WHOLE_RUN, write_result

    figures = {"kills": kills, "audits_clean": lives.lived, "torn_detected": torn}
    figures["steps_that_stand"] = lives.steps()
    measures = (*WHOLE_RUN, "antiphon.record")
    print("written:", write_result("chaos", figures, command="make chaos", measures=measures))
