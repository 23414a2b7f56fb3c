"""SmolLM2-135M-Instruct from its GGUF file: a real model, loaded and served."""

import contextlib
from pathlib import Path

import gguf
import pytest
import torch
from transformers import modeling_gguf_pytorch_utils as unpacking

from blocktable.model.gguf_reading import gguf_read_once
from blocktable.model.kv_memory import KVMemory
from blocktable.model.kv_sizing import size_kv
from blocktable.model.loader import LoadedModel, load_model, unwrap_model
from blocktable.model.runner import ModelRunner
from tests.model.handmade_plan import Pages, run_schedule
from tests.model.served import own_logits

pytestmark = pytest.mark.usefixtures("one_torch_thread")


@pytest.fixture(scope="module")
def smollm2(smollm2_gguf: Path) -> LoadedModel:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    loaded = load_model(str(smollm2_gguf), device="cpu")
    torch.set_num_threads(threads)
    return loaded


@pytest.mark.timeout(300)
def test_a_gguf_file_is_loaded_with_tokenizer_template_and_end(smollm2: LoadedModel) -> None:
    assert (smollm2.vocab_size, smollm2.max_model_len, smollm2.dtype) == (49152, 8192, torch.float32)
    assert smollm2.eos_token_ids == (2,)
    assert smollm2.tokenizer is not None
    assert smollm2.tokenizer.decode([2]) == "<|im_end|>"
    chat = [{"role": "user", "content": "Hi"}]
    text = smollm2.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    # 30 layers of 3 KV heads, 64 wide, float32.
    assert smollm2.geometry.bytes_per_block(16) == 30 * 3 * (64 + 64) * 4 * 16


@pytest.mark.timeout(300)
def test_its_paged_logits_are_its_own(smollm2: LoadedModel) -> None:
    assert smollm2.tokenizer is not None
    prompts = ("The capital of France is Paris, and the capital of Italy is", "1 2 3 4 5")
    texts = [smollm2.tokenizer.encode(prompt) for prompt in prompts]
    pages = Pages(texts, block_size=16)
    sizing = size_kv(smollm2.geometry, 16, smollm2.device, num_blocks=pages.num_blocks)
    memory = KVMemory(smollm2.geometry, sizing, smollm2.device)
    first, second = (len(text) for text in texts)
    got = run_schedule(ModelRunner(smollm2, memory), pages, [[5, 3], [first - 5, 1], [0, second - 4]])
    unwrap_model(smollm2.model)
    expected = own_logits(smollm2.model, texts)
    for mine, own in zip(got, expected):
        assert torch.equal(mine.argmax(-1), own.argmax(-1))
        assert torch.allclose(mine, own, atol=1e-3)


def test_reading_once_puts_everything_back() -> None:
    def names() -> tuple[object, ...]:
        return (gguf.GGUFReader, gguf.get_tensor_name_map, unpacking.tqdm)

    before = names()
    with gguf_read_once():
        assert all(mine is not original for mine, original in zip(names(), before))
    assert names() == before
    with contextlib.suppress(RuntimeError), gguf_read_once():
        raise RuntimeError("a file is broken")
    assert names() == before
