"""Every causal language model that the installed transformers knows is served right, or refused with a reason."""

import re
from dataclasses import dataclass, field

import pytest
import torch
import transformers
from transformers.utils import logging as transformers_logging

from blocktable.errors import UnsupportedModelError
from blocktable.model.loader import unwrap_model
from tests.model import tiny
from tests.model.architectures import KNOWN, REFUSED, SERVED, VOCAB_SIZE, tiny_model
from tests.model.handmade_plan import Pages
from tests.model.served import distance, own_logits, paged_logits, serve, texts_of

pytestmark = pytest.mark.usefixtures("one_torch_thread")

ROUNDING = 1e-4
"""Relative to the largest logit, float32; the worst seen is 4e-6."""
AT_LEAST = 60


@dataclass
class Survey:
    """What became of each architecture."""

    served: dict[str, float] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    not_built: dict[str, str] = field(default_factory=dict)

    def counts(self) -> str:
        """One line."""
        return (
            f"transformers {transformers.__version__}: {len(self.served)} architectures served (worst error "
            f"{max(self.served.values(), default=0):.0e}), {len(self.refused)} refused, {len(self.not_built)} without a tiny "
            f"model, of {len(KNOWN)}"
        )

    def __str__(self) -> str:
        lines = [
            self.counts(),
            *(f"  refused {reason}" for reason in self.refused.values()),
            *(f"  not built {name}: {reason}" for name, reason in self.not_built.items()),
        ]
        return "\n".join(lines)


@pytest.fixture(scope="module")
def survey() -> Survey:
    """Every architecture once: packed, chunked, over shuffled blocks, against its own attention."""
    found = Survey()
    verbosity, threads = transformers_logging.get_verbosity(), torch.get_num_threads()
    transformers_logging.set_verbosity(transformers_logging.CRITICAL)
    torch.set_num_threads(1)  # a fixture of a module is set up before those of its tests
    for name in KNOWN:
        model = tiny_model(name)
        if isinstance(model, str):
            found.not_built[name] = model
            continue
        texts = texts_of(VOCAB_SIZE)
        try:
            serve(model, Pages(texts), self_check=True)
        except UnsupportedModelError as error:
            found.refused[name] = str(error)
            continue
        unwrap_model(model)
        expected = own_logits(model, texts)
        found.served[name] = distance(paged_logits(model, texts), expected)
    transformers_logging.set_verbosity(verbosity)
    torch.set_num_threads(threads)
    print(found)
    return found


@pytest.mark.timeout(300)
def test_no_architecture_is_served_wrongly(survey: Survey) -> None:
    wrong = {name: error for name, error in survey.served.items() if not error <= ROUNDING}
    assert not wrong


def test_at_least_sixty_architectures_are_served(survey: Survey, capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        print(f"\n{survey.counts()}")
    assert len(survey.served) >= AT_LEAST


def test_the_architectures_known_to_work_are_served(survey: Survey) -> None:
    missing = {name: survey.refused.get(name, survey.not_built.get(name)) for name in SERVED & set(KNOWN) - set(survey.served)}
    assert not missing


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_an_architecture_that_cannot_be_served_is_refused_with_its_reason(survey: Survey, name: str) -> None:
    if name not in KNOWN:
        pytest.skip(f"transformers {transformers.__version__} does not know {name}")
    assert re.search(REFUSED[name], survey.refused[name])


@pytest.mark.parametrize("name", sorted(tiny.ARCHITECTURES))
def test_the_tiny_models_are_served_right(name: str) -> None:
    texts = texts_of(tiny.VOCAB_SIZE)
    expected = own_logits(tiny.ARCHITECTURES[name](), texts)
    assert distance(paged_logits(tiny.ARCHITECTURES[name](), texts), expected) <= ROUNDING
