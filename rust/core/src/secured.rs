//! Requests that were preempted `max_preemptions` times: they come back with all that they may ever need, and are never victims again.
//!
//! Before: such a request waits at its old place. After: it is *secured*: admitted only when its whole need is promised, all its rows up to
//! `max_tokens`, and as it finds no hit that is not confirmed it never needs more. Nobody takes its blocks or its promise. Who ranks above
//! and finds no other victim waits for it; it computes in every step and ends, so that wait ends too.
//!
//! **The bound.** A request is preempted at most `max_preemptions` times, by default 16: 0 means never. What a caller does to it may
//! cost it one more each time: a fork or a second sequence, whose tail one of both copies; a truncation, which gives blocks back; a
//! pin, which takes them from all. For if a secured request lacks a block all the same, and nobody else can move, it is preempted.
//!
//! If the pool, or its tenant's quota, will never hold its whole need, it gets all that there is when it is alone there.

use crate::mutant::{self, Mutant};
use crate::request::Place;
use crate::scheduler::Scheduler;

impl Scheduler {
    /// Whether the request at `seat` is secured, or will be by its admission.
    pub(crate) fn is_secured(&self, seat: usize) -> bool {
        let request = self.request(seat);
        if self.config.queue.no_evict || mutant::is_on(Mutant::WornUnsecured) {
            return false;
        }
        request.secured || request.place == Place::Waiting && request.preemptions >= self.config.max_preemptions
    }

    /// Whether an admission of the request at `seat` promises all that it may ever need.
    pub(crate) fn promises_whole(&self, seat: usize) -> bool {
        self.config.queue.no_evict || self.is_secured(seat)
    }

    /// Whether the running request at `seat` may lose its blocks to others.
    pub(crate) fn may_lose(&self, seat: usize) -> bool {
        !self.request(seat).secured || mutant::is_on(Mutant::SecuredTaken)
    }

    /// Whether below the running request of highest rank somebody runs whom it may not preempt.
    pub(crate) fn secures_somebody(&self) -> bool {
        self.running.iter().skip(1).any(|&seat| !self.may_lose(seat))
    }

    /// Of `rest`, what the request at `seat`, which is about to be secured with a hit of `named` blocks of which `taken` are free, is
    /// promised where there will never be more: all that is left to its tenant or in the pool, if nobody else holds any.
    pub(crate) fn as_far_as_there_is(&self, seat: usize, rest: u32, named: u32, taken: u32) -> u32 {
        let known = self.need_for(seat, self.hit.len() * self.block_size.tokens(), self.hit.len());
        let mut most = rest;
        if self.tenants.of(self.asks[seat].tenant).held == 0 {
            most = most.min(self.room_of_tenant(&self.asks[seat]).saturating_sub(named));
        }
        if self.running.is_empty() && self.pool.num_parked() == 0 {
            most = most.min(self.pool.num_free().saturating_sub(self.promised).saturating_sub(taken));
        }
        most.max(known.min(rest))
    }

    /// Nobody can move, though memory is promised to those that are secured: the lowest of them that stands in the way goes. Only after what
    /// a caller did to one of them. True if somebody went.
    pub(crate) fn end_securing(&mut self) -> bool {
        if self.flight.oldest().is_some() || self.refused.is_some() {
            return false;
        }
        let Some((&first, others)) = self.running.split_first() else { return false };
        let Some(&victim) = others.iter().rev().find(|&&seat| !self.may_lose(seat)) else { return false };
        self.note_preemption(victim, first);
        self.preempt(victim);
        true
    }
}
