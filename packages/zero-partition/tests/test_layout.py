"""Layout arithmetic: whatever the shapes, world size and alignment, nothing is lost, doubled or crooked."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zero_partition import Layout, UnitLayout

SHAPES = st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), max_size=8).map(
    lambda shapes: {f"p{i}": shape for i, shape in enumerate(shapes)}
)


@given(shapes=SHAPES, world_size=st.integers(1, 9), alignment=st.integers(1, 70))
def test_shards_are_equal_and_aligned_and_the_padding_is_less_than_one_alignment_per_rank(
    shapes: dict[str, tuple[int, ...]], world_size: int, alignment: int
) -> None:
    unit = UnitLayout.from_shapes("u", shapes, world_size, alignment)
    assert unit.used_numel == sum(math.prod(shape) for shape in shapes.values())
    assert unit.shard_numel % alignment == 0
    ends = [0] + [unit.shard_range(rank)[1] for rank in range(world_size)]
    assert [unit.shard_range(rank)[0] for rank in range(world_size)] == ends[:-1]
    assert all(after - before == unit.shard_numel for before, after in itertools.pairwise(ends))
    assert ends[-1] == unit.numel
    assert 0 <= unit.numel - unit.used_numel < max(1, alignment * world_size)


@given(shapes=SHAPES, world_size=st.integers(1, 9), alignment=st.integers(1, 70))
def test_entries_follow_each_other_without_holes(
    shapes: dict[str, tuple[int, ...]], world_size: int, alignment: int
) -> None:
    unit = UnitLayout.from_shapes("u", shapes, world_size, alignment)
    assert [(e.name, e.shape) for e in unit.entries] == list(shapes.items())
    assert [e.offset for e in unit.entries] == [0, *(e.end for e in unit.entries)][:-1]


@given(shapes=SHAPES, world_size=st.integers(1, 9), alignment=st.integers(1, 70))
def test_the_fragments_of_all_ranks_tile_every_parameter_exactly_once(
    shapes: dict[str, tuple[int, ...]], world_size: int, alignment: int
) -> None:
    unit = UnitLayout.from_shapes("u", shapes, world_size, alignment)
    pieces: dict[str, list[tuple[int, int]]] = {name: [] for name in shapes}
    for rank in range(world_size):
        behind = 0
        for fragment in unit.fragments(rank):
            assert fragment.rank == rank and fragment.length > 0
            assert fragment.shard_offset >= behind  # in order, and none overlaps the one before
            behind = fragment.shard_offset + fragment.length
            place = rank * unit.shard_numel + fragment.shard_offset
            assert place == fragment.entry.offset + fragment.param_offset
            pieces[fragment.entry.name].append((fragment.param_offset, fragment.length))
        assert behind <= unit.shard_numel
    for name, parts in pieces.items():
        covered = 0
        for offset, length in parts:
            assert offset == covered
            covered += length
        assert covered == math.prod(shapes[name])


def test_a_scalar_has_one_element_and_an_empty_parameter_none() -> None:
    unit = UnitLayout.from_shapes("u", {"empty": (0, 4), "scalar": (), "row": (3,)}, 2)
    assert [(f.entry.name, f.rank, f.length) for r in range(2) for f in unit.fragments(r)] == [
        ("scalar", 0, 1),
        ("row", 0, 1),
        ("row", 1, 2),
    ]
    assert (
        not list(UnitLayout.from_shapes("none", {}, 3).fragments(0))
        and UnitLayout.from_shapes("none", {}, 3).numel == 0
    )


@pytest.mark.parametrize(("world_size", "alignment"), [(0, 1), (1, 0), (-2, 4)])
def test_a_world_or_alignment_below_one_is_refused_with_the_units_name(world_size: int, alignment: int) -> None:
    with pytest.raises(ValueError, match=f"unit 'block.3'.*got {world_size}, {alignment} and 1"):
        UnitLayout.from_shapes("block.3", {"w": (2,)}, world_size, alignment)


def test_a_layout_finds_parameters_by_name_and_names_the_unknown() -> None:
    layout = Layout(
        (UnitLayout.from_shapes("a", {"x": (3,)}, 2), UnitLayout.from_shapes("b", {"y": (4,), "z": (2, 2)}, 2))
    )
    unit, entry = layout.find("z")
    assert unit.name == "b" and (entry.offset, entry.numel, entry.end) == (4, 4, 8)
    assert (layout.numel, layout.used_numel) == (4 + 8, 3 + 8)
    with pytest.raises(KeyError, match="no parameter 'w' in the layout \\(3 parameters\\)"):
        layout.find("w")


def test_parameters_begin_at_multiples_of_the_entry_alignment_and_the_rest_is_named_as_gaps() -> None:
    unit = UnitLayout.from_shapes("block", {"a": (3,), "b": (5, 2), "c": ()}, 2, 8, entry_alignment=8)
    assert [entry.offset for entry in unit.entries] == [0, 8, 24]
    assert unit.shard_numel == 16 and unit.used_numel == 14
    assert unit.gaps == ((3, 8), (18, 24), (25, 32))
    assert [(f.entry.name, f.param_offset, f.length) for f in unit.fragments(1)] == [("b", 8, 2), ("c", 0, 1)]
