//! How long content stays when nobody holds it: a priority and a time to live for each block, asked for by ranges of tokens (design 8).
//!
//! Before: a request brings [`Ranges`]. After: the pool asks for the lane of a block that is released, and moves those whose time is
//! over to the default lane.
//!
//! # The rule
//!
//! A block is worth the highest priority of every range that ends behind its start, and lives as long as the longest of them that are
//! above the default; beyond all ranges that have an end lies one of the default priority. What a block is worth never falls while its
//! content stays, but when its time is over: then it is worth the default. Its time begins when its last holder goes, so a hit by
//! anybody, whatever that one asks for, starts it anew. Several may have written the same content, and a hit may hold the front of one
//! writer's chain and the rest of another's: the front is then worth what the rest is.
//!
//! So along a chain neither priority nor time ever rises, in one request or over many: whoever asks something for a block asks it for
//! every block before it, and who holds a block holds all before it, none of them worth less, and gives them back in the same call. A cached child is evicted
//! before its parent, at every time (but in a group with a window, which gives the front back early). If instead each block kept the
//! time of its own highest range, a short range of high priority at the front would end, the front would fall to the default, and the
//! rest of the chain, in a longer range of middle priority, would outlive it. If time began when a block is published, the front of a
//! long answer would be over while the answer still grows.
//!
//! There is no clock here: the time is the last that a plan, a submit or a commit brought.

use crate::deadlines::{Deadlines, FOREVER};
use crate::error::{Error, Result};
use crate::ids::BlockId;
use crate::mutant::{self, Mutant};
use crate::prefix_index::{KeyState, PrefixIndex};

/// Priority of what nobody asked anything for.
pub const DEFAULT_PRIORITY: u8 = 35;
/// The highest priority; the lowest is 0.
pub const MAX_PRIORITY: u8 = 100;
/// Ranges of one request at most.
pub const MAX_RANGES: usize = 64;

/// What a request asks for some of its tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenRange {
    /// The first token.
    pub start: u32,
    /// Behind the last token; `None`: all tokens, outputs too.
    pub end: Option<u32>,
    /// 0 to [`MAX_PRIORITY`]; lower ones are evicted first.
    pub priority: u8,
    /// Milliseconds without a hit after which the priority ends; `None`: never.
    pub duration_ms: Option<u64>,
}

/// What a block is worth.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Worth {
    /// Its lane.
    pub priority: u8,
    /// Microseconds without a hit after which a priority above the default ends; [`FOREVER`]: never.
    pub time_us: u64,
}

impl Worth {
    /// What nobody asked anything for.
    pub const DEFAULT: Worth = Worth { priority: DEFAULT_PRIORITY, time_us: 0 };

    /// The higher priority and the longer time.
    #[must_use]
    pub fn or(self, other: Worth) -> Worth {
        Worth { priority: self.priority.max(other.priority), time_us: self.time_us.max(other.time_us) }
    }
}

/// What a request asks for its tokens, in a form that is quick to read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ranges {
    /// (end of a range, what the blocks that start before it are worth at least), by rising end. What is behind the last end is worth
    /// `rest`.
    steps: Vec<(u32, Worth)>,
    rest: Worth,
}

impl Ranges {
    /// What these ranges ask for.
    ///
    /// # Errors
    /// [`Error::InvalidInput`] for too many, an empty range, a priority or a duration out of bounds.
    pub fn new(ranges: &[TokenRange]) -> Result<Ranges> {
        let invalid = |field, value: i128, bound: String| Err(Error::InvalidInput { field, value, bound });
        if ranges.len() > MAX_RANGES {
            return invalid("retention", ranges.len() as i128, format!("must be at most {MAX_RANGES} ranges"));
        }
        for range in ranges {
            if range.priority > MAX_PRIORITY {
                return invalid("priority", i128::from(range.priority), format!("must be 0..={MAX_PRIORITY}"));
            }
            if range.end.is_some_and(|end| end <= range.start) {
                let bound = format!("must be above token_start, {}", range.start);
                return invalid("token_end", range.end.map_or(0, i128::from), bound);
            }
            if range.duration_ms.is_some_and(|ms| !(1..=u64::MAX / 2000).contains(&ms)) {
                let bound = format!("must be 1..={} ms", u64::MAX / 2000);
                return invalid("duration_ms", range.duration_ms.map_or(0, i128::from), bound);
            }
        }
        let worth = |range: &TokenRange| Worth {
            priority: range.priority,
            // What is not above the default has nothing to lose.
            time_us: if range.priority > DEFAULT_PRIORITY {
                range.duration_ms.map_or(FOREVER, |ms| ms * 1000)
            } else {
                0
            },
        };
        let open = ranges.iter().filter(|range| range.end.is_none()).map(worth).reduce(Worth::or);
        let rest = open.unwrap_or(Worth::DEFAULT);
        let mut steps: Vec<(u32, Worth)> = ranges.iter().filter_map(|range| Some((range.end?, worth(range)))).collect();
        steps.sort_by_key(|(end, _)| *end);
        let mut behind = rest;
        for (_, worth) in steps.iter_mut().rev() {
            behind = behind.or(*worth);
            if !mutant::is_on(Mutant::RangeLiftsItsOwnOnly) {
                *worth = behind;
            }
        }
        Ok(Ranges { steps, rest })
    }

