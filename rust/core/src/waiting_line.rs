//! The requests that wait, in the order of a policy: whoever joins, leaves, or is looked at costs the logarithm of how many wait.
//!
//! Before: submit and preemption let seats join. After: a plan looks at them one by one with [`next`](WaitingLine::next); who is not
//! admitted stands [aside](WaitingLine::restore) until the plan is done, and then at the same place again. Within a tenant's line
//! seats are ordered by key, the lines by their standing, so nothing here depends on the order of a hash table.

use crate::policy::Policy;
use crate::rank::Ask;
use crate::seat_heap::{Key, NOWHERE};
use crate::seat_order::SeatOrder;

/// Seats of waiting requests.
#[derive(Debug)]
pub(crate) struct WaitingLine {
    pub policy: Box<dyn Policy>,
    lines: Vec<SeatOrder>,
    places: Vec<u32>,
    /// The lines in which somebody stands.
    order: SeatOrder,
    order_places: Vec<u32>,
    /// Looked at in the plan under way, and still waiting.
    aside: Vec<usize>,
    /// Lines that the plan under way passes over.
    skipped: Vec<usize>,
    /// Those that wait, the ones aside included.
    len: usize,
}

impl WaitingLine {
    pub fn new(policy: Box<dyn Policy>) -> Self {
        WaitingLine {
            policy,
            lines: Vec::new(),
            places: Vec::new(),
            order: SeatOrder::default(),
            order_places: Vec::new(),
            aside: Vec::new(),
            skipped: Vec::new(),
            len: 0,
        }
    }

    /// How many wait.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Lets `seat` wait from now on; its tenant has `weight`.
    pub fn join(&mut self, seat: usize, ask: &Ask, weight: u32) {
        let line = ask.tenant as usize;
        if self.lines.len() <= line {
            self.lines.resize(line + 1, SeatOrder::default());
        }
        if self.lines[line].is_empty() {
            let lowest = self.lowest_line();
            self.policy.wake(line, weight, lowest);
        }
        self.put(seat, line, self.policy.key(ask));
        self.len += 1;
    }

    /// Takes `seat`, which waits and is not aside, out.
    pub fn leave(&mut self, seat: usize, ask: &Ask) {
        let line = ask.tenant as usize;
        self.take(seat, line);
        self.len -= 1;
        if self.lines[line].is_empty() {
            self.policy.sleep(line);
        }
    }

    /// The key of `seat`, which waits and is not aside, is another one now.
    pub fn reorder(&mut self, seat: usize, ask: &Ask) {
        let line = ask.tenant as usize;
        self.lines[line].change(&mut self.places, seat, self.policy.key(ask));
        self.place_line(line);
    }

    /// The next request to look at; it stands aside afterwards.
    pub fn next(&mut self) -> Option<usize> {
        let line = self.lowest_line()?;
        let (_, seat) = self.lines[line].first()?;
        self.take(seat, line);
        self.aside.push(seat);
        Some(seat)
    }

    /// The request that was looked at last does not wait any more.
    pub fn admit(&mut self, ask: &Ask) {
        self.aside.pop();
        self.len -= 1;
        let line = ask.tenant as usize;
        if self.lines[line].is_empty() {
            self.policy.sleep(line);
        }
    }

    /// Nobody of this tenant is looked at until [`allow`](Self::allow), or until the plan is done.
    pub fn skip(&mut self, tenant: u32) {
        let line = tenant as usize;
        self.skipped.push(line);
        if self.order_places.get(line).is_some_and(|&place| place != NOWHERE) {
            self.order.remove(&mut self.order_places, line);
        }
    }

    /// The tenants that were skipped are looked at again. Those of their requests that stand aside stay there.
    pub fn allow(&mut self) {
        for line in std::mem::take(&mut self.skipped) {
            self.place_line(line);
        }
    }

    /// Those that stand aside go back to their places.
    pub fn restore(&mut self, asks: &[Ask]) {
        self.allow();
        while let Some(seat) = self.aside.pop() {
            let ask = &asks[seat];
            self.put(seat, ask.tenant as usize, self.policy.key(ask));
        }
    }

    /// Whether somebody was looked at in the plan under way who still waits.
    pub fn has_aside(&self) -> bool {
        !self.aside.is_empty()
    }

    /// Who is to be looked at first.
    pub fn first(&mut self) -> Option<usize> {
        let line = self.lowest_line()?;
        self.lines[line].first().map(|(_, seat)| seat)
    }

    /// All seats but those aside, in no order, with their keys.
    pub fn seats(&self) -> impl Iterator<Item = (Key, usize)> + '_ {
        self.lines.iter().flat_map(SeatOrder::iter)
    }

    /// Whether the orders are sound and everybody is counted.
    pub fn is_sound(&self) -> bool {
        let sound = self.order.is_sound(&self.order_places)
            && self.lines.iter().all(|line| line.is_sound(&self.places))
            && self.lines.iter().enumerate().all(|(line, heap)| {
                heap.is_empty() == self.order_places.get(line).is_none_or(|&place| place == NOWHERE)
            });
        let counted: usize = self.lines.iter().map(SeatOrder::len).sum();
        sound && self.aside.is_empty() && self.skipped.is_empty() && counted == self.len
    }

    /// The line that goes first. A line whose standing rose is moved when it comes to the head.
    fn lowest_line(&mut self) -> Option<usize> {
        loop {
            let (key, line) = self.order.first()?;
            let (first, _) = self.lines[line].first()?;
            let standing = self.policy.standing(line, first);
            if standing == key {
                return Some(line);
            }
            self.order.change(&mut self.order_places, line, standing);
        }
    }

    fn put(&mut self, seat: usize, line: usize, key: Key) {
        self.lines[line].push(&mut self.places, seat, key);
        self.place_line(line);
    }

    fn take(&mut self, seat: usize, line: usize) {
        self.lines[line].remove(&mut self.places, seat);
        self.place_line(line);
    }

    /// Puts a line where its first request belongs, if it is not skipped.
    fn place_line(&mut self, line: usize) {
        if self.order_places.len() <= line {
            self.order_places.resize(line + 1, NOWHERE);
        }
        let is_placed = self.order_places[line] != NOWHERE;
        match self.lines.get(line).and_then(SeatOrder::first) {
            Some((first, _)) if is_placed => {
                self.order.change(&mut self.order_places, line, self.policy.standing(line, first));
            }
            Some((first, _)) if !self.skipped.contains(&line) => {
                self.order.push(&mut self.order_places, line, self.policy.standing(line, first));
            }
            None if is_placed => self.order.remove(&mut self.order_places, line),
            _ => {}
        }
    }
}
