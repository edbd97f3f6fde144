"""`load` into a dict of modules, optimizers, stateful objects, tensors and plain data.

A state is the dict that the user passes. A value of it is reported as defaulted if the checkpoint does not have it, so
that it stays as it is. To request a tensor is to note that it is to be filled, together with all others, before
anything else changes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, MutableMapping
from typing import Any

import torch

from ..reader import Checkpoint
from ..report import LoadReport
from ..restoring import restore
from ..types import MODEL_KINDS, STATE_KIND, Coordinator, is_optimizer_kind
from .buffers import dtype_name
from .coordinator import default_coordinator
from .fill import Filler, read_tensor
from .modules import ModuleState
from .optimizers import OptimizerLoader
from .rng import RngState
from .saving import Parts, Stateful
from .tree import decode


def load(
    root: str | os.PathLike[str],
    state: MutableMapping[str, Any],
    *,
    tag: str | None = None,
    strict: bool = True,
    rename: Callable[[str], str | None] | None = None,
    coordinator: Coordinator | None = None,
) -> LoadReport:
    """Load a checkpoint into the objects of `state`, in place, and return a report of what was loaded; collective.

    Without a tag the newest whole checkpoint is loaded (see `restore`). Modules, optimizers and stateful objects are
    filled, tensors are written into, and plain data is replaced in the mapping. Only what `state` holds is requested:
    pass only the module to load only the module, or only the optimizer, whose parameters then get the names that were
    saved at the same positions of their groups. `rename` maps a model's name to the checkpoint's name, or None to keep
    it. A parameter is read from its `master` when the stored parameter has another dtype than the model's. Without a
    `coordinator` the ranks are those of the default process group.

    Raises MismatchError on every rank when shapes differ, or, unless `strict=False`, when anything was defaulted or
    ignored. Modules and optimizers that do not fit are found before any of them changes; other values, such as plain
    data, are looked at after those were filled. Raises NotFoundError and DamagedError as `restore` does.
    """
    group = coordinator or default_coordinator()

    def fill(checkpoint: Checkpoint) -> LoadReport:
        """Load `state` from `checkpoint` and return the report; `restore` calls this, again for an older checkpoint if
        this one is damaged."""
        return _Load(checkpoint, state, rename or (lambda name: name), group.rank).run(strict)

    return restore(root, fill, tag, coordinator=group)[1]


class _Load:
    """One attempt to load `state` from `checkpoint`; `rank` is this rank, whose random generators are loaded.

    `rename` maps a model's name to the checkpoint's, or to None to keep it.
    """

    def __init__(
        self, checkpoint: Checkpoint, state: MutableMapping[str, Any], rename: Callable[[str], str | None], rank: int
    ) -> None:
        self._checkpoint, self._state, self._rename, self._rank = checkpoint, state, rename, rank
        self._parts = Parts(state)
        self._filler = Filler(checkpoint)
        self._stored = {name for name, _ in checkpoint.tensors}
        self._wanted: set[tuple[str, str]] = set()
        self._report = LoadReport(checkpoint.path, checkpoint.step, checkpoint.report)
        self._optimizers: list[OptimizerLoader] = []
        client = checkpoint.client_state
        self._client: dict[str, Any] = client if isinstance(client, dict) else {}

    def run(self, strict: bool) -> LoadReport:
        """Load everything and return the report; with `strict` raise MismatchError unless everything fits.

        What does not fit in modules and optimizers is found before any of them changes.
        """
        for module in self._parts.modules.values():
            self._request_module(module)
        for key, value in self._state.items():
            if isinstance(value, torch.optim.Optimizer):
                self._request_optimizer(key, value)
        self._finish_report()
        if strict:
            self._report.require_complete()
        self._filler.run()
        for loader in self._optimizers:
            loader.commit()
        for key in self._state:
            self._load_remaining(key)
        if strict:
            self._report.require_complete()
        return self._report

    def _request_module(self, module: ModuleState) -> None:
        """Request the values of a module's tensors; one that is not stored is reported as defaulted.

        Raises MismatchError when shapes differ.
        """
        for name, tensor in module.tensors.items():
            stored = self._stored_name(name)
            kind = self._kind_to_read(stored, module.kind(name), tensor)
            if kind is None:
                self._report.defaulted.append(f"{name} ({module.kind(name)})")
                continue
            entry = self._checkpoint.entry(stored, kind)
            self._request(entry.name, kind, tensor, name)
            self._wanted.update((entry.name, other) for other in ("param", "master"))

    def _stored_name(self, name: str) -> str:
        """Return the name under which the checkpoint stores a tensor that the model calls `name`: after `rename`, and
        for a tied name the one of the stored tensor."""
        renamed = self._rename(name) or name
        return renamed if renamed in self._stored else self._checkpoint.aliases.get(renamed, renamed)

    def _kind_to_read(self, name: str, kind: str, tensor: torch.Tensor) -> str | None:
        """Return the kind of the stored tensor from which a module's tensor is to be read, or None if nothing is stored
        for it. `name` is the stored name; the module's tensor has this `kind`, `param` or `buffer`.

        The result is `master` where the stored parameter is missing or has another dtype than `tensor`.
        """
        known = self._checkpoint.tensors
        if kind == "param" and (name, "master") in known:
            plain = known.get((name, "param"))
            if plain is None or plain.dtype != dtype_name(tensor.dtype):
                return "master"
        return kind if (name, kind) in known else None

    def _request(self, stored: str, kind: str, tensor: torch.Tensor, name: str) -> None:
        """Request the values of `tensor`, which the model calls `name`, from the stored tensor (`stored`, `kind`), and
        report it as loaded.

        Raises MismatchError when shapes differ.
        """
        entry = self._checkpoint.entry(stored, kind)
        if self._filler.add(entry, tensor, name):
            self._report.converted.append(f"{name} ({kind})")
        self._report.loaded.append(f"{name} ({kind})")
        self._wanted.add((entry.name, kind))

    def _request_optimizer(self, key: str, optimizer: torch.optim.Optimizer) -> None:
        """Create the missing state of an optimizer and request its values. `_finish_report` and
        `OptimizerLoader.commit` complete the work later.

        `key` is the optimizer's key in the state. Raises MismatchError when its param groups cannot be matched.
        """
        by_name: dict[str, list[str]] = {}
        for name, kind in self._checkpoint.tensors:
            if is_optimizer_kind(kind):
                by_name.setdefault(name, []).append(kind)
        names = {identity: self._stored_name(name) for identity, name in self._parts.names.items()}
        loader = OptimizerLoader(optimizer, names, key, self._client.get(key), self._checkpoint)
        found: list[tuple[str, str]] = []
        unknown = loader.request(self._filler, by_name, found)
        self._optimizers.append(loader)
        if not loader.has_groups:
            self._report.not_requested.append(f"hyperparameters of {key}")
        self._report.defaulted += [f"{name} ({key})" for name in unknown]
        self._report.loaded += [f"{name} ({kind})" for name, kind in found]
        self._wanted.update(found)

    def _finish_report(self) -> None:
        """Add the stored tensors that nothing requested to the report: as ignored, or as kinds that were left out by
        intent."""
        modules = bool(self._parts.modules)
        optimizers = any(isinstance(value, torch.optim.Optimizer) for value in self._state.values())
        skipped: set[str] = set()
        for name, kind in self._checkpoint.tensors:
            asked = kind != STATE_KIND and (modules if kind in MODEL_KINDS else optimizers)
            if not asked:
                skipped.add(kind)
            elif (name, kind) not in self._wanted:
                self._report.ignored.append(f"{name} ({kind})")
        self._report.not_requested += sorted(skipped - {STATE_KIND})

    def _load_remaining(self, key: str) -> None:
        """Load the value under `key` of the state after the requested tensors were read: of a module the part of its
        state that is no tensor, of an optimizer nothing, anything else in full.

        Raises MismatchError when shapes differ, NotFoundError for a tensor that is not stored, DamagedError and
        ReplacedError.
        """
        value = self._state[key]
        if isinstance(value, (RngState, torch.Generator)):
            self._load_generator(key, value)
        elif isinstance(value, torch.nn.Module):
            extra = self._client.get(key)
            stored = (
                decode(extra["$module"], self._read_state) if isinstance(extra, dict) and "$module" in extra else {}
            )
            if stored:
                value.load_state_dict(stored, strict=False)
        elif not isinstance(value, torch.optim.Optimizer):
            self._load_value(key, value)

    def _load_value(self, key: str, value: Any) -> None:
        """Load `value`, a tensor, stateful object or plain data under `key` of the state; one that is not stored is
        reported as defaulted.

        Plain data is replaced in the state, everything else is filled in place. Raises MismatchError when shapes
        differ, NotFoundError for a tensor that is not stored, DamagedError and ReplacedError.
        """
        if key not in self._client:
            self._report.defaulted.append(key)
            return
        if isinstance(value, torch.Tensor):
            filler = Filler(self._checkpoint)
            if filler.add(self._checkpoint.entry(key, STATE_KIND), value, key):
                self._report.converted.append(key)
            filler.run()
        elif isinstance(value, Stateful):
            value.load_state_dict(decode(self._client[key], self._read_state))
        else:
            self._state[key] = decode(self._client[key], self._read_state)
        self._report.loaded.append(key)

    def _load_generator(self, key: str, value: RngState | torch.Generator) -> None:
        """Set the random generator `value`, under `key` of the state, to what this rank saved; one that is not stored
        is reported as defaulted."""
        states = self._checkpoint.rank_state
        mine = states[self._rank] if self._rank < len(states) else None
        if not isinstance(mine, dict) or key not in mine:
            self._report.defaulted.append(key)
        elif isinstance(value, RngState):
            value.load_state_dict(mine[key])
            self._report.loaded.append(key)
        else:
            value.set_state(torch.frombuffer(bytearray(mine[key]), dtype=torch.uint8))
            self._report.loaded.append(key)

    def _read_state(self, name: str) -> torch.Tensor:
        """Return a tensor of a stateful object's state in new CPU memory; `name` is the one under which it is stored.
        Raises NotFoundError, DamagedError and ReplacedError."""
        return read_tensor(self._checkpoint, name, STATE_KIND)
