"""All decoder layers of a model run in one call of the core, where nothing happens between them."""

import copy
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from blocktable import _core
from blocktable.model.layer_stack import LayerStack
from blocktable.model.loader import unwrap_model, wrap_model
from blocktable.model.runner import ModelRunner
from tests.model import tiny
from tests.model.handmade_plan import Pages, run_schedule
from tests.model.served import SCHEDULE, distance, own_logits, paged_logits, serve, texts_of

pytestmark = pytest.mark.usefixtures("one_torch_thread")

TEXTS = texts_of(tiny.VOCAB_SIZE)


def stack_of(model: Any) -> LayerStack | None:
    stacks = {id(layer.__dict__.get("_blocktable_stack")) for layer in model.model.layers}
    assert len(stacks) == 1
    stack: LayerStack | None = model.model.layers[0].__dict__.get("_blocktable_stack")
    return stack


@contextmanager
def counted_calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Names of the core's functions in the order of their calls."""
    calls: list[str] = []
    with monkeypatch.context() as patch:
        for name in ("cpu_layers", "cpu_before_attention", "cpu_attention"):
            own = getattr(_core, name)
            patch.setattr(_core, name, lambda *a, name=name, own=own, **b: (calls.append(name), own(*a, **b))[1])
        yield calls


def wrapped(name: str = "llama", **options: Any) -> Any:
    model = tiny.build(name, **options)
    wrap_model(model, self_check=False)
    return model


@pytest.mark.parametrize("name", ["llama", "qwen2", "mistral"])
def test_a_step_is_one_call_and_gives_the_models_own_logits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = own_logits(tiny.build(name), TEXTS)
    model = wrapped(name)
    assert stack_of(model) is not None
    with counted_calls(monkeypatch) as calls:
        assert distance(paged_logits(model, TEXTS), expected) < 1e-5
    assert calls == ["cpu_layers"] * len(SCHEDULE)


def test_a_backend_without_whole_layers_runs_them_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = own_logits(tiny.build("llama"), TEXTS)
    pages = Pages(TEXTS, seed=0)
    served = serve(wrapped(), pages)
    runner = ModelRunner(served.loaded, served.memory, "reference")
    with counted_calls(monkeypatch) as calls:
        assert distance(run_schedule(runner, pages, SCHEDULE), expected) < 1e-5
    assert set(calls) == {"cpu_before_attention"}


def test_where_something_happens_between_layers_they_run_one_by_one() -> None:
    # Of numbers that are not the same the layer's own check knows already.
    for change, joined in ((lambda x: x + 0, 4), (lambda x: x * 2, 3)):
        model, twin = tiny.build("llama"), tiny.build("llama")
        for one in (model, twin):
            one.model.layers[2].register_forward_pre_hook(lambda _, given, change=change: (change(given[0]), *given[1:]))
        loaded = wrap_model(model, self_check=False)
        assert loaded.linears.joined == joined
        assert stack_of(model) is None
        assert distance(paged_logits(model, TEXTS), own_logits(twin, TEXTS)) < 1e-5


def test_what_happens_between_layers_later_fails_the_step_and_no_other() -> None:
    expected = own_logits(tiny.build("llama"), TEXTS)
    model = wrapped()
    hook = model.model.layers[2].register_forward_pre_hook(lambda _, given: (given[0] + 1, *given[1:]))
    with pytest.raises(RuntimeError, match="layer 2 was not given the answer"):
        paged_logits(model, TEXTS)
    hook.remove()
    assert distance(paged_logits(model, TEXTS), expected) < 1e-5


def test_weights_that_are_moved_are_found() -> None:
    other = tiny.build("llama")
    with torch.no_grad():
        for parameter in other.model.layers.parameters():
            parameter.mul_(0.5)
    expected = own_logits(other, TEXTS)
    model = wrapped()
    paged_logits(model, TEXTS)
    for parameter in model.model.layers.parameters():
        parameter.data = parameter.data * 0.5
    assert distance(paged_logits(model, TEXTS), expected) < 1e-5


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_runs_with_weights_of_its_own(copied: Any) -> None:
    expected = own_logits(tiny.build("llama"), TEXTS)
    model = wrapped()
    paged_logits(model, TEXTS)
    twin = copied(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert stack_of(twin) is not None
    assert distance(paged_logits(twin, TEXTS), expected) < 1e-5


def test_a_model_that_is_given_back_has_none() -> None:
    model = wrapped()
    unwrap_model(model)
    assert stack_of(model) is None
    assert type(model.model.layers[0]).__mro__[1] is not nn.Module
