"""The command line. Modules are imported inside the commands, so that `antiphon --help` answers at once.

Exit codes: 0 done, 1 the run ended short of what the configuration demands, 2 the user can mend it (one message, no
traceback), 130 interrupted. Anything else is a bug and shows its traceback.
"""

import os
import re
import secrets
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from antiphon import __version__
from antiphon.core.errors import AntiphonError, ConfigError, printable
from antiphon.sandbox.base import TOKEN_VARIABLE

if TYPE_CHECKING:
    from types import ModuleType

    from antiphon.core.workers import WorkerHandle
    from antiphon.run.config import RunConfig

SERVE_TOKEN_VARIABLE = "ANTIPHON_SERVE_TOKEN"

app = typer.Typer(
    help="Asynchronous reinforcement-learning post-training for language models and agents.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

ConfigPath = Annotated[str, typer.Argument(metavar="CONFIG", help="YAML file of the run.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="A.B=C", help="Changes to the file, such as rollout.group_size=4.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the resolved configuration and what it amounts to.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace a run of the same name.")]
CodeFolder = Annotated[Path | None, typer.Option(help="Folder of the modules that the run's configuration names.")]
Trust = Annotated[bool, typer.Option("--trust", help="Import, run and open whatever the run's configuration names.")]


def main() -> None:
    """Entry point of the `antiphon` command."""
    app()


@app.callback(invoke_without_command=True)
def _version(
    version: Annotated[bool, typer.Option("--version", help="Print the version.", is_eager=True)] = False,
) -> None:
    if version:
        print(f"antiphon {__version__}")
        raise typer.Exit


@app.command()
def train(
    config: ConfigPath,
    overrides: Overrides = None,
    dry_run: DryRun = False,
    overwrite: Overwrite = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run, from its newest checkpoint.")] = False,
) -> None:
    """Train with reinforcement learning, after the supervised warm start if the configuration has one."""
    with _outcome():
        run = _load(config, overrides)
        if overwrite and resume:
            raise ConfigError("give --overwrite or --resume, not both")
        if dry_run:
            _show(run)
            return
        for model in run.models:
            _require_model(model)
        if run.placement.auto:
            run = _placed(run)
        from antiphon.run.build import train as build_and_train

        raise typer.Exit(build_and_train(run, overwrite=overwrite, resume=resume))


@app.command()
def sft(config: ConfigPath, overrides: Overrides = None, dry_run: DryRun = False, overwrite: Overwrite = False) -> None:
    """Fine-tune on the responses that the prompts carry; reads the configuration's `sft`."""
    with _outcome():
        run = _load(config, overrides)
        if run.sft is None:
            from antiphon.core.errors import ConfigError

            raise ConfigError(f"{config}: sft: is missing; give at least sft.steps")
        if dry_run:
            _show(run)
            return
        _require_model(run.model.path)
        from antiphon.run.build import sft as build_and_tune

        raise typer.Exit(build_and_tune(run, overwrite=overwrite))


@app.command()
def dpo(config: ConfigPath, overrides: Overrides = None, dry_run: DryRun = False, overwrite: Overwrite = False) -> None:
    """Train a policy on pairs of responses, of which one was preferred: DPO or IPO."""
    _offline("DpoConfig", "dpo", config, overrides, dry_run, overwrite)


@app.command(name="reward-model")
def reward_model(
    config: ConfigPath, overrides: Overrides = None, dry_run: DryRun = False, overwrite: Overwrite = False
) -> None:
    """Train a reward model on pairs of responses, of which one was preferred."""
    _offline("RewardModelConfig", "reward_model", config, overrides, dry_run, overwrite)


@app.command()
def distill(
    config: ConfigPath, overrides: Overrides = None, dry_run: DryRun = False, overwrite: Overwrite = False
) -> None:
    """Train a student to say what a teacher would of the responses that the prompts carry."""
    _offline("DistillConfig", "distill", config, overrides, dry_run, overwrite)


@app.command(name="eval")
def evaluate(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Model directory, for example of a checkpoint.")],
    config: ConfigPath,
    overrides: Overrides = None,
    samples: Annotated[int | None, typer.Option(help="Completions a prompt, k of pass@k.", min=1)] = None,
    temperature: Annotated[
        float | None,
        typer.Option(help="0 is greedy. By default 0 for one completion a prompt, 1 for several.", min=0.0),
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Use the first so many test prompts; 0 uses all.", min=0)] = None,
    code: CodeFolder = None,
    trust: Trust = False,
) -> None:
    """Measure a model on the test prompts: accuracy and pass@k, with confidence intervals. Of the configuration that a run
    keeps of itself, names are resolved with --code or --trust only."""
    with _outcome():
        run = _load_to_evaluate(Path(config), overrides or [], code, trust)
        _require_model(model)
        from antiphon.run.build import evaluate_model

        settings = run.evaluation
        result = evaluate_model(
            model,
            run,
            samples=settings.samples if samples is None else samples,
            temperature=temperature,
            limit=settings.limit if limit is None else limit,
        )
        _table("measure", "value", _flat(result))


@app.command()
def simulate(
    scenario: Annotated[str | None, typer.Argument(metavar="SCENARIO", help="YAML file of the scenario.")] = None,
    overrides: Overrides = None,
    events: Annotated[Path | None, typer.Option(help="Write every event there, one JSON object a line.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Write a picture there, for ui.perfetto.dev.")] = None,
    chaos: Annotated[int, typer.Option(help="Instead: so many drawn scenarios with faults, each checked.")] = 0,
    crashes: Annotated[int, typer.Option(help="Instead: so many that crash and go on, on a disk that forgets.")] = 0,
    seed: Annotated[int, typer.Option(help="Of the first drawn scenario.")] = 0,
) -> None:
    """Play a run in virtual time: the real loop and scheduler, on parts that take their time and compute nothing."""
    with _outcome():
        if chaos:
            from antiphon.simulate.chaos import run_chaos

            _table("how runs ended", "seeds", run_chaos(range(seed, seed + chaos), events, print))
            return
        if crashes:
            from antiphon.simulate.crashes import run_crashes

            _table("how lives ended", "times", run_crashes(range(seed, seed + crashes)))
            return
        if scenario is None:
            raise ConfigError("give the YAML file of a scenario, or --chaos N")
        from antiphon.core.config import load
        from antiphon.record.events import write_trace
        from antiphon.simulate.scenario import ScenarioConfig
        from antiphon.simulate.scenario import simulate as play

        with ExitStack() as stack:
            if trace is not None and events is None:
                events = Path(stack.enter_context(TemporaryDirectory())) / "events.jsonl"
            sink = stack.enter_context(events.open("w", encoding="utf-8")) if events else None
            outcome = play(load(scenario, overrides or (), model=ScenarioConfig), sink)
            if sink and trace and events:
                sink.flush()
                write_trace(events, trace)
        _table("measure", "value", outcome.table())


@app.command()
def plan(
    config: ConfigPath,
    overrides: Overrides = None,
    probe: Annotated[
        bool, typer.Option("--probe", help="Measure speeds first: the run itself, for two minutes.")
    ] = False,
    speeds: Annotated[Path | None, typer.Option(help="Use the speeds that a probe left in this file.")] = None,
    device: Annotated[str, typer.Option(help="On GPUs that are not here: h100, h200, h800, a100, h20 or b200.")] = "",
    devices: Annotated[int, typer.Option(help="Also find how best to divide so many devices.", min=0)] = 0,
) -> None:
    """Say what a run will be like: step time, who is idle, how stale, memory, and how to divide devices."""
    with _outcome():
        run = _load(config, overrides)
        from antiphon.run.model_files import check_model_path
        from antiphon.simulate import sizes
        from antiphon.simulate.devices import find_device, resolve_on_devices
        from antiphon.simulate.planner import Speeds, iterate_splits, predict
        from antiphon.simulate.probe import SECONDS, measure_devices

        if bool(probe) + bool(speeds) + bool(device) > 1:
            raise ConfigError("give one of --probe, --speeds and --device")
        check_model_path(run.model.path)
        if run.engine.also:
            raise ConfigError("engine.also: the planner takes all engines of a pool for alike: leave it out")
        gpu, lent = (
            (find_device(device), len(resolve_on_devices(run, device).lent.get("engine", ()))) if device else (None, 0)
        )
        model = sizes.inspect(run)
        if speeds:
            from antiphon.core.config import load

            known = load(speeds, model=Speeds)
        elif probe:
            known = measure_devices(run, SECONDS, max(devices, 1))
        else:
            known = sizes.estimate(run, model, gpu or sizes.here(run), lent)
        _table("on average", "predicted", predict(run, known, lent=lent).table())
        _table("memory", "MiB", {name: f"{size / 2**20:,.0f}" for name, size in model.memory(run).items()})
        if gpu:
            memory = sizes.device_memory(model, run, gpu)
            _table(f"memory of each {device}", "GiB", {name: f"{size / 2**30:,.1f}" for name, size in memory.items()})
            print("\n".join(f"does not fit: {misfit}" for misfit in sizes.find_misfits(model, run, gpu)) or "fits")
        if devices:
            found = {str(split): split.seconds for split in iterate_splits(run, known, devices)}
            _table(f"{devices} devices", "seconds a step", found)
            print(f"best: {min(found, key=lambda name: found[name])}")


@app.command()
def check(
    config: ConfigPath,
    overrides: Overrides = None,
    prompts: Annotated[int, typer.Option(help="Prompts of each task to try its reward on.", min=1)] = 16,
) -> None:
    """Try the rewards before a run: right answers, empty ones and garbage; range, repeatability, speed; known reward hacks."""
    with _outcome():
        run = _load(config, overrides)
        from antiphon.run.build import check_rewards

        found = check_rewards(run, prompts)
        for finding in found:
            rows = {"right answers": finding.oracle, "empty ones": finding.empty, "garbage": finding.garbage}
            scores = {f"score of {kind}": "none" if mean is None else mean for kind, mean in rows.items()}
            timing = {"gradings": finding.gradings, "seconds, the slowest": finding.seconds}
            timing |= {"attacks": finding.attacks, "attacks that were paid": len(finding.holes)}
            _table(f"task {finding.task}", "", {**scores, **timing})
        problems = [
            f"task {finding.task}: {problem}"
            for finding in found
            for problem in (*finding.problems, *(f"reward hack: {hole}" for hole in finding.holes))
        ]
        print("\n".join([*problems, f"problems: {len(problems)}"]))
        raise typer.Exit(1 if problems else 0)


RunPath = Annotated[Path, typer.Argument(metavar="RUN", help="Directory of the run, such as runs/tiny_arithmetic.")]


@app.command()
def audit(run: RunPath) -> None:
    """Check a run from its directory alone: print what became of every attempt, and every promise that was broken."""
    with _outcome(run):
        from antiphon.inspect.audit import audit as check

        found = check(run)
        for lineage, balance in found.balance.items():
            _table(f"lineage {lineage}", "attempts", {**balance, "all": sum(balance.values())})
        for violation in found.violations:
            _say(violation)
        print(f"violations: {len(found.violations)}")
        raise typer.Exit(1 if found.violations else 0)


@app.command()
def why(
    run: RunPath,
    name: Annotated[str, typer.Argument(metavar="ID", help="[lineage:]group.sibling.try, and @token for one token.")],
) -> None:
    """Say where a sample or a token came from, and what became of it."""
    with _outcome(run):
        from antiphon.inspect.forensics import why as explain

        _table("of", name, dict(explain(run, name)))


@app.command()
def diff(run: RunPath, other: RunPath) -> None:
    """Name the first thing in which two runs differ: configuration, code, data, sample or number."""
    with _outcome(run, other):
        from antiphon.inspect.forensics import diff as compare

        difference = compare(run, other)
        _say(difference or "no difference")
        raise typer.Exit(1 if difference else 0)


@app.command()
def replay(
    run: RunPath,
    code: CodeFolder = None,
    trust: Trust = False,
    weights: Annotated[
        bool, typer.Option("--weights", help="Train again, too, from the first checkpoint that is there.")
    ] = False,
) -> None:
    """Let what a run recorded drive the scheduler and the stages again: every batch must be the same, byte for byte."""
    with _outcome(run):
        config, recorded = _load_recorded(run)
        from antiphon.inspect.replay import ReplayMismatch, requires_models
        from antiphon.inspect.replay import replay as play_again

        needed = (*recorded.REPLAY, *(recorded.MODELS if requires_models(config, weights) else ()))
        recorded.require_trust(run, config, needed, code=code, trust=trust)
        try:
            _say(f"{play_again(run, config, weights=weights, tell=_say)} steps, no difference")
        except ReplayMismatch as difference:
            _say(str(difference))
            raise typer.Exit(1) from difference


@app.command()
def regrade(
    run: RunPath,
    reward: Annotated[str, typer.Option(help="Another reward, by name or package.module:attribute.")] = "",
    option: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="Of that reward; may be repeated.")
    ] = None,
    task: Annotated[str, typer.Option(help="The only task that gets it.")] = "",
    code: CodeFolder = None,
    trust: Trust = False,
) -> None:
    """Grade what a run recorded again, with its own rewards or another one, and say how far the scores agree."""
    with _outcome(run):
        config, recorded = _load_recorded(run)
        from antiphon.inspect.regrade import CLASSES, replace_reward
        from antiphon.inspect.regrade import regrade as grade_again

        if (option or task) and not reward:
            raise ConfigError("--option and --task are of the reward that --reward names")
        given: list[str] = []
        if reward:
            config = replace_reward(config, reward, _options(option or []), task)
            given = [f"tasks.{number}.reward" for number, each in enumerate(config.tasks) if task in ("", each.name)]
        judged = any(each.judge for each in config.tasks)
        needed = (*recorded.REGRADE, *(recorded.ENGINES if judged else ()))
        recorded.require_trust(run, config, needed, code=code, trust=trust, given=given)
        found = grade_again(run, config, re.sub(r"\W+", "_", reward) or "again")
        rows = {f"{then}, now {now}": found.confusion.get((then, now), 0) for then in CLASSES for now in CLASSES}
        _table("was", "attempts", {name: count for name, count in rows.items() if count})
        _table("of", "share whose score changed", found.by_step)
        _say(f"{found.changed} of {found.attempts} scores changed; {found.path}")


def _options(pairs: list[str]) -> dict[str, Any]:
    """KEY=VALUE pairs, values as YAML has them."""
    import yaml

    split = [pair.partition("=") for pair in pairs]
    for pair, (key, found, _) in zip(pairs, split, strict=True):
        if not (key and found):
            raise ConfigError(f"--option {pair!r} must be KEY=VALUE")
    return {key: yaml.safe_load(value) for key, _, value in split}


@app.command()
def export(
    run: RunPath, target: Annotated[Path, typer.Argument(metavar="DIRECTORY", help="Where the model goes.")]
) -> None:
    """Copy the newest whole checkpoint of a run as a model directory, as transformers and engines load it."""
    with _outcome(run):
        from antiphon.record.checkpoint import export as copy

        _say(str(copy(run / "checkpoints", target, _say)))


@app.command()
def serve(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Model directory, or that of a run: its newest checkpoint.")
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Settings, such as port=8000 engine.slots=16.")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file of settings.")] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(help=f"File with the token of clients; otherwise {SERVE_TOKEN_VARIABLE}, or a new one."),
    ] = None,
) -> None:
    """Serve a model over HTTP, as OpenAI and Anthropic do, to clients that have the token."""
    with _outcome(Path(model)):
        from antiphon.core.config import add_import_folder, set_environment

        set_environment(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")
        token, given = _token(token_file, SERVE_TOKEN_VARIABLE)
        from antiphon.service.model_server import load_serving_config
        from antiphon.service.model_server import serve as run

        if config is not None and not config.resolve().is_relative_to(Path(model).resolve()):
            add_import_folder(config)
        target, settings = load_serving_config(model, config, overrides or (), _say)
        _require_model(target)
        if not given:
            print(f"token: {token}", flush=True)
        run(target, settings, token, _say)


sandbox = typer.Typer(help="Where untrusted code runs.", no_args_is_help=True)
app.add_typer(sandbox, name="sandbox")


@sandbox.command(name="serve")
def serve_sandboxes(
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Settings, such as port=8080 warm=8.")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file of settings.")] = None,
    token_file: Annotated[
        Path | None, typer.Option(help=f"File with the token of clients; otherwise {TOKEN_VARIABLE}, or a new one.")
    ] = None,
    environment: Annotated[
        list[str] | None, typer.Option(help="package.module:attribute of an environment that clients may make, too.")
    ] = None,
) -> None:
    """Serve sandboxes and environments over HTTP, as ROCK does, to clients that have the token."""
    with _outcome():
        from antiphon.core.config import add_import_folder, load
        from antiphon.sandbox.service.app import serve
        from antiphon.sandbox.service.config import ServiceConfig
        from antiphon.tasks.environments import ENVIRONMENTS, GEM_NAMES, environment_factory, required_options

        settings = load(config, overrides or (), model=ServiceConfig)
        if config is not None:
            add_import_folder(config)
        token, given = _token(token_file, TOKEN_VARIABLE)
        names = [name for name in ENVIRONMENTS.built_in if not required_options(name)]
        names += [name for name in environment or () if "prompt" not in required_options(name)]
        for name in names:
            environment_factory(name, {})
        serve(
            settings,
            token,
            [*names, *GEM_NAMES],
            _spawn_environment,
            lambda address: print(address if given else f"{address}\ntoken: {token}", flush=True),
        )


