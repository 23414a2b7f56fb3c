//! Whose requests live: a number for each tenant's name, its rules, and what it has of the queue.
//!
//! Before: submit names a tenant. After: the number stands for it as long as it has live requests. Of tenants without any a bounded
//! number is remembered; the one that has been idle longest is forgotten first.

use std::collections::{BTreeMap, VecDeque};

use crate::error::{Error, Result};
use crate::policy::MAX_WEIGHT;

/// Tenants that are remembered although others come.
const REMEMBERED: usize = 4096;

/// Bytes of a tenant's name at most.
pub const MAX_NAME: usize = 1024;

/// What one tenant may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TenantRules {
    /// With policy `fair`: its share of the work, relative to that of others; 1..=4096.
    pub weight: u32,
    /// Blocks that it holds at most; what it was promised counts as held, and a shared block once for each table.
    pub hard_blocks: u32,
    /// Blocks above which it yields: others go first while they wait, and of one class it is the first to be preempted.
    pub soft_blocks: u32,
    /// Requests of it that wait at once.
    pub max_waiting: u64,
    /// Tokens of them.
    pub max_waiting_tokens: u64,
    /// Blocks for these tokens.
    pub max_waiting_blocks: u64,
}

impl Default for TenantRules {
    fn default() -> Self {
        TenantRules {
            weight: 1,
            hard_blocks: u32::MAX,
            soft_blocks: u32::MAX,
            max_waiting: u64::MAX,
            max_waiting_tokens: u64::MAX,
            max_waiting_blocks: u64::MAX,
        }
    }
}

/// How much waits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Backlog {
    pub requests: u64,
    pub tokens: u64,
    pub blocks: u64,
}

impl Backlog {
    pub fn add(&mut self, other: Backlog) {
        self.requests += other.requests;
        self.tokens += other.tokens;
        self.blocks += other.blocks;
    }

    pub fn take(&mut self, other: Backlog) {
        self.requests -= other.requests;
        self.tokens -= other.tokens;
        self.blocks -= other.blocks;
    }
}

impl TenantRules {
    /// Checks every bound.
    ///
    /// # Errors
    /// [`Error::InvalidInput`] naming the first field that breaks one.
    pub fn validate(&self) -> Result<()> {
        if (1..=MAX_WEIGHT).contains(&self.weight) {
            return Ok(());
        }
        let bound = format!("must be 1..={MAX_WEIGHT}");
        Err(Error::InvalidInput { field: "weight", value: i128::from(self.weight), bound })
    }
}

/// Checks the length of a name.
pub(crate) fn check_name(name: &str) -> Result<()> {
    if name.len() <= MAX_NAME {
        return Ok(());
    }
    let bound = format!("bytes: must be at most {MAX_NAME}");
    Err(Error::InvalidInput { field: "tenant", value: name.len() as i128, bound })
}

/// One tenant.
#[derive(Clone, Debug)]
pub(crate) struct Tenant {
    name: Box<str>,
    pub rules: TenantRules,
    /// Live requests, waiting and running.
    pub live: usize,
    /// Blocks of its running requests.
    pub held: u32,
    /// What waits of it.
    pub backlog: Backlog,
    /// It stands in the order in which idle ones are forgotten.
    is_listed: bool,
}

impl Tenant {
    /// What it is called.
    pub fn name(&self) -> &str {
        &self.name
    }
}

/// All tenants.
#[derive(Debug)]
pub(crate) struct Tenants {
    tenants: Vec<Tenant>,
    numbers: BTreeMap<Box<str>, u32>,
    others: TenantRules,
    /// Configured ones come first and are never forgotten.
    configured: usize,
    idle: VecDeque<u32>,
}

impl Tenants {
    pub fn new(configured: &[(Box<str>, TenantRules)], others: TenantRules) -> Self {
        let mut tenants =
            Tenants { tenants: Vec::new(), numbers: BTreeMap::new(), others, configured: 0, idle: VecDeque::new() };
        for (name, rules) in configured {
            tenants.add(name, *rules);
        }
        tenants.configured = tenants.tenants.len();
        tenants
    }

    pub fn of(&self, number: u32) -> &Tenant {
        &self.tenants[number as usize]
    }

    pub fn of_mut(&mut self, number: u32) -> &mut Tenant {
        &mut self.tenants[number as usize]
    }

    /// Every tenant that has a number.
    pub fn all(&self) -> &[Tenant] {
        &self.tenants
    }

    /// The number of this tenant, if it has one.
    pub fn find(&self, name: &str) -> Option<u32> {
        self.numbers.get(name).copied()
    }

    /// The rules of a tenant of this name.
    pub fn rules(&self, name: &str) -> TenantRules {
        self.find(name).map_or(self.others, |number| self.of(number).rules)
    }

    /// What waits of a tenant of this name.
    pub fn backlog(&self, name: &str) -> Backlog {
        self.find(name).map_or(Backlog::default(), |number| self.of(number).backlog)
    }

    /// A request of this tenant begins to live. Its number, and whether that was another tenant's before.
    pub fn enter(&mut self, name: &str) -> (u32, bool) {
        let (number, is_reused) = match self.find(name) {
            Some(number) => (number, false),
            None => self.number_for(name),
        };
        self.tenants[number as usize].live += 1;
        (number, is_reused)
    }

    /// One more request of this tenant lives.
    pub fn enter_again(&mut self, number: u32) {
        self.tenants[number as usize].live += 1;
    }

    /// A request of this tenant has ended.
    pub fn exit(&mut self, number: u32) {
        let tenant = &mut self.tenants[number as usize];
        tenant.live -= 1;
        if tenant.live == 0 && number as usize >= self.configured && !std::mem::replace(&mut tenant.is_listed, true) {
            self.idle.push_back(number);
        }
    }

    fn number_for(&mut self, name: &str) -> (u32, bool) {
        while self.tenants.len() >= self.configured + REMEMBERED {
            let Some(number) = self.idle.pop_front() else { break };
            let tenant = &mut self.tenants[number as usize];
            tenant.is_listed = false;
            if tenant.live > 0 {
                continue;
            }
            self.numbers.remove(&tenant.name);
            tenant.name = name.into();
            self.numbers.insert(name.into(), number);
            return (number, true);
        }
        (self.add(name, self.others), false)
    }

    fn add(&mut self, name: &str, rules: TenantRules) -> u32 {
        let number = self.tenants.len() as u32;
        self.tenants.push(Tenant {
            name: name.into(),
            rules,
            live: 0,
            held: 0,
            backlog: Backlog::default(),
            is_listed: false,
        });
        self.numbers.insert(name.into(), number);
        number
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn idle_tenants_are_forgotten_and_live_ones_never() {
        let mut tenants = Tenants::new(
            &[("paid".into(), TenantRules { weight: 4, ..TenantRules::default() })],
            TenantRules::default(),
        );
        let (kept, _) = tenants.enter("kept");
        let mut reused = 0;
        for i in 0..3 * REMEMBERED {
            let (number, is_reused) = tenants.enter(&format!("guest {i}"));
            reused += usize::from(is_reused);
            assert!(number != kept && number != 0);
            tenants.exit(number);
        }
        assert_eq!(tenants.tenants.len(), REMEMBERED + 1);
        assert_eq!(reused, 2 * REMEMBERED + 1);
        assert_eq!((tenants.find("kept"), tenants.find("guest 0")), (Some(kept), None));
        assert_eq!(tenants.rules("paid").weight, 4);
        assert!(tenants.idle.len() <= REMEMBERED + 1);
    }
}
