//! A pool that several owners share, and the guard of one held block: it moves, cannot be cloned, and gives its block back when it goes.
//!
//! Before: who embeds the pool without a scheduler. After: [`BlockPool`]. A second release does not compile, as only the guard's drop
//! can release. A guard that is leaked (`mem::forget`) keeps its block held for ever and breaks nothing else. Guards keep the pool alive.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::block_pool::{BlockPool, Release};
use crate::block_table::BlockTable;
use crate::error::Result;
use crate::ids::BlockId;
use crate::mutant::{self, Mutant};

/// A pool behind a lock. Clones name the same pool.
#[derive(Clone)]
pub struct SharedPool(Arc<Mutex<BlockPool>>);

impl SharedPool {
    /// Shares `pool`.
    #[must_use]
    pub fn new(pool: BlockPool) -> Self {
        SharedPool(Arc::new(Mutex::new(pool)))
    }

    /// The pool, for as long as the guard lives. Calls on it are all-or-nothing, so a thread that panicked beside one left it whole.
    /// The same thread must not drop a [`BlockRef`] of this pool, or lock it again, meanwhile: it would wait for the lock for ever.
    pub fn lock(&self) -> MutexGuard<'_, BlockPool> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the block at the head of the free queue.
    ///
    /// # Errors
    /// [`Error::OutOfBlocks`](crate::Error::OutOfBlocks).
    pub fn take(&self) -> Result<BlockRef> {
        self.hold(|pool, table| pool.take(table, 1))
    }

    /// Holds a block whose content has a name: a hit.
    ///
    /// # Errors
    /// As [`BlockPool::share`].
    pub fn share(&self, block: BlockId) -> Result<BlockRef> {
        self.hold(|pool, table| pool.share(table, block))
    }

    fn hold(&self, add: impl FnOnce(&mut BlockPool, &mut BlockTable) -> Result<()>) -> Result<BlockRef> {
        let mut table = BlockTable::new();
        add(&mut self.lock(), &mut table)?;
        Ok(BlockRef { pool: self.clone(), table })
    }
}

/// One holder of one block.
///
/// ```compile_fail
/// # use blocktable_core::block_ref::BlockRef;
/// fn twice(held: BlockRef) {
///     drop(held);
///     drop(held);
/// }
/// ```
#[must_use = "a guard that goes gives its block back"]
pub struct BlockRef {
    pool: SharedPool,
    table: BlockTable,
}

impl BlockRef {
    /// The block.
    #[must_use]
    pub fn block(&self) -> BlockId {
        self.table.blocks()[0]
    }

    /// A second holder of the same block, whatever its content.
    ///
    /// # Errors
    /// None while the guard lives; those of [`BlockPool::fork`] are passed on.
    pub fn share(&self) -> Result<BlockRef> {
        let table = self.pool.lock().fork(&self.table)?;
        Ok(BlockRef { pool: self.pool.clone(), table })
    }

    /// The table that names the one block, for [`BlockPool::audit`].
    #[must_use]
    pub fn table(&self) -> &BlockTable {
        &self.table
    }
}

impl Drop for BlockRef {
    fn drop(&mut self) {
        if !mutant::is_on(Mutant::GuardKeepsBlock) {
            self.pool.lock().release(std::mem::take(&mut self.table), Release::Now);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;
    use crate::ids::Key;

    #[test]
    fn the_last_guard_gives_the_block_back() {
        let pool = SharedPool::new(BlockPool::new(3).unwrap());
        let first = pool.take().unwrap();
        let second = first.share().unwrap();
        assert_eq!((first.block(), pool.lock().holders(first.block())), (second.block(), 2));
        drop(first);
        assert_eq!(pool.lock().num_held(), 1);
        pool.lock().audit([second.table()]).unwrap();
        drop(second);
        assert_eq!(pool.lock().num_held(), 0);
    }

    #[test]
    fn a_guard_holds_a_hit_and_is_refused_where_there_is_none() {
        let pool = SharedPool::new(BlockPool::new(3).unwrap());
        let written = pool.take().unwrap();
        let block = written.block();
        assert!(matches!(pool.share(block), Err(Error::NotHeld { .. })), "no content has a name yet");
        pool.lock().make_pending(block, Key([1; 32])).unwrap();
        pool.lock().publish(block).unwrap();
        drop(written);
        let hit = pool.share(block).unwrap();
        let other = pool.take().unwrap();
        assert!(matches!(pool.take(), Err(Error::OutOfBlocks { needed: 1, free: 0 })));
        pool.lock().audit([hit.table(), other.table()]).unwrap();
    }

    #[test]
    fn a_leaked_guard_keeps_its_block_and_nothing_else() {
        let pool = SharedPool::new(BlockPool::new(4).unwrap());
        std::mem::forget(pool.take().unwrap());
        let next = pool.take().unwrap();
        let inner = pool.lock();
        let counts = (next.block().get(), inner.num_held(), inner.num_free());
        drop(inner);
        assert_eq!(counts, (2, 2, 1));
    }

    #[test]
    fn guards_on_many_threads_give_everything_back() {
        let pool = SharedPool::new(BlockPool::new(9).unwrap());
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..200 {
                        let held = pool.take().expect("eight blocks for four threads");
                        drop((held.share().expect("held"), held));
                    }
                });
            }
        });
        assert_eq!(pool.lock().num_free(), 8);
        pool.lock().audit([]).unwrap();
    }
}
