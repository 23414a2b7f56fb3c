"""What may come in: every sensible form of token ids means the same, and every other is refused by name, changing nothing."""

import numpy as np
import pytest

from blocktable import BlockHasher, InvalidInputError, NeverFitsError, QueueFullError, Scheduler

TOKENS = [5, 99, 0, 17, 3, 3, 42]


def spaced(dtype):
    """TOKENS as every second element of a larger array: not contiguous."""
    return np.repeat(np.array(TOKENS, dtype), 2)[::2]


GOOD_FORMS = {
    "list": TOKENS,
    "tuple": tuple(TOKENS),
    "int32": np.array(TOKENS, np.int32),
    "int64": np.array(TOKENS, np.int64),
    "read-only": np.frombuffer(np.array(TOKENS, np.int64).tobytes(), np.int64),
    "numpy scalars in a list": list(np.array(TOKENS, np.int64)),
    "a contiguous part of a larger array": np.array([1, *TOKENS, 1], np.int32)[1:-1],
}

STRIDED_FORMS = {
    "int64 strided": spaced(np.int64),
    "int32 strided": spaced(np.int32),
    "reversed": np.array(TOKENS[::-1], np.int64)[::-1],
}


@pytest.mark.parametrize("form", GOOD_FORMS)
def test_every_form_of_token_ids_plans_the_same_tokens(scheduler, form):
    scheduler.submit(GOOD_FORMS[form], max_tokens=1)
    assert scheduler.plan(0).token_ids.tolist() == TOKENS


@pytest.mark.parametrize("form", STRIDED_FORMS)
def test_a_strided_array_is_read_right_or_refused_never_read_wrong(scheduler, form):
    try:
        scheduler.submit(STRIDED_FORMS[form], max_tokens=1)
    except InvalidInputError as error:
        assert error.field == "token_ids"
        assert scheduler.num_waiting == 0
    else:
        assert scheduler.plan(0).token_ids.tolist() == TOKENS


@pytest.mark.parametrize("form", GOOD_FORMS)
def test_every_form_of_token_ids_has_the_same_keys(form):
    hasher = BlockHasher(block_size=2)
    assert hasher.keys(GOOD_FORMS[form]) == hasher.keys(TOKENS)
    assert len(hasher.keys(TOKENS)) == len(TOKENS) // 2


BAD_TOKENS = {
    "negative": [1, -1],
    "negative in an array": np.array([1, -1], np.int64),
    "negative int32": np.array([1, -5], np.int32),
    "at the vocabulary": [100],
    "at the vocabulary in an array": np.array([1, 100], np.int32),
    "past 32 bits": [1, 2**32 + 5],
    "past 32 bits in an array": np.array([2**32 + 5], np.int64),
    "past 64 bits": [2**64 + 5],
    "far past 64 bits": [10**40],
    "far below": [-(10**40)],
    "float": [1.0, 2.0],
    "float array": np.array([1.0, 2.0]),
    "bool": [True, False],
    "bool array": np.array([True, False]),
    "text": "12",
    "bytes": b"12",
    "text in a list": ["1"],
    "None": None,
    "None in a list": [None],
    "one number": 5,
    "int16": np.array([1, 2], np.int16),
    "uint32": np.array([1, 2], np.uint32),
    "big-endian": np.array([1, 2], ">i4"),
    "texts of three bytes in an array": np.array([b"one", b"two"]),
    "items of twelve bytes in an array": np.array(["abc", "def"]),
    "complex": np.array([1j]),
    "two dimensions": np.ones((2, 2), np.int64),
    "no dimension": np.array(3, np.int64),
    "nested": [[1, 2]],
}


@pytest.mark.parametrize("bad", BAD_TOKENS)
def test_other_token_ids_are_refused_by_name_and_nothing_is_queued(scheduler, bad):
    with pytest.raises(InvalidInputError) as caught:
        scheduler.submit(BAD_TOKENS[bad], max_tokens=1)
    assert caught.value.field == "token_ids"
    assert caught.value.bound
    assert scheduler.num_waiting == 0
    scheduler.audit()
    assert scheduler.submit(TOKENS, max_tokens=1) >= 0


