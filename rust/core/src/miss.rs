//! Why a prefix was found no further, and the bounded memory of what was published that can tell.
//!
//! Before: commits say which blocks were published ([`Seen::note`]). After: an admission asks about the first block that it did not
//! find ([`Seen::why`]). Only fingerprints are kept: two a block of the pool, 16 bytes each, allocated once. So an answer can be wrong
//! in two ways. What was published long ago is forgotten, the oldest of eight in the same place first, and then counts as never
//! seen; and of one content under many salts only some are remembered, so one's own that was evicted may count as another's. Taking
//! one content for another needs equal 32-bit fingerprints in the same place: less than once in 500 million looks.

/// Why a prefix was found no further than it was. What others sent shows in the last three: for operators, not for clients.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Miss {
    /// Every full block was found that may be: the last token is always computed.
    Nothing = 0,
    /// There is no full block before the last token.
    ShorterThanBlock = 1,
    /// Nobody published this block, as far as it is remembered.
    NeverSeen = 2,
    /// It was published under this very key, and given up.
    Evicted = 3,
    /// It was published with other salts.
    OtherSalt = 4,
    /// It was published by another adapter, or none, in the same domain.
    OtherAdapter = 5,
    /// It was published in another domain. Never told of a request, only counted.
    OtherDomain = 6,
}

impl Miss {
    /// Every reason, in the order of their numbers.
    pub const ALL: [Miss; 7] = [
        Miss::Nothing,
        Miss::ShorterThanBlock,
        Miss::NeverSeen,
        Miss::Evicted,
        Miss::OtherSalt,
        Miss::OtherAdapter,
        Miss::OtherDomain,
    ];

    /// Its name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Miss::Nothing => "nothing",
            Miss::ShorterThanBlock => "shorter_than_block",
            Miss::NeverSeen => "never_seen",
            Miss::Evicted => "evicted",
            Miss::OtherSalt => "other_salt",
            Miss::OtherAdapter => "other_adapter",
            Miss::OtherDomain => "other_domain",
        }
    }

    /// What may be said of one request: that another domain has its content is nobody's to know.
    #[must_use]
    pub const fn of_request(self) -> Miss {
        match self {
            Miss::OtherDomain => Miss::NeverSeen,
            told => told,
        }
    }
}

/// Admitted requests by the reason for which their hit ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MissCounts([u64; Miss::ALL.len()]);

impl MissCounts {
    /// One request more.
    pub(crate) fn add(&mut self, miss: Miss) {
        self.0[miss as usize] += 1;
    }

    /// How many.
    #[must_use]
    pub fn of(&self, miss: Miss) -> u64 {
        self.0[miss as usize]
    }
}

/// One published block, or one that is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Print {
    /// Its content alone: tokens and media from the start of the chain.
    pub content: u64,
    /// Its key.
    pub key: u64,
    /// Domain and adapter.
    pub computed_by: u64,
    /// Domain.
    pub domain: u64,
}

#[derive(Clone, Copy, PartialEq, Eq)]
struct Record {
    content: u32,
    key: u32,
    computed_by: u32,
    domain: u32,
}

const EMPTY: Record = Record { content: 0, key: 0, computed_by: 0, domain: 0 };

/// Records in one place: two cache lines.
const WAYS: usize = 8;

/// What was published lately.
pub struct Seen {
    /// [places, WAYS], the newest of a place first.
    records: Box<[[Record; WAYS]]>,
}

impl Seen {
    /// Remembers at least two publications for each of `num_blocks` blocks, if they are spread evenly.
    #[must_use]
    pub fn new(num_blocks: u32) -> Self {
        let places = (2 * num_blocks as usize).div_ceil(WAYS);
        Seen { records: vec![[EMPTY; WAYS]; places].into() }
    }

    /// A block was published.
    pub fn note(&mut self, print: &Print) {
        let record = Record::of(print);
        let place = &mut self.records[self.place(print.content)];
        let behind = place.iter().position(|known| *known == record).unwrap_or(WAYS - 1);
        place.copy_within(..behind, 1);
        place[0] = record;
    }

    /// Why a block is not there that is asked for by its key.
    #[must_use]
    pub fn why(&self, print: &Print) -> Miss {
        let asked = Record::of(print);
        let same = || {
            self.records[self.place(print.content)]
                .iter()
                .filter(|known| known.content == asked.content && **known != EMPTY)
        };
        if same().any(|known| known.key == asked.key) {
            Miss::Evicted
        } else if same().any(|known| known.computed_by == asked.computed_by) {
            Miss::OtherSalt
        } else if same().any(|known| known.domain == asked.domain) {
            Miss::OtherAdapter
        } else if same().next().is_some() {
            Miss::OtherDomain
        } else {
            Miss::NeverSeen
        }
    }

    /// The upper half chooses the place, the lower one tells contents apart in it.
    fn place(&self, content: u64) -> usize {
        ((content >> 32) as usize * self.records.len()) >> 32
    }
}

impl Record {
    fn of(print: &Print) -> Self {
        let [content, key, computed_by, domain] =
            [print.content, print.key, print.computed_by, print.domain].map(|print| print as u32);
        Record { content, key, computed_by, domain }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Spread as hashes are.
    fn print(content: u64, key: u64, computed_by: u64, domain: u64) -> Print {
        let spread =
            |n: u64| (n + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(31).wrapping_mul(0xD6E8_FEB8_6659_FD93);
        Print { content: spread(content), key: spread(key), computed_by: spread(computed_by), domain: spread(domain) }
    }

    #[test]
    fn the_nearest_reason_is_given() {
        let mut seen = Seen::new(64);
        let asked = print(1, 10, 20, 30);
        for (published, why) in [
            (print(2, 10, 20, 30), Miss::NeverSeen),
            (print(1, 11, 21, 31), Miss::OtherDomain),
            (print(1, 12, 22, 30), Miss::OtherAdapter),
            (print(1, 13, 20, 30), Miss::OtherSalt),
            (asked, Miss::Evicted),
        ] {
            seen.note(&published);
            assert_eq!(seen.why(&asked), why);
        }
    }

    #[test]
    fn two_publications_a_block_are_remembered_and_the_oldest_of_a_place_is_forgotten() {
        let mut seen = Seen::new(4096);
        let published = |n| print(n, n, 0, 0);
        (0..2048).for_each(|n| seen.note(&published(n)));
        let remembered = (0..2048).filter(|&n| seen.why(&published(n)) == Miss::Evicted).count();
        assert!(remembered >= 2040, "{remembered} of 2,048, where there is room for 8,192");
        (2048..40_000).for_each(|n| seen.note(&published(n)));
        let remembered = (0..2048).filter(|&n| seen.why(&published(n)) == Miss::Evicted).count();
        assert_eq!(remembered, 0, "bounded");
    }

    #[test]
    fn content_that_comes_again_does_not_push_out_others() {
        let mut seen = Seen::new(4);
        seen.note(&print(1, 1, 0, 0));
        (0..100).for_each(|_| seen.note(&print(2, 2, 0, 0)));
        assert_eq!(seen.why(&print(1, 1, 0, 0)), Miss::Evicted);
    }
}
