"""The arguments of each optimizer, by its name in a configuration."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, model_validator

from zero_settings._base import ALL_KEYS, Flag, NaturalFloat, PositiveInt, Section, Text, freeze

Beta = Annotated[float, Field(ge=0, lt=1)]
Betas = tuple[Beta, Beta]


class Params(Section):
    """Keyword arguments of an optimizer or a schedule."""

    auto_keys = ALL_KEYS

    def kwargs(self) -> dict[str, Any]:
        """Return the arguments as a new plain dict to call the class with. Those that are None are left out, so that
        the defaults of the class apply."""
        return {key: value for key, value in self.model_dump().items() if value is not None}


class AdamParams(Params):
    """Arguments of Adam and AdamW; those that are null are left to the optimizer's own defaults."""

    lr: NaturalFloat = 1e-3
    betas: Betas = (0.9, 0.999)
    eps: NaturalFloat = 1e-8
    weight_decay: NaturalFloat = 0.0
    bias_correction: Flag = True
    amsgrad: Flag = False
    torch_adam: Flag = Field(default=False, description="torch.optim's implementation and its defaults.")
    adam_w_mode: Flag = Field(default=True, description='Type "Adam" decays weights as AdamW unless this is false.')
    fp32_optimizer_states: Flag = True
    foreach: Flag | None = None
    fused: Flag | None = None
    capturable: Flag | None = None
    maximize: Flag | None = None
    differentiable: Flag | None = None


class AdagradParams(Params):
    """Arguments of Adagrad; those that are null are left to the optimizer's own defaults."""

    lr: NaturalFloat = 1e-2
    eps: NaturalFloat = 1e-10
    weight_decay: NaturalFloat = 0.0
    lr_decay: NaturalFloat = 0.0
    initial_accumulator_value: NaturalFloat = 0.0
    amsgrad: Flag = False
    fp32_optimizer_states: Flag = True
    foreach: Flag | None = None
    fused: Flag | None = None
    maximize: Flag | None = None
    differentiable: Flag | None = None


class LambParams(Params):
    """Arguments of LAMB; its trust ratio stays between `min_coeff` and `max_coeff`."""

    lr: NaturalFloat = 1e-3
    betas: Betas = (0.9, 0.999)
    eps: NaturalFloat = 1e-8
    eps_inside_sqrt: Flag = False
    weight_decay: NaturalFloat = 0.0
    max_coeff: NaturalFloat = 10.0
    min_coeff: NaturalFloat = 0.01
    bias_correction: Flag = True
    amsgrad: Flag = False


class OneBitParams(Params):
    """Arguments that the optimizers with one bit per element share."""

    lr: NaturalFloat = 1e-3
    betas: Betas = (0.9, 0.999)
    eps: NaturalFloat = 1e-8
    eps_inside_sqrt: Flag = False
    weight_decay: NaturalFloat = 0.0
    bias_correction: Flag = True
    max_grad_norm: NaturalFloat = 0.0
    amsgrad: Flag = False
    cuda_aware: Flag = False
    comm_backend_name: Text = "nccl"


class OneBitAdamParams(OneBitParams):
    """Arguments of 1-bit Adam, which is AdamW for `freeze_step` steps, then sends one bit per element."""

    freeze_step: PositiveInt = 100_000


class ZeroOneAdamParams(OneBitParams):
    """Arguments of 0/1 Adam: the variance is updated until step `var_freeze_step`, then ranks average only now and
    then.
    """

    var_freeze_step: PositiveInt = 100_000
    var_update_scaler: PositiveInt = 16
    local_step_scaler: PositiveInt = 32_678
    local_step_clipper: PositiveInt = 16


class OneBitLambParams(OneBitAdamParams):
    """Arguments of 1-bit LAMB, which is LAMB for `freeze_step` steps, then sends one bit per element and bounds how
    frozen trust ratios change.
    """

    max_coeff: NaturalFloat = 10.0
    min_coeff: NaturalFloat = 0.01
    coeff_beta: Beta = 0.9
    factor_max: NaturalFloat = 4.0
    factor_min: NaturalFloat = 0.5
    factor_threshold: NaturalFloat = 0.1


class LionParams(Params):
    """Arguments of the optimizer Lion; those that are not given have the defaults here."""

    lr: NaturalFloat = 1e-3
    betas: Betas = (0.9, 0.999)
    weight_decay: NaturalFloat = 0.0
    fp32_optimizer_states: Flag = True


class MuonParams(Params):
    """Arguments of Muon. `muon_lr` is the learning rate of matrices, `adam_lr` that of the parameters that Adam
    updates; null: `lr`.
    """

    lr: NaturalFloat = 0.02
    muon_lr: NaturalFloat | None = None
    adam_lr: NaturalFloat | None = None
    momentum: Beta = 0.95
    betas: Betas = (0.9, 0.999)
    eps: NaturalFloat = 1e-8
    weight_decay: NaturalFloat = 0.0
    ns_method: Literal["gram", "standard"] = "gram"
    adam_w_mode: Flag = True
    torch_adam: Flag = False
    fp32_optimizer_states: Flag = True


class TorchParams(Params):
    """Arguments that are checked against the signature of a torch class instead of a list of keys."""

    model_config = ConfigDict(extra="allow")

    @model_validator(mode="before")
    @classmethod
    def _frozen(cls, data: Any) -> Any:
        """Return the arguments as written with their values frozen (see `freeze`), since no field validates them. A
        pydantic validator."""
        return {key: freeze(value) for key, value in data.items()} if isinstance(data, dict) else data

    @classmethod
    def accepts_auto(cls, key: str) -> bool:
        """Return True: any argument may be "auto"."""
        return True


OPTIMIZERS: dict[str, type[Params]] = {
    "adam": AdamParams,
    "adamw": AdamParams,
    "adagrad": AdagradParams,
    "lamb": LambParams,
    "lion": LionParams,
    "muadam": TorchParams,
    "muadamw": TorchParams,
    "musgd": TorchParams,
    "muon": MuonParams,
    "onebitadam": OneBitAdamParams,
    "onebitlamb": OneBitLambParams,
    "zerooneadam": ZeroOneAdamParams,
}
