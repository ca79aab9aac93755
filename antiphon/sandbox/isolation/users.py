"""Users for programs that root starts: one for each, so that no program can signal or read another."""

import os
import socket
from collections.abc import Iterable
from pathlib import Path

UIDS = range(60578, 61184)  # neither systemd nor the usual tools assign these


def claim_user() -> tuple[socket.socket, int]:
    """Reserve a user that no other sandbox on this machine runs programs as.

    Returns:
        A socket bound to the user's name, which reserves the user until it is closed, and the user id.

    Raises:
        OSError: All users are taken.
    """
    holder = socket.socket(socket.AF_UNIX)
    for uid in UIDS:
        try:
            holder.bind(f"\0antiphon-user-{uid}")
        except OSError:  # taken
            continue
        return holder, uid
    holder.close()
    raise OSError(f"all {len(UIDS)} users for programs are taken")


def have_private_parents(paths: Iterable[str]) -> bool:
    """Return True if other users may not enter a directory above any of the paths."""
    above = {parent for path in paths for parent in Path(path).parents}
    return any(not os.stat(directory).st_mode & 0o001 for directory in above)
