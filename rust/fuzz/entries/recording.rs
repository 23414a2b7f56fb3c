//! Any bytes, as a recording of what entered a scheduler.
//!
//! Before: a fuzzer, or the core's own tests with a corpus and random bytes, call [`run`]. After: it returns, or panics because bytes
//! that can be read are not the only ones that mean this. Nothing is replayed: a configuration may ask for any memory.

use blocktable_core::recording::{Recording, mend};

/// Reads the bytes as they are, and with right checksums; how many calls they hold.
pub fn run(data: &[u8]) -> usize {
    let mut mended = data.to_vec();
    mend(&mut mended);
    read(data).max(read(&mended))
}

fn read(data: &[u8]) -> usize {
    let Ok(read) = Recording::read(data) else { return 0 };
    let again = read.write();
    if read.is_cut {
        assert!(data.starts_with(&again), "what stands before the cut is not what was read");
    } else {
        assert_eq!(again, data, "other bytes mean the same");
    }
    read.entries.len()
}
