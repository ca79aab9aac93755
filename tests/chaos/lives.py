"""A run that is killed again and again, at named points of its processes."""

import json
import signal
import sqlite3
import textwrap
from contextlib import closing

from antiphon.inspect.audit import audit
from tests import warm

# Parts that arm a named point in their own process, as `armed.json` says: {"learner": ["checkpoint.write", 1]}.
PARTS = """
    import json
    import os
    import signal
    from pathlib import Path

    from antiphon.core import failpoints as points
    from antiphon.engines.native.factory import open_engine
    from antiphon.learning.torch_learner import TorchLearner

    ORDERS = Path(__file__).with_name("armed.json")

    def arm(who):
        orders = json.loads(ORDERS.read_text())
        if who in orders:
            points.arm(*orders.pop(who))
            ORDERS.write_text(json.dumps(orders))  # once

    class Learner(TorchLearner):
        def __init__(self, *args):
            super().__init__(*args)
            arm("learner")

        def step(self, batch):
            points.hit("learner.step")
            trained = super().step(batch)
            points.hit("learner.stepped")
            return trained

        def publish(self, version, exchange):
            points.hit("learner.publish")
            update = super().publish(version, exchange)
            points.hit("learner.published")
            return update

    def engine(model, config, receive):
        arm("engine")
        opened = open_engine(model, config, receive)
        load, step = opened.load, opened.step

        def loading(*args):
            points.hit("engine.load")
            load(*args)
            points.hit("engine.loaded")

        def stepping():
            points.hit("engine.step")
            return step()

        opened.load, opened.step = loading, stepping
        return opened

    def digits(prompt, transcript):
        orders = json.loads(ORDERS.read_text())
        if "grader" in orders and transcript.turns[0].timing.finished:
            del orders["grader"]
            ORDERS.write_text(json.dumps(orders))
            os.kill(os.getpid(), signal.SIGKILL)
        return sum(character.isdigit() for character in transcript.response) / 8
"""

CONTROLLER = """
import json, sys
from pathlib import Path
from antiphon.cli import main
from antiphon.core import failpoints as points
orders = json.loads(Path(sys.argv[1]).read_text())
if "controller" in orders:
    points.arm(*orders["controller"])
sys.argv = ["antiphon", *sys.argv[2:]]
main()
"""

# Where whom can die: the point, and how often it is reached in a life at most before that. The controller ends the run, and a
# resume goes on with it; of the others the run takes care itself.
POINTS = {
    "controller": {
        "ledger.commit": 6,
        "ledger.committed": 6,
        "rollouts.write": 4,
        "rollouts.written": 4,
        "checkpoint.write": 2,
        "checkpoint.publish": 2,
        "checkpoint.published": 2,
        "checkpoint.prune": 2,
        "publish": 5,
        "published": 5,
        "token_stats.write": 5,
        "token_stats.written": 5,
    },
    "learner": {
        "learner.saved": 2,
        "learner.step": 6,
        "learner.stepped": 6,
        "learner.publish": 6,
        "learner.published": 6,
    },
    "engine": {"engine.load": 4, "engine.loaded": 4, "engine.step": 40},
    "grader": {"grade": 1},
}
STEPS = 10_000  # of the whole run: no life comes to its end, unless it is told to


class Lives:
    """A run of `project`, again and again."""

    def __init__(self, project):
        self.project = project
        (project.folder / "parts.py").write_text(textwrap.dedent(PARTS))
        self.orders = project.folder / "armed.json"
        self.directory = project.folder / "runs" / "run"
        self.lived = 0

    def live(self, who, point, count):
        """One life, in which `who` is killed when it reaches `point` for the `count`-th time; then the books are looked at.
        Returns what the run said."""
        self.orders.write_text(json.dumps({who: [point, count]}))
        ends_it = who == "controller"
        config = self.project.config(
            rollout={"async_ratio": 1.5, "redundancy": 1, "extra_groups": 1, "order": "ready", "filter": "spread"},
            tasks=[{"name": "digits", "prompts": {"source": "mytask:problems"}, "reward": "parts:digits"}],
            # Slow: what has learned everything has only groups that are filtered out.
            learner={"kind": "parts:Learner", "optimizer": {"learning_rate": 1e-5}},
            engine={"kind": "parts:engine"},
            checkpoint={"every": 3},
            record={"token_stats": ["entropy", "advantage"]},
            grading={"workers": 1},
        )
        steps = f"steps={STEPS if ends_it else self.steps() + 8}"
        done = warm.run("-c", CONTROLLER, self.orders, "train", config, steps, *["--resume"] * (self.lived > 0))
        said = done.stdout + done.stderr
        if ends_it:
            assert done.returncode == -signal.SIGKILL, said
        else:
            assert json.loads(self.orders.read_text()) == {}, f"nobody was killed\n{said}"
            assert done.returncode == 0, said
            assert ("worker learner was killed by SIGKILL" in said) == (who == "learner")
        self.lived += 1
        found = audit(self.directory)
        assert not found.violations, found.violations
        return said

    def steps(self):
        """The steps that stand."""
        if not self.lived:
            return 0
        with closing(sqlite3.connect(self.directory / "ledger.db")) as db:
            return db.execute("SELECT max(step) FROM steps WHERE NOT undone AND version IS NOT NULL").fetchone()[0] or 0

    def tear(self, draw):
        """Damage a file of the newest checkpoint, if there is another to fall back to; returns its name."""
        checkpoints = sorted((self.directory / "checkpoints").glob("step_??????"))
        if len(checkpoints) < 2:
            return None
        files = (file for file in checkpoints[-1].rglob("*") if file.is_file() and file.stat().st_size)
        file = draw.choice(sorted(files))
        content = bytearray(file.read_bytes())
        match draw.randrange(3):
            case 0:
                file.unlink()
            case 1:
                file.write_bytes(content[: draw.randrange(len(content))])
            case _:
                content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
                file.write_bytes(content)
        return str(file.relative_to(self.directory / "checkpoints"))
