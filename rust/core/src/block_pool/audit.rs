//! Recounts the pool from its tables: A1 to A4.
//!
//! Before: all tables that are alive. After: the first invariant that does not hold, if any. Reads only.

use crate::block_pool::{BlockPool, NOT_PARKED};
use crate::block_table::BlockTable;
use crate::error::{Error, Result};
use crate::free_queue::LANES;
use crate::ids::BlockId;
use crate::prefix_index::KeyState;

impl BlockPool {
    /// Recounts A1 to A4 from `tables`, all tables that are alive.
    ///
    /// # Errors
    /// [`Error::Audit`] with the first invariant that does not hold.
    pub fn audit<'a>(&self, tables: impl IntoIterator<Item = &'a BlockTable>) -> Result<()> {
        let wrong = |check: &'static str, detail: String| Err(Error::Audit { check, detail });
        let mut named = vec![0u32; self.num_blocks() as usize];
        for block in tables.into_iter().flat_map(|table| &table.blocks) {
            named[block.index()] += u32::from(*block != BlockId::NULL);
        }
        let holders: Vec<u32> = (0..self.num_blocks()).map(|id| self.holders(BlockId(id))).collect();
        if let Some(id) = (0..named.len()).find(|&id| named[id] != holders[id]) {
            return wrong("A2", format!("block {id} has {} holders, tables name it {} times", holders[id], named[id]));
        }
        self.queue.audit_walks()?;
        let mut places = vec![0u32; holders.len()];
        let parked = self.parked.iter().copied().filter(|&block| block != BlockId::NULL);
        for block in self.queue.iter().chain(parked) {
            places[block.index()] += 1;
        }
        let stand = |id: &usize| self.parked_at[*id] != NOT_PARKED;
        let misplaced = |id: &usize| self.parked[self.parked_at[*id] as usize].index() != *id;
        if let Some(id) = (0..named.len()).filter(stand).find(misplaced) {
            return wrong("A3", format!("block {id} does not stand at its place among the parked blocks"));
        }
        let held = holders.iter().filter(|&&holders| holders > 0).count();
        let total = self.queue.len() as usize + held + self.num_parked as usize + 1;
        if total != holders.len() || holders[0] != 0 || places[0] != 0 {
            return wrong("A1", format!("free + held + parked + null is {total} of {}", holders.len()));
        }
        for (id, (&places, &holders)) in places.iter().zip(&holders).enumerate().skip(1) {
            if places != u32::from(holders == 0) {
                return wrong(
                    "A3",
                    format!("block {id} has {holders} holders and stands in {places} places of the queue"),
                );
            }
        }
        self.queue.audit_places()?;
        self.index.audit()?;
        self.audit_shares()?;
        self.partial().map_or(Ok(()), |partial| partial.audit(&self.index))
    }

    /// Content is counted for its owner, and waits in its owner's lanes.
    fn audit_shares(&self) -> Result<()> {
        let wrong = |detail: String| Err(Error::Audit { check: "A4", detail });
        let Some(shares) = self.shares() else { return Ok(()) };
        let mut content = vec![0; shares.owners()];
        for block in self.index.blocks() {
            let owner = usize::from(shares.owner(block));
            content[owner] += u32::from(self.index.state(block) == KeyState::Published);
            if let Some(lane) = self.queue.lane(block).filter(|lane| usize::from(*lane) / LANES != owner) {
                return wrong(format!("block {} of owner {owner} stands in lane {lane}", block.get()));
            }
        }
        match (0..content.len()).find(|&owner| content[owner] != shares.content(owner)) {
            Some(owner) => {
                let (counted, found) = (shares.content(owner), content[owner]);
                wrong(format!("{counted} blocks of owner {owner} are counted, {found} are published"))
            }
            None => Ok(()),
        }
    }
}
