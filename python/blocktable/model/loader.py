"""Loads a model and everything that the engine must know of it.

Before: the user names a model (`source`), or has one in memory. After: `kv_sizing` and `kv_memory` by its geometry, `runner`
by the whole record. Always: what comes out has passed every check; what does not pass raises a typed error with the reason and
leaves no trace in the process.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ..errors import InvalidInputError, UnsupportedModelError
from .attachment import Attachment, Progress, attach_model, detach_model
from .checkpoint import read_config, read_tokenizer, read_weights
from .end_tokens import agree_on_end, end_token_ids
from .geometry import KVGeometry
from .gguf_reading import gguf_read_once
from .library_state import borrowed_libraries
from .limits import LengthLimit
from .linear_backend import LINEAR_BACKENDS, LinearChoice, choose_linears
from .rotating_attention import rotate_in_store
from .self_check import check_config
from .source import ModelSource, SourceKind, resolve_source

logger = logging.getLogger("blocktable.model")

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A checked model, attached to blocktable, and what the engine must know of it."""

    model: PreTrainedModel
    """In evaluation mode, on `device`. Run it through `ModelRunner` only."""
    tokenizer: PreTrainedTokenizerBase | None
    """None where no tokenizer came with the model."""
    config: PreTrainedConfig
    name: str
    vocab_size: int
    """Scores that the model gives a row; token ids are below it."""
    length: LengthLimit
    """The longest sequence, and what sets this limit."""
    eos_token_ids: tuple[int, ...]
    """Every id that ends a text, ascending: of the generation configuration, the configuration and the tokenizer."""
    dtype: torch.dtype
    device: torch.device
    geometry: KVGeometry
    linears: LinearChoice

    @property
    def max_model_len(self) -> int:
        """Tokens of a sequence, prompt and output, at most."""
        return self.length.tokens


def load_model(
    model: str,
    *,
    tokenizer: str | None = None,
    dtype: str = "auto",
    device: str = "auto",
    linear_backend: str = "auto",
    self_check: bool = True,
    progress: Progress | None = None,
) -> LoadedModel:
    """Load a model from a local directory, a GGUF file (path ending in .gguf) or the hub (`org/name`).

    `tokenizer`: another place of the same three kinds. `dtype` auto: float32 on a CPU, since bfloat16 is many times slower on
    those without units for it; elsewhere the checkpoint's own, for GGUF (which transformers unpacks) bfloat16. `device` auto: a
    GPU if torch can use one. `linear_backend`: see `linear_backend.py`. `self_check` = False leaves out the comparison of
    numbers with the model's own attention. `progress` is called with a line for each stage; the logger `blocktable.model` tells
    it too.
    Raises `InvalidInputError`, `ModelLoadError`, `UnsupportedModelError`, `MissingExtraError`.
    """
    source = resolve_source(model)
    text_source = source if tokenizer is None else resolve_source(tokenizer)
    place = _device(device)
    wanted = _dtype(dtype, place, source)
    if linear_backend not in LINEAR_BACKENDS:
        raise InvalidInputError("linear_backend", linear_backend, f"must be one of {', '.join(LINEAR_BACKENDS)}")
    tell = _teller(source.text, progress)
    with ExitStack() as stack:
        stack.enter_context(borrowed_libraries())
        if SourceKind.GGUF in (source.kind, text_source.kind):
            stack.enter_context(gguf_read_once())
        tell("reading its configuration")
        config = read_config(source)
        _check_before_weights(config, source.text)
        tell(f"reading its weights as {wanted if isinstance(wanted, str) else str(wanted).removeprefix('torch.')}")
        loaded = read_weights(source, config, wanted, place)
        tell("reading its tokenizer")
        words = read_tokenizer(text_source)
        if words is not None and text_source.kind is SourceKind.GGUF and text_source == source:
            agree_on_end(words, loaded)
        attachment, linears = _prepare(loaded, source.text, linear_backend, self_check, tell)
        return _record(loaded, words, source.text, attachment, linears)


def wrap_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    name: str | None = None,
    linear_backend: str = "auto",
    self_check: bool = True,
    progress: Progress | None = None,
) -> LoadedModel:
    """The same for a model in memory, on whatever device and in whatever dtype it is. It is attached in place: until
    `unwrap_model` gives it back it can be run only through an engine. Raises `UnsupportedModelError`, `InvalidInputError`.
    """
    if not isinstance(model, PreTrainedModel):
        raise InvalidInputError("model", type(model).__name__, "must be a model of transformers (PreTrainedModel)")
    label = name or type(model).__name__
    model.eval()
    with borrowed_libraries():
        attachment, linears = _prepare(model, label, linear_backend, self_check, _teller(label, progress))
        return _record(model, tokenizer, label, attachment, linears)


def unwrap_model(model: PreTrainedModel) -> bool:
    """Give a wrapped model back: it runs on its own again. False if it was not wrapped. Close its engines first.

    It stays in evaluation mode.
    """
    return detach_model(model)


def _prepare(
    model: PreTrainedModel, name: str, linear_backend: str, self_check: bool, tell: Progress
) -> tuple[Attachment, LinearChoice]:
    attachment = attach_model(model, name, self_check=self_check, progress=tell)
    linears = choose_linears(
        model, linear_backend, attachment.trace
    )  # after the checks: a model that is refused stays as it was
    tell(f"linear layers: {linears}")
    if model.get_input_embeddings().weight.device.type != "cpu":
        tell(f"attention layers that rotate in their store: {rotate_in_store(model, attachment.trace)}")
    return attachment, linears


def _check_before_weights(config: PreTrainedConfig, name: str) -> None:
    """Refuse early what its configuration alone rules out: weights may be gigabytes."""
    check_config(config, name)
    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise UnsupportedModelError(name, f"{config.model_type!r} is not a causal language model that transformers knows")


def _record(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    name: str,
    attachment: Attachment,
    linears: LinearChoice,
) -> LoadedModel:
    vocab_size = attachment.trace.logits_width
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        config=model.config,
        name=name,
        vocab_size=vocab_size,
        length=attachment.limit,
        eos_token_ids=end_token_ids(model, tokenizer, vocab_size),
        dtype=attachment.geometry.dtype,
        device=model.get_input_embeddings().weight.device,
        geometry=attachment.geometry,
        linears=linears,
    )


def _device(device: str) -> torch.device:
    """Raises `InvalidInputError` for what torch cannot use here."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
    except (RuntimeError, TypeError):
        raise InvalidInputError("device", device, "must be auto, cpu, cuda or cuda:N") from None
    if place.type not in ("cpu", "cuda"):
        raise InvalidInputError("device", device, "must be auto, cpu, cuda or cuda:N")
    if place.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (place.index or 0) >= count:
            raise InvalidInputError("device", device, f"torch can use {count} CUDA devices here")
    return place


def _dtype(dtype: str, device: torch.device, source: ModelSource) -> torch.dtype | str:
    """What to load the weights as; "auto" asks transformers for the checkpoint's own."""
    if dtype != "auto":
        if dtype not in DTYPES:
            raise InvalidInputError("dtype", dtype, f"must be one of auto, {', '.join(DTYPES)}")
        return DTYPES[dtype]
    if device.type == "cpu":
        return torch.float32
    return torch.bfloat16 if source.kind is SourceKind.GGUF else "auto"


def _teller(name: str, progress: Progress | None) -> Progress:
    def tell(line: str) -> None:
        logger.info("%s: %s", name, line)
        if progress is not None:
            progress(line)

    return tell
