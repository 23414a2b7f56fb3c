//! The fields of a recording's records, one way and back: see [`recording`](crate::recording) for the form of numbers and texts.

use crate::algorithm::Algorithm;
use crate::chain::{Adapter, Domain, Identity, Media, Salt};
use crate::config::Config;
use crate::deadlines::FOREVER;
use crate::error::Result;
use crate::group::GroupSpec;
use crate::ids::TokenId;
use crate::mutant::{self, Mutant};
use crate::policy::PolicyKind;
use crate::queue_rules::QueueRules;
use crate::rank::{Asked, Turn};
use crate::recording::{Call, Check, Entry, FRAME, checksum, refused};
use crate::request::Limits;
use crate::retention::{Ranges, Worth};
use crate::shares::DomainShare;
use crate::tenants::TenantRules;

pub(crate) fn put_entry(out: &mut Vec<u8>, entry: &Entry) {
    match &entry.call {
        Call::Submit { tokens, identity, limits, tenant, turn, siblings, now_us } => {
            let asked = Asked { tenant, turn: *turn, siblings: *siblings };
            put_submit(out, tokens, identity, limits, &asked, *now_us);
        }
        Call::SetRetention { request, ranges } => put_retention(out, *request, ranges),
        Call::Abort { request } => put_numbers(out, 3, &[*request]),
        Call::EndSequence { request } => put_numbers(out, 15, &[*request]),
        Call::Finish { request } => put_numbers(out, 4, &[*request]),
        Call::Fork { request, limits, now_us } => put_fork(out, *request, limits, *now_us),
        Call::Truncate { request, num_tokens } => put_numbers(out, 6, &[*request, *num_tokens]),
        Call::ResetPrefixCache => put_numbers(out, 7, &[]),
        Call::Pin { tokens, identity } => put_pin(out, tokens, identity),
        Call::Unpin { pin } => put_numbers(out, 9, &[*pin]),
        Call::SetWeightsVersion { version } => put_weights(out, version),
        Call::Propose { rows, starts, tokens } => put_propose(out, rows, starts, tokens),
        Call::Plan { now_us } => put_numbers(out, 11, &[*now_us]),
        Call::Commit { step, tokens, starts, now_us } => put_commit(out, *step, tokens, starts, *now_us),
        Call::Fail { step } => put_numbers(out, 13, &[*step]),
    }
    put_outcome(out, entry.outcome, &entry.digests);
}

/// A call that is given numbers only.
pub(crate) fn put_numbers(out: &mut Vec<u8>, kind: u8, numbers: &[u64]) {
    out.push(kind);
    numbers.iter().for_each(|&number| put(out, number));
}

pub(crate) fn put_submit(
    out: &mut Vec<u8>,
    tokens: &[TokenId],
    identity: &Identity,
    limits: &Limits,
    asked: &Asked<'_>,
    now_us: u64,
) {
    out.push(1);
    put_tokens(out, tokens);
    put_identity(out, identity);
    put_limits(out, limits);
    let Asked { tenant, turn: Turn { priority, deadline_us, queue_deadline_us }, siblings } = *asked;
    put_text(out, tenant.as_bytes());
    put(out, fold(i64::from(priority)));
    [deadline_us, queue_deadline_us, u64::from(siblings), now_us].into_iter().for_each(|time_us| put(out, time_us));
}

pub(crate) fn put_retention(out: &mut Vec<u8>, request: u64, ranges: &Ranges) {
    put_numbers(out, 2, &[request]);
    let (steps, rest) = ranges.parts();
    put(out, steps.len() as u64);
    for (end, worth) in steps {
        put(out, u64::from(*end));
        put_worth(out, worth);
    }
    put_worth(out, &rest);
}

pub(crate) fn put_fork(out: &mut Vec<u8>, request: u64, limits: &Limits, now_us: u64) {
    put_numbers(out, 5, &[request]);
    put_limits(out, limits);
    put(out, now_us);
}

pub(crate) fn put_pin(out: &mut Vec<u8>, tokens: &[TokenId], identity: &Identity) {
    out.push(8);
    put_tokens(out, tokens);
    put_identity(out, identity);
}

pub(crate) fn put_weights(out: &mut Vec<u8>, version: &[u8]) {
    out.push(10);
    put_text(out, version);
}

