//! Which sequences of a step begin with the same blocks: what cascade attention reads once for all of them.
//!
//! Before: a plan is made. After: kernels attend a group's blocks with the queries of all its members at once. Made only when it is
//! asked for, from the tables of the step's requests; reads each shared entry once or twice, and each tree level's members again.
//! Always: a sequence is in at most one group; a group has two members and more, whose tables begin with the same `blocks` blocks,
//! and these end before the first query of each; no other such grouping saves more reads, the sum of (members - 1) * blocks.

use crate::error::{Error, Result};
use crate::ids::{BlockId, StepId};
use crate::mutant::{self, Mutant};
use crate::scheduler::Scheduler;

/// P groups with M members in all.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PrefixGroups {
    /// [M] sequences of the plan, group by group, ascending in each.
    pub members: Vec<i32>,
    /// [P + 1] where each group's members begin.
    pub starts: Vec<i32>,
    /// [P] leading blocks that a group shares.
    pub blocks: Vec<i32>,
}

impl Scheduler {
    /// The groups of step `step`, which is in flight, by the tables of `group`; none in a group with a window, whose first entries
    /// are null. A group shares at least `min_blocks` blocks. Who was aborted, preempted or taken back since the plan is in none.
    ///
    /// # Errors
    /// [`Error::WrongStep`]; [`Error::InvalidInput`] for a group that there is not, or `min_blocks` of 0.
    pub fn prefix_groups(&self, step: StepId, group: usize, min_blocks: usize) -> Result<PrefixGroups> {
        let specs = self.groups.specs();
        let Some(spec) = specs.get(group) else {
            let bound = format!("must be below {}, the groups of layers", specs.len());
            return Err(Error::InvalidInput { field: "group", value: group as i128, bound });
        };
        if min_blocks == 0 {
            return Err(Error::InvalidInput { field: "min_blocks", value: 0, bound: "must be at least 1".to_owned() });
        }
        if !self.flight.in_flight().any(|number| number == step.0) {
            return Err(Error::WrongStep { given: step, expected: self.flight.oldest() });
        }
        let mut prefixes = Vec::new();
        if spec.window.is_none() {
            for (seq, entry) in self.flight.of(step.0).entries.iter().enumerate() {
                if self.is_stale(entry) && !mutant::is_on(Mutant::PrefixOfStale) {
                    continue;
                }
                let Some(request) = self.seats[entry.seat()].as_ref() else { continue };
                let blocks = request.table_of(group).blocks();
                let more = usize::from(mutant::is_on(Mutant::PrefixTooLong));
                let whole = (self.block_size.full_blocks(entry.start()) + more).min(blocks.len());
                if whole >= min_blocks {
                    prefixes.push(Prefix { seq: seq as i32, blocks: &blocks[..whole] });
                }
            }
        }
        let mut tree = Tree::of(&mut prefixes);
        tree.weigh(min_blocks);
        Ok(tree.groups(&prefixes))
    }
}

/// A sequence, and the blocks before its first query.
struct Prefix<'a> {
    seq: i32,
    blocks: &'a [BlockId],
}

/// Sequences that agree in their first `depth` blocks, and in no more: a range of the prefixes in order.
struct Node {
    parent: usize,
    first: usize,
    end: usize,
    depth: usize,
    /// A group is made here if the next one further up shares at most so many blocks.
    joins_below: Option<usize>,
}

impl Node {
    fn len(&self) -> usize {
        self.end - self.first
    }
}

/// The nodes, parents before their children. The first has everybody.
struct Tree(Vec<Node>);

const NOBODY: usize = usize::MAX;

