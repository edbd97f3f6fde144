"""The longest sequence that two ranks train within one control group of 4 GiB: ours, without, and DeepSpeed's ALST.

    python tests-integration/bench_long_sequence.py [--limit GIB] [--most TIMES] [--only NAME ...] [--folder PATH]

A Llama of Transformers with the 128,256 words of Llama 3, float32, AdamW, stage 3, checkpointed layers, one sequence at
a time. "without" does nothing else: each rank has a sequence of its own. With "ours" both ranks share one (Ulysses),
loss and MLPs run in tiles, and checkpointed activations wait in files. DeepSpeed's ALST has names for all but the last:
its activations move from an accelerator to the host, so on a CPU they stay. A missing DeepSpeed is an error.

Each trial is a fresh pair of processes in a fresh group without swap: a step of 64 tokens, which makes the optimizer's
states, then one of the length in question. A length is too long if the kernel kills a rank at the limit. The longest is
found to an eighth of itself; beyond ``--most`` times the longest without, nothing is tried.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from _memory_limits import MemoryGroup, find_parent, memory_groups, peak_bytes

sys.path.append(str(Path(__file__).resolve().parents[1] / "tools"))
from bench_results import save

COLUMNS = ("", "longest that trains", "times longer", "memory at that length")
RANKS, WORDS, WIDTH, SHORT = 2, 128_256, 128, 64
SHAPE = {
    "vocab_size": WORDS,
    "hidden_size": WIDTH,
    "intermediate_size": 11 * WIDTH // 4,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
TILE_TOKENS, MLP_TILES = 64, 8
NAMES = ("without", "ours", "DeepSpeed ALST")
FIRST, FEWEST = 1024, 8
"""The length that is tried first of "without", and the number of times its longest that the others begin with."""
TRIAL_SECONDS = 900
Step = Callable[[int], Any]


# ---------------------------------------------------------------------------------------------------------------------
# In the limited processes


def make_model(longest: int) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(**SHAPE, max_position_embeddings=longest, use_cache=False, attn_implementation="sdpa")
    model = LlamaForCausalLM(config).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def make_optimizer(model: Any) -> Any:
    import torch

    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def tokens(length: int, seed: int) -> Any:
    import torch

    return torch.randint(0, WORDS, (1, length), generator=torch.Generator().manual_seed(seed))


def settings(**more: Any) -> dict[str, Any]:
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    return {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero, **more}


def without(longest: int, rank: int, _folder: str) -> Step:
    import zero_core

    model = make_model(longest)
    config = settings(keep_freed_memory=False)
    engine = zero_core.initialize(model=model, optimizer=make_optimizer(model), config=config)[0]

    def step(length: int) -> Any:
        ids = tokens(length, rank)
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        return loss

    return step


def ours(longest: int, _rank: int, folder: str) -> Step:
    import zero_comm
    import zero_core
    from zero_sequence import SequenceGroups, SequenceLoader, TiledCausalLoss, Ulysses, sequence_loss, tiled

    zero_comm.init()
    model, groups = make_model(longest), SequenceGroups.open(RANKS)
    Ulysses(model, groups)
    TiledCausalLoss(model, budget_bytes=TILE_TOKENS * WORDS * 8)
    for layer in model.model.layers:
        layer.mlp.forward = partial(tiled, layer.mlp.forward, tiles=MLP_TILES)
    activations = {"device": "nvme", "nvme_path": folder, "in_flight_bytes": 64 << 20, "prefetch": 1}
    config = settings(keep_freed_memory=False, sequence_parallel_size=RANKS, offload={"activations": activations})
    engine = zero_core.initialize(model=model, optimizer=make_optimizer(model), config=config, mpu=groups)[0]

    def step(length: int) -> Any:
        ids = tokens(length, 0)
        (shard,) = SequenceLoader([{"input_ids": ids, "labels": ids}], groups, source="same")
        labels = shard["shift_labels"]
        loss = sequence_loss(engine(**shard, labels=labels).loss, labels, groups.sequence)
        engine.backward(loss)
        engine.step()
        return loss

    return step


def mlp_in_tiles(apply: Callable[..., Any], mlp: Any, weights: list[Any], hidden: Any) -> Any:
    return apply(type(mlp).forward, mlp, hidden, MLP_TILES, weights)


def alst(longest: int, rank: int, _folder: str) -> Step:
    import deepspeed
    import torch
    import torch.distributed.nn.functional as collectives
    from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledFusedLogitsLoss, TiledMLP, UlyssesSPAttentionHF

    deepspeed.init_distributed(dist_backend="gloo")
    model = make_model(longest)
    mpu = UlyssesSPAttentionHF.register_with_transformers(
        model_name_or_path=model,
        core_attn_implementation="sdpa",
        sequence_parallel_size=RANKS,
        micro_batch_size=1,
    )
    for layer in model.model.layers:
        weights = list(layer.mlp.parameters())
        layer.mlp.forward = partial(mlp_in_tiles, TiledMLP.apply, layer.mlp, weights)

    class WithLoss(torch.nn.Module):
        """The model with the sum of its tokens' losses."""

        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: Any, positions: Any, labels: Any) -> Any:
            hidden = self.model.model(input_ids=ids, position_ids=positions)[0]
            head, tiles = self.model.lm_head, -(-labels.numel() // TILE_TOKENS)
            return TiledFusedLogitsLoss.apply(
                of_tile, head, hidden, labels, None, tiles, list(head.parameters()), "sum"
            )

    def of_tile(head: Any, hidden: Any, labels: Any) -> Any:
        return torch.nn.functional.cross_entropy(head(hidden), labels, reduction="sum")

    whole = WithLoss()
    engine = deepspeed.initialize(model=whole, optimizer=make_optimizer(whole), config=settings(), mpu=mpu)[0]

    def step(length: int) -> Any:
        ids, positions = tokens(length, 0), torch.arange(length)[None]
        labels = torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-100)
        losses = engine(*(full.chunk(RANKS, dim=1)[rank].contiguous() for full in (ids, positions, labels)))
        loss = torch.stack(collectives.all_gather(losses, group=mpu.get_sequence_parallel_group())).sum() / (length - 1)
        engine.backward(loss)
        engine.step()
        return loss

    return step