/// `starts` rises by one or not at all, as a rule: a byte each.
pub(crate) fn put_commit(out: &mut Vec<u8>, step: u64, tokens: &[i64], starts: &[i64], now_us: u64) {
    put_numbers(out, 12, &[step, now_us]);
    put_signed(out, tokens);
    put_starts(out, starts);
}

pub(crate) fn put_propose(out: &mut Vec<u8>, rows: &[i64], starts: &[i64], tokens: &[i64]) {
    out.push(14);
    put_signed(out, rows);
    put_starts(out, starts);
    put_signed(out, tokens);
}

fn put_signed(out: &mut Vec<u8>, numbers: &[i64]) {
    put(out, numbers.len() as u64);
    numbers.iter().for_each(|&number| put(out, fold(number)));
}

fn put_starts(out: &mut Vec<u8>, starts: &[i64]) {
    put(out, starts.len() as u64);
    let mut before = 0_i64;
    for &start in starts {
        put(out, fold(start.wrapping_sub(before)));
        before = start;
    }
}

pub(crate) fn put_outcome(out: &mut Vec<u8>, outcome: u64, digests: &[u32]) {
    out.extend_from_slice(&outcome.to_le_bytes());
    put(out, digests.len() as u64);
    digests.iter().for_each(|digest| out.extend_from_slice(&digest.to_le_bytes()));
}

fn put(out: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        out.push(number as u8 | 0x80);
        number >>= 7;
    }
    out.push(number as u8);
}

fn fold(number: i64) -> u64 {
    (number.wrapping_shl(1) ^ (number >> 63)) as u64
}

fn put_text(out: &mut Vec<u8>, text: &[u8]) {
    put(out, text.len() as u64);
    out.extend_from_slice(text);
}

fn put_tokens(out: &mut Vec<u8>, tokens: &[TokenId]) {
    put(out, tokens.len() as u64);
    tokens.iter().for_each(|&token| put(out, u64::from(token)));
}

fn put_worth(out: &mut Vec<u8>, worth: &Worth) {
    out.push(worth.priority);
    put(out, if worth.time_us == FOREVER { u64::MAX } else { worth.time_us });
}

fn put_limits(out: &mut Vec<u8>, limits: &Limits) {
    let Limits { max_tokens, min_tokens, stop_tokens } = limits;
    put(out, u64::from(*max_tokens));
    put(out, u64::from(*min_tokens));
    put_tokens(out, stop_tokens);
}

fn put_identity(out: &mut Vec<u8>, identity: &Identity) {
    let Identity { domain, public_tokens, adapter, salts, media } = identity;
    match domain {
        Domain::Public => out.push(0),
        Domain::Deployment => out.push(1),
        Domain::Tenant(name) => {
            out.push(2);
            put_text(out, name);
        }
    }
    put(out, *public_tokens as u64);
    out.push(u8::from(adapter.is_some()));
    if let Some(Adapter { name, load, path }) = adapter {
        put_text(out, name);
        put(out, *load);
        put_text(out, path);
    }
    put(out, salts.len() as u64);
    for Salt { start, end, salt } in salts {
        put(out, *start as u64);
        put(out, *end as u64);
        put_text(out, salt);
    }
    put(out, media.len() as u64);
    for Media { start, end, id } in media {
        put(out, *start as u64);
        put(out, *end as u64);
        put_text(out, id);
    }
}

