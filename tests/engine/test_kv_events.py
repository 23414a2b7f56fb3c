"""Promise: an engine that was told to publishes what its prefix cache gains and loses; one that was not records nothing."""

import threading

import pytest
import zmq

from blocktable import InvalidInputError, SamplingParams, UnknownOptionError
from blocktable.events import KVEventsConfig, Stored, read_records
from blocktable.events.wire import short_hash
from tests.events.listener import Listener

from .conftest import MakeLLM

FOUR = SamplingParams(max_tokens=4, ignore_eos=True)
PORTS = {"enable_kv_cache_events": True, "endpoint": "tcp://127.0.0.1:*", "replay_endpoint": "tcp://127.0.0.1:*"}


def test_a_router_has_the_index_of_the_engine(make_llm: MakeLLM) -> None:
    llm = make_llm(kv_events_config=PORTS)
    publisher = llm._engine.loop._publisher
    listener = Listener(publisher.endpoint, publisher.replay_endpoint)
    try:
        for prompts in (
            ["a prompt of some length, shared", "a prompt of some length, alone"],
            ["and another one, for eviction"] * 3,
        ):
            llm.generate(prompts, FOUR)
            hear_all(listener, llm)
        assert len(listener.index.blocks) > 5
        llm.reset_prefix_cache()
        hear_all(listener, llm)
        assert listener.index.blocks == set()
    finally:
        listener.close()


def hear_all(listener: Listener, llm) -> None:
    publisher = llm._engine.loop._publisher
    tick = threading.Event()
    for _ in range(1000):
        listener.wait_for(publisher.num_batches)
        if listener.index.blocks == published(llm):
            return
        tick.wait(0.01)
    assert listener.index.blocks == published(llm)


def published(llm) -> set[tuple[int, int]]:
    data = llm.scheduler.event_snapshot()
    return {(event.group, short_hash(event.key)) for event in read_records(data).events if isinstance(event, Stored)}


def test_an_engine_that_is_shut_down_gives_its_address_back(make_llm: MakeLLM) -> None:
    llm = make_llm(kv_events_config=KVEventsConfig(**PORTS))
    endpoint = llm._engine.loop._publisher.endpoint
    llm.shutdown()
    end = zmq.Context.instance().socket(zmq.PUB)
    try:
        end.bind(endpoint)
    finally:
        end.close(linger=0)


def test_without_being_told_nothing_is_recorded(make_llm: MakeLLM) -> None:
    assert make_llm().scheduler.config["event_buffer_size"] == 0
    assert make_llm(kv_events_config={}).scheduler.config["event_buffer_size"] == 0
    llm = make_llm(kv_events_config={"enable_kv_cache_events": True, "publisher": "null"})
    llm.generate("a prompt of some length", FOUR)
    assert llm.scheduler.read_events(0) is not None


@pytest.mark.parametrize("wrong", ["zmq", 5, {"endpoint": 7}, {"publisher": "nats"}])
def test_a_bad_configuration_is_refused(make_llm: MakeLLM, wrong: object) -> None:
    with pytest.raises(InvalidInputError):
        make_llm(kv_events_config=wrong)


def test_a_misspelt_field_is_refused(make_llm: MakeLLM) -> None:
    with pytest.raises(UnknownOptionError, match="replay_endpoint"):
        make_llm(kv_events_config={"replay_endpint": "tcp://*:1"})
