"""What the compiled module offers. Checked against the built module by `mypy.stubtest`.

Everything here works without torch. Arrays are numpy views into memory owned by Rust, made without a copy;
those of a plan are valid until the commit or failure of its step.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, final

import numpy as np
from numpy.typing import NDArray

__version__: str
"""Version of the package, from `Cargo.toml`."""

MUTANTS: tuple[str, ...]
"""Names of the planted faults of this build; empty unless it was built with feature `mutants`."""

REASONS: tuple[tuple[int, str, str, tuple[str, ...]], ...]
"""(code, name, kind, names of its numbers) of every reason that a request is told; codes and names are stable."""

END_FINISHED_STOP: int
"""End codes, as in `Plan.ended` and `Commit.ended`: a stop token, or `Scheduler.finish` for a stop string."""
END_FINISHED_LENGTH: int
"""`max_tokens` or `max_model_len` reached."""
END_ABORTED: int
"""`Scheduler.abort` was called."""
END_ABORTED_CAPACITY: int
"""Alone in the pool and still not fitting."""
END_ABORTED_DEADLINE: int
"""It lived at its `deadline_us`."""
END_REFUSED_QUEUE_DEADLINE: int
"""It was not admitted before its `queue_deadline_us`."""

_Capsule: TypeAlias = Any
"""A DLPack capsule; `types.CapsuleType` from Python 3.13 on."""

_Range = tuple[int, int, str]
"""(start, end, text): tokens start..end - 1."""
_Adapter = tuple[str, int] | tuple[str, int, str]
"""(name, load number), or (name, load number, path); only vLLM's algorithms look at the path."""

def set_mutant(name: str | None) -> None:
    """Choose the planted fault of this thread, or none. Raises `InvalidInputError` if this build has no such fault."""

def cpu_instructions() -> tuple[str, ...]:
    """Sets of instructions that this processor has for `cpu_attention`, the fastest first: amx, avx512, avx2, portable.

    amx is avx512 with tiles for products of linear layers: each float32 number is taken as three of bfloat16, exactly.
    """

def cpu_attention(
    q: _Capsule,
    k_cache: _Capsule,
    v_cache: _Capsule,
    out: _Capsule,
    block_tables: _Capsule,
    query_starts: _Capsule,
    seq_lens: _Capsule,
    *,
    scale: float,
    window: int,
    softcap: float,
    sinks: _Capsule | None,
    threads: int,
    instructions: str | None = None,
) -> None:
    """Paged attention of one layer on a CPU; every number of `out` is written.

    Tensors come as unused DLPack capsules (`torch.utils.dlpack.to_dlpack`): q [T, Hq, Dk], k_cache [N, Hkv, B, Dk] and v_cache
    [N, Hkv, B, Dv] with any strides but gaps in D, out [T, Hq, Dv] contiguous, all float32, bfloat16 or float16; block_tables
    [S, C], query_starts [S + 1] and seq_lens [S] int32, contiguous; sinks [Hq] float32. What they mean is told in
    `blocktable.kernels.reference.paged_attention`. Runs on up to `threads` threads (those of OpenMP, where it is loaded), with
    the named instructions or the fastest. The interpreter is released: nobody may write to the tensors meanwhile. Raises
    `ValueError`, naming tensor, letter and sizes, before anything is written.
    """

def cpu_store_kv(k: _Capsule, v: _Capsule, k_cache: _Capsule, v_cache: _Capsule, slots: _Capsule, *, threads: int) -> None:
    """Copy k [T, Hkv, Dk] and v [T, Hkv, Dv] to the rows that slots [T] int64 names; the rest as in `cpu_attention`."""

def cpu_linear(
    x: _Capsule,
    weight: _Capsule,
    out: _Capsule,
    *,
    bias: _Capsule | None = None,
    threads: int,
    instructions: str | None = None,
) -> None:
    """Write x [M, K] times the transposed weight [N, K], plus bias [N], to out [M, N]: a linear layer on a CPU.

    All float32; x and weight with any row strides, out and bias contiguous. An answer depends on its row and its output's
    weights alone, to the last bit. The rest as in `cpu_attention`.
    """

def cpu_gated(
    x: _Capsule,
    gate: _Capsule,
    up: _Capsule,
    out: _Capsule,
    *,
    activation: str,
    threads: int,
    instructions: str | None = None,
) -> None:
    """Write activation(linear(x, gate)) * linear(x, up) to out [M, N]; `activation` is silu or gelu_tanh. As `cpu_linear`."""

def cpu_before_attention(
    hidden: _Capsule,
    norm: _Capsule,
    q: _Capsule,
    k: _Capsule,
    v: _Capsule,
    cos: _Capsule,
    sin: _Capsule,
    out: _Capsule,
    *,
    eps: float,
    biases: tuple[_Capsule, _Capsule, _Capsule] | None = None,
    threads: int,
    instructions: str | None = None,
) -> None:
    """A decoder layer up to its attention: root mean square norm [K] of hidden [M, K], products with q, k and v [N, K], rotary
    positions cos and sin [M, D] in the heads of q and k (two halves of D / 2), all side by side in out [M, Nq + Nk + Nv].
    The rest as in `cpu_linear`.
    """