pub(crate) fn put_config(out: &mut Vec<u8>, config: &Config) {
    // Every field by name: a new one does not compile until it stands here, in `Left::config`, and in another `VERSION`.
    let Config {
        num_blocks,
        block_size,
        vocab_size,
        max_model_len,
        max_num_seqs,
        max_num_batched_tokens,
        max_waiting,
        long_prefill_threshold,
        max_preemptions,
        overlap_depth,
        max_draft_tokens,
        groups,
        enable_prefix_caching,
        hash_algorithm,
        hash_seed,
        event_buffer_size,
        kv_layout,
        weights_version,
        explain_misses,
        pin_budget,
        domain_shares,
        enable_partial_hits,
        queue,
    } = config;
    let numbers = [
        num_blocks,
        block_size,
        vocab_size,
        max_model_len,
        max_num_seqs,
        max_num_batched_tokens,
        max_waiting,
        long_prefill_threshold,
        max_preemptions,
        event_buffer_size,
        pin_budget,
        overlap_depth,
        max_draft_tokens,
    ];
    out.push(0);
    numbers.into_iter().for_each(|&number| put(out, u64::from(number)));
    put(out, groups.len() as u64);
    for GroupSpec { window } in groups {
        put(out, window.map_or(0, |window| u64::from(window) + 1));
    }
    out.extend([enable_prefix_caching, explain_misses, enable_partial_hits].map(|&flag| u8::from(flag)));
    put_text(out, hash_algorithm.name().as_bytes());
    [hash_seed, kv_layout, weights_version].into_iter().for_each(|text| put_text(out, text));
    let QueueRules {
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
    } = queue;
    put_text(out, policy.name().as_bytes());
    for number in [*ageing_us, *latest_deadline_us, u64::from(*prefix_band), u64::from(*max_pass)] {
        put(out, number);
    }
    put(out, u64::from(*watermark));
    out.extend([*estimate_growth, *no_evict, *preempt_for_waiting].map(u8::from));
    put(out, *max_waiting_tokens);
    put(out, *max_waiting_blocks);
    put(out, tenants.len() as u64);
    for (name, rules) in tenants {
        put_text(out, name.as_bytes());
        put_rules(out, rules);
    }
    put_rules(out, other_tenants);
    put(out, domain_shares.len() as u64);
    for DomainShare { domain, blocks } in domain_shares {
        put_text(out, domain);
        put(out, u64::from(*blocks));
    }
}

fn put_rules(out: &mut Vec<u8>, rules: &TenantRules) {
    let TenantRules { weight, hard_blocks, soft_blocks, max_waiting, max_waiting_tokens, max_waiting_blocks } = *rules;
    for number in [weight, hard_blocks, soft_blocks] {
        put(out, u64::from(number));
    }
    for number in [max_waiting, max_waiting_tokens, max_waiting_blocks] {
        put(out, number);
    }
}

/// Bytes that are not read yet.
pub(crate) struct Left<'a> {
    pub bytes: &'a [u8],
    pub at: usize,
}

impl<'a> Left<'a> {
    pub fn take<const N: usize>(&mut self) -> Result<[u8; N]> {
        let Some(taken) = self.bytes[self.at..].first_chunk() else { return self.broken("the bytes end here") };
        self.at += N;
        Ok(*taken)
    }

    /// The body of the next record, and its checksum; none if the bytes end within it.
    pub fn record(&mut self, before: Check) -> Result<Option<(Left<'a>, Check)>> {
        let rest = &self.bytes[self.at..];
        let Some(len) = rest.first_chunk().map(|&len| u32::from_le_bytes(len) as usize) else { return Ok(None) };
        if rest.len() < len.saturating_add(FRAME) {
            return Ok(None);
        }
        let check = checksum(before, &rest[..4 + len]);
        if rest[4 + len..][..8] != check && !mutant::is_on(Mutant::ChecksumIgnored) {
            return self.broken("the checksum of this record is wrong");
        }
        let body = Left { bytes: &self.bytes[..self.at + 4 + len], at: self.at + 4 };
        self.at += len + FRAME;
        Ok(Some((body, check)))
    }

    pub fn end(&self) -> Result<()> {
        if self.at == self.bytes.len() { Ok(()) } else { self.broken("bytes follow in this record") }
    }

    fn number(&mut self) -> Result<u64> {
        let mut number = 0_u64;
        for shift in (0..64).step_by(7) {
            let [byte] = self.take()?;
            let part = u64::from(byte & 0x7F);
            if part << shift >> shift != part {
                break;
            }
            number |= part << shift;
            if byte < 0x80 {
                if byte == 0 && shift > 0 && !mutant::is_on(Mutant::RecordingNumberTooLong) {
                    break;
                }
                return Ok(number);
            }
        }
        self.broken("a number must be LEB128 of 64 bits at most, without needless bytes")
    }

    fn number32(&mut self) -> Result<u32> {
        match u32::try_from(self.number()?) {
            Ok(number) => Ok(number),
            Err(_) => self.broken("a number must have 32 bits at most"),
        }
    }

    fn signed(&mut self) -> Result<i64> {
        let folded = self.number()?;
        Ok((folded >> 1) as i64 ^ -((folded & 1) as i64))
    }