def train(name: str, length: int, folder: str) -> None:
    """Take a short step and one of ``length`` tokens; print the second loss and its seconds as a line of JSON."""
    import torch

    torch.set_num_threads(1)
    make = {"without": without, "ours": ours, "DeepSpeed ALST": alst}[name]
    step = make(length, int(os.environ["RANK"]), folder)
    step(SHORT)
    begin = time.perf_counter()
    loss = float(step(length).detach())
    print("\nRESULT " + json.dumps({"loss": loss, "seconds": time.perf_counter() - begin}), flush=True)
    torch.distributed.barrier()
    os._exit(0)


# ---------------------------------------------------------------------------------------------------------------------
# The search


def start(group: MemoryGroup, words: list[str]) -> list[subprocess.Popen[str]]:
    """Start both ranks in ``group``."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    job = {"WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    # Freed memory goes back to the system, for all alike.
    job |= {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": str(1 << 20), "DS_ACCELERATOR": "cpu"}
    command, pipe = group.command(sys.executable, __file__, *words), subprocess.PIPE
    return [
        subprocess.Popen(
            command,
            env={**os.environ, **job, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=pipe,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(RANKS)
    ]


def killed_at_the_limit(ranks: list[subprocess.Popen[str]]) -> bool:
    """Wait for ``ranks``; end the other when one is killed, and return whether that happened."""
    began, killed = time.monotonic(), False
    try:
        while any(rank.poll() is None for rank in ranks):
            killed = any(rank.returncode == -9 for rank in ranks)
            if killed or time.monotonic() - began > TRIAL_SECONDS:
                break
            time.sleep(0.1)
        return killed or any(rank.returncode == -9 for rank in ranks)
    finally:
        for rank in ranks:
            rank.kill()


def trains(name: str, length: int, limit: int, folder: Path, peaks: dict[tuple[str, int], int]) -> bool:
    """Return whether ``length`` tokens train within ``limit`` bytes; say so, and add the bytes that the group held to
    ``peaks``. Raises RuntimeError for another end."""
    with memory_groups(1) as (group,), tempfile.TemporaryDirectory(dir=folder) as files:
        group.limit(limit)
        begin = time.monotonic()
        ranks = start(group, ["--train", name, str(length), files])
        killed = killed_at_the_limit(ranks)
        said = [rank.communicate()[0] for rank in ranks]
        peak = peaks[name, length] = peak_bytes(group.path)
    rows = [json.loads(line[7:]) for text in said for line in text.splitlines() if line.startswith("RESULT ")]
    fits = len(rows) == RANKS and not killed
    if not fits and not killed:
        raise RuntimeError(f"{name}, {length} tokens:\n" + "\n".join(text[-3000:] for text in said))
    answer = f"loss {rows[0]['loss']:.4f}, {rows[0]['seconds']:.0f} s" if fits else "killed"
    print(f"  {name}: {length:,} tokens: {answer}; {peak / 2**30:.2f} GiB, {time.monotonic() - begin:.0f} s in all")
    return fits


def longest(tried: Callable[[int], bool], first: int, most: int) -> int:
    """Return the longest length that passes, found to an eighth of itself, ``most`` at most."""
    fits, fails, length = 0, most + 1, first
    while True:
        if tried(length):
            fits = length
        else:
            fails = length
        if fits == most or fails - fits <= max(fits // 8, SHORT):
            return fits
        length = min(2 * fits, most) if fails > most else (fits + fails) // 2 // SHORT * SHORT


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=float, default=4.0, help="GiB for both ranks together")
    parser.add_argument("--most", type=int, default=8, help="times the longest without")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="for files, on a drive")
    parser.add_argument("--train", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.train is not None:
        name, length, folder = arguments.train
        return train(name, int(length), folder)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    where, version = find_parent()
    limit = int(arguments.limit * 2**30)
    print(f"control group version {version} in {where}, {arguments.limit:g} GiB for {RANKS} ranks, swap off")
    if "DeepSpeed ALST" in arguments.only:
        print(f"DeepSpeed {importlib.metadata.version('deepspeed')}")
    found: dict[str, int] = {}
    peaks: dict[tuple[str, int], int] = {}
    kept = []
    for name in ("without", *(name for name in arguments.only if name != "without")):
        base = found.get("without")
        first, most = (FIRST, 1 << 20) if base is None else (FEWEST * base, arguments.most * base)
        found[name] = longest(
            lambda length, name=name: trains(name, length, limit, arguments.folder, peaks), first, most
        )
    for name, length in found.items():
        ratio = length / found["without"]
        bound = "at least " if name != "without" and length == arguments.most * found["without"] else ""
        print(f"{name:15} {length:9,} tokens  {bound}{ratio:.1f} x without")
        most = ", the most that was tried" if bound else ""
        memory = f"{peaks[name, length] / 2**30:.2f} GiB" if length else ""
        kept.append((name, f"{length:,} tokens{most}", f"{bound}{ratio:.1f}", memory))
    save(__file__, "long-sequence", COLUMNS, kept)


if __name__ == "__main__":
    main()
