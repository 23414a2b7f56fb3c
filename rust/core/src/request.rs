//! One request: its tokens, how far they are computed, where their rows live, and when it ends.
//!
//! Before: submit. After: the scheduler moves it between waiting and running until it ends. Always
//! `published * block_size <= computed <= tokens`: rows count as computed when their step is committed, never when it is planned.

use std::ops::{Deref, DerefMut};

use crate::accounts::Account;
use crate::block_hash::{BlockHasher, Prompt};
use crate::block_size::BlockSize;
use crate::block_table::BlockTable;
use crate::chain::Chain;
use crate::ids::{BlockId, Key, RequestId, Row, TokenId};
use crate::miss::Miss;
use crate::mutant::{self, Mutant};
use crate::retention::{Ranges, Worth};
use crate::trail::Trail;

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i64)]
pub enum End {
    /// A stop token, or the caller saw a stop string.
    Stop = 1,
    /// `max_tokens` or `max_model_len` reached.
    Length = 2,
    /// The caller aborted it.
    Aborted = 3,
    /// Alone in the pool and still not fitting.
    Capacity = 4,
    /// Its deadline was over.
    Expired = 5,
    /// Its queue deadline was over before it was admitted for the first time.
    Refused = 6,
}

impl End {
    /// Whether the request ended as finished; otherwise it was aborted, or refused if it says so.
    #[must_use]
    pub fn is_finished(self) -> bool {
        matches!(self, End::Stop | End::Length)
    }
}

/// Where a live request is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// In the waiting line; holds nothing.
    Waiting,
    /// Has a row of the block tables.
    Running(Row),
}

/// What a request may ask for, beside its prompt.
#[derive(Clone, Debug, Default)]
pub struct Limits {
    /// Outputs at most.
    pub max_tokens: u32,
    /// Outputs before a stop token counts.
    pub min_tokens: u32,
    /// Tokens that end the text.
    pub stop_tokens: Vec<TokenId>,
}

/// Tokens that wait in a request's own memory before its list is touched.
const FRESH: usize = 16;

/// No token of any vocabulary.
const NO_TOKEN: TokenId = TokenId::MAX;

/// Bits of an epoch that count; those above are the request's id, so that no two requests have an epoch in common.
const EPOCH_BITS: u32 = 20;

/// The epoch of no request.
const NOBODY: u64 = u64::MAX;

/// Of a seat that is not empty.
const SOMEBODY: &str = "a request";

/// A live request, in four cache lines, one request's behind the other's. A plan reads and writes the first one of those that decode, a
/// commit the second too; where a block begins or ends it is all four, and the ends of the three lists that they lead to.
#[derive(Debug)]
#[repr(C, align(64))]
pub struct Request {
    /// Raised when what is in flight for this request stops counting. No other request ever has the same: it begins with the id.
    pub(crate) epoch: u64,
    /// The last step that ran it, counted from 1.
    pub(crate) planned_in: u64,
    /// Rows that committed steps have written, or that a hit brought.
    computed: u32,
    /// How many tokens it has: prompt, then confirmed outputs.
    len: u32,
    /// Tokens that end it.
    longest: u32,
    /// A row below this one is planned from these lines alone, if it is the next; 0 = look at everything.
    edge: u32,
    /// The block that ends there.
    block: BlockId,
    /// Its last token.
    newest: TokenId,
    /// The only token that ends it, unless `watched`.
    stop: TokenId,
    pub(crate) place: Place,
    /// Its entry in the last step that ran it, if that is in flight.
    pub(crate) entry: u32,
    /// The entry of that plan's `sample_rows` that brings its next token but those before it.
    source: i32,
    /// Rows that steps in flight compute.
    ahead: u32,
    /// Tokens that they bring.
    coming: u8,
    num_fresh: u8,
    /// The next output needs a closer look: it is the first, or several tokens may end the text, or none yet.
    watched: bool,
    /// The block of the next row may be shared or published, so that a write asks for a copy first.
    pub(crate) asks_to_write: bool,

    /// Its newest tokens, which its list does not have yet.
    fresh: [TokenId; FRESH],

