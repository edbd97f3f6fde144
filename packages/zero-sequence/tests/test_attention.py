"""What the exchanges send, which heads meet, and what is refused, on every rank."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from sequence_models import BATCH, CASES, LENGTH, bert, gpt2, llama, one_process, qwen2, shard, token_losses, weights
from sequence_ranks import failure_of
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from zero_comm import Ledger, run_ranks
from zero_sequence import SequenceGroups, Ulysses, sequence_loss

HIDDEN, LAYERS, DOUBLE = 32, 2, 8


def sent(name: str) -> tuple[dict[str, tuple[int, int]], list[int]]:
    groups = SequenceGroups.open(4, ledger=(ledger := Ledger()))
    case = CASES[name]
    model = case.model()
    Ulysses(model, groups)
    batch = shard(case.batch(0), groups)
    ledger.reset()
    loss = token_losses(model, batch)
    forward = {name: (row.calls, row.sent_bytes) for phase, name, row in ledger if phase == "exchange"}
    ledger.reset()
    loss.backward()
    backward = [ledger.calls("exchange"), ledger.sent_bytes("exchange")]
    groups.close()
    return forward, backward


@pytest.mark.parametrize(("name", "width"), [("gpt2", 4 * HIDDEN), ("qwen3", 2 * HIDDEN + 2 * 4 * 8), ("llama", 96)])
def test_a_layer_sends_queries_keys_values_and_outputs_once_each_way(name: str, width: int) -> None:
    """GPT-2 has 4 x 32 features per token; Qwen3 one key head of 8 for 4 ranks; Llama two of 4, each for two ranks."""
    tokens = BATCH * LENGTH // 4
    expected = tokens * width * DOUBLE * 3 // 4 * LAYERS
    for forward, (calls, received) in run_ranks(sent, 4, name):
        assert sum(count for count, _ in forward.values()) == 2 * LAYERS
        assert sum(size for _, size in forward.values()) == expected
        assert (calls, received) == (2 * LAYERS, expected)
        assert any("layer 1: queries, keys, values" in key for key in forward) or name not in ("llama", "qwen3")


def padded_heads() -> tuple[dict[str, torch.Tensor], str]:
    """Six heads over four ranks, three key heads between them: two heads of zeros, and key heads in no simple order."""
    groups = SequenceGroups.open(4)
    torch.manual_seed(7)
    model = llama("sdpa", num_attention_heads=6, num_key_value_heads=3, head_dim=4, hidden_size=24).double()
    said = failure_of(Ulysses, model, groups)
    Ulysses(model, groups, pad_heads=True)
    batch = shard(CASES["llama"].batch(0), groups)
    sequence_loss(token_losses(model, batch), batch["targets"], groups.sequence).backward()
    gradients = {name: groups.sequence.world_size * value.grad for name, value in model.named_parameters()}
    groups.close()
    return gradients, said


def test_heads_that_do_not_divide_are_refused_or_padded() -> None:
    torch.manual_seed(7)
    model = llama("sdpa", num_attention_heads=6, num_key_value_heads=3, head_dim=4, hidden_size=24).double()
    token_losses(model, CASES["llama"].batch(0)).backward()
    answers = run_ranks(padded_heads, 4)
    assert all("6 attention heads do not spread over 4 ranks" in said for _, said in answers)
    for name, parameter in model.named_parameters():
        summed = sum(gradients[name] for gradients, _ in answers) / 16
        torch.testing.assert_close(summed, parameter.grad, rtol=0, atol=1e-13)


def own_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    **named: Any,
) -> tuple[torch.Tensor, None]:
    """As FlashAttention reads a batch: packed samples by their positions, padding by a mask (batch, length)."""
    assert module.config._attn_implementation == "own_packed"  # type: ignore[union-attr]
    positions = named["position_ids"].expand(len(query), -1)
    samples = (positions.diff(prepend=positions[:, :1] - 1) != 1).cumsum(-1)
    allowed = (samples[:, :, None] == samples[:, None]).tril()
    if attention_mask is not None:
        allowed = allowed & attention_mask[:, None].bool()
    groups = module.num_key_value_groups
    key, value = (heads.repeat_interleave(groups, dim=1) for heads in (key, value))
    return scaled_dot_product_attention(query, key, value, allowed[:, None]).transpose(1, 2), None


def register_own() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import flash_attention_mask

    AttentionInterface.register("own_packed", own_attention)
    AttentionMaskInterface.register("own_packed", flash_attention_mask)


def over_own(name: str) -> dict[str, Any]:
    register_own()
    groups = SequenceGroups.open(2)
    case = CASES[name]
    model = case.model()
    model.set_attn_implementation("own_packed")  # type: ignore[operator]
    ulysses = Ulysses(model, groups)
    batch = shard(case.batch(0), groups)
    loss = sequence_loss(token_losses(model, batch), batch["targets"], groups.sequence)
    ulysses.detach()
    assert model.config._attn_implementation == "own_packed"  # type: ignore[union-attr]
    return {"loss": loss.detach()}


@pytest.mark.parametrize("name", ["llama packed", "qwen2"])
def test_an_attention_of_the_users_own_sees_positions_and_padding_of_the_full_sequence(name: str) -> None:
    expected = token_losses(CASES[name].model(), CASES[name].batch(0)).detach()
    for answer in run_ranks(over_own, 2, name):
        torch.testing.assert_close(answer["loss"], expected, rtol=0, atol=1e-12)


def over_flex(name: str, size: int) -> torch.Tensor:
    groups = SequenceGroups.open(size)
    model = flex_model(name)
    Ulysses(model, groups)
    batch = shard(CASES[name].batch(0), groups)
    del batch["targets"]
    with torch.no_grad():
        logits = model(**batch).logits
    groups.close()
    return logits


def over_uncompiled_flex(names: list[str], size: int) -> list[torch.Tensor]:
    with torch.compiler.set_stance("force_eager"):
        return [over_flex(name, size) for name in names]


def flex_model(name: str) -> nn.Module:
    model = CASES[name].model()
    model.set_attn_implementation("flex_attention")  # type: ignore[operator]
    return model.float().eval()


def logits_of_one_process(name: str) -> torch.Tensor:
    """Computed by SDPA, and without a cache: with one, Transformers takes packed samples for a single one."""
    batch = CASES[name].batch(0)
    del batch["targets"]
    with torch.no_grad():
        return CASES[name].model().float().eval()(**batch, use_cache=False).logits


@pytest.mark.parametrize("size", [2, 4])
def test_flex_attention_has_block_masks_of_the_full_sequence(size: int) -> None:
    """Without gradients, which flex attention does not compute on a CPU."""
    names = ["bert", "llama", "llama packed", "mistral sliding", "qwen2"]
    for name, *shards in zip(names, *run_ranks(over_uncompiled_flex, size, names, size), strict=True):
        torch.testing.assert_close(torch.cat(shards, dim=1), logits_of_one_process(name), rtol=0, atol=1e-5)


@pytest.mark.soak
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", ["llama", "llama packed", "qwen2"])
def test_compiled_flex_attention_has_block_masks_of_the_full_sequence(name: str, size: int) -> None:
    """In float32, for which flex attention compiles on a CPU; it does at first use."""
    shards = run_ranks(over_flex, size, name, size, timeout=280.0)
    torch.testing.assert_close(torch.cat(shards, dim=1), logits_of_one_process(name), rtol=0, atol=1e-5)


def models_refused() -> list[str]:
    import transformers

    groups = SequenceGroups.open(4)
    small = {"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 2}
    mamba = transformers.MambaForCausalLM(transformers.MambaConfig(**small))
    t5 = transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=40, d_model=32, d_ff=32, num_layers=1, num_heads=4, d_kv=8)
    )
    bloom = transformers.BloomForCausalLM(transformers.BloomConfig(vocab_size=40, hidden_size=32, n_layer=1, n_head=4))
    classifier = transformers.BertForSequenceClassification(
        transformers.BertConfig(**small, num_attention_heads=4, intermediate_size=32)
    )
    models = (nn.Linear(2, 2), mamba, t5, bloom, classifier, gpt2("sdpa", n_head=2))
    return [failure_of(Ulysses, model, groups) for model in models]


def test_models_that_cannot_be_spread_are_refused_on_every_rank() -> None:
    answers = run_ranks(models_refused, 4)
    assert all(answer == answers[0] for answer in answers)
    linear, mamba, t5, bloom, classifier, heads = answers[0]
    assert "expected a model of Transformers, or one around it, got Linear" in linear
    assert "MambaForCausalLM carries a state along the sequence" in mamba
    assert "T5ForConditionalGeneration: cross-attention is not spread over ranks" in t5
    assert "BloomForCausalLM does not look its attention up in Transformers' AttentionInterface" in bloom
    assert "BertForSequenceClassification needs one token of the full sequence" in classifier
    assert "2 attention heads do not spread over 4 ranks" in heads


def inputs_refused() -> list[str]:
    groups = SequenceGroups.open(2)
    causal, masked, dropping = llama("sdpa"), bert("sdpa"), gpt2("sdpa", attn_pdrop=0.1).train()
    for model in (causal, masked, dropping):
        Ulysses(model, groups)
    ids = torch.ones(1, 4, dtype=torch.long)
    odd = ids[:, : 4 - groups.rank]
    mask = torch.ones(1, 1, 4, 4)
    return [
        failure_of(causal, odd),
        failure_of(causal, ids, labels=ids),
        failure_of(causal, ids, attention_mask=mask),
        failure_of(causal, ids, attention_mask=ids[:, :3]),
        failure_of(causal, ids, position_ids=ids[None]),
        failure_of(causal),
        failure_of(dropping, ids),
        failure_of(masked, ids, attention_mask=ids, labels=ids),
    ]


def test_inputs_that_do_not_fit_are_refused_on_every_rank() -> None:
    answers = run_ranks(inputs_refused, 2)
    assert answers[0] == answers[1]
    odd, labels, square, short, positions, nothing, dropout, fine = answers[0]
    assert "expected shards of one shape on all ranks" in odd and "[[1, 4, 0, []], [1, 3, 0, []]] by rank" in odd
    assert "labels without shift_labels" in labels
    assert "expected a mask over the full sequence, (batch, 1, 8, 8)" in square
    assert "attention_mask: expected a length of 4, or 8 for the full sequence, got 3" in short
    assert "position_ids: expected (batch, 4), got (1, 1, 4)" in positions
    assert "expected input_ids or inputs_embeds" in nothing
    assert "dropout of 0.1 inside attention" in dropout
    assert fine == "none"


def dropped() -> tuple[bool, bool, bool]:
    """Dropout of every rank's own, repeated under the same generator, with the generator outside as it was."""
    groups = SequenceGroups.open(2)
    model = gpt2("eager", attn_pdrop=0.5).double().train()
    Ulysses(model, groups, attention_dropout="independent")
    ids = torch.arange(4)[None]
    answers, after = [], []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        answers.append(model(ids).logits)
        after.append(torch.rand(()))
    return torch.equal(answers[0], answers[1]), torch.equal(answers[0], answers[2]), bool(after[0] == after[1])