    /// The ends of ranges with what is before them worth, by rising end, and what is behind the last.
    pub(crate) fn parts(&self) -> (&[(u32, Worth)], Worth) {
        (&self.steps, self.rest)
    }

    /// The same back; none if ends fall, or a priority is too high.
    pub(crate) fn from_parts(steps: Vec<(u32, Worth)>, rest: Worth) -> Option<Ranges> {
        let is_valid = steps.is_sorted_by_key(|(end, _)| *end)
            && steps.iter().all(|(_, worth)| worth.priority <= MAX_PRIORITY)
            && rest.priority <= MAX_PRIORITY;
        is_valid.then_some(Ranges { steps, rest })
    }

    /// What the block that begins with token `start` is worth.
    #[must_use]
    pub fn worth(&self, start: usize) -> Worth {
        let at = self.steps.partition_point(|(end, _)| *end as usize <= start);
        self.steps.get(at).map_or(self.rest, |(_, worth)| *worth)
    }
}

/// How a pool keeps it. A build with feature `no_retention` has none to keep: the measure of what it costs where nobody asks for it.
#[cfg(not(feature = "no_retention"))]
pub(crate) type Kept = Box<Retention>;

/// See above.
#[cfg(feature = "no_retention")]
pub(crate) enum Kept {}

#[cfg(feature = "no_retention")]
impl std::ops::Deref for Kept {
    type Target = Retention;

    fn deref(&self) -> &Retention {
        match *self {}
    }
}

#[cfg(feature = "no_retention")]
impl std::ops::DerefMut for Kept {
    fn deref_mut(&mut self) -> &mut Retention {
        match *self {}
    }
}

/// That of a pool with this index, which begins to keep it; none in a build without.
#[cfg(not(feature = "no_retention"))]
pub(crate) fn keep(index: &PrefixIndex) -> Option<Kept> {
    Some(Box::new(Retention::new(index)))
}

/// See above.
#[cfg(feature = "no_retention")]
pub(crate) fn keep(_index: &PrefixIndex) -> Option<Kept> {
    None
}

/// What each block of a pool is worth. Made when the first request asks for something.
pub struct Retention {
    /// `None`: nobody asked anything for the content yet.
    worth: Box<[Option<Worth>]>,
    deadlines: Deadlines,
    /// Blocks whose time was over while they were in no queue, with that time.
    late: Vec<(BlockId, u64)>,
}

impl Retention {
    /// Every block is worth the default. What has a name by now was written by somebody who asked for nothing.
    #[must_use]
    pub fn new(index: &PrefixIndex) -> Self {
        let is_named = |block| index.state(block) != KeyState::Unnamed;
        let worth: Box<[_]> = index.blocks().map(|block| is_named(block).then_some(Worth::DEFAULT)).collect();
        Retention { deadlines: Deadlines::new(worth.len() as u32), worth, late: Vec::new() }
    }

    /// What `block` is worth.
    #[must_use]
    pub fn worth(&self, block: BlockId) -> Worth {
        self.worth[block.index()].unwrap_or(Worth::DEFAULT)
    }

    /// The content of `block` is forgotten: nobody asked anything yet for the next that it gets.
    pub(crate) fn begin(&mut self, block: BlockId) {
        if !mutant::is_on(Mutant::OldWorthStays) {
            self.worth[block.index()] = None;
        }
        self.deadlines.clear(block);
        self.late.retain(|(late, _)| *late != block);
    }

    /// Who writes or hits the content of `block`, number `number` of its chain, asks `asked` for it.
    pub(crate) fn ask(&mut self, block: BlockId, number: usize, asked: Worth) {
        self.deadlines.place(block, number as u32);
        let worth = &mut self.worth[block.index()];
        *worth = match *worth {
            Some(before) if !mutant::is_on(Mutant::LastAskerDecides) => Some(before.or(asked)),
            _ => Some(asked),
        };
    }

    /// A holder of the blocks of `chain`, the first of a chain, asks `asked` for each; behind them `behind` was found. What stands before
    /// a block is worth as much as it.
    pub(crate) fn ask_chain(
        &mut self,
        chain: &[BlockId],
        behind: Option<BlockId>,
        asked: impl Fn(usize) -> Option<Worth>,
    ) {
        let mut least = behind.map(|block| self.worth(block));
        for (number, &block) in chain.iter().enumerate().rev().filter(|(_, block)| **block != BlockId::NULL) {
            let before = least.filter(|_| !mutant::is_on(Mutant::FrontWorthLess));
            asked(number).into_iter().chain(before).for_each(|asked| self.ask(block, number, asked));
            least = Some(self.worth(block));
        }
    }

