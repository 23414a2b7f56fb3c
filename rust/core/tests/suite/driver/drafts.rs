//! The driver proposes drafts, right and wrong ones, and checks what plans make of them.

use std::collections::BTreeSet;

use blocktable_core::error::Error;

use super::{Driver, Plan};
use crate::broken::{Checked, ensure};

/// How a drafter guesses.
#[derive(Clone, Copy, Debug)]
pub enum Guess {
    /// What the request will say.
    Right,
    /// The same, but for the draft of this number.
    WrongAt(usize),
    /// Always something else.
    Wrong,
}

impl Driver {
    /// Proposes `count` drafts for each of these requests, as far as they have a row that was told.
    pub fn propose(&mut self, ids: &[u64], count: usize, guess: Guess) -> Checked {
        let vocab = self.config().vocab_size;
        let (mut rows, mut starts, mut tokens) = (Vec::new(), vec![0], Vec::new());
        for id in ids.iter().collect::<BTreeSet<_>>() {
            let Some(client) = self.clients.get_mut(id).filter(|client| client.is_live()) else { continue };
            let Some(row) = client.row else { continue };
            let next = client.outputs().len();
            let draft = |at: usize| {
                let said = client.answer.outputs.get(next + at).copied().unwrap_or(at as u32 % vocab);
                let is_wrong = match guess {
                    Guess::Right => false,
                    Guess::WrongAt(number) => number == at,
                    Guess::Wrong => true,
                };
                if is_wrong { (said + 1) % vocab } else { said }
            };
            client.drafts = (0..count).map(draft).collect();
            rows.push(i64::from(row));
            tokens.extend(client.drafts.iter().map(|&token| i64::from(token)));
            starts.push(tokens.len() as i64);
        }
        let most = self.config().max_draft_tokens as usize;
        let before = self.snapshot();
        let result = self.scheduler.propose(&rows, &starts, &tokens);
        if count > most && !rows.is_empty() {
            let is_told = matches!(result, Err(Error::InvalidInput { field: "starts", .. }));
            ensure(is_told, "propose", || format!("{count} drafts of {most} give {result:?}"))?;
            self.clients
                .values_mut()
                .filter(|client| client.row.is_some_and(|row| rows.contains(&i64::from(row))))
                .for_each(|client| client.drafts.clear());
            // What was proposed before stays; so that nobody must know it, it is replaced.
            let none = vec![0; rows.len() + 1];
            self.unchanged_since(&before)?;
            drop(self.scheduler.propose(&rows, &none, &[]));
            return self.settle();
        }
        ensure(result.is_ok(), "propose", || format!("{rows:?} {starts:?} gives {result:?}"))?;
        self.settle()
    }

    /// Proposals that make no sense change nothing.
    pub fn propose_nonsense(&mut self) -> Checked {
        let vocab = i64::from(self.config().vocab_size);
        let most = i64::from(self.config().max_draft_tokens);
        let free = (0..self.config().rows() as i32).find(|&row| self.live().all(|client| client.row != Some(row)));
        let mut wrong: Vec<(Vec<i64>, Vec<i64>, Vec<i64>)> = vec![
            (vec![], vec![], vec![]),
            (vec![], vec![1], vec![]),
            (vec![], vec![0], vec![3]),
            (vec![-1], vec![0, 0], vec![]),
            (vec![i64::from(self.config().rows())], vec![0, 0], vec![]),
        ];
        if self.live().all(|client| !client.is_untold) {
            wrong.extend(free.map(|row| (vec![i64::from(row)], vec![0, 0], vec![])));
        }
        if let Some(row) = self.live().find_map(|client| client.row).map(i64::from) {
            wrong.push((vec![row, row], vec![0, 0, 0], vec![]));
            wrong.push((vec![row], vec![0, -1], vec![]));
            wrong.push((vec![row], vec![0, most + 1], vec![0; most as usize + 1]));
            wrong.push((vec![row], vec![0, i64::MIN], vec![]));
            if most > 0 {
                wrong.push((vec![row], vec![0, 1], vec![vocab]));
                wrong.push((vec![row], vec![0, 1], vec![-1]));
                wrong.push((vec![row], vec![0, 1], vec![]));
            }
        }
        for (rows, starts, tokens) in wrong {
            let before = self.snapshot();
            let result = self.scheduler.propose(&rows, &starts, &tokens);
            let is_typed = matches!(result, Err(Error::InvalidInput { .. }));
            ensure(is_typed, "nonsense", || format!("propose({rows:?}, {starts:?}, {tokens:?}) gives {result:?}"))?;
            self.unchanged_since(&before)?;
        }
        self.settle()
    }

    /// Drafts that a plan made now would give sequence `seq` of `plan`, by what the tokens behind those of its request are.
    pub(super) fn num_drafts(&self, plan: &Plan, seq: usize) -> usize {
        let client = self.live().find(|client| client.row == Some(plan.seq_slots[seq]));
        client.map_or(0, |client| (plan.seq_lens[seq] as usize).saturating_sub(client.tokens.len()))
    }

    /// Drafts come in the order in which they were proposed, behind the newest token; all of them if nothing is short; and no row lies
    /// behind the last that the request may have.
    pub(super) fn check_drafts(&mut self, plan: &Plan) -> Checked {
        let (size, groups) = (self.block_size(), self.config().groups.len());
        let budget = self.config().max_num_batched_tokens as usize - plan.token_ids.len();
        let unpromised = self.scheduler.pool().num_free() as usize;
        for (seq, chunk) in plan.chunks().into_iter().enumerate() {
            let client = self.live().find(|client| client.row == Some(plan.seq_slots[seq])).expect("checked before");
            let (count, end) = (self.num_drafts(plan, seq), plan.seq_lens[seq] as usize);
            let first = plan.query_starts[seq + 1] as usize - count;
            let planned: Vec<u32> = plan.token_ids[first..first + count].iter().map(|&token| token as u32).collect();
            ensure(client.drafts.get(..count) == Some(&planned[..]), "drafts", || {
                format!("request {}: drafts {planned:?} of {:?}", client.id, client.drafts)
            })?;
            ensure(count == 0 || chunk == 1 + count, "drafts", || {
                format!("request {}: {count} drafts in {chunk} tokens", client.id)
            })?;
            let longest =
                (client.prompt_len + client.limits.max_tokens as usize).min(self.config().max_model_len as usize);
            ensure(end < longest, "limit", || format!("request {} writes row {end} of {longest}", client.id))?;
            let is_decode = chunk == 1 + count && end - count == client.tokens.len();
            let more = client.drafts.len() - count;
            if !is_decode || more == 0 || client.siblings > 0 {
                continue;
            }
            // Another one fits neither the limits, nor the tokens of the step, nor a block that it has or might take.
            let most = self.config().max_chunk();
            let might_take = unpromised.saturating_sub(self.scheduler.num_promised() as usize) / groups > 0
                && self.config().queue.tenants.iter().all(|(_, rules)| rules.hard_blocks == u32::MAX);
            let is_short = end + 1 >= longest || budget == 0 || chunk >= most || (end % size == 0 && !might_take);
            ensure(is_short, "drafts", || format!("request {}: {count} of {:?} fit", client.id, client.drafts))?;
        }
        for client in self.clients.values_mut() {
            client.drafts.clear();
        }
        Ok(())
    }

    /// The step gave blocks for drafts that did not become outputs: they are gone.
    pub(super) fn forget_lookahead(&mut self, id: u64, rows: usize) {
        let client = self.clients.get_mut(&id).expect("a known request");
        client.granted = client.granted.min(rows);
    }
}