    /// Blocks at the head of the tables whose content this request found or published.
    pub(crate) published: usize,
    /// Blocks promised at admission and not yet taken.
    pub(crate) promised: u32,
    /// What it holds and is expected to hold, while it runs.
    pub(crate) account: Account,
    /// The weights changed while it ran: its rows are of several versions, so none of them is published any more.
    pub(crate) is_mixed: bool,
    /// Nothing but tokens and the key before it is hashed for a block behind the first.
    is_plain: bool,
    /// None of [`Request::nobody`].
    rest: Option<Box<Rest>>,

    /// The table of the first group.
    pub(crate) table: BlockTable,
    /// Keys of the first full blocks of its tokens. Those of the prompt are there from submit on.
    pub(crate) keys: Vec<Key>,
    /// Its tokens but the fresh ones.
    tokens: Vec<TokenId>,
}

/// The rest of a request.
#[derive(Debug)]
pub struct Rest {
    /// The tables of the groups behind the first, as long as `table`.
    pub(crate) others: Box<[BlockTable]>,
    /// What explains a miss, if that is wanted.
    pub(crate) trail: Option<Box<Trail>>,
    /// What it asks for its blocks, if anything.
    pub(crate) retention: Option<Box<Ranges>>,
    /// Sequences that will go on from its prompt with its first output, and their rows while it runs.
    pub(crate) siblings: u32,
    pub(crate) spare_rows: Vec<Row>,
    /// The first sequence of those with which it is one request, if there are several.
    pub(crate) family: Option<RequestId>,
    /// Drafts for the next plan, which follow its last token, known or on its way.
    pub(crate) drafts: Vec<TokenId>,
    pub(crate) prompt_len: usize,
    /// What the keys depend on beside the tokens.
    pub(crate) chain: Chain,
    pub(crate) limits: Limits,
    /// Why its prefix was found no further at the first admission.
    pub(crate) miss: Option<Miss>,
    pub(crate) preemptions: u32,
    /// It was promised all that it may ever need, since it may not be preempted again: see `secured.rs`.
    pub(crate) secured: bool,
    pub(crate) submitted_us: u64,
    /// Prompt tokens found in the prefix cache at the first admission.
    pub(crate) cached: Option<usize>,
    /// `planned_in` when it lost what it shared: until it is planned again, it looks for its prefix once more.
    lost_in: u64,
    /// Hit of the first look; used by a mutant only.
    pub(crate) first_hit: Option<usize>,
}

impl Deref for Request {
    type Target = Rest;

    fn deref(&self) -> &Rest {
        self.rest.as_deref().expect(SOMEBODY)
    }
}

impl DerefMut for Request {
    fn deref_mut(&mut self) -> &mut Rest {
        self.rest.as_deref_mut().expect(SOMEBODY)
    }
}

/// What one more row of a decode needs to be planned: see [`Request::next_row`].
pub(crate) struct NextRow {
    pub row: Row,
    pub position: usize,
    pub token: TokenId,
    /// The entry of the previous plan's `sample_rows` that brings the token; -1 if it is known.
    pub source: i32,
    pub slot: i64,
    pub epoch: u64,
    pub id: RequestId,
    /// Rows behind it that its block has.
    pub room: usize,
}

impl Request {
    /// A request that waits. It never has more than `max_model_len` tokens.
    pub(crate) fn new(id: RequestId, prompt: Prompt, limits: Limits, now_us: u64, max_model_len: usize) -> Self {
        let Prompt { tokens, keys, chain, trail, generation: _, said: _ } = prompt;
        let len = tokens.len();
        let stop = match limits.stop_tokens[..] {
            [stop] => stop,
            _ => NO_TOKEN,
        };
        Request {
            epoch: id.0 << EPOCH_BITS,
            len: len as u32,
            longest: len.saturating_add(limits.max_tokens as usize).min(max_model_len) as u32,
            newest: tokens.last().copied().unwrap_or_default(),
            stop,
            is_plain: chain.extras.is_none() && trail.is_none(),
            keys,
            tokens,
            rest: Some(Box::new(Rest {
                prompt_len: len,
                limits,
                chain,
                trail,
                miss: None,
                others: Box::default(),
                siblings: 0,
                spare_rows: Vec::new(),
                family: None,
                drafts: Vec::new(),
                preemptions: 0,
                secured: false,
                submitted_us: now_us,
                cached: None,
                lost_in: u64::MAX,
                retention: None,
                first_hit: None,
            })),
            ..Request::nobody()
        }
    }

