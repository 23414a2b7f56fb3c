"""Promise: greedy float32 text of SmolLM2-135M-Instruct equals transformers' `generate`, token for token, whatever the blocks,
the budget, the pool, the cache and the order of arrival are.

16 prompts of many kinds, 64 tokens each, so 1,024 tokens in each way of running; two ties at most (see `reference.py`). Alone,
where each step reads all weights for one token, only every fourth of them runs outside a soak.
"""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from blocktable import LLM, EngineConfig, SamplingParams

from .reference import Comparison, Ids, generate_reference, is_tie
from .ways import Way, check_empty, in_the_middle, one_by_one, run_way, warm

NUM_TOKENS = 64
MAX_TIES = 2

LONG = (
    "A block table maps the logical blocks of a sequence to physical blocks of memory. Each physical block holds the keys and "
    "values of sixteen tokens for every layer. When a sequence grows, one more block is taken from the free queue and its "
    "number is appended to the table; when the sequence ends, the blocks go back, the last one first, so that the beginning "
    "of the text stays findable for as long as possible. Two sequences that begin with the same text name the same blocks. "
)

CHATS = (
    "What is the capital of France?",
    "Write a short poem about the sea.",
    "Explain what a hash table is to a child.",
    "List three differences between cats and dogs.",
)
TEXTS = (
    "Hello",
    "Once upon a time, in a village by the river, there lived",
    "def fibonacci(n):\n    ",
    "The first ten prime numbers are 2, 3, 5, 7,",
    "Bonjour, je m'appelle Claire et j'habite à",
    "日本の首都は",
    "😀 🎉 emoji are",
    "import numpy as np\n\n# a matrix of ones\n",
    LONG + "In short,",
    LONG + "Therefore the scheduler",
    "Q: 17 + 25 = ?\nA:",
    "\n\n\n",
)

WAYS = {
    "default, which is blocks of 16": Way(),
    "blocks of 1": Way({"block_size": 1}),
    "blocks of 7": Way({"block_size": 7}),
    "blocks of 32": Way({"block_size": 32}),
    "8 tokens a step": Way({"max_num_batched_tokens": 8}),
    "tiny pool": Way({"estimate_growth": False, "block_size": 4, "num_blocks": 52}, min_preemptions=20),
    "warm prefix cache": Way(arrive=warm, is_warm=True),
    "one by one": Way(arrive=one_by_one, stride=4),
    "arrivals in the middle": Way(arrive=in_the_middle),
}
"""Unless it says so, all requests come at once."""


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """On a machine that is shared, threads that wait for each other are many times slower than one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def smollm2(smollm2_gguf: Path, one_thread: None) -> Any:
    """The model as transformers loads it from the GGUF file, in float32, and its tokenizer."""
    from blocktable.model.loader import load_model, unwrap_model

    loaded = load_model(str(smollm2_gguf), dtype="float32", device="cpu", linear_backend="torch", self_check=False)
    unwrap_model(loaded.model)
    return loaded


@pytest.fixture(scope="module")
def prompts(smollm2: Any) -> list[Ids]:
    tokenizer = smollm2.tokenizer
    chats = [[{"role": "user", "content": text}] for text in CHATS]
    texts = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in [*texts, *TEXTS]]
    assert len(ids) == 16
    return ids


@pytest.fixture(scope="module")
def reference(smollm2: Any, prompts: list[Ids]) -> list[Ids]:
    return generate_reference(smollm2.model, prompts, NUM_TOKENS, in_one_batch=True)


def test_the_default_is_blocks_of_16() -> None:
    assert EngineConfig().block_size == 16


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", WAYS)
def test_text_equals_transformers(
    name: str, smollm2: Any, prompts: list[Ids], reference: list[Ids], soak: bool, tell: Callable[[str], None]
) -> None:
    way = WAYS[name]
    report: dict[str, int] = {}
    asked, wanted = way.of(prompts, soak=soak), way.of(reference, soak=soak)
    comparison = Comparison(asked, wanted, partial(is_tie, smollm2.model), MAX_TIES)
    comparison.check(run_way(way, smollm2.model, report, num_blocks=512, self_check=False))
    say = tell if way.min_preemptions or way.is_warm or comparison.ties else print
    say(f"SmolLM2, {name}: {report['preemptions']} preemptions, {report['cached']} cached tokens, {len(comparison.ties)} ties")
    assert report["preemptions"] >= way.min_preemptions
    assert (report["cached"] > 0) or not way.is_warm


@pytest.mark.timeout(900)
def test_the_file_itself_gives_the_same_text(
    smollm2_gguf: Path, smollm2: Any, prompts: list[Ids], reference: list[Ids]
) -> None:
    """A GGUF file through the front door, with all defaults: words in, words out."""
    tokenizer = smollm2.tokenizer
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, skip_special_tokens=False)
    conversation = [{"role": "user", "content": CHATS[0]}]
    with LLM(str(smollm2_gguf), num_blocks=64) as llm:
        chat = llm.chat(conversation, params)[0]
        plain = llm.generate(TEXTS[1], params)[0]
        check_empty(llm)
    assert chat.prompt_token_ids == prompts[0]
    assert chat.outputs[0].token_ids == reference[0]
    assert plain.prompt_token_ids == prompts[len(CHATS) + 1]
    assert plain.outputs[0].text == tokenizer.decode(reference[len(CHATS) + 1], clean_up_tokenization_spaces=False)
