"""Every case of `triton_cases` on a GPU: `python -m tests.kernels.on_gpu`. Ends with code 1 at the first wrong answer."""

from blocktable.kernels import AttentionBatch, triton_attention, triton_decode
from tests.kernels.checks import assert_close
from tests.kernels.paged_case import Length, Shape, make_case
from tests.kernels.triton_cases import CASES, TOLERANCE, case_of


def main() -> None:
    """Run them all."""
    for number, one in enumerate(CASES):
        case = case_of(one, number)
        _, k_cache, v_cache = case.pool(float("nan"))
        batch = AttentionBatch.build(case.tables.cuda(), case.query_starts, case.seq_lens.cuda(), case.shape.block_size)
        options = {name: value.cuda() if hasattr(value, "cuda") else value for name, value in case.options.items()}
        out = triton_attention.paged_attention(case.q.cuda(), k_cache.cuda(), v_cache.cuda(), batch, **options)
        assert_close(out.cpu(), case.expected(), TOLERANCE[case.shape.dtype])
        print(f"{number}: right: {one}", flush=True)
    case = make_case(Shape(key_width=64, value_width=64, has_sinks=True), [Length(1, 5000), Length(1, 3), Length(1, 513)] * 30)
    _, k_cache, v_cache = (tensor.cuda() for tensor in case.pool(float("nan")))
    batch = AttentionBatch.build(case.tables.cuda(), case.query_starts, case.seq_lens.cuda(), 16)
    options = {name: value.cuda() if hasattr(value, "cuda") else value for name, value in case.options.items()}
    scratch, expected = triton_decode.DecodeScratch(), case.expected()
    for _ in range(200):  # a race of the parts shows in some launches only
        out = triton_decode.paged_decode(case.q.cuda(), k_cache, v_cache, batch, scratch=scratch, **options)
        assert_close(out.cpu(), expected, 1e-5)
    print("200 launches of split decodes: right", flush=True)


if __name__ == "__main__":
    main()