def test_independent_dropout_repeats_itself_under_the_same_seed() -> None:
    assert run_ranks(dropped, 2) == [(True, False, True)] * 2


def evaluated(disable: bool) -> bool:
    groups = SequenceGroups.open(2)
    model = qwen2("sdpa").double().eval()
    ids = torch.arange(3, 11)[None]
    full = model(ids).logits
    Ulysses(model, groups, disable_in_eval=disable)
    if disable:
        return torch.equal(model(ids).logits, full)
    shards = model(ids.chunk(2, dim=1)[groups.rank]).logits
    return torch.allclose(shards, full.chunk(2, dim=1)[groups.rank], rtol=0, atol=1e-12)


@pytest.mark.parametrize("disable", [False, True])
def test_in_eval_mode_a_model_computes_shards_or_what_it_is_given(disable: bool) -> None:
    assert run_ranks(evaluated, 2, disable) == [True, True]


def recomputed(reentrant: bool) -> dict[str, torch.Tensor]:
    groups = SequenceGroups.open(2)
    case = CASES["llama packed"]
    model = case.model()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})  # type: ignore[operator]
    model.train()
    Ulysses(model, groups)
    losses = [
        sequence_loss(token_losses(model, batch), batch["targets"], groups.sequence)
        for batch in (shard(case.batch(seed), groups) for seed in range(2))
    ]
    sum(losses).backward()  # type: ignore[union-attr]
    return {name: value.grad for name, value in model.named_parameters()}


