"""Promise: a caller of the engine says what stays cached: at which priority, for how long, or pinned."""

from dataclasses import replace

import pytest

from blocktable import LLM, AuditError, InvalidInputError, PinBudgetError, SamplingParams, _core
from blocktable.engine.request import Prompt
from blocktable.engine.step_loop import StepLoop
from blocktable.retention import KvCacheRetentionConfig, TokenRangeRetentionConfig

from .conftest import MakeLLM

ONE = SamplingParams(temperature=0, max_tokens=1)
IDS = list(range(1, 42))
OTHER = list(range(101, 142))
CHAT = [{"role": "user", "content": "a question long enough for some blocks"}]


def keep(priority: int, duration_ms: int | None = None) -> KvCacheRetentionConfig:
    return KvCacheRetentionConfig([TokenRangeRetentionConfig(0, None, priority, duration_ms)])


def cached(llm: LLM, ids: list[int], **said: object) -> int | None:
    return llm.generate({"prompt_token_ids": ids, **said}, ONE)[0].num_cached_tokens


def cached_of(llm: LLM, tenant: str) -> int | None:
    return llm.generate({"prompt_token_ids": IDS}, ONE, tenant=tenant)[0].num_cached_tokens


def flood(llm: LLM, rounds: int = 24) -> None:
    """More than twice the pool of `make_llm`, of prompts that agree in nothing from their first token on."""
    prompts = [{"prompt_token_ids": [150 + number] * 6 + [number] * 35} for number in range(rounds)]
    llm.generate(prompts, ONE)


def test_a_priority_survives_a_flood_and_the_default_does_not(make_llm: MakeLLM) -> None:
    llm = make_llm(enable_partial_hits=False)
    cached(llm, IDS, kv_cache_retention_config=keep(80))
    assert cached(llm, IDS) == 40, "a hit by who asks for nothing takes nothing away"
    cached(llm, OTHER)
    flood(llm)
    assert cached(llm, IDS) == 40
    assert cached(llm, OTHER) == 0
    llm.scheduler.audit()


def test_a_pinned_prefix_survives_a_flood_until_it_is_given_back(make_llm: MakeLLM) -> None:
    llm = make_llm(enable_partial_hits=False, pin_budget=7)
    cached(llm, IDS)
    pin, tokens = llm.pin({"prompt_token_ids": IDS})
    assert tokens == 40
    flood(llm)
    assert cached(llm, IDS) == 40
    cached(llm, OTHER)
    with pytest.raises(PinBudgetError) as refused:
        llm.pin({"prompt_token_ids": OTHER})
    assert (refused.value.needed, refused.value.pinned, refused.value.budget) == (5, 5, 7)
    llm.unpin(pin)
    flood(llm)
    assert cached(llm, IDS) == 0
    with pytest.raises(InvalidInputError):
        llm.unpin(pin)
    llm.scheduler.audit()


def test_a_pin_is_of_one_salt(make_llm: MakeLLM) -> None:
    llm = make_llm(pin_budget=10)
    cached(llm, IDS, cache_salt="a")
    with pytest.raises(InvalidInputError, match="published"):
        llm.pin({"prompt_token_ids": IDS})
    assert llm.pin({"prompt_token_ids": IDS, "cache_salt": "a"})[1] == 40


def test_a_pin_is_of_one_tenant(make_llm: MakeLLM) -> None:
    llm = make_llm(enable_partial_hits=False, pin_budget=10)
    assert [cached_of(llm, tenant) for tenant in ("a", "b", "b")] == [0, 0, 40]
    with pytest.raises(InvalidInputError, match="published"):
        llm.pin({"prompt_token_ids": IDS})
    with pytest.raises(InvalidInputError) as refused:
        llm.pin({"prompt_token_ids": IDS}, tenant="")
    assert refused.value.field == "tenant"
    assert llm.pin({"prompt_token_ids": IDS}, tenant="a")[1] == 40
    flood(llm)
    assert [cached_of(llm, tenant) for tenant in ("a", "b")] == [40, 0]
    llm.scheduler.audit()


def test_a_pin_that_forgets_its_tenant_is_caught(make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    pin = StepLoop.pin
    monkeypatch.setattr(StepLoop, "pin", lambda loop, prompt, wishes: pin(loop, prompt, replace(wishes, tenant=None)))
    with pytest.raises(InvalidInputError, match="published"):
        test_a_pin_is_of_one_tenant(make_llm)


def test_conversations_have_a_salt_and_a_retention_too(make_llm: MakeLLM) -> None:
    llm = make_llm(enable_partial_hits=False)

    def chat(**said: object) -> int | None:
        return llm.chat(CHAT, ONE, **said)[0].num_cached_tokens

    first, other, again = chat(cache_salt="a"), chat(cache_salt="b"), chat(cache_salt="a", kv_cache_retention_config=keep(80))
    assert first == other == 0
    assert again
    flood(llm)
    assert (chat(cache_salt="a"), chat(cache_salt="b")) == (again, 0)
    with llm.stream_chat(CHAT, ONE, cache_salt="a") as stream:
        assert [output.num_cached_tokens for _, output in stream if output.finished] == [again]


@pytest.mark.parametrize(
    "field, said",
    [
        ("prompts.kv_cache_retention_config", [(0, None, 80, None)]),
        ("priority", keep(101)),
        ("priority", keep(-1)),
        ("duration_ms", keep(80, 0)),
        ("token_end", KvCacheRetentionConfig([TokenRangeRetentionConfig(4, 4, 80)])),
    ],
)
def test_a_bad_retention_is_refused_by_name_and_the_engine_goes_on(field: str, said: object, llm: LLM) -> None:
    with pytest.raises(InvalidInputError) as refused:
        cached(llm, IDS, kv_cache_retention_config=said)
    assert refused.value.field == field
    assert cached(llm, IDS) == 0
    with pytest.raises(InvalidInputError, match="cache_salt"):
        llm.chat(CHAT, ONE, cache_salt="")


def test_only_one_prompt_is_pinned_at_a_time(llm: LLM) -> None:
    with pytest.raises(InvalidInputError) as refused:
        llm.pin([{"prompt_token_ids": IDS}, {"prompt_token_ids": OTHER}])
    assert refused.value.field == "prompt"


def test_a_retention_that_is_lost_on_the_way_is_caught(make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Prompt.cached_as
    monkeypatch.setattr(Prompt, "cached_as", lambda self, field, salt, _: whole(self, field, salt, None))
    for check in (
        test_a_priority_survives_a_flood_and_the_default_does_not,
        test_conversations_have_a_salt_and_a_retention_too,
    ):
        with pytest.raises(AssertionError):
            check(make_llm)


FAULTS = {
    "last_asker_decides": test_a_priority_survives_a_flood_and_the_default_does_not,
    "unpin_keeps_holder": test_a_pinned_prefix_survives_a_flood_until_it_is_given_back,
    "salt_forgotten": test_conversations_have_a_salt_and_a_retention_too,
}


@pytest.mark.mutant
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught(fault: str, make_llm: MakeLLM) -> None:
    _core.set_mutant(fault)
    try:
        with pytest.raises((AssertionError, AuditError)):
            FAULTS[fault](make_llm)
    finally:
        _core.set_mutant(None)