@sandbox.command(name="probe")
def probe_sandbox() -> None:
    """Show what keeps untrusted code apart here; exit code 2 if that is less than level 3."""
    with _outcome():
        from antiphon.sandbox.base import Level
        from antiphon.sandbox.isolation.levels import probe, require

        found = probe()
        problems = found.problems
        rows = {name: problems.get(name, "yes") for name in ("landlock", "seccomp", "own_user", "namespaces")}
        rows |= {name: problems.get(name, "yes") for name in ("memory_groups", "landlock_scopes", *problems)}
        level = found.level
        _table("works here", "", {**rows, "level": "none" if level is None else f"{level} ({level.name.lower()})"})
        require(Level.ISOLATED)


@app.command()
def doctor(
    clean: Annotated[
        bool, typer.Option("--clean", help="First remove the weights that killed runs of yours left in shared memory.")
    ] = False,
) -> None:
    """Show what this machine has for Antiphon, and how to install what it lacks."""
    with _outcome():
        if clean:
            from antiphon.weights.shared_directory import remove_abandoned_directories

            print("\n".join(["removed:", *map(str, remove_abandoned_directories())]))
        _table("machine", "", {**_software(), **_hardware()})
        _table("optional", "", _optional())


# --- what the commands share -------------------------------------------------------------------------------------------


