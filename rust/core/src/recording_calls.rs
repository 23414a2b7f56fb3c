//! The calls of a recording, one way and back: see [`recording`](crate::recording) for the form of numbers and texts.

use crate::chain::{Adapter, Domain, Identity, Media, Salt};
use crate::deadlines::FOREVER;
use crate::error::Result;
use crate::ids::TokenId;
use crate::rank::{Asked, Turn};
use crate::recording::{Call, Entry};
use crate::recording_numbers::{Left, fold, put, put_text};
use crate::request::Limits;
use crate::retention::{Ranges, Worth};

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

impl Left<'_> {
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

    fn turn(&mut self) -> Result<Turn> {
        let Ok(priority) = i32::try_from(self.signed()?) else {
            return self.broken("a priority must have 32 bits at most");
        };
        Ok(Turn { priority, deadline_us: self.number()?, queue_deadline_us: self.number()? })
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
}
