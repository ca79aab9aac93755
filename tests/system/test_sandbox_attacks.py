"""Programs that try to get out, each with a witness outside that sees whether they did.

`EXPECTED` is the table of docs/sandbox.md. At level 1 most attacks must succeed: that is what shows that the witness can see
one. A backend is a function of a level, and of a docker image, that gives something with the `run` of a `PythonSandbox`;
another is one more line in `BACKENDS`.
"""

import contextlib
import os
import re
import secrets
import select
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
from pathlib import Path

import pytest

from antiphon.sandbox.base import Level, Limits, Status
from antiphon.sandbox.isolation.forked_python import ForkedPython
from antiphon.sandbox.isolation.levels import probe
from antiphon.sandbox.sessions.config import ShellSandboxConfig
from antiphon.sandbox.sessions.system_python import SystemPython

BACKENDS = {
    "python": lambda level, image: ForkedPython(level=level),
    "boxes": lambda level, image: SystemPython(),
    "docker": lambda level, image: SystemPython(ShellSandboxConfig(image=image)),
    "task image": lambda level, image: SystemPython(ShellSandboxConfig(image=image, image_as_built=True)),
}
LIMITS = Limits(
    seconds=20, cpu_seconds=20, memory=96 << 20, file_size=1 << 20, disk=4 << 20, processes=16, output=1 << 16
)

pytestmark = pytest.mark.skipif(probe().level != Level.ISOLATED, reason="this machine has no level 3")

PRELUDE = """
import ctypes, glob, os, re, signal, socket, struct, sys, time
libc = ctypes.CDLL(None, use_errno=True)
X86 = os.uname().machine == "x86_64"
def call(x86, arm, *arguments):
    words = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    return libc.syscall(ctypes.c_long(x86 if X86 else arm), *words)
def escape_if(true):
    if true:
        print("ESCAPE")
def named(name):
    libc.prctl(15, name.encode(), 0, 0, 0)
def attempt(action):
    try:
        return action()
    except Exception as error:
        print(type(error).__name__, error)
def readable_memory(start, end):
    # what of an address range is mapped: a pipe refuses to be fed from what is not
    read, write = os.pipe()
    for page in range(start & ~4095, end, 4096):
        if libc.write(write, ctypes.c_void_p(page), ctypes.c_size_t(4096)) == 4096:
            yield os.read(read, 4096)
def search_own_memory(pattern):
    libc.sbrk.restype = ctypes.c_long
    around = [id(object()), id(os), id(sys.modules), ctypes.addressof(ctypes.c_int()), libc.sbrk(0)]
    for block in {address >> 26 for address in around}:
        for page in readable_memory(block << 26, (block + 1) << 26):
            for found in re.findall(pattern, page):
                print("FOUND", found.decode())
"""

SCAN = 'search_own_memory(b"canary" + b"-[0-9a-f]{32}")'

