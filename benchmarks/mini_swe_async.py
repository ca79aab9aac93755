"""Synchronous against asynchronous rollout on Mini-SWE: real boxes and tests, the library's own loop, scheduler and pool.

    python benchmarks/mini_swe_async.py [--steps 7]

No model runs: engines and learner take their time and learn nothing, and what is said is scripted. An attempt looks around for
some turns (log-normal, up to 30), runs the failing tests, mends the fault or does not, and submits. A turn's tokens are
log-normal, too. Both runs have the same prompts, speeds, and number of trained attempts; the asynchronous one has a ratio of 1,
redundant siblings and an extra group, of which the first to finish are trained on. Published for SWE: 1.81 times (ROLL Flash,
arXiv 2510.11345). Each setting runs twice, in turn, so that a machine that is slower for a while is so for both; the first step
of a run is left out.
"""

import argparse
import asyncio
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
import numpy as np
from _common import table, write_result

from antiphon.core.config import dump
from antiphon.core.deadlines import Deadlines
from antiphon.core.rng import derive, generator
from antiphon.core.types import Completion, GenerateRequest, IntArray, Message, Prompt, Score
from antiphon.learning.learner import ModelRoles
from antiphon.record.events import Events
from antiphon.record.ledger import Ledger
from antiphon.record.metrics import Metrics
from antiphon.record.resume import open_first_lineage
from antiphon.record.run_dir import RunDirectory
from antiphon.record.store import LedgerStore
from antiphon.rollout.backend import LocalRollouts
from antiphon.rollout.episode import EpisodeRunner
from antiphon.rollout.episode_loop import EpisodeContext
from antiphon.rollout.pool import EnginePool
from antiphon.rollout.prompt_encoding import PromptEncoder
from antiphon.run.components import Components
from antiphon.run.config import RunConfig
from antiphon.run.device_sharing import SharedDevices
from antiphon.run.launch.models import make_local_training
from antiphon.run.launch.record import RunRecord
from antiphon.run.launch.tasks import TaskData
from antiphon.run.loop import Run
from antiphon.run.publisher import WeightPublisher
from antiphon.simulate.engine import SimulatedEngine
from antiphon.simulate.engine_speed import EngineSpeed
from antiphon.simulate.faults import Faults
from antiphon.simulate.learner import LearnerSpeed, SimulatedLearner
from antiphon.simulate.workloads import DistributionConfig
from antiphon.tasks.base import Transcript
from antiphon.tasks.environments import environment_factory
from antiphon.tasks.mixture import Mixture, MixtureTask
from antiphon.tasks.rewards.environment_return import environment_return
from antiphon.weights.base import TransferContext
from antiphon_envs.mini_swe.packages import Instance, package_of, read_instances

MEASURES = (
    "antiphon.run.loop",
    "antiphon.rollout",
    "antiphon_envs.mini_swe.environment",
    "antiphon_envs.mini_swe.boxes",
    "antiphon.sandbox.sessions.shell_sandbox",
)

TASK, SEED, TURNS = "mini_swe", 0, 30
LOOKS = DistributionConfig(kind="lognormal", mean=7, spread=0.8, minimum=1, maximum=TURNS - 3)  # turns
TOKENS = DistributionConfig(kind="lognormal", mean=100, spread=0.6, minimum=5)  # of a turn
ENGINE = EngineSpeed(slots=64, iteration=0.008, prefill=5e-7, load=0.2)  # what a conversation has said is in its cache
LEARNER = LearnerSpeed(step=8.0, publish=0.2)
SUCCESS = 0.5
COMMON = {
    "groups_per_step": 2,
    "group_size": 4,
    "max_turns": TURNS,
    "environment_timeout": 300.0,
    "sampling": {"max_tokens": 1000},
}
SETTINGS: dict[str, dict[str, Any]] = {
    "synchronous": {"async_ratio": 0},
    "asynchronous": {"async_ratio": 1, "redundancy": 1, "extra_groups": 1, "order": "ready"},
}