def cpu_after_attention(
    attended: _Capsule,
    hidden: _Capsule,
    project: _Capsule,
    norm: _Capsule,
    gate: _Capsule,
    up: _Capsule,
    down: _Capsule,
    out: _Capsule,
    *,
    eps: float,
    activation: str,
    threads: int,
    instructions: str | None = None,
) -> None:
    """A decoder layer from its attention on: sum = hidden [M, K] + attended [M, A] times project [K, A]; then out [M, K] =
    sum + `cpu_gated` of the norm of the sum, times down [K, N]. `out` is other memory than `hidden`. As `cpu_linear`.
    """

@final
class CpuLayer:
    """A decoder layer for `cpu_layers`: its parameters, and how it attends. Its capsules are held as long as it lives."""

    def __new__(
        cls,
        norms: Sequence[_Capsule],
        weights: Sequence[_Capsule],
        project: _Capsule,
        gate: _Capsule,
        up: _Capsule,
        down: _Capsule,
        *,
        eps: Sequence[float],
        activation: str,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        biases: Sequence[_Capsule] | None = None,
    ) -> CpuLayer:
        """`norms` and `eps`: of the layer's input, and before its gated part. `weights` and `biases`: of q, k and v. What they
        mean is told at `cpu_before_attention`, `cpu_attention` and `cpu_after_attention`. Raises `ValueError` for an activation
        that is not known; all else is checked by `cpu_layers`.
        """

def cpu_layers(
    hidden: _Capsule,
    cos: _Capsule,
    sin: _Capsule,
    out: _Capsule,
    layers: Sequence[CpuLayer],
    pages: Sequence[tuple[_Capsule, _Capsule]],
    tables: Sequence[tuple[_Capsule, _Capsule, _Capsule, _Capsule]],
    steps: Sequence[int],
    *,
    threads: int,
    instructions: str | None = None,
) -> float:
    """Take the rows hidden [M, K] through whole layers to out [M, K], other memory: the same as the calls for their parts.

    For each layer `pages` has k_cache and v_cache, and `steps` which of `tables` it follows: block_tables, query_starts,
    seq_lens, and slots [M] int64. cos and sin [M, D] are those of every layer. The rest as in `cpu_attention` and `cpu_linear`;
    all layers are checked before anything is written. Without `instructions`, rows of sequences that bring several are
    multiplied by tiles where the processor has them, and those that come alone never. Returns the seconds that were not spent
    in attention and stores.
    """

def cpu_read_sum(numbers: _Capsule, *, threads: int) -> float:
    """The sum of contiguous float32 numbers, as fast as memory can be read: what benchmarks compare with."""

def replay(recording: bytes) -> dict[str, Any]:
    """Make the calls of a recording again: see `blocktable.replay`."""

def read_recording(recording: bytes) -> list[str]:
    """The calls of a recording, a line each."""