    /// How many follow, each of `bytes` bytes at least: a count that lies is found out before it takes memory.
    fn count(&mut self, bytes: usize) -> Result<usize> {
        let count = self.number()?;
        if count > ((self.bytes.len() - self.at) / bytes) as u64 {
            return self.broken("more are announced than there are bytes for");
        }
        Ok(count as usize)
    }

    fn list<T>(&mut self, bytes: usize, read: impl Fn(&mut Self) -> Result<T>) -> Result<Vec<T>> {
        let count = self.count(bytes)?;
        (0..count).map(|_| read(self)).collect()
    }

    fn flag(&mut self) -> Result<bool> {
        match self.take()? {
            [0] => Ok(false),
            [1] => Ok(true),
            _ => self.broken("must be 0 or 1"),
        }
    }

    fn text(&mut self) -> Result<Vec<u8>> {
        let len = self.count(1)?;
        let text = self.bytes[self.at..self.at + len].to_vec();
        self.at += len;
        Ok(text)
    }

    fn tokens(&mut self) -> Result<Vec<TokenId>> {
        self.list(1, Self::number32)
    }

    fn worth(&mut self) -> Result<Worth> {
        let [priority] = self.take()?;
        Ok(Worth { priority, time_us: self.number()? })
    }

    fn limits(&mut self) -> Result<Limits> {
        Ok(Limits { max_tokens: self.number32()?, min_tokens: self.number32()?, stop_tokens: self.tokens()? })
    }

    fn identity(&mut self) -> Result<Identity> {
        let domain = match self.take()? {
            [0] => Domain::Public,
            [1] => Domain::Deployment,
            [2] => Domain::Tenant(self.text()?.into()),
            _ => return self.broken("a domain is public (0), the deployment (1) or a tenant (2)"),
        };
        let public_tokens = self.number()? as usize;
        let adapter = if self.flag()? {
            Some(Adapter { name: self.text()?.into(), load: self.number()?, path: self.text()?.into() })
        } else {
            None
        };
        let range = |left: &mut Self| Ok((left.number()? as usize, left.number()? as usize, left.text()?.into()));
        let salts = self.list(3, range)?.into_iter().map(|(start, end, salt)| Salt { start, end, salt }).collect();
        let media = self.list(3, range)?.into_iter().map(|(start, end, id)| Media { start, end, id }).collect();
        Ok(Identity { domain, public_tokens, adapter, salts, media })
    }

    pub fn config(&mut self) -> Result<Config> {
        if self.take()? != [0] {
            return self.broken("the first record must be a configuration (0)");
        }
        let mut numbers = [0; 13];
        for number in &mut numbers {
            *number = self.number32()?;
        }
        let windows = self.list(1, Self::number)?;
        let mut groups = Vec::new();
        for window in windows {
            let Ok(window) = u32::try_from(window.saturating_sub(1)).map(|size| (window > 0).then_some(size)) else {
                return self.broken("a window must have 32 bits at most");
            };
            groups.push(GroupSpec { window });
        }
        let (enable_prefix_caching, explain_misses, enable_partial_hits) = (self.flag()?, self.flag()?, self.flag()?);
        let name = self.text()?;
        let algorithm = std::str::from_utf8(&name).ok().and_then(Algorithm::from_name);
        let Some(hash_algorithm) = algorithm else { return self.broken("must be the name of a hash algorithm") };
        let [
            num_blocks,
            block_size,
            vocab_size,
            max_model_len,
            max_num_seqs,
            max_num_batched_tokens,
            max_waiting,
            long_prefill_threshold,
            max_preemptions,
            event_buffer_size,
            pin_budget,
            overlap_depth,
            max_draft_tokens,
        ] = numbers;
        Ok(Config {
            num_blocks,
            block_size,
            vocab_size,
            max_model_len,
            max_num_seqs,
            max_num_batched_tokens,
            max_waiting,
            long_prefill_threshold,
            max_preemptions,
            overlap_depth,
            max_draft_tokens,
            groups,
            enable_prefix_caching,
            hash_algorithm,
            hash_seed: self.text()?,
            kv_layout: self.text()?,
            weights_version: self.text()?,
            event_buffer_size,
            explain_misses,
            pin_budget,
            enable_partial_hits,
            queue: self.queue()?,
            domain_shares: self
                .list(2, |left| Ok(DomainShare { domain: left.text()?.into(), blocks: left.number32()? }))?,
        })
    }

