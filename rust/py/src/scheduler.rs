//! The class that Python drives. Each method converts in, goes through the door, converts out.

use std::path::PathBuf;
use std::sync::Arc;

use blocktable_core as core;
use blocktable_core::ids::{RequestId, StepId};
use blocktable_core::miss::Miss;
use blocktable_core::plan::PlanMemory;
use blocktable_core::prefix_groups::PrefixGroups;
use blocktable_core::prompt::Prompt;
use blocktable_core::rank::Asked;
use blocktable_core::request::Limits;
use blocktable_core::retention::Ranges;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyTuple};

use crate::buffer::lend;
use crate::door::{Door, released};
use crate::error::recording_failed;
use crate::explain::explanation_of;
use crate::hasher::algorithm;
use crate::identity::{Said, domain_shares, unicode};
use crate::plan::{ArraySet, Commit, Plan, array};
use crate::pool::{block_refs, free_queue, published_blocks};
use crate::recording;
use crate::tokens::{copy_ints, count, groups, number, token_ids, token_ranges};
use crate::turn::{SaidRules, siblings, told, turn};

/// Prompts from here on are hashed with the interpreter released: about 10 us of work.
const LONG_PROMPT: usize = 1024;

struct State {
    core: core::Recorded,
    /// What a commit brings. Kept for its memory.
    tokens: Vec<i64>,
    starts: Vec<i64>,
    committed: core::Committed,
    /// Events on their way out. Kept for its memory.
    events: Vec<u8>,
}

/// Decides what each step runs and which KV blocks it writes: first come, first served, one token budget.
#[pyclass(frozen, module = "blocktable._core")]
pub struct Scheduler {
    door: Door<State>,
    sets: [Arc<ArraySet>; 2],
    config: core::Config,
}