ATTACKS = {
    # --- the network
    "tcp": "attempt(lambda: socket.create_connection(('127.0.0.1', outside['port']), 2))",
    "abstract socket": "attempt(lambda: socket.socket(socket.AF_UNIX).connect(outside['abstract']))",
    "socket in the file system": "attempt(lambda: socket.socket(socket.AF_UNIX).connect(outside['socket']))",
    "datagram of a socket pair": """
        def send():
            pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
            pair[0].sendto(b"hello", outside["datagrams"])
        attempt(send)
    """,
    "other families": """
        for family, kind in ((16, 3), (17, 3), (38, 5), (40, 1), (30, 1), (31, 3), (2, 3), (10, 2)):
            try:
                socket.socket(family, kind)
                print("ESCAPE", family)
            except OSError:
                pass
    """,
    # --- files
    "read a file": "attempt(lambda: print(open(outside['file']).read()))",
    "read through a symbolic link": """
        attempt(lambda: os.symlink(outside["file"], "link"))
        attempt(lambda: print(open("link").read()))
    """,
    "read through a hard link": """
        attempt(lambda: os.link(outside["file"], "link"))
        attempt(lambda: print(open("link").read()))
    """,
    "read through a descriptor of the root": """
        for fd in range(3, 256):
            for up in ("", "../../../../.."):
                try:
                    print(os.read(os.open(up + outside["file"], os.O_RDONLY, dir_fd=fd), 100))
                except OSError:
                    pass
        attempt(lambda: os.chroot("."))
        attempt(lambda: [os.chdir("..") for _ in range(50)])
        attempt(lambda: print(open("." + outside["file"]).read()))
    """,
    "list a directory": "attempt(lambda: print(os.listdir(outside['directory'])))",
    "write a file": "attempt(lambda: open(outside['directory'] + '/written', 'w'))",
    "change a file's permissions": """
        attempt(lambda: os.chmod(outside["file"], 0o640))
        attempt(lambda: os.utime(outside["file"], (1, 1)))
        attempt(lambda: os.setxattr(outside["file"], "user.mark", b"x"))
    """,
    "rename a file": "attempt(lambda: os.rename(outside['movable'], outside['directory'] + '/written'))",
    "open by handle": """
        handle = ctypes.create_string_buffer(struct.pack("Ii", 128, 0) + bytes(128))
        mount = ctypes.c_int()
        escape_if(call(303, 264, -100, b"/", handle, ctypes.byref(mount), 0) == 0)
    """,
    "devices": """
        for device in glob.glob("/dev/vd*") + glob.glob("/dev/sd*") + ["/dev/mem", "/dev/kmsg", "/dev/fuse", "/dev/kvm"]:
            try:
                os.open(device, os.O_RDWR)
                print("ESCAPE", device)
            except OSError:
                pass
        attempt(lambda: (os.mknod("null", 0o20666, os.makedev(1, 3)), open("null", "w"), print("ESCAPE")))
    """,
    "sysfs, cgroups, core pattern": """
        for place in glob.glob("/sys/fs/cgroup/cgroup.procs") + glob.glob("/sys/fs/cgroup/*/cgroup.procs"):
            directory = os.path.dirname(place)
            path = directory + "/" + outside["mark"]
            attempt(lambda: os.mkdir(path) or print("ESCAPE") or os.rmdir(path))
        attempt(lambda: print("ESCAPE", os.open("/proc/sys/kernel/core_pattern", os.O_WRONLY)))
    """,
    "fill the disk": """
        written = 0
        for number in range(40):
            try:
                written += open(f"file{number}", "wb", buffering=0).write(bytes(1 << 19))
            except OSError as error:
                print(error)
        escape_if(written > 5 << 20)
    """,
    "many files": """
        made = 0
        for number in range(1100):
            try:
                os.close(os.open(f"file{number}", os.O_CREAT | os.O_WRONLY))
                made += 1
            except OSError:
                break
        escape_if(made >= 1100)
    """,
    "a large file": """
        with open("file", "wb", buffering=0) as file:
            try:
                for _ in range(3):
                    file.write(bytes(1 << 20))
            except OSError as error:
                print(error)
        escape_if(os.stat("file").st_size > 1 << 20)
    """,
    # --- other processes
    "environments of others": """
        for path in glob.glob("/proc/[0-9]*/environ"):
            attempt(lambda: print(re.findall(rb"canary-[0-9a-f]+", open(path, "rb").read())))
    """,
    "memory of another": """
        def read():
            with open(f"/proc/{outside['victim']}/mem", "rb", buffering=0) as memory:
                memory.seek(outside["address"])
                print(memory.read(64))
        attempt(read)
        buffer = ctypes.create_string_buffer(64)
        local, remote = struct.pack("QQ", ctypes.addressof(buffer), 64), struct.pack("QQ", outside["address"], 64)
        call(310, 270, outside["victim"], local, 1, remote, 1, 0)
        print(buffer.raw)
    """,
    "signal": "attempt(lambda: os.kill(outside['victim'], signal.SIGTERM))",
    "signal by descriptor": """
        attempt(lambda: signal.pidfd_send_signal(os.pidfd_open(outside["victim"]), signal.SIGTERM))
    """,
    "ptrace": "call(101, 117, 0x4206, outside['victim'], 0, 0); time.sleep(0.3)",
    "limits of another": """
        import resource
        attempt(lambda: resource.prlimit(outside["victim"], resource.RLIMIT_CORE, (1, 1)))
    """,
    "limits and processors of the worker": """
        import resource
        worker = os.getppid()
        attempt(lambda: resource.prlimit(worker, resource.RLIMIT_CORE, (1, 1)) and print("ESCAPE"))
        attempt(lambda: os.sched_setaffinity(worker, os.sched_getaffinity(0)) or print("ESCAPE"))
        escape_if(libc.setpriority(0, worker, 0) == 0)
    """,
    "kill the worker": """
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
            attempt(lambda: os.kill(os.getppid(), number))
        time.sleep(0.2)
    """,
    "daemon": """
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                named(outside["mark"])
                os.closerange(0, 256)
                time.sleep(60)
            os._exit(0)
        os.wait()
        time.sleep(0.1)
    """,
    "fork bomb": """
        children = 0
        for _ in range(60):
            try:
                if os.fork() == 0:
                    named(outside["mark"])
                    time.sleep(60)
                    os._exit(0)
                children += 1
            except OSError as error:
                print(error)
                break
        time.sleep(0.5)
    """,
    "memory of many processes": """
        for _ in range(8):
            if os.fork() == 0:
                named(outside["mark"])
                block = b"x" * (64 << 20)
                time.sleep(60)
        time.sleep(1)
    """,
    "memory of one process": "named(outside['mark']); block = b'x' * (300 << 20); time.sleep(0.3)",
    "memory outside the address space": """
        kept = []
        for _ in range(140):
            fd = call(319, 279, b"x", 0)
            if fd < 0:
                break
            kept.append(os.write(fd, bytes(1 << 20)))
        escape_if(sum(kept) > 128 << 20)
        key = call(29, 194, 0, 1 << 28, 0o1600)
        escape_if(key >= 0)
        call(31, 195, key, 0, 0)
    """,
    # --- the kernel's back rooms
    "asynchronous input and output": """
        context = ctypes.c_ulong()
        escape_if(call(206, 0, outside["contexts"], ctypes.byref(context)) == 0)
        time.sleep(0.3)
    """,
    "what all users share": """
        escape_if(call(294, 26, 0) >= 0)  # inotify
        pair = socket.socketpair()
        passes = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0xFFFF))
        for option in (26, 51):
            attempt(lambda: pair[0].setsockopt(1, option, struct.pack("HP", 1, ctypes.addressof(passes))) or print("ESCAPE"))
        escape_if(call(306, 267, os.open(".", os.O_RDONLY)) == 0)  # write out a file system
    """,
    "io_uring": "escape_if(call(425, 425, 4, ctypes.create_string_buffer(120)) >= 0)",
    "namespaces": """
        for flag in (0x10000000, 0x20000, 0x40000000, 0x20000000):
            escape_if(call(272, 97, flag) == 0)
            child = call(56, 220, flag | 17, 0, 0, 0, 0)
            if child == 0:
                os._exit(0)
            escape_if(child > 0)
        arguments = ctypes.create_string_buffer(struct.pack("11Q", 0x10000000, 0, 0, 0, 17, *[0] * 6))
        child = call(435, 435, arguments, 88)
        if child == 0:
            os._exit(0)
        escape_if(child > 0)
    """,
    "mounts": """
        escape_if(libc.mount(b"none", b".", b"tmpfs", 0, None) == 0)
        escape_if(call(430, 430, b"tmpfs", 0) >= 0)
        escape_if(call(428, 428, -100, b"/", 1) >= 0)
    """,
    "keys": "escape_if(call(248, 217, b'user', b'name', b'secret', 6, -3) >= 0); escape_if(call(250, 219, 0, -3, 1) >= 0)",
    "bpf, perf, userfaultfd, personality": """
        escape_if(call(321, 280, 0, ctypes.create_string_buffer(struct.pack("IIII", 2, 4, 4, 1) + bytes(100)), 116) >= 0)
        escape_if(call(298, 241, ctypes.create_string_buffer(struct.pack("IIQ", 1, 128, 0) + bytes(112)), 0, -1, -1, 0) >= 0)
        escape_if(call(323, 282, 1) >= 0)
        escape_if(libc.personality(0x40000) >= 0)
    """,
    "type into a terminal": """
        master, slave = None, None
        try:
            import pty
            master, slave = pty.openpty()
        except OSError:
            slave = 0
        escape_if(libc.ioctl(slave, ctypes.c_ulong(0x5412), b"x") == 0)
        escape_if(libc.ioctl(slave, ctypes.c_ulong(0x100005412), b"x") == 0)
    """,
    "calls of x32": "escape_if(X86 and call(0x40000000 | 39, 0) > 0)",
    "calls of 32 bits": r"""
        import mmap
        if X86:
            page = mmap.mmap(-1, 4096, prot=7)
            page.write(bytes.fromhex("53b814000000cd805bc3"))  # push rbx; mov eax, getpid; int 0x80; pop rbx; ret
            function = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))
            escape_if(function() > 0)
    """,
    # --- the sandbox itself
    "own environment": "print(sorted(os.environ.items()))",
    "memory that was inherited": SCAN,
    "what the last program left": f"""
        {SCAN}
        for directory in ("/tmp", "/dev/shm", "."):
            attempt(lambda: print(glob.glob(directory + "/canary*")))
    """,
    "objects of the runner": """
        import gc, inspect
        frame, seen = inspect.currentframe(), []
        while frame:
            seen.append(frame.f_locals)
            frame = frame.f_back
        for thing in gc.get_objects():
            if isinstance(thing, socket.socket):
                attempt(lambda: print("ESCAPE", thing.send(b"{}")))
        for fd in range(3, 1024):
            try:
                os.fstat(fd)
                print("ESCAPE", fd)
            except OSError:
                pass
    """,
    "forged report": """
        report = b'{"cause":"ended","problem":"","code":0,"seconds":0,"cpu_seconds":0,"peak_memory":0,"memory_kills":0}'
        for fd in [*range(3, 1024)]:
            try:
                os.write(fd, report)
            except OSError:
                pass
        os.abort = os._exit = sys.exit = lambda *a: None
        raise KeyError("a true error")
    """,
    "output flood": "while True: print('x' * 100000)",
    "flood of errors": "while True: print('x' * 100000, file=sys.stderr)",
    "input that writes": """
        for attempt_ in (lambda: os.write(0, b"x"), lambda: os.ftruncate(0, 1 << 30)):
            try:
                attempt_()
                print("ESCAPE")
            except OSError:
                pass
    """,
    "abort without a core": "os.chdir('/tmp' if os.access('/tmp', os.W_OK) else '.'); os.abort()",
}

