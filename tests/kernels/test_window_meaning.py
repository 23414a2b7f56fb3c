"""A window, a soft cap and sinks mean here what they mean in transformers."""

import pytest
import torch
from transformers.masking_utils import sliding_window_causal_mask_function

from tests.kernels import checks
from tests.kernels.implementations import Implementation
from tests.kernels.paged_case import Length, Shape, make_case


@pytest.mark.parametrize("window", [1, 2, 7, 16, 40])
def test_a_window_is_that_of_transformers(kernels: Implementation, window: int) -> None:
    """Weights are made visible by values that are one-hot in the position."""
    length = 32
    case = make_case(Shape(kv_heads=1, grouped=1, value_width=length, window=window), [Length(length, length)])
    case.values[0] = torch.eye(length).unsqueeze(1)
    seen = case.run(kernels, *case.pool(0.0)[1:])[:, 0] > 0
    query, key = torch.arange(length).unsqueeze(1), torch.arange(length).unsqueeze(0)
    assert torch.equal(seen, sliding_window_causal_mask_function(window)(0, 0, query, key))


def test_soft_cap_is_that_of_gemma2_and_sinks_are_those_of_gpt_oss(kernels: Implementation) -> None:
    from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward as capped
    from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward as sunk

    length = 21
    for changes, forward in (({"softcap": 0.8}, capped), ({"has_sinks": True}, sunk)):
        case = make_case(Shape(**changes), [Length(length, length)])  # type: ignore[arg-type]
        module = torch.nn.Module()
        module.num_key_value_groups, module.head_dim, module.sinks = 2, 8, case.sinks
        mask = torch.full((length, length), float("-inf")).triu(1)[None, None]
        heads_first = [rows.transpose(0, 1)[None] for rows in (case.q, case.keys[0], case.values[0])]
        more = {"softcap": 0.8} if forward is capped else {}
        theirs, _ = forward(module.eval(), *heads_first, mask, dropout=0.0, scaling=case.options["scale"], **more)
        checks.assert_close(case.run(kernels, *case.pool(0.0)[1:]), theirs[0].double(), checks.TOLERANCE)