    /// The last holder of `block` is gone at `now_us`: its time begins.
    pub(crate) fn released(&mut self, block: BlockId, now_us: u64) {
        // Whatever time was over before it was hit.
        self.late.retain(|(late, _)| *late != block);
        let Worth { time_us, .. } = self.worth(block);
        if time_us > 0 && !(mutant::is_on(Mutant::HitRefreshesNothing) && self.deadlines.due(block) != FOREVER) {
            self.deadlines.set(block, now_us.saturating_add(time_us));
        }
    }

    /// From here on [`Retention::next_over`] tells whose time is over.
    pub(crate) fn begin_expiry(&mut self) {
        for (block, due) in self.late.drain(..) {
            if self.deadlines.due(block) == FOREVER {
                self.deadlines.set(block, due);
            }
        }
    }

    /// The next block whose time is over at `now_us`, and when that was: see [`Retention::fall`] and [`Retention::wait`]. That of a block
    /// that is held will begin anew.
    pub(crate) fn next_over(&mut self, now_us: u64) -> Option<(BlockId, u64)> {
        self.deadlines.pop(now_us)
    }

    /// `block` is worth the default from now on.
    pub(crate) fn fall(&mut self, block: BlockId) {
        self.worth[block.index()] = Some(Worth::DEFAULT);
    }

    /// `block`, whose time was over at `due_us`, is in no queue yet: look again next time.
    pub(crate) fn wait(&mut self, block: BlockId, due_us: u64) {
        self.late.push((block, due_us));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(end: Option<u32>, priority: u8, duration_ms: Option<u64>) -> TokenRange {
        TokenRange { start: 0, end, priority, duration_ms }
    }

    fn worth(priority: u8, time_us: u64) -> Worth {
        Worth { priority, time_us }
    }

    #[test]
    fn a_range_lifts_every_block_that_starts_before_its_end() {
        let inner = TokenRange { start: 8, end: Some(12), priority: 80, duration_ms: Some(3) };
        let ranges = Ranges::new(&[inner, range(Some(20), 50, None)]).unwrap();
        assert_eq!([0, 11].map(|start| ranges.worth(start)), [worth(80, FOREVER); 2]);
        assert_eq!([12, 19].map(|start| ranges.worth(start)), [worth(50, FOREVER); 2]);
        assert_eq!(ranges.worth(20), Worth::DEFAULT);
    }

    #[test]
    fn nothing_is_below_the_default_unless_all_of_the_chain_may_be() {
        let low = Ranges::new(&[range(Some(16), 10, None)]).unwrap();
        assert_eq!(low.worth(0), Worth::DEFAULT, "what comes behind is worth the default, so this is too");
        let all = Ranges::new(&[range(None, 10, None), range(Some(16), 20, Some(5))]).unwrap();
        assert_eq!([0, 16].map(|start| all.worth(start)), [worth(20, 0), worth(10, 0)]);
    }

    #[test]
    fn what_breaks_a_bound_is_named() {
        let field = |ranges: &[TokenRange]| match Ranges::new(ranges) {
            Err(Error::InvalidInput { field, .. }) => field,
            other => panic!("{other:?}"),
        };
        assert_eq!(field(&[range(None, 101, None)]), "priority");
        assert_eq!(field(&[TokenRange { start: 4, end: Some(4), priority: 1, duration_ms: None }]), "token_end");
        assert_eq!(field(&[range(None, 50, Some(0))]), "duration_ms");
        assert_eq!(field(&[range(None, 50, Some(u64::MAX))]), "duration_ms");
        assert_eq!(field(&[range(None, 1, None); MAX_RANGES + 1]), "retention");
    }

    #[test]
    fn a_block_is_worth_the_most_that_anybody_asked_until_its_time_is_over() {
        let (mut retention, block) = (Retention::new(&PrefixIndex::new(4)), BlockId(2));
        assert_eq!(retention.worth(block), Worth::DEFAULT);
        retention.ask(block, 0, worth(80, 1000));
        retention.released(block, 0);
        retention.ask(block, 0, Worth::DEFAULT);
        retention.released(block, 500);
        let over = |retention: &mut Retention, now_us| (retention.worth(block), retention.next_over(now_us));
        assert_eq!(over(&mut retention, 1499), (worth(80, 1000), None), "any hit starts it anew");
        assert_eq!(over(&mut retention, 1500), (worth(80, 1000), Some((block, 1500))));
        retention.fall(block);
        assert_eq!(over(&mut retention, 1500), (Worth::DEFAULT, None));
        retention.begin(block);
        retention.ask(block, 0, worth(10, 0));
        assert_eq!(retention.worth(block).priority, 10);
    }
}
