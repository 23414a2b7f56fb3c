"""SmolLM2-135M-Instruct from its GGUF file: a real model, loaded and served."""

import contextlib
from pathlib import Path

import gguf
import numpy as np
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
        return (gguf.GGUFReader, gguf.get_tensor_name_map, unpacking._gguf_parse_value, unpacking.tqdm)

    before = names()
    with gguf_read_once():
        assert all(mine is not original for mine, original in zip(names(), before))
    assert names() == before
    with contextlib.suppress(RuntimeError), gguf_read_once():
        raise RuntimeError("a file is broken")
    assert names() == before


def test_what_is_read_once_is_what_is_read(tmp_path: Path) -> None:
    def read() -> tuple[dict[str, object], list[object]]:
        reader = gguf.GGUFReader(path)
        parse = unpacking._gguf_parse_value
        values = {name: [parse(field.parts[at], field.types) for at in field.data] for name, field in reader.fields.items()}
        return values, [(one.name, one.tensor_type, one.data.tolist()) for one in reader.tensors]

    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_string("a string", "é 日本 😀")
    writer.add_array("strings", ["", "Ġthe", "\n", "日本"])
    writer.add_array("numbers", [1, -2, 3])
    writer.add_array("fractions", [0.5, 1e-6])
    writer.add_uint32("a number", 7)
    writer.add_float32("a fraction", 1e-5)
    writer.add_bool("a choice", True)
    writer.add_tensor("output.weight", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    before = read()
    with gguf_read_once():
        assert read() == before
        assert gguf.GGUFReader(path) is gguf.GGUFReader(path)
        assert type(gguf.GGUFReader(path).tensors[0].data) is np.ndarray
    assert before[0]["strings"] == ["", "Ġthe", "\n", "日本"]
