//! Whose content is evicted is what plain lists say, and a flood leaves the others their share.
//!
//! Before: a script of calls, drawn by proptest from a seed. After: every block that was handed out, the order of all free blocks and
//! what is published have been compared after every call. `BLOCKTABLE_SEED` and `BLOCKTABLE_CASES` choose other scripts.

use blocktable_core::block_pool::{BlockPool, Release};
use blocktable_core::block_table::BlockTable;
use blocktable_core::ids::Key;
use blocktable_core::shares::DomainShare;

use crate::seed;
use crate::shares_script::shares_scripts;

#[test]
fn whose_content_goes_is_what_plain_lists_say() {
    seed::run_cases("shares_vs_model", 500, &shares_scripts(), |script| script.run());
}

/// Ten times the pool, in lists of many blocks: the pool takes as many of one owner at once as it may.
#[test]
fn a_flood_leaves_a_share_whole_and_takes_what_is_above_it() {
    let share = DomainShare { domain: b"steady"[..].into(), blocks: 30 };
    let mut pool = BlockPool::new(101).expect("a pool").sharing(&[share]);
    let mut names = 0;
    let mut write = |pool: &mut BlockPool, owner: u8, blocks: u32| {
        let mut table = BlockTable::new();
        pool.take(&mut table, blocks).expect("nobody holds any");
        for &block in table.blocks() {
            names += 1;
            pool.set_owner(block, owner);
            pool.make_pending(block, Key([names as u8; 32])).expect("a block of the pool");
            pool.publish(block).expect("a block of the pool");
        }
        let blocks = table.blocks().to_vec();
        pool.release(table, Release::Now);
        blocks
    };
    write(&mut pool, 2, 50);
    for _ in 0..40 {
        write(&mut pool, 0, 25);
    }
    let lanes = pool.free_blocks().count();
    assert_eq!((lanes, pool.num_free()), (100, 100));
    // 70 are the flood's; what is kept is the newest released: the head of the chain.
    let kept: Vec<u32> = pool.free_blocks().skip(70).map(|block| block.get()).collect();
    assert_eq!(kept, (1..=30).rev().collect::<Vec<_>>());
    pool.audit([]).expect("sound");
}