CONTEXTS = 5000  # of asynchronous I/O that an attack asks for, far more than anything else on a machine for tests


def contexts() -> int:
    """How many contexts of asynchronous I/O there are, in all of the machine."""
    return int(Path("/proc/sys/fs/aio-nr").read_text())


HELD, OPEN, DEPENDS = "held", "open", "depends"  # the last: on the kernel and on who runs it, and is not tried

# attack: at level 3, 2, 1; what is not named is held at levels 3 and 2 and open at level 1
EXPECTED = dict.fromkeys(ATTACKS, (HELD, HELD, OPEN)) | {
    # no mount namespace, so no file system of its own to be full
    "fill the disk": (HELD, OPEN, OPEN),
    "many files": (HELD, OPEN, OPEN),
    # the limits of level 1 are those of the others
    "a large file": (HELD, HELD, HELD),
    "asynchronous input and output": (HELD, HELD, HELD),
    "fork bomb": (HELD, HELD, DEPENDS),
    "daemon": (HELD, HELD, HELD),
    "memory of many processes": (HELD, DEPENDS, DEPENDS) if probe().memory_groups else (DEPENDS, DEPENDS, DEPENDS),
    "memory of one process": (HELD, HELD, HELD),
    "output flood": (HELD, HELD, HELD),
    "flood of errors": (HELD, HELD, HELD),
    "signal": (HELD, HELD, HELD),
    "signal by descriptor": (HELD, HELD, HELD),
    "ptrace": (HELD, HELD, HELD),
    "limits of another": (HELD, HELD, HELD),
    "limits and processors of the worker": (HELD, HELD, HELD),
    "kill the worker": (HELD, HELD, HELD),
    "environments of others": (HELD, HELD, DEPENDS),  # level 1 closes them to programs of root alone
    "memory of another": (HELD, HELD, DEPENDS),
    "own environment": (HELD, HELD, HELD),
    "memory that was inherited": (HELD, HELD, HELD),
    "what the last program left": (HELD, HELD, HELD),
    "objects of the runner": (HELD, HELD, HELD),
    "forged report": (HELD, HELD, HELD),
    "input that writes": (HELD, HELD, HELD),
    "abort without a core": (HELD, HELD, HELD),
    "read through a descriptor of the root": (HELD, HELD, DEPENDS),
    "sysfs, cgroups, core pattern": (HELD, HELD, DEPENDS),
    "devices": (HELD, HELD, DEPENDS),
    "other families": (HELD, HELD, OPEN),
    "open by handle": (HELD, HELD, DEPENDS),
    "memory outside the address space": (HELD, HELD, DEPENDS),
    "io_uring": (HELD, HELD, DEPENDS),
    "namespaces": (HELD, HELD, DEPENDS),
    "mounts": (HELD, HELD, DEPENDS),
    "keys": (HELD, HELD, DEPENDS),
    "bpf, perf, userfaultfd, personality": (HELD, HELD, OPEN),
    "type into a terminal": (HELD, HELD, DEPENDS),
    "calls of x32": (HELD, HELD, DEPENDS),
    "calls of 32 bits": (HELD, HELD, DEPENDS),
}
# Where a backend differs. Bubblewrap cannot bound the number of files: they count as memory of the box. What a container of an
# image as it was built writes lies on docker's disk, without a bound.
DIFFERENT = {(backend, "many files"): OPEN for backend in ("boxes", "docker", "task image")}
DIFFERENT |= {("task image", "fill the disk"): OPEN}


