//! Walks over the whole queue, and its audit. Exact while nobody else is at work.

use crate::error::{Error, Result};
use crate::free_queue::node::Place;
use crate::free_queue::{FreeQueue, LANES};
use crate::ids::BlockId;
use crate::sync::Ordering;

fn wrong(detail: String) -> Result<()> {
    Err(Error::Audit { check: "A3", detail })
}

impl FreeQueue {
    /// From head to tail. Ends, however broken the links are.
    pub fn iter(&self) -> impl Iterator<Item = BlockId> + '_ {
        let lanes = self.lanes.used().flat_map(|lane| self.lanes.iter(&self.nodes, lane, false));
        self.stack.iter(&self.nodes).chain(self.fresh_ids()).chain(lanes).map(BlockId)
    }

    /// From tail to head, by the lanes' links backwards.
    pub fn iter_back(&self) -> impl Iterator<Item = BlockId> + '_ {
        let lanes = self.lanes.used().rev().flat_map(|lane| self.lanes.iter(&self.nodes, lane, true));
        // The stack has no links backwards.
        let mut stack: Vec<u32> = self.stack.iter(&self.nodes).collect();
        stack.reverse();
        lanes.chain(self.fresh_ids().rev()).chain(stack).map(BlockId)
    }

    fn fresh_ids(&self) -> std::ops::Range<u32> {
        self.fresh.0.load(Ordering::Acquire) as u32 + 1..self.num_blocks()
    }

    /// The lane in which `block` stands, if it stands in one.
    #[must_use]
    pub fn lane(&self, block: BlockId) -> Option<u16> {
        match self.state(block).place {
            Place::Lane(lane) => Some(lane),
            _ => None,
        }
    }

    /// Whether the content of `block` has a name.
    #[must_use]
    pub fn is_named(&self, block: BlockId) -> bool {
        self.state(block).named
    }

    /// Whether `block` lost its last holder and was not queued: it is the caller's of [`FreeQueue::drop_holders`], or in the stack.
    pub(crate) fn is_out(&self, block: BlockId) -> bool {
        matches!(self.state(block).place, Place::Out(_))
    }

    /// A3: the walks agree with each other and with the counter, and every block that is met, and no other, says that it is there.
    ///
    /// # Errors
    /// [`Error::Audit`] with what was found.
    pub fn audit(&self) -> Result<()> {
        self.audit_walks()?;
        self.audit_places()
    }

    pub(crate) fn audit_walks(&self) -> Result<()> {
        let forwards: Vec<BlockId> = self.iter().collect();
        let mut backwards: Vec<BlockId> = self.iter_back().collect();
        backwards.reverse();
        if forwards != backwards || forwards.len() != self.len() as usize {
            let (ahead, back) = (forwards.len(), backwards.len());
            return wrong(format!("the queue counts {}, walks {ahead} forwards, {back} backwards", self.len()));
        }
        Ok(())
    }

    pub(crate) fn audit_places(&self) -> Result<()> {
        let mut met = vec![None; self.num_blocks() as usize];
        let stack = self.stack.iter(&self.nodes).map(|id| (id, Place::Out(0)));
        let fresh = self.fresh_ids().map(|id| (id, Place::Fresh));
        let lanes = self
            .lanes
            .used()
            .flat_map(|lane| self.lanes.iter(&self.nodes, lane, false).map(move |id| (id, Place::Lane(lane))));
        for (id, place) in stack.chain(fresh).chain(lanes) {
            if met[id as usize].replace(place).is_some() {
                return wrong(format!("block {id} stands in the queue twice"));
            }
        }
        for (id, met) in met.iter().enumerate().skip(1) {
            let place = self.state(BlockId(id as u32)).place;
            let agrees = match (met, place) {
                (None, Place::Held(_) | Place::Out(_)) | (Some(Place::Out(_)), Place::Out(_)) => true,
                (Some(met), place) => *met == place,
                (None, _) => false,
            };
            if !agrees || matches!(place, Place::Lane(lane) if usize::from(lane) >= LANES * self.lanes.owners()) {
                return wrong(format!("block {id} is {place:?} and was met {met:?}"));
            }
        }
        Ok(())
    }

    /// The blocks of a freed list that the caller keeps for later, in order.
    pub(crate) fn freed_ids(&self, freed: &super::Freed) -> impl Iterator<Item = BlockId> + '_ {
        let mut next = freed.first;
        (0..freed.len).map(move |_| {
            let id = next;
            next = super::low(self.nodes.next(id).load(Ordering::Relaxed));
            BlockId(id)
        })
    }

    /// A freed list again, of blocks that the caller kept. Null blocks are passed over.
    pub(crate) fn freed_again(&self, blocks: &[BlockId]) -> super::Freed {
        let mut freed = super::Freed::default();
        for &block in blocks.iter().filter(|&&block| block != BlockId::NULL) {
            let named = self.state(block).named;
            self.append(&mut freed, block.get(), named);
        }
        freed
    }

    /// Makes the caller the only holder of a block of a freed list that it kept.
    pub(crate) fn hold_freed(&self, block: BlockId) {
        let named = self.state(block).named;
        self.nodes.set_state(block.get(), super::State { place: Place::Held(1), named });
    }
}
