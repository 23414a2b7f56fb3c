"""A model's files, read by transformers: configuration, weights, tokenizer.

Before: `source` says where they are. After: `loader` checks and keeps them. Always: whatever is missing or broken becomes a
typed error that names the reason in one sentence; a checkpoint that lacks weights is refused, not filled with random numbers;
no code from a repository is run.
"""

from __future__ import annotations

import json
import logging
from typing import Any

import torch
import transformers
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ..errors import ModelLoadError, UnsupportedModelError
from .load_failure import load_failure
from .source import ModelSource, SourceKind

logger = logging.getLogger("blocktable.model")

WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin", "pytorch_model*.bin.index.json")
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tekken.json",
)
"""A directory with none of these has no tokenizer."""


def read_config(source: ModelSource) -> PreTrainedConfig:
    """The model's configuration. Raises `ModelLoadError`, and `UnsupportedModelError` for an architecture nobody knows."""
    if source.kind is SourceKind.DIRECTORY:
        _check_config_file(source)
    try:
        config = AutoConfig.from_pretrained(source.location, **_place(source))
    except Exception as error:  # noqa: BLE001 - whatever a broken file makes the library raise becomes one typed error
        raise load_failure(source, "its configuration", error) from None
    if not isinstance(config, PreTrainedConfig):
        raise ModelLoadError(source.text, f"its configuration is a {type(config).__name__}, not one of a model")
    return config


def read_weights(
    source: ModelSource, config: PreTrainedConfig, dtype: torch.dtype | str, device: torch.device
) -> PreTrainedModel:
    """The model with its weights, on `device`, in evaluation mode. `dtype` "auto" is the checkpoint's own.

    Raises `ModelLoadError` for weights that are missing, incomplete, of wrong shapes or unreadable.
    """
    if source.kind is SourceKind.DIRECTORY and not any(any(source.file("").glob(name)) for name in WEIGHT_FILES):
        raise ModelLoadError(source.text, "the directory holds no weights (neither *.safetensors nor pytorch_model*.bin)")
    options: dict[str, Any] = {
        "config": config,
        "dtype": dtype,
        "output_loading_info": True,
        "ignore_mismatched_sizes": True,  # told by name below; transformers would point to a report that it printed
        **_place(source),
        **_unpacked(source),
    }
    if device.type != "cpu":
        options["device_map"] = {"": device}
    try:
        model, info = AutoModelForCausalLM.from_pretrained(source.location, **options)
    except Exception as error:  # noqa: BLE001 - as above
        raise load_failure(source, "its weights", error) from None
    _check_complete(source, info)
    ready: PreTrainedModel = model.eval()
    return ready


def read_tokenizer(source: ModelSource) -> PreTrainedTokenizerBase | None:
    """The tokenizer that lies at `source`, or None where there is none. Raises `ModelLoadError` for a broken one."""
    if source.kind is SourceKind.DIRECTORY and not any(source.file(name).exists() for name in TOKENIZER_FILES):
        return None
    if source.kind is SourceKind.HUB and not _hub_has_tokenizer(source):
        return None
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(source.location, **_place(source))
    except Exception as error:  # noqa: BLE001 - as above
        raise load_failure(source, "its tokenizer", error) from None
    return tokenizer


def _place(source: ModelSource) -> dict[str, Any]:
    """Where transformers finds the files, and that it runs none of them."""
    place: dict[str, Any] = {"trust_remote_code": False}
    if source.gguf_file is not None:
        place["gguf_file"] = source.gguf_file
    if source.kind is not SourceKind.HUB:
        place["local_files_only"] = True
    return place


def _unpacked(source: ModelSource) -> dict[str, Any]:
    """Ask for plain weights of a GGUF file: packed ones need kernels that are fetched while loading.

    Versions of transformers without that choice always unpack.
    """
    gguf_config = getattr(transformers, "GgufConfig", None)
    if source.kind is not SourceKind.GGUF or gguf_config is None:
        return {}
    return {"quantization_config": gguf_config(dequantize=True)}


def _check_config_file(source: ModelSource) -> None:
    """Say plainly what is wrong with a config.json; transformers' own words are about the hub."""
    path = source.file("config.json")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelLoadError(source.text, "the directory holds no config.json") from None
    except OSError as error:
        raise ModelLoadError(source.text, f"config.json cannot be read: {error.strerror}") from None
    except ValueError as error:  # not JSON, or not UTF-8
        raise ModelLoadError(source.text, f"config.json is broken: {error}") from None
    if not isinstance(content, dict) or not isinstance(content.get("model_type"), str):
        raise ModelLoadError(source.text, "config.json names no model_type")
    if content["model_type"] not in CONFIG_MAPPING:
        reason = f"transformers {transformers.__version__} does not know the architecture {content['model_type']!r}"
        if "auto_map" in content:
            reason += ", and code that comes with a model is not run"
        raise UnsupportedModelError(source.text, reason)


def _check_complete(source: ModelSource, info: dict[str, Any]) -> None:
    """A missing weight would be random numbers."""
    for key, what in (("missing_keys", "has no weights for"), ("mismatched_keys", "has weights of wrong shapes for")):
        # A mismatch is (name, shape there, shape here).
        names = sorted(str(entry[0] if isinstance(entry, tuple) else entry) for entry in info.get(key) or ())
        if names:
            shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            raise ModelLoadError(source.text, f"the checkpoint {what} {shown}")
    if errors := info.get("error_msgs"):
        raise ModelLoadError(source.text, f"its weights could not be read: {errors[0]}")


def _hub_has_tokenizer(source: ModelSource) -> bool:
    """Whether the repository, or what is cached of it, holds any of the tokenizer's files."""
    from transformers.utils import cached_file

    for name in TOKENIZER_FILES:
        try:
            found = cached_file(source.location, name, _raise_exceptions_for_missing_entries=False)
        except OSError as error:
            raise load_failure(source, "its tokenizer", error) from None
        if found is not None:
            return True
    return False