@pytest.mark.parametrize("prompt", [[], np.array([], np.int64), [1] * 128], ids=["empty list", "empty array", "too long"])
def test_a_prompt_of_no_length_that_could_run_is_refused_with_its_bounds(scheduler, prompt):
    with pytest.raises(InvalidInputError, match=r"1\.\.=127") as caught:
        scheduler.submit(prompt, max_tokens=1)
    assert (caught.value.field, caught.value.value) == ("prompt_len", len(prompt))
    assert scheduler.num_waiting == 0


def test_a_refused_id_is_named_with_its_bound(scheduler):
    with pytest.raises(InvalidInputError, match=r"token_ids=.*100") as caught:
        scheduler.submit([5, 100], max_tokens=1)
    assert caught.value.value == 100


BAD_LIMITS = {
    "max_tokens": [0, -1, 2**40, -(2**70), 1.5, "3", None, True],
    "min_tokens": [-1, 2**40, 1.5, "3", True, 5],  # 5 is more than max_tokens
    "stop_token_ids": [[-1], [100], [2**40], [1.5], ["1"], 3],
    "now_us": [-1, 2**70],
    "tenant": [5, b"a", "\ud800"],
    "domain": [5, b"a", "\ud800"],
}


@pytest.mark.parametrize("field, value", [(field, value) for field, values in BAD_LIMITS.items() for value in values], ids=repr)
def test_a_limit_out_of_bounds_is_refused_by_name(scheduler, field, value):
    with pytest.raises(InvalidInputError) as caught:
        scheduler.submit(TOKENS, **({"max_tokens": 4} | {field: value}))
    assert caught.value.field == field
    assert scheduler.num_waiting == 0


BAD_SIZES = {
    "num_blocks": [0, 1, -1, 2**31, 2**70, 1.5, "3", None],
    "block_size": [0, -1, 2**31, 1.5, None],
    "vocab_size": [0, -1, 2**40],
    "max_model_len": [0, -1, 2**40],
    "max_num_seqs": [0, -1, 2**40],
    "max_num_batched_tokens": [0, -1, 2**40],
    "max_waiting": [-1, 2**40],
    "long_prefill_threshold": [-1, 2**40],
    "max_preemptions": [-1, 2**40],
}


@pytest.mark.parametrize("field, value", [(field, value) for field, values in BAD_SIZES.items() for value in values], ids=repr)
def test_a_size_out_of_bounds_is_refused_by_name(make_scheduler, field, value):
    with pytest.raises(InvalidInputError) as caught:
        make_scheduler(**{field: value})
    assert caught.value.field == field
    assert caught.value.bound


def test_block_tables_that_no_machine_holds_are_refused_before_memory_is_taken(make_scheduler):
    huge = {"max_model_len": 2**27, "block_size": 1, "max_num_seqs": 1024, "max_num_batched_tokens": 1024}
    with pytest.raises(InvalidInputError, match=r"at most 16, with 134217728 entries") as caught:
        make_scheduler(**huge)
    assert (caught.value.field, caught.value.value) == ("max_num_seqs", 1024)


@pytest.mark.parametrize(
    "field, value", [("hash_seed", "text"), ("enable_prefix_caching", "yes"), ("enable_prefix_caching", 2)]
)
def test_a_setting_of_another_type_is_refused(make_scheduler, field, value):
    with pytest.raises((TypeError, InvalidInputError), match=r"bytes|bool"):
        make_scheduler(**{field: value})


def test_the_scheduler_takes_no_positional_sizes():
    with pytest.raises(TypeError):
        Scheduler(64, 4)  # type: ignore[misc, call-arg]


def test_an_unknown_algorithm_is_refused_by_name():
    with pytest.raises(InvalidInputError) as caught:
        BlockHasher(block_size=16, algorithm="md5")
    assert caught.value.field == "algorithm"
    assert caught.value.value == "md5"


