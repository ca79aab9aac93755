"""Starts shell sandboxes as docker containers. They have the commands of an image.

The image needs bash, the usual GNU commands, tar, `setsid`, and python3 if Python programs run or a network is allowed. It is
never fetched. Each sandbox has a user id that no other process of this machine has, so that its processes can be counted.
"""

import asyncio
import secrets
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from antiphon.core.config import environment_with
from antiphon.core.errors import SandboxError, UnsupportedError
from antiphon.sandbox.isolation.docker_profile import docker_profile
from antiphon.sandbox.sessions.config import CONTROL, VARIABLES, WORK, Launched, ShellSandboxConfig
from antiphon.sandbox.sessions.egress import PROXIES

FIRST_USER, USERS = 1 << 30, 1 << 30  # ids that no system assigns
HARDENED = ("--security-opt", "no-new-privileges", "--cap-drop", "ALL", "--network", "none", "--read-only")


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
    user, limits = FIRST_USER + secrets.randbelow(USERS), config.limits
    arguments = [
        *HARDENED,
        "--security-opt",
        f"seccomp={calls}",
        "--pull",
        "never",
        "--log-driver",
        "none",
        "--hostname",
        "box",
        "--workdir",
        WORK,
    ]
    arguments += ["--user", f"{user}:{user}", "--memory", str(limits.memory), "--memory-swap", str(limits.memory)]
    hidden = _hidden(config)
    for name, value in {**VARIABLES, **(PROXIES if config.network else {}), **config.environment}.items():
        arguments += ["--env", name if name in hidden else f"{name}={value}"]
    for path, mode in ((WORK, "0755"), ("/tmp", "1777")):
        arguments += ["--tmpfs", f"{path}:rw,exec,nosuid,nodev,size={limits.disk},mode={mode},uid={user},gid={user}"]
    arguments += ["--shm-size", str(limits.disk)]
    for inside, here in {**config.mounts, CONTROL: directory}.items():
        arguments += ["--mount", f"type=bind,source={here},target={inside},readonly"]
    return [*arguments, "--entrypoint", "/bin/bash", config.image]
