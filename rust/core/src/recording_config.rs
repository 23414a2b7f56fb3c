//! The configuration that a recording begins with, one way and back.

use crate::algorithm::Algorithm;
use crate::config::Config;
use crate::error::Result;
use crate::group::GroupSpec;
use crate::policy::PolicyKind;
use crate::queue_rules::QueueRules;
use crate::recording_numbers::{Left, put, put_text};
use crate::shares::DomainShare;
use crate::tenants::TenantRules;

pub(crate) fn put_config(out: &mut Vec<u8>, config: &Config) {
    // Every field by name: a new one does not compile until it stands here, in `Left::config`, and in another `VERSION`.
    let Config {
        num_blocks,
        block_size,
        vocab_size,
        max_model_len,
        max_num_seqs,
        max_num_batched_tokens,
        max_waiting,
        long_prefill_threshold,
        max_preemptions,
        overlap_depth,
        max_draft_tokens,
        groups,
        enable_prefix_caching,
        hash_algorithm,
        hash_seed,
        event_buffer_size,
        kv_layout,
        weights_version,
        explain_misses,
        pin_budget,
        domain_shares,
        enable_partial_hits,
        queue,
    } = config;
    let numbers = [
        num_blocks,
        block_size,
        vocab_size,
        max_model_len,
        max_num_seqs,
        max_num_batched_tokens,
        max_waiting,
        long_prefill_threshold,
        max_preemptions,
        event_buffer_size,
        pin_budget,
        overlap_depth,
        max_draft_tokens,
    ];
    out.push(0);
    numbers.into_iter().for_each(|&number| put(out, u64::from(number)));
    put(out, groups.len() as u64);
    for GroupSpec { window } in groups {
        put(out, window.map_or(0, |window| u64::from(window) + 1));
    }
    out.extend([enable_prefix_caching, explain_misses, enable_partial_hits].map(|&flag| u8::from(flag)));
    put_text(out, hash_algorithm.name().as_bytes());
    [hash_seed, kv_layout, weights_version].into_iter().for_each(|text| put_text(out, text));
    let QueueRules {
        policy,
        ageing_us,
        latest_deadline_us,
        prefix_band,
        max_pass,
        watermark,
        estimate_growth,
        no_evict,
        preempt_for_waiting,
        max_waiting_tokens,
        max_waiting_blocks,
        tenants,
        other_tenants,
    } = queue;
    put_text(out, policy.name().as_bytes());
    for number in [*ageing_us, *latest_deadline_us, u64::from(*prefix_band), u64::from(*max_pass)] {
        put(out, number);
    }
    put(out, u64::from(*watermark));
    out.extend([*estimate_growth, *no_evict, *preempt_for_waiting].map(u8::from));
    put(out, *max_waiting_tokens);
    put(out, *max_waiting_blocks);
    put(out, tenants.len() as u64);
    for (name, rules) in tenants {
        put_text(out, name.as_bytes());
        put_rules(out, rules);
    }
    put_rules(out, other_tenants);
    put(out, domain_shares.len() as u64);
    for DomainShare { domain, blocks } in domain_shares {
        put_text(out, domain);
        put(out, u64::from(*blocks));
    }
}

fn put_rules(out: &mut Vec<u8>, rules: &TenantRules) {
    let TenantRules { weight, hard_blocks, soft_blocks, max_waiting, max_waiting_tokens, max_waiting_blocks } = *rules;
    for number in [weight, hard_blocks, soft_blocks] {
        put(out, u64::from(number));
    }
    for number in [max_waiting, max_waiting_tokens, max_waiting_blocks] {
        put(out, number);
    }
}

impl Left<'_> {
    pub fn config(&mut self) -> Result<Config> {
        if self.take()? != [0] {
            return self.broken("the first record must be a configuration (0)");
        }
        let mut numbers = [0; 13];
        for number in &mut numbers {
            *number = self.number32()?;
        }
        let windows = self.list(1, Self::number)?;
        let mut groups = Vec::new();
        for window in windows {
            let Ok(window) = u32::try_from(window.saturating_sub(1)).map(|size| (window > 0).then_some(size)) else {
                return self.broken("a window must have 32 bits at most");
            };
            groups.push(GroupSpec { window });
        }
        let (enable_prefix_caching, explain_misses, enable_partial_hits) = (self.flag()?, self.flag()?, self.flag()?);
        let name = self.text()?;
        let algorithm = std::str::from_utf8(&name).ok().and_then(Algorithm::from_name);
        let Some(hash_algorithm) = algorithm else { return self.broken("must be the name of a hash algorithm") };
        let [
            num_blocks,
            block_size,
            vocab_size,
            max_model_len,
            max_num_seqs,
            max_num_batched_tokens,
            max_waiting,
            long_prefill_threshold,
            max_preemptions,
            event_buffer_size,
            pin_budget,
            overlap_depth,
            max_draft_tokens,
        ] = numbers;
        Ok(Config {
            num_blocks,
            block_size,
            vocab_size,
            max_model_len,
            max_num_seqs,
            max_num_batched_tokens,
            max_waiting,
            long_prefill_threshold,
            max_preemptions,
            overlap_depth,
            max_draft_tokens,
            groups,
            enable_prefix_caching,
            hash_algorithm,
            hash_seed: self.text()?,
            kv_layout: self.text()?,
            weights_version: self.text()?,
            event_buffer_size,
            explain_misses,
            pin_budget,
            enable_partial_hits,
            queue: self.queue()?,
            domain_shares: self
                .list(2, |left| Ok(DomainShare { domain: left.text()?.into(), blocks: left.number32()? }))?,
        })
    }

    fn queue(&mut self) -> Result<QueueRules> {
        let Some(policy) = PolicyKind::named(&self.string()?) else {
            return self.broken("must be the name of a policy");
        };
        let (ageing_us, latest_deadline_us) = (self.number()?, self.number()?);
        let (prefix_band, max_pass) = (self.number32()?, self.number32()?);
        let watermark = self.number32()?;
        let (estimate_growth, no_evict, preempt_for_waiting) = (self.flag()?, self.flag()?, self.flag()?);
        let (max_waiting_tokens, max_waiting_blocks) = (self.number()?, self.number()?);
        let tenants = self.list(7, |left| Ok((left.string()?.into(), left.rules()?)))?;
        let other_tenants = self.rules()?;
        Ok(QueueRules {
            policy,
            ageing_us,
            latest_deadline_us,
            prefix_band,
            max_pass,
            watermark,
            estimate_growth,
            no_evict,
            preempt_for_waiting,
            max_waiting_tokens,
            max_waiting_blocks,
            tenants,
            other_tenants,
        })
    }

    fn rules(&mut self) -> Result<TenantRules> {
        Ok(TenantRules {
            weight: self.number32()?,
            hard_blocks: self.number32()?,
            soft_blocks: self.number32()?,
            max_waiting: self.number()?,
            max_waiting_tokens: self.number()?,
            max_waiting_blocks: self.number()?,
        })
    }
}
