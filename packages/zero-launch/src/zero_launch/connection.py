"""A host's connection to a launcher that listens."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

from zero_launch.handshake import Refused, Seal, present

_SAY_SECONDS = 5.0
_TRY_SECONDS = 10.0


@dataclass(frozen=True)
class Connection:
    """An authenticated connection to the launcher: its streams, the seal that signs and checks their lines, and this
    host's own address on it."""

    reader: BinaryIO
    writer: BinaryIO
    seal: Seal
    own_address: str


def connect(
    address: str, port: int, seconds: float, *, token: str, about: Mapping[str, Any], quiet: bool = True
) -> Connection:
    """Connect to the launcher at ``address`` and ``port``, and return the authenticated connection.

    ``token``: the job's. ``about``: what this host says of itself (plain data), `node_rank` and `nproc` where it comes
    by itself. Tries for ``seconds``, because the launcher may start later; prints that it waits after 5 s, unless
    ``quiet``. Raises ConnectionError when no launcher answers in time, and `Refused` at once when the launcher does not
    let this host take part.
    """
    begin = time.monotonic()
    said = quiet
    while True:
        try:
            return _try_once(address, port, token, about)
        except Refused as error:
            raise Refused(f"{address}:{port}: {error}") from None
        except (OSError, ValueError) as error:
            waited = time.monotonic() - begin
            if waited > seconds:
                raise ConnectionError(
                    f"no launcher answers at {address}:{port} after {seconds:.0f} s ({error}); "
                    "is node 0 running, with the same --master_addr and --master_port?"
                ) from error
            if waited > _SAY_SECONDS and not said:
                said = True
                print(f"zero-launch: waiting for node 0 at {address}:{port} ({error})", file=sys.stderr, flush=True)
            time.sleep(0.5)


def _try_once(address: str, port: int, token: str, about: Mapping[str, Any]) -> Connection:
    """Try once to connect to the launcher at ``address`` and ``port`` and to do the handshake with the job's ``token``;
    return the connection. ``about``: what this host says of itself. Raises OSError if there is no connection,
    ValueError for no proper answer, and `Refused` if the launcher does not let this host take part."""
    connection = socket.create_connection((address, port), timeout=_TRY_SECONDS)
    try:
        reader, writer = connection.makefile("rb"), connection.makefile("wb")
        seal = present(reader, writer, token, about)
    except BaseException:
        connection.close()
        raise
    connection.settimeout(None)
    return Connection(reader, writer, seal, str(connection.getsockname()[0]))
