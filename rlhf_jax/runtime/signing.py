"""Sign the messages of a run's processes, and refuse all others.

JAX's coordination service has no authentication: whoever reaches its port can publish and change
values there. Our messages therefore begin with an HMAC-SHA256 (RFC 2104) over the name that they
are published under, their sender, their number among the sender's messages, and their body.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import hmac
import itertools
import os
import stat
import struct
from collections.abc import Iterator
from pathlib import Path

KEY = "RLHF_JAX_KEY"  # an environment variable: the secret of a run
KEY_FILE = "RLHF_JAX_KEY_FILE"  # or one with the path of a file that contains it
SHORTEST_SECRET = 32  # characters
MOST_NAMES = 1 << 14  # names whose latest message number is kept
HEAD = struct.Struct("<IQ")  # sender, and the number of its message
TAG = hashlib.sha256().digest_size


class ForgedWord(ValueError):
    """Report bytes that no process of this run signed, or that are older than a read message."""


@dataclasses.dataclass(frozen=True)
class Signer:
    """Hold the key of one process, and the numbers of the latest messages it has read."""

    key: bytes  # shared by all ranks of this attempt, and no one else
    rank: int
    numbers: Iterator[int] = dataclasses.field(default_factory=itertools.count)
    # (name, sender) -> number of the latest message, in the order of their first reading
    newest: collections.OrderedDict[tuple[str, int], int] = dataclasses.field(
        default_factory=collections.OrderedDict
    )

    def sign(self, name: str, body: bytes) -> bytes:
        """Return a body as published under a name."""
        signed = HEAD.pack(self.rank, next(self.numbers)) + body
        return self._tag(name, signed) + signed

    def check(self, name: str, word: bytes, sender: int | None = None) -> bytes:
        """Return the body of a message under a name; of one sender, if it is given.

        Raises ForgedWord for anything that this run's processes did not sign for this name, and for
        a message older than one that was read there: someone has replayed it.
        """
        tag = word[:TAG]
        signed = word[TAG:]
        if len(signed) < HEAD.size or not hmac.compare_digest(tag, self._tag(name, signed)):
            raise ForgedWord("it is not signed with this run's key")
        by, number = HEAD.unpack_from(signed)
        if sender not in (None, by):
            raise ForgedWord(f"it is signed by rank {by}")
        if number < self.newest.get((name, by), 0):
            raise ForgedWord("it is an old message that was published again")
        self.newest[name, by] = number
        if len(self.newest) > MOST_NAMES:
            self.newest.popitem(last=False)
        return signed[HEAD.size :]

    def _tag(self, name: str, signed: bytes) -> bytes:
        place = name.encode()
        return hmac.digest(self.key, struct.pack("<Q", len(place)) + place + signed, "sha256")


def read_secret() -> bytes | None:
    """Return the shared secret of a run's processes; None if the environment has none.

    A secret in the environment itself is removed from it: child processes, with a reward's code in
    them, do not inherit it. Raises ValueError for a short secret, and for a file that others may
    read.
    """
    if path := os.environ.get(KEY_FILE):
        with Path(path).open() as file:
            if os.fstat(file.fileno()).st_mode & (stat.S_IRWXG | stat.S_IRWXO):
                raise ValueError(f"{KEY_FILE}: others may read {path}; chmod 600 it, and renew it.")
            secret = file.read(1 << 16).strip()
    else:
        secret = os.environ.pop(KEY, "")
    if not (path or secret):
        return None
    if len(secret) < SHORTEST_SECRET:
        raise ValueError(
            f"{KEY_FILE if path else KEY}: a key of {len(secret)} characters can be guessed;"
            f" make one of at least {SHORTEST_SECRET}: openssl rand -hex 32."
        )
    return secret.encode()
