"""A service as small as can be, for tests of those that run several of it."""

import os
import socket
import sys


def serve(secret: str, config, listener: socket.socket) -> None:
    """Answer every request with this process's id and its quotas."""
    assert secret not in " ".join(sys.orig_argv)
    while True:
        connection, _ = listener.accept()
        with connection:
            connection.recv(1 << 16)
            body = f"{os.getpid()} {config.sandboxes} {config.warm}".encode()
            connection.sendall(
                b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
            )


def end(config, listener: socket.socket) -> None:
    """End at once."""
    sys.exit(3)
