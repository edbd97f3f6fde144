"""Floating-point operations of one micro-batch, counted by torch while it runs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from ..text import say, scaled, table

if TYPE_CHECKING:
    from zero_settings import FlopsProfiler


@dataclass
class _PassCount:
    """Floating-point operations and seconds of one part: forward, backward or step."""

    flops: int = 0
    seconds: float = 0.0


@dataclass
class _Modules:
    """Operations and seconds of forward calls by module name, submodules included."""

    flops: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)


class FlopsProfile:
    """Counts the first micro-batch of step ``profile_step`` (from 0), times its optimizer step, and reports after it.
    Operations are those that `torch.utils.flop_counter` knows: matrix products, convolutions, attention. Per-module
    times synchronise the device and include gathering the parameters."""

    def __init__(self, section: FlopsProfiler, module: nn.Module, device: torch.device) -> None:
        self._section = section
        self._module = module
        self._device = device
        self._parts: dict[str, _PassCount] = {}
        self._modules = _Modules()
        self._done = False

    @contextmanager
    def during(self, part: str, step: int) -> Iterator[None]:
        """Run ``part`` ("forward", "backward" or "step") of step ``step`` in the block. In step ``profile_step`` count
        the operations of the first forward pass for training and of the first backward pass after it, and time the
        "step"."""
        first = step == self._section.profile_step and part not in self._parts
        if self._done or not first or not self._expects(part):
            yield
            return
        start = self._now()
        counter = FlopCounterMode(display=False)
        with nullcontext() if part == "step" else counter, self._timed_modules(part == "forward"):
            yield
        self._parts[part] = _PassCount(counter.get_total_flops(), self._now() - start)
        if part == "forward":
            self._modules.flops = {name: sum(c.values()) for name, c in counter.get_flop_counts().items()}

    def after_step(self, step: int, samples: int) -> None:
        """After the step that was counted, report once: to ``output_file``, else to the log or standard output.
        ``step``: the step just taken; ``samples``: in one micro-batch on this rank."""
        if step < self._section.profile_step or self._done or "forward" not in self._parts:
            return
        self._done = True
        text = self._format_report(step, samples)
        if self._section.output_file is None:
            say(text)
            return
        path = Path(self._section.output_file)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n", encoding="utf-8")

    def _expects(self, part: str) -> bool:
        """Return whether ``part`` comes next: a forward pass for training, or backward and step after one was
        counted."""
        if part == "forward":
            return self._module.training and torch.is_grad_enabled()
        return "forward" in self._parts

    def _now(self) -> float:
        """Return the time in seconds, once the device has finished its work."""
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        return time.perf_counter()

    @contextmanager
    def _timed_modules(self, wanted: bool) -> Iterator[None]:
        """Time every module's forward calls inside the block, by hooks, if ``wanted``; else only run the block."""
        if not wanted:
            yield
            return
        open_calls: list[float] = []
        seconds = self._modules.seconds
        handles = []

        def enter(_module: nn.Module, _inputs: Any) -> None:
            """Note the time at which a call begins. The forward pre-hook."""
            open_calls.append(self._now())

        def leave(name: str, _module: nn.Module, _inputs: Any, _output: Any) -> None:
            """Add the seconds of the call that ends to those of the module ``name``. The forward hook."""
            seconds[name] = seconds.get(name, 0.0) + self._now() - open_calls.pop()

        for name, module in self._module.named_modules():
            handles.append(module.register_forward_pre_hook(enter))
            handles.append(module.register_forward_hook(partial(leave, name)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _format_report(self, step: int, samples: int) -> str:
        """Return the report on ``step`` as text; ``samples``: in one micro-batch on this rank."""
        root = type(self._module).__name__
        rows = [
            (
                part,
                scaled(done.flops, "FLOP"),
                f"{done.seconds * 1e3:.3f} ms",
                scaled(done.flops / done.seconds, "FLOPS"),
            )
            for part, done in self._parts.items()
        ]
        total, seconds = sum(p.flops for p in self._parts.values()), sum(p.seconds for p in self._parts.values())
        rows.append(("together", scaled(total, "FLOP"), f"{seconds * 1e3:.3f} ms", scaled(total / seconds, "FLOPS")))
        parameters = sum(p.numel() for p in self._module.parameters())
        lines = [
            f"flops profile of step {step}, first micro-batch: {samples} samples on this rank, {root} with "
            f"{parameters:,} parameters, {samples / seconds:.4g} samples per second",
            table(("part", "operations", "time", "rate"), rows),
        ]
        modules = list(self._rows())
        depths = range(max(depth for depth, *_ in modules) + 1)
        if self._section.module_depth >= 0:
            depths = range(min(self._section.module_depth, depths[-1]) + 1)
        for depth in depths:
            top = sorted((r for r in modules if r[0] == depth), key=lambda row: -row[2])[: self._section.top_modules]
            lines.append(f"most operations in forward at depth {depth}: " + ", ".join(self._cell(row) for row in top))
        if self._section.detailed:
            lines.append(self._module_table(modules, root))
        return "\n".join(lines)

    def _rows(self) -> Iterator[tuple[int, str, int]]:
        """Yield (depth, name, operations in forward) for every module, parents first."""
        root = type(self._module).__name__
        named = list(self._module.named_modules())
        counted = {name: self._modules.flops.get(f"{root}.{name}" if name else root) for name, _ in named}

        def flops(name: str, module: nn.Module) -> int:
            """Return the operations of a module; of a container that was never called, the sum over its children."""
            found = counted[name]
            children = [(f"{name}.{key}" if name else key, child) for key, child in module.named_children()]
            return found if found is not None else sum(flops(key, child) for key, child in children if key in counted)

        for name, module in named:
            yield (name.count(".") + 1 if name else 0), name, flops(name, module)

    def _cell(self, row: tuple[int, str, int]) -> str:
        """Return text such as "layers.0 2.5 MFLOP" for ``row``: (depth, module name, operations)."""
        _, name, flops = row
        return f"{name or type(self._module).__name__} {scaled(flops, 'FLOP')}"

    def _module_table(self, modules: list[tuple[int, str, int]], root: str) -> str:
        """Return a table with a line for each of ``modules``: (depth, name, operations); ``root``: what the model is
        called in it."""
        whole = max(modules[0][2], 1)
        owned = {name: sum(p.numel() for p in m.parameters()) for name, m in self._module.named_modules()}
        return table(
            ("module", "type", "parameters", "forward", "share", "time"),
            [
                (
                    "  " * depth + (name.rpartition(".")[2] or root),
                    type(self._module.get_submodule(name)).__name__,
                    f"{owned[name]:,}",
                    scaled(flops, "FLOP"),
                    f"{100 * flops / whole:.1f} %",
                    f"{self._modules.seconds.get(name, 0.0) * 1e3:.3f} ms",
                )
                for depth, name, flops in modules
            ],
        )
