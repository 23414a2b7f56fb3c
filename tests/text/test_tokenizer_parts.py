"""Promise: a tokenizer that travelled as plain values has the same ids, text and chats, in a process without torch."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from blocktable.errors import InvalidInputError
from blocktable.text.tokenizer import Tokenizer
from blocktable.text.tokenizer_parts import TokenizerParts

from .samples import SIGNS
from .test_tokenizer import CHAT
from .vocabularies import FAMILIES, Loaded, byte_level, tiny


def travelled(tokenizer: Tokenizer) -> Tokenizer:
    return Tokenizer(msgspec.msgpack.decode(msgspec.msgpack.encode(tokenizer.parts()), type=TokenizerParts))


@pytest.mark.parametrize("family", FAMILIES)
def test_ids_and_text_are_the_same(family: str) -> None:
    before = tiny(family)
    after = travelled(before)
    for text in [*SIGNS, "Once upon a time", "<s>"]:
        ids = before.encode(text)
        assert after.encode(text) == ids
        assert after.decode(ids) == before.decode(ids)
    assert (after.eos_token_id, after.vocab_size) == (before.eos_token_id, before.vocab_size)


@pytest.mark.parametrize("reads_plainly", [True, False])
def test_special_tokens_in_a_text_are_read_as_before(reads_plainly: bool) -> None:
    native = byte_level()
    native.encode_special_tokens = reads_plainly
    before = Tokenizer(Loaded(native))
    assert travelled(before).encode("<s>") == before.encode("<s>")
    assert (len(before.encode("<s>")) > 1) is reads_plainly, "the check can fail"


def test_chats_are_the_same(smollm2: Tokenizer) -> None:
    after = travelled(smollm2)
    for prompt in (True, False):
        assert after.apply_chat(CHAT, add_generation_prompt=prompt) == smollm2.apply_chat(CHAT, add_generation_prompt=prompt)


def parts(template: Any) -> TokenizerParts:
    return TokenizerParts(
        name_or_path="tiny",
        native=byte_level().to_str(),
        encode_special_tokens=False,
        eos_token_id=None,
        chat_template=template,
        special_tokens={"bos_token": "<s>"},
    )


def test_a_template_sees_special_tokens_tools_and_options() -> None:
    tokenizer = Tokenizer(parts("{{ bos_token }}{{ tools | length if tools }}{{ thinks }}{{ messages[0] | length }}"))
    message = {"role": "user", "content": "x", "name": None}
    assert tokenizer.render_chat([message], tools=[{}, {}], thinks="no") == "<s>2no2"


def test_of_several_templates_the_one_for_tools_is_used_with_tools_only() -> None:
    tokenizer = Tokenizer(parts({"default": "plain", "tool_use": "tools"}))
    assert tokenizer.render_chat(CHAT) == "plain"
    assert tokenizer.render_chat(CHAT, tools=[{}]) == "tools"
    with pytest.raises(InvalidInputError, match="none of the chat templates is the default: other"):
        Tokenizer(parts({"other": "x"})).render_chat(CHAT)


def test_the_longest_token_bounds_the_tokens_of_a_text() -> None:
    tokenizer = tiny("byte level")
    for text in ["x" * 100, *SIGNS]:
        assert len(tokenizer.encode(text)) >= len(text) / tokenizer.longest_token


def test_no_torch_is_loaded(tmp_path: Path) -> None:
    """Neither to read it nor to render a chat."""
    (tmp_path / "parts").write_bytes(msgspec.msgpack.encode(parts("{{ messages[0]['content'] }}")))
    program = f"""
import sys, msgspec
from blocktable.text.tokenizer import Tokenizer
from blocktable.text.tokenizer_parts import TokenizerParts
read = msgspec.msgpack.decode(open({str(tmp_path / "parts")!r}, "rb").read(), type=TokenizerParts)
assert Tokenizer(read).apply_chat([{{"role": "user", "content": "hello"}}])
print("torch" in sys.modules)
"""
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "False"
