"""A model's forward context: there during a forward, gone after it, and never another model's."""

import copy
import pickle
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from blocktable.errors import BlocktableError
from blocktable.model import attention_bridge, forward_context, packed_forward, trace
from blocktable.model.attention_bridge import IMPLEMENTATION, slot_of
from blocktable.model.forward_context import ContextSlot, ForwardContext
from blocktable.model.loader import unwrap_model, wrap_model
from tests.model import tiny
from tests.model.handmade_plan import Pages
from tests.model.served import Served, distance, own_logits, serve, texts_of

pytestmark = pytest.mark.usefixtures("one_torch_thread")


class SlotThatForgetsToClear(ContextSlot):
    """A planted fault: the context stays after the forward."""

    @contextmanager
    def holding(self, context: ForwardContext) -> Iterator[None]:
        self._current = context
        yield


class OneSlotForAll(ContextSlot):
    """A planted fault: the context lies in a global, as it does where a module of Python keeps it."""

    shared: ForwardContext | None = None

    @property
    def current(self) -> ForwardContext | None:
        return OneSlotForAll.shared

    @contextmanager
    def holding(self, context: ForwardContext) -> Iterator[None]:
        OneSlotForAll.shared = context
        try:
            yield
        finally:
            OneSlotForAll.shared = None


def plant(monkeypatch: pytest.MonkeyPatch, slot: type[ContextSlot]) -> None:
    """Models wrapped from now on get such a slot."""
    monkeypatch.setattr(attention_bridge, "ContextSlot", slot)


def served_pair() -> tuple[list[Served], list[Pages], list[Tensor]]:
    """Two models of unlike shapes, each with a plan of its own; and what each says when it is alone."""
    texts = [texts_of(tiny.VOCAB_SIZE, seed=i) for i in range(2)]
    models = [tiny.build("llama"), tiny.build("gemma2", seed=1)]
    alone = [torch.cat(own_logits(model, text)) for model, text in zip(models, texts)]
    pages = [Pages(text, seed=i) for i, text in enumerate(texts)]
    return [serve(model, page) for model, page in zip(models, pages)], pages, alone


def run_one_inside_the_other(served: list[Served], pages: list[Pages]) -> list[Tensor]:
    """The second model's whole forward runs between two layers of the first one's."""
    outer, inner = served
    inside: list[Tensor] = []

    def run_inner(*_: object) -> None:
        inside.append(inner.runner.forward(pages[1].plan([21, 13])))

    hook = outer.loaded.model.model.layers[1].register_forward_pre_hook(run_inner)
    try:
        outside = outer.runner.forward(pages[0].plan([21, 13]))
    finally:
        hook.remove()
    return [outside, *inside]


def test_two_models_interleaved_do_not_touch_each_other() -> None:
    served, pages, alone = served_pair()
    assert distance(run_one_inside_the_other(served, pages), alone) < 1e-4


def test_a_context_in_a_global_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, OneSlotForAll)
    served, pages, _ = served_pair()
    with pytest.raises(BlocktableError, match="outside of an engine"):
        run_one_inside_the_other(served, pages)


