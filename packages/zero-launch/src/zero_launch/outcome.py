"""Put in order what the launcher knows of a job's end: failures of all hosts by one clock."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from zero_launch.peers import Peer
from zero_launch.report import RankFailure


def failures_in_order(
    peers: Sequence[Peer], lost: Sequence[tuple[float, RankFailure]], began_at: float
) -> list[RankFailure]:
    """Every rank that failed by itself, the first one first.

    ``lost``: ranks of lost hosts, with when those were last heard; ``began_at``: when the attempt began. Both are
    seconds since the epoch by this host's clock, to which the times that other hosts reported are corrected.
    """
    found = list(lost)
    for peer in peers:
        offset = 0.0 if peer.channel is None else peer.channel.clock_offset
        for message in peer.failures:
            at = message["at"] + offset
            told = {field.name: message[field.name] for field in dataclasses.fields(RankFailure)}
            found.append((at, RankFailure(**{**told, "seconds": at - began_at})))
    return [failure for _, failure in sorted(found, key=lambda pair: pair[0])]


def notes(peers: Sequence[Peer]) -> list[str]:
    """Return what hosts had to remark: what ranks left behind, and did not end when asked to."""
    return [f"{note} on {peer.name}" for peer in peers for note in peer.notes]