#[pymethods]
impl Scheduler {
    #[new]
    #[pyo3(
        signature = (*, num_blocks, block_size, vocab_size, max_model_len, max_num_seqs=None, max_num_batched_tokens=None,
            max_waiting=None, long_prefill_threshold=None, max_preemptions=None, groups=None, enable_prefix_caching=true,
            hash_algorithm="sha256", hash_seed=None, kv_layout=None, weights_version="", explain_misses=false, event_buffer_size=None,
            pin_budget=None, domain_shares=None, enable_partial_hits=false, policy="fcfs", ageing_us=None, latest_deadline_us=None, prefix_band=None,
            max_pass=None, watermark=None, estimate_growth=true, no_evict=false, preempt_for_waiting=false, max_waiting_tokens=None,
            max_waiting_blocks=None, tenants=None, other_tenants=None, overlap_depth=None, max_draft_tokens=None),
        text_signature = "(*, num_blocks, block_size, vocab_size, max_model_len, max_num_seqs=256, max_num_batched_tokens=2048, \
            max_waiting=4096, long_prefill_threshold=0, max_preemptions=16, groups=None, enable_prefix_caching=True, hash_algorithm='sha256', hash_seed=b'', kv_layout=b'', \
            weights_version='', explain_misses=False, event_buffer_size=0, pin_budget=0, domain_shares=None, enable_partial_hits=False, \
            policy='fcfs', ageing_us=1000000, latest_deadline_us=60000000, prefix_band=1024, max_pass=8, watermark=0, estimate_growth=True, no_evict=False, \
            preempt_for_waiting=False, max_waiting_tokens=0, max_waiting_blocks=0, tenants=None, other_tenants=None, \
            overlap_depth=1, max_draft_tokens=0)"
    )]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments of one configuration")]
    fn new(
        py: Python<'_>,
        num_blocks: &Bound<'_, PyAny>,
        block_size: &Bound<'_, PyAny>,
        vocab_size: &Bound<'_, PyAny>,
        max_model_len: &Bound<'_, PyAny>,
        max_num_seqs: Option<&Bound<'_, PyAny>>,
        max_num_batched_tokens: Option<&Bound<'_, PyAny>>,
        max_waiting: Option<&Bound<'_, PyAny>>,
        long_prefill_threshold: Option<&Bound<'_, PyAny>>,
        max_preemptions: Option<&Bound<'_, PyAny>>,
        groups: Option<&Bound<'_, PyAny>>,
        enable_prefix_caching: bool,
        hash_algorithm: &str,
        hash_seed: Option<&[u8]>,
        kv_layout: Option<&[u8]>,
        weights_version: &str,
        explain_misses: bool,
        event_buffer_size: Option<&Bound<'_, PyAny>>,
        pin_budget: Option<&Bound<'_, PyAny>>,
        domain_shares: Option<&Bound<'_, PyAny>>,
        enable_partial_hits: bool,
        policy: &str,
        ageing_us: Option<&Bound<'_, PyAny>>,
        latest_deadline_us: Option<&Bound<'_, PyAny>>,
        prefix_band: Option<&Bound<'_, PyAny>>,
        max_pass: Option<&Bound<'_, PyAny>>,
        watermark: Option<&Bound<'_, PyAny>>,
        estimate_growth: bool,
        no_evict: bool,
        preempt_for_waiting: bool,
        max_waiting_tokens: Option<&Bound<'_, PyAny>>,
        max_waiting_blocks: Option<&Bound<'_, PyAny>>,
        tenants: Option<&Bound<'_, PyAny>>,
        other_tenants: Option<&Bound<'_, PyAny>>,
        overlap_depth: Option<&Bound<'_, PyAny>>,
        max_draft_tokens: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let said = SaidRules {
            policy,
            ageing_us,
            latest_deadline_us,
            prefix_band,
            max_pass,
            watermark,
            estimate_growth,
            no_evict,
            preempt_for_waiting,
            max_waiting_tokens,
            max_waiting_blocks,
            tenants,
            other_tenants,
        };
        let or =
            |field, given: Option<&Bound<'_, PyAny>>, default| given.map_or(Ok(default), |given| count(field, given));
        let config = core::Config {
            num_blocks: count("num_blocks", num_blocks)?,
            block_size: count("block_size", block_size)?,
            vocab_size: count("vocab_size", vocab_size)?,
            max_model_len: count("max_model_len", max_model_len)?,
            max_num_seqs: or("max_num_seqs", max_num_seqs, 256)?,
            max_num_batched_tokens: or("max_num_batched_tokens", max_num_batched_tokens, 2048)?,
            max_waiting: or("max_waiting", max_waiting, 4096)?,
            long_prefill_threshold: or("long_prefill_threshold", long_prefill_threshold, 0)?,
            max_preemptions: or("max_preemptions", max_preemptions, 16)?,
            overlap_depth: or("overlap_depth", overlap_depth, 1)?,
            max_draft_tokens: or("max_draft_tokens", max_draft_tokens, 0)?,
            groups: groups.map_or(Ok(vec![core::GroupSpec::FULL]), self::groups)?,
            enable_prefix_caching,
            hash_algorithm: algorithm(py, "hash_algorithm", hash_algorithm)?,
            hash_seed: hash_seed.unwrap_or_default().to_vec(),
            event_buffer_size: or("event_buffer_size", event_buffer_size, 0)?,
            kv_layout: kv_layout.unwrap_or_default().to_vec(),
            weights_version: weights_version.as_bytes().to_vec(),
            explain_misses,
            pin_budget: or("pin_budget", pin_budget, 0)?,
            domain_shares: domain_shares.map_or(Ok(Vec::new()), self::domain_shares)?,
            enable_partial_hits,
            queue: said.rules(py)?,
        };
        let core = core::Recorded::new(config.clone()).map_err(|refusal| crate::error::to_python(py, refusal))?;
        let set = || ArraySet::new(py, &config, core.layout()).map(Arc::new);
        let sets = [set()?, set()?];
        let state = State {
            core,
            tokens: Vec::new(),
            starts: Vec::new(),
            committed: core::Committed::default(),
            events: Vec::new(),
        };
        Ok(Scheduler { door: Door::new(state), sets, config })
    }

    #[pyo3(
        name = "submit",
        signature = (token_ids, *, max_tokens, min_tokens=None, stop_token_ids=None, domain=None, public_tokens=None, adapter=None,
            cache_salt=None, media=None, retention=None, priority=None, tenant=None, queue_deadline_us=None, deadline_us=None, n=None, now_us=None),
        text_signature = "($self, token_ids, *, max_tokens, min_tokens=0, stop_token_ids=(), domain=None, public_tokens=0, \
            adapter=None, cache_salt=None, media=(), retention=(), priority=0, tenant=None, queue_deadline_us=None, \
            deadline_us=None, n=1, now_us=0)"
    )]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments of one request")]
    fn py_submit(
        &self,
        py: Python<'_>,
        token_ids: &Bound<'_, PyAny>,
        max_tokens: &Bound<'_, PyAny>,
        min_tokens: Option<&Bound<'_, PyAny>>,
        stop_token_ids: Option<&Bound<'_, PyAny>>,
        domain: Option<&Bound<'_, PyAny>>,
        public_tokens: Option<&Bound<'_, PyAny>>,
        adapter: Option<&Bound<'_, PyAny>>,
        cache_salt: Option<&Bound<'_, PyAny>>,
        media: Option<&Bound<'_, PyAny>>,
        retention: Option<&Bound<'_, PyAny>>,
        priority: Option<&Bound<'_, PyAny>>,
        tenant: Option<&Bound<'_, PyAny>>,
        queue_deadline_us: Option<&Bound<'_, PyAny>>,
        deadline_us: Option<&Bound<'_, PyAny>>,
        n: Option<&Bound<'_, PyAny>>,
        now_us: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<u64> {
        let now_us = now_us.map_or(Ok(0), |given| number("now_us", given))?;
        let tokens = self::token_ids("token_ids", token_ids)?;
        let limits = limits(max_tokens, min_tokens, stop_token_ids)?;
        let ranges = retention.map_or(Ok(Vec::new()), token_ranges)?;
        let turn = turn(priority, deadline_us, queue_deadline_us)?;
        let tenant = tenant.map(|given| unicode("tenant", given)).transpose()?;
        let prompt = self.hashed(py, tokens, Said { domain, public_tokens, adapter, cache_salt, media })?;
        let domain = domain.map(|given| unicode("domain", given)).transpose()?;
        let siblings = siblings(n)?;
        let asked = Asked { tenant: tenant.or(domain).unwrap_or_default(), turn, siblings };
        let submit = |state: &mut State| {
            let kept = Ranges::new(&ranges)?;
            let id = state.core.submit_as(prompt, limits, asked, now_us)?;
            if !ranges.is_empty() {
                state.core.set_retention(id, kept)?;
            }
            Ok(id.0)
        };
        self.door.held(py, submit)
    }

    fn propose(
        &self,
        py: Python<'_>,
        seq_slots: &Bound<'_, PyAny>,
        starts: &Bound<'_, PyAny>,
        token_ids: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let (mut rows, mut offsets, mut tokens) = (Vec::new(), Vec::new(), Vec::new());
        copy_ints("seq_slots", seq_slots, &mut rows)?;
        copy_ints("starts", starts, &mut offsets)?;
        copy_ints("token_ids", token_ids, &mut tokens)?;
        self.door.held(py, |state| state.core.propose(&rows, &offsets, &tokens))
    }

    fn plan(slf: &Bound<'_, Self>, now_us: &Bound<'_, PyAny>) -> PyResult<Plan> {
        let now_us = number("now_us", now_us)?;
        let this = slf.get();
        let (set, sizes) = this.door.held(slf.py(), |state| {
            let set = &this.sets[(state.core.steps() % 2) as usize];
            let sizes = plan_into(&mut state.core, set, now_us)?;
            Ok((Arc::clone(set), sizes))
        })?;
        Ok(Plan { scheduler: slf.clone().unbind(), set, sizes })
    }

    fn commit(
        &self,
        py: Python<'_>,
        step: &Bound<'_, PyAny>,
        token_ids: &Bound<'_, PyAny>,
        starts: &Bound<'_, PyAny>,
        now_us: &Bound<'_, PyAny>,
    ) -> PyResult<Commit> {
        let (step, now_us) = (number("step", step)?, number("now_us", now_us)?);
        let (mut tokens, mut offsets) =
            self.door.held(py, |state| Ok((std::mem::take(&mut state.tokens), std::mem::take(&mut state.starts))))?;
        copy_ints("token_ids", token_ids, &mut tokens)?;
        copy_ints("starts", starts, &mut offsets)?;
        self.door.held(py, |state| {
            let result = state.core.commit(StepId(step), &tokens, &offsets, now_us, &mut state.committed);
            (state.tokens, state.starts) = (tokens, offsets);
            result?;
            let core::Committed { ended, accepted, dropped } = std::mem::take(&mut state.committed);
            Ok(Commit { step, ended, accepted, dropped })
        })
    }

    fn fail(&self, py: Python<'_>, step: &Bound<'_, PyAny>) -> PyResult<()> {
        let step = number("step", step)?;
        self.door.held(py, |state| state.core.fail(StepId(step)))
    }

    fn abort(&self, py: Python<'_>, request_id: &Bound<'_, PyAny>) -> PyResult<bool> {
        let request_id = number("request_id", request_id)?;
        self.door.held(py, |state| Ok(state.core.abort(RequestId(request_id))))
    }

    fn end_sequence(&self, py: Python<'_>, sequence_id: &Bound<'_, PyAny>) -> PyResult<bool> {
        let sequence_id = number("sequence_id", sequence_id)?;
        self.door.held(py, |state| Ok(state.core.end_sequence(RequestId(sequence_id))))
    }

    fn finish(&self, py: Python<'_>, request_id: &Bound<'_, PyAny>) -> PyResult<bool> {
        let request_id = number("request_id", request_id)?;
        self.door.held(py, |state| Ok(state.core.finish(RequestId(request_id))))
    }

    #[pyo3(
        signature = (request_id, *, max_tokens, min_tokens=None, stop_token_ids=None, now_us=None),
        text_signature = "($self, request_id, *, max_tokens, min_tokens=0, stop_token_ids=(), now_us=0)"
    )]
    fn fork(
        &self,
        py: Python<'_>,
        request_id: &Bound<'_, PyAny>,
        max_tokens: &Bound<'_, PyAny>,
        min_tokens: Option<&Bound<'_, PyAny>>,
        stop_token_ids: Option<&Bound<'_, PyAny>>,
        now_us: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<u64> {
        let (request_id, limits) = (number("request_id", request_id)?, limits(max_tokens, min_tokens, stop_token_ids)?);
        let now_us = now_us.map_or(Ok(0), |given| number("now_us", given))?;
        self.door.held(py, |state| state.core.fork(RequestId(request_id), limits, now_us)).map(|id| id.0)
    }

    fn truncate(&self, py: Python<'_>, request_id: &Bound<'_, PyAny>, num_tokens: &Bound<'_, PyAny>) -> PyResult<()> {
        let (request_id, num_tokens) = (number("request_id", request_id)?, count("num_tokens", num_tokens)?);
        self.door.held(py, |state| state.core.truncate(RequestId(request_id), num_tokens as usize))
    }

    fn reset_prefix_cache(&self, py: Python<'_>) -> PyResult<u32> {
        self.door.held(py, |state| Ok(state.core.reset_prefix_cache()))
    }

    #[pyo3(
        signature = (token_ids, *, domain=None, public_tokens=None, adapter=None, cache_salt=None, media=None),
        text_signature = "($self, token_ids, *, domain=None, public_tokens=0, adapter=None, cache_salt=None, media=())"
    )]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments of one prompt")]
    fn pin(
        &self,
        py: Python<'_>,
        token_ids: &Bound<'_, PyAny>,
        domain: Option<&Bound<'_, PyAny>>,
        public_tokens: Option<&Bound<'_, PyAny>>,
        adapter: Option<&Bound<'_, PyAny>>,
        cache_salt: Option<&Bound<'_, PyAny>>,
        media: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<(u64, usize)> {
        let said = Said { domain, public_tokens, adapter, cache_salt, media };
        let prompt = self.hashed(py, self::token_ids("token_ids", token_ids)?, said)?;
        self.door.held(py, |state| state.core.pin(&prompt)).map(|pinned| (pinned.id, pinned.tokens))
    }

    fn unpin(&self, py: Python<'_>, pin: &Bound<'_, PyAny>) -> PyResult<()> {
        let pin = number("pin", pin)?;
        self.door.held(py, |state| state.core.unpin(pin))
    }

    fn read_events<'py>(&self, py: Python<'py>, since: &Bound<'_, PyAny>) -> PyResult<Option<Bound<'py, PyBytes>>> {
        let since = number("since", since)?;
        let bytes = self.door.held(py, |state| {
            let came = state.core.read_events(since, &mut state.events)?;
            Ok(came.map(|_| std::mem::take(&mut state.events)))
        })?;
        bytes.map(|bytes| self.give(py, bytes)).transpose()
    }

    fn event_snapshot<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyBytes>>> {
        let mut bytes = Vec::new();
        let told = self.door.held(py, |state| Ok(state.core.event_snapshot(&mut bytes)))?;
        Ok(told.map(|_| PyBytes::new(py, &bytes)))
    }

    fn set_weights_version(&self, py: Python<'_>, version: &str) -> PyResult<usize> {
        self.door.held(py, |state| state.core.set_weights_version(version.as_bytes()))
    }

    fn is_mixed(&self, py: Python<'_>, request_id: &Bound<'_, PyAny>) -> PyResult<bool> {
        let request_id = number("request_id", request_id)?;
        self.door.held(py, |state| state.core.is_mixed(RequestId(request_id)))
    }

    fn audit(&self, py: Python<'_>) -> PyResult<()> {
        self.door.held(py, |state| state.core.audit())
    }

    fn num_cached_tokens(&self, py: Python<'_>, request_id: &Bound<'_, PyAny>) -> PyResult<usize> {
        let request_id = number("request_id", request_id)?;
        self.door.held(py, |state| state.core.num_cached_tokens(RequestId(request_id)))
    }

    fn miss_reason(&self, py: Python<'_>, request_id: &Bound<'_, PyAny>) -> PyResult<Option<&'static str>> {
        let request_id = number("request_id", request_id)?;
        self.door.held(py, |state| Ok(state.core.miss(RequestId(request_id))?.map(Miss::name)))
    }

    fn explain<'py>(&self, py: Python<'py>, request_id: &Bound<'_, PyAny>) -> PyResult<Bound<'py, PyDict>> {
        let request_id = number("request_id", request_id)?;
        let told = self.door.held(py, |state| state.core.explain(RequestId(request_id)))?;
        explanation_of(py, &told)
    }

    fn listen_to_notes(&self, py: Python<'_>, capacity: &Bound<'_, PyAny>) -> PyResult<()> {
        let capacity = count("capacity", capacity)? as usize;
        self.door.held(py, |state| {
            state.core.listen_to_notes(capacity);
            Ok(())
        })
    }

    fn take_notes(&self, py: Python<'_>) -> PyResult<Option<(String, u64)>> {
        let mut lines = String::new();
        let lost = self.door.held(py, |state| Ok(state.core.take_notes(&mut lines)))?;
        Ok(lost.map(|lost| (lines, lost)))
    }

    fn start_recording(&self, py: Python<'_>, path: PathBuf) -> PyResult<()> {
        let file =
            recording::create(&path).map_err(|error| recording_failed(py, &format!("{}: {error}", path.display())))?;
        self.door.held(py, |state| state.core.record_to(Box::new(file)))
    }

    fn keep_recording(&self, py: Python<'_>, num_bytes: &Bound<'_, PyAny>) -> PyResult<()> {
        let num_bytes = count("num_bytes", num_bytes)? as usize;
        self.door.held(py, |state| state.core.record_in_ring(num_bytes))
    }

    fn flush_recording(&self, py: Python<'_>) -> PyResult<()> {
        self.door.held(py, |state| {
            state.core.flush_recording();
            Ok(())
        })
    }

    fn stop_recording(&self, py: Python<'_>) -> PyResult<Option<u64>> {
        let stopped = self.door.held(py, |state| Ok(state.core.stop_recording()))?;
        recording::stop(py, stopped)
    }

    fn recorded<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyBytes>> {
        let kept = self.door.last_look(|state| state.core.recorded());
        kept.map(|bytes| PyBytes::new(py, &bytes))
    }

    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let (counters, misses, gauges, reasons) = self.door.held(py, |state| {
            let (core, pool) = (&state.core, state.core.pool());
            let gauges = [
                ("num_blocks", u64::from(pool.num_blocks())),
                ("free_blocks", u64::from(pool.num_free())),
                ("parked_blocks", u64::from(pool.num_parked())),
                ("used_blocks", u64::from(pool.num_held())),
                ("published_blocks", u64::from(pool.index().num_published())),
                ("running", core.num_running() as u64),
                ("waiting", core.num_waiting() as u64),
                ("evictions", pool.evictions()),
                ("pinned_blocks", u64::from(core.num_pinned())),
            ];
            Ok((core.counters(), core.misses(), gauges, core.reasons().collect::<Vec<_>>()))
        })?;
        let dict = PyDict::new(py);
        for (name, value) in gauges.into_iter().chain(counters.named()).chain(counters.losses()) {
            dict.set_item(name, value)?;
        }
        for miss in Miss::ALL {
            dict.set_item(format!("miss_{}", miss.name()), misses.of(miss))?;
        }
        for (reason, times) in reasons {
            dict.set_item(format!("reason_{}", reason.name()), times)?;
        }
        Ok(dict)
    }

    fn free_queue<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let ids = self.door.held(py, |state| Ok(free_queue(state.core.pool())))?;
        array(py, ids, "int32")
    }

    fn block_refs<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let holders = self.door.held(py, |state| block_refs(state.core.pool()))?;
        array(py, holders, "int32")
    }

    fn published_blocks<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let ids = self.door.held(py, |state| Ok(published_blocks(state.core.pool())))?;
        array(py, ids, "int32")
    }

    fn block_map<'py>(&self, py: Python<'py>) -> PyResult<(Bound<'py, PyAny>, Bound<'py, PyAny>, Vec<String>)> {
        let map = self.door.held(py, |state| Ok(state.core.block_map()))?;
        Ok((array(py, map.uses, "uint8")?, array(py, map.tenants, "uint8")?, map.names))
    }

    fn block_namings(&self, py: Python<'_>, block: &Bound<'_, PyAny>) -> PyResult<Vec<(u64, usize, usize)>> {
        let block = count("block", block)?;
        let namings = self.door.held(py, |state| state.core.namings(block))?;
        Ok(namings.into_iter().map(|naming| (naming.id.0, naming.group, naming.index)).collect())
    }

    #[getter]
    fn num_running(&self, py: Python<'_>) -> PyResult<usize> {
        self.door.held(py, |state| Ok(state.core.num_running()))
    }

    #[getter]
    fn num_waiting(&self, py: Python<'_>) -> PyResult<usize> {
        self.door.held(py, |state| Ok(state.core.num_waiting()))
    }

    #[getter]
    fn config<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let config = &self.config;
        let dict = PyDict::new(py);
        for (name, value) in [
            ("num_blocks", config.num_blocks),
            ("block_size", config.block_size),
            ("vocab_size", config.vocab_size),
            ("max_model_len", config.max_model_len),
            ("max_num_seqs", config.max_num_seqs),
            ("max_num_batched_tokens", config.max_num_batched_tokens),
            ("max_waiting", config.max_waiting),
            ("long_prefill_threshold", config.long_prefill_threshold),
            ("max_preemptions", config.max_preemptions),
            ("event_buffer_size", config.event_buffer_size),
            ("pin_budget", config.pin_budget),
            ("overlap_depth", config.overlap_depth),
            ("max_draft_tokens", config.max_draft_tokens),
        ] {
            dict.set_item(name, value)?;
        }
        let shares = PyDict::new(py);
        for core::shares::DomainShare { domain, blocks } in &config.domain_shares {
            shares.set_item(String::from_utf8_lossy(domain), blocks)?;
        }
        dict.set_item("domain_shares", shares)?;
        let windows = config.groups.iter().map(|group| group.window);
        dict.set_item("groups", PyTuple::new(py, windows)?)?;
        let queue = &config.queue;
        dict.set_item("policy", queue.policy.name())?;
        dict.set_item("ageing_us", queue.ageing_us)?;
        dict.set_item("latest_deadline_us", queue.latest_deadline_us)?;
        dict.set_item("prefix_band", queue.prefix_band)?;
        dict.set_item("max_pass", queue.max_pass)?;
        dict.set_item("watermark", queue.watermark)?;
        dict.set_item("estimate_growth", queue.estimate_growth)?;
        dict.set_item("no_evict", queue.no_evict)?;
        dict.set_item("preempt_for_waiting", queue.preempt_for_waiting)?;
        dict.set_item("max_waiting_tokens", queue.max_waiting_tokens)?;
        dict.set_item("max_waiting_blocks", queue.max_waiting_blocks)?;
        let tenants = PyDict::new(py);
        for (name, rules) in &queue.tenants {
            tenants.set_item(&**name, told(py, rules)?)?;
        }
        dict.set_item("tenants", tenants)?;
        dict.set_item("other_tenants", told(py, &queue.other_tenants)?)?;
        dict.set_item("enable_prefix_caching", config.enable_prefix_caching)?;
        dict.set_item("enable_partial_hits", config.enable_partial_hits)?;
        dict.set_item("explain_misses", config.explain_misses)?;
        dict.set_item("hash_algorithm", config.hash_algorithm.name())?;
        dict.set_item("hash_seed", config.hash_seed.as_slice())?;
        dict.set_item("kv_layout", config.kv_layout.as_slice())?;
        let weights = self.door.held(py, |state| Ok(state.core.hasher().weights().to_vec()))?;
        dict.set_item("weights_version", String::from_utf8_lossy(&weights))?;
        Ok(dict)
    }
}

