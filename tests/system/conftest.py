"""A docker image for the tests that need one, and a run for those that only read one."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import time
from pathlib import Path

import pytest

from tests.conftest import Project

COMMANDS = (
    "base64 bash cat chmod cp cut dd dirname basename echo env find git grep head id ls mkdir mknod mktemp mv nproc"
)
COMMANDS += " pgrep printf ps realpath rm sed seq setsid sh sleep tail tar test touch tr true unshare wc"
IMAGE = "antiphon-test"
START_SECONDS = 60


@pytest.fixture(scope="session")
def docker_host(tmp_path_factory):
    """Address of a docker with an image that has Python and a few commands of this machine: of the one that runs here, and then
    empty; where only its programs are, and root may start them, of one of the tests' own."""
    daemon, host = None, ""
    if not _answers(host):
        if shutil.which("dockerd") is None or os.geteuid() != 0:
            pytest.skip("no docker daemon runs here")
        daemon, host = _start(tmp_path_factory.mktemp("docker", numbered=True))
    try:
        archive = tmp_path_factory.mktemp("image") / "image.tar"
        _pack(archive)
        subprocess.run(_docker(host, "import", archive, IMAGE), check=True, capture_output=True)
        yield host
        subprocess.run(_docker(host, "rmi", "--force", IMAGE), check=True, capture_output=True)
    finally:
        if daemon is not None:
            daemon.terminate()
            daemon.wait()


@pytest.fixture(scope="module")
def docker_image(docker_host):
    """Name of the image; the docker that has it is that of the environment."""
    with pytest.MonkeyPatch.context() as patch:
        if docker_host:
            patch.setenv("DOCKER_HOST", docker_host)
        yield IMAGE


def _docker(host: str, *arguments: str | Path) -> list[str | Path]:
    return ["docker", *(["--host", host] if host else []), *arguments]


def _answers(host: str) -> bool:
    return subprocess.run(_docker(host, "info"), capture_output=True).returncode == 0


def _start(directory: Path) -> "tuple[subprocess.Popen[bytes], str]":
    host = f"unix://{directory}/socket"
    places = [f"--{name}={directory / name}" for name in ("data-root", "exec-root", "pidfile")]
    command = ["dockerd", "--bridge=none", "--iptables=false", f"--host={host}", *places]
    with (directory / "log").open("wb") as log:
        daemon = subprocess.Popen(command, stdout=log, stderr=log)
    until = time.monotonic() + START_SECONDS
    while not _answers(host):
        if daemon.poll() is not None or time.monotonic() > until:
            daemon.kill()
            pytest.skip(f"dockerd does not start here: {(directory / 'log').read_text()[-300:]}")
    return daemon, host


def _pack(archive: Path) -> None:
    """The commands, this Python, and the libraries that they load; all of it below /usr, as the system has it."""
    programs = [found for name in COMMANDS.split() if (found := shutil.which(name, path="/usr/bin"))]
    python = os.path.realpath(sys.executable)
    library = Path(sysconfig.get_path("stdlib", vars={"installed_base": sys.base_prefix}))
    loaded = subprocess.run(
        ["ldd", *programs, python, *map(str, library.glob("lib-dynload/*.so"))], capture_output=True, text=True
    )
    libraries = set(re.findall(r"(/\S+) \(0x", loaded.stdout))
    with tarfile.open(archive, "w", dereference=True) as tar:
        for path in {*programs, python, *libraries}:
            tar.add(path)
        tar.add(
            library, filter=lambda each: None if re.search("-packages|/test/|idlelib|__pycache__", each.name) else each
        )
        for name, target in {"bin": "usr/bin", "usr/bin/python3": python}.items():
            link = tarfile.TarInfo(name)
            link.type, link.linkname = tarfile.SYMTYPE, target
            tar.addfile(link)


@pytest.fixture(scope="session")
def trained(tmp_path_factory, model):
    """A project with a run of two steps, and a checkpoint of each."""
    project = Project(tmp_path_factory.mktemp("trained"), model)
    done = project.run("train", project.config(evaluation={}, steps=2, checkpoint={"every": 1, "keep_every": 1}))
    assert done.returncode == 0, done.stderr
    return project
