//! Tenants' shares of the pool: what one brings anew does not push another's content below its share.
//!
//! Before: a block is about to get a name, and its chain says whose it is. After: each share has lanes of its own in the free queue, and
//! a take goes on, behind the blocks without content, with the owner whose content is most above its share. All that belongs to nobody
//! with a share (other tenants, the deployment itself) is one more owner, whose share is nothing. Public ranges go last: whatever stands
//! behind them would be lost with them (I58), and only the operator declares them.
//!
//! Content is counted in published blocks, held or not. Shares decide what is evicted, not who runs: a take that finds no content
//! above a share takes of the least below it, so that running requests may use every block.
//!
//! Inside one owner's content the order is that of a pool without shares: by worth, then by recency, a chain's tail before its head.
//! Between owners shares alone count.

use crate::error::{Error, Result};
use crate::free_queue::{DEFAULT_LANE, LANES};
use crate::ids::BlockId;
use crate::mutant::{self, Mutant};

/// Shares at most.
pub const MAX_SHARES: usize = 32;

/// Who owns what belongs to nobody with a share.
const OTHERS: u8 = 0;
/// Who owns public ranges.
pub(crate) const PUBLIC: u8 = 1;
/// Owner of the first share.
const FIRST: u8 = 2;

/// The owner of share number `at` in the configuration; none: of no share.
pub(crate) fn owner(at: Option<usize>) -> u8 {
    at.map_or(OTHERS, |at| at as u8 + FIRST)
}

/// What of a pool the content of one tenant may keep, whatever others bring.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DomainShare {
    /// The tenant's name, as in [`Domain::Tenant`](crate::chain::Domain::Tenant).
    pub domain: Box<[u8]>,
    /// Blocks.
    pub blocks: u32,
}

/// Checks the shares of a pool of `usable` blocks.
///
/// # Errors
/// [`Error::InvalidInput`] for too many, a tenant without a name or with two shares, an empty share, or more blocks than there are.
pub(crate) fn check(shares: &[DomainShare], usable: u32) -> Result<()> {
    let invalid = |value: i128, bound: String| Err(Error::InvalidInput { field: "domain_shares", value, bound });
    if shares.len() > MAX_SHARES {
        return invalid(shares.len() as i128, format!("must be at most {MAX_SHARES} shares"));
    }
    let mut sum = 0u64;
    for (at, DomainShare { domain, blocks }) in shares.iter().enumerate() {
        if !(1..=crate::chain::MAX_NAME).contains(&domain.len()) {
            return invalid(domain.len() as i128, format!("bytes of a name: must be 1..={}", crate::chain::MAX_NAME));
        }
        if shares[..at].iter().any(|other| other.domain == *domain) {
            return invalid(at as i128, "is the second share of this domain".to_owned());
        }
        if *blocks == 0 {
            return invalid(0, "blocks: a share must be at least 1".to_owned());
        }
        sum += u64::from(*blocks);
    }
    if sum > u64::from(usable) {
        return invalid(sum.into(), format!("blocks in all: must be at most {usable}, those that can be handed out"));
    }
    Ok(())
}

/// Whose content each block holds, and how much each owner has.
pub(crate) struct Shares {
    /// Blocks of each owner's share.
    shares: Box<[u32]>,
    /// Published blocks of each owner.
    content: Box<[u32]>,
    /// Of each block that has a name.
    owners: Box<[u8]>,
}

impl Shares {
    /// Of a pool that names nothing yet.
    pub fn new(num_blocks: u32, shares: &[DomainShare]) -> Self {
        let of_tenants = shares.iter().map(|share| share.blocks);
        let shares: Box<[u32]> = [0, u32::MAX].into_iter().chain(of_tenants).collect();
        let content = vec![0; shares.len()].into();
        Shares { shares, content, owners: vec![0; num_blocks as usize].into() }
    }

    /// How many own: the tenants with a share, the public, and the others.
    pub fn owners(&self) -> usize {
        self.shares.len()
    }

    /// Whose content `block` holds, or held last.
    pub fn owner(&self, block: BlockId) -> u8 {
        self.owners[block.index()]
    }

    /// Published blocks of `owner`.
    pub fn content(&self, owner: usize) -> u32 {
        self.content[owner]
    }

