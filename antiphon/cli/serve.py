"""Commands that serve over HTTP: serve, sandbox serve, sandbox probe."""

import os
import re
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from antiphon.cli.arguments import Settings, SettingsFile
from antiphon.cli.configs import limit_threads, require_models
from antiphon.cli.errors import exit_on_error
from antiphon.cli.tables import print_line, print_table
from antiphon.core.errors import ConfigError
from antiphon.sandbox.base import TOKEN_VARIABLE

if TYPE_CHECKING:
    from antiphon.core.workers import WorkerHandle

SERVE_TOKEN_VARIABLE = "ANTIPHON_SERVE_TOKEN"
HOST_TOKENS_VARIABLE = "ANTIPHON_SANDBOX_HOST_TOKENS"

sandbox = typer.Typer(help="Isolated execution of untrusted code.", no_args_is_help=True)


def serve(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Model directory, or run directory: its newest checkpoint is served.")
    ],
    overrides: Settings = None,
    config: SettingsFile = None,
    token_file: Annotated[
        Path | None,
        typer.Option(
            help=f"File with the clients' token. Default: {SERVE_TOKEN_VARIABLE}, or else a new random token."
        ),
    ] = None,
) -> None:
    """Serve a model with OpenAI- and Anthropic-compatible endpoints, to clients that have the token."""
    with exit_on_error(Path(model)):
        from antiphon.core.config import add_import_folder

        limit_threads()
        token, given = _read_token(token_file, SERVE_TOKEN_VARIABLE)
        from antiphon.service.model_server import load_serving_config
        from antiphon.service.model_server import serve as serve_model

        if config is not None and not config.resolve().is_relative_to(Path(model).resolve()):
            add_import_folder(config)
        target, settings = load_serving_config(model, config, overrides or (), print_line)
        require_models([target])
        if not given:
            print(f"token: {token}", flush=True)
        serve_model(target, settings, token, print_line)


@sandbox.command(name="serve")
def serve_sandboxes(
    overrides: Settings = None,
    config: SettingsFile = None,
    token_file: Annotated[
        Path | None,
        typer.Option(help=f"File with the clients' token. Default: {TOKEN_VARIABLE}, or else a new random token."),
    ] = None,
    environment: Annotated[
        list[str] | None, typer.Option(help="package.module:attribute of another environment that clients may create.")
    ] = None,
    host_token_file: Annotated[
        Path | None,
        typer.Option(
            help=f"File with the token of each of the hosts, in their order. Default: {HOST_TOKENS_VARIABLE}."
        ),
    ] = None,
) -> None:
    """Serve sandboxes and environments with ROCK's HTTP interface, to clients that have the token."""
    with exit_on_error():
        from antiphon.core.config import add_import_folder, load
        from antiphon.sandbox.service.app import serve as serve_service
        from antiphon.sandbox.service.config import ServiceConfig
        from antiphon.tasks.environments import ENVIRONMENTS, GEM_NAMES, environment_factory, required_options

        settings = load(config, overrides or (), model=ServiceConfig)
        if config is not None:
            add_import_folder(config)
        token, given = _read_token(token_file, TOKEN_VARIABLE)
        host_tokens = _read_host_tokens(host_token_file, len(settings.hosts))
        if settings.hosts and environment:
            raise ConfigError("has no effect with hosts; give it to the service on each host", key="--environment")
        names = [name for name in ENVIRONMENTS.known if not required_options(name)]
        names += [name for name in environment or () if "prompt" not in required_options(name)]
        for name in names:
            environment_factory(name, {})
        serve_service(
            settings,
            token,
            [*names, *GEM_NAMES],
            spawn_environment,
            lambda address: print(address if given else f"{address}\ntoken: {token}", flush=True),
            host_tokens,
        )


@sandbox.command(name="probe")
def probe_sandbox() -> None:
    """Show which isolation mechanisms work on this machine; exit code 2 if they give less than level 3."""
    with exit_on_error():
        from antiphon.sandbox.base import Level
        from antiphon.sandbox.isolation.levels import probe, require_level

        found = probe()
        problems = found.problems
        rows = {name: problems.get(name, "yes") for name in ("landlock", "seccomp", "own_user", "namespaces")}
        rows |= {name: problems.get(name, "yes") for name in ("memory_groups", "landlock_scopes", *problems)}
        level = found.level
        print_table("works here", "", {**rows, "level": "none" if level is None else f"{level} ({level.name.lower()})"})
        require_level(Level.ISOLATED)


def spawn_environment(name: str) -> "WorkerHandle":
    """Start an environment of the sandbox service in a process of its own."""
    from antiphon.cluster.config import ClusterConfig
    from antiphon.cluster.local import LocalCluster

    factory = "antiphon.tasks.environments.worker:EnvironmentWorker"
    return LocalCluster(ClusterConfig(fork=False)).spawn("environment", factory, name)


def _read_token(file: Path | None, variable: str) -> tuple[str, bool]:
    """Return the token of a service and whether the user gave it; a token in the environment is removed from there."""
    text, source = _read_secret(file, variable)
    if text is None:
        return secrets.token_urlsafe(24), False
    return _check_token(text.strip() if file else text, source), True


def _read_host_tokens(file: Path | None, hosts: int) -> list[str]:
    """Return the tokens of the hosts of a sandbox service, which spaces or line ends separate."""
    text, source = _read_secret(file, HOST_TOKENS_VARIABLE)
    tokens = [_check_token(token, source) for token in (text or "").split()]
    if len(tokens) != hosts:
        message = f"{hosts} hosts need as many tokens, in their order, but there are {len(tokens)}"
        raise ConfigError(message, key="hosts", path=source)
    return tokens


def _read_secret(file: Path | None, variable: str) -> tuple[str | None, str]:
    """Return the text of a file or of an environment variable, which is removed, and the name of its source."""
    text = os.environ.pop(variable, None) or None
    if file is None:
        return text, variable
    try:
        return file.read_text(encoding="ascii"), str(file)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot be read as a token: {error}", path=str(file)) from error


def _check_token(token: str, source: str) -> str:
    if not re.fullmatch(r"[\x21-\x7e]{8,}", token):
        raise ConfigError("a token has at least 8 characters, printable ones of ASCII and no spaces", path=source)
    return token