def test_a_request_that_can_never_fit_is_refused_with_the_numbers(make_scheduler):
    scheduler = make_scheduler(num_blocks=5)
    with pytest.raises(NeverFitsError) as caught:
        scheduler.submit([1] * 17, max_tokens=1)
    assert (caught.value.needed, caught.value.usable) == (5, 4)
    scheduler.submit([1] * 16, max_tokens=1)


def test_a_full_queue_refuses_with_its_limit(make_scheduler):
    scheduler = make_scheduler(max_waiting=2)
    scheduler.submit(TOKENS, max_tokens=1)
    scheduler.submit(TOKENS, max_tokens=1)
    with pytest.raises(QueueFullError) as caught:
        scheduler.submit(TOKENS, max_tokens=1)
    assert caught.value.limit == 2
    assert scheduler.num_waiting == 2


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_commit_takes_either_width(scheduler, dtype):
    scheduler.submit(TOKENS, max_tokens=2)
    plan = scheduler.plan(0)
    assert scheduler.commit(plan.step, np.array([9], dtype), np.array([0, 1], dtype), 0).num_accepted == 1
    assert scheduler.plan(0).token_ids.tolist() == [9]


def test_commit_takes_no_token_for_an_entry(scheduler):
    scheduler.submit(TOKENS, max_tokens=2)
    plan = scheduler.plan(0)
    assert scheduler.commit(plan.step, np.array([], np.int64), np.array([0, 0], np.int64), 0).num_accepted == 0
    scheduler.audit()


BAD_COMMITS = {
    "ids float": (np.array([1.0]), np.array([0, 1]), "token_ids"),
    "ids bool": (np.array([True]), np.array([0, 1]), "token_ids"),
    "ids out of the vocabulary": (np.array([100]), np.array([0, 1]), "token_ids"),
    "ids negative": (np.array([-1]), np.array([0, 1]), "token_ids"),
    "ids past 32 bits": (np.array([2**32 + 1]), np.array([0, 1]), "token_ids"),
    "ids in two dimensions": (np.array([[1]]), np.array([0, 1]), "token_ids"),
    "too many ids": (np.array([1, 2]), np.array([0, 1]), "token_ids"),
    "too few ids": (np.array([], np.int64), np.array([0, 1]), "token_ids"),
    "starts too short": (np.array([1]), np.array([0]), "starts"),
    "starts too long": (np.array([1]), np.array([0, 1, 1]), "starts"),
    "starts not from 0": (np.array([1, 2]), np.array([1, 2]), "starts"),
    "starts going down": (np.array([1]), np.array([0, -1]), "starts"),
    "two tokens for an entry": (np.array([1, 2]), np.array([0, 2]), "starts"),
    "starts float": (np.array([1]), np.array([0.0, 1.0]), "starts"),
    "ids a list of text": (["1"], np.array([0, 1]), "token_ids"),
    "starts None": (np.array([1]), None, "starts"),
}


@pytest.mark.parametrize("bad", BAD_COMMITS)
def test_a_bad_commit_is_refused_by_name_and_the_step_stays_in_flight(scheduler, bad):
    scheduler.submit(TOKENS, max_tokens=2)
    plan = scheduler.plan(0)
    ids, starts, field = BAD_COMMITS[bad]
    with pytest.raises(InvalidInputError) as caught:
        scheduler.commit(plan.step, ids, starts, 0)
    assert caught.value.field == field
    assert scheduler.commit(plan.step, np.array([9]), np.array([0, 1]), 0).num_accepted == 1
    scheduler.audit()


def test_strided_ids_of_a_commit_are_read_right_or_refused(scheduler):
    scheduler.submit(TOKENS, max_tokens=2)
    scheduler.submit(TOKENS[::-1], max_tokens=2)
    plan = scheduler.plan(0)
    strided = np.array([8, 1, 9, 1])[::2]
    try:
        scheduler.commit(plan.step, strided, np.arange(3), 0)
    except InvalidInputError as error:
        assert error.field == "token_ids"
    else:
        assert scheduler.plan(0).token_ids.tolist() == [8, 9]
