"""A toy engine over `BlockPool`, `BlockTable` and `PrefixCache`: continuous batching, prefix reuse, a fork. Needs numpy only.

    python examples/tiny_engine.py

The model is a stand-in: the row of a token is made from the token and the row before it, and the next token from the last
row. So a wrong block, a stale row or a missing copy changes the text, and the answer can be checked without any block.
"""

from dataclasses import dataclass, field

import numpy as np

from blocktable import BlockPool, BlockTable, OutOfBlocksError, PrefixCache

VOCAB_SIZE = 1009
BUDGET = 32  # tokens a step


@dataclass
class Request:
    """One sequence: its tokens, where their rows live, and how many of them are computed."""

    tokens: list[int]
    max_tokens: int
    table: BlockTable | None = None
    computed: int = 0
    cached: int = 0
    outputs: list[int] = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        return len(self.outputs) >= self.max_tokens


class TinyEngine:
    """First come, first served: whoever runs gets its tokens first, then who waits and fits."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.pool = BlockPool(num_blocks, block_size)
        self.cache = PrefixCache(self.pool)
        self.rows = np.zeros(num_blocks * block_size, np.int64)  # the KV memory: one number a row
        self.waiting: list[Request] = []
        self.running: list[Request] = []

    def add(self, prompt: list[int], max_tokens: int) -> Request:
        request = Request(list(prompt), max_tokens)
        self.waiting.append(request)
        return request

    def fork(self, parent: Request, token: int) -> Request:
        """A second continuation of what `parent` has: the same blocks, another next token."""
        table = parent.table.fork()
        table.truncate(parent.computed)
        child = Request([*parent.tokens[: parent.computed], token], parent.max_tokens, table, parent.computed)
        child.outputs = [*parent.outputs[:-1], token]
        self.running.append(child)
        return child

    def step(self) -> None:
        """Admit, compute one chunk of everybody's tokens, sample, publish, end."""
        budget = BUDGET - len(self.running)
        while self.waiting and budget > 0 and self._admit(self.waiting[0]):
            self.running.append(self.waiting.pop(0))
            budget -= 1
        for request in list(self.running):
            chunk = min(len(request.tokens) - request.computed, 1 + max(budget, 0))
            budget -= chunk - 1
            try:
                slots, copies = request.table.append(chunk)
            except OutOfBlocksError:
                self._preempt(request)
                continue
            for source, target, rows in copies:  # before anything is written
                size = self.pool.block_size
                self.rows[target * size : target * size + rows] = self.rows[source * size : source * size + rows]
            self._forward(request, slots)
            if request.computed == len(request.tokens):
                request.tokens.append(next_token(self.rows[slots[-1]]))
                request.outputs.append(request.tokens[-1])
            if request.is_done:
                request.table.release()
                self.running.remove(request)

    def run(self) -> None:
        while self.waiting or self.running:
            self.step()

    def _admit(self, request: Request) -> bool:
        """Hold the cached prefix and reserve the rest of the prompt: all of it or nothing."""
        try:
            request.table, request.cached = self.cache.match(request.tokens, reserve=len(request.tokens))
        except OutOfBlocksError:
            return False
        request.computed = request.cached
        return True

    def _preempt(self, request: Request) -> None:
        """Give the blocks back and start again later; what was published is found again then."""
        request.table.release()
        request.computed = 0
        self.running.remove(request)
        self.waiting.insert(0, request)

    def _forward(self, request: Request, slots: np.ndarray) -> None:
        """Write the chunk's rows, each from the one before it, which is read through the block table."""
        before = self.rows[request.table.slots(request.computed - 1, request.computed)[0]] if request.computed else 0
        for slot in slots:
            before = self.rows[slot] = mix(before, request.tokens[request.computed])
            request.computed += 1
        size = self.pool.block_size
        if request.computed // size > request.table.num_published:
            start = request.table.num_published * size
            self.cache.publish(request.table, request.tokens[start : request.computed], start=start)


def mix(before: int, token: int) -> int:
    return (int(before) * 31 + token + 1) % 1_000_003


def next_token(row: int) -> int:
    return int(row) % VOCAB_SIZE


def answer(tokens: list[int], count: int) -> list[int]:
    """What the model says when there are no blocks at all."""
    row, outputs = 0, []
    for token in tokens:
        row = mix(row, token)
    for _ in range(count):
        outputs.append(next_token(row))
        row = mix(row, outputs[-1])
    return outputs


def main() -> None:
    engine = TinyEngine(num_blocks=40, block_size=4)
    system = list(range(100, 117))
    prompts = [system + [n] * (n + 1) for n in range(6)]
    requests = [engine.add(prompts[0], max_tokens=10)]
    engine.step()  # computes and publishes the system prompt
    requests += [engine.add(prompt, max_tokens=10) for prompt in prompts[1:]]
    while len(requests[0].outputs) < 4:
        engine.step()
    child = engine.fork(requests[0], token=7)
    engine.run()
    for prompt, request in zip(prompts, requests):
        print(f"{len(prompt)} tokens, {request.cached:2} cached: {request.outputs}")
        assert request.outputs == answer(prompt, 10)
    print(f"the fork:            {child.outputs}")
    kept = requests[0].outputs[:3]
    assert child.outputs == [*kept, 7, *answer([*prompts[0], *kept, 7], 6)]
    engine.pool.audit()
    print(engine.pool.stats())


if __name__ == "__main__":
    main()
