"""A scene: a driver with the sizes that most fault tests want, and prompts that nobody else uses.

Before: a test says what differs. After: a `Driver` that checks every call. Prompts are made from a number, so that two
with different numbers share no token.
"""

from typing import Any

from blocktable.testing import Driver

VOCAB_SIZE = 50_000_017


def scene(*, usable: int = 64, block_size: int = 4, **changes: Any) -> Driver:
    """A driver over a pool of `usable` blocks and the null block; `changes` are arguments of `Scheduler`."""
    config: dict[str, Any] = {
        "num_blocks": usable + 1,
        "block_size": block_size,
        "vocab_size": VOCAB_SIZE,
        "max_model_len": 512,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 256,
    }
    return Driver(config | changes)


def prompt(number: int, length: int) -> list[int]:
    """`length` tokens that only the prompt of this number has."""
    return [10_000 * number + i for i in range(length)]
