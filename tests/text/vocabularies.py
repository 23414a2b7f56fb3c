"""Tiny tokenizers of every family, built here: byte-level, byte fallback with and without a dropped space, words and parts."""

from dataclasses import dataclass, field
from functools import cache
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from blocktable.text import tokenizer as ours

from .samples import SIGNS

SPECIAL = ["<s>", "</s>", "<|end|>"]
CORPUS = ["the cat sat on the mat , and then it went away !", "Hello world", "don't stop now", *SIGNS]


@dataclass
class Loaded:
    """As much of a transformers tokenizer as ours reads; `backend_tokenizer` is the native one."""

    backend_tokenizer: Any
    name_or_path: str = "tiny"
    eos_token_id: int | None = 1
    chat_template: str | None = None
    special_tokens_map: dict[str, str] = field(default_factory=dict)

    def apply_chat_template(self, conversation: Any, **_: Any) -> str:
        return "".join(f"{message['role']}: {message['content']}\n" for message in conversation)


def byte_level() -> Tokenizer:
    """As of GPT-2, Llama 3, Qwen, SmolLM2: every token is a run of bytes, many of them parts of characters."""
    native = Tokenizer(models.BPE())
    native.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    native.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=340, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False)
    native.train_from_iterator(CORPUS, trainer)
    native.add_tokens(["日本", "é"])  # added and not special: one spelled as it reads, one that looks like a byte
    return native


def byte_level_in_steps() -> Tokenizer:
    """A byte-level decoder as one step of several: the native decode is the only one that knows what comes out."""
    native = byte_level()
    native.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Replace("_", " ")])
    return native


def byte_fallback(*, drops_spaces: int) -> Tokenizer:
    """As of Llama 2, Mistral and Gemma: pieces with ▁ for a space, and one token for each byte of what is missing. Up to
    `drops_spaces` spaces at the beginning of a text are dropped."""
    words = [
        "▁",
        "▁▁",
        "▁the",
        "▁cat",
        "▁Hello",
        "at",
        "t",
        "h",
        "e",
        "c",
        "a",
        "l",
        "o",
        "!",
        ".",
        "é",
        "日",
        "▁é",
        "\ufffd",
        "\n",
    ]
    names = [*SPECIAL, "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    vocab = {name: place for place, name in enumerate(names)}
    merges = [("a", "t")]
    native = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    native.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    native.decoder = decoders.Sequence([*steps, decoders.Strip(" ", drops_spaces, 0)] if drops_spaces else steps)
    native.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in [*SPECIAL, "<unk>"]])
    return native


def word_pieces() -> Tokenizer:
    """As of BERT: words are joined by spaces, parts by nothing."""
    names = ["[UNK]", *SPECIAL, "the", "cat", "##s", "##t", "c", "##a", ".", ",", "!", "don", "n't", "日", "##本"]
    native = Tokenizer(models.WordPiece({name: place for place, name in enumerate(names)}, unk_token="[UNK]"))
    native.pre_tokenizer = pre_tokenizers.Whitespace()
    native.decoder = decoders.WordPiece("##", cleanup=True)
    native.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    return native


def unigram() -> Tokenizer:
    """As of T5: pieces with ▁, of which the first is dropped."""
    pieces = [
        ("<unk>", 0.0),
        ("▁", -2.0),
        ("▁the", -3.0),
        ("▁cat", -3.0),
        ("s", -4.0),
        ("a", -4.0),
        ("日", -5.0),
        ("\U0001f600", -6.0),
    ]
    native = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=False))
    native.pre_tokenizer = pre_tokenizers.Metaspace()
    native.decoder = decoders.Metaspace()
    native.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    return native


def word_ends() -> Tokenizer:
    """As of the first GPT: a mark at the end of a word becomes a space, unless it is the last."""
    names = [*SPECIAL, "the</w>", "cat</w>", "c", "a", "t</w>", "日", "!</w>"]
    native = Tokenizer(models.BPE({name: place for place, name in enumerate(names)}, []))
    native.decoder = decoders.BPEDecoder()
    native.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    return native


def plain_words() -> Tokenizer:
    """No decoder at all: tokens are joined by spaces."""
    native = Tokenizer(models.WordLevel({"<unk>": 0, "the": 1, "cat": 2, "日本": 3, "\U0001f600": 4}, unk_token="<unk>"))
    native.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    return native


FAMILIES = {
    "byte level": byte_level,
    "byte level in steps": byte_level_in_steps,
    "byte fallback": lambda: byte_fallback(drops_spaces=1),
    "byte fallback, spaces kept": lambda: byte_fallback(drops_spaces=0),
    "byte fallback, spaces dropped": lambda: byte_fallback(drops_spaces=3),
    "word pieces": word_pieces,
    "unigram": unigram,
    "word ends": word_ends,
    "plain words": plain_words,
}


@cache
def tiny(family: str) -> ours.Tokenizer:
    """Our tokenizer around the tiny one of this family."""
    return ours.Tokenizer(Loaded(FAMILIES[family]()))
