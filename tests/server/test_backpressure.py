"""Promise: what does not fit is refused at once, with an honest time to come again; whom it concerns is decided by the key."""

from collections.abc import Callable

import pytest

from blocktable import AsyncLLM
from blocktable.server.tenants import Tenants

from .conftest import MakeServer
from .live import Live, open_request, wait_until
from .test_leaving import live_requests, slow_model, steps_of

ASK = {"prompt": [5, 6, 7], "max_tokens": 200, "ignore_eos": True}
QUICK = {"prompt": [1, 2, 3], "max_tokens": 1}


def test_a_full_line_is_429_with_the_time_that_the_engine_measured(
    make_async: Callable[..., AsyncLLM], serve: MakeServer
) -> None:
    engine = make_async(max_waiting=2, max_num_seqs=1)
    server = serve(engine)
    assert server.client().post("/v1/completions", json=QUICK).status_code == 200
    with slow_model(engine):
        open_ones = [open_request(server, "/v1/completions", ASK)]
        wait_until(lambda: engine.scheduler.num_running == 1, "it does not run")
        open_ones += [open_request(server, "/v1/completions", ASK) for _ in range(2)]
        wait_until(lambda: engine.scheduler.num_waiting == 2, "they do not wait")
        now = steps_of(engine)
        wait_until(lambda: steps_of(engine) >= now + 3, "the rate is measured while somebody waits")
        for stream in (False, True):
            answer = server.client().post("/v1/completions", json=QUICK | {"stream": stream})
            assert answer.status_code == 429, answer.text
            assert answer.json()["error"]["code"] == "queue_full"
            assert int(answer.headers["retry-after"]) >= 1
        # Of three answers the last finds no room: none is begun.
        open_ones.pop().close()
        wait_until(lambda: engine.scheduler.num_waiting == 1, "it was not ended")
        assert server.client().post("/v1/completions", json=QUICK | {"n": 3}).status_code == 429
        wait_until(lambda: engine.scheduler.num_waiting == 1, "one of them was begun")
        # Who leaves makes room.
        for one in open_ones:
            one.close()
        wait_until(lambda: live_requests(engine) == 0, "they were not ended")
        assert server.client().post("/v1/completions", json=QUICK).status_code == 200


def test_a_quota_is_of_the_tenant_that_the_key_names(make_async: Callable[..., AsyncLLM], serve: MakeServer) -> None:
    engine = make_async(max_num_seqs=1, tenants={"small": {"max_waiting": 1}})
    server = serve(engine, Tenants.of_keys([("small", "small-key"), ("large", "large-key")]))
    with slow_model(engine):
        open_ones = [open_request(server, "/v1/completions", ASK, "large-key")]
        wait_until(lambda: engine.scheduler.num_running == 1, "it does not run")
        open_ones.append(open_request(server, "/v1/completions", ASK, "small-key"))
        wait_until(lambda: engine.scheduler.num_waiting == 1, "it does not wait")
        refused = server.client("small-key").post("/v1/completions", json=QUICK)
        assert refused.status_code == 429
        open_ones.append(open_request(server, "/v1/completions", ASK, "large-key"))
        wait_until(lambda: engine.scheduler.num_waiting == 2, "the other tenant was refused too")
        for one in open_ones:
            one.close()
        wait_until(lambda: live_requests(engine) == 0, "they were not ended")


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_queue_deadline_is_a_refusal_with_its_own_word(
    is_streamed: bool, make_async: Callable[..., AsyncLLM], serve: MakeServer
) -> None:
    engine = make_async(max_num_seqs=1)
    server = serve(engine)
    with slow_model(engine), open_request(server, "/v1/completions", ASK):
        wait_until(lambda: engine.scheduler.num_running == 1, "it does not run")
        answer = server.client().post("/v1/completions", json=QUICK | {"queue_deadline_s": 0.1, "stream": is_streamed})
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "queue_deadline")


def test_the_first_client_waits_for_no_tokenizer(server: Live) -> None:
    """It is fetched, and the chat template compiled, as soon as there is an engine."""
    serving = server.app.routes[0].endpoint._serving
    wait_until(lambda: serving.reader._tokenizer is not None and serving.reader._tokenizer.done(), "it was not fetched")