@contextmanager
def _outcome(*runs: Path) -> Iterator[None]:
    """Turn the errors that the user can mend, and Ctrl-C, into a message and an exit code. Nothing in `runs`, which are only
    read, is imported meanwhile; their errors have one line."""
    try:
        for run in runs:
            _forbid_imports_from(run)
        yield
    except AntiphonError as error:
        message = "; ".join(str(error).splitlines()) if runs else str(error)
        print(f"antiphon: {printable(message)}", file=sys.stderr)
        raise typer.Exit(2) from error
    except KeyboardInterrupt as interrupt:
        print("antiphon: interrupted", file=sys.stderr)
        raise typer.Exit(130) from interrupt


def _forbid_imports_from(run: Path) -> None:
    """Take a run's folder off the import path of this process and of those that it starts. What is installed there stays."""
    folder = run.resolve()
    installed = [Path(prefix).resolve() for prefix in (sys.prefix, sys.base_prefix)]

    def stays(entry: str) -> bool:
        path = Path(entry or os.curdir).resolve()
        return not path.is_relative_to(folder) or any(path.is_relative_to(prefix) for prefix in installed)

    sys.path[:] = [entry for entry in sys.path if stays(entry)]


def _is_recorded(path: Path) -> bool:
    """Return True if a configuration file is the one that a run keeps of itself."""
    beside = path.parent
    return path.name == "config.yaml" and ((beside / "ledger.db").exists() or (beside / "checkpoints").exists())


