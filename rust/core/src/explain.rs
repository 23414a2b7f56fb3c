//! Why an admitted request found no more than it did: asked once, at its first admission, and counted.
//!
//! Before: an admission has found its hit; commits have published. After: [`Scheduler::miss`] tells of one request,
//! [`Scheduler::misses`] of all. Without `explain_misses` nothing is kept and nothing is asked.

use crate::error::{Error, Result};
use crate::ids::RequestId;
use crate::miss::{Miss, MissCounts};
use crate::mutant::{self, Mutant};
use crate::reason::Reason;
use crate::scheduler::Scheduler;

impl Scheduler {
    /// Why the prefix of a request was found no further at its first admission; `None` before, and without `explain_misses`.
    /// That another domain has the content is not told here.
    ///
    /// # Errors
    /// [`Error::UnknownRequest`] if it neither lives nor is among the last 1,024 that ended.
    pub fn miss(&self, id: RequestId) -> Result<Option<Miss>> {
        let miss = match self.seat_of(id) {
            Some(seat) => self.request(seat).miss,
            None => self.remembered_of(id).ok_or(Error::UnknownRequest { request: id })?.miss,
        };
        Ok(if mutant::is_on(Mutant::MissTellsOtherDomain) { miss } else { miss.map(Miss::of_request) })
    }

    /// Admitted requests by reason.
    #[must_use]
    pub fn misses(&self) -> MissCounts {
        self.misses
    }

    /// A request is admitted for the first time, with the hit that was just found.
    pub(crate) fn explain_hit(&mut self, seat: usize) {
        let Some(seen) = &self.seen else { return };
        let request = self.seats[seat].as_ref().expect("a seat in use");
        let (found, most) = (self.hit.len(), self.block_size.full_blocks(request.prompt_len - 1));
        let miss = if most == 0 {
            Miss::ShorterThanBlock
        } else if found >= most {
            Miss::Nothing
        } else if let Some(trail) = &request.trail {
            seen.why(&trail.print(found, &request.keys[found]))
        } else {
            return;
        };
        self.misses.add(miss);
        self.timelines.count(Reason::of_miss(miss, found));
        let told = if mutant::is_on(Mutant::MissTellsOtherDomain) { miss } else { miss.of_request() };
        let request = self.request_mut(seat);
        request.miss = Some(miss);
        let id = request.id();
        self.timelines.tell(seat, id, self.steps, Reason::of_miss(told, found));
    }

    /// Blocks `blocks` of a request were published.
    pub(crate) fn note_published(&mut self, seat: usize, blocks: std::ops::Range<usize>) {
        let Some(seen) = &mut self.seen else { return };
        let request = self.seats[seat].as_mut().expect("a seat in use");
        request.extend_trail(&mut self.hasher, blocks.end * self.block_size.tokens());
        let Some(trail) = &request.trail else { return };
        for at in blocks {
            if !mutant::is_on(Mutant::MissForgetsPublished) {
                seen.note(&trail.print(at, &request.keys[at]));
            }
        }
    }
}
