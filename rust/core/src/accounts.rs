//! What running requests hold and are expected to take yet, by request and by tenant.
//!
//! Before: a table or a promise of a request changes. After: [`recount`](Scheduler::recount) has brought its tenant's blocks and the
//! expected growth of all up to date. A block counts once for each table that names it, and a promised block counts as held, so what
//! a tenant holds is never more than its account says.

use crate::block_table::BlockTable;
use crate::rank::Ask;
use crate::scheduler::Scheduler;

/// What has been seen of the lengths of outputs, and what is expected of those that run.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Outlook {
    /// Expected outputs of a request, in 256ths; 0 as long as nothing was seen.
    outputs: u64,
    /// Blocks that running requests are expected to take beside what they hold and were promised.
    pub expected: u64,
}

impl Outlook {
    /// A request ended with so many outputs.
    pub fn see_end(&mut self, outputs: usize) {
        self.step_towards(outputs, 8);
    }

    /// A request had to stop with so many outputs so far: it has at least these.
    pub fn see_stop(&mut self, outputs: usize) {
        if (outputs as u64) << 8 > self.outputs {
            self.step_towards(outputs, 2);
        }
    }

    /// Outputs that a request is expected to have in the end, which has `so_far` and may have `most`. One that outlived what is
    /// expected goes on for half as long again.
    pub fn outputs(&self, so_far: usize, most: usize) -> usize {
        let expected = (self.outputs >> 8) as usize;
        let outlived = if so_far > 0 { so_far + so_far / 2 } else { 0 };
        if so_far < expected { expected.min(most) } else { outlived.min(most) }
    }

    fn step_towards(&mut self, outputs: usize, part: u64) {
        let seen = (outputs as u64) << 8;
        self.outputs = if self.outputs == 0 { seen } else { self.outputs - self.outputs / part + seen / part };
    }
}

/// The account of one running request.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Account {
    /// Blocks of its tables and promises.
    pub held: u32,
    /// Blocks that it is expected to hold in the end.
    pub expected: u32,
}

impl Account {
    fn growth(&self) -> u64 {
        u64::from(self.expected.saturating_sub(self.held))
    }
}

impl Scheduler {
    /// The tables or the promise of the request at `seat` changed.
    pub(crate) fn recount(&mut self, seat: usize) {
        let request = self.request(seat);
        let null = |table: &BlockTable| if self.groups.has_window() { table.num_null() } else { 0 };
        let named: usize = request.tables().map(|table| table.len() - null(table)).sum();
        let held = named as u32 + request.promised;
        self.set_account(seat, Account { held, ..request.account });
    }

    /// The tables of the request at `seat` got `taken` blocks more, `own` of all that it took promised before.
    pub(crate) fn hold_more(&mut self, seat: usize, taken: u32, own: u32) {
        let account = self.request(seat).account;
        self.set_account(seat, Account { held: account.held + taken - own, ..account });
    }

    /// The request at `seat` holds nothing any more.
    pub(crate) fn close_account(&mut self, seat: usize) {
        self.set_account(seat, Account::default());
    }

    /// The request at `seat`, which just began to run, is expected to hold so many blocks in the end.
    pub(crate) fn open_account(&mut self, seat: usize, expected: u32) {
        self.set_account(seat, Account { expected, ..self.request(seat).account });
        self.recount(seat);
    }

    /// Blocks that the request at `seat` is expected to need in the end, from its first row on; 0 if growth is not estimated. Through
    /// a window it need not grow, so with one nothing is estimated.
    pub(crate) fn expected_blocks(&self, seat: usize) -> u32 {
        if !self.config.queue.estimate_growth || self.config.queue.no_evict || self.groups.has_window() {
            return 0;
        }
        let request = self.request(seat);
        let (known, outputs) = (request.num_tokens(), request.num_outputs());
        let more = self.outlook.outputs(outputs, request.limits.max_tokens as usize).saturating_sub(outputs);
        self.blocks_of((known + more).min(self.config.max_model_len as usize - 1).max(known)) as u32
    }

    /// Blocks that the tenant of `ask` may still take.
    pub(crate) fn room_of_tenant(&self, ask: &Ask) -> u32 {
        let tenant = self.tenants.of(ask.tenant);
        tenant.rules.hard_blocks.saturating_sub(tenant.held)
    }

    fn set_account(&mut self, seat: usize, account: Account) {
        let old = std::mem::replace(&mut self.request_mut(seat).account, account);
        let tenant = self.tenants.of_mut(self.asks[seat].tenant);
        tenant.held = tenant.held - old.held + account.held;
        self.outlook.expected = self.outlook.expected - old.growth() + account.growth();
    }
}
