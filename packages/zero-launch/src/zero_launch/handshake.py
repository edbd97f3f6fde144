"""A handshake of two ends of a connection: each shows that it knows the job's token, which never travels.

The launcher sends a number drawn for this connection; the host answers with one of its own, and with a keyed digest
(HMAC-SHA256) of both; the launcher answers with another. Each line after that carries a digest under a key of this
connection, with the line's direction and number, so that nobody on the way can add, change or repeat one. Lines can be
read on the way: this is no encryption.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import stat
import struct
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from zero_launch.messages import encode, read_object

TOKEN_VARIABLE = "ZERO_LAUNCH_TOKEN"
_FIRST_LINE_BYTES = 1 << 14
_LEAST_TOKEN = 16
_ADVICE = f"{TOKEN_VARIABLE}, or the file ~/.zero-launch/token, is to be the same on every node"


class Refused(ConnectionError):
    """The connection was refused, here or by the other end; the text says why."""


class Seal:
    """Signs the lines that this end sends and checks the lines that it receives, both in order.

    ``key``: of this connection. ``launcher``: this end is the launcher's.
    """

    def __init__(self, key: bytes, *, launcher: bool) -> None:
        self._key = key
        self._names = (b"launcher", b"host") if launcher else (b"host", b"launcher")
        self._counts = [0, 0]

    def sign(self, line: bytes) -> bytes:
        """Return the next line to send, with its digest in front; each line must be signed once and sent in that
        order."""
        return self._digest(0, line) + b" " + line

    def open(self, line: bytes) -> bytes:
        """Return a received line without its digest. Raises ValueError when it is not the other end's next
        line, after which the seal is of no more use."""
        digest, _, content = line.partition(b" ")
        if not hmac.compare_digest(digest, self._digest(1, content)):
            raise ValueError("a line that the other end did not send")
        return content

    def _digest(self, direction: int, line: bytes) -> bytes:
        """Return the hexadecimal digest of the next line in ``direction`` (0: sent, 1: received), and count the
        line."""
        number = self._counts[direction]
        self._counts[direction] += 1
        header = self._names[direction] + struct.pack("<Q", number)
        return hmac.new(self._key, header + line, hashlib.sha256).hexdigest().encode()


def welcome(
    reader: BinaryIO, writer: BinaryIO, tokens: Collection[str], admit: Callable[[str, Mapping[str, Any]], str | None]
) -> Seal:
    """Do the launcher's part of the handshake, and return the seal of the connection if the host knows one of
    ``tokens``.

    ``admit``: called with the token and what the host says of itself; returns why it cannot take part, or None. Raises
    Refused, after telling the host, when it may not take part; ValueError or OSError when it does not answer properly.
    """
    ours = secrets.token_hex(16)
    _send(writer, {"kind": "challenge", "number": ours})
    answer = read_object(_read_line(reader))
    theirs, proof, about = answer.get("number"), answer.get("proof"), answer.get("about")
    if type(theirs) is not str or type(proof) is not str or type(about) is not str:
        raise ValueError("no answer to the challenge")
    said = f"{ours} {theirs} {about}"
    token = next((t for t in tokens if hmac.compare_digest(_proof(t, "host", said), proof.encode())), None)
    unknown = f"it does not know the job's token; {_ADVICE}"
    why = unknown if token is None else admit(token, read_object(about.encode()))
    if token is None or why is not None:
        _send(writer, {"kind": "refused", "why": why})
        raise Refused(str(why))
    _send(writer, {"kind": "welcome", "proof": _proof(token, "launcher", said).decode()})
    return Seal(_proof(token, "lines", said), launcher=True)


def present(reader: BinaryIO, writer: BinaryIO, token: str, about: Mapping[str, Any]) -> Seal:
    """Do the host's part of the handshake, check that the launcher knows ``token`` too, and return the connection's
    seal.

    ``about``: what this host says of itself, as plain data. Raises Refused with the launcher's reason, or when the
    other end does not know the token; ValueError or OSError when it does not answer properly.
    """
    challenge = read_object(_read_line(reader))
    theirs = challenge.get("number")
    if type(theirs) is not str:
        raise Refused("what answers there is no launcher")
    ours = secrets.token_hex(16)
    text = encode(about).decode()
    said = f"{theirs} {ours} {text}"
    proof = _proof(token, "host", said).decode()
    _send(writer, {"kind": "answer", "number": ours, "proof": proof, "about": text})
    verdict = read_object(_read_line(reader))
    if verdict.get("kind") == "refused":
        raise Refused(f"the launcher does not let this host take part: {verdict.get('why')}")
    shown = verdict.get("proof")
    if type(shown) is not str or not hmac.compare_digest(_proof(token, "launcher", said), shown.encode()):
        raise Refused(f"what answers there does not know the job's token; {_ADVICE}")
    return Seal(_proof(token, "lines", said), launcher=False)


def _read_line(reader: BinaryIO) -> bytes:
    """Return the next line of the handshake from ``reader``. Raises ValueError if the connection ended or the line has
    16 KiB or more."""
    line = reader.readline(_FIRST_LINE_BYTES)
    if not line.endswith(b"\n"):
        raise ValueError("the connection ended, or a first line is too long")
    return line


def _send(writer: BinaryIO, message: Mapping[str, Any]) -> None:
    """Write ``message`` as a line of JSON, and flush it."""
    writer.write(encode(message) + b"\n")
    writer.flush()


def _proof(token: str, who: str, said: str) -> bytes:
    """Return the hexadecimal digest by which ``who`` (`host`, `launcher`; `lines` for the seal's key) shows that it
    knows ``token``. ``said``: both numbers and what the host says of itself."""
    return hmac.new(token.encode(), f"zero-launch 1 {who} {said}".encode(), hashlib.sha256).hexdigest().encode()


def shared_token(environ: Mapping[str, str], home: Path) -> str:
    """Return the token that all nodes of a job share when each has its own command line.

    It is ``ZERO_LAUNCH_TOKEN`` in ``environ`` or, without it, the content of `.zero-launch/token` in ``home``. That
    file is written with a new token if it is missing: nodes with the same home folder share it.

    Raises ValueError for a token of fewer than 16 characters, PermissionError for a file of another user or one that
    others may read, and OSError for one that cannot be read or written.
    """
    told = environ.get(TOKEN_VARIABLE)
    if told is None:
        return _token_of(home / ".zero-launch" / "token")
    if len(told) < _LEAST_TOKEN:
        raise ValueError(f"{TOKEN_VARIABLE} has {len(told)} characters; at least {_LEAST_TOKEN} random ones are needed")
    return told


def _token_of(path: Path) -> str:
    """Return the token in the file ``path``; if the file is missing, write it with a new token first. Raises ValueError
    for a token that is too short, PermissionError for a file of another user or one that others may read, and OSError
    for a symbolic link or a file that cannot be read or written."""
    if not path.exists():
        path.parent.mkdir(mode=0o700, exist_ok=True)
        scratch = path.with_name(f"token.{secrets.token_hex(8)}")
        with open(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
            file.write(secrets.token_hex(32))
        with contextlib.suppress(FileExistsError):
            os.link(scratch, path)  # of several nodes that come at the same time, one writes it
        scratch.unlink()
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), encoding="ascii") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise PermissionError(f"{path}: expected a file of yours that nobody else may read; run: chmod 600 {path}")
        token = file.read(4096).strip()
    if len(token) < _LEAST_TOKEN:
        raise ValueError(f"{path}: expected a token of at least {_LEAST_TOKEN} characters; remove it for a new one")
    return token
