"""A tiny configuration for any causal language model that the installed transformers knows, and what is known of each.

The probe behind it: one set of small sizes under all the names that configurations use, and what each of them insists on. Some
architectures refuse such a configuration; those are counted, and say nothing.
"""

import warnings
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.model.tiny import draw_weights

KNOWN = tuple(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
VOCAB_SIZE = 128
MOST_PARAMETERS = 30_000_000
"""A configuration that stays larger has sizes of its own."""

# fmt: off
SERVED = frozenset((
    "afmoe", "apertus", "arcee", "aria_text", "axk1", "biogpt", "bitnet", "cohere", "cohere2", "cohere2_moe", "ctrl",
    "cwm", "deepseek_v2", "deepseek_v3", "dots1", "ernie4_5", "ernie4_5_moe", "exaone", "exaone4", "exaone_moe",
    "flex_olmo", "gemma", "gemma2", "gemma3_text", "gemma4_text", "glm", "glm4", "glm4_moe", "glm4_moe_lite", "gpt2",
    "gpt_bigcode", "gpt_neox", "gpt_oss", "granite", "granite_swa", "granitemoe", "granitemoe_swa", "granitemoeshared",
    "helium", "hunyuan_v1_dense", "hunyuan_v1_moe", "hy_v3", "hyperclovax", "internlm3", "iquestcoder", "jais2",
    "jetmoe", "laguna", "llama", "mellum", "mimo_v2_flash", "minicpm3", "minimax_m2", "ministral", "ministral3",
    "mistral", "mixtral", "modernbert-decoder", "nanochat", "nemotron", "olmo", "olmo2", "olmo3", "olmoe", "opt",
    "persimmon", "phi", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "sarvam_mla", "sarvam_moe",
    "seed_oss", "smollm3", "solar_open", "stablelm", "starcoder2", "vaultgemma", "youtu",
))
# fmt: on
"""Must be served, wherever transformers knows them."""

REFUSED = {
    "bailing_hybrid": "layers of type|layers call attention",
    "bamba": "layers of type|no layer|none of its layers|layers call attention",
    "bart": "position_ids|encoder-decoder",
    "bert": "bidirectional",
    "bloom": "attention interface",
    "cpmant": "attention interface",
    "deepseek_v32": "layers of type|forward pass fails",
    "diffllama": "attends 2 times",
    "doge": "mask of its own",
    "falcon": "attention interface",
    "falcon_h1": "layers of type|does not reproduce|convolution",
    "falcon_mamba": "layers of type|none of its layers|attention interface",
    "gpt_neox_japanese": "attention interface",
    "jamba": "layers of type|none of its layers|layers call attention",
    "kimi_linear": "layers of type|layers call attention",
    "llama4_text": "attn_temperature_tuning",
    "mamba": "layers of type|none of its layers|attention interface",
    "minimax": "layers of type|layers call attention",
    "moshi": "in a window of",
    "mpt": "attention interface",
    "nemotron_h": "layers of type|layers call attention",
    "openai-gpt": "attention interface",
    "qwen3_5_text": "layers of type|layers call attention",
    "qwen3_next": "layers of type|layers call attention",
    "recurrent_gemma": "layers of type|none of its layers|layers call attention|attention interface",
    "roberta": "bidirectional",
    "rwkv": "attention interface",
    "xglm": "attention interface",
    "xlm": "attention interface",
}
"""Must be refused, wherever transformers knows them, with one of these reasons."""

SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim"), 64),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"), 96),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 256),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 32),
    **dict.fromkeys(("attention_dropout", "hidden_dropout", "dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCAB_SIZE),
    **dict.fromkeys(("n_shared_experts", "n_group", "topk_group", "first_k_dense_replace", "max_window_layers"), 1),
    **dict.fromkeys(("head_dim", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "sliding_window", "hidden_size_per_layer_input", "rotary_dim"), 8),
    "q_lora_rank": 24,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def tiny_config(model_type: str) -> PreTrainedConfig | None:
    """A small configuration; None for one of several models in one (text and images), which has no sizes of its own."""
    cls = CONFIG_MAPPING[model_type]
    default = cls()
    if getattr(default, "text_config", None) is not None:
        return None
    known = default.to_dict()
    sizes = {name: size for name, size in SIZES.items() if name in known or hasattr(default, name)}
    if known.get("sliding_window") is None:
        sizes.pop("sliding_window", None)
    if "qk_rope_head_dim" in sizes:  # latent attention: every head has keys of its own
        for name in ("head_dim", "rotary_dim"):
            sizes.pop(name, None)
        sizes["num_key_value_heads"] = 4
    elif known.get("head_dim") is None and not model_type.startswith(("hunyuan", "ministral")):
        sizes.pop("head_dim", None)
    kinds = list(dict.fromkeys(known.get("layer_types") or ()))
    if not kinds:
        return cls(**sizes)
    layers = max(2, len(kinds))
    depth = dict.fromkeys(sizes.keys() & {"num_hidden_layers", "n_layer", "num_layers"}, layers)
    try:
        return cls(**{**sizes, **depth, "layer_types": (kinds * 2)[:layers]})
    except Exception:  # works its kinds of layers out from something else
        return cls(**sizes)


def tiny_model(model_type: str) -> PreTrainedModel | str:
    """A tiny random model, or why there is none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what third parties warn of while they build
        try:
            config = tiny_config(model_type)
            if config is None:
                return "several models in one"
            with torch.device("meta"):
                count = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
            if count > MOST_PARAMETERS:
                return f"{count} parameters"
            model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().to(torch.float32)
        except Exception as error:
            return f"no tiny configuration: {type(error).__name__}"
    draw_weights(model)
    return model
