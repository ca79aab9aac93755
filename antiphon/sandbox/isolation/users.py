"""Users for programs that root starts: one each, so that none may signal or read another."""

import os
import socket
from collections.abc import Iterable
from pathlib import Path

UIDS = range(60578, 61184)  # that neither systemd nor the usual tools give out


def claim() -> tuple[socket.socket, int]:
    """A user that no other sandbox on this machine runs programs as, and what holds it: a socket of its name. `OSError` if all
    are taken."""
    holder = socket.socket(socket.AF_UNIX)
    for uid in UIDS:
        try:
            holder.bind(f"\0antiphon-user-{uid}")
        except OSError:  # taken
            continue
        return holder, uid
    holder.close()
    raise OSError(f"all {len(UIDS)} users for programs are taken")


def hidden(paths: Iterable[str]) -> bool:
    """Whether some of the paths lie where other users may not go."""
    above = {parent for path in paths for parent in Path(path).parents}
    return any(not os.stat(directory).st_mode & 0o001 for directory in above)