impl Tree {
    /// Brings `prefixes` into an order in which those that agree stand together.
    fn of(prefixes: &mut [Prefix<'_>]) -> Tree {
        let mut nodes = Vec::new();
        let mut open = vec![(NOBODY, 0, prefixes.len(), 0)];
        while let Some((parent, first, end, agreed)) = open.pop() {
            let members = &mut prefixes[first..end];
            let Some((one, others)) = members.split_first() else { continue };
            let agree = |depth, other: &Prefix<'_>| {
                let pairs = one.blocks[agreed..depth].iter().zip(&other.blocks[agreed..]);
                agreed + pairs.take_while(|(one, other)| one == other).count()
            };
            let depth = others.iter().fold(one.blocks.len(), agree);
            let node = nodes.len();
            nodes.push(Node { parent, first, end, depth, joins_below: None });
            members.sort_unstable_by_key(|prefix| (prefix.blocks.get(depth).copied(), prefix.seq));
            let mut at = first;
            for class in members.chunk_by(|one, other| one.blocks.get(depth) == other.blocks.get(depth)) {
                if class.len() > 1 && class[0].blocks.len() > depth {
                    open.push((node, at, at + class.len(), depth));
                }
                at += class.len();
            }
        }
        Tree(nodes)
    }

    /// Finds where groups are made so that most is saved.
    ///
    /// What a node saves at best depends on how much the next group further up shares, which its members join otherwise: it is found,
    /// children first, for every node above it, and for none. The more that group shares, the less is gained by one here.
    fn weigh(&mut self, min_blocks: usize) {
        // For each node, and for no group, each node above it and itself as the next group: what its children save, and who is in them.
        let mut from_children: Vec<(Vec<usize>, usize)> = vec![(Vec::new(), 0); self.0.len()];
        for at in (0..self.0.len()).rev() {
            let above = self.above(at);
            let (mut saved, in_children) = std::mem::take(&mut from_children[at]);
            saved.resize(above.len() + 1, 0);
            let node = &mut self.0[at];
            let alone = node.len() - in_children;
            let joined = saved[above.len()] + alone * node.depth - node.depth;
            let may_join = node.depth >= min_blocks && (saved[0] == 0 || !mutant::is_on(Mutant::PrefixDeepestOnly));
            for (saved, shared) in saved.iter_mut().zip(above) {
                *saved += alone * shared;
                if may_join && joined > *saved {
                    *saved = joined;
                    node.joins_below = Some(shared);
                }
            }
            let (parent, len) = (node.parent, node.len());
            if let Some((sums, members)) = from_children.get_mut(parent) {
                sums.resize(sums.len().max(saved.len() - 1), 0);
                sums.iter_mut().zip(&saved).for_each(|(sum, saved)| *sum += saved);
                *members += len;
            }
        }
    }

    /// How many blocks the next group above `node` may share: none, or what a node above it does.
    fn above(&self, node: usize) -> Vec<usize> {
        let parents = std::iter::successors(self.0.get(self.0[node].parent), |node| self.0.get(node.parent));
        let mut shared: Vec<usize> = parents.map(|parent| parent.depth).collect();
        shared.push(0);
        shared.reverse();
        shared
    }

    /// The groups that save most.
    fn groups(&self, prefixes: &[Prefix<'_>]) -> PrefixGroups {
        let mut groups = PrefixGroups { members: Vec::new(), starts: vec![0], blocks: Vec::new() };
        let mut owner = vec![NOBODY; prefixes.len()];
        // Of each node, what the next group shares, itself included.
        let mut shared: Vec<usize> = Vec::with_capacity(self.0.len());
        for node in &self.0 {
            let above = shared.get(node.parent).copied().unwrap_or(0);
            let joins = node.joins_below.is_some_and(|most| above <= most);
            shared.push(if joins { node.depth } else { above });
            if joins {
                owner[node.first..node.end].fill(groups.blocks.len());
                groups.blocks.push(node.depth as i32);
            }
        }
        let owned = owner.iter().zip(prefixes).filter(|(owner, _)| **owner != NOBODY);
        let mut members: Vec<(usize, i32)> = owned.map(|(&owner, prefix)| (owner, prefix.seq)).collect();
        members.sort_unstable();
        for same in members.chunk_by(|(one, _), (other, _)| one == other) {
            groups.members.extend(same.iter().map(|&(_, seq)| seq));
            groups.starts.push(groups.members.len() as i32);
        }
        groups
    }
}
