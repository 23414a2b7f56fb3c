//! All that a scheduler remembers between calls, as text: what a refused operation must leave as it was. Only with feature `mutants`.
//!
//! Before: a test is about to have something refused. After: it compares. Memory that is only kept for its room is left
//! out, and so are timelines: that something was refused stands there.

use std::fmt::Write;

use crate::scheduler::Scheduler;

impl Scheduler {
    /// Holders, names and worth of every block, the queue's order, promises, lines, rows, requests with their tables, the plan's draft,
    /// the step in flight, pins, counters and events.
    #[must_use]
    pub fn state(&self) -> String {
        let mut text = String::new();
        let mut line = |name: &str, value: &dyn std::fmt::Debug| writeln!(text, "{name}: {value:?}").expect("a string");
        let (pool, index) = (&self.pool, self.pool.index());
        for block in index.blocks() {
            let worth = pool.retention().map(|retention| retention.worth(block));
            let entry = (pool.holders(block), pool.is_free(block), index.state(block), index.key(block), worth);
            line("block", &(block, entry));
        }
        line("free", &pool.free_blocks().collect::<Vec<_>>());
        line("counts", &(pool.num_free(), pool.num_parked(), pool.evictions(), self.promised));
        let mut waiting: Vec<_> = self.waiting.seats().collect();
        waiting.sort_unstable();
        line("lines", &(&self.running, &waiting, &self.free_rows, &self.untold));
        self.seats.iter().for_each(|request| line("request", request));
        line("steps", &(self.steps, self.next_id, self.copied, self.partial_rows, self.idle_with_work));
        line("draft", &self.draft);
        line("flight", &self.flight);
        line("pins", &self.pins);
        line("counters", &(self.counters, self.misses));
        line("ended", &(&self.ended, self.ended_with_row));
        let mut bytes = Vec::new();
        let next = self.event_snapshot(&mut bytes);
        line("events", &(next, bytes));
        text
    }
}
