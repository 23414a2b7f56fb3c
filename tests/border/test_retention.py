"""Who asks for retention keeps its blocks longer, by priority and for a time; bad ranges are refused by name."""

import pytest

from blocktable import InvalidInputError, Scheduler
from blocktable.retention import KvCacheRetentionConfig, TokenRangeRetentionConfig

PROMPT = list(range(17))


class Runner:
    """Runs prompts one after the other on 63 usable blocks of 4 tokens."""

    def __init__(self, scheduler: Scheduler, answer) -> None:
        self.scheduler, self.answer = scheduler, answer
        self.flooded = 0

    def run(self, prompt: list[int], now_ms: int = 0, **options) -> int:
        """Cached tokens of the prompt."""
        request = self.scheduler.submit(prompt, max_tokens=1, now_us=now_ms * 1000, **options)
        while (plan := self.scheduler.plan(now_ms * 1000)).num_seqs:
            self.answer(self.scheduler, plan)
        self.scheduler.audit()
        return self.scheduler.num_cached_tokens(request)

    def flood(self, now_ms: int = 0) -> None:
        """Ten times the pool of content that nobody asked anything for."""
        for _ in range(160):
            self.flooded += 1
            first, second = divmod(self.flooded, 97)
            self.run([first % 100, second % 100] * 8 + [1], now_ms)


@pytest.fixture
def runner(make_scheduler, answer) -> Runner:
    return Runner(make_scheduler(), answer)


def kept(priority: int, duration_ms: int | None = None, end: int | None = None) -> list:
    return KvCacheRetentionConfig([TokenRangeRetentionConfig(0, end, priority, duration_ms)]).ranges(17)


def test_a_higher_priority_survives_a_flood_and_the_default_does_not(runner):
    runner.run(PROMPT, retention=kept(80))
    runner.run([50] * 17)
    runner.flood()
    assert runner.run(PROMPT) == 16
    assert runner.run([50] * 17) == 0


def test_a_range_keeps_the_blocks_before_it_and_not_those_behind(runner):
    runner.run(PROMPT, retention=[(5, 8, 80, None)])
    runner.flood()
    assert runner.run(PROMPT) == 8


def test_a_lower_priority_goes_first(runner):
    runner.run([50] * 17)
    runner.run(PROMPT, retention=kept(10))
    for first in range(19):
        runner.run([60 + first, 1] * 6)
    assert runner.run([50] * 17) == 16
    assert runner.run(PROMPT) < 16


def test_time_ends_a_priority_and_a_hit_starts_it_anew(runner):
    runner.run(PROMPT, retention=kept(80, duration_ms=100))
    assert runner.run(PROMPT, now_ms=90) == 16, "a hit by who asks for nothing"
    runner.flood(now_ms=180)
    assert runner.run(PROMPT, now_ms=185) == 16
    runner.flood(now_ms=300)
    assert runner.run(PROMPT, now_ms=300) == 0


def test_outputs_have_a_priority_of_their_own(runner):
    config = KvCacheRetentionConfig(decode_retention_priority=90, decode_duration_ms=5)
    assert config.ranges(17) == [(17, None, 90, 5)]
    assert KvCacheRetentionConfig().ranges(17) == []
    runner.run(PROMPT, retention=config.ranges(17))
    runner.flood()
    assert runner.run(PROMPT) == 16, "what comes before outputs is worth as much as they are"


@pytest.mark.parametrize(
    "field, ranges",
    [
        ("retention", 5),
        ("retention", [5]),
        ("retention", [(0, 4, 50)]),
        ("retention", [(0, None, 50, None)] * 65),
        ("priority", [(0, 4, 101, None)]),
        ("priority", [(0, 4, 300, None)]),
        ("priority", [(0, 4, -1, None)]),
        ("token_start", [(None, 4, 50, None)]),
        ("token_end", [(4, 4, 50, None)]),
        ("duration_ms", [(0, 4, 50, 0)]),
        ("duration_ms", [(0, 4, 50, True)]),
    ],
)
def test_a_bad_range_is_refused_by_name_and_nothing_is_queued(field, ranges, runner):
    with pytest.raises(InvalidInputError) as refused:
        runner.scheduler.submit(PROMPT, max_tokens=1, retention=ranges)
    assert refused.value.field == field
    assert runner.scheduler.num_waiting == 0
