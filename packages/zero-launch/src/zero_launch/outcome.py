"""The end of a job on several hosts: the failures of all hosts, ordered by one clock."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from zero_launch.desync import abandoned
from zero_launch.peers import Peer
from zero_launch.report import RankFailure


def failures_in_order(
    peers: Sequence[Peer], lost: Sequence[tuple[float, RankFailure]], began_at: float
) -> list[RankFailure]:
    """Return the ranks that failed by themselves, in the order of their failures.

    ``peers``: the hosts, with the failures that they reported. ``lost``: failures of ranks of lost hosts, each with
    when the host was last heard; ``began_at``: when the attempt began. Both times are seconds since the epoch by this
    host's clock, to which those that other hosts reported are corrected; `seconds` of each reported failure is counted
    from ``began_at``.
    """
    found = list(lost)
    for peer in peers:
        for message in peer.failures:
            at = message["at"] + peer.clock_offset
            told = {field.name: message[field.name] for field in dataclasses.fields(RankFailure)}
            found.append((at, RankFailure(**{**told, "seconds": at - began_at})))
    return [failure for _, failure in sorted(found, key=lambda pair: pair[0])]


def describe_abandoned(peers: Sequence[Peer], failures: Sequence[RankFailure], began_at: float) -> str | None:
    """Return a text about ranks that waited for ranks which had ended with status 0 before any failed; None if none.

    ``peers``: the hosts, with what they reported in `ready`. ``failures`` are those of `failures_in_order`,
    ``began_at`` is as there.
    """
    failed = began_at + min((failure.seconds for failure in failures), default=0.0)
    ended = [rank for peer in peers for rank, at in peer.ended if at + peer.clock_offset < failed]
    records = {rank: record for peer in peers for rank, record in peer.records.items()}
    return abandoned(records, sorted(ended), is_over=True)


def notes(peers: Sequence[Peer]) -> list[str]:
    """Return the notes of all hosts, each with the host's name: processes that ranks left behind and that had to be
    killed."""
    return [f"{note} on {peer.name}" for peer in peers for note in peer.notes]
