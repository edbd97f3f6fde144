from __future__ import annotations

import json
import random

import pytest

from zero_precision import DynamicLossScale, LossScaleError, NoLossScale, PrecisionError, StaticLossScale


def run(scale, overflows):
    trace = []
    for overflow in overflows:
        taken = scale.update(overflow)
        assert taken is not overflow
        trace.append(scale.scale)
    return trace


def test_without_a_loss_scale_only_the_overflowing_step_is_skipped():
    assert run(NoLossScale(), [True, False, True]) == [1.0, 1.0, 1.0]


def test_a_static_scale_never_moves():
    assert run(StaticLossScale(128), [True, False, True, True]) == [128.0] * 4


def test_hysteresis_delays_the_first_halving_and_is_spent_once():
    scale = DynamicLossScale(initial_scale_power=8, hysteresis=3)
    assert run(scale, [True, True, True, False, True]) == [256, 256, 128, 128, 64]


def test_consecutive_hysteresis_is_refilled_by_every_clean_step():
    scale = DynamicLossScale(initial_scale_power=8, hysteresis=2, consecutive_hysteresis=True)
    assert run(scale, [True, False, True, False, True, True]) == [256, 256, 256, 256, 256, 128]


def test_the_scale_doubles_after_each_clean_window():
    scale = DynamicLossScale(initial_scale_power=4, loss_scale_window=3, hysteresis=1)
    assert run(scale, [False] * 7) == [16, 16, 16, 32, 32, 32, 64]
    assert run(scale, [True, False, False, False, False]) == [32, 32, 32, 32, 64]


def test_a_clean_window_refills_the_hysteresis():
    scale = DynamicLossScale(initial_scale_power=4, loss_scale_window=2, hysteresis=2)
    assert run(scale, [True, False, False, False, True, True]) == [16, 16, 16, 32, 32, 16]


def test_overflow_at_the_minimum_raises_and_says_what_to_do():
    scale = DynamicLossScale(initial_scale_power=2, hysteresis=1, min_loss_scale=3)
    assert run(scale, [True]) == [3]
    with pytest.raises(LossScaleError, match=r"min_loss_scale = 3.*learning rate.*bf16"):
        scale.update(True)
    assert scale.scale == 3


@pytest.mark.parametrize("cut", [0, 1, 17, 60])
def test_a_restored_scale_continues_as_if_never_stopped(cut):
    rng = random.Random(cut)
    overflows = [rng.random() < 0.2 for _ in range(100)]
    arguments = {"initial_scale_power": 60, "loss_scale_window": 4, "hysteresis": 2}
    whole = run(DynamicLossScale(**arguments), overflows)
    first, second = DynamicLossScale(**arguments), DynamicLossScale(**arguments)
    head = run(first, overflows[:cut])
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert head + run(second, overflows[cut:]) == whole


def test_the_state_of_another_kind_leaves_the_configured_start():
    dynamic = DynamicLossScale(initial_scale_power=5)
    dynamic.load_state_dict(StaticLossScale(7).state_dict())
    dynamic.load_state_dict(NoLossScale().state_dict())
    static = StaticLossScale(7)
    static.load_state_dict(DynamicLossScale(initial_scale_power=9).state_dict())
    assert (dynamic.scale, static.scale) == (32.0, 7.0)


def test_a_broken_state_is_refused_by_key():
    with pytest.raises(PrecisionError, match="missing calls, last_overflow"):
        DynamicLossScale().load_state_dict({"kind": "dynamic", "scale": 2.0, "hysteresis_left": 1})
    state = {**DynamicLossScale().state_dict(), "scale": float("nan")}
    with pytest.raises(PrecisionError, match="scale: expected a positive finite number, got nan"):
        DynamicLossScale().load_state_dict(state)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"initial_scale_power": -1}, "initial_scale_power"),
        ({"initial_scale_power": 200}, "initial_scale_power"),
        ({"loss_scale_window": 0}, "loss_scale_window"),
        ({"hysteresis": 0}, "hysteresis"),
        ({"hysteresis": True}, "hysteresis"),
        ({"min_loss_scale": 0}, "min_loss_scale"),
        ({"min_loss_scale": float("inf")}, "min_loss_scale"),
        ({"initial_scale_power": 3, "min_loss_scale": 16}, "2\\^3 = 8 is below min_loss_scale = 16"),
    ],
)
def test_arguments_out_of_range_are_refused_by_name(arguments, named):
    with pytest.raises(PrecisionError, match=named):
        DynamicLossScale(**arguments)


@pytest.mark.parametrize("scale", [0, -1, float("nan"), float("inf"), True, "1"])
def test_a_static_scale_must_be_a_positive_number(scale):
    with pytest.raises(PrecisionError, match="loss_scale"):
        StaticLossScale(scale)
