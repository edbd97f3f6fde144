"""The host list of a job: `host slots=N` lines, and the include and exclude filters over them."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

_LINE = re.compile(r"(?P<host>\S+)\s+slots=(?P<slots>[0-9]{1,9})")
_NAME = re.compile(r"(?!-)[A-Za-z0-9._:%-]+(?:@(?!-)[A-Za-z0-9._:%-]+)?")  # host, or user@host
_MOST_CHARACTERS = 1000
_MOST_SLOTS = 1 << 16
_MOST_HOSTS = 1 << 16
_LISTED = 64


@dataclass(frozen=True)
class Hostfile:
    """The hosts of a job in rank order, each with the indices of the slots (one rank per slot) that it offers.

    ``hosts`` maps a host name to its slot indices, at least one each; a read-only copy of it is kept. Two hostfiles are
    equal when hosts, order and slots are.

    A name is `host` or `user@host`; each of the two is non-empty, has ASCII letters, digits and `._:%-` only, and does
    not begin with `-`. Raises ValueError for others, which ssh, pdsh or mpirun would take for something else.
    """

    hosts: Mapping[str, tuple[int, ...]]

    def __post_init__(self) -> None:
        for host in self.hosts:
            _check_name(host, "hosts")
        object.__setattr__(self, "hosts", MappingProxyType(dict(self.hosts)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Hostfile) and list(self.hosts.items()) == list(other.hosts.items())

    def __hash__(self) -> int:
        return hash(tuple(self.hosts.items()))

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Hostfile:
        """Return the hostfile in the file ``path``, whose lines `parse` describes. Raises FileNotFoundError, and
        ValueError for a file that is not UTF-8 or that `parse` refuses."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{os.fspath(path)}: expected UTF-8 text: {error}") from None
        return cls.parse(text, source=os.fspath(path))

    @classmethod
    def parse(cls, text: str, *, source: str = "hostfile") -> Hostfile:
        """Return the hostfile of a text with lines `host slots=N`; `#` starts a comment, empty lines are skipped.

        A host with N slots gets the indices 0 to N-1. Raises ValueError, naming ``source`` and the line, for anything
        else, a host named twice, no slot, more than 65536 hosts or slots of one, or no host at all.
        """
        hosts: dict[str, tuple[int, ...]] = {}
        lines: dict[str, int] = {}
        for number, line in enumerate(text.splitlines(), start=1):
            content = line.partition("#")[0].strip()
            if not content:
                continue
            if len(content) > _MOST_CHARACTERS:
                raise ValueError(f"{source}:{number}: expected 'host slots=N', got {len(content)} characters")
            match = _LINE.fullmatch(content)
            if match is None:
                raise ValueError(f"{source}:{number}: expected 'host slots=N', got {content!r}")
            host, slots = match["host"], int(match["slots"])
            _check_name(host, f"{source}:{number}")
            if slots > _MOST_SLOTS or len(hosts) == _MOST_HOSTS:
                raise ValueError(
                    f"{source}:{number}: expected at most {_MOST_HOSTS} hosts of at most {_MOST_SLOTS} slots each, "
                    f"got {content!r}"
                )
            if slots == 0:
                raise ValueError(
                    f"{source}:{number}: host {host!r} offers slots=0; give it at least 1 or remove the line"
                )
            if host in hosts:
                raise ValueError(f"{source}:{number}: host {host!r} is already named in line {lines[host]}")
            hosts[host], lines[host] = tuple(range(slots)), number
        if not hosts:
            raise ValueError(f"{source}: no host in it; expected lines of 'host slots=N'")
        return cls(hosts)

    @property
    def world_size(self) -> int:
        """The number of slots over all hosts, which is the number of ranks."""
        return sum(map(len, self.hosts.values()))

    def select(self, *, include: str = "", exclude: str = "") -> Hostfile:
        """Return the hostfile restricted to the slots that ``include`` names, or without those that ``exclude`` names;
        this hostfile itself with neither filter.

        A filter is `host[:slot,slot...]`, several joined by `@`: `a@b:0,2` is all of host a and two slots of host b. A
        text that is the name of a host stands for that host: `you@a` is one host if the hostfile has it, `fe80::1` the
        IPv6 host of that name, and `fe80::1:0` its slot 0. Hosts keep their order, and hosts without a slot are left
        out. Raises ValueError for a host or slot that the hostfile does not have, a host named twice, both filters, or
        when nothing is left.
        """
        if include and exclude:
            raise ValueError(f"give include ({include!r}) or exclude ({exclude!r}), not both")
        if not include and not exclude:
            return self
        named = self._parse_filter(include or exclude, "include" if include else "exclude")
        if include:
            left = {host: slots for host in self.hosts if (slots := tuple(sorted(named.get(host, ()))))}
        else:
            kept = {host: tuple(s for s in slots if s not in named.get(host, ())) for host, slots in self.hosts.items()}
            left = {host: slots for host, slots in kept.items() if slots}
        if not left:
            raise ValueError(f"exclude {exclude!r} leaves no slot of {', '.join(self.hosts)}")
        return Hostfile(left)

    def first(self, *, hosts: int | None = None, slots: int | None = None) -> Hostfile:
        """Return the first ``hosts`` hosts, with the first ``slots`` slots of each; None means all.

        Raises ValueError for a number below 1, and when there are fewer hosts, or a host has fewer slots.
        """
        if hosts is not None and not 1 <= hosts <= len(self.hosts):
            raise ValueError(f"--num_nodes {hosts}: the hostfile leaves {len(self.hosts)}: {', '.join(self.hosts)}")
        chosen = dict(list(self.hosts.items())[:hosts])
        for host, have in chosen.items():
            if slots is not None and not 1 <= slots <= len(have):
                raise ValueError(f"--num_gpus {slots}: host {host!r} has {len(have)} slots")
        return Hostfile({host: have[:slots] for host, have in chosen.items()})

    def _split_slots(self, part: str) -> tuple[str, str, str]:
        """Return (host, colon, slots) of ``part`` of a filter, `host` or `host:slots`; the last two are empty without
        slots.

        The name of an IPv6 host has colons too, so that any colon may be the one before the slots: the longest name
        that is a host of the hostfile counts. Without such a name a single colon splits the text, and several do not.
        """
        names = part.split(":")
        for count in range(len(names), 0, -1):
            if (host := ":".join(names[:count])) in self.hosts:
                return host, ":" if count < len(names) else "", ":".join(names[count:])
        return part.partition(":") if len(names) == 2 else (part, "", "")

    def _parse_filter(self, text: str, what: str) -> dict[str, set[int]]:
        """Return host -> slots that a filter (see `select`) names; ``what`` is `include` or `exclude`, for errors.

        Raises ValueError for a host or slot that the hostfile does not have, and for a host named twice.
        """
        named: dict[str, set[int]] = {}
        parts = [part.strip() for part in text.split("@")]
        while parts:
            host, colon, slots = self._split_slots(parts.pop(0))
            if parts and not colon:
                joined = self._split_slots(f"{host}@{parts[0]}")
                if joined[0] in self.hosts:
                    host, colon, slots = joined
                    del parts[0]
            if host not in self.hosts:
                raise ValueError(f"{what} {text!r}: no host {host!r} in the hostfile; it has {', '.join(self.hosts)}")
            if host in named:
                raise ValueError(f"{what} {text!r}: host {host!r} is named twice; join its slots by commas")
            try:
                wanted = [int(slot) for slot in slots.split(",")] if colon else list(self.hosts[host])
            except ValueError:
                raise ValueError(f"{what} {text!r}: expected slot numbers after {host!r}, got {slots!r}") from None
            have = set(self.hosts[host])
            for slot in wanted:
                if slot not in have:
                    listing = _slots_text(self.hosts[host])
                    raise ValueError(f"{what} {text!r}: host {host!r} has no slot {slot}; it has {listing}")
            named[host] = set(wanted)
        return named


def _slots_text(slots: tuple[int, ...]) -> str:
    """Return ``slots`` as text for a message: all of them, or of more than 64 only the first and the last."""
    return ",".join(map(str, slots)) if len(slots) <= _LISTED else f"{slots[0]} to {slots[-1]}"


def _check_name(host: str, where: str) -> None:
    """Raise ValueError unless ``host`` is `host` or `user@host` as `Hostfile` says; ``where`` begins the message."""
    if _NAME.fullmatch(host) is None:
        raise ValueError(
            f"{where}: {host!r} is no host name: expected 'host' or 'user@host', each of letters, digits and ._:%-, "
            "with no - at its beginning"
        )
