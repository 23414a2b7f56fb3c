//! The driver knows the sequences of a request: born with its first output, each with choices of its own, ended as one from outside.

use blocktable_core::ids::RequestId;
use blocktable_core::notes::Whereabouts;
use blocktable_core::request::End;

use super::step::Entry;
use super::{Client, Driver};
use crate::broken::{Checked, broken, ensure};

/// What sets the choices of a sequence apart that is not the first of its request.
pub fn salt_of(id: u64) -> u64 {
    id.wrapping_mul(0x5851_F42D_4C95_7F2D)
}

impl Driver {
    /// The salt of a sequence, which may not be born yet.
    pub(super) fn salt(&self, id: u64) -> u64 {
        self.clients.get(&id).map_or_else(|| salt_of(id), |client| client.salt)
    }

    /// Ends one sequence, whichever it is.
    pub fn end_sequence(&mut self, id: u64) -> Checked {
        let did_end = self.scheduler.end_sequence(RequestId(id));
        self.leave(id, did_end, End::Aborted)
    }

    /// Ends all sequences of a request, if `id` is the first of several.
    pub(super) fn leave_family(&mut self, id: u64, did_end: bool) -> Checked<bool> {
        let is_member = |client: &&Client| client.family == Some(id);
        let members: Vec<u64> = self.live().filter(is_member).map(|client| client.id).collect();
        if members.is_empty() {
            return Ok(false);
        }
        ensure(did_end, "leave", || format!("sequences {members:?} live; ending request {id} says that none did"))?;
        for member in members {
            self.lose_writer(member);
            self.mark_ended(member, End::Aborted as i64);
        }
        self.seen.families_left += 1;
        Ok(true)
    }

    /// The sequences beside `id` begin, each with the token that was sampled for it; the ends that these bring.
    pub(super) fn bear(&mut self, entry: &Entry, given: &[Option<u32>]) -> Checked<Vec<(u64, i64)>> {
        let mut ended = Vec::new();
        let parent = self.clients.get_mut(&entry.id).expect("a known request");
        parent.costs += parent.siblings;
        (parent.siblings, parent.may_copy, parent.granted) = (0, true, parent.granted.max(parent.computed));
        let parent = parent.clone();
        for (id, token) in (entry.id..).zip(given).skip(1) {
            let mut child = Client { id, is_untold: true, salt: salt_of(id), row: None, ..parent.clone() };
            (child.preemptions, child.granted, child.passes, child.rank.arrival) = (0, parent.computed, 0, id);
            child.drafts.clear();
            child.answer = self.answer_of(&child);
            self.clients.insert(id, child);
            self.expected.forks += 1;
            self.seen.siblings += 1;
            ended.extend(self.take_token(id, token.expect("all are given"))?);
            let Some(client) = self.clients.get_mut(&id).filter(|client| client.is_live()) else { continue };
            let told = self.scheduler.explain(RequestId(id));
            if told.or_else(|error| broken("books", error.to_string()))?.place == Whereabouts::Waiting {
                (client.is_untold, client.is_mixed, client.queued) = (false, false, client.tokens.len());
                let tenant = client.asked.tenant;
                let has_quota = self.rules_of(tenant).hard_blocks < u32::MAX;
                let may_wait = has_quota || (self.config().queue.no_evict && !self.promises_all());
                ensure(may_wait, "siblings", || format!("sequence {id} waits, and there was a row for it"))?;
            }
        }
        Ok(ended)
    }
}
