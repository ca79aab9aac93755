"""Boxes with the commands of a docker image, made by the docker of this machine.

The image needs bash, the usual commands of GNU, tar, `setsid`, and python3 where Python is to run or a network is allowed. It
is never fetched. Each box has a user number that no other process of this machine has, so that its processes can be counted.
"""

import asyncio
import secrets
import shutil
import subprocess
from pathlib import Path

from antiphon.core.errors import SandboxError, UnsupportedError
from antiphon.sandbox.isolation.docker_profile import docker_profile
from antiphon.sandbox.sessions.config import CONTROL, VARIABLES, WORK, Launched, ShellSandboxConfig
from antiphon.sandbox.sessions.egress import PROXIES

FIRST_USER, USERS = 1 << 30, 1 << 30  # numbers that no system gives out
HARDENED = ("--security-opt", "no-new-privileges", "--cap-drop", "ALL", "--network", "none", "--read-only")


async def launch(config: ShellSandboxConfig, room: Path, keeper: str) -> Launched:
    """Start a container whose process 1 runs `keeper`, a program for bash. Its end removes it."""
    if shutil.which("docker") is None:
        raise UnsupportedError(f"the image {config.image} needs docker, and there is none here")
    name = f"antiphon-{secrets.token_hex(8)}"
    try:
        await _docker("run", "--detach", "--rm", "--name", name, *_arguments(config, room), "-c", keeper)
        first = int(await _docker("inspect", "--format", "{{.State.Pid}}", name))
        if not first:
            raise SandboxError(f"a container of the image {config.image} ended at once")
        quiet = subprocess.DEVNULL
        process = subprocess.Popen(["docker", "wait", name], stdin=quiet, stdout=quiet, stderr=quiet)
        return Launched(process=process, first=first)
    except BaseException:
        subprocess.run(["docker", "rm", "--force", name], capture_output=True)
        raise


async def _docker(*arguments: str) -> str:
    """What docker prints; `SandboxError` with what it complains of."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec("docker", *arguments, stdin=None, stdout=pipe, stderr=pipe)
    try:
        told, complaint = await process.communicate()
    except BaseException:
        process.kill()
        raise
    if process.returncode:
        raise SandboxError(f"docker {arguments[0]}: {complaint.decode(errors='replace').strip()}")
    return told.decode()


def _arguments(config: ShellSandboxConfig, room: Path) -> list[str]:
    """What docker is told of the container, up to the arguments of bash."""
    calls = room / "seccomp.json"
    calls.write_text(docker_profile(), encoding="ascii")
    user, limits = FIRST_USER + secrets.randbelow(USERS), config.limits
    told = [
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
    told += ["--user", f"{user}:{user}", "--memory", str(limits.memory), "--memory-swap", str(limits.memory)]
    for name, value in {**VARIABLES, **(PROXIES if config.network else {}), **config.environment}.items():
        told += ["--env", f"{name}={value}"]
    for path, mode in ((WORK, "0755"), ("/tmp", "1777")):
        told += ["--tmpfs", f"{path}:rw,exec,nosuid,nodev,size={limits.disk},mode={mode},uid={user},gid={user}"]
    told += ["--shm-size", str(limits.disk)]
    for inside, here in {**config.mounts, CONTROL: room}.items():
        told += ["--mount", f"type=bind,source={here},target={inside},readonly"]
    return [*told, "--entrypoint", "/bin/bash", config.image]
