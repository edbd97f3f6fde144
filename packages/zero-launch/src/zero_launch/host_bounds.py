"""How many hosts a job of MIN to MAX ranks needs; arithmetic alone."""

from __future__ import annotations


def host_bounds(slots: list[int], least: int, most: int) -> tuple[int, int]:
    """Return the fewest and the most hosts with which a job has from ``least`` to ``most`` ranks.

    ``slots``: number of ranks of each host. With fewer hosts than the first number there are never ``least`` ranks;
    with the second number there are from ``least`` to ``most``, whichever hosts they are. Raises ValueError if no
    number of hosts fits.
    """
    down = sorted(slots, reverse=True)
    fewest = next((n for n in range(1, len(down) + 1) if sum(down[:n]) >= least), None)
    if fewest is None:
        raise ValueError(f"--elastic {least}:{most}: the hosts have {sum(slots)} ranks together, {least} are needed")
    fitting = max((n for n in range(len(down) + 1) if sum(down[:n]) <= most), default=0)
    if fitting < fewest or sum(down[len(down) - fitting :]) < least:
        raise ValueError(
            f"--elastic {least}:{most}: with {', '.join(map(str, slots))} ranks per host no number of hosts always has "
            f"from {least} to {most} ranks; choose wider bounds, or as many slots on every host"
        )
    return fewest, fitting
