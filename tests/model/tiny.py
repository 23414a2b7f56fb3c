"""Tiny random models of many architectures, for tests that need a real model and no files.

Always: float32 on the CPU, the same weights at each call, drawn with a standard deviation of 0.08 so that logits differ
clearly; a vocabulary of 128, sequences up to 512 tokens; windows of 8 tokens, shorter than the prompts of tests; soft caps low
enough to bend scores, sinks that are not zero, several experts at work; both kinds of layers where an architecture has two.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCAB_SIZE = 128
MAX_MODEL_LEN = 512
WINDOW = 8
EOS = 2

ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_MODEL_LEN,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": EOS,
}
MHA = {**COMMON, "num_key_value_heads": 4}

PARTICULAR: dict[str, dict[str, Any]] = {
    "gpt2": {
        "vocab_size": VOCAB_SIZE,
        "n_embd": 64,
        "n_layer": 3,
        "n_head": 4,
        "n_positions": MAX_MODEL_LEN,
        "resid_pdrop": 0.1,  # dropout must be off while serving
        "attn_pdrop": 0.1,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": EOS,
    },
    "llama": COMMON,
    "qwen2": {**COMMON, "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2},
    "qwen3": {**COMMON, "head_dim": 16},
    "mistral": {**COMMON, "sliding_window": WINDOW, "head_dim": 16},
    "gemma2": {
        **COMMON,
        "head_dim": 16,
        "query_pre_attn_scalar": 24,
        "sliding_window": WINDOW,
        "layer_types": ALTERNATING,
        "attn_logit_softcapping": 1.5,
        "final_logit_softcapping": 10.0,
    },
    "gemma3_text": {**COMMON, "head_dim": 16, "sliding_window": WINDOW, "layer_types": ALTERNATING},
    "phi3": {**COMMON, "sliding_window": WINDOW},
    "olmo2": MHA,
    "gpt_oss": {
        **COMMON,
        "head_dim": 16,
        "sliding_window": WINDOW,
        "layer_types": ALTERNATING,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "mixtral": {**COMMON, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": WINDOW},
    "deepseek_v3": {
        **MHA,
        "kv_lora_rank": 16,
        "q_lora_rank": 24,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 12,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "n_shared_experts": 1,
        "n_group": 2,
        "topk_group": 2,
        "first_k_dense_replace": 1,
    },
    "stablelm": COMMON,
    "nemotron": COMMON,
    "cohere": COMMON,
}
"""Configuration by model type. stablelm and nemotron drop the keyword arguments on the way to attention."""

MIXTURES = ("gpt_oss", "mixtral", "deepseek_v3")
"""Those with experts."""


def build(model_type: str, *, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A random model of `model_type`, in evaluation mode, its configuration as above but for `changes`."""
    config = AutoConfig.for_model(model_type, **{**PARTICULAR[model_type], **changes})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").to(torch.float32)
        draw_weights(model)
    return model.eval()


def draw_weights(model: PreTrainedModel) -> None:
    """Random weights from torch's generator: matrices 0.08, biases 0.02, sinks 1.0; the scales of norms stay."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter.normal_(std=1.0)
            elif parameter.dim() > 1:
                parameter.normal_(std=0.08)
            elif name.endswith("bias"):
                parameter.normal_(std=0.02)


ARCHITECTURES: dict[str, Callable[[], PreTrainedModel]] = {name: partial(build, name) for name in PARTICULAR}
"""A builder for each; every call gives a new model with the same weights."""
