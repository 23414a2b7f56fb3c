"""Promise: the engine tells what happened to a request, while it lives and after its end."""

from collections.abc import Callable
from typing import Any

import pytest

from blocktable import AsyncLLM, InvalidInputError, SamplingParams, UnknownRequestError

from .conftest import MakeLLM


def test_a_request_of_the_engine_is_explained(make_llm: MakeLLM) -> None:
    llm = make_llm(max_num_seqs=1)
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    first = llm.add_request({"prompt_token_ids": [1, 2, 3]}, params)
    second = llm.add_request({"prompt_token_ids": [4, 5, 6]}, params)
    llm.step()
    assert llm.explain(first)["place"] == "running"
    told = llm.explain(second)
    assert (told["place"], told["waits_for"]["reason"], told["waits_for"]["numbers"]) == ("waiting", "no_row", {"rows": 1})
    while llm.has_unfinished_requests():
        llm.step()
    told = llm.explain(second)
    assert told["place"] == "ended"
    assert [record["reason"] for record in told["records"]][-2:] == ["first_token", "finished_length"]
    with pytest.raises(UnknownRequestError):
        llm.explain("99")
    with pytest.raises(InvalidInputError):
        llm.explain("mine")


@pytest.mark.parametrize("wrong", [5, None, b"1", [], 1.5])
def test_what_is_no_id_is_refused_by_field(wrong: Any, make_llm: MakeLLM, make_async: Callable[..., AsyncLLM]) -> None:
    llm, engine = make_llm(), make_async()
    for call in (llm.abort, llm.explain, engine.explain):
        with pytest.raises(InvalidInputError, match="request_id"):
            call(wrong)
    with pytest.raises(InvalidInputError, match="request_id"):
        engine.abort([wrong])
    if wrong != []:  # no ids at all
        with pytest.raises(InvalidInputError, match="request_id"):
            engine.abort(wrong)
