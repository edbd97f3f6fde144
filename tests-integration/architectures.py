"""Tiny models of the architectures of Transformers, adapters of PEFT over one of them, and their inputs.

Every output is a mean over samples, so that ranks with equal numbers of samples average to the whole batch's
gradient; what draws at random or couples samples (dropout, load-balancing losses, capacities) is off.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import peft
import torch
import transformers
from torch import nn

SAMPLES, LENGTH, VOCABULARY = 6, 7, 31
WIDE = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24}
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LLAMA = {"vocab_size": VOCABULARY, **WIDE, "num_key_value_heads": 2, **IDS}
STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
BERT = {"vocab_size": VOCABULARY, **WIDE, **STILL, "max_position_embeddings": 16, "pad_token_id": 0}
VISION = {**WIDE, **STILL, "image_size": 8, "patch_size": 4}
BART = {
    "vocab_size": VOCABULARY,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "max_position_embeddings": 16,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "decoder_start_token_id": 2,
    **IDS,
}
T5 = {
    "vocab_size": VOCABULARY,
    "d_model": 16,
    "d_kv": 4,
    "d_ff": 24,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
    "eos_token_id": 2,
}
GPT = {"vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 16}
QUIET = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2}
SOUND = {
    "vocab_size": VOCABULARY,
    **WIDE,
    "conv_dim": (8, 8),
    "conv_stride": (2, 2),
    "conv_kernel": (3, 3),
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "hidden_dropout": 0.0,
    "layerdrop": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "feat_proj_dropout": 0.0,
    "apply_spec_augment": False,
    "mask_time_prob": 0.0,
    "mask_feature_prob": 0.0,
    "num_feat_extract_layers": 2,
    "final_dropout": 0.0,
}


@dataclass(frozen=True)
class Architecture:
    """A model's class and configuration in ``transformers``, by name, and what it reads.

    ``narrow``: parts of the model compute in float32 whatever its dtype is.
    """

    model: str
    config: str
    options: dict[str, Any] = field(default_factory=dict)
    reads: str = "tokens"
    narrow: bool = False

    def build(self) -> nn.Module:
        """The model in float64, with the same weights wherever it is built."""
        torch.manual_seed(0)
        configuration = getattr(transformers, self.config)(**self.options, experts_implementation="eager")
        model = getattr(transformers, self.model)(configuration).double().train()
        for module in model.modules():
            if type(module).__name__.endswith("Router") and hasattr(module, "dtype"):
                module.dtype = torch.float64  # configurations allow no more than float32
        return model


ARCHITECTURES: dict[str, Architecture] = {
    "Llama": Architecture("LlamaForCausalLM", "LlamaConfig", LLAMA, narrow=True),
    "Mistral": Architecture("MistralForCausalLM", "MistralConfig", LLAMA, narrow=True),
    "Mixtral": Architecture("MixtralForCausalLM", "MixtralConfig", {**LLAMA, "num_local_experts": 4}, narrow=True),
    "Qwen2": Architecture("Qwen2ForCausalLM", "Qwen2Config", LLAMA, narrow=True),
    "Qwen3": Architecture("Qwen3ForCausalLM", "Qwen3Config", {**LLAMA, "head_dim": 4}, narrow=True),
    "Qwen2-MoE": Architecture(
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        {
            **LLAMA,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 12,
            "shared_expert_intermediate_size": 12,
        },
        narrow=True,
    ),
    "Gemma": Architecture("GemmaForCausalLM", "GemmaConfig", {**LLAMA, "head_dim": 4}, narrow=True),
    "Gemma2": Architecture("Gemma2ForCausalLM", "Gemma2Config", {**LLAMA, "head_dim": 4}, narrow=True),
    "Phi": Architecture("PhiForCausalLM", "PhiConfig", LLAMA, narrow=True),
    "Phi3": Architecture("Phi3ForCausalLM", "Phi3Config", LLAMA, narrow=True),
    "Falcon": Architecture("FalconForCausalLM", "FalconConfig", {"vocab_size": VOCABULARY, **WIDE, **IDS}, narrow=True),
    "OPT": Architecture(
        "OPTForCausalLM",
        "OPTConfig",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "ffn_dim": 24,
            "dropout": 0.0,
            "max_position_embeddings": 16,
            "word_embed_proj_dim": 16,
            **IDS,
        },
    ),
    "BLOOM": Architecture(
        "BloomForCausalLM",
        "BloomConfig",
        {"vocab_size": VOCABULARY, "hidden_size": 16, "n_layer": 2, "n_head": 4, **IDS},
        narrow=True,
    ),
    "GPT-2": Architecture("GPT2LMHeadModel", "GPT2Config", {**GPT, **QUIET}),
    "GPT-Neo": Architecture(
        "GPTNeoForCausalLM",
        "GPTNeoConfig",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 16,
            "num_layers": 2,
            "num_heads": 4,
            "window_size": 4,
            "attention_types": [[["global", "local"], 1]],
            "max_position_embeddings": 16,
            "resid_dropout": 0.0,
            "embed_dropout": 0.0,
            "attention_dropout": 0.0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        narrow=True,
    ),
    "GPT-J": Architecture("GPTJForCausalLM", "GPTJConfig", {**GPT, **QUIET, "rotary_dim": 4}, narrow=True),
    "GPT-NeoX": Architecture(
        "GPTNeoXForCausalLM", "GPTNeoXConfig", {"vocab_size": VOCABULARY, **WIDE, **IDS}, narrow=True
    ),
    "DBRX": Architecture(
        "DbrxForCausalLM",
        "DbrxConfig",
        {
            "vocab_size": VOCABULARY,
            "d_model": 16,
            "n_heads": 4,
            "n_layers": 2,
            "max_seq_len": 16,
            **IDS,
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
            "ffn_config": {"ffn_hidden_size": 12, "moe_num_experts": 4, "moe_top_k": 2},
        },
        narrow=True,
    ),
    "Mamba": Architecture(
        "MambaForCausalLM",
        "MambaConfig",
        {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4, **IDS},
        narrow=True,
    ),
    "RWKV": Architecture(
        "RwkvForCausalLM",
        "RwkvConfig",
        {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "context_length": 16},
        narrow=True,
    ),
    "T5": Architecture("T5ForConditionalGeneration", "T5Config", T5, reads="both", narrow=True),
    "Switch": Architecture(
        "SwitchTransformersForConditionalGeneration",
        "SwitchTransformersConfig",
        {
            **T5,
            "num_experts": 4,
            "num_sparse_encoder_layers": 1,
            "num_sparse_decoder_layers": 1,
            "expert_capacity": 64,
            "router_jitter_noise": 0.0,
        },
        reads="both",
        narrow=True,
    ),
    "NLLB-MoE": Architecture(
        "NllbMoeForConditionalGeneration",
        "NllbMoeConfig",
        {
            **BART,
            "num_experts": 4,
            "expert_capacity": 64,
            "encoder_sparse_step": 2,
            "decoder_sparse_step": 2,
            "moe_token_dropout": 0.0,
            "encoder_layerdrop": 0.0,
            "decoder_layerdrop": 0.0,
            "second_expert_policy": "all",
            "moe_eval_capacity_token_fraction": -1.0,
        },
        reads="both",
        narrow=True,
    ),
    "BART": Architecture("BartForConditionalGeneration", "BartConfig", BART, reads="both"),
    "Pegasus": Architecture("PegasusForConditionalGeneration", "PegasusConfig", BART, reads="both"),
    "Marian": Architecture("MarianMTModel", "MarianConfig", BART, reads="both"),
    "Whisper": Architecture(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {**BART, "num_mel_bins": 8, "max_source_positions": 8, "max_target_positions": 16},
        reads="spectrum",
    ),
    "BERT": Architecture("BertForMaskedLM", "BertConfig", BERT),
    "RoBERTa": Architecture("RobertaForMaskedLM", "RobertaConfig", {**BERT, "pad_token_id": 0}),
    "ALBERT": Architecture("AlbertForMaskedLM", "AlbertConfig", {**BERT, "embedding_size": 8}),
    "ELECTRA": Architecture("ElectraForPreTraining", "ElectraConfig", {**BERT, "embedding_size": 8}),
    "DistilBERT": Architecture(
        "DistilBertForMaskedLM",
        "DistilBertConfig",
        {
            "vocab_size": VOCABULARY,
            "dim": 16,
            "n_layers": 2,
            "n_heads": 4,
            "hidden_dim": 24,
            "dropout": 0.0,
            "attention_dropout": 0.0,
            "max_position_embeddings": 16,
        },
    ),
    "DeBERTa": Architecture(
        "DebertaV2ForMaskedLM",
        "DebertaV2Config",
        {**BERT, "relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_buckets": 8},
        narrow=True,
    ),
    "XLNet": Architecture(
        "XLNetLMHeadModel",
        "XLNetConfig",
        {"vocab_size": VOCABULARY, "d_model": 16, "n_layer": 2, "n_head": 4, "d_inner": 24, "dropout": 0.0},
        narrow=True,
    ),
    "ViT": Architecture("ViTForImageClassification", "ViTConfig", VISION, reads="images"),
    "DeiT": Architecture("DeiTForImageClassification", "DeiTConfig", VISION, reads="images"),
    "BEiT": Architecture("BeitForImageClassification", "BeitConfig", {**VISION, "drop_path_rate": 0.0}, reads="images"),
    "Swin": Architecture(
        "SwinForImageClassification",
        "SwinConfig",
        {
            "image_size": 16,
            "patch_size": 2,
            "embed_dim": 8,
            "depths": [2, 2],
            "num_heads": [2, 4],
            "window_size": 4,
            "drop_path_rate": 0.0,
            **STILL,
        },
        reads="larger images",
    ),
    "ConvNeXt": Architecture(
        "ConvNextForImageClassification",
        "ConvNextConfig",
        {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "patch_size": 4},
        reads="larger images",
    ),
    "CLIP": Architecture(
        "CLIPModel",
        "CLIPConfig",
        {
            "text_config": {"vocab_size": VOCABULARY, **WIDE, "max_position_embeddings": 16, **IDS},
            "vision_config": {**WIDE, "image_size": 8, "patch_size": 4},
            "projection_dim": 8,
        },
        reads="images and tokens",
    ),
    "Wav2Vec2": Architecture("Wav2Vec2ForCTC", "Wav2Vec2Config", SOUND, reads="sound", narrow=True),
    "HuBERT": Architecture("HubertForCTC", "HubertConfig", SOUND, reads="sound", narrow=True),
}

PROJECTIONS = ["q_proj", "v_proj"]
ADAPTERS: dict[str, Callable[[], Any]] = {
    "LoRA": lambda: peft.LoraConfig(r=4, target_modules=PROJECTIONS, init_lora_weights=False),
    "rsLoRA": lambda: peft.LoraConfig(r=4, target_modules=PROJECTIONS, use_rslora=True, init_lora_weights=False),
    "DoRA": lambda: peft.LoraConfig(r=4, target_modules=PROJECTIONS, use_dora=True, init_lora_weights=False),
    "LoRA, embeddings trained": lambda: peft.LoraConfig(
        r=4, target_modules=PROJECTIONS, modules_to_save=["lm_head"], init_lora_weights=False
    ),
    "AdaLoRA": lambda: peft.AdaLoraConfig(init_r=4, target_r=2, target_modules=PROJECTIONS, total_step=100, tinit=50),
    "IA3": lambda: peft.IA3Config(
        target_modules=[*PROJECTIONS, "down_proj"], feedforward_modules=["down_proj"], init_ia3_weights=False
    ),
    "LoHa": lambda: peft.LoHaConfig(r=2, target_modules=PROJECTIONS, init_weights=False),
    "LoKr": lambda: peft.LoKrConfig(r=2, target_modules=PROJECTIONS, init_weights=False),
    "OFT": lambda: peft.OFTConfig(oft_block_size=4, target_modules=["q_proj"], init_weights=False),
    "BOFT": lambda: peft.BOFTConfig(boft_block_size=4, target_modules=["q_proj"], init_weights=False),
    "VeRA": lambda: peft.VeraConfig(r=4, target_modules=["q_proj"], init_weights=False),
    "FourierFT": lambda: peft.FourierFTConfig(n_frequency=8, target_modules=PROJECTIONS, init_weights=True),
    "HRA": lambda: peft.HRAConfig(r=2, target_modules=PROJECTIONS, init_weights=False),
    "LayerNorm tuning": lambda: peft.LNTuningConfig(target_modules=["input_layernorm", "post_attention_layernorm"]),
    "prompt tuning": lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    "prefix tuning": lambda: peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    "P-tuning": lambda: peft.PromptEncoderConfig(
        task_type="CAUSAL_LM", num_virtual_tokens=3, encoder_hidden_size=8, encoder_dropout=0.0
    ),
}


def build(name: str) -> nn.Module:
    """The architecture, or Llama with the adapter, called ``name``; its weights are the same wherever it is built."""
    if name in ARCHITECTURES:
        return ARCHITECTURES[name].build()
    model = ARCHITECTURES["Llama"].build()
    torch.manual_seed(1)
    return peft.get_peft_model(model, ADAPTERS[name]()).double().train()


def is_narrow(name: str) -> bool:
    """Return whether parts of the model compute in float32."""
    return ARCHITECTURES.get(name, ARCHITECTURES["Llama"]).narrow


def batch(name: str, step: int, rows: slice) -> dict[str, torch.Tensor]:
    """The inputs of a step: these samples of those that all ranks share."""
    generator = torch.Generator().manual_seed(step)

    def tokens() -> torch.Tensor:
        return torch.randint(3, VOCABULARY, (SAMPLES, LENGTH), generator=generator)[rows]

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(SAMPLES, *shape, generator=generator, dtype=torch.float64)[rows]

    reads = ARCHITECTURES[name].reads if name in ARCHITECTURES else "tokens"
    found: dict[str, dict[str, Callable[[], torch.Tensor]]] = {
        "tokens": {"input_ids": tokens},
        "both": {"input_ids": tokens, "decoder_input_ids": tokens},
        "images": {"pixel_values": lambda: numbers(3, 8, 8)},
        "larger images": {"pixel_values": lambda: numbers(3, 16, 16)},
        "images and tokens": {"pixel_values": lambda: numbers(3, 8, 8), "input_ids": tokens},
        "spectrum": {"input_features": lambda: numbers(8, 16), "decoder_input_ids": tokens},
        "sound": {"input_values": lambda: numbers(64)},
    }
    return {key: make() for key, make in found[reads].items()}


def loss_of(output: Any) -> torch.Tensor:
    """A mean over samples of what the model gives."""
    for key in ("logits", "last_hidden_state"):
        if isinstance(getattr(output, key, None), torch.Tensor):
            return getattr(output, key).double().square().mean()
    return output.text_embeds.double().sin().mean() + output.image_embeds.double().sin().mean()