impl Scheduler {
    /// The groups of sequences that share a prefix in step `step`.
    pub fn prefix_groups(
        &self,
        py: Python<'_>,
        step: StepId,
        group: usize,
        min_blocks: usize,
    ) -> PyResult<PrefixGroups> {
        self.door.held(py, |state| state.core.prefix_groups(step, group, min_blocks))
    }

    /// A prompt with its keys. A long one is hashed with the interpreter released.
    fn hashed(&self, py: Python<'_>, tokens: Vec<u32>, said: Said<'_, '_>) -> PyResult<Prompt> {
        let identity = said.identity()?;
        let mut hasher = self.door.held(py, |state| Ok(state.core.hasher().clone()))?;
        let prompt = if tokens.len() < LONG_PROMPT {
            hasher.prompt(tokens, identity)
        } else {
            released(py, || hasher.prompt(tokens, identity))
        };
        prompt.map_err(|refusal| crate::error::to_python(py, refusal))
    }

    /// Bytes for Python; the memory that they came in goes back to where it is kept.
    fn give<'py>(&self, py: Python<'py>, bytes: Vec<u8>) -> PyResult<Bound<'py, PyBytes>> {
        let given = PyBytes::new(py, &bytes);
        self.door.held(py, |state| {
            state.events = bytes;
            Ok(())
        })?;
        Ok(given)
    }
}

/// What a request may ask for, beside its prompt.
fn limits(
    max_tokens: &Bound<'_, PyAny>,
    min_tokens: Option<&Bound<'_, PyAny>>,
    stop_token_ids: Option<&Bound<'_, PyAny>>,
) -> PyResult<Limits> {
    Ok(Limits {
        max_tokens: count("max_tokens", max_tokens)?,
        min_tokens: min_tokens.map_or(Ok(0), |given| count("min_tokens", given))?,
        stop_tokens: stop_token_ids.map_or(Ok(Vec::new()), |ids| self::token_ids("stop_token_ids", ids))?,
    })
}

/// Writes the next plan to the arenas of `set`. Called inside the door.
fn plan_into(core: &mut core::Recorded, set: &ArraySet, now_us: u64) -> core::Result<core::plan::Sizes> {
    lend(core, &set.staging, &set.tables, |core, staging, tables| {
        core.plan(now_us, PlanMemory { staging, tables: bytemuck::cast_slice_mut(tables) })
    })
}
