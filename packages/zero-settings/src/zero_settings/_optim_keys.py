"""Keys of `optimizer` and `scheduler`: names, and the parameters of schedules."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from importlib import import_module
from typing import Any, ClassVar, Literal

from pydantic import Field, SerializeAsAny, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from zero_settings._base import Flag, Float, Int, NaturalInt, PositiveInt, Section, Text
from zero_settings._optimizer_params import OPTIMIZERS, AdamParams, Params, TorchParams

WarmupType = Literal["log", "linear"]
PerGroup = Float | tuple[Float, ...]

SectionType = type[Section]
ParamsType = type[Params]
AnyClass = type[Any]


class ClassByName(Section):
    """The section of a class to build: `type` is its name, `params` its arguments. The name is one of `known`, or that
    of a class in `torch_module`.

    `params` are checked for the class that `type` names: by its section in `known`, or by the signature of torch's
    class."""

    type: Text = Field(description="The name of the class.")
    params: SerializeAsAny[Params] = Params()

    what: ClassVar[str]
    """The kind of class, with its article, for errors."""
    known: ClassVar[dict[str, ParamsType]]
    """Names of our own -> the section of their arguments."""
    torch_module: ClassVar[str]
    """The name of a module, which is imported for a name that is not in `known`."""
    torch_base: ClassVar[str]
    """The base, in `torch_module`, of the classes that count."""
    first_argument: ClassVar[str]
    """The argument of torch's classes that the configuration does not give."""

    @classmethod
    def canonical(cls, name: str) -> str:
        """Return the key of `known` that `name` stands for; any other `name` as it is. Subclasses accept other
        spellings here."""
        return name

    @classmethod
    def names(cls) -> list[str]:
        """Return all valid values of `type`: the names in `known`, then those of torch's classes, sorted."""
        offered = vars(import_module(cls.torch_module))
        return [*cls.known, *sorted(name for name in offered if cls._torch_class(name) is not None)]

    @classmethod
    def section_of(cls, key: str, siblings: Mapping[str, Any]) -> SectionType | None:
        """Return the section class that `params` is read as; None if `key` is another one.

        It is that of the class that `type` in `siblings` (the section as written) names: `TorchParams` if `type` is
        missing or not in `known`."""
        if key != "params":
            return None
        name = siblings.get("type")
        return cls.known.get(cls.canonical(name), TorchParams) if isinstance(name, str) else TorchParams

    @classmethod
    def _torch_class(cls, name: str) -> AnyClass | None:
        """Return the public class of `torch_module` called ``name`` if it derives from `torch_base`; None otherwise."""
        module = import_module(cls.torch_module)
        found, base = getattr(module, name, None), getattr(module, cls.torch_base)
        if isinstance(found, type) and issubclass(found, base) and found is not base:
            return None if name.startswith("_") else found
        return None

    @field_validator("type")
    @classmethod
    def _canonical_type(cls, name: str) -> str:
        """Return the value of `type` in its canonical spelling (see `canonical`).

        A pydantic validator: raises PydanticCustomError for a name that is neither in `known` nor a class of torch."""
        if cls.canonical(name) in cls.known:
            return cls.canonical(name)
        if cls._torch_class(name) is None:
            context = {"what": cls.what, "choices": cls.names()}
            raise PydanticCustomError("choice", "the name of {what}", context)
        return name

    @field_validator("params", mode="wrap")
    @classmethod
    def _params_for_type(cls, params: Any, handler: Any, info: ValidationInfo) -> Params:
        """Return the value of `params` as the section of the class that `type` names; defaults if `type` itself was
        refused.

        A pydantic validator: raises PydanticCustomError or ValidationError for arguments that do not fit."""
        name = info.data.get("type")
        if name is None or isinstance(params, Params):
            return params if isinstance(params, Params) else Params()
        if name in cls.known:
            return cls.known[name].model_validate(params)
        return _checked_by_signature(getattr(import_module(cls.torch_module), name), params, cls.first_argument)

    @model_validator(mode="before")
    @classmethod
    def _default_params(cls, data: Any) -> Any:
        """Return the section as written, with empty `params` added if it has none, so that missing required arguments
        are reported. A value that is no dict is returned as it is. A pydantic validator."""
        return {"params": {}, **data} if isinstance(data, dict) else data


