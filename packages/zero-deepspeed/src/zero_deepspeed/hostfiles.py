"""`deepspeed.launcher.runner`: hostfiles and the filters over them, as plain mappings of host names; and lists of cores
(`deepspeed.utils.numa`)."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path

from zero_launch import Hostfile
from zero_launch.cores import parse_cores

logger = logging.getLogger("DeepSpeed")


def parse_hostfile(hostfile_lines: Iterable[str]) -> dict[str, int]:
    """Return host -> number of slots (ranks that it takes), in order, of lines `host slots=N`; empty lines and comments
    (`#`) are skipped.

    Raises ValueError for any other line, a host named twice, no slot, or no host at all.
    """
    hosts = Hostfile.parse("\n".join(line.rstrip("\n") for line in hostfile_lines)).hosts
    return {host: len(slots) for host, slots in hosts.items()}


def fetch_hostfile(hostfile_path: str) -> dict[str, int] | None:
    """Return host -> number of slots of a hostfile, by `parse_hostfile`; None, with a warning, where there is none."""
    path = Path(hostfile_path)
    if not path.is_file():
        logger.warning("no hostfile %s: the job runs on this host alone", hostfile_path)
        return None
    return parse_hostfile(path.read_text(encoding="utf-8").splitlines())


def parse_resource_filter(
    host_info: Mapping[str, list[int]], include_str: str = "", exclude_str: str = ""
) -> dict[str, list[int]]:
    """Return host -> slots of ``host_info``, in its order: only those that ``include_str`` names, or all but those that
    ``exclude_str`` names. Hosts without a slot are left out.

    A filter is `host[:slot,slot...]`, several joined by `@`; a host alone means all its slots. Raises ValueError for
    both filters, another form, and a host or slot that ``host_info`` does not have.
    """
    if include_str and exclude_str:
        raise ValueError(f"include_str {include_str!r} and exclude_str {exclude_str!r}: give one of them, not both")
    if not include_str and not exclude_str:
        return dict(host_info)
    named = _named_slots(host_info, include_str or exclude_str)
    chosen = {
        host: [slot for slot in slots if (slot in named.get(host, ())) == bool(include_str)]
        for host, slots in host_info.items()
    }
    return {host: slots for host, slots in chosen.items() if slots}


def parse_inclusion_exclusion(resource_pool: Mapping[str, int], inclusion: str, exclusion: str) -> dict[str, list[int]]:
    """Return host -> slots of the hosts in ``resource_pool`` (host -> number of slots) that the filters leave.

    ``inclusion`` names the slots to keep, ``exclusion`` those to leave out, as `host[:slot,slot...]`, several joined by
    `@`; at most one of them is not empty. Raises ValueError for both, another form, and an unknown host or slot.
    """
    return parse_resource_filter(
        {host: list(range(slots)) for host, slots in resource_pool.items()}, inclusion, exclusion
    )


def parse_range_list(range_str: str) -> list[int]:
    """Return the cores of a list such as `1,3-5`: 1, 3, 4, 5. Raises ValueError for anything else, and where they do
    not rise."""
    cores = parse_cores(range_str)
    if cores != sorted(cores):
        raise ValueError(f"{range_str!r}: expected cores in rising order, got {cores}")
    return cores


def _named_slots(host_info: Mapping[str, list[int]], text: str) -> dict[str, set[int]]:
    """Return host -> slots that the filter ``text`` names, `host[:slot,slot...]` or several joined by `@`, of
    ``host_info`` (host -> its slots). Raises ValueError for another form, and an unknown host or slot."""
    named: dict[str, set[int]] = {}
    for part in text.split("@"):
        host, colon, slots = part.partition(":")
        if host not in host_info:
            raise ValueError(f"{text!r}: no host {host!r}; there are {', '.join(host_info)}")
        try:
            wanted = {int(slot) for slot in slots.split(",")} if colon else set(host_info[host])
        except ValueError:
            raise ValueError(f"{text!r}: expected slot numbers after {host!r}, got {slots!r}") from None
        if missing := wanted - set(host_info[host]):
            raise ValueError(f"{text!r}: host {host!r} has no slot {min(missing)}; it has {host_info[host]}")
        named.setdefault(host, set()).update(wanted)
    return named
