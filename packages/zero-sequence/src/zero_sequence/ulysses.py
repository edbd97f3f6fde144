"""Ulysses for a model of Transformers (arXiv 2309.14509): ranks share a sequence outside attention, heads inside."""

from __future__ import annotations

import inspect
from typing import Any, cast

import torch
from torch import nn

from zero_comm import NO_STEP, Message

from .attention import AttentionDropout, AttentionOptions, UlyssesAttention
from .errors import SequenceError
from .groups import SequenceGroups
from .heads import plan_heads
from .inputs import ForwardInputs, SequenceInputs
from .interfaces import attention_of, choose_attention, core_attention, core_mask, pretrained_models, register
from .masks import FullMask
from .support import check_configuration

_CACHES = ("past_key_values", "cache")


class Ulysses:
    """Makes the models of Transformers in ``model`` compute over sequence shards, until `detach`.

    Each rank of a sequence group gives the model its consecutive shard of the same samples: ``input_ids`` (batch,
    S/N) and, sharded like it or left out, ``attention_mask`` (batch, S/N; a full one is taken too) and
    ``position_ids``. Outputs are this rank's shard. Everything but attention computes on the shard alone; attention
    has all tokens and some heads. A model's own attention (SDPA, FlashAttention, flex, eager, or one that was
    registered) and masks are called through Transformers' interfaces; no class is changed.

    ``groups``: the ranks that share sequences. ``disable_in_eval``: in eval mode a model computes what it is given,
    without its peers. ``attention_dropout``: what to do about dropout inside attention, and ``pad_heads``: add heads of
    zeros where the ranks do not divide the heads (see `AttentionOptions`). Raises `SequenceError` for a model that
    cannot be spread, the same on every rank; so does a forward pass whose inputs do not fit.
    """

    def __init__(
        self,
        model: nn.Module,
        groups: SequenceGroups,
        *,
        disable_in_eval: bool = False,
        attention_dropout: AttentionDropout = "refuse",
        pad_heads: bool = False,
    ) -> None:
        self._groups = groups
        self._options = AttentionOptions(disable_in_eval, attention_dropout, pad_heads)
        self._inputs = SequenceInputs(groups.sequence)
        self._depth = 0
        self._hooks: list[Any] = []
        self._models = pretrained_models(model)
        self._cores = [attention_of(model) for model in self._models]
        if groups.size == 1:
            return
        for each in self._models:
            check_configuration(each, attention_of(each))
            config: Any = each.config
            heads = config.num_attention_heads
            plan_heads(heads, getattr(config, "num_key_value_heads", None) or heads, groups.size, pad=pad_heads)
        if len(set(self._cores)) > 1:
            raise SequenceError(f"expected one attention for the whole model, got {sorted(set(self._cores))}")
        choose_attention(self._models, self._register_attention(self._cores[0]))
        for each in self._models:
            self._hooks.append(each.register_forward_pre_hook(self._before_forward, with_kwargs=True, prepend=True))
            self._hooks.append(each.register_forward_hook(self._after_forward, always_call=True))

    def detach(self) -> None:
        """Make the models compute as before: give them their own attention back, and remove the hooks. Further calls do
        nothing."""
        for hook in self._hooks:
            hook.remove()
        for model, core in zip(self._models, self._cores, strict=True):
            if self._hooks:
                choose_attention([model], core)
        self._hooks = []

    def _register_attention(self, core: str) -> str:
        """Register attention and masks over ``core``, the name of the model's own attention, with Transformers, and
        return their name."""
        mask = core_mask(core)
        attention = UlyssesAttention(core, core_attention(core), self._groups.sequence, self._inputs, self._options)
        return register(core, attention, None if mask is None else FullMask(mask, self._inputs))

    def _before_forward(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the arguments with which a forward pass over shards is to run: with a full mask, this shard's
        positions and no cache. It is the models' forward pre-hook.

        The outermost pass first agrees with the other ranks on its inputs (collective). In eval mode, with
        ``disable_in_eval``, it returns None, which leaves the arguments. Raises `SequenceError` for inputs that do not
        fit.
        """
        if self._options.disable_in_eval and not model.training:
            return None
        self._depth += 1
        named = _named_inputs(model, args, kwargs)
        if self._inputs.current is None:
            self._inputs.begin()
            self._inputs.current = self._agree_on_inputs(model, named)
        self._replace_inputs(model, named, self._inputs.current)
        return (), named

    def _after_forward(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Note that the outermost forward pass has ended, also by an error; do nothing after one inside another. It is
        the models' forward hook. Raises `SequenceError` if the pass returned without attention over shards."""
        self._depth = max(self._depth - 1, 0)
        if self._depth or self._inputs.current is None:
            return
        self._inputs.current = None
        if output is not None and self._inputs.attention_calls == 0:
            raise SequenceError(
                f"{type(model).__name__} computed no attention that Transformers registers: its tokens met those of "
                "their own shard only"
            )

    def _agree_on_inputs(self, model: nn.Module, named: dict[str, Any]) -> ForwardInputs:
        """Tell the ranks of the sequence group each other's input sizes, check that they fit together, and return the
        inputs of the full sequence. ``named``: this rank's shard of them, by name. Raises `SequenceError` on every rank
        if the sizes do not fit. Collective."""
        try:
            said: Any = _shard_facts(model, named)
        except SequenceError as error:
            said = str(error)
        told = self._groups.control.agree(Message("forward", type(model).__name__, NO_STEP, said))
        for rank, theirs in enumerate(told):
            if isinstance(theirs, str):
                raise SequenceError(f"rank {rank} of the sequence group: {theirs}")
            if theirs != told[0]:
                raise SequenceError(
                    "expected shards of one shape on all ranks of a sequence group, got (batch, length, length of the "
                    f"mask, shape of the positions) {told} by rank: the length of a batch must divide by "
                    f"{self._groups.size}, and every rank gives the same kinds of inputs"
                )
        return self._gather_full_inputs(named, said)

    def _gather_full_inputs(self, named: dict[str, Any], facts: list[Any]) -> ForwardInputs:
        """Return the inputs of the full sequence for this rank's shard of them, ``named``, gathering a mask and
        positions where they are sharded. ``facts``: see `_shard_facts`. Collective. Raises `SequenceError` for a mask
        of another length."""
        _, length, mask_length, has_positions = facts
        full_length = length * self._groups.size
        padding = positions = None
        if mask_length:
            shard = named["attention_mask"].to(torch.bool)
            padding = self._inputs.gather(shard) if mask_length == length else shard
            if padding.shape[1] != full_length:
                raise SequenceError(
                    f"attention_mask: expected a length of {length}, or {full_length} for the full sequence, got "
                    f"{mask_length}"
                )
        if has_positions:
            positions = self._inputs.full_positions(named["position_ids"])
        return ForwardInputs(length, full_length, padding, positions)

    def _replace_inputs(self, model: nn.Module, named: dict[str, Any], current: ForwardInputs) -> None:
        """Fill ``named``, the inputs of ``model``, for the full sequence: ``attention_mask`` over all tokens in place
        of one of padding or none, ``position_ids`` of this shard if they are missing, and no cache."""
        tokens = _tokens(model, named)
        accepted = inspect.signature(model.forward).parameters
        if "attention_mask" in accepted and _is_padding(named.get("attention_mask")):
            everywhere = torch.ones(tokens.shape[0], current.full_length, dtype=torch.bool, device=tokens.device)
            named["attention_mask"] = everywhere if current.padding is None else current.padding
        if named.get("position_ids") is None:
            named["position_ids"] = self._inputs.count_positions(current.length, tokens.device)
        if "use_cache" in accepted:
            named["use_cache"] = False


def _named_inputs(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return all inputs of a call of ``model`` by name, positional ones too; those that are not given are left out."""
    signature = inspect.signature(model.forward)
    named = dict(signature.bind_partial(*args, **kwargs).arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            named.update(named.pop(name, {}))
    return named


def _tokens(model: nn.Module, named: dict[str, Any]) -> torch.Tensor:
    """Return the tokens among the inputs ``named``: ``input_ids`` (batch, length) or ``inputs_embeds`` (batch, length,
    width). Raises `SequenceError` if there are none."""
    for name in ("input_ids", "inputs_embeds"):
        if isinstance(named.get(name), torch.Tensor):
            return cast("torch.Tensor", named[name])
    raise SequenceError(f"{type(model).__name__}: expected input_ids or inputs_embeds, got {sorted(named)}")


def _is_padding(mask: Any) -> bool:
    """Return whether ``mask`` is None, or a tensor of two dimensions, as a mask of padding (batch, length) is."""
    return mask is None or (isinstance(mask, torch.Tensor) and mask.ndim == 2)


def _shard_facts(model: nn.Module, named: dict[str, Any]) -> list[Any]:
    """Return [batch size, length, length of the mask (0: none), shape of the positions (empty: none)] of this rank's
    inputs ``named``, which ranks compare.

    Raises `SequenceError` for inputs that a model over sequence shards cannot take, such as a cache.
    """
    tokens = _tokens(model, named)
    batch, length = tokens.shape[:2]
    mask, positions = named.get("attention_mask"), named.get("position_ids")
    if any(named.get(name) is not None for name in _CACHES):
        raise SequenceError("expected no cache of keys and values: a cache is not spread over ranks")
    if named.get("labels") is not None and named.get("shift_labels") is None:
        if getattr(model, "loss_type", None) == "ForCausalLM":
            raise SequenceError(
                "labels without shift_labels: the model would shift the labels inside each shard and lose one token of "
                "each. Shift them before sharding (zero_sequence.shift_labels, SequenceLoader)"
            )
    if positions is None and _derives_positions(model):
        raise SequenceError(
            f"{type(model).__name__} derives positions from the tokens of the full sequence: give it position_ids"
        )
    if isinstance(positions, torch.Tensor) and (positions.ndim != 2 or positions.shape[1] != length):
        raise SequenceError(f"position_ids: expected (batch, {length}), got {tuple(positions.shape)}")
    shape = list(positions.shape) if isinstance(positions, torch.Tensor) else []
    is_padding = isinstance(mask, torch.Tensor) and mask.ndim == 2
    return [batch, length, mask.shape[1] if mask is not None and is_padding else 0, shape]


def _derives_positions(model: nn.Module) -> bool:
    """Return whether a module of the model computes positions from token ids, as RoBERTa's embeddings do; that needs
    the token ids of the full sequence."""
    return any(hasattr(module, "create_position_ids_from_input_ids") for module in model.modules())