    /// What stands in an empty seat. It owns no memory.
    pub(crate) fn nobody() -> Self {
        Request {
            epoch: NOBODY,
            planned_in: 0,
            computed: 0,
            len: 0,
            longest: 0,
            edge: 0,
            block: BlockId::NULL,
            newest: 0,
            stop: NO_TOKEN,
            place: Place::Waiting,
            entry: 0,
            source: -1,
            ahead: 0,
            coming: 0,
            num_fresh: 0,
            watched: true,
            asks_to_write: false,
            fresh: [0; FRESH],
            published: 0,
            promised: 0,
            account: Account::default(),
            is_mixed: false,
            is_plain: false,
            table: BlockTable::new(),
            keys: Vec::new(),
            tokens: Vec::new(),
            rest: None,
        }
    }

    /// Whether it is what stands in an empty seat.
    #[inline(always)]
    pub(crate) fn is_nobody(&self) -> bool {
        self.epoch == NOBODY
    }

    /// A second sequence with the same tokens, which counts the outputs so far as its own. It has no row and no block yet.
    pub(crate) fn child(&self, id: RequestId, limits: Limits, now_us: u64, max_model_len: usize) -> Self {
        let (tokens, keys, chain) = (self.tokens().to_vec(), self.keys.clone(), self.chain.clone());
        let prompt = Prompt { tokens, keys, chain, trail: self.trail.clone(), generation: 0, said: None };
        let mut child = Request::new(id, prompt, limits, now_us, max_model_len);
        child.prompt_len = self.prompt_len;
        child.longest = child.longest_with(max_model_len);
        (child.is_mixed, child.cached, child.miss) = (self.is_mixed, self.cached, self.miss);
        child.retention = self.retention.clone();
        child
    }

    /// Its name.
    pub(crate) fn id(&self) -> RequestId {
        RequestId(self.epoch >> EPOCH_BITS)
    }

    /// How many tokens it has.
    pub(crate) fn num_tokens(&self) -> usize {
        self.len as usize
    }

    /// Rows that committed steps have written, or that a hit brought.
    pub(crate) fn computed(&self) -> usize {
        self.computed as usize
    }

    pub(crate) fn set_computed(&mut self, rows: usize) {
        self.computed = rows as u32;
    }

    /// Its tokens. Whoever asks has settled them.
    pub(crate) fn tokens(&self) -> &[TokenId] {
        assert_eq!(self.num_fresh, 0, "fresh tokens are not in the list yet");
        &self.tokens
    }

    /// Moves the fresh tokens to the list.
    pub(crate) fn settle(&mut self) {
        let fresh = usize::from(std::mem::take(&mut self.num_fresh));
        self.tokens.extend_from_slice(&self.fresh[..fresh]);
    }

    /// Makes room for so many tokens in all.
    pub(crate) fn reserve_tokens(&mut self, count: usize) {
        let more = count.saturating_sub(self.tokens.len());
        self.tokens.reserve_exact(more);
    }

    /// The next row, if these lines alone are enough to plan it: a decode inside a block that it alone writes.
    pub(crate) fn next_row(&self, size: BlockSize) -> Option<NextRow> {
        let position = self.next();
        if position >= self.edge as usize {
            return None;
        }
        // Nearly always nothing is on its way, or all that runs has a token on its way.
        let (token, source) = match self.coming {
            0 => (self.newest, -1),
            _ if self.ends_in_flight() => return None,
            _ => self.next_token(),
        };
        let Place::Running(row) = self.place else { return None };
        let left = self.edge as usize - position;
        let slot = (i64::from(self.block.get()) + 1) * size.tokens() as i64 - left as i64;
        Some(NextRow { row, position, token, source, slot, epoch: self.epoch, id: self.id(), room: left - 1 })
    }

    /// Whether it decodes, and the block that [`Request::foresee`] saw is full: its next row needs one more.
    pub(crate) fn has_filled_block(&self) -> bool {
        self.edge > 0 && self.next() == self.edge as usize && !self.ends_in_flight()
    }

    /// The first row that no step has computed or is computing.
    pub(crate) fn next(&self) -> usize {
        (self.computed + self.ahead) as usize
    }