def _say(text: str) -> None:
    """Print a text that may come from a run."""
    print(printable(text), flush=True)


def _load_recorded(run: Path) -> "tuple[RunConfig, ModuleType]":
    """The configuration of a run that is only read, and the module that says what it may name."""
    from antiphon.core.config import set_environment

    set_environment(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")
    from antiphon.inspect import recorded_config as recorded

    return recorded.load_recorded(run), recorded


def _load_to_evaluate(path: Path, overrides: list[str], code: Path | None, trust: bool) -> "RunConfig":
    """The configuration of an evaluation; that of a run is only read."""
    recorded_by = path.parent if _is_recorded(path) else None
    if recorded_by is not None:
        _forbid_imports_from(recorded_by)
    from antiphon.core.config import add_import_folder, set_environment

    set_environment(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")
    if code is not None:
        add_import_folder(code / "config.yaml")
    if recorded_by is None:
        return _load(str(path), overrides)
    from antiphon.inspect import recorded_config as recorded

    run = recorded.load_recorded(path.parent, overrides)
    given = [override.partition("=")[0].strip() for override in overrides]
    recorded.require_trust(path.parent, run, recorded.EVALUATION, code=code, trust=trust, given=given)
    return run


def _load(path: str, overrides: list[str] | None) -> "RunConfig":
    # Before numpy or torch start threads of their own: workers set their number themselves, and what the controller
    # computes is small.
    from antiphon.core.config import add_import_folder, load, set_environment

    set_environment(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")
    from antiphon.run.config import RunConfig

    run = load(path, overrides or (), model=RunConfig)
    add_import_folder(path)
    return run


def _placed(run: "RunConfig") -> "RunConfig":
    """The run as the planner divides this machine's devices: by what a probe left, else by what sizes alone say."""
    from antiphon.cluster.devices import this_machine
    from antiphon.core.config import load
    from antiphon.simulate.planner import Speeds, split_devices
    from antiphon.simulate.probe import speeds_path

    measured = speeds_path(run)
    if measured.is_file():
        speeds, by = load(measured, model=Speeds), f"speeds in {measured}"
    else:
        from antiphon.simulate import sizes

        known = sizes.estimate(run, sizes.inspect(run), sizes.here(run))
        speeds, by = known, "sizes alone; `antiphon plan --probe --devices` measures speeds"
    found, split = split_devices(run, speeds, this_machine())
    print(f"placement: {split} (learner {found.placement.learner}; engines {found.placement.engine}), by {by}")
    return found


def _spawn_environment(name: str) -> "WorkerHandle":
    """An environment of the sandbox service, in a process of its own."""
    from antiphon.cluster.config import ClusterConfig
    from antiphon.cluster.local import LocalCluster

    factory = "antiphon.tasks.environments.worker:EnvironmentWorker"
    return LocalCluster(ClusterConfig(fork=False)).spawn("environment", factory, name)


def _token(file: Path | None, variable: str) -> tuple[str, bool]:
    """The token of a service, and whether it was given. What is in the environment is taken out of it."""
    token = os.environ.pop(variable, None) or None
    where = variable
    if file is not None:
        where = str(file)
        try:
            token = file.read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{file}: cannot be read as a token: {error}") from error
    if token is None:
        return secrets.token_urlsafe(24), False
    if not re.fullmatch(r"[\x21-\x7e]{8,}", token):
        raise ConfigError(f"{where}: a token has at least 8 characters, printable ones of ASCII and no spaces")
    return token, True


def _offline(kind: str, verb: str, path: str, overrides: list[str] | None, dry_run: bool, overwrite: bool) -> None:
    """Run the verb of `antiphon.offline.run` with a configuration of this kind."""
    with _outcome():
        from antiphon.core.config import add_import_folder, dump, load, set_environment

        set_environment(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")
        from antiphon.offline import config as offline_config

        config = load(path, overrides or (), model=getattr(offline_config, kind))
        add_import_folder(path)
        if dry_run:
            print(dump(config), end="")
            print("\n# What this amounts to:")
            for name, number in config.derived().items():
                print(f"#   {name:<38}{number:>14,}")
            return
        for model in config.models:
            _require_model(model)
        from antiphon.offline import run as offline

        getattr(offline, verb)(config, overwrite=overwrite)


def _require_model(path: str) -> None:
    from antiphon.record.checkpoint import check_model
    from antiphon.run.model_files import check_model_path, check_weights

    check_model_path(path)
    check_model(Path(path))
    check_weights(Path(path))


def _show(run: "RunConfig") -> None:
    """The resolved configuration as YAML, and what it amounts to as comments, so that the output is itself a recipe."""
    from antiphon.core.config import dump
    from antiphon.run.launch import check_meshes
    from antiphon.run.memory import memory_estimate
    from antiphon.run.model_files import count_parameters

    check_meshes(run, Path(run.model.path))
    print(dump(run), end="")
    print("\n# What this amounts to:")
    for name, number in run.derived().items():
        print(f"#   {name:<38}{number:>14,}")
    parameters = count_parameters(run.model.path)
    if parameters is None and (path := Path(run.model.path) / "config.json").is_file():
        from antiphon.simulate.sizes import Architecture

        parameters = Architecture.read(path.parent).parameters
    if parameters is not None:
        print(f"# Memory for {parameters:,} parameters, without activations and KV caches:")
        for name, size in memory_estimate(parameters, run).items():
            print(f"#   {name:<38}{size / 2**20:>10,.0f} MiB")


def _table(left: str, right: str, rows: Mapping[str, object]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(show_header=True, header_style="bold")
    for header in (left, right):
        table.add_column(Text(printable(header)))
    for name, value in rows.items():
        shown = f"{value:.4f}" if isinstance(value, float) else str(value)
        table.add_row(Text(printable(name)), Text(printable(shown)))
    Console().print(table)


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, object]:
    """Nested measures under dotted names; an interval as `low – high`."""
    flat: dict[str, object] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat.update(_flat(value, f"{prefix}{name}."))
        elif isinstance(value, tuple | list) and len(value) == 2:
            flat[prefix + name] = f"{value[0]:.4f} – {value[1]:.4f}"
        else:
            flat[prefix + name] = value
    return flat


# --- doctor ------------------------------------------------------------------------------------------------------------

# Distribution, and the extra of ours that installs it.
OPTIONAL = {
    "ray": "ray",
    "vllm": "vllm",
    "sglang": "sglang",
    "deepspeed": "deepspeed",
    "megatron-core": "megatron",
    "peft": "peft",
    "gymnasium": "envs",
    "bm25s": "envs",
    "rapidfuzz": "envs",
    "mcp": "envs",
    "tensorboard": "tensorboard",
    "wandb": "wandb",
}


def _installed(distribution: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _software() -> dict[str, str]:
    import platform

    rows = {"python": platform.python_version(), "antiphon": __version__}
    for name in ("torch", "transformers", "datasets", "numpy"):
        rows[name] = _installed(name) or "missing: pip install -e ."
    return rows


def _hardware() -> dict[str, str]:
    import shutil
    from pathlib import Path

    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    shared = Path("/dev/shm")
    has_affinity = hasattr(os, "sched_getaffinity")  # Linux
    return {
        "CPUs of this process": str(len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count()),
        "memory": f"{memory / 2**30:.1f} GiB",
        "shared memory": f"{shutil.disk_usage(shared).free / 2**30:.1f} GiB free" if shared.is_dir() else "none",
        "CUDA devices": _cuda(),
    }


def _cuda() -> str:
    if _installed("torch") is None:
        return "unknown without torch"
    import torch

    if not torch.cuda.is_available():
        return "none"
    return ", ".join(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))


def _optional() -> dict[str, str]:
    return {name: _installed(name) or f"not installed: pip install -e '.[{extra}]'" for name, extra in OPTIONAL.items()}


if __name__ == "__main__":
    main()