@final
class Scheduler:
    """Decides what each step runs and which KV blocks it writes: first come, first served, one token budget.

    One thread drives `plan`, then `commit` or `fail`; every method may be called from any thread.

    `groups` has an entry for each group of layers (1..16): None if its queries see everything before them, else how many rows
    they see, their own the last of them; without it there is one that sees everything. All groups share the pool; a block
    out of sight of a sequence's next query is given back.

    `policy` orders the waiting requests: fcfs; priority (`ageing_us` of waiting count as one priority); fair (the tenant that
    was served least, by weight, first); deadline (the earliest first, none ordered later than `latest_deadline_us` after its
    submission); prefix (the longest cached prefix first, inside bands of `prefix_band` arrivals). At most `max_pass`
    smaller requests are admitted before one that does not fit. `tenants` has a dict for each tenant that has rules of its own,
    `other_tenants` one for all others. Keys: weight (1 to 4096, for policy fair); hard_blocks, more of which it never holds (a
    shared block counts once for each table, a promised one as held); soft_blocks, above which it goes behind others while they
    wait and is the first of its class to be preempted; max_waiting, max_waiting_tokens, max_waiting_blocks.

    An admission leaves `watermark` blocks free while others run and, with `estimate_growth`, what those that run are expected
    to take yet, by the outputs that were seen. `no_evict` promises the whole possible length of every sequence instead: nobody
    is ever preempted, and only who was truncated, or lost what it shared, may wait for a block.
    With policy priority, `preempt_for_waiting` lets a waiting request displace running ones of strictly lower priority. The
    queue is limited by `max_waiting` requests, `max_waiting_tokens` and `max_waiting_blocks` (0 = no limit).


    `domain_shares` says how many blocks the cached content of a domain keeps, whatever others bring (32 domains at most,
    together no more than the pool): content of the domain that is most above its share is evicted first. What belongs to no
    such domain has no share; public ranges are evicted last. Running requests may still use every block.
    """

    def __new__(
        cls,
        *,
        num_blocks: int,
        block_size: int,
        vocab_size: int,
        max_model_len: int,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 2048,
        max_waiting: int = 4096,
        long_prefill_threshold: int = 0,
        max_preemptions: int = 16,
        groups: Sequence[int | None] | None = None,
        enable_prefix_caching: bool = True,
        hash_algorithm: str = "sha256",
        hash_seed: bytes = b"",
        kv_layout: bytes = b"",
        weights_version: str = "",
        explain_misses: bool = False,
        event_buffer_size: int = 0,
        pin_budget: int = 0,
        domain_shares: dict[str, int] | None = None,
        enable_partial_hits: bool = False,
        policy: str = "fcfs",
        ageing_us: int = 1000000,
        latest_deadline_us: int = 60000000,
        prefix_band: int = 1024,
        max_pass: int = 8,
        watermark: int = 0,
        estimate_growth: bool = True,
        no_evict: bool = False,
        preempt_for_waiting: bool = False,
        max_waiting_tokens: int = 0,
        max_waiting_blocks: int = 0,
        tenants: Mapping[str, Mapping[str, int]] | None = None,
        other_tenants: Mapping[str, int] | None = None,
        overlap_depth: int = 1,
        max_draft_tokens: int = 0,
    ) -> Scheduler:
        """`overlap_depth`: plans that may be made before the oldest step in flight is committed or failed, it included: 1,
        or 2 to plan while the model runs. `max_draft_tokens`: drafts of one sequence in one step, see `propose`."""

    def submit(
        self,
        token_ids: Sequence[int] | NDArray[np.int32] | NDArray[np.int64],
        *,
        max_tokens: int,
        min_tokens: int = 0,
        stop_token_ids: Sequence[int] = (),
        domain: str | None = None,
        public_tokens: int = 0,
        adapter: _Adapter | None = None,
        cache_salt: str | Sequence[_Range] | None = None,
        media: Sequence[_Range] = (),
        retention: Sequence[tuple[int, int | None, int, int | None]] = (),
        priority: int = 0,
        tenant: str | None = None,
        queue_deadline_us: int | None = None,
        deadline_us: int | None = None,
        n: int = 1,
        now_us: int = 0,
    ) -> int:
        """Queue one request; returns its id, which is never given again.

        Who may share its prefix. `domain` is the tenant, from authenticated context; none is a deployment without tenants.
        `public_tokens`, from the operator alone: so many tokens at the start are everybody's, and only what follows is the
        tenant's. `adapter` computes the rows; give another load number whenever one is loaded. `cache_salt`, from the client:
        one text for the whole prompt, or (start, end, text) for ranges of tokens; `media` are (start, end, id). A block that a
        range touches is shared with equal ranges only. With vLLM's algorithms a domain, a public range, a salt for a part and a
        load number above 0 are refused: those keys could not keep them apart.

        `retention`: (token_start, token_end or None for all, priority, duration_ms or None for ever) each. Free blocks are
        evicted by (priority 0 to 100, recency); the default is 35. A block is worth the highest priority of every range that
        ends behind its start, for the longest of their times without a hit; then it is worth the default.
        `blocktable.retention.KvCacheRetentionConfig` makes them with TensorRT-LLM's names.

        Its turn. `priority`, -1000 to 1000, only with policy priority: lower goes first. `tenant`: whose share it uses; without
        it, its `domain`. On the clock of `now_us`: a request that was not admitted by `queue_deadline_us` ends as
        refused, and one that lives at `deadline_us` as aborted, wherever it is; plans report both among `ended`.

        `n` sequences share the prompt, which is computed once (at most as many as run at once). Sequence i has the id
        `request id + i`. The step that ends the prompt has its last row n times in `sample_rows`, and commit brings all n first
        tokens or none counts; the others are then among the next plan's `admitted`. A sequence is preempted, and ended by a
        stop or its length, alone; `abort` of the request, its deadline and want of memory end all of them.

        `stop_token_ids` holds every id that ends the text (the model's own end ids too, unless they are to be ignored);
        they are not looked at before `min_tokens` outputs. Raises `InvalidInputError` (field, value, bound),
        `NeverFitsError` (needed, usable: blocks) or `QueueFullError` (limit, what,
        waiting, retry_after_us); nothing is queued then.
        """

    def propose(
        self,
        seq_slots: NDArray[np.int32] | NDArray[np.int64],
        starts: NDArray[np.int32] | NDArray[np.int64],
        token_ids: NDArray[np.int32] | NDArray[np.int64],
    ) -> None:
        """Guess what sequences say next: row `seq_slots[i]` gets the drafts `token_ids[starts[i]:starts[i + 1]]`, at most
        `max_draft_tokens`, which follow its newest token, known or on its way. Any C-contiguous int32 or int64 buffers.

        They count for the next plan alone, and only for sequences that decode. The plan computes as many of them as tokens and
        free blocks are left for when everybody else has theirs, preempting nobody, and has one entry more of `sample_rows`
        for each. Commit may bring a token for every entry, or for the first ones. They count up to the first draft that is not
        the token before it, a stop or a limit; the others stand in `Commit.dropped`. So the text is the same as without
        drafts. At depth 2 a sequence with drafts in the step in flight is left out of the next plan. Drafts that are proposed
        again before the plan are replaced. Raises `InvalidInputError` for rows that nobody has or that come twice, counts and
        ids out of range; nothing changes then.
        """

    def plan(self, now_us: int) -> Plan:
        """Choose the next step. At depth 2 it may be made before the last step's commit: `token_sources` says which of its
        tokens that step brings. Raises `StepInFlightError` if `overlap_depth` plans were made since the oldest step that is
        neither committed nor failed, `StalledError` if runnable work cannot move."""

    def commit(
        self,
        step: int,
        token_ids: NDArray[np.int32] | NDArray[np.int64],
        starts: NDArray[np.int32] | NDArray[np.int64],
        now_us: int,
    ) -> Commit:
        """Bring the tokens of step `step`: entry i of its `sample_rows` gets `token_ids[starts[i]:starts[i + 1]]`, none or one.

        Any C-contiguous int32 or int64 buffers: `starts` [K + 1], `token_ids` [starts[K]]. Raises `WrongStepError`, or
        `InvalidInputError` for shapes, counts and ids out of range; nothing changes then.
        """

    def fail(self, step: int) -> None:
        """The model failed: undo step `step`. Its sequences go back to what was confirmed before and will run again; what a
        plan made since brings for them does not count either."""

    def abort(self, request_id: int) -> bool:
        """End a request in whatever state it is, all its sequences; false if it has ended already or never was."""

    def end_sequence(self, sequence_id: int) -> bool:
        """End one sequence of a request as aborted, the first one too; false as for `abort`. Until the prompt is computed the
        first one is the request."""

    def finish(self, request_id: int) -> bool:
        """End one sequence as finished (a stop string was seen): of several each by its own id. False as for `abort`."""

    def fork(
        self, request_id: int, *, max_tokens: int, min_tokens: int = 0, stop_token_ids: Sequence[int] = (), now_us: int = 0
    ) -> int:
        """A new request with the tokens of a running one, over the same KV blocks; returns its id.

        It goes on from the confirmed length, counts the outputs so far as its own, ranks last, and stands among the next
        plan's `admitted`. Who writes first into the partial last block gets a copy of it: see `Plan.copies`. Raises
        `UnknownRequestError`, `NotRunningError`, `NoFreeRowError`, `NeverFitsError` or `InvalidInputError`; nothing
        changes then."""

    def truncate(self, request_id: int, num_tokens: int) -> None:
        """Take a request back to its first `num_tokens` tokens, wherever it is; its last token is computed anew.

        What a step in flight brings for it does not count. Raises `UnknownRequestError` or `InvalidInputError`; nothing
        changes then."""

    def reset_prefix_cache(self) -> int:
        """Forget all published content that no live sequence holds; returns how many blocks forgot theirs."""

    def pin(
        self,
        token_ids: Sequence[int] | NDArray[np.int32] | NDArray[np.int64],
        *,
        domain: str | None = None,
        public_tokens: int = 0,
        adapter: _Adapter | None = None,
        cache_salt: str | Sequence[_Range] | None = None,
        media: Sequence[_Range] = (),
    ) -> tuple[int, int]:
        """Hold the longest published prefix of these tokens, in whole blocks, until `unpin`: nothing evicts it.

        Returns the pin's id and the tokens that it holds. Raises `PinBudgetError` (needed, pinned, budget: blocks) if all pins
        would hold more than `pin_budget` blocks, each counted once; `InvalidInputError` if nothing of it is published;
        `OutOfBlocksError` (needed, free) if what nobody holds of it was promised to others; nothing changes then.

        No promise counts on what pins hold. A running request may lose by one what it counted on: blocks that leave its
        window. With `no_evict` it may then have to wait for memory; else it may be preempted once more than
        `max_preemptions` times."""

    def unpin(self, pin: int) -> None:
        """Give the blocks of a pin back. Raises `InvalidInputError` if there is no such pin any more."""

    def read_events(self, since: int) -> bytes | None:
        """The KV events from number `since` (the first is 0) to now, as bytes; None if there are none, or none are recorded
        (`event_buffer_size` 0).

        The first 8 bytes are the number to read on from, the next 8 how many events were overwritten before this reader
        came: if any, it must start again from `event_snapshot`. Layout: `rust/core/src/event_bytes.rs`;
        `blocktable.events.read_records` reads it. Raises `InvalidInputError` for a number that no event has had yet."""

    def event_snapshot(self) -> bytes | None:
        """All that is published now as events, in the same bytes: everything is cleared, then each key is stored, parents
        first. None if no events are recorded. Walks the whole pool."""

    def set_weights_version(self, version: str) -> int:
        """Other weights compute rows from the next plan on: no later request finds what the old ones computed.

        Who waits looks for its prefix anew. Who runs goes on with rows of both, publishes nothing more (`is_mixed`), and is
        computed anew by the new ones after a preemption. Returns how many run so. Raises `StepInFlightError`; with vLLM's
        algorithms, whose keys know no weights, `InvalidInputError`: use `reset_prefix_cache`.
        """

    def is_mixed(self, request_id: int) -> bool:
        """Whether the rows of a live request were computed by several versions of the weights. Raises `UnknownRequestError`."""

    def audit(self) -> None:
        """Recount every invariant from the tables, the leases and a walk of the free queue. Raises `AuditError`."""

    def stats(self) -> dict[str, int]:
        """Counters since the start, and gauges. Keys are fixed; see `rust/core/src/stats.rs`."""

    def num_cached_tokens(self, request_id: int) -> int:
        """Prompt tokens of a live or just ended request that were found in the prefix cache at its first admission; 0 before.

        Kept for the last 1,024 ended requests; raises `UnknownRequestError` for others."""

    def explain(self, request_id: int) -> dict[str, Any]:
        """What happened to a request, and what it waits for now.

        `place` is `waiting`, `running` or `ended`. `waits_for` is None, or the reason for which the last plan passed it over.
        `records`, oldest first: `at_us`, `until_us`, `step`, `times` (the same in a row is one record), `reason`, `code`,
        `kind`, `numbers` (of the last time), `words`; the last 32, `forgotten` counts those before. `text` is all of it in
        words. What others do shows in it: for operators, not for clients. Known of live requests and of the last 1,024 that
        ended; raises `UnknownRequestError` for others."""

    def listen_to_notes(self, capacity: int) -> None:
        """Keep every note of every request from now on, the last `capacity` of them, until `take_notes`; 0 ends that."""

    def take_notes(self) -> tuple[str, int] | None:
        """The notes since the last call as JSON lines, and how many were lost before them; None if nobody listens."""

    def start_recording(self, path: str) -> None:
        """Write everything that enters from now on to a new file that only its owner may read, for `blocktable replay`.

        Only before anything was submitted or planned (`InvalidInputError`): a replay begins at the start. It takes the place of
        a recording that was begun before, and a fork of this process writes nothing to it. The file holds prompts, salts and
        outputs. Raises `RecordingError` if the file cannot be made, or is there already."""

    def keep_recording(self, num_bytes: int) -> None:
        """Keep the last `num_bytes` of everything that enters from now on, for `recorded`. Only at the start, as above."""

    def flush_recording(self) -> None:
        """Hand what is buffered to the file."""

    def stop_recording(self) -> int | None:
        """End the recording; how many calls it has. None if there was none. Raises `RecordingError` if the file failed."""

    def recorded(self) -> bytes | None:
        """What `keep_recording` keeps, as a recording. It can be replayed as long as nothing was dropped from it. Also of a
        scheduler that an earlier call broke; the call is the last record then. None without."""

    def miss_reason(self, request_id: int) -> str | None:
        """Why the prefix of a request was found no further at its first admission; None before, and without `explain_misses`.

        One of `nothing` (all was found that may be), `shorter_than_block`, `never_seen`, `evicted`, `other_salt`,
        `other_adapter`; `stats` counts them as `miss_...`, and `other_domain`, which is never told of a request. What others
        sent shows in the last ones: for operators, not for clients. Only the last two publications a block are remembered
        (32 bytes a block), so that what was published long ago counts as never seen. Raises `UnknownRequestError` as above.
        """

    def free_queue(self) -> NDArray[np.int32]:
        """Ids of the free blocks, the next one to be taken first. A copy, for tests and displays."""

    def block_refs(self) -> NDArray[np.int32]:
        """[num_blocks] holders of each block. A copy."""

    def published_blocks(self) -> NDArray[np.int32]:
        """Ids of the blocks whose content the prefix cache may serve, ascending. A copy."""

    def block_map(self) -> tuple[NDArray[np.uint8], NDArray[np.uint8], list[str]]:
        """What every block is doing, for displays: [num_blocks] its use, [num_blocks] whose running requests name it, and the
        tenants' names. Copies.

        Uses: 0 the null block, 1 free, 2 free and cached, 3 named by one table, 4 by several, 5 pinned, 6 parked behind a step
        in flight. Whose: 0 nobody's, 255 several tenants' (or one's beyond 254 names), else n for the n-th name.
        """

    def block_namings(self, block: int) -> list[tuple[int, int, int]]:
        """Where running requests name a block: (request id, group, entry of its table). Raises `NoSuchBlockError`."""

    @property
    def num_running(self) -> int: ...
    @property
    def num_waiting(self) -> int: ...
    @property
    def config(self) -> dict[str, Any]: ...