class Script:
    """The policy, and the tokenizer of what it says: the first token of a prompt is the number of its instance, each token of a
    completion that of what it says."""

    eos_ids = (0,)

    def __init__(self, instances: list[Instance]) -> None:
        self.sayings = ["python -m pytest -q --tb=short {test}", "submit", "ls -la {folder}", "head -c 3000 {path}"]
        self.sayings += ["grep -rn 'def ' {folder} | head -50", "wc -l {folder}/*.py", "{mend}"]
        self._instances = {instance.id: number for number, instance in enumerate(instances)}
        self._all = instances

    def turn(self, request: GenerateRequest) -> int:
        """What is said in a turn: its number among all that can be said about all instances."""
        attempt, _, turn = request.id.rpartition("/")
        seed = derive(SEED, attempt)
        left = round(LOOKS.draw(seed, "looks")) - int(turn)
        if left > 0:
            said = int(generator(seed, "look", turn).integers(2, 6))
        else:
            mends = generator(seed, "mends").random() < SUCCESS
            said = {0: 6 if mends else 2, -1: 0}.get(left, 1)
        return 2 + int(request.tokens[0]) * len(self.sayings) + said

    def encode_prompt(self, messages: list[Message]) -> IntArray:
        tokens = np.ones(len(" ".join(m.content for m in messages)) // 4, np.int32)
        tokens[0] = self._instances[messages[0].content]
        return tokens

    def encode_observation(self, messages: list[Message], observation: Message, *, closed: bool = True) -> IntArray:
        return np.ones(len(observation.content) // 4, np.int32)

    def decode(self, tokens: IntArray) -> str:
        number, said = divmod(int(tokens[0]) - 2, len(self.sayings))
        instance = self._all[number]
        folder = instance.path.rpartition("/")[0]
        command = self.sayings[said].format(
            test=instance.tests[0], folder=folder, path=instance.path, mend=mending(instance)
        )
        return f"```bash\n{command}\n```"


def mending(instance: Instance) -> str:
    """The command that undoes a fault."""
    original = package_of(instance).files[instance.path][instance.start : instance.end]
    after = instance.start + len(instance.text.encode())
    program = f"path = {instance.path!r}\ntext = open(path, 'rb').read()\n"
    program += f"open(path, 'wb').write(text[:{instance.start}] + {original!r} + text[{after}:])"
    return f"python - <<'END'\n{program}\nEND"


class Silent:
    """A view that keeps each step's metrics."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    def start(self, name: str, note: str = "") -> None: ...

    def step(self, step: int, steps: int, metrics: Any, deadlines: Deadlines) -> None:
        self.steps.append(dict(metrics))

    def message(self, text: str) -> None: ...

    def close(self) -> None: ...


async def play(
    name: str, steps: int, instances: list[Instance], root: Path, stack: ExitStack
) -> list[dict[str, float]]:
    """A run; the metrics of its steps."""
    config = RunConfig(
        name=name,
        seed=SEED,
        steps=steps,
        model={"path": "scripted"},
        tasks=({"name": TASK, "prompts": {"source": "mini_swe"}, "environment": TASK, "reward": "environment_return"},),
        rollout={**COMMON, **SETTINGS[name.split("-")[0]]},
        checkpoint={"every": 0},
        record={"directory": str(root), "trackers": (), "live": "off"},
    )
    loop, deadlines, script, view = asyncio.get_running_loop(), Deadlines(), Script(instances), Silent()
    events = Events(loop.time, None)
    engine = SimulatedEngine(ENGINE, lambda request: round(TOKENS.draw(request.sampling.seed)))
    pool = EnginePool([engine], deadlines, config.rollout, events=events)
    learner = SimulatedLearner(LEARNER, Faults((), SEED, events), lambda: [engine])
    directory = RunDirectory.create(root, config.name)
    directory.write_config(dump(config))
    store = LedgerStore(directory.path)
    stack.callback(store.close)
    open_first_lineage(store)
    ledger = Ledger(store, events)

    async def generate(request: GenerateRequest) -> Completion:
        completion = await pool.generate(request)
        return replace(completion, tokens=np.full(len(completion.tokens), script.turn(request), np.int32))

    async def grade(prompt: Prompt, transcript: Transcript) -> Score:
        return environment_return(prompt, transcript)

    prompts = [
        Prompt(
            id=instance.id,
            task=TASK,
            messages=(Message("user", instance.id),),
            payload={"instance": msgspec.to_builtins(instance)},
        )
        for instance in instances
    ]
    episodes = EpisodeRunner(
        EpisodeContext(
            encoder=PromptEncoder(script), generate=generate, config=config.rollout, max_length=1 << 40, seed=SEED
        ),
        grade=grade,
        environments={TASK: environment_factory(TASK, {"turns": TURNS})},
    )
    rollouts = LocalRollouts(pool, episodes)
    training = make_local_training(config, ModelRoles(learner=learner))
    metrics = stack.enter_context(Metrics(directory.metrics, lineage=0))
    devices = SharedDevices(training, rollouts, shared=False)
    parts = Components(
        config=config,
        deadlines=deadlines,
        tasks=TaskData(mixture=Mixture([MixtureTask(name=TASK, prompts=prompts)], SEED)),
        rollouts=rollouts,
        weights=WeightPublisher(config, deadlines, devices, TransferContext(root)),
        record=RunRecord(directory=directory, ledger=ledger, metrics=metrics, view=view),
    )
    await Run(parts).train()
    await ledger.close()
    return view.steps


def main() -> None:
    """Both settings, twice; print the table, write the result."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--steps", type=int, default=7)
    options = arguments.parse_args()
    instances = [instance for instance in read_instances() if instance.package == "mpmath"]
    found: dict[str, list[dict[str, float]]] = {name: [] for name in SETTINGS}
    speedups = []
    for turn in range(2):
        seconds = []
        for name in SETTINGS:
            with tempfile.TemporaryDirectory() as root, ExitStack() as stack:
                steps = asyncio.run(play(f"{name}-{turn}", options.steps, instances, Path(root), stack))
            found[name] += steps[1:]
            seconds.append(fmean(step["step/seconds"] for step in steps[1:]))
            print(name, *(f"{step['step/seconds']:.1f}" for step in steps), flush=True)
        speedups.append(seconds[0] / seconds[1])
    figures, rows = {}, []
    for name, steps in found.items():
        measures = {"step_seconds": "step/seconds", "reward": "reward/mean", "age_mean": "age/mean"}
        numbers = {key: fmean(step[measure] for step in steps) for key, measure in measures.items()}
        rows.append([name, *(f"{number:.3f}" for number in numbers.values())])
        figures |= {f"{name}_{key}": number for key, number in numbers.items()}
    figures |= {"speedup": fmean(speedups), "speedup_lower": min(speedups), "speedup_higher": max(speedups)}
    print("\n" + table(["setting", *numbers], rows) + f"\n\n{figures['speedup']:.2f} times as fast")
    print(f"written to {write_result('mini_swe_async', figures, measures=MEASURES)}")


if __name__ == "__main__":
    main()
