"""Who shares cached blocks with whom, through the whole engine: salts of prompts, and the keys of vLLM."""

import pytest

from blocktable import LLM, SamplingParams

from .conftest import MakeLLM

ONE = SamplingParams(temperature=0, max_tokens=1)
IDS = list(range(1, 41))


def cached(llm: LLM, **said: object) -> int | None:
    return llm.generate({"prompt_token_ids": IDS, **said}, ONE)[0].num_cached_tokens


def test_prompts_share_blocks_only_with_equal_salts(make_llm: MakeLLM) -> None:
    """The control is that each finds its own."""
    llm = make_llm(block_size=8)
    assert [cached(llm, cache_salt=salt) for salt in ("a", "b", "a", "b")] == [0, 0, 39, 39]
    assert [cached(llm) for _ in range(2)] == [0, 39]
    assert cached(llm, cache_salt=None) == 39
    alone = llm.generate({"prompt_token_ids": IDS}, ONE)[0].outputs[0].token_ids
    assert llm.generate({"prompt_token_ids": IDS, "cache_salt": "a"}, ONE)[0].outputs[0].token_ids == alone


@pytest.mark.parametrize("algorithm", ["sha256_cbor", "vllm_sha256", "blake3"])
def test_every_algorithm_finds_what_it_named(make_llm: MakeLLM, algorithm: str) -> None:
    llm = make_llm(block_size=8, hash_algorithm=algorithm)
    assert llm.scheduler.config["hash_algorithm"] == algorithm
    assert [cached(llm, cache_salt=salt) for salt in ("a", "b", "a")] == [0, 0, 39]
