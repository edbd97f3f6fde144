"""A training step on one accelerator as rank 0 of a job whose other ranks are a link: ours, FSDP2 and plain torch.

    python tests-integration/bench_link.py --who ours fsdp2 plain --shape 1b --ranks 8 --gbs 50

See `link_world` for what is real. All contestants train the same Llama-like model with the same tokens by fused AdamW,
in bf16 with fp32 masters (plain: bf16 alone, without masters and without communication), one after another in processes
of their own. Printed are, for each: the median and the quartiles of a step's milliseconds, the host's milliseconds
until a step is enqueued, the peak of memory, the bytes over the link, and with ``--stops`` the lines at which the host
waited for the device in one step. ``--gbs 0``: a link that takes no time, which leaves computation and copies.
"""

from __future__ import annotations

import argparse
import collections
import json
import logging
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "tools"))
from bench_results import save

COLUMNS = ("model, tokens", "link", "ours, stage 3", "FSDP2", "plain", "ours / FSDP2")
SHAPES = {  # layers, width, width of the MLP, heads, key-value heads, tokens in the vocabulary
    "tiny": (3, 64, 128, 4, 2, 128),
    "1b": (16, 2048, 8192, 32, 8, 32000),
    "8b-slice": (8, 4096, 14336, 32, 8, 32000),
    "145 small layers": (145, 256, 512, 4, 4, 1000),
    "577 small layers": (577, 256, 512, 4, 4, 1000),
    "1153 small layers": (1153, 256, 512, 4, 4, 1000),
}


def make_model(shape: str, device: str) -> Any:
    import torch
    from torch import nn
    from torch.nn import functional as F

    layers, width, inner, heads, kv_heads, vocabulary = SHAPES[shape]
    head = width // heads

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.between = nn.RMSNorm(width), nn.RMSNorm(width)
            self.q, self.k = nn.Linear(width, width, bias=False), nn.Linear(width, kv_heads * head, bias=False)
            self.v, self.o = nn.Linear(width, kv_heads * head, bias=False), nn.Linear(width, width, bias=False)
            self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
            self.down = nn.Linear(inner, width, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.before(x)
            rows, length, _ = h.shape
            q = self.q(h).view(rows, length, heads, head).transpose(1, 2)
            k = self.k(h).view(rows, length, kv_heads, head).transpose(1, 2)
            v = self.v(h).view(rows, length, kv_heads, head).transpose(1, 2)
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            x = x + self.o(mixed.transpose(1, 2).reshape(rows, length, width))
            h = self.between(x)
            return x + self.down(F.silu(self.gate(h)) * self.up(h))

    class Llama(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(vocabulary, width)
            self.blocks = nn.ModuleList(Block() for _ in range(layers))
            self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, vocabulary, bias=False)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.embedding(tokens)
            for block in self.blocks:
                x = block(x)
            return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), tokens.flatten())

    torch.manual_seed(0)
    with torch.device(device):
        return Llama()


def optimizer_over(model: Any) -> Any:
    import torch

    return torch.optim.AdamW(model.parameters(), lr=1e-5, fused=torch.cuda.is_available())


def ours(args: argparse.Namespace) -> Callable[[Any], Any]:
    import zero_core

    model = make_model(args.shape, args.device)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": args.rows,
        "gradient_clipping": args.clip,
        "bf16": {"enabled": True},
        "steps_per_print": 0,
        "zero_optimization": {"stage": args.stage, **json.loads(args.zero)},
    }
    offloaded = "offload_optimizer" in config["zero_optimization"]
    if offloaded:
        config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-5}}
    optimizer = None if offloaded else optimizer_over(model)
    engine = zero_core.initialize(model=model, optimizer=optimizer, config=config, device=args.device)[0]

    def step(tokens: Any) -> Any:
        loss = engine(tokens)
        engine.backward(loss)
        engine.step()
        return loss

    return step


