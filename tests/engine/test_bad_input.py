"""Promise: bad input gets a typed error that names field, value and bound, before anything is queued; the engine goes on."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from blocktable import (
    LLM,
    EngineConfig,
    InvalidInputError,
    ModelLoadError,
    NeverFitsError,
    QueueFullError,
    SamplingParams,
    UnknownOptionError,
    UnsupportedModelError,
)

from .conftest import MakeLLM
from .tiny_llama import MAX_MODEL_LEN, VOCAB_SIZE
from .ways import check_empty

GOOD = {"prompt_token_ids": [1, 2, 3]}
FOUR = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)

BAD_PROMPTS: dict[str, tuple[Any, str, str]] = {
    "empty text": ("", "prompts", "not be empty"),
    "empty ids": ({"prompt_token_ids": []}, "prompts.prompt_token_ids", "at least one token"),
    "empty text in a dictionary": ({"prompt": ""}, "prompts.prompt", "not be empty"),
    "nothing in a dictionary": ({}, "prompts", "`prompt` or `prompt_token_ids`"),
    "id at the vocabulary's end": (
        {"prompt_token_ids": [1, VOCAB_SIZE]},
        "prompts.prompt_token_ids[1]",
        f"0..{VOCAB_SIZE - 1}",
    ),
    "negative id": ({"prompt_token_ids": [-1]}, "prompts.prompt_token_ids[0]", f"0..{VOCAB_SIZE - 1}"),
    "id beyond 64 bits": ({"prompt_token_ids": [1, 2**70]}, "prompts.prompt_token_ids[1]", f"0..{VOCAB_SIZE - 1}"),
    "ids that are fractions": ({"prompt_token_ids": [1.5]}, "prompts.prompt_token_ids", "whole numbers"),
    "ids that are truths": ({"prompt_token_ids": [True, False]}, "prompts.prompt_token_ids", "whole numbers"),
    "ids that are words": ({"prompt_token_ids": ["a"]}, "prompts.prompt_token_ids", "whole numbers"),
    "nested ids": ({"prompt_token_ids": [[1], [2]]}, "prompts.prompt_token_ids", "flat"),
    "ragged ids": ({"prompt_token_ids": [[1], [2, 3]]}, "prompts.prompt_token_ids", "flat"),
    "ids as a text": ({"prompt_token_ids": "123"}, "prompts.prompt_token_ids", "sequence of token ids"),
    "an array of two dimensions": ({"prompt_token_ids": np.ones((2, 2), np.int64)}, "prompts.prompt_token_ids", "flat"),
    "text that is a number": ({"prompt": 5}, "prompts.prompt", "text"),
    "a number": (5, "prompts", "text"),
    "nothing": (None, "prompts", "text"),
    "bytes": (b"hello", "prompts", "text"),
    "bare ids": ([1, 2, 3], "prompts[0]", "prompt_token_ids"),
    "half a character": ("\ud800", "prompts", "Unicode"),
    "an empty salt": ({"prompt_token_ids": [1], "cache_salt": ""}, "prompts.cache_salt", "not empty"),
    "a salt that is no text": ({"prompt_token_ids": [1], "cache_salt": 5}, "prompts.cache_salt", "text"),
    "a salt of half a character": ({"prompt_token_ids": [1], "cache_salt": "a\ud800"}, "prompts.cache_salt", "Unicode"),
    "a salt that is too long": ({"prompt_token_ids": [1], "cache_salt": "é" * 513}, "prompts.cache_salt", "at most 1024"),
    "unknown key": ({"promt": "hello"}, "prompts.promt", "did you mean prompts.prompt"),
    "longer than the model": ({"prompt_token_ids": [1] * MAX_MODEL_LEN}, "prompt_len", f"1..={MAX_MODEL_LEN - 1}"),
}


@pytest.mark.parametrize("name", BAD_PROMPTS)
def test_a_bad_prompt_is_refused_by_field_value_and_bound(name: str, llm: LLM) -> None:
    prompt, field, bound = BAD_PROMPTS[name]
    with pytest.raises(InvalidInputError) as caught:
        llm.generate(prompt, FOUR)
    assert caught.value.field == field
    assert bound in caught.value.bound, caught.value.bound
    assert str(caught.value).startswith(f"{field}=")
    assert llm.scheduler.stats()["submitted"] == 0
    goes_on(llm)


def test_the_longest_salt_is_the_cores(llm: LLM) -> None:
    assert llm.generate({"prompt_token_ids": [1], "cache_salt": "é" * 512}, FOUR)


def goes_on(llm: LLM) -> None:
    """A good request is answered, and nothing is left over."""
    output = llm.generate(GOOD, FOUR)[0]
    assert (len(output.outputs[0].token_ids), output.outputs[0].finish_reason) == (4, "length")
    check_empty(llm)


def test_the_value_stands_in_the_error(llm: LLM) -> None:
    with pytest.raises(InvalidInputError) as caught:
        llm.generate({"prompt_token_ids": [1, 999]}, FOUR)
    assert caught.value.value == 999
    with pytest.raises(InvalidInputError) as caught:
        llm.generate({"prompt_token_ids": [1] * (MAX_MODEL_LEN + 5)}, FOUR)
    assert caught.value.value == MAX_MODEL_LEN + 5


def test_a_prompt_may_be_one_token_shorter_than_the_model_and_no_longer(make_llm: MakeLLM) -> None:
    """One rule at every door: a prompt leaves room for one output."""
    llm = make_llm()
    for length in (MAX_MODEL_LEN - 2, MAX_MODEL_LEN - 1):
        for max_tokens in (None, 1, 2):
            output = llm.generate({"prompt_token_ids": [3] * length}, SamplingParams(max_tokens=max_tokens, ignore_eos=True))[0]
            room = MAX_MODEL_LEN - length
            assert len(output.outputs[0].token_ids) == min(max_tokens or room, room)
            assert output.outputs[0].finish_reason == "length"
    for length in (MAX_MODEL_LEN, MAX_MODEL_LEN + 1):
        with pytest.raises(InvalidInputError):
            llm.generate({"prompt_token_ids": [3] * length}, FOUR)
    goes_on(llm)


def test_a_prompt_that_the_pool_can_never_hold_is_refused_with_the_numbers(make_llm: MakeLLM) -> None:
    llm = make_llm(num_blocks=5)  # four usable blocks of eight
    assert len(llm.generate({"prompt_token_ids": [3] * 32}, SamplingParams(max_tokens=1))) == 1
    with pytest.raises(NeverFitsError) as caught:
        llm.generate({"prompt_token_ids": [3] * 33}, FOUR)
    assert (caught.value.needed, caught.value.usable) == (5, 4)
    goes_on(llm)


BAD_PARAMS: dict[str, tuple[dict[str, Any], str, str]] = {
    "no tokens": ({"max_tokens": 0}, "max_tokens", "1.."),
    "fewer than no tokens": ({"max_tokens": -3}, "max_tokens", "1.."),
    "temperature is no number": ({"temperature": float("nan")}, "temperature", "from 0"),
    "temperature without end": ({"temperature": float("inf")}, "temperature", "from 0"),
    "temperature below zero": ({"temperature": -0.1}, "temperature", "from 0"),
    "top_p of nothing": ({"top_p": 0}, "top_p", "above 0 and at most 1"),
    "top_p of more than all": ({"top_p": 2}, "top_p", "above 0 and at most 1"),
}


@pytest.mark.parametrize("name", BAD_PARAMS)
def test_bad_sampling_parameters_are_refused_by_field_value_and_bound(name: str, llm: LLM) -> None:
    options, field, bound = BAD_PARAMS[name]
    with pytest.raises(InvalidInputError) as caught:
        llm.generate(GOOD, SamplingParams(**options))
    value = options[field]
    assert caught.value.field == field
    assert caught.value.value == value or value != value
    assert bound in caught.value.bound
    goes_on(llm)


def test_an_unknown_sampling_option_names_the_nearest() -> None:
    with pytest.raises(UnknownOptionError, match="temperature"):
        SamplingParams(temprature=0.5)


def test_stop_tokens_outside_of_the_vocabulary_are_refused(llm: LLM) -> None:
    with pytest.raises(InvalidInputError, match=re.escape(f"0..{VOCAB_SIZE - 1}")) as caught:
        llm.generate(GOOD, SamplingParams(stop_token_ids=[VOCAB_SIZE]))
    assert (caught.value.field, caught.value.value) == ("stop_token_ids[0]", VOCAB_SIZE)
    goes_on(llm)


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ([FOUR], "sampling_params"),
        ([FOUR, FOUR, FOUR], "sampling_params"),
        ([FOUR, {"max_tokens": 4}], "sampling_params[1]"),
        ({"max_tokens": 4}, "sampling_params"),
        ("greedy", "sampling_params"),
    ],
)
def test_parameters_that_do_not_match_the_prompts_are_refused(params: Any, field: str, llm: LLM) -> None:
    with pytest.raises(InvalidInputError) as caught:
        llm.generate([GOOD, GOOD], params)
    assert caught.value.field == field
    assert llm.scheduler.stats()["submitted"] == 0
    goes_on(llm)


def test_one_bad_prompt_in_a_list_keeps_all_of_them_from_running(make_llm: MakeLLM) -> None:
    """Also where only the core can tell, and where the queue has no room for those before it."""
    llm = make_llm(max_waiting=2)
    with pytest.raises(InvalidInputError) as invalid:
        llm.generate([GOOD, GOOD, {"prompt_token_ids": [VOCAB_SIZE]}], FOUR)
    assert invalid.value.field == "prompts[2].prompt_token_ids[0]"
    with pytest.raises(InvalidInputError) as too_long:
        llm.generate([GOOD] * 5 + [{"prompt_token_ids": [1] * MAX_MODEL_LEN}], FOUR)
    assert too_long.value.__notes__ == ["in prompts[5]"]
    with pytest.raises(NeverFitsError) as too_big:
        make_llm(num_blocks=5, max_waiting=2).generate([GOOD] * 5 + [{"prompt_token_ids": [1] * 40}], FOUR)
    assert too_big.value.__notes__ == ["in prompts[5]"]
    assert llm.scheduler.stats()["steps"] == 0
    goes_on(llm)


def test_a_full_queue_refuses_one_more(make_llm: MakeLLM) -> None:
    llm = make_llm(max_waiting=2)
    ids = [llm.add_request(GOOD, FOUR), llm.add_request(GOOD, FOUR)]
    with pytest.raises(QueueFullError) as caught:
        llm.add_request(GOOD, FOUR)
    assert caught.value.limit == 2
    ended = []
    while llm.has_unfinished_requests():
        ended += [output.request_id for output in llm.step()]
    assert sorted(ended) == sorted(ids)
    goes_on(llm)


BAD_OPTIONS: dict[str, tuple[dict[str, Any], str, str]] = {
    "no tokens a block": ({"block_size": 0}, "block_size", "1..4096"),
    "a block size that is a truth": ({"block_size": True}, "block_size", "whole number"),
    "a block size that is a fraction": ({"block_size": 16.0}, "block_size", "whole number"),
    "one block": ({"num_blocks": 1}, "num_blocks", "2.."),
    "no budget": ({"max_num_batched_tokens": 0}, "max_num_batched_tokens", "1.."),
    "no sequences": ({"max_num_seqs": 0}, "max_num_seqs", "1.."),
    "no queue": ({"max_waiting": 0}, "max_waiting", "1.."),
    "no share": ({"memory_share": 0.0}, "memory_share", "above 0"),
    "a share that is no number": ({"memory_share": float("nan")}, "memory_share", "above 0"),
    "more than all memory": ({"memory_share": 1.5}, "memory_share", "at most 1"),
    "no bytes": ({"kv_cache_memory_bytes": 0}, "kv_cache_memory_bytes", "1.."),
    "too few bytes": ({"kv_cache_memory_bytes": 100, "num_blocks": None}, "kv_cache_memory_bytes", "2 blocks"),
    "more blocks than memory": ({"num_blocks": 2**27 - 1}, "num_blocks", "free"),
    "more blocks than have numbers": ({"num_blocks": 2**31 - 1}, "num_blocks", "can be numbered"),
    "a length of one": ({"max_model_len": 1}, "max_model_len", "2.."),
    "longer than the model": ({"max_model_len": MAX_MODEL_LEN + 1}, "max_model_len", f"at most {MAX_MODEL_LEN}"),
    "a share of many digits": ({"memory_share": 10**400}, "memory_share", "at most 1"),
    "graphs": ({"cuda_graphs": "no"}, "cuda_graphs", "True or False"),
    "an array of dtypes": ({"dtype": np.array(["float32", "float16"])}, "dtype", "one of auto"),
    "another dtype": ({"dtype": "float8"}, "dtype", "one of auto"),
    "not the model's dtype": ({"dtype": "bfloat16"}, "dtype", "float32"),
    "no such device": ({"device": "cuda:7"}, "device", "cpu"),
    "threads": ({"num_threads": 0}, "num_threads", "1.."),
    "seed": ({"seed": -1}, "seed", "0.."),
    "hash": ({"hash_algorithm": "md5"}, "hash_algorithm", "sha256_cbor"),
    "partial": ({"enable_partial_hits": 1}, "enable_partial_hits", "True or False"),
    "caching": ({"enable_prefix_caching": "yes"}, "enable_prefix_caching", "True or False"),
    "tokenizer": ({"tokenizer": 5}, "tokenizer", "tokenizer"),
}


@pytest.mark.parametrize("name", BAD_OPTIONS)
def test_a_bad_option_is_refused_by_field_value_and_bound(name: str, make_llm: MakeLLM, tiny_model: Any) -> None:
    options, field, bound = BAD_OPTIONS[name]
    with pytest.raises(InvalidInputError) as caught:
        make_llm(**options)
    assert caught.value.field == field
    assert bound in caught.value.bound, caught.value.bound
    assert tiny_model.config._attn_implementation == "sdpa", "the model was not given back"
    goes_on(make_llm())


BAD_RULES: dict[str, tuple[dict[str, Any], str]] = {
    "a rule that does not exist": ({"tenants": {"a": {"hard_blok": 3}}}, "tenants"),
    "a tenant without rules": ({"tenants": {"a": 3}}, "tenants"),
    "fewer than no blocks": ({"other_tenants": {"hard_blocks": -1}}, "hard_blocks"),
    "no weight": ({"policy": "fair", "tenants": {"a": {"weight": 0}}}, "weight"),
    "displaced without priorities": ({"preempt_for_waiting": True}, "preempt_for_waiting"),
}


@pytest.mark.parametrize("name", BAD_RULES)
def test_a_bad_rule_of_the_waiting_line_is_refused_before_a_model_is_loaded(name: str) -> None:
    options, field = BAD_RULES[name]
    with pytest.raises(InvalidInputError) as caught:
        EngineConfig(**options)
    assert caught.value.field == field


def test_a_number_of_numpy_is_a_number() -> None:
    config = EngineConfig(max_num_seqs=np.int64(8), memory_share=np.float32(0.5), no_evict=np.True_)  # type: ignore[arg-type]
    assert [type(given) for given in (config.max_num_seqs, config.memory_share, config.no_evict)] == [int, float, bool]
    assert config == EngineConfig(max_num_seqs=8, memory_share=0.5, no_evict=True)


def test_an_unknown_option_names_the_nearest(make_llm: MakeLLM) -> None:
    with pytest.raises(UnknownOptionError, match="did you mean block_size") as caught:
        make_llm(blok_size=16)
    assert (caught.value.field, caught.value.value) == ("blok_size", 16)


def write_config(folder: Path, text: str) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(text)
    return folder


BAD_PLACES: dict[str, tuple[Callable[[Path], Path], type[Exception]]] = {
    "missing directory": (lambda tmp: tmp / "nowhere", ModelLoadError),
    "empty directory": (lambda tmp: (tmp / "empty").mkdir() or tmp / "empty", ModelLoadError),
    "broken config": (lambda tmp: write_config(tmp / "broken", "{"), ModelLoadError),
    "no weights": (lambda tmp: write_config(tmp / "bare", '{"model_type": "llama"}'), ModelLoadError),
    "unknown architecture": (lambda tmp: write_config(tmp / "odd", '{"model_type": "abacus"}'), UnsupportedModelError),
    "unsupported architecture": (lambda tmp: write_config(tmp / "state", '{"model_type": "mamba"}'), UnsupportedModelError),
    "missing file": (lambda tmp: tmp / "none.gguf", ModelLoadError),
}


@pytest.mark.parametrize("name", BAD_PLACES)
def test_a_model_that_cannot_be_had_is_told_by_its_place(name: str, tmp_path: Path, llm: LLM) -> None:
    make, kind = BAD_PLACES[name]
    place = make(tmp_path)
    with pytest.raises(kind, match=re.escape(str(place))) as caught:
        LLM(str(place))
    assert caught.value.reason
    goes_on(llm)


@pytest.mark.parametrize("model", [None, 5, object()])
def test_what_is_no_model_is_refused(model: Any) -> None:
    with pytest.raises(InvalidInputError) as caught:
        LLM(model)
    assert caught.value.field == "model"


BAD_CHATS: dict[str, tuple[Any, str]] = {
    "no messages": ([], "messages"),
    "a text": ("hello", "messages"),
    "no role": ([{"content": "hello"}], "messages[0].role"),
    "no content": ([{"role": "user"}], "messages[0].content"),
    "one of two": ([[{"role": "user", "content": "hello"}], [{"role": "user", "content": 5}]], "messages[0].content"),
}


@pytest.mark.parametrize("name", BAD_CHATS)
def test_a_bad_conversation_is_refused(name: str, llm: LLM) -> None:
    messages, field = BAD_CHATS[name]
    with pytest.raises(InvalidInputError) as caught:
        llm.chat(messages, FOUR)
    assert caught.value.field == field
    assert getattr(caught.value, "__notes__", []) == (["in conversation 1"] if name == "one of two" else [])
    goes_on(llm)


def test_without_a_tokenizer_words_are_refused_and_ids_are_served(make_llm: MakeLLM) -> None:
    llm = make_llm(tokenizer=None)
    with pytest.raises(InvalidInputError, match="no tokenizer"):
        llm.generate("hello", FOUR)
    with pytest.raises(InvalidInputError, match="no tokenizer"):
        llm.chat([{"role": "user", "content": "hello"}], FOUR)
    with pytest.raises(InvalidInputError, match="no tokenizer"):
        llm.generate(GOOD, SamplingParams(stop=["x"]))
    goes_on(llm)


def test_what_a_shutdown_ended_is_told_once(make_llm: MakeLLM) -> None:
    llm = make_llm()
    queued = [llm.add_request(GOOD, FOUR) for _ in range(2)]
    llm.shutdown()
    assert llm.has_unfinished_requests()
    assert [(output.request_id, output.outputs[0].finish_reason) for output in llm.step()] == [(one, "abort") for one in queued]
    assert not llm.has_unfinished_requests()
    with pytest.raises(InvalidInputError, match="shut down"):
        llm.step()


def test_a_closed_engine_says_so(make_llm: MakeLLM) -> None:
    llm = make_llm()
    llm.shutdown()
    llm.shutdown()
    with pytest.raises(InvalidInputError, match="shut down"):
        llm.generate(GOOD, FOUR)