@final
class Plan:
    """What one step runs. S sequences, T tokens, K samples, G groups. Views; valid until the step's commit or failure."""

    @property
    def step(self) -> int: ...
    @property
    def num_seqs(self) -> int:
        """S; 0 means nothing to run: call neither the model nor `commit`."""

    @property
    def num_tokens(self) -> int:
        """T."""

    @property
    def seq_slots(self) -> NDArray[np.int32]:
        """[S] stable row of each sequence in `block_tables`."""

    @property
    def query_starts(self) -> NDArray[np.int32]:
        """[S + 1] where each sequence's tokens begin."""

    @property
    def seq_lens(self) -> NDArray[np.int32]:
        """[S] tokens visible to its last query."""

    @property
    def token_ids(self) -> NDArray[np.int32]:
        """[T]"""

    @property
    def positions(self) -> NDArray[np.int32]:
        """[T]"""

    @property
    def token_sources(self) -> NDArray[np.int32]:
        """[T] -1, or the index in the previous plan's `sample_rows` that fills this token (always -1 at depth 1).

        `token_ids` has 0 for such a token."""

    @property
    def slot_mapping(self) -> NDArray[np.int64]:
        """[G, T] `block_id * block_size + offset` where each new key and value goes; -1 = nowhere."""

    @property
    def block_tables(self) -> NDArray[np.int32]:
        """[G, max_num_seqs, max_blocks] persistent; row `seq_slots[i]` holds ceil(seq_lens[i] / block_size) entries: block ids,
        and 0 (the null block) for those behind a window, which no query sees."""

    @property
    def dirty(self) -> NDArray[np.int32]:
        """[D, 4] (group, row, first column, count): what changed in the tables since the last plan."""

    @property
    def dirty_ids(self) -> NDArray[np.int32]:
        """[sum of counts] the values of `dirty`."""

    @property
    def copies(self) -> NDArray[np.int32]:
        """[C, 4] (group, source block, target block, rows) to be done before the forward pass."""

    @property
    def sample_rows(self) -> NDArray[np.int32]:
        """[K] token rows (0..T-1) that need a token, in the order in which `commit` expects them."""

    @property
    def sample_requests(self) -> NDArray[np.int64]:
        """[K] request id of each entry of `sample_rows`."""

    @property
    def ended(self) -> NDArray[np.int64]:
        """[E, 2] (id, end code): all that ended since the last plan. A sequence ends by its own id, `request id + number`."""

    @property
    def preempted(self) -> NDArray[np.int64]:
        """[P, 2] (request id, sequence number): lost their rows in this plan. Not those whose rows no plan has told yet,
        of `fork` or of `n` above 1: `admitted` tells them when they run again. `stats` counts their preemptions too."""

    @property
    def admitted(self) -> NDArray[np.int64]:
        """[A, 3] (request id, sequence number, row): got a row in this plan."""

    def prefix_groups(
        self, *, group: int = 0, min_blocks: int = 1
    ) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
        """Sequences whose tables of `group` begin with the same blocks: members [M], starts [P + 1] and blocks [P], copies.

        Group i are the sequences `members[starts[i]:starts[i + 1]]` (0..S-1, ascending), two or more, with the first
        `blocks[i]` blocks in common, at least `min_blocks`, which end before each one's first query. A sequence is in one group
        at most, and no other such grouping saves more reads of blocks, the sum of (members - 1) * blocks. None in a group with
        a window. Who was aborted, preempted or taken back since the plan is in none. Made when it is asked for; raises
        `WrongStepError` once the step is committed or failed, and `InvalidInputError`.
        """

