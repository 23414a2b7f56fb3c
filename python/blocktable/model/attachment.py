"""A model attached to blocktable: it calls our attention, has been checked, and knows its geometry.

Before: `loader` has a transformers model, with its weights. After: `runner` serves it. Always: attaching twice gives the first
attachment again (two engines may share a model; its slot lets them run in turn); a model that is refused, or given back, calls
the attention that it called before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from transformers import PreTrainedModel

from .attention_bridge import forget_slot, set_implementation, unbind_layers, use_paged_attention
from .geometry import KVGeometry, read_geometry
from .limits import LengthLimit, length_limit
from .linear_backend import use_torch_linears
from .numeric_check import check_numbers
from .rotating_attention import rotate_in_model
from .self_check import check_config, check_trace, check_windows
from .trace import AttentionTrace, trace_attention

_ATTACHMENT = "_blocktable_attachment"

Progress = Callable[[str], None]
"""Called with one line for each stage of a load."""


@dataclass(frozen=True, slots=True)
class Attachment:
    """What was found out about a model when it was attached."""

    trace: AttentionTrace
    geometry: KVGeometry
    limit: LengthLimit
    previous: str
    """The attention implementation of before."""


def attach_model(model: PreTrainedModel, name: str, *, self_check: bool, progress: Progress) -> Attachment:
    """Let `model` call our attention. Raises `UnsupportedModelError`; the model is then as it was.

    `self_check` = False leaves out the comparison of numbers, and nothing else.
    """
    attached: Attachment | None = model.__dict__.get(_ATTACHMENT)
    if attached is not None:
        return attached
    previous = model.config._attn_implementation
    try:
        check_config(model.config, name)
        progress("looking at its attention")
        use_paged_attention(model, name)
        trace = trace_attention(model, name)
        check_trace(model, trace, name)
        limit = length_limit(model.config, name)
        check_windows(model.config, trace, limit.tokens, name)
        geometry = read_geometry(trace, name)
        if self_check:
            progress("comparing paged attention with its own")
            error = check_numbers(model, trace, geometry, limit.tokens, name)
            progress(f"logits agree to {error:.0e} of their size")
    except BaseException:
        _give_back(model, previous, name)
        raise
    attached = Attachment(trace, geometry, limit, previous)
    model.__dict__[_ATTACHMENT] = attached
    return attached


def is_attached(model: PreTrainedModel) -> bool:
    """Whether the model calls our attention, for one engine or several."""
    return _ATTACHMENT in model.__dict__


def detach_model(model: PreTrainedModel, name: str = "model") -> bool:
    """Give an attached model back, calling the attention of before; false if it is not attached. No engine may use it then."""
    attached: Attachment | None = model.__dict__.pop(_ATTACHMENT, None)
    if attached is None:
        return False
    _give_back(model, attached.previous, name)
    return True


def _give_back(model: PreTrainedModel, previous: str, name: str) -> None:
    use_torch_linears(model)
    rotate_in_model(model)
    unbind_layers(model)
    forget_slot(model)
    set_implementation(model, previous, name)
