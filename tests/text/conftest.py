"""The small model's tokenizer, loaded once for all tests of text."""

from pathlib import Path

import pytest

from blocktable.model.gguf_reading import gguf_read_once
from blocktable.model.library_state import borrowed_libraries
from blocktable.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def loaded_smollm2(smollm2_gguf: Path) -> object:
    """transformers' own tokenizer of SmolLM2, from the GGUF file."""
    from transformers import AutoTokenizer

    with borrowed_libraries(), gguf_read_once():
        return AutoTokenizer.from_pretrained(smollm2_gguf.parent, gguf_file=smollm2_gguf.name)


@pytest.fixture(scope="session")
def smollm2(loaded_smollm2: object) -> Tokenizer:
    """Ours around it."""
    return Tokenizer(loaded_smollm2)  # type: ignore[arg-type]
