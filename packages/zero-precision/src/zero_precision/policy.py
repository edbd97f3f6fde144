"""The dtypes of parameters, gradients, messages, master and states, as one frozen table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from zero_precision.dtypes import TRAINING_DTYPES, dtype_name, itemsize
from zero_precision.names import PrecisionError

KeepPattern = str | type[nn.Module]
"""A pattern of names (of modules, parameters or buffers), or a module class; see `keep_fp32`."""


class PolicyRow(NamedTuple):
    """One row of `PrecisionPolicy.table`: the thing (such as "master"), its dtype, its bytes per element (0 if it has
    no memory of its own), and the lowest stage that shards it, None if no stage does."""

    thing: str
    dtype: str
    nbytes: int
    sharded_from: int | None


@dataclass(frozen=True)
class PrecisionPolicy:
    """The dtypes of all that training keeps or sends.

    Attributes:
        param_dtype: the parameters that forward and backward compute with.
        accumulate_dtype: reduced gradients: their sum over ranks, their shards, their sum over micro-batches.
        wire_dtype: gradients in messages between ranks.
        master_dtype: the high-precision copy that the optimizer updates; None, or the parameter dtype itself, means
            that there is no copy and the optimizer updates the parameters.
        state_dtype: the optimizer's moments.
        buffer_dtype: floating module buffers; None leaves them as they are.
        keep_fp32: modules whose parameters stay in float32 when `param_dtype` is narrower (see `keep_fp32`).
        keep_declared_fp32: keep in float32 also what the model itself declares (see `declared_keep_fp32`).

    Raises `PrecisionError` for dtypes that do not fit together.
    """

    param_dtype: torch.dtype = torch.float32
    accumulate_dtype: torch.dtype = torch.float32
    wire_dtype: torch.dtype = torch.float32
    master_dtype: torch.dtype | None = None
    state_dtype: torch.dtype = torch.float32
    buffer_dtype: torch.dtype | None = None
    keep_fp32: tuple[KeepPattern, ...] = ()
    keep_declared_fp32: bool = True

    def __post_init__(self) -> None:
        """Raise `PrecisionError` for dtypes that do not fit together; make `keep_fp32` a tuple."""
        object.__setattr__(self, "keep_fp32", _checked_patterns(self.keep_fp32))
        for field in _DTYPE_FIELDS:
            self._check_training_dtype(field)
        self._check_one_half_format()
        for field in ("master_dtype", "accumulate_dtype"):
            self._check_not_narrower(field, "param_dtype")
        self._check_not_narrower("state_dtype", "param_dtype")
        self._check_not_narrower("accumulate_dtype", "wire_dtype")

    @classmethod
    def full(cls, dtype: torch.dtype = torch.float32, **overrides: Any) -> PrecisionPolicy:
        """Return a policy with all in float32 or float64 (`dtype`) and no master; `overrides` replace single fields.
        Raises `PrecisionError` for another `dtype`.
        """
        if dtype not in (torch.float32, torch.float64):
            raise PrecisionError(
                f"PrecisionPolicy.full: expected float32 or float64, got {dtype}; for half precision use "
                "PrecisionPolicy.bf16(), .fp16() or .pure_bf16()"
            )
        fields: dict[str, Any] = {"param_dtype": dtype, "accumulate_dtype": dtype, "wire_dtype": dtype}
        return cls(**{**fields, "state_dtype": dtype, **overrides})

    @classmethod
    def bf16(cls, **overrides: Any) -> PrecisionPolicy:
        """Return a policy with parameters and wire in bfloat16; accumulation, master and state in float32. `overrides`
        replace single fields.
        """
        return cls._mixed(torch.bfloat16, overrides)

    @classmethod
    def fp16(cls, **overrides: Any) -> PrecisionPolicy:
        """Return a policy with parameters and wire in float16; accumulation, master and state in float32.

        It needs a loss scale. `overrides` replace single fields.
        """
        return cls._mixed(torch.float16, overrides)

    @classmethod
    def pure_bf16(cls, **overrides: Any) -> PrecisionPolicy:
        """Return a policy with all in bfloat16 and no master: 8 bytes per parameter with Adam instead of 18.

        An update smaller than 2^-9 of the weight is lost to rounding; see the package's documentation. `overrides`
        replace single fields.
        """
        fields: dict[str, Any] = dict.fromkeys(("param_dtype", "accumulate_dtype", "wire_dtype"), torch.bfloat16)
        return cls(**{**fields, "state_dtype": torch.bfloat16, **overrides})

    @classmethod
    def _mixed(cls, half: torch.dtype, overrides: dict[str, Any]) -> PrecisionPolicy:
        """Return a policy with parameters and wire in ``half`` and all else in float32, after replacing the fields in
        ``overrides``."""
        fields: dict[str, Any] = {"param_dtype": half, "wire_dtype": half, "master_dtype": torch.float32}
        return cls(**{**fields, **overrides})

    @property
    def gradient_dtype(self) -> torch.dtype:
        """Return the dtype of gradients as autograd writes them: always the parameter dtype."""
        return self.param_dtype

    @property
    def has_master(self) -> bool:
        """Return whether the optimizer updates a master instead of the parameters themselves."""
        return self.master_dtype is not None and self.master_dtype != self.param_dtype

    @property
    def update_dtype(self) -> torch.dtype:
        """Return the dtype of the weights that the optimizer updates: the master's, without one the parameters'."""
        return self.param_dtype if self.master_dtype is None else self.master_dtype

    @property
    def needs_loss_scale(self) -> bool:
        """Return whether parameters are float16: their gradients underflow without a loss scale."""
        return self.param_dtype == torch.float16

    def bytes_per_parameter(self, stage: int, world_size: int, *, state_tensors: int = 2) -> float:
        """Return the bytes of model state that one rank holds per parameter of the model.

        It is `p + a + K`: p bytes of the parameter, a of the accumulated gradient, K = master + `state_tensors` x
        state. `world_size` divides K from stage 1, a from stage 2, p from stage 3 (ZeRO, arXiv 1910.02054, section 5).
        The paper's 16 bytes are `PrecisionPolicy.fp16(accumulate_dtype=torch.float16)`. `state_tensors` is 2 for Adam,
        1 for SGD with momentum, Lion and Adagrad, 0 for SGD. Raises `PrecisionError` for a stage or size out of range.
        """
        if stage not in (0, 1, 2, 3) or world_size < 1 or state_tensors < 0:
            raise PrecisionError(
                "bytes_per_parameter: expected stage 0 to 3, world_size >= 1 and state_tensors >= 0, got "
                f"stage={stage}, world_size={world_size}, state_tensors={state_tensors}"
            )
        master = itemsize(self.master_dtype) if self.has_master else 0
        terms = ((self.param_dtype.itemsize, 3), (self.accumulate_dtype.itemsize, 2))
        optimizer = master + state_tensors * self.state_dtype.itemsize
        return sum(nbytes / (world_size if stage >= sharded else 1) for nbytes, sharded in (*terms, (optimizer, 1)))

    def table(self) -> tuple[PolicyRow, ...]:
        """Return one row per thing that has a dtype, such as the gradients or the master."""
        master = self.master_dtype if self.has_master else None
        rows = [
            PolicyRow("parameter", dtype_name(self.param_dtype), self.param_dtype.itemsize, 3),
            PolicyRow("gradient from autograd", dtype_name(self.gradient_dtype), self.gradient_dtype.itemsize, None),
            PolicyRow("accumulated gradient", dtype_name(self.accumulate_dtype), self.accumulate_dtype.itemsize, 2),
            PolicyRow("on the wire", dtype_name(self.wire_dtype), self.wire_dtype.itemsize, None),
            PolicyRow("master", "none" if master is None else dtype_name(master), itemsize(master), 1),
            PolicyRow("state, each", dtype_name(self.state_dtype), self.state_dtype.itemsize, 1),
        ]
        buffers = "as they are" if self.buffer_dtype is None else dtype_name(self.buffer_dtype)
        rows.append(PolicyRow("buffer", buffers, itemsize(self.buffer_dtype), None))
        if self.keep_fp32:
            names = ", ".join(p if isinstance(p, str) else p.__name__ for p in self.keep_fp32)
            rows.append(PolicyRow(f"kept in fp32: {names}", "fp32", 4, 3))
        return tuple(rows)

    def __str__(self) -> str:
        """Return the rows of `table` as text: one line for each thing that has a dtype, below a header."""
        header = ("thing", "dtype", "bytes", "sharded from")
        body = [(r.thing, r.dtype, str(r.nbytes or "-"), _stage_text(r.sharded_from)) for r in self.table()]
        widths = [max(len(row[column]) for row in (header, *body)) for column in range(len(header))]
        lines = ("  ".join(map(str.ljust, row, widths)) for row in (header, *body))
        return "\n".join(line.rstrip() for line in lines)

    def _check_training_dtype(self, field: str) -> None:
        """Raise `PrecisionError` unless the value of ``field`` is a training dtype. None passes for `master_dtype` and
        `buffer_dtype`."""
        dtype = getattr(self, field)
        if dtype is None and field in ("master_dtype", "buffer_dtype"):
            return
        if dtype not in TRAINING_DTYPES:
            known = ", ".join(map(dtype_name, TRAINING_DTYPES))
            raise PrecisionError(f"PrecisionPolicy.{field}: expected one of {known}, got {dtype!r}")

    def _check_one_half_format(self) -> None:
        """Raise `PrecisionError`, naming the fields, if the policy mixes float16 and bfloat16, which loses range in one
        direction and digits in the other."""
        fields = {field: getattr(self, field) for field in _DTYPE_FIELDS}
        half = [field for field, dtype in fields.items() if dtype == torch.float16]
        brain = [field for field, dtype in fields.items() if dtype == torch.bfloat16]
        if half and brain:
            raise PrecisionError(
                f"PrecisionPolicy: fp16 ({', '.join(half)}) and bf16 ({', '.join(brain)}) in one policy lose range one "
                "way and digits the other way; use one of them, or fp32 in its place"
            )

    def _check_not_narrower(self, field: str, than: str) -> None:
        """Raise `PrecisionError` if the dtype of the field ``field`` has fewer bytes than that of the field ``than``.
        None in ``field`` passes."""
        dtype, other = getattr(self, field), getattr(self, than)
        if dtype is not None and dtype.itemsize < other.itemsize:
            raise PrecisionError(
                f"PrecisionPolicy.{field}: expected a dtype at least as wide as {than} ({dtype_name(other)}), got "
                f"{dtype_name(dtype)}; widen {field} or narrow {than}"
            )


_DTYPE_FIELDS = ("param_dtype", "accumulate_dtype", "wire_dtype", "master_dtype", "state_dtype", "buffer_dtype")


def _checked_patterns(patterns: Any) -> tuple[KeepPattern, ...]:
    """Return ``patterns``, those of the field `keep_fp32`, as a tuple. Raises `PrecisionError` unless they are a list
    of strings and module classes."""
    if isinstance(patterns, (str, type)):
        raise PrecisionError(f"PrecisionPolicy.keep_fp32: expected a list of patterns, got {patterns!r}")
    for pattern in patterns:
        if not (isinstance(pattern, str) or (isinstance(pattern, type) and issubclass(pattern, nn.Module))):
            raise PrecisionError(
                f"PrecisionPolicy.keep_fp32: expected name patterns or module classes, got {pattern!r}"
            )
    return tuple(patterns)


def _stage_text(stage: int | None) -> str:
    """Return a stage for a cell of the printed table, such as "stage 2"; "-" for None."""
    return "-" if stage is None else f"stage {stage}"