    /// How many tokens it has when all steps in flight have brought theirs.
    pub(crate) fn num_tokens_to_come(&self) -> usize {
        self.num_tokens() + usize::from(self.coming)
    }

    /// Whether the token that a step in flight brings ends it, whatever it is.
    fn ends_in_flight(&self) -> bool {
        self.coming > 0 && self.num_tokens_to_come() >= self.longest as usize
    }

    /// The last token and -1; or, if a step in flight brings it, 0 and which of the previous plan's samples it is.
    pub(crate) fn next_token(&self) -> (TokenId, i32) {
        if self.coming > 0 { (0, self.source) } else { (self.newest, -1) }
    }

    /// Step `step` computes `chunk` rows more, as its entry `entry`, and brings a token as its sample `sample`, if any.
    pub(crate) fn fly(&mut self, step: u64, entry: usize, chunk: usize, sample: Option<usize>) {
        (self.planned_in, self.entry) = (step, entry as u32);
        self.ahead += chunk as u32;
        if let Some(sample) = sample {
            self.source = sample as i32;
            self.coming += 1;
        }
    }

    /// Of what a step was to compute, `chunk` rows with a token or without, `kept` rows are there.
    pub(crate) fn land(&mut self, chunk: usize, kept: usize, samples: bool) {
        self.computed += kept as u32;
        self.ahead = self.ahead.saturating_sub(chunk as u32);
        self.coming = self.coming.saturating_sub(u8::from(samples));
    }

    /// The one row of a decode is there, and so is its token.
    pub(crate) fn land_decode(&mut self) {
        self.computed += 1;
        self.ahead -= 1;
        self.coming -= 1;
    }

    /// Whether `epoch` is or was its own.
    pub(crate) fn has_epoch_of(&self, epoch: u64) -> bool {
        self.epoch >> EPOCH_BITS == epoch >> EPOCH_BITS
    }

    /// What steps in flight bring for it does not count.
    pub(crate) fn forget_flight(&mut self) {
        let past = !0 << EPOCH_BITS;
        self.epoch = self.epoch & past | self.epoch.wrapping_add(1) & !past;
        self.ahead = 0;
        self.coming = 0;
        self.look_closer();
    }

    /// The same, but for a fault: the results keep their epoch.
    pub(crate) fn forget_rows_in_flight(&mut self) {
        (self.ahead, self.coming) = (0, 0);
        self.look_closer();
    }

    /// It lost what it shared.
    pub(crate) fn look_again(&mut self) {
        self.lost_in = self.planned_in;
    }

    /// Whether it lost what it shared, and was not planned since.
    pub(crate) fn looks_again(&self) -> bool {
        self.lost_in == self.planned_in
    }

    /// Rows and tokens that steps in flight bring.
    pub(crate) fn in_flight(&self) -> (usize, usize) {
        (self.ahead as usize, usize::from(self.coming))
    }

    /// The next token completes the key of a block that a step in flight fills.
    pub(crate) fn watch(&mut self) {
        self.watched = true;
    }

    /// Row `position` of a decode with one table, and what follows in its block, can be planned from these lines alone, if nobody else may
    /// write there.
    pub(crate) fn foresee(&mut self, position: usize, size: BlockSize) {
        self.edge = 0;
        let number = size.full_blocks(position);
        let is_own = number + 1 == self.table.len() && !self.asks_to_write;
        if is_own && !mutant::is_on(Mutant::PublishPartial) {
            self.block = self.table.blocks()[number];
            self.edge = ((number + 1) * size.tokens()) as u32;
        }
    }

    /// The block that [`Request::foresee`] saw, of a request that was planned from these lines alone since.
    pub(crate) fn foreseen_block(&self) -> BlockId {
        self.block
    }

    /// The next row needs a look at everything.
    pub(crate) fn look_closer(&mut self) {
        self.edge = 0;
    }

    /// The tables of all groups.
    pub(crate) fn tables(&self) -> impl Iterator<Item = &BlockTable> {
        std::iter::once(&self.table).chain(&self.others)
    }

    /// The table of group `group`.
    pub(crate) fn table_of(&self, group: usize) -> &BlockTable {
        if group == 0 { &self.table } else { &self.others[group - 1] }
    }

