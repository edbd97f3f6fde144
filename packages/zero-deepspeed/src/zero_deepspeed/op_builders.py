"""`deepspeed.ops.op_builder`: the classes that scripts ask whether DeepSpeed's operators (C++ extensions) are there.

Nothing is built: other packages of this project do the operators' work. `load` therefore returns no extension.
"""

from __future__ import annotations

from typing import Any, ClassVar, NoReturn

from .errors import UnsupportedError
from .report import COMPATIBLE


class OpBuilder:
    """One operator of DeepSpeed, by its `NAME`.

    Attributes:
        NAME: as in `deepspeed.ops.__compatible_ops__`.
        instead: what does the operator's work here, for messages.
    """

    NAME: ClassVar[str] = ""
    instead: ClassVar[str] = "the module that uses it"

    def is_compatible(self, verbose: bool = False) -> bool:
        """Return whether the operator's work is done here. ``verbose`` has no effect."""
        return COMPATIBLE.get(self.NAME, False)

    def absolute_name(self) -> str:
        """Return the operator's full name in DeepSpeed: `NAME` behind "deepspeed.ops."."""
        return f"deepspeed.ops.{self.NAME}"

    def load(self, verbose: bool = True) -> Any:
        """Raise `UnsupportedError`: there is no compiled module to return. ``verbose`` has no effect."""
        self._refuse()

    def builder(self) -> NoReturn:
        """Raise `UnsupportedError`: nothing is compiled on this machine."""
        self._refuse()

    def _refuse(self) -> NoReturn:
        """Raise `UnsupportedError`, which says that no operator is compiled here and what to use instead."""
        raise UnsupportedError(f"{type(self).__name__}: no operator is compiled here; use {self.instead}")


class CPUAdamBuilder(OpBuilder):
    """The builder of `DeepSpeedCPUAdam`."""

    NAME = "cpu_adam"
    instead = "deepspeed.ops.adam.DeepSpeedCPUAdam, or zero_optim_kernels"


class CPUAdagradBuilder(OpBuilder):
    """The builder of `DeepSpeedCPUAdagrad`."""

    NAME = "cpu_adagrad"
    instead = "deepspeed.ops.adagrad.DeepSpeedCPUAdagrad, or zero_optim_kernels"


class CPULionBuilder(OpBuilder):
    """The builder of `DeepSpeedCPULion`."""

    NAME = "cpu_lion"
    instead = "deepspeed.ops.lion.DeepSpeedCPULion, or zero_optim_kernels"


class FusedAdamBuilder(OpBuilder):
    """The builder of `FusedAdam`."""

    NAME = "fused_adam"
    instead = "deepspeed.ops.adam.FusedAdam"


class FusedLambBuilder(OpBuilder):
    """The builder of `FusedLamb`."""

    NAME = "fused_lamb"
    instead = "deepspeed.ops.lamb.FusedLamb"


class FusedLionBuilder(OpBuilder):
    """The builder of `FusedLion`."""

    NAME = "fused_lion"
    instead = "deepspeed.ops.lion.FusedLion"


class NotImplementedBuilder(OpBuilder):
    """The builder of an operator that is on no machine."""

    NAME = "deepspeed_not_implemented"


class TransformerBuilder(OpBuilder):
    """The builder of DeepSpeed's transformer layer, which has no counterpart here."""

    NAME = "transformer"
    instead = "torch.nn.functional.scaled_dot_product_attention"


class InferenceBuilder(OpBuilder):
    """The builder of DeepSpeed's inference kernels, which have no counterpart here."""

    NAME = "transformer_inference"
    instead = "a serving engine on the exported weights"


class QuantizerBuilder(OpBuilder):
    """The builder of DeepSpeed's quantizer, which has no counterpart here."""

    NAME = "quantizer"
    instead = "the configuration's zero_quantized_weights and zero_quantized_gradients"


class UtilsBuilder(OpBuilder):
    """The builder of DeepSpeed's `flatten` and `unflatten`."""

    NAME = "utils"
    instead = "torch.nn.utils.parameters_to_vector"
