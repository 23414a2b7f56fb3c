"""Every case of `triton_cases` on a GPU: `python -m tests.kernels.on_gpu`. Ends with code 1 at the first wrong answer."""

from blocktable.kernels import AttentionBatch, triton_attention
from tests.kernels.checks import assert_close
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


if __name__ == "__main__":
    main()
