//! How many tokens a block holds, and the division by it: the one place where rows become blocks.
//!
//! Submit, admission, growth and the audit all ask here, so they cannot disagree about a request's need.

/// Tokens a block, at least 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockSize {
    tokens: u32,
    /// ⌈2^64 / tokens⌉, or 0 for 1 token: a multiplication instead of a division of some twenty cycles, several a sequence a step.
    reciprocal: u64,
}

impl BlockSize {
    /// A block of `tokens` tokens.
    #[must_use]
    pub fn new(tokens: u32) -> Self {
        assert!(tokens > 0, "a block holds at least one token");
        BlockSize { tokens, reciprocal: (u64::MAX / u64::from(tokens)).wrapping_add(1) }
    }

    /// Tokens a block.
    #[must_use]
    pub fn tokens(self) -> usize {
        self.tokens as usize
    }

    /// Full blocks in `rows` rows; also the number of the block that holds row `rows`. Rows fit 32 bits.
    #[must_use]
    pub fn full_blocks(self, rows: usize) -> usize {
        debug_assert!(rows <= u32::MAX as usize);
        if self.reciprocal == 0 {
            return rows;
        }
        ((rows as u128 * u128::from(self.reciprocal)) >> 64) as usize
    }

    /// Blocks that hold `rows` rows.
    #[must_use]
    pub fn blocks_for(self, rows: usize) -> usize {
        self.full_blocks(rows + self.tokens() - 1)
    }

    /// Blocks that `rows` rows in a row touch at most, wherever the first of them lies in its block.
    #[must_use]
    pub fn most_touched(self, rows: usize) -> usize {
        if rows == 0 { 0 } else { self.blocks_for(rows - 1) + 1 }
    }

    /// Place of row `row` in its block.
    #[must_use]
    pub fn offset(self, row: usize) -> usize {
        row - self.full_blocks(row) * self.tokens()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reciprocal_divides_exactly() {
        for tokens in (1..=70).chain([127, 128, 129, 1000, 4095, 4096]) {
            let size = BlockSize::new(tokens);
            let edges = (0..40u64)
                .flat_map(|n| [n * 104_729, n * u64::from(tokens), (n + 1) * u64::from(tokens) - 1, (1 << 27) + n]);
            for rows in edges.map(|n| n as usize) {
                assert_eq!(size.full_blocks(rows), rows / tokens as usize, "{rows} / {tokens}");
                assert_eq!(size.blocks_for(rows), rows.div_ceil(tokens as usize), "{rows} / {tokens}");
                assert_eq!(size.offset(rows), rows % tokens as usize, "{rows} / {tokens}");
            }
        }
    }
}