    /// `block`, which has no name, is about to get one for content of `owner`.
    pub fn set_owner(&mut self, block: BlockId, owner: u8) {
        self.owners[block.index()] = owner;
    }

    /// The lane of `block`, whose content is worth `priority`.
    pub fn lane(&self, block: BlockId, priority: u16) -> u16 {
        LANES as u16 * u16::from(self.owner(block)) + priority
    }

    /// The content of `block` was published.
    pub fn published(&mut self, block: BlockId) {
        self.content[usize::from(self.owner(block))] += 1;
    }

    /// Published content of `block` was forgotten.
    pub fn forgotten(&mut self, block: BlockId) {
        if !mutant::is_on(Mutant::ShareCountsForgotten) {
            self.content[usize::from(self.owner(block))] -= 1;
        }
    }

    /// The owner, among those not in `without`, whose content is most above its share, and how many blocks to take of it before another
    /// one is, 1 at least.
    pub fn most_above(&self, without: u64) -> Option<(usize, usize)> {
        let above = |owner: usize| i64::from(self.content[owner]) - i64::from(self.shares[owner]);
        if mutant::is_on(Mutant::SharesIgnored) {
            return (0..self.owners()).rev().find(|owner| without >> owner & 1 == 0).map(|owner| (owner, usize::MAX));
        }
        let (mut most, mut second) = (None, None);
        for owner in (0..self.owners()).filter(|owner| without >> owner & 1 == 0) {
            match most {
                Some(best) if above(owner) <= above(best) => second = second.max(Some(above(owner))),
                best => (most, second) = (Some(owner), second.max(best.map(above))),
            }
        }
        let ahead = |owner: usize| second.map_or(usize::MAX, |second| ((above(owner) - second) as usize).max(1));
        most.map(|owner| (owner, ahead(owner)))
    }
}

/// The lane of a block worth `priority` in a pool with or without shares.
pub(crate) fn lane(shares: Option<&Shares>, block: BlockId, priority: u16) -> u16 {
    shares.map_or(priority, |shares| shares.lane(block, priority))
}

/// What content in `lane` is worth.
pub(crate) fn priority(lane: u16) -> u16 {
    lane % LANES as u16
}

const _: () = assert!((DEFAULT_LANE as usize) < LANES);

#[cfg(test)]
mod tests {
    use super::*;

    fn share(domain: &[u8], blocks: u32) -> DomainShare {
        DomainShare { domain: domain.into(), blocks }
    }

    #[test]
    fn what_breaks_a_bound_is_named() {
        assert_eq!(check(&[share(b"a", 3), share(b"b", 7)], 10), Ok(()));
        let wrong = [
            vec![share(b"a", 3), share(b"b", 8)],
            vec![share(b"a", 3), share(b"a", 3)],
            vec![share(b"", 1)],
            vec![share(b"a", 0)],
            (0..33).map(|name| share(&[name], 1)).collect(),
            vec![share(b"a", u32::MAX), share(b"b", u32::MAX)],
        ];
        for shares in wrong {
            let refused = check(&shares, 10);
            assert!(matches!(refused, Err(Error::InvalidInput { field: "domain_shares", .. })), "{refused:?}");
        }
    }

    #[test]
    fn who_is_most_above_its_share_goes_first_and_at_a_tie_who_has_none() {
        let mut shares = Shares::new(50, &[share(b"a", 2), share(b"b", 5)]);
        for (owner, blocks) in [(0, 0..4), (2, 4..9), (3, 9..15), (PUBLIC, 20..40)] {
            for block in blocks.map(BlockId) {
                shares.set_owner(block, owner);
                shares.published(block);
            }
        }
        // Above by 4, 3 and 1.
        assert_eq!(shares.most_above(0), Some((0, 1)));
        shares.forgotten(BlockId(0));
        assert_eq!(shares.most_above(0), Some((0, 1)), "a tie");
        shares.forgotten(BlockId(1));
        assert_eq!(shares.most_above(0), Some((2, 1)));
        assert_eq!(shares.most_above(0b100), Some((0, 1)));
        assert!(matches!(shares.most_above(0b101), Some((3, _))));
        assert_eq!(shares.most_above(0b1101), Some((1, usize::MAX)), "the public goes last");
        assert_eq!(shares.most_above(0b1111), None);
    }
}
