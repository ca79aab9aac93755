"""Boxes that are containers of a docker image: what differs from those that bubblewrap makes. What both must withstand is in
test_sandbox_attacks.py, and what a session is in tests/unit/sandbox/test_session.py."""

import asyncio
import os
import signal
import subprocess
import sys

import pytest

from antiphon.core.deadlines import Deadlines
from antiphon.core.errors import SandboxError
from antiphon.core.types import Message, Prompt
from antiphon.sandbox.backends import open_sandbox
from antiphon.sandbox.base import Level, Limits, Status
from antiphon.sandbox.config import SandboxConfig
from antiphon.sandbox.sessions.config import ShellSandboxConfig
from antiphon.sandbox.sessions.files import SandboxFiles
from antiphon.sandbox.sessions.runtime_dirs import RuntimeDirs
from antiphon.sandbox.sessions.session import Session
from antiphon.sandbox.sessions.shell_sandbox import ShellSandbox
from antiphon.tasks.base import Transcript
from antiphon.tasks.rewards.code.reward import Code
from tests.system.test_sandbox_service import Server

pytestmark = pytest.mark.commands("docker")

LIMITS = Limits(seconds=30, cpu_seconds=60, memory=256 << 20, file_size=16 << 20, disk=32 << 20, processes=40)


@pytest.fixture
def rooms():
    made = RuntimeDirs()
    yield made
    made.close()


def containers():
    return subprocess.check_output(["docker", "ps", "--all", "--quiet"], text=True).split()


def test_a_session_in_a_container(docker_image, rooms, tmp_path):
    async def body():
        async with await ShellSandbox.start(
            rooms, ShellSandboxConfig(limits=LIMITS, image=docker_image), Deadlines()
        ) as box:
            assert len(containers()) == 1
            session, files = Session(box), SandboxFiles(box)
            await session.run("x=5; cd /tmp; f() { echo $x; }")
            result = await session.run("pwd; f; (exit 3)")
            assert (result.status, result.exit_code, result.stdout) == (Status.ERROR, 3, "/tmp\n5\n")
            assert (await session.run("sleep 1000", seconds=0.2)).status is Status.TIMEOUT
            assert (await session.run("f")).stdout == "5\n"
            grown = await session.run("python3 -c 'x = bytearray(1 << 29)'")
            assert grown.exit_code != 0 and (grown.status is Status.MEMORY or os.geteuid() != 0)
            assert (await session.run("touch /x")).exit_code == 1
            full = await session.run("for i in $(seq 60); do sleep 100 & done; wait", seconds=2)
            assert full.status is Status.TIMEOUT
            assert (await session.run("echo again")).stdout == "again\n"
            await files.write("a/b", b"\0\xff")
            await files.snapshot(tmp_path / "kept")
            await session.run("rm -r /box/a")
            await files.restore(tmp_path / "kept")
            assert await files.read("a/b") == b"\0\xff"
            ended = await session.run("kill -9 $$")
            assert ended.ended and (await session.run("echo $x")).stdout == "\n"

    asyncio.run(asyncio.wait_for(body(), 200))


def test_programs_and_code_rewards(docker_image):
    config = SandboxConfig(image=docker_image)
    sandbox = open_sandbox(config)
    try:
        result = sandbox.run("import sys; print(input(), open('a').read(), sys.path[1])", stdin="in", files={"a": b"x"})
        assert (result.status, result.level) == (Status.OK, Level.ISOLATED) and result.stdout.startswith("in x ")
    finally:
        sandbox.close()
    reward = Code(sandbox={"image": docker_image}, seconds=60, case_seconds=30)
    prompt = Prompt(
        id="p", task="t", messages=(Message(role="user", content="?"),), payload={"tests": ["assert f(1) == 2"]}
    )
    try:
        for body, value in (("x + 1", 1.0), ("x", 0.0)):
            answer = f"```python\ndef f(x):\n    return {body}\n```"
            assert reward(prompt, Transcript(messages=(Message(role="assistant", content=answer),))).value == value
    finally:
        reward.close()


def test_what_cannot_be_started_is_named_and_leaves_nothing(docker_image, rooms):
    async def body():
        with pytest.raises(SandboxError, match="no-such-image"):
            await ShellSandbox.start(rooms, ShellSandboxConfig(image="no-such-image"), Deadlines())

    before = containers()  # one of another test may be on its way out
    asyncio.run(body())
    assert {*containers()} <= {*before}


CONTROLLER = """
import asyncio
from antiphon.sandbox.sessions.shell_sandbox import *
from antiphon.sandbox.sessions.session import *
async def main():
    box = await ShellSandbox.start(RuntimeDirs(), ShellSandboxConfig(image={image!r}), Deadlines())
    await Session(box).run("sleep 1000 & setsid sleep 1000 &")
    print("ready", flush=True)
    await asyncio.sleep(1000)
asyncio.run(main())
"""


def test_a_killed_controller_leaves_no_container(docker_image):
    program = CONTROLLER.format(image=docker_image)
    controller = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert controller.stdout.readline() == "ready\n"
    (container,) = containers()
    controller.send_signal(signal.SIGKILL)
    controller.communicate()
    subprocess.run(["docker", "wait", container], timeout=60, capture_output=True)
    with_name = ["docker", "ps", "--quiet", "--filter", f"id={container}"]
    assert subprocess.check_output(with_name) == b""


@pytest.fixture
def two_images(docker_image):
    """Two images that can be told apart, and a third that is not offered."""
    names = ["antiphon-test-second", "antiphon-test-other"]
    for name in names:
        made = subprocess.run(
            ["docker", "build", "--quiet", "--tag", name, "-"],
            input=f"FROM {docker_image}\nENV MARK={name}\n",
            text=True,
        )
        assert made.returncode == 0
    yield docker_image, names[0]
    subprocess.run(["docker", "rmi", "--force", *names], check=True, capture_output=True)


def images() -> set[str]:
    return set(subprocess.check_output(["docker", "images", "--quiet"], text=True).split())


def test_clients_choose_one_of_the_images(two_images):
    first, second = two_images
    server = Server(f"images=[{first},{second}]", "warm=1")
    try:
        for image, mark in ((None, ""), (first, ""), (second, second)):
            started = server.result("/start", **({} if image is None else {"image": image}))
            assert started["image"] == (image or first)
            ran = server.result("/execute", sandbox_id=started["sandbox_id"], command="echo $MARK")
            assert ran["stdout"] == f"{mark}\n"
        before = images()
        for image in ("antiphon-test-other", f"{first}:latest", "busybox", "--privileged", "", f"{first} {second}"):
            assert "image" in (error := server.refused(400, "/start", image=image))
            assert not image or (first in error and second in error)
        assert images() == before
        server.result("/stop", sandbox_id=started["sandbox_id"])
        again = server.result("/restart", sandbox_id=started["sandbox_id"])
        assert again["image"] == second
        assert [item["image"] for item in server.items(image=second)] == [second]
    finally:
        server.close()


def test_a_service_does_not_start_without_one_of_its_images(docker_image):
    images = f"images=[{docker_image},no-such-image]"
    command = [sys.executable, "-m", "antiphon", "sandbox", "serve", "port=0", "warm=0", images]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and "no-such-image" in done.stderr, done