    fn queue(&mut self) -> Result<QueueRules> {
        let Some(policy) = PolicyKind::named(&self.string()?) else {
            return self.broken("must be the name of a policy");
        };
        let (ageing_us, latest_deadline_us) = (self.number()?, self.number()?);
        let (prefix_band, max_pass) = (self.number32()?, self.number32()?);
        let watermark = self.number32()?;
        let (estimate_growth, no_evict, preempt_for_waiting) = (self.flag()?, self.flag()?, self.flag()?);
        let (max_waiting_tokens, max_waiting_blocks) = (self.number()?, self.number()?);
        let tenants = self.list(7, |left| Ok((left.string()?.into(), left.rules()?)))?;
        let other_tenants = self.rules()?;
        Ok(QueueRules {
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
        })
    }

    fn rules(&mut self) -> Result<TenantRules> {
        Ok(TenantRules {
            weight: self.number32()?,
            hard_blocks: self.number32()?,
            soft_blocks: self.number32()?,
            max_waiting: self.number()?,
            max_waiting_tokens: self.number()?,
            max_waiting_blocks: self.number()?,
        })
    }

    fn turn(&mut self) -> Result<Turn> {
        let Ok(priority) = i32::try_from(self.signed()?) else {
            return self.broken("a priority must have 32 bits at most");
        };
        Ok(Turn { priority, deadline_us: self.number()?, queue_deadline_us: self.number()? })
    }

    fn string(&mut self) -> Result<String> {
        match String::from_utf8(self.text()?) {
            Ok(text) => Ok(text),
            Err(_) => self.broken("must be UTF-8"),
        }
    }

    pub fn entry(&mut self) -> Result<Entry> {
        let [kind] = self.take()?;
        let call = match kind {
            1 => {
                let (tokens, identity) = (self.tokens()?, self.identity()?);
                let (limits, tenant) = (self.limits()?, self.string()?);
                let (turn, siblings) = (self.turn()?, self.number32()?);
                Call::Submit { tokens, identity, limits, tenant, turn, siblings, now_us: self.number()? }
            }
            2 => Call::SetRetention { request: self.number()?, ranges: self.ranges()? },
            3 => Call::Abort { request: self.number()? },
            4 => Call::Finish { request: self.number()? },
            5 => Call::Fork { request: self.number()?, limits: self.limits()?, now_us: self.number()? },
            6 => Call::Truncate { request: self.number()?, num_tokens: self.number()? },
            7 => Call::ResetPrefixCache,
            8 => Call::Pin { tokens: self.tokens()?, identity: self.identity()? },
            9 => Call::Unpin { pin: self.number()? },
            10 => Call::SetWeightsVersion { version: self.text()? },
            11 => Call::Plan { now_us: self.number()? },
            12 => {
                let (step, now_us) = (self.number()?, self.number()?);
                Call::Commit { step, tokens: self.list(1, Self::signed)?, starts: self.starts()?, now_us }
            }
            13 => Call::Fail { step: self.number()? },
            14 => {
                let (rows, starts) = (self.list(1, Self::signed)?, self.starts()?);
                Call::Propose { rows, starts, tokens: self.list(1, Self::signed)? }
            }
            15 => Call::EndSequence { request: self.number()? },
            _ => return self.broken("no call has this number"),
        };
        let outcome = u64::from_le_bytes(self.take()?);
        let digests = self.list(4, |left| left.take().map(u32::from_le_bytes))?;
        Ok(Entry { call, outcome, digests })
    }

    fn starts(&mut self) -> Result<Vec<i64>> {
        let mut starts = self.list(1, Self::signed)?;
        let mut before = 0_i64;
        for start in &mut starts {
            before = before.wrapping_add(*start);
            *start = before;
        }
        Ok(starts)
    }

    fn ranges(&mut self) -> Result<Ranges> {
        let steps = self.list(3, |left| Ok((left.number32()?, left.worth()?)))?;
        let rest = self.worth()?;
        match Ranges::from_parts(steps, rest) {
            Some(ranges) => Ok(ranges),
            None => self.broken("the ends of ranges must rise, and priorities be 100 at most"),
        }
    }

    pub fn broken<T>(&self, bound: &str) -> Result<T> {
        refused(self.at, bound)
    }
}
