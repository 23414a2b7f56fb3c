"""Words to ids and back: as transformers does it, from many threads, and no bad message gets through."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import Tokenizer as Native

from blocktable.errors import InvalidInputError, UnsupportedModelError
from blocktable.text import tokenizer as module
from blocktable.text.tokenizer import Tokenizer
from tests.border.test_threads import lets_others_run

from .samples import SIGNS, every_block
from .vocabularies import FAMILIES, Loaded, byte_level, tiny

CHAT = [
    {"role": "system", "content": "Answer in one word."},
    {"role": "user", "content": "Which is the capital of France?"},
    {"role": "assistant", "content": "Paris"},
    {"role": "user", "content": "And of Iceland? 🇮🇸"},
]


def test_ids_are_those_of_transformers(smollm2: Tokenizer, loaded_smollm2: Any) -> None:
    for text in [*SIGNS, "Once upon a time", "<|im_start|>user", " leading", *every_block(step=997)]:
        assert smollm2.encode(text) == loaded_smollm2(text)["input_ids"]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_long_text_has_the_ids_that_the_native_tokenizer_gives_it(family: str) -> None:
    """It goes another way, on which other threads may run."""
    tokenizer = tiny(family)
    text = (" ".join(SIGNS) + "Once upon a time ") * 400
    assert len(text) >= module.LONG_TEXT
    for special in (True, False):
        right = tokenizer._native.encode(text, add_special_tokens=special).ids
        assert tokenizer.encode(text, add_special_tokens=special) == right


def test_a_long_text_does_not_stop_other_threads(smollm2: Tokenizer) -> None:
    text = "Once upon a time there was a tokenizer. " * 4_000
    assert lets_others_run(lambda: smollm2.encode(text))
    assert not lets_others_run(lambda: smollm2._native.encode(text)), "the way of short texts: the check can fail"


def test_chat_ids_are_those_of_transformers(smollm2: Tokenizer, loaded_smollm2: Any) -> None:
    for prompt in (True, False):
        right = loaded_smollm2.apply_chat_template(CHAT, add_generation_prompt=prompt)["input_ids"]
        assert smollm2.apply_chat(CHAT, add_generation_prompt=prompt) == right
    assert smollm2.has_chat_template
    assert smollm2.eos_token_id == loaded_smollm2.eos_token_id


def test_bytes_of_tokens_are_the_decode_of_the_real_vocabulary(smollm2: Tokenizer) -> None:
    assert smollm2.is_byte_level
    ids = range(smollm2.vocab_size)
    together = b"".join(smollm2.token_bytes(i, skip_special_tokens=False) for i in ids)
    assert together.decode("utf-8", "replace") == smollm2.decode(ids, skip_special_tokens=False)


def test_bytes_of_tokens_are_the_decode_of_a_vocabulary_with_added_tokens() -> None:
    tokenizer = tiny("byte level")
    for token_id in range(tokenizer.vocab_size + 2):
        for skip in (True, False):
            alone = tokenizer.token_bytes(token_id, skip_special_tokens=skip).decode("utf-8", "replace")
            assert alone == tokenizer.decode([token_id], skip_special_tokens=skip)


def test_each_family_is_known_for_what_it_is() -> None:
    assert {name for name in FAMILIES if tiny(name).is_byte_level} == {"byte level"}
    assert {name for name in FAMILIES if tiny(name).may_split_characters} == {"byte level", "byte level in steps"}
    assert {name for name in FAMILIES if tiny(name).has_byte_fallback} == {name for name in FAMILIES if "fallback" in name}


def test_a_lone_surrogate_is_refused() -> None:
    with pytest.raises(UnicodeEncodeError):
        tiny("byte level").encode("a\ud800")
    with pytest.raises(InvalidInputError, match=r"messages.*Unicode"):
        Tokenizer(Loaded(byte_level(), chat_template="x")).apply_chat([{"role": "user", "content": "\udc00"}])


BAD_MESSAGES: list[tuple[Any, str]] = [
    ([], "messages"),
    ("hello", "messages"),
    ({"role": "user", "content": "x"}, "messages"),
    (None, "messages"),
    (["hello"], "messages[0]"),
    ([{"content": "x"}], "messages[0].role"),
    ([{"role": "", "content": "x"}], "messages[0].role"),
    ([{"role": 1, "content": "x"}], "messages[0].role"),
    ([CHAT[0], {"role": "user"}], "messages[1].content"),
    ([{"role": "user", "content": None}], "messages[0].content"),
    ([{"role": "user", "content": 5}], "messages[0].content"),
    ([{"role": "user", "content": {"type": "text", "text": "x"}}], "messages[0].content"),
    ([{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image_url"}]}], "messages[0].content[1]"),
    ([{"role": "user", "content": [{"type": "text", "text": None}]}], "messages[0].content[0]"),
]


@pytest.mark.parametrize("messages, field", BAD_MESSAGES)
def test_a_bad_message_is_refused_by_its_place(messages: Any, field: str) -> None:
    with pytest.raises(InvalidInputError) as refusal:
        Tokenizer(Loaded(byte_level(), chat_template="x")).apply_chat(messages)
    assert refusal.value.field == field


def test_parts_of_text_are_joined_and_a_call_without_content_is_let_through() -> None:
    tokenizer = Tokenizer(Loaded(byte_level(), chat_template="x"))
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert tokenizer.render_chat([{"role": "user", "content": parts}]) == "user: one\ntwo\n"
    assert tokenizer.render_chat([{"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}]) == "assistant: \n"


def test_a_tokenizer_without_a_chat_template_says_so() -> None:
    with pytest.raises(InvalidInputError, match="no chat template"):
        tiny("byte level").apply_chat(CHAT)


def test_what_a_chat_template_refuses_is_refused_with_its_reason(loaded_smollm2: Any) -> None:
    from copy import copy

    strict = copy(loaded_smollm2)
    strict.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(InvalidInputError, match="roles must alternate"):
        Tokenizer(strict).apply_chat(CHAT)
    strict.chat_template = "{% if %}"
    with pytest.raises(InvalidInputError, match="chat template"):
        Tokenizer(strict).apply_chat(CHAT)


def test_a_tokenizer_without_a_native_backend_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="no native"):
        Tokenizer(Loaded(backend_tokenizer=None))


def changed_by_its_owner(make: Callable[[Loaded], Tokenizer]) -> bool:
    """Whether the transformers tokenizer that ours was made from can still change ours: it cuts and pads as it encodes."""
    loaded = Loaded(byte_level())
    tokenizer = make(loaded)
    before = tokenizer.encode("the cat sat on the mat")
    loaded.backend_tokenizer.enable_truncation(2)
    loaded.backend_tokenizer.enable_padding(length=40)
    return tokenizer.encode("the cat sat on the mat") != before


def test_nobody_else_can_change_the_native_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not changed_by_its_owner(Tokenizer)

    def shared(native: Native) -> Native:
        return native

    monkeypatch.setattr(module, "_own_copy", shared)
    assert changed_by_its_owner(Tokenizer), "the mutant that shares it must be seen"


def test_a_tokenizer_that_cut_and_padded_is_copied_without_that() -> None:
    loaded = Loaded(byte_level())
    right = Tokenizer(loaded).encode("the cat sat on the mat")
    loaded.backend_tokenizer.enable_truncation(2)
    loaded.backend_tokenizer.enable_padding(length=40)
    assert Tokenizer(loaded).encode("the cat sat on the mat") == right


def test_many_threads_get_the_results_of_one() -> None:
    loaded = Loaded(byte_level(), chat_template="x")
    tokenizer = Tokenizer(loaded)
    texts = [*SIGNS, "the cat sat on the mat"]

    def everything(text: str) -> tuple[object, ...]:
        ids = tokenizer.encode(text)
        chat = tokenizer.apply_chat([{"role": "user", "content": text}])
        return ids, chat, tokenizer.decode(ids), [tokenizer.token_bytes(i, skip_special_tokens=True) for i in ids]

    right = {text: everything(text) for text in texts}
    wrong: list[object] = []
    done = threading.Event()

    def change() -> None:
        while not done.is_set():
            loaded.backend_tokenizer.enable_truncation(2)
            loaded.backend_tokenizer.no_truncation()

    def read(first: int) -> None:
        try:
            for round_ in range(20):
                text = texts[(first + round_) % len(texts)]
                if everything(text) != right[text]:
                    wrong.append(text)
        except Exception as error:
            wrong.append(error)

    changer = threading.Thread(target=change)
    readers = [threading.Thread(target=read, args=(i,)) for i in range(16)]
    for thread in (changer, *readers):
        thread.start()
    for thread in readers:
        thread.join()
    done.set()
    changer.join()
    assert wrong == []
