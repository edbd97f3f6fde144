"""A server in another process fails in the middle of a transfer, or a rank of the trainer does: every rank says so."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers")

from test_weight_sync import PROMPTS, llama
from weight_servers import ask, running_server

import zero_core
from zero_comm import RanksFailedError, WeightSender, WeightServerClient, run_ranks

SOAK = pytest.mark.soak
ANSWERS, WAITS = 60.0, 8.0
"""Seconds that a server is waited for which answers or dies, and one that does neither."""
BUCKET = 1000
"""Bytes: less than the embedding has."""


def engine_of(stage: int, folder: str = "") -> zero_core.Engine:
    """A model of which the last layer is frozen; on NVMe if there is a ``folder``."""
    zero: dict[str, Any] = {"stage": stage, "stage3_param_persistence_threshold": 0, "unit_min_numel": 1}
    if folder:
        zero["offload_param"] = zero["offload_optimizer"] = {"device": "nvme", "nvme_path": folder}
    model = llama()
    model.model.layers[1].requires_grad_(False)
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.05}},
        "zero_optimization": zero,
    }
    return zero_core.initialize(model=model, config=settings)[0]


def step(engine: zero_core.Engine) -> None:
    tokens = torch.randint(24, (1, 6), generator=torch.Generator().manual_seed(dist.get_rank()))
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    engine.step()


def attacked(url: str, stage: int, folder: str, seconds: float) -> dict[str, Any]:
    """Send to a server that fails, waiting ``seconds`` for it; train one more step; tell what was said."""
    engine = engine_of(stage, folder)
    step(engine)
    patience = timedelta(seconds=seconds)
    client = WeightServerClient(url, timeout=60)
    sender = WeightSender(client, ranks=1, is_sender=dist.get_rank() == 0, timeout=patience)
    said = "no error"
    try:
        sender.send(engine.iter_full_weights(BUCKET))
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    held = engine.partition.memory()["gathered parameters"]
    step(engine)
    return {"said": said, "held": held, "weights": len([n for b in engine.iter_full_weights() for n, _ in b])}


@pytest.mark.parametrize(
    ("stage", "ranks", "fault", "route", "nth"),
    [
        (3, 2, "die", "update_weights", 2),
        (3, 3, "silence", "update_weights", 3),
        pytest.param(3, 1, "error", "finish_weight_update", 1, marks=SOAK),
        (0, 2, "error", "start_weight_update", 1),
        pytest.param(1, 2, "halt", "update_weights", 2, marks=SOAK),
        pytest.param(2, 3, "die", "finish_weight_update", 1, marks=SOAK),
        pytest.param(3, 2, "silence", "finish_weight_update", 1, marks=SOAK),
        pytest.param(3, 2, "die", "init_weight_transfer_engine", 1, marks=SOAK),
        pytest.param(0, 2, "halt", "start_weight_update", 1, marks=SOAK),
        ("nvme", 2, "error", "update_weights", 4),
    ],
)
def test_a_server_that_fails_is_named_on_every_rank_which_train_on(
    stage: Any, ranks: int, fault: str, route: str, nth: int, tmp_path: Path
) -> None:
    if stage == "nvme":
        pytest.importorskip("zero_nvme_aio")
    llama().config.save_pretrained(tmp_path)
    with running_server(tmp_path, fault, route, str(nth)) as url:
        place = (3, str(tmp_path)) if stage == "nvme" else (stage, "")
        first, *others = run_ranks(attacked, ranks, url, *place, WAITS if fault in ("silence", "halt") else ANSWERS)
    assert first["said"].startswith("PeerError: the server") and route in first["said"], first
    for told in others:
        assert told["said"].startswith("PartitionError: full weights: rank 0 stopped iterating after bucket")
        assert first["said"][:60] in told["said"], told
    for told in (first, *others):
        assert told["weights"] == len(list(llama().parameters())) and told["held"] in (0, first["held"])


def killed(url: str, victim: int, folder: str) -> None:
    """One rank's process ends after its second bucket; the others write what they were told."""
    engine = engine_of(3)
    rank = dist.get_rank()
    sender = WeightSender(WeightServerClient(url), ranks=1, is_sender=rank == 0, timeout=timedelta(seconds=ANSWERS))
    buckets = engine.iter_full_weights(BUCKET)

    def ending() -> Any:
        for bucket in buckets:
            if rank == victim and bucket.number == 2:
                os._exit(9)
            yield bucket

    said = "no error"
    try:
        sender.send(ending())
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    Path(folder, f"told-{rank}.json").write_text(json.dumps(said))


@pytest.mark.parametrize("victim", (1, *(pytest.param(rank, marks=SOAK) for rank in (0, 2))))
def test_a_rank_that_dies_in_a_transfer_is_named_on_the_others_and_the_server_takes_the_next_trainer(
    victim: int, tmp_path: Path
) -> None:
    llama().config.save_pretrained(tmp_path)
    with running_server(tmp_path) as url:
        with pytest.raises(RanksFailedError):
            run_ranks(killed, 3, url, victim, str(tmp_path))
        for rank in {0, 1, 2} - {victim}:
            said = json.loads((tmp_path / f"told-{rank}.json").read_text())
            assert said.startswith("PeerError") and f"rank {victim}" in said, said
        assert run_ranks(attacked, 2, url, 3, "", ANSWERS)[0]["said"] == "no error"
        assert ask(url, "generate", prompts=PROMPTS, max_tokens=1, samples=False)["updates"] == 1


def apart(url: str) -> str:
    """Every rank has buckets of another size."""
    engine = engine_of(3)
    rank = dist.get_rank()
    sender = WeightSender(WeightServerClient(url), ranks=1, is_sender=rank == 0)
    said = "no error"
    try:
        sender.send(engine.iter_full_weights(BUCKET + rank))
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    with suppress(Exception):
        engine.zero_grad()
    return said


def test_buckets_of_different_sizes_are_refused_before_the_server_is_asked(tmp_path: Path) -> None:
    for said in run_ranks(apart, 3, "http://127.0.0.1:9"):
        assert said.startswith("DesyncError") and "in buckets of 1000 bytes" in said and "of 1002 bytes" in said
