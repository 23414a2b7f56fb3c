"""Owns the small model of these tests: a random Llama of two layers, and a tokenizer of bytes with a chat template.

Before: fixtures of `conftest.py`. After: every test that is about the engine and not about one architecture. Its logits lie
far apart (weights drawn with std 0.08), so that greedy text does not hang on rounding.
"""

from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCAB_SIZE = 272
MAX_MODEL_LEN = 256
END = "<|end|>"
END_ID = 257
CHAT_TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant:{% endif %}"
)


def make_model(**changes: Any) -> LlamaForCausalLM:
    """The model, the same each time; `changes` are of its configuration."""
    config = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": MAX_MODEL_LEN,
        "initializer_range": 0.08,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = LlamaForCausalLM(LlamaConfig(**(config | changes)))
    return model.eval()


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each byte, and two special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    native = Tokenizer(models.BPE(vocab={letter: place for place, letter in enumerate(alphabet)}, merges=[]))
    native.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    native.decoder = decoders.ByteLevel()
    native.add_special_tokens(["<|start|>", END])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=native, eos_token=END)
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