def test_two_models_in_two_threads_do_not_touch_each_other() -> None:
    served, pages, alone = served_pair()
    results: dict[int, Tensor] = {}

    def run(index: int) -> None:
        for _ in range(5):
            pages[index].done = [0, 0]
            results[index] = served[index].runner.forward(pages[index].plan([21, 13]))

    threads = [threading.Thread(target=run, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert distance([results[0], results[1]], alone) < 1e-4


def test_two_engines_on_one_model_run_in_turn() -> None:
    model = tiny.build("llama")
    texts = [texts_of(tiny.VOCAB_SIZE, seed=i) for i in range(2)]
    alone = [torch.cat(own_logits(model, text)) for text in texts]
    pages = [Pages(text, seed=i) for i, text in enumerate(texts)]
    engines = [serve(model, page) for page in pages]
    got = [engine.runner.forward(page.plan([21, 13])) for engine, page in zip(engines, pages)]
    assert distance(got, alone) < 1e-4


def forward(served: Served, pages: Pages) -> None:
    served.runner.forward(pages.plan([5, 3]))


def check_empty_after_success() -> None:
    pages = Pages(texts_of(tiny.VOCAB_SIZE))
    served = serve(tiny.build("llama"), pages)
    forward(served, pages)
    assert slot_of(served.loaded.model).current is None


def check_empty_after_an_error() -> None:
    pages = Pages(texts_of(tiny.VOCAB_SIZE))
    served = serve(tiny.build("llama"), pages)

    def fail(*_: object) -> None:
        raise RuntimeError("a layer fails")

    hook = served.loaded.model.model.layers[2].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="a layer fails"):
        forward(served, pages)
    hook.remove()
    assert slot_of(served.loaded.model).current is None
    forward(served, pages)  # and the next step runs


@pytest.mark.parametrize("check", [check_empty_after_success, check_empty_after_an_error])
def test_the_context_is_gone_after_a_forward(check: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    check()
    plant(monkeypatch, SlotThatForgetsToClear)
    with pytest.raises(AssertionError):
        check()


def test_a_context_is_there_during_a_forward() -> None:
    pages = Pages(texts_of(tiny.VOCAB_SIZE))
    served = serve(tiny.build("llama"), pages)
    seen: list[object] = []
    served.loaded.model.model.layers[0].register_forward_pre_hook(lambda *_: seen.append(slot_of(served.loaded.model).current))
    forward(served, pages)
    assert isinstance(seen[0], forward_context.PagedForward)


def test_a_wrapped_model_run_on_its_own_says_what_to_do() -> None:
    model = tiny.build("llama")
    wrap_model(model, self_check=False)
    with pytest.raises(BlocktableError, match="outside of an engine.*unwrap_model"):
        model(input_ids=torch.tensor([[1, 2]]))


def test_an_unwrapped_model_is_as_before() -> None:
    model = tiny.build("gemma2")
    texts = texts_of(tiny.VOCAB_SIZE)
    before = own_logits(model, texts)
    wrap_model(model)
    assert model.config._attn_implementation == IMPLEMENTATION
    assert unwrap_model(model)
    assert model.config._attn_implementation == "eager"
    assert distance(own_logits(model, texts), before) == 0
    assert not [name for module in model.modules() for name in vars(module) if "blocktable" in name]
    assert not unwrap_model(model)


def test_a_refused_model_is_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.build("llama")
    monkeypatch.setattr(model.config, "num_hidden_layers", 5)
    with pytest.raises(BlocktableError, match="4 of its 5 layers"):
        wrap_model(model)
    assert model.config._attn_implementation == "eager"
    assert not [name for module in model.modules() for name in vars(module) if "blocktable" in name]


def test_a_copied_model_has_a_slot_of_its_own() -> None:
    pages = Pages(texts_of(tiny.VOCAB_SIZE))
    served = serve(tiny.build("llama"), pages)
    for twin in (copy.deepcopy(served.loaded.model), pickle.loads(pickle.dumps(served.loaded.model))):
        slots = {id(module.__dict__[attention_bridge._BINDING].slot) for module in _attention_modules(twin)}
        assert slots == {id(slot_of(twin))}
        assert slot_of(twin) is not slot_of(served.loaded.model)


def _attention_modules(model: Any) -> list[Any]:
    return [layer.self_attn for layer in model.model.layers]


def test_no_module_of_ours_keeps_a_context() -> None:
    pages = Pages(texts_of(tiny.VOCAB_SIZE))
    served = serve(tiny.build("llama"), pages)
    inside: list[list[str]] = []

    def look(*_: object) -> None:
        modules = (attention_bridge, forward_context, packed_forward, trace)
        holders = (forward_context.PagedForward, ContextSlot)
        inside.append([name for module in modules for name, value in vars(module).items() if isinstance(value, holders)])

    served.loaded.model.model.layers[1].register_forward_pre_hook(look)
    forward(served, pages)
    assert inside == [[]]
