"""The wire protocol of the run store: each message carries an HMAC over its number and the challenges of both ends."""

import hmac
import struct

CHALLENGE = 32  # bytes, of the server's and of the client's
MAC = 32  # bytes
HEAD = struct.Struct(f"!{MAC}sI")  # before each request and each answer: HMAC and length
MAX_MESSAGE = 4 << 20  # bytes
PROOF_SECONDS = 20.0  # within which a connection has to prove that it knows the secret


class MessageAuthenticator:
    """Computes the HMACs of the messages of one connection, in their order."""

    def __init__(self, secret: bytes, challenges: bytes) -> None:
        self._secret = secret
        self._challenges = challenges
        self._number = 0

    def next(self, content: bytes) -> bytes:
        """Return the HMAC of the next message."""
        self._number += 1
        return hmac.digest(self._secret, self._challenges + self._number.to_bytes(8, "big") + content, "sha256")
