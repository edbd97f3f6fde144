from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zero_settings import Config, ConfigError

NAMES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def sizes(config):
    return tuple(getattr(config, name) for name in NAMES)


def written(train, micro, steps):
    return {name: size for name, size in zip(NAMES, (train, micro, steps), strict=True) if size is not None}


@pytest.mark.parametrize(
    ("given_sizes", "world_size", "resolved"),
    [
        ((16, 4, 2), 2, (16, 4, 2)),
        ((16, 4, None), 2, (16, 4, 2)),
        ((16, None, 2), 2, (16, 4, 2)),
        ((None, 4, 2), 2, (16, 4, 2)),
        ((16, None, None), 2, (16, 8, 1)),
        ((None, 4, None), 2, (8, 4, 1)),
        (("auto", 4, "auto"), 3, (12, 4, 1)),
        (("auto", "auto", 4), 2, (8, 1, 4)),
        (("auto", "auto", "auto"), 2, (2, 1, 1)),
    ],
)
def test_two_sizes_give_the_third_and_one_gives_the_others(given_sizes, world_size, resolved):
    config = Config.load(written(*given_sizes), world_size=world_size)
    assert sizes(config) == resolved
    for name, size in zip(NAMES, given_sizes, strict=True):
        expected = {"auto": "auto->derived", None: "derived"}.get(size, "user")
        assert config.provenance(name) == expected


@pytest.mark.parametrize(
    ("given_sizes", "world_size", "said"),
    [
        ((32, 4, 2), 2, "4 x 2 x 2 = 16, got 32"),
        ((10, 4, None), 2, "4 x 2 = 8, got 10; 8 or 16 would do"),
        ((10, None, 3), 2, "3 x 2 = 6, got 10; 6 or 12 would do"),
        ((3, None, None), 2, "1 x 2 = 2, got 3; 2 or 4 would do"),
        ((1, None, None), 2, "1 x 2 = 2, got 1; 2 would do"),
        ((2, 4, None), 2, "4 x 2 = 8, got 2; 8 would do"),
        ((None, None, 4), 2, "only gradient_accumulation_steps = 4"),
        ((None, None, None), 2, "got neither"),
    ],
)
def test_contradictory_sizes_show_the_arithmetic(given_sizes, world_size, said):
    with pytest.raises(ConfigError) as caught:
        Config.load(written(*given_sizes), world_size=world_size)
    assert said in str(caught.value)


@settings(deadline=None)
@given(micro=st.integers(1, 64), steps=st.integers(1, 16), world_size=st.integers(1, 64), given=st.integers(1, 7))
def test_any_sufficient_part_of_a_consistent_triangle_gives_it_back(micro, steps, world_size, given):
    whole = (micro * steps * world_size, micro, steps)
    part = [size if given >> index & 1 else None for index, size in enumerate(whole)]
    if part[0] is None and part[1] is None:
        return
    config = Config.load(written(*part), world_size=world_size)
    train, micro_batch, accumulation = sizes(config)
    assert train == micro_batch * accumulation * world_size
    assert all(size in (None, found) for size, found in zip(part, sizes(config), strict=True))


@pytest.mark.parametrize("world_size", [0, -1, True, 1.5, "2"])
def test_the_world_size_is_checked_too(world_size):
    with pytest.raises(ConfigError, match="world_size"):
        Config.load({"train_batch_size": 1}, world_size=world_size)


@pytest.mark.parametrize(
    ("rule", "given_sizes", "by_world_size"),
    [
        ("keep_global_batch", (12, 1, None), {1: (12, 1, 12), 2: (12, 1, 6), 3: (12, 1, 4)}),
        ("keep_global_batch", (12, 2, 3), {1: (12, 2, 6), 2: (12, 2, 3), 3: (12, 2, 2)}),
        ("scale", (12, 2, 3), {1: (6, 2, 3), 2: (12, 2, 3), 3: (18, 2, 3)}),
        ("scale", (None, 2, None), {1: (2, 2, 1), 3: (6, 2, 1)}),
    ],
)
def test_an_elastic_batch_keeps_what_its_rule_names_at_any_number_of_ranks(rule, given_sizes, by_world_size):
    raw = {**written(*given_sizes), "elastic": {"batch_size": rule}}
    for world_size, resolved in by_world_size.items():
        config = Config.load(raw, world_size=world_size)
        assert sizes(config) == resolved
        for name, size in zip(NAMES, given_sizes, strict=True):
            assert config.provenance(name) == ("user" if getattr(config, name) == size else "derived")


@pytest.mark.parametrize(
    ("rule", "given_sizes", "said"),
    [
        (
            "keep_global_batch",
            (8, 2, None),
            "train_batch_size: expected a multiple of train_micro_batch_size_per_gpu x",
        ),
        (
            "keep_global_batch",
            (8, None, None),
            "train_micro_batch_size_per_gpu: expected a number with elastic.batch_size",
        ),
        (
            "keep_global_batch",
            (None, 2, 1),
            'train_batch_size: expected a number with elastic.batch_size = "keep_global',
        ),
        (
            "scale",
            (8, None, None),
            'train_micro_batch_size_per_gpu: expected a number with elastic.batch_size = "scale"',
        ),
    ],
)
def test_an_elastic_batch_that_its_rule_cannot_keep_is_refused_by_name(rule, given_sizes, said):
    with pytest.raises(ConfigError) as caught:
        Config.load({**written(*given_sizes), "elastic": {"batch_size": rule}}, world_size=3)
    assert said in str(caught.value)


@pytest.mark.parametrize("rule", [None, "scale"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_derived_batch_of_more_than_64_bits_is_refused(world_size, rule):
    given = written(None, 2**61, 4) | ({} if rule is None else {"elastic": {"batch_size": rule}})
    with pytest.raises(ConfigError, match=f"train_batch_size: .* at most 64 bits, got {2**63 * world_size}"):
        Config.load(given, world_size=world_size)


@pytest.mark.parametrize(("world_size", "size", "train"), [(2, 2, 3), (4, 2, 6), (4, 4, 3), (4, 1, 12)])
def test_ranks_that_share_a_sequence_share_its_samples(world_size, size, train):
    source = {"train_micro_batch_size_per_gpu": 3, "sequence_parallel_size": size}
    config = Config.load(source, world_size=world_size)
    assert sizes(config) == (train, 3, 1)
    assert (config.world_size, config.data_parallel_size) == (world_size, world_size // size)
    with pytest.raises(ConfigError, match=f"3 x 1 x {world_size // size} = {train}"):
        Config.load({**source, "train_batch_size": train + 1, "gradient_accumulation_steps": 1}, world_size=world_size)


def test_shards_of_states_divide_the_ranks_of_all_sequences(loaded):
    replicas = {"zero_optimization": {"stage": 3, "mics_shard_size": 4}, "sequence_parallel_size": 2}
    assert loaded(replicas, world_size=8).data_parallel_size == 4


def test_a_number_of_ranks_that_no_sequence_fits_is_refused(refused):
    error = refused({"sequence_parallel_size": 3}, world_size=4)
    assert [problem.path for problem in error.problems] == ["sequence_parallel_size"]
    assert "a divisor of the number of ranks, 4 (1, 2, 4)" in str(error) and "3" in str(error)


def test_virtual_ranks_share_no_sequence(refused):
    error = refused({"sequence_parallel_size": 2, "deterministic": {"across_world_sizes": 4}}, world_size=4)
    assert [problem.path for problem in error.problems] == ["sequence_parallel_size"]
    assert "expected 1 with deterministic.across_world_sizes" in str(error)
