"""Texts and tokens to try: every script's characters, and sequences of code points that people see as one sign."""

import random
import unicodedata
from collections.abc import Iterator

SIGNS = [
    "\U0001f1e9\U0001f1ea\U0001f1eb\U0001f1f7\U0001f1ef\U0001f1f5",  # flags: pairs of regional indicators
    "\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466",  # a family, joined by ZWJ
    "\U0001f469\U0001f3fd\u200d\U0001f680",  # a skin tone and ZWJ
    "\U0001f3f4\U000e0067\U000e0062\U000e0073\U000e0063\U000e0074\U000e007f",  # a flag spelled with tags
    "❤️ ☎️ 1️⃣ #️⃣",  # variation selectors, keycaps
    "e\u0301 n\u0303 a\u0328\u0301",  # combining accents
    "क्षत्रिय नमस्ते",
    "한국어 각 힣",
    "تَشْكِيل",
    "ภาษาไทย",
    "日本語のテキスト、漢字。",
    "\U00020000\U0002a6df\U0003134a",  # rare Han, four bytes each
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𓀀𓂀 𒀀",
    "\ufffd stays \ufffd\ufffd",  # a real U+FFFD in the text
    "tab\tnewline\r\n  spaces   end ",
    "don't , stop . now !",
    "\u200b\u2060\ufeff\u00ad",  # characters without width
]


def every_block(step: int = 61) -> Iterator[str]:
    """Assigned characters, every `step`-th of the whole code space, in runs of 24: each block of some size is met."""
    run = ""
    for code in range(0x20, 0x110000, step):
        character = chr(code)
        if unicodedata.category(character) in ("Cn", "Cs", "Co"):
            continue
        run += character
        if len(run) == 24:
            yield run
            run = ""
    yield run


def chunked(token_ids: list[int], size: int | None, rng: random.Random) -> Iterator[list[int]]:
    """The tokens in chunks of `size`, or of 1 to 5 at random."""
    place = 0
    while place < len(token_ids):
        count = size or rng.randint(1, 5)
        yield token_ids[place : place + count]
        place += count
