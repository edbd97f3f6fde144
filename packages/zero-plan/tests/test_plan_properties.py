"""What holds for any model and setup."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zero_plan import (
    Setup,
    Transformer,
    activation_bytes,
    by_tier,
    collectives,
    estimate_step,
    link_bytes,
    load_machine,
    model_states,
    model_states_per_rank,
    step_flops,
    tier_bytes,
    working_bytes,
)

UNITS = st.lists(st.integers(1, 10**9), min_size=1, max_size=6).map(tuple)
STAGES = st.integers(0, 3)
settings.register_profile("plan", max_examples=60, deadline=None)
settings.load_profile("plan")


@st.composite
def setups(draw: st.DrawFn, least: int = 0) -> Setup:
    stage, per_node, nodes = draw(st.integers(least, 3)), draw(st.integers(1, 16)), draw(st.integers(1, 64))
    tier = st.sampled_from(["device", "host", "nvme"])
    return Setup(
        stage,
        per_node * nodes,
        per_node,
        draw(st.integers(1, 5)),
        offload_optimizer=draw(tier) if stage else "device",
        offload_parameters=draw(tier) if stage == 3 else "device",
        hpz=stage == 3 and draw(st.booleans()),
        qwz=stage == 3 and draw(st.booleans()),
        qgz=stage == 3 and draw(st.booleans()),
        alignment=draw(st.sampled_from([1, 8, 256])),
    )


@given(UNITS, setups())
def test_tiers_add_up_to_kinds_and_ranks_to_no_less_than_the_model(units: tuple[int, ...], setup: Setup) -> None:
    rows = model_states(units, setup)
    assert sum(by_tier(rows).values()) == sum(row.nbytes for row in rows)
    own = sum(row.nbytes for row in rows if row.kind != "secondary shards")
    padding = len(units) * setup.world_size * setup.alignment * setup.bytes.total
    full = sum(units) * setup.bytes.total
    assert full <= own * setup.world_size
    assert setup.stage < 3 or own * setup.world_size <= full + padding


@given(UNITS, st.integers(1, 512), st.integers(1, 8))
def test_more_ranks_and_higher_stages_never_need_more(units: tuple[int, ...], ranks: int, factor: int) -> None:
    params = sum(units)
    sizes = [model_states_per_rank(params, stage=stage, world_size=ranks) for stage in range(4)]
    assert sizes == sorted(sizes, reverse=True)
    for stage in range(4):
        more = model_states_per_rank(params, stage=stage, world_size=ranks * factor)
        assert more <= model_states_per_rank(params, stage=stage, world_size=ranks)


@given(st.integers(1, 10**12), STAGES, st.integers(1, 4096))
def test_one_unit_that_divides_evenly_is_the_published_formula(params: int, stage: int, ranks: int) -> None:
    params *= ranks
    rows = model_states(params, Setup(stage, ranks))
    assert sum(row.nbytes for row in rows) == model_states_per_rank(params, stage=stage, world_size=ranks)


@given(UNITS, setups(least=1))
def test_offload_moves_states_between_tiers_and_loses_none(units: tuple[int, ...], setup: Setup) -> None:
    kept = replace(setup, offload_optimizer="device", offload_parameters="device")
    here, there = by_tier(model_states(units, kept)), by_tier(model_states(units, setup))
    assert sum(here.values()) == sum(there.values())
    assert there.get("device", 0) <= here["device"]
    moved = tier_bytes(units, kept)
    assert moved == (0, 0, 0, 0)


@given(UNITS, setups())
def test_one_rank_sends_nothing_and_codecs_never_send_more(units: tuple[int, ...], setup: Setup) -> None:
    alone = replace(setup, world_size=1, ranks_per_node=1)
    assert collectives(units, alone) == ()
    if setup.stage == 3 and min(units) >= 100_000:
        plain = replace(setup, hpz=False, qwz=False, qgz=False)
        coded, full = (link_bytes(collectives(units, each), each) for each in (setup, plain))
        assert coded.across_per_node <= full.across_per_node


@given(UNITS, setups(), st.integers(2, 4))
def test_accumulation_never_sends_less_and_the_boundary_stages_the_same(
    units: tuple[int, ...], setup: Setup, factor: int
) -> None:
    more = replace(setup, accumulation=factor * setup.accumulation)
    once, often = (link_bytes(collectives(units, each), each).per_rank for each in (setup, more))
    assert often >= once
    assert setup.stage > 1 or often == once
    assert tier_bytes(units, more) >= tier_bytes(units, setup)


@given(UNITS, setups(), st.integers(0, 4))
def test_working_memory_grows_with_what_is_gathered_ahead(units: tuple[int, ...], setup: Setup, ahead: int) -> None:
    assert working_bytes(units, setup, ahead=ahead) <= working_bytes(units, setup, ahead=ahead + 1)


SHAPES = st.builds(
    lambda layers, head, heads, vocabulary, sequence, gated: Transformer(
        layers, 8 * head * heads, heads, vocabulary, sequence, gated=gated
    ),
    st.integers(1, 100),
    st.integers(1, 16),
    st.integers(1, 64),
    st.integers(1, 10**5),
    st.integers(1, 10**4),
    st.booleans(),
)


@given(SHAPES, st.integers(1, 8))
def test_recomputing_more_keeps_less_and_computes_more(shape: Transformer, batch: int) -> None:
    assert sum(shape.units) == shape.params
    sizes = [activation_bytes(shape, batch, checkpointing=how) for how in ("none", "attention", "operators", "full")]
    assert sizes == sorted(sizes, reverse=True)
    flops = [step_flops(shape, batch, checkpointing=how) for how in ("none", "operators", "full")]
    assert flops == sorted(flops)
    assert step_flops(shape, 2 * batch) == 2 * step_flops(shape, batch)


@given(SHAPES, setups(), st.sampled_from(["none", "operators", "full"]))
def test_the_whole_estimate_is_consistent(shape: Transformer, setup: Setup, checkpointing: str) -> None:
    found = estimate_step(shape, setup, load_machine("dgx-2"), dtype="fp16", checkpointing=checkpointing)
    assert 0 < found.time.least <= found.time.most
    seconds = {row.resource: row.seconds for row in found.bounds}
    assert seconds[found.time.binding] == found.time.least == max(s for s in seconds.values() if s is not None)
    assert found.time.most == pytest.approx(sum(s for s in seconds.values() if s is not None))
    assert (found.wear is None) == (found.tiers.disk_write == 0)