@functools.cache
def not_recomputed() -> dict[str, torch.Tensor]:
    case = CASES["llama packed"]
    model = case.model()
    sum(token_losses(model, case.batch(seed)) for seed in range(2)).backward()  # type: ignore[union-attr]
    return {name: value.grad for name, value in model.named_parameters()}


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_layers_exchange_the_same_again(reentrant: bool) -> None:
    answers = run_ranks(recomputed, 2, reentrant)
    for name, expected in not_recomputed().items():
        got = sum(answer[name] for answer in answers) / 2
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)


def own_loss(logits: torch.Tensor, labels: Any, shift_labels: torch.Tensor, **_: Any) -> torch.Tensor:
    """Transformers' loss for causal models, which rounds logits to float32."""
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), shift_labels.flatten())


def losses_of_the_model(attention: str, data: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Gradients where the model computes the loss: it hands what its loss takes down to its attention."""
    groups = SequenceGroups.open(2)
    case = CASES[attention]
    model: Any = case.model()
    model.loss_function = own_loss
    Ulysses(model, groups)
    batch = shard(data, groups)
    labels = batch.pop("targets")
    items = torch.tensor(labels.numel())
    loss = model(**batch, labels=labels, shift_labels=labels, num_items_in_batch=items).loss
    sequence_loss(loss, labels, groups.sequence).backward()
    return {name: value.grad for name, value in model.named_parameters()}


@pytest.mark.parametrize("name", ["llama", "llama eager"])
def test_what_the_loss_takes_passes_by_the_attention(name: str) -> None:
    model, batch = CASES[name].model(), CASES[name].batch(0)
    token_losses(model, batch).backward()
    answers = run_ranks(losses_of_the_model, 2, name, batch)
    for name, parameter in model.named_parameters():
        got = sum(answer[name] for answer in answers) / 2
        torch.testing.assert_close(got, parameter.grad, rtol=0, atol=1e-12)


def low_rank() -> dict[str, torch.Tensor]:
    import peft

    groups = SequenceGroups.open(2)
    model = adapted(peft)
    Ulysses(model, groups)
    batch = shard(CASES["llama"].batch(0), groups)
    sequence_loss(token_losses(model, batch), batch["targets"], groups.sequence).backward()
    return {name: value.grad for name, value in model.named_parameters() if value.requires_grad}


def adapted(peft: Any) -> nn.Module:
    model = CASES["llama"].model()
    torch.manual_seed(3)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return peft.get_peft_model(model, config).double()


def test_adapters_around_a_model_train_over_shards() -> None:
    peft = pytest.importorskip("peft")
    model = adapted(peft)
    token_losses(model, CASES["llama"].batch(0)).backward()
    answers = run_ranks(low_rank, 2)
    assert answers[0]
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            got = sum(answer[name] for answer in answers) / 2
            torch.testing.assert_close(got, parameter.grad, rtol=0, atol=1e-12)


def test_the_reference_trains() -> None:
    before, (after, _) = weights(CASES["gpt2"].model()), one_process(CASES["gpt2"], 1, 1)
    assert all(not torch.equal(before[name], after[name]) for name in before)
