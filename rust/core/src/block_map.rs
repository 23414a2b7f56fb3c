//! What every block is doing at this moment, a byte each, and who names one: for whoever looks at the pool as a whole.
//!
//! Before: somebody watches. After: bytes that a picture can be painted from. Reads the state of each block and every running table
//! once, and changes nothing; costs nothing when nobody looks.

use crate::block_table::BlockTable;
use crate::error::Result;
use crate::ids::{BlockId, RequestId};
use crate::mutant::{self, Mutant};
use crate::prefix_index::KeyState;
use crate::scheduler::Scheduler;

/// What a block is doing. The numbers are stable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum BlockUse {
    /// Block 0, which is never handed out.
    Null = 0,
    /// Free, and holds nothing that could be found.
    Free = 1,
    /// Free, and found by its content until it is taken.
    Cached = 2,
    /// One table names it.
    Held = 3,
    /// Several tables name it.
    Shared = 4,
    /// A pin names it, whoever else does.
    Pinned = 5,
    /// Nobody names it any more but a step or a copy in flight.
    Parked = 6,
}

/// Bytes of [`BlockMap::tenants`] that are no tenant.
pub const NOBODY: u8 = 0;
/// Tables of several tenants name the block, or of one that came after the first 254.
pub const SEVERAL: u8 = 255;

/// The pool as it is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BlockMap {
    /// [num_blocks] a [`BlockUse`] each.
    pub uses: Vec<u8>,
    /// [num_blocks] whose running sequences name it: [`NOBODY`], [`SEVERAL`], or a number `n` for `names[n - 1]`.
    pub tenants: Vec<u8>,
    /// Tenants with running sequences, 254 at most.
    pub names: Vec<String>,
}

/// A place in a running sequence's tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Naming {
    /// Whose table.
    pub id: RequestId,
    /// Which of its tables.
    pub group: usize,
    /// Which entry of it: it holds tokens from `index * block_size` on.
    pub index: usize,
}

impl Scheduler {
    /// What every block is doing.
    #[must_use]
    pub fn block_map(&self) -> BlockMap {
        let num_blocks = self.pool.num_blocks();
        let mut map = BlockMap { uses: Vec::new(), tenants: vec![NOBODY; num_blocks as usize], names: Vec::new() };
        map.uses.extend((0..num_blocks).map(|id| self.use_of(BlockId(id)) as u8));
        for block in self.pinned_blocks() {
            map.uses[block.index()] = BlockUse::Pinned as u8;
        }
        let mut numbers = vec![NOBODY; self.tenants.all().len()];
        for &seat in &self.running {
            let tenant = self.asks[seat].tenant;
            let number = &mut numbers[tenant as usize];
            if *number == NOBODY {
                *number = if map.names.len() < usize::from(SEVERAL - 1) {
                    map.names.push(self.tenants.of(tenant).name().to_owned());
                    map.names.len() as u8
                } else {
                    SEVERAL
                };
            }
            for block in self.request(seat).tables().flat_map(BlockTable::blocks) {
                let whose = &mut map.tenants[block.index()];
                let is_first = *whose == NOBODY || mutant::is_on(Mutant::MapKeepsLastTenant);
                *whose = if is_first || *whose == *number { *number } else { SEVERAL };
            }
        }
        map.tenants[BlockId::NULL.index()] = NOBODY;
        map
    }

    /// Where running sequences name `block`, the highest rank first.
    ///
    /// # Errors
    /// [`Error::NoSuchBlock`](crate::error::Error::NoSuchBlock) at or past the end of the pool.
    pub fn namings(&self, block: u32) -> Result<Vec<Naming>> {
        let block = self.pool.block(block)?;
        let mut found = Vec::new();
        for request in self.running.iter().map(|&seat| self.request(seat)) {
            for (group, table) in request.tables().enumerate() {
                let at = table.blocks().iter().position(|&named| named == block && block != BlockId::NULL);
                found.extend(at.map(|index| Naming { id: request.id(), group, index }));
            }
        }
        Ok(found)
    }

    fn use_of(&self, block: BlockId) -> BlockUse {
        if block == BlockId::NULL {
            return BlockUse::Null;
        }
        match self.pool.holders(block) {
            0 if !self.pool.is_free(block) && !mutant::is_on(Mutant::MapShowsParkedFree) => BlockUse::Parked,
            0 if self.pool.index().state(block) == KeyState::Published => BlockUse::Cached,
            0 => BlockUse::Free,
            1 => BlockUse::Held,
            _ => BlockUse::Shared,
        }
    }
}