@final
class Commit:
    """What a commit changed."""

    @property
    def step(self) -> int: ...
    @property
    def ended(self) -> NDArray[np.int64]:
        """[E, 2] (id, end code) of the sequences that this commit ended; they stand in the next plan's `ended` too."""

    @property
    def num_accepted(self) -> int:
        """Tokens that were accepted."""

    @property
    def dropped(self) -> NDArray[np.int32]:
        """Indices into `sample_rows` whose token was dropped: the request has ended, or it was put back because a block that it
        shared was withdrawn; then it lives and will be sampled again. Nearly always empty."""

@final
class BlockHasher:
    """Chained keys of full blocks (design 4).

    `algorithm`: `sha256` and `blake3` hash our own encoding. `sha256_cbor` and `vllm_sha256` are vLLM's `sha256_cbor` and
    `sha256`, byte for byte, so that its routers know our keys; `seed` is then the text of vLLM's PYTHONHASHSEED, empty for its
    fixed default.
    """

    def __new__(cls, *, block_size: int, algorithm: str = "sha256", seed: bytes = b"") -> BlockHasher: ...
    def keys(
        self,
        token_ids: Sequence[int] | NDArray[np.int32] | NDArray[np.int64],
        *,
        domain: str | None = None,
        public_tokens: int = 0,
        adapter: _Adapter | None = None,
        cache_salt: str | Sequence[_Range] | None = None,
        media: Sequence[_Range] = (),
    ) -> list[bytes]:
        """32-byte key of each full block of a chain; the arguments are those of `Scheduler.submit`."""

