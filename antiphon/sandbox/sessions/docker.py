"""Starts shell sandboxes as docker containers. They have the commands of an image.

The image needs bash, the usual GNU commands, tar, `setsid`, and python3 if Python programs run or a network is allowed. It is
never fetched. Each sandbox has a user id that no other process of this machine has, so that its processes can be counted,
unless it keeps the image as it was built.
"""

import asyncio
import secrets
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

from antiphon.core.config import environment_with
from antiphon.core.errors import SandboxError, UnsupportedError
from antiphon.sandbox.isolation.docker_profile import docker_profile
from antiphon.sandbox.sessions.config import CONTROL, VARIABLES, WORK, Launched, ShellSandboxConfig
from antiphon.sandbox.sessions.egress import PROXIES

FIRST_USER, USERS = 1 << 30, 1 << 30  # ids that no system assigns
HARDENED = ("--security-opt", "no-new-privileges", "--cap-drop", "ALL", "--network", "none")
# Capabilities that a package manager needs as the image's root; docker gives more by default.
BUILT_WITH = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "NET_BIND_SERVICE", "SETGID", "SETUID")


async def launch(config: ShellSandboxConfig, directory: Path, keeper: str) -> Launched:
    """Start a container whose process 1 runs `keeper`, a program for bash. The container is removed when it ends.

    Raises:
        UnsupportedError: docker is missing.
        SandboxError: docker failed.
    """
    if shutil.which("docker") is None:
        message = f"the image {config.image} needs docker, which is not installed here"
        raise UnsupportedError(message, key="image", value=config.image)
    name = f"antiphon-{secrets.token_hex(8)}"
    try:
        arguments = ("--detach", "--rm", "--name", name, *_arguments(config, directory), "-c", keeper)
        await _docker("run", *arguments, variables=_hidden(config))
        first = int(await _docker("inspect", "--format", "{{.State.Pid}}", name))
        if not first:
            raise SandboxError(f"a container of the image {config.image} ended at once")
        quiet = subprocess.DEVNULL
        process = subprocess.Popen(["docker", "wait", name], stdin=quiet, stdout=quiet, stderr=quiet)
        return Launched(process=process, first=first)
    except BaseException:
        subprocess.run(["docker", "rm", "--force", name], capture_output=True)
        raise


def _hidden(config: ShellSandboxConfig) -> dict[str, str]:
    """Return the variables whose values docker takes from its own environment, which other users cannot read.

    Those that docker would read itself stand on its command line, which they can.
    """
    own = ("PATH", "HOME")
    return {
        name: text for name, text in config.environment.items() if name not in own and not name.startswith("DOCKER_")
    }


async def _docker(*arguments: str, variables: Mapping[str, str] | None = None) -> str:
    """Run docker, with these environment variables too, and return what it prints; its errors are a `SandboxError`."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        "docker", *arguments, stdin=None, stdout=pipe, stderr=pipe, env=environment_with(**(variables or {}))
    )
    try:
        output, errors = await process.communicate()
    except BaseException:
        process.kill()
        raise
    if process.returncode:
        raise SandboxError(f"docker {arguments[0]}: {errors.decode(errors='replace').strip()}")
    return output.decode()


def _arguments(config: ShellSandboxConfig, directory: Path) -> list[str]:
    """Return docker's arguments for the container, up to the arguments of bash."""
    calls = directory / "seccomp.json"
    calls.write_text(docker_profile(), encoding="ascii")
    limits = config.limits
    arguments = [*HARDENED, "--security-opt", f"seccomp={calls}", "--pull", "never", "--log-driver", "none"]
    arguments += ["--hostname", "box", "--memory", str(limits.memory), "--memory-swap", str(limits.memory)]
    arguments += ["--shm-size", str(limits.disk)]
    arguments += _as_built(config) if config.image_as_built else _own_user(config)
    variables = {"TERM": VARIABLES["TERM"]} if config.image_as_built else VARIABLES
    hidden = _hidden(config)
    for name, value in {**variables, **(PROXIES if config.network else {}), **config.environment}.items():
        arguments += ["--env", name if name in hidden else f"{name}={value}"]
    for inside, here in {**config.mounts, CONTROL: directory}.items():
        arguments += ["--mount", f"type=bind,source={here},target={inside},readonly"]
    return [*arguments, "--entrypoint", "/bin/bash", config.image]


def _own_user(config: ShellSandboxConfig) -> list[str]:
    """Return docker's arguments for a user that nobody else has, and file systems in memory for what it writes."""
    user = FIRST_USER + secrets.randbelow(USERS)
    arguments = ["--read-only", "--workdir", WORK, "--user", f"{user}:{user}"]
    for path, mode in ((WORK, "0755"), ("/tmp", "1777")):
        size = config.limits.disk
        arguments += ["--tmpfs", f"{path}:rw,exec,nosuid,nodev,size={size},mode={mode},uid={user},gid={user}"]
    return arguments


def _as_built(config: ShellSandboxConfig) -> list[str]:
    """Return docker's arguments for an image's own user. Docker counts the processes: the limit of a user never binds root."""
    capabilities = [part for name in BUILT_WITH for part in ("--cap-add", name)]
    return [*capabilities, "--pids-limit", str(config.limits.processes)]


def missing_images(images: Iterable[str]) -> list[str]:
    """Return those of the images that are not on this machine.

    Raises:
        UnsupportedError: docker is missing.
        SandboxError: docker's daemon does not answer.
    """
    wanted = list(dict.fromkeys(images))
    if shutil.which("docker") is None:
        raise UnsupportedError("docker is not installed here", key="image", value=wanted[0] if wanted else None)

    def failure(*arguments: str) -> str | None:
        done = subprocess.run(["docker", *arguments], capture_output=True, text=True)
        return done.stderr.strip() if done.returncode else None

    if not wanted or failure("image", "inspect", "--", *wanted) is None:
        return []
    if reason := failure("version"):
        raise SandboxError(f"docker does not answer: {reason}")
    return [image for image in wanted if failure("image", "inspect", "--", image) is not None]