def plain_step(model: Any, optimizer: Any, args: argparse.Namespace) -> Callable[[Any], Any]:
    import torch

    def step(tokens: Any) -> Any:
        loss = model(tokens)
        loss.backward()
        if args.clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def fsdp2(args: argparse.Namespace) -> Callable[[Any], Any]:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = make_model(args.shape, args.device)
    mesh = init_device_mesh(args.device.partition(":")[0], (args.ranks,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return plain_step(model, optimizer_over(model), args)


def plain(args: argparse.Namespace) -> Callable[[Any], Any]:
    import torch

    model = make_model(args.shape, args.device).to(torch.bfloat16)
    return plain_step(model, optimizer_over(model), args)


MAKERS = {"ours": ours, "fsdp2": fsdp2, "plain": plain}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Train in this process as the contestant ``args.who[0]``; return what is to be printed."""
    import torch
    from link_world import open_world

    logging.disable(logging.INFO)
    torch.cuda.set_device(args.device)
    link = open_world(args.ranks, args.gbs, args.latency)
    step = MAKERS[args.who[0]](args)
    tokens = torch.randint(0, SHAPES[args.shape][-1], (args.rows, args.tokens), device=args.device)
    for _ in range(args.warm_up):
        step(tokens)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    link.bytes = link.calls = 0
    whole, host = [], []
    for _ in range(args.steps):
        began = time.perf_counter()
        step(tokens)
        enqueued = time.perf_counter()
        torch.cuda.synchronize()
        whole.append((time.perf_counter() - began) * 1e3)
        host.append((enqueued - began) * 1e3)
    low, middle, high = statistics.quantiles(whole, n=4)
    memory = torch.cuda.memory_stats()
    found = {
        "who": args.who[0],
        "ms": round(middle, 2),
        "quartiles": [round(low, 2), round(high, 2)],
        "host_ms": round(statistics.median(host), 2),
        "peak_MiB": torch.cuda.max_memory_allocated() >> 20,
        "reserved_MiB": memory["reserved_bytes.all.peak"] >> 20,
        "retries": memory["num_alloc_retries"],
        "link_MB": round(link.bytes / args.steps / 1e6),
        "collectives": link.calls // args.steps,
    }
    if args.stops:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            step(tokens)
            torch.cuda.set_sync_debug_mode("default")
        stops = [w for w in said if "called a synchronizing" in str(w.message)]
        lines = collections.Counter(f"{w.filename.rpartition('/')[2]}:{w.lineno}" for w in stops)
        found["stops"] = dict(lines.most_common(12))
    if args.profile:
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
            step(tokens)
            torch.cuda.synchronize()
        table = seen.key_averages().table(sort_by="cuda_time_total", row_limit=40, max_name_column_width=70)
        args.profile.with_suffix(".txt").write_text(table)
        seen.export_chrome_trace(str(args.profile))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--who", nargs="+", default=["ours", "fsdp2", "plain"], choices=MAKERS)
    parser.add_argument("--shape", default="1b", choices=SHAPES)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--gbs", type=float, default=50.0, help="bandwidth of the link, 1e9 bytes per second")
    parser.add_argument("--latency", type=float, default=20.0, help="of a collective, in microseconds")
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument(
        "--warm-up", type=int, default=12, help="steps before; ours compares more values in the first 9"
    )
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--zero", default="{}", help="more keys of ours for zero_optimization, as JSON")
    parser.add_argument("--stops", action="store_true")
    parser.add_argument("--profile", type=Path, help="file for a trace of one step; a table goes beside it")
    parser.add_argument("--in-process", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.in_process:
        print(json.dumps(measure(args)), flush=True)
        return
    failed = 0
    found = {}
    for who in args.who:
        options = [word for word in sys.argv[1:] if word not in args.who and word != "--who"]
        command = [sys.executable, "-W", "ignore", __file__, *options, "--who", who, "--in-process"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        last = done.stdout.strip().rpartition("\n")[2]
        print(last if done.returncode == 0 else f"{who}: {done.stderr[-1500:]}", flush=True)
        failed += done.returncode != 0
        if done.returncode == 0:
            found[who] = json.loads(last)
    if not failed:
        save(__file__, "link", COLUMNS, [row(args, found)])
    sys.exit(failed)


def row(args: argparse.Namespace, found: dict[str, Any]) -> tuple[str, ...]:
    """Return the row of the page; empty cells for who was not measured."""
    cells = {
        who: f"{one['ms']:.1f} ({one['quartiles'][0]:.1f} - {one['quartiles'][1]:.1f})" for who, one in found.items()
    }
    ratio = f"{found['ours']['ms'] / found['fsdp2']['ms']:.2f}" if {"ours", "fsdp2"} <= set(found) else ""
    link = f"{args.gbs:g} GB/s" if args.gbs else "takes no time"
    return f"{args.shape}, {args.rows * args.tokens:,}", link, *(cells.get(who, "") for who in MAKERS), ratio


if __name__ == "__main__":
    main()