def bench_pool(*, num_blocks: int, batch: int, published: bool, rounds: int) -> dict[str, float]:
    """Time take + release inside Rust, after checking that the ids come out right.

    Figures: `ns_per_block`, `init_ms`, `first_pass_ms`, `bytes_per_block`."""

def bench_queue(
    *, implementation: str, num_blocks: int, batch: int, published: bool, threads: int, rounds: int
) -> dict[str, float]:
    """Time take + release of a queue of blocks: `ours`, `mutex` or `crossbeam`, on one or more threads."""

def bench_hash(*, algorithm: str, blocks: int) -> dict[str, float]:
    """Time chained hashing of 16-token blocks inside Rust, after checking a known key: `ns_per_block`, `tokens_per_s`."""

def bench_match(*, num_blocks: int, tokens: int, cached: bool, aged: bool, rounds: int) -> dict[str, float]:
    """Time match + pin + release of one prompt whose keys are known, inside Rust, after checking the hit: `match_us`."""

def allocations() -> int:
    """Heap allocations of Rust so far, counted only in a build with feature `bench`; 0 otherwise."""

@final
class BlockPool:
    """Physical KV blocks, who holds them, and the order in which free ones are handed out: for engines of their own.

    Block 0 is the null block and is never handed out. Every method may be called from any thread; a refused call changes
    nothing.
    """

    def __new__(
        cls, num_blocks: int, block_size: int, *, event_buffer_size: int = 0, enable_partial_hits: bool = False
    ) -> BlockPool:
        """`num_blocks` in all, the null block among them; `block_size` tokens each. The last `event_buffer_size` changes of
        what can be found are kept for `read_events`; 0: none. With `enable_partial_hits` the pool remembers the tokens of what
        is published, at 4 bytes each: `PrefixCache.match` compares them, and finds rows of a block that is only in part what
        is asked for. Raises `InvalidInputError`."""

    def table(self) -> BlockTable:
        """A table without tokens."""

    def take(self, num_blocks: int) -> NDArray[np.int32]:
        """Ids of free blocks that the caller holds from now on, one by one, for tables that it keeps itself. Raises
        `OutOfBlocksError`."""

    def take_ref(self) -> BlockRef:
        """One free block, held by what is returned. Raises `OutOfBlocksError`."""

    def share(self, block_ids: Sequence[int] | NDArray[np.int32] | NDArray[np.int64]) -> None:
        """Hold blocks of `take` once more, each to be released once more. Raises `NotHeldError` or `NoSuchBlockError`."""

    def release(self, block_ids: Sequence[int] | NDArray[np.int32] | NDArray[np.int64]) -> None:
        """Give blocks of `take` back, the last one first; null blocks are passed over. Raises `NotHeldError` or
        `NoSuchBlockError`."""

    def reset(self) -> None:
        """All blocks are free in their first order, all content is forgotten, and tables and guards raise `ReleasedError`. The
        numbers of events go on."""

    def read_events(self, since: int) -> bytes | None:
        """As `Scheduler.read_events`."""

    def event_snapshot(self) -> bytes | None:
        """As `Scheduler.event_snapshot`."""

    def tell_time(self, now_us: int) -> None:
        """The time, in microseconds of any clock that does not go back: what `PrefixCache.publish` asked `retention` for ends
        by it. Never needed where nobody asks for a duration."""

    def audit(self) -> None:
        """Recount every invariant from the tables and a walk of the free queue. Raises `AuditError`."""

    def stats(self) -> dict[str, int]:
        """Gauges in blocks and tables (guards count as such), and counters: `prefix_prompts` and their tokens,
        `prefix_queries`, of which `prefix_hits` were reused. A prompt is counted once, when tokens are appended behind its
        hit."""

    def free_queue(self) -> NDArray[np.int32]:
        """Ids of the free blocks, the next one to be taken first. A copy, for tests and displays."""

    def block_refs(self) -> NDArray[np.int32]:
        """[num_blocks] holders of each block. A copy."""

    def published_blocks(self) -> NDArray[np.int32]:
        """Ids of the blocks whose content can be found, ascending. A copy."""

    @property
    def num_blocks(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def num_free(self) -> int: ...

@final
class BlockRef:
    """The guard of one block, made by `BlockPool.take_ref`; for blocks that belong to no table.

    The block goes back once: at `release`, at the end of a `with` block, or when the last reference to the guard goes. After
    that, and after `BlockPool.reset`, every method raises `ReleasedError`. It cannot be copied: `share` makes a second guard,
    with a hold of its own.
    """

    def share(self) -> BlockRef:
        """A second guard of the same block."""

    def release(self) -> None:
        """Give the hold back."""

    @property
    def block(self) -> int:
        """Id of the block."""

    @property
    def is_released(self) -> bool: ...
    @property
    def pool(self) -> BlockPool: ...
    def __enter__(self) -> BlockRef: ...
    def __exit__(self, _kind: object, _error: object, _traceback: object) -> None: ...

@final
class BlockTable:
    """Where the rows of one sequence live. Made by `BlockPool.table`, `PrefixCache.match` and `fork`; owns what it names.

    Its blocks go back at `release`, at the end of a `with` block, or when the last reference to it goes. After that, every
    method raises `ReleasedError`.
    """

    def append(self, num_tokens: int) -> tuple[NDArray[np.int64], list[tuple[int, int, int]]]:
        """Make room for so many tokens more. Returns their slots [num_tokens] (`block_id * block_size + offset`), and the
        copies to be made before anything is written: (source block, target block, rows), nearly always none.

        Raises `OutOfBlocksError` if the whole of it does not fit.
        """

    def reserve(self, num_tokens: int) -> None:
        """Take blocks for so many tokens in all, so that appending up to there finds them. Raises `OutOfBlocksError`."""

    def fork(self) -> BlockTable:
        """A second table over the same blocks. Nothing is copied until one of the two appends into a block that both see;
        reserved blocks stay here."""

    def truncate(self, num_tokens: int) -> None:
        """Keep the first `num_tokens` tokens and the blocks that they need, and give up the rest."""

    def slots(self, start: int = 0, stop: int | None = None) -> NDArray[np.int64]:
        """[stop - start] slots of the tokens from `start` on, to `stop` or the last one."""

    def release(self) -> None:
        """Give all blocks back, the last one first."""

    @property
    def blocks(self) -> NDArray[np.int32]:
        """Block ids, in the order of the tokens; reserved ones stand behind. A copy."""

    @property
    def num_tokens(self) -> int: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def num_published(self) -> int:
        """Blocks from the first one on that can be found by their content."""

    @property
    def is_released(self) -> bool: ...
    @property
    def pool(self) -> BlockPool: ...
    def __enter__(self) -> BlockTable: ...
    def __exit__(self, _kind: object, _error: object, _traceback: object) -> None: ...

@final
class PrefixCache:
    """Finds the blocks of the longest known prefix of a prompt. The names of the contents live in the pool."""

    def __new__(cls, pool: BlockPool, *, algorithm: str = "sha256", seed: bytes = b"") -> PrefixCache:
        """Caches of one pool share blocks if algorithm and seed are equal, and never otherwise."""

    def match(
        self,
        token_ids: Sequence[int] | NDArray[np.int32] | NDArray[np.int64],
        *,
        reserve: int = 0,
        domain: str | None = None,
        public_tokens: int = 0,
        adapter: _Adapter | None = None,
        cache_salt: str | Sequence[_Range] | None = None,
        media: Sequence[_Range] = (),
    ) -> tuple[BlockTable, int]:
        """A table that holds the longest published prefix, and how many tokens that is: at most all but the last one.

        With `reserve`, the table has blocks for so many tokens in all, or `OutOfBlocksError` is raised and nothing has changed.
        Append what is still to be computed: `table.append(len(token_ids) - num_cached)`. In a pool with
        `enable_partial_hits` the prefix may end inside a block, from a quarter of it on: the table shares the block
        that has these rows, `append` says which to copy to one of its own, and `reserve` counts that one too. The other
        arguments say who may share the prefix, as those of `Scheduler.submit`; the table, and every fork of it,
        publishes for those and nobody else.
        """

    def publish(
        self,
        table: BlockTable,
        token_ids: Sequence[int] | NDArray[np.int32] | NDArray[np.int64],
        *,
        start: int = 0,
        retention: Sequence[tuple[int, int | None, int, int | None]] = (),
    ) -> int:
        """Make full blocks findable whose rows have been written; returns how many were not before.

        `token_ids` are the table's tokens from `start` on, as far as their rows are written; `start` is a multiple of the
        block size that is not past the published blocks. `retention` says what the published blocks of the table are worth once
        they are free, as in `Scheduler.submit`: free blocks are evicted by (priority, recency). Raises `InvalidInputError` if a
        block is published under other tokens,
        `ForeignTableError` for a table of another pool.
        """

    def reset(self) -> int:
        """Forget all published content that nobody holds; returns how many blocks forgot theirs."""

    @property
    def pool(self) -> BlockPool: ...