    /// The same, to change it.
    pub(crate) fn table_of_mut(&mut self, group: usize) -> &mut BlockTable {
        self.look_closer();
        if group == 0 { &mut self.table } else { &mut self.others[group - 1] }
    }

    /// Cuts the tables after `len` entries: what follows, as one list in the order of the tokens, of each block number group by
    /// group. Its release gives the last rows of all groups first, so that what is evicted of a chain is its end, in all groups.
    pub(crate) fn cut(&mut self, len: usize) -> BlockTable {
        self.look_closer();
        if self.others.is_empty() {
            return self.table.split_off(len);
        }
        let mut list = BlockTable::new();
        for number in len..self.table.len() {
            list.blocks
                .extend(self.tables().map(|table| table.blocks()[number]).filter(|&block| block != BlockId::NULL));
        }
        self.table.blocks.truncate(len);
        self.others.iter_mut().for_each(|table| table.blocks.truncate(len));
        list
    }

    /// What the block that begins with token `start` is worth to it.
    pub(crate) fn worth(&self, start: usize) -> Worth {
        self.retention.as_ref().map_or(Worth::DEFAULT, |ranges| ranges.worth(start))
    }

    /// Tokens, known or on their way, whose rows are neither computed nor being computed; none if it ends before.
    pub(crate) fn remaining(&self) -> usize {
        if self.ends_in_flight() {
            return 0;
        }
        self.num_tokens_to_come().saturating_sub(self.next())
    }

    /// Tokens that it may have beside those that are known or on their way.
    pub(crate) fn tokens_left(&self) -> usize {
        (self.longest as usize).saturating_sub(self.num_tokens_to_come())
    }

    /// Whether nothing but the newest token is left to compute.
    pub(crate) fn is_decoding(&self) -> bool {
        self.remaining() == 1
    }

    pub(crate) fn num_outputs(&self) -> usize {
        self.num_tokens() - self.prompt_len
    }

    /// Keeps the first `len` tokens, and the keys of their full blocks, of which there are `blocks`.
    pub(crate) fn keep_tokens(&mut self, len: usize, blocks: usize, max_model_len: usize) {
        self.settle();
        self.tokens.truncate(len);
        self.keys.truncate(blocks);
        let rest = &mut **self;
        rest.prompt_len = rest.prompt_len.min(len);
        rest.drafts.clear();
        if let Some(trail) = &mut rest.trail {
            trail.truncate(blocks);
        }
        self.recount(max_model_len);
    }

    /// The list of tokens became shorter.
    fn recount(&mut self, max_model_len: usize) {
        self.len = self.tokens.len() as u32;
        self.newest = self.tokens[self.tokens.len() - 1];
        self.longest = self.longest_with(max_model_len);
        self.watched = true;
        self.look_closer();
    }

    fn longest_with(&self, max_model_len: usize) -> u32 {
        self.prompt_len.saturating_add(self.limits.max_tokens as usize).min(max_model_len) as u32
    }

    /// Forgets all keys: the weights changed.
    pub(crate) fn forget_keys(&mut self) {
        self.keys.clear();
        if let Some(trail) = &mut self.trail {
            trail.restart();
        }
    }

    /// Reads the end of its table, which is about to grow, and makes something of it.
    pub(crate) fn glance_at_table(&self) -> u32 {
        self.table.blocks().last().map_or(0, |block| block.get())
    }

    /// Reads what its end needs, all its lines among that, and makes something of it.
    pub(crate) fn glance_at_all(&self) -> u64 {
        let lines = self.epoch ^ u64::from(self.fresh[0]) ^ self.published as u64 ^ self.tokens.len() as u64;
        let (cached, family) = (self.cached.unwrap_or_default() as u64, self.family.map_or(0, |first| first.0));
        lines ^ self.num_outputs() as u64 ^ cached ^ family
    }

    /// Reads the ends of its lists, which a call is about to need, and makes something of them.
    pub(crate) fn glance(&self) -> u32 {
        self.tokens.last().copied().unwrap_or(0) ^ self.keys.last().map_or(0, |key| u32::from(key.0[0]))
    }