class Outside:
    """What there is to steal or to break, and the witness of it."""

    def __init__(self, folder: Path) -> None:
        self.mark = "mark" + secrets.token_hex(5)  # as long as the name of a process may be
        self.canary = "canary-" + secrets.token_hex(16)
        self.folder = folder
        folder.chmod(0o777)
        (folder / "secret").write_text(self.canary)
        (folder / self.canary).touch()  # read by whoever lists the directory
        self.listeners = [
            self._listen(socket.AF_INET, ("127.0.0.1", 0)),
            self._listen(socket.AF_UNIX, f"\0{self.mark}"),
            self._listen(socket.AF_UNIX, str(folder / "socket")),
        ]
        (folder / "socket").chmod(0o777)
        self.datagrams = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.datagrams.bind(f"\0{self.mark}-datagrams")
        self.datagrams.setblocking(False)
        self.harm = []
        self.start_victim()

    def reset(self):
        """As if nothing had happened yet."""
        self.most_processes = self.most_memory = self.most_contexts = 0
        if self.harm:
            self.victim.kill()
            self.victim.communicate()
            self.start_victim()
        self.harm = []
        (self.folder / "secret").chmod(0o644)
        (self.folder / "secret").write_text(self.canary)
        (self.folder / "written").unlink(missing_ok=True)
        (self.folder / "movable").touch()
        (self.folder / "movable").chmod(0o666)

    @staticmethod
    def _listen(family, address):
        listener = socket.socket(family)
        listener.bind(address)
        listener.listen()
        listener.setblocking(False)
        return listener

    def start_victim(self):
        """A process with the canary in its environment and in its memory."""
        program = "import os, sys, ctypes; b = ctypes.create_string_buffer(os.environ['SECRET'].encode())\n"
        program += "print(ctypes.addressof(b), flush=True)\n"
        program += "for line in sys.stdin: print(line, end='', flush=True)"
        self.victim = subprocess.Popen(
            [sys.executable, "-S", "-c", program],
            env={"SECRET": self.canary},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.address = int(self.victim.stdout.readline())

    @property
    def known(self):
        """What the attacker is told."""
        return {
            "port": self.listeners[0].getsockname()[1],
            "abstract": f"\0{self.mark}",
            "socket": str(self.folder / "socket"),
            "datagrams": f"\0{self.mark}-datagrams",
            "file": str(self.folder / "secret"),
            "movable": str(self.folder / "movable"),
            "directory": str(self.folder),
            "victim": self.victim.pid,
            "address": self.address,
            "mark": self.mark,
            "contexts": CONTEXTS,
        }

    def marked(self):
        """Bytes of memory, its share of what is shared, of each process that bears the mark."""
        found = {}
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if (process / "comm").read_text().strip() == self.mark[:15]:
                    shares = re.search(r"^Pss: +(\d+)", (process / "smaps_rollup").read_text(), re.MULTILINE)
                    found[int(process.name)] = int(shares[1]) << 10 if shares else 0
        return found

    @contextlib.contextmanager
    def watching(self):
        """Count the marked processes, and their memory, while an attack runs."""
        over = threading.Event()

        def watch():
            while not over.wait(0.05):
                sizes = self.marked()
                self.most_processes = max(self.most_processes, len(sizes))
                self.most_memory = max(self.most_memory, sum(sizes.values()))
                self.most_contexts = max(self.most_contexts, contexts())
                self.harm = self.harm or self.harm_to_victim()

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            self.harm = self.harm or self.harm_to_victim() or self.silence_of_victim()

    def breaches(self, result):
        """What the attack has come to."""
        found = []
        for listener in self.listeners:
            with contextlib.suppress(BlockingIOError):
                listener.accept()[0].close()
                found.append("a connection")
        with contextlib.suppress(BlockingIOError):
            found.append(f"a datagram: {self.datagrams.recv(100)}")
        if self.canary in result.stdout + result.stderr:
            found.append("the secret was read")
        if "ESCAPE" in result.stdout:
            found.append("the attack says so")
        if (self.folder / "written").exists() or (self.folder / "secret").stat().st_nlink > 1:
            found.append("a file was written")
        now = (self.folder / "secret").stat()
        if (now.st_mode & 0o777, now.st_mtime == 1) != (0o644, False):
            found.append("a file was changed")
        if list(self.folder.glob("core*")):
            found.append("a core was left")
        found += self.harm
        if self.most_processes > LIMITS.processes:
            found.append(f"{self.most_processes} processes")
        if self.most_memory > 2 * LIMITS.memory:
            found.append(f"{self.most_memory} bytes of memory")
        if self.most_contexts >= CONTEXTS:
            found.append(f"{self.most_contexts} contexts of asynchronous I/O")
        if left := self.marked():
            found.append(f"processes left: {sorted(left)}")
        if result.status is Status.REFUSED:
            found.append(f"no verdict: {result.detail}")
        if len(result.stdout) > LIMITS.output or len(result.stderr) > LIMITS.output:
            found.append("too much output")
        return found

    def harm_to_victim(self):
        if self.victim.poll() is not None:
            return ["the victim was killed"]
        status = Path(f"/proc/{self.victim.pid}/status").read_text()
        limits = Path(f"/proc/{self.victim.pid}/limits").read_text()
        harms = {
            "traced": "TracerPid:\t0\n" not in status,
            "stopped": re.search(r"^State:\s+[tT]", status, re.MULTILINE),
            "limited": re.search(r"^Max core file size +1 ", limits, re.MULTILINE),
        }
        return [f"the victim was {name}" for name, happened in harms.items() if happened]

    def silence_of_victim(self):
        """What keeps the victim from answering: a signal that was sent takes effect only as the victim runs."""
        with contextlib.suppress(BrokenPipeError):
            self.victim.stdin.write("there?\n")
            self.victim.stdin.flush()
        while not select.select([self.victim.stdout], [], [], 0.05)[0]:
            if harm := self.harm_to_victim():
                return harm
        return [] if self.victim.stdout.readline() else ["the victim was killed"]

    def close(self):
        self.victim.kill()
        self.victim.communicate()
        for end in (*self.listeners, self.datagrams):
            end.close()
        for pid in self.marked():
            os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def place():
    with tempfile.TemporaryDirectory() as folder:  # where any user may go, unlike pytest's
        made = Outside(Path(folder))
        yield made
        made.close()


@pytest.fixture
def outside(place):
    place.reset()
    return place


CASES = [pytest.param(("python", level), id=f"python-{level}") for level in sorted(Level, reverse=True)]
CASES += [
    pytest.param((backend, Level.ISOLATED), id=f"{backend}-{Level.ISOLATED}", marks=pytest.mark.commands(command))
    for backend, command in {"boxes": "bwrap", "docker": "docker", "task image": "docker"}.items()
]


@pytest.fixture(scope="module")
def image_with_box(docker_image):
    """An image with the work directory of sandboxes, where programs may write as its root."""
    image, lines = f"{docker_image}-box", [f"FROM {docker_image}", "WORKDIR /tmp", "WORKDIR /box"]
    build = ["docker", "build", "--quiet", "--tag", image, "-"]
    subprocess.run(build, input="\n".join(lines), text=True, check=True, capture_output=True)
    yield image
    subprocess.run(["docker", "rmi", "--force", image], check=True, capture_output=True)


@pytest.fixture(scope="module", params=CASES)
def sandbox(request):
    backend, level = request.param
    fixture = {"docker": "docker_image", "task image": "image_with_box"}.get(backend)
    image = request.getfixturevalue(fixture) if fixture else ""
    canary = f"canary-{secrets.token_hex(16)}"  # in the memory of the process that asks, and in its environment
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SANDBOX_TEST_SECRET", canary)
        with BACKENDS[backend](level, image) as made:
            made.canary = canary
            made.backend = backend
            yield made


@pytest.mark.parametrize("attack", ATTACKS)
def test_attack(sandbox, outside, attack):
    expected = DIFFERENT.get((sandbox.backend, attack), EXPECTED[attack][3 - sandbox.level])
    if expected == DEPENDS:
        pytest.skip("depends on the machine, and might do harm to it")
    program = PRELUDE + f"\noutside = {outside.known!r}\n"
    program += textwrap.dedent(ATTACKS[attack])
    sandbox.run(f"open('canary-left', 'w'); x = 'canary-{secrets.token_hex(16)}'", limits=LIMITS)
    with outside.watching():
        result = sandbox.run(program, limits=LIMITS)
    breaches = outside.breaches(result)
    if re.search(r"canary-[0-9a-f]{32}", result.stdout.replace(outside.canary, "")):
        breaches.append("a secret of the asking process, or of another program")
    assert bool(breaches) == (expected == OPEN), (breaches, result)
    assert sandbox.run("print('well')", limits=LIMITS).stdout == "well\n"
    if attack == "forged report":
        assert (result.status, result.exit_code) == (Status.ERROR, 1)
    if "flood" in attack:
        assert result.status is Status.OUTPUT_LIMIT
    if attack == "memory of one process":
        # docker counts what it kills where it keeps the bound
        assert result.status is (Status.KILLED if sandbox.backend == "task image" else Status.MEMORY)


def test_the_page_has_this_table():
    page = (Path(__file__).parents[2] / "docs" / "sandbox.md").read_text()
    rows = dict(re.findall(r"^\| ([a-z].*?) \| (\w+ \| \w+ \| \w+) \|$", page, re.MULTILINE))
    # whether many processes can be counted together is the machine's: the page has the machine that can
    expected = EXPECTED | {"memory of many processes": (HELD, DEPENDS, DEPENDS)}
    assert rows == {name: " | ".join(outcomes) for name, outcomes in expected.items()}
