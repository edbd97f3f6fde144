from __future__ import annotations

import random

import pytest
import torch

from zero_precision import DynamicLossScale, LossScaleError

pytestmark = pytest.mark.peer


@pytest.fixture(scope="module")
def peer_scaler():
    deepspeed = pytest.importorskip("deepspeed", reason="deepspeed is not installed: nothing to compare with")
    scalers = pytest.importorskip("deepspeed.runtime.fp16.loss_scaler")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    deepspeed.comm.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    yield scalers.DynamicLossScaler
    torch.distributed.destroy_process_group()


def outcome(update, overflow):
    try:
        update(overflow)
    except Exception as error:
        if not isinstance(error, LossScaleError) and "already at minimum" not in str(error):
            raise
        return "minimum"
    return "ok"


@pytest.mark.parametrize("consecutive", [False, True])
@pytest.mark.parametrize("probability", [0.02, 0.2, 0.5, 0.8])
@pytest.mark.parametrize("minimum", [1, 2, 3])
def test_the_trajectory_is_the_peers_over_random_overflows(peer_scaler, consecutive, probability, minimum):
    for seed in range(12):
        compare(peer_scaler, random.Random(seed), consecutive, probability, minimum)


def compare(peer_scaler, rng, consecutive, probability, minimum):
    power, window, hysteresis = rng.randint(3, 24), rng.randint(1, 12), rng.randint(1, 5)
    ours = DynamicLossScale(
        initial_scale_power=power,
        loss_scale_window=window,
        hysteresis=hysteresis,
        consecutive_hysteresis=consecutive,
        min_loss_scale=minimum,
    )
    theirs = peer_scaler(2**power, window, minimum, hysteresis, consecutive)
    for _ in range(400):
        overflow = rng.random() < probability
        ended = outcome(ours.update, overflow), outcome(theirs.update_scale, overflow)
        assert ended[0] == ended[1]
        assert ours.scale == theirs.cur_scale
        if ended[0] == "minimum":
            break
