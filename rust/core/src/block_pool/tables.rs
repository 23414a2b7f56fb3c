//! Tables over blocks that are held already: forks, cuts, and blocks of their own before a write (design 7).
//!
//! Before: a table of this pool. After: each entry has its holder. A refused call changes nothing.

use crate::block_pool::{BlockCopy, BlockPool, Release};
use crate::block_size::BlockSize;
use crate::block_table::BlockTable;
use crate::error::{Error, Result};
use crate::mutant::{self, Mutant};
use crate::prefix_index::KeyState;
use crate::refusal::Act;

impl BlockPool {
    /// A second table over the blocks of `table`, each with one holder more. Costs O(blocks) and copies no row.
    ///
    /// # Errors
    /// [`Error::NoSuchBlock`] or [`Error::NotHeld`] for the table of another pool; nothing changes then.
    pub fn fork(&mut self, table: &BlockTable) -> Result<BlockTable> {
        self.fork_head(table, table.len())
    }

    /// The same for the first `len` entries of `table`, or all if there are fewer.
    ///
    /// # Errors
    /// As [`BlockPool::fork`].
    pub fn fork_head(&mut self, table: &BlockTable, len: usize) -> Result<BlockTable> {
        let head = &table.blocks[..len.min(table.len())];
        let missed = usize::from(mutant::is_on(Mutant::ForkMissesLast)).min(head.len());
        self.may_fork()?;
        self.queue.hold_all(&head[..head.len() - missed])?;
        Ok(BlockTable { blocks: head.to_vec() })
    }

    /// Cuts `table` to the blocks of its first `rows` rows. The others are given back as one list, last block first. The rows that
    /// are cut off inside the last block stay written; who writes over them asks [`BlockPool::make_writable`] first.
    ///
    /// # Errors
    /// [`Error::InvalidInput`] if the table has fewer rows; [`Error::NotHeld`] or [`Error::NoSuchBlock`] for the table of another
    /// pool. Nothing changes then.
    pub fn truncate(&mut self, table: &mut BlockTable, rows: usize, size: BlockSize, when: Release) -> Result<()> {
        if rows > table.len() * size.tokens() {
            let bound = format!("must be at most {}, the rows of the table", table.len() * size.tokens());
            return Err(Error::InvalidInput { field: "rows", value: rows as i128, bound });
        }
        let kept =
            if mutant::is_on(Mutant::TruncateKeepsBlock) { rows / size.tokens() + 1 } else { size.blocks_for(rows) };
        let cut = table.blocks.get(kept..).unwrap_or(&[]);
        self.release_blocks(cut, when)?;
        table.blocks.truncate(kept);
        Ok(())
    }

    /// Makes entry `index` of `table` a block that this table alone holds and that nobody can find by a key, so that its rows may be
    /// written. A block that is so already stays: the last owner writes in place. Otherwise a free block takes its place, the
    /// old one loses a holder, and the rows to be kept must be copied before the write; `when` says from when on the old one may be
    /// handed out, should nobody hold it any more.
    ///
    /// # Errors
    /// [`Error::OutOfBlocks`]; [`Error::InvalidInput`] if the table has no such entry; [`Error::NotHeld`] or
    /// [`Error::NoSuchBlock`] if the entry is the null block or of another pool; [`Error::BeingWritten`] if a step in flight writes
    /// the rows that would be copied. Nothing changes then.
    pub fn make_writable(&mut self, table: &mut BlockTable, index: usize, when: Release) -> Result<Option<BlockCopy>> {
        let Some(&source) = table.blocks.get(index) else {
            let bound = format!("must be below {}, the blocks of the table", table.len());
            return Err(Error::InvalidInput { field: "index", value: index as i128, bound });
        };
        self.block(source.get())?;
        match (self.holders(source), self.index.state(source)) {
            (0, _) => return Err(Error::NotHeld { block: source }),
            (1, KeyState::Unnamed) => return Ok(None),
            (_, KeyState::Pending) => return Err(Error::BeingWritten { block: source }),
            _ if mutant::is_on(Mutant::WriteInPlace) => return Ok(None),
            _ => {}
        }
        self.must_be_granted(Act::Copy, source);
        self.take(table, 1)?;
        let target = table.blocks.pop().expect("the block just taken");
        table.blocks[index] = target;
        if !mutant::is_on(Mutant::CopyKeepsHolder) {
            self.release_blocks(&[source], when)?;
        }
        Ok(Some(BlockCopy { source, target }))
    }
}
