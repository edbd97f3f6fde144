"""Which heads a rank computes: arithmetic, without tensors."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from .errors import SequenceError


@dataclass(frozen=True)
class HeadPlan:
    """How the heads of an attention spread over ranks: rank r computes the ``query_heads`` query heads from number
    r * ``query_heads`` on.

    ``query_heads``, ``key_heads``: heads of queries, and of keys and values, on each rank. ``padding``: query heads of
    zeros that follow the model's own. ``sent``: the number of each key head that is sent, rank by rank. ``copies``: how
    many times in a row ``sent`` has each key head; 0 where it has them in another order. ``places``: for each rank, the
    index of each of its query heads' key head among the key heads that it gets; None where each key head serves equally
    many query heads, in order.
    """

    query_heads: int
    key_heads: int
    padding: int
    copies: int
    sent: tuple[int, ...]
    places: tuple[tuple[int, ...], ...] | None


@cache
def plan_heads(query_heads: int, key_heads: int, ranks: int, *, pad: bool = False) -> HeadPlan:
    """Return how ``query_heads`` query heads and ``key_heads`` key heads, each of which serves an equal group of query
    heads, spread over ``ranks`` ranks.

    A key head goes to every rank that computes a query head of its group, so there may be fewer key heads than ranks.
    ``pad``: if the ranks do not divide the query heads, heads of zeros follow them. Raises `SequenceError` if the ranks
    do not divide the query heads and ``pad`` is false, and if the key heads do not.
    """
    if query_heads % key_heads:
        raise SequenceError(f"expected key heads that divide the {query_heads} query heads, got {key_heads}")
    padding = -query_heads % ranks
    if padding and not pad:
        raise SequenceError(
            f"{query_heads} attention heads do not spread over {ranks} ranks: expected a sequence parallel size that "
            f"divides them, one of {_divisors(query_heads)}, or pad_heads=True, which computes {padding} heads of zeros"
        )
    per_rank = (query_heads + padding) // ranks
    group = query_heads // key_heads
    needed = [
        [min(head, query_heads - 1) // group for head in range(rank * per_rank, (rank + 1) * per_rank)]
        for rank in range(ranks)
    ]
    distinct = [sorted(set(heads)) for heads in needed]
    width = max(map(len, distinct))
    rows = [heads + heads[-1:] * (width - len(heads)) for heads in distinct]
    sent = tuple(head for row in rows for head in row)
    places = tuple(tuple(map(row.index, heads)) for row, heads in zip(rows, needed, strict=True))
    in_order = tuple(place * width // per_rank for place in range(per_rank))
    is_even = per_rank % width == 0 and all(row == in_order for row in places)
    copies = len(sent) // key_heads
    is_copied = sent == tuple(head for head in range(key_heads) for _ in range(copies))
    return HeadPlan(per_rank, width, padding, copies if is_copied else 0, sent, None if is_even else places)


def _divisors(number: int) -> list[int]:
    """Return the divisors of ``number``, ascending."""
    return [size for size in range(1, number + 1) if number % size == 0]