    /// Makes the missing keys of the full blocks of the first `tokens` tokens, by the fields that the prompt came with.
    pub(crate) fn extend_keys(&mut self, hasher: &mut BlockHasher, tokens: usize) {
        let is_plain = self.is_plain && !self.keys.is_empty() && !mutant::is_on(Mutant::KeyWithoutParent);
        let fresh = &self.fresh[..usize::from(self.num_fresh)];
        if is_plain && tokens == self.num_tokens() && hasher.extend_by_newest(&mut self.keys, tokens, fresh) {
            self.settle();
            return;
        }
        self.settle();
        let tokens = &self.tokens[..tokens];
        if is_plain {
            hasher.extend_plain(&mut self.keys, tokens);
            return;
        }
        let Rest { chain, trail, .. } = self.rest.as_deref_mut().expect(SOMEBODY);
        if mutant::is_on(Mutant::OutputsWithoutChain) {
            hasher.extend(&hasher.plain_chain(), &mut self.keys, tokens);
            return;
        }
        hasher.extend(chain, &mut self.keys, tokens);
        if let Some(trail) = trail {
            trail.extend(hasher, tokens);
        }
    }

    /// The keys of the first `tokens` tokens, the last of which is not known: for a fault only.
    #[cold]
    pub(crate) fn guess_key(&mut self, hasher: &mut BlockHasher, tokens: usize) {
        self.settle();
        let mut guessed = self.tokens.clone();
        guessed.resize(tokens, 0);
        let chain = self.chain.clone();
        hasher.extend(&chain, &mut self.keys, &guessed);
    }

    /// Makes the missing prints of the full blocks of the first `tokens` tokens, if misses are to be explained.
    pub(crate) fn extend_trail(&mut self, hasher: &mut BlockHasher, tokens: usize) {
        self.settle();
        if let Some(trail) = &mut self.rest.as_deref_mut().expect(SOMEBODY).trail {
            trail.extend(hasher, &self.tokens[..tokens]);
        }
    }

    /// Whether the next output needs [`Scheduler`](crate::Scheduler)'s closer look.
    pub(crate) fn is_watched(&self) -> bool {
        self.watched
    }

    /// Appends an output; the end that it brings, if any. A stop token comes before a limit that is reached at once.
    #[inline]
    pub(crate) fn push(&mut self, token: TokenId) -> Option<End> {
        self.append(token);
        let is_stop = if self.watched { self.stops(token) } else { token == self.stop };
        self.end_by(is_stop)
    }

    /// The same for one that is not watched.
    #[inline]
    pub(crate) fn push_unwatched(&mut self, token: TokenId) -> Option<End> {
        self.append(token);
        self.end_by(token == self.stop)
    }

    fn append(&mut self, token: TokenId) {
        match self.fresh.get_mut(usize::from(self.num_fresh)) {
            Some(place) => *place = token,
            None => {
                self.settle();
                self.fresh[0] = token;
            }
        }
        self.num_fresh += 1;
        self.len += 1;
        self.newest = token;
    }

    fn end_by(&self, is_stop: bool) -> Option<End> {
        is_stop.then_some(End::Stop).or(self.is_longest())
    }

    fn is_longest(&self) -> Option<End> {
        (self.len >= self.longest).then_some(End::Length)
    }

    /// Whether `token`, the newest, ends a watched request.
    #[cold]
    fn stops(&mut self, token: TokenId) -> bool {
        let may_stop = self.num_outputs() >= self.limits.min_tokens as usize || mutant::is_on(Mutant::MinTokensIgnored);
        self.watched = self.num_outputs() + 1 < self.limits.min_tokens as usize || self.limits.stop_tokens.len() > 1;
        may_stop && self.limits.stop_tokens.contains(&token)
    }

    /// Forgets rows and place; the tokens stay. The table must have been given back.
    pub(crate) fn forget_rows(&mut self) {
        debug_assert!(self.table.is_empty());
        self.place = Place::Waiting;
        self.asks_to_write = false;
        self.computed = 0;
        self.published = 0;
        self.promised = 0;
        self.secured = false;
        self.lost_in = u64::MAX;
        if std::mem::take(&mut self.is_mixed) {
            self.forget_keys();
        }
        self.forget_flight();
        self.settle();
        self.look_closer();
        if mutant::is_on(Mutant::TailLostOnPreempt) {
            let len = self.prompt_len;
            self.tokens.truncate(len);
            self.recount(usize::MAX);
        }
    }
}
