"""The end of a job on several hosts: the failures of all hosts, ordered by one clock."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from zero_launch.desync import FlightRecord, abandoned, difference
from zero_launch.peers import Peer
from zero_launch.report import LaunchError, RankFailure


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

    ``peers``: the hosts, with what they reported in `ready`. ``failures``: the ranks that failed by themselves.
    ``began_at``: when the attempt began, in seconds since the epoch by this host's clock.
    """
    failed = began_at + min((failure.seconds for failure in failures), default=0.0)
    ended = [rank for peer in peers for rank, at in peer.ended if at + peer.clock_offset < failed]
    return abandoned(flight_records(peers), sorted(ended), is_over=True)


def notes(peers: Sequence[Peer]) -> list[str]:
    """Return the notes of all hosts, each with the host's name: processes that ranks left behind and that had to be
    killed."""
    return [f"{note} on {peer.name}" for peer in peers for note in peer.notes]


def flight_records(peers: Sequence[Peer]) -> dict[int, FlightRecord]:
    """Return what the hosts reported of their ranks' flight recorders, by rank; ranks without a record are left out."""
    return {rank: record for peer in peers for rank, record in peer.records.items()}


def job_error(
    peers: Sequence[Peer],
    failures: Sequence[RankFailure],
    world_size: int,
    *,
    stopped: str | None,
    troubles: Sequence[str],
    divergence: str | None,
    asked: bool,
) -> LaunchError:
    """Return the error of a job that failed, with what its hosts reported of their ranks' ends.

    ``failures``: of `failures_in_order`. ``world_size``: of the last attempt. ``stopped``: why the launcher stopped the
    job, None if it did not; shown where neither a failure nor a divergence tells more. ``troubles``: further lines of
    the report. ``divergence``: why the ranks cannot continue together, if that is known; else the flight records are
    compared. ``asked``: the ranks had been asked to save and leave.
    """
    records = flight_records(peers)
    divergence = divergence or (difference(records) if len(records) > 1 else None)
    why = [stopped] if stopped and not failures and divergence is None else []
    fates = [fate for peer in peers for fate in peer.fates]
    folders = [f"logs on {peer.name}: {peer.folder}" for peer in peers if peer.folder]
    told = [*why, *troubles, *fates, *notes(peers), *folders]
    return LaunchError(failures, world_size, told, divergence=divergence, flight=records, asked=asked)