class OptimizerSection(ClassByName):
    """The optimizer to build. `type` is lower case for the names known here, and torch.optim's own name otherwise."""

    what = "an optimizer"
    known = OPTIMIZERS
    torch_module = "torch.optim"
    torch_base = "Optimizer"
    first_argument = "params"

    legacy_fusion: Flag = False

    @property
    def decoupled_weight_decay(self) -> bool:
        """Return whether the optimizer decays weights apart from the gradient: type "AdamW", or type "Adam" unless
        `adam_w_mode` is false."""
        return self.type == "adamw" or (isinstance(self.params, AdamParams) and self.params.adam_w_mode)

    @classmethod
    def canonical(cls, name: str) -> str:
        """Return an optimizer's name in lower case if this package knows its arguments, however it is written; any
        other name, which is a class of torch.optim, as it is."""
        return name.lower() if name.lower() in OPTIMIZERS else name


class ScheduleParams(Params):
    """Arguments that all schedules share: `last_batch_iteration` is the iteration after which it continues, -1 for a
    new one.
    """

    last_batch_iteration: Int = -1


class LRRangeTestParams(ScheduleParams):
    """Arguments of `LRRangeTest`: in every `lr_range_test_step_size` iterations the learning rate rises by
    `lr_range_test_step_rate` of its minimum.
    """

    lr_range_test_min_lr: PerGroup = 1e-3
    lr_range_test_step_size: PositiveInt = 2000
    lr_range_test_step_rate: Float = 1.0
    lr_range_test_staircase: Flag = False


class OneCycleParams(ScheduleParams):
    """Arguments of `OneCycle`: learning rate and momentum cycle once between their bounds, then decay. Step sizes are
    in iterations; `cycle_min_lr` and `cycle_max_lr` have to be written.
    """

    cycle_min_lr: PerGroup | None
    cycle_max_lr: PerGroup | None
    decay_lr_rate: Float = 0.0
    cycle_first_step_size: PositiveInt = 2000
    cycle_second_step_size: PositiveInt | None = None
    cycle_first_stair_count: NaturalInt = 0
    cycle_second_stair_count: NaturalInt | None = None
    decay_step_size: NaturalInt = 0
    cycle_momentum: Flag = True
    cycle_min_mom: Float = 0.8
    cycle_max_mom: Float = 0.9
    decay_mom_rate: Float = 0.0


class WarmupLRParams(ScheduleParams):
    """Arguments of `WarmupLR`: the learning rate rises for `warmup_num_steps` iterations, then stays."""

    warmup_min_lr: PerGroup = 0.0
    warmup_max_lr: PerGroup | None = Field(default=None, description="null is the learning rate of each param group.")
    warmup_num_steps: PositiveInt = 1000
    warmup_type: WarmupType = "log"


class WarmupDecayLRParams(WarmupLRParams):
    """Arguments of `WarmupDecayLR`: after the warm-up the learning rate falls until iteration `total_num_steps`, which
    has to be written.
    """

    total_num_steps: PositiveInt | None
    warmup_max_lr: PerGroup | None = 0.001


class WarmupCosineLRParams(ScheduleParams):
    """Arguments of `WarmupCosineLR`: after the warm-up the learning rate falls as a cosine until iteration
    `total_num_steps`, which has to be written. Ratios are of the rate that each param group has.
    """

    total_num_steps: PositiveInt | None
    warmup_min_ratio: Float = 0.0
    warmup_num_steps: PositiveInt = 1000
    cos_min_ratio: Float = 1e-4
    warmup_type: WarmupType = "log"


SCHEDULES: dict[str, type[Params]] = {
    "LRRangeTest": LRRangeTestParams,
    "OneCycle": OneCycleParams,
    "WarmupCosineLR": WarmupCosineLRParams,
    "WarmupDecayLR": WarmupDecayLRParams,
    "WarmupLR": WarmupLRParams,
}


class SchedulerSection(ClassByName):
    """The learning rate schedule to build: one of `SCHEDULES`, or a class of torch.optim.lr_scheduler."""

    what = "a schedule"
    known = SCHEDULES
    torch_module = "torch.optim.lr_scheduler"
    torch_base = "LRScheduler"
    first_argument = "optimizer"


def _checked_by_signature(torch_class: type, params: Any, first_argument: str) -> Params:
    """Return ``params`` as a `TorchParams` section after checking the names, not the values, against the signature of
    ``torch_class``.

    ``first_argument``: the argument of the class that ``params`` must not give. Raises PydanticCustomError if
    ``params`` is no dict, and for unknown and missing arguments."""
    if not isinstance(params, dict):
        raise PydanticCustomError("object", "an object")
    arguments = dict(inspect.signature(torch_class).parameters)
    del arguments[first_argument]
    for key in params:
        if key not in arguments:
            context = {"key": key, "choices": sorted(arguments)}
            raise PydanticCustomError("unknown_argument", f"an argument of {torch_class.__name__}", context)
    for name, argument in arguments.items():
        if argument.default is inspect.Parameter.empty and name not in params:
            raise PydanticCustomError("missing_argument", f"{name}, which {torch_class.__name__} needs")
    return TorchParams.model_validate(params)
