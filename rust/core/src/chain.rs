//! What the keys of one chain of tokens depend on beside the tokens: who may share it, what computes it, what is particular to ranges.
//!
//! Before: submit brings [`Identity`]; domain and public range come from the operator, the rest from the client, who can only narrow.
//! After: the request keeps its [`Chain`], so that blocks of its outputs, of a recompute and of its forks get the keys of the same
//! fields. The domain and the adapter stand in the root, once; behind a public range the domain stands in every block.

use std::fmt;
use std::sync::Arc;

use crate::error::{Error, Result};
use crate::ids::Key;
use crate::key_encoding::Field;
use crate::mutant::{self, Mutant};
use crate::shares::PUBLIC;
use crate::vllm_encoding::Extra;

/// Bytes of a name, a salt or an id at most.
pub const MAX_NAME: usize = 1024;
/// Salted ranges of a prompt at most.
pub const MAX_SALTS: usize = 64;
/// Media items of a prompt at most.
pub const MAX_MEDIA: usize = 65_536;

/// Who may find a chain's blocks. There is no default: whoever knows who asks says it.
#[derive(Clone, PartialEq, Eq)]
pub enum Domain {
    /// Everybody.
    Public,
    /// Whoever asks a deployment that has no tenants.
    Deployment,
    /// One tenant: its name, from authenticated context.
    Tenant(Box<[u8]>),
}

/// The adapter that computes a chain's rows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Adapter {
    /// Its name.
    pub name: Box<[u8]>,
    /// Another number for each time that an adapter is loaded, so that one name never serves two contents.
    pub load: u64,
    /// Where it was loaded from. Only vLLM's keys depend on it.
    pub path: Box<[u8]>,
}

/// A salt for a range of tokens: only who knows it finds the blocks that the range touches, and those behind.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Salt {
    /// First token.
    pub start: usize,
    /// Behind the last token; `usize::MAX` takes in the outputs.
    pub end: usize,
    /// The salt.
    pub salt: Box<[u8]>,
}

/// A media item whose rows stand in a range of tokens.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Media {
    /// First token.
    pub start: usize,
    /// Behind the last token.
    pub end: usize,
    /// What it is: a hash of the content and of all that decides how it is read.
    pub id: Box<[u8]>,
}

/// What a submit says of a prompt beside its tokens.
#[derive(Clone, Debug)]
pub struct Identity {
    /// From the operator.
    pub domain: Domain,
    /// From the operator: so many tokens at the start are the same for everybody and may be shared by everybody.
    pub public_tokens: usize,
    /// From the client, resolved by the operator.
    pub adapter: Option<Adapter>,
    /// From the client.
    pub salts: Vec<Salt>,
    /// From the client. No two overlap.
    pub media: Vec<Media>,
}

impl Identity {
    /// Tokens of `domain` and nothing else.
    #[must_use]
    pub fn of(domain: Domain) -> Self {
        Identity { domain, public_tokens: 0, adapter: None, salts: Vec::new(), media: Vec::new() }
    }

    /// Whether it says nothing but that the tokens are the deployment's.
    #[must_use]
    pub fn is_plain(&self) -> bool {
        let Identity { domain, public_tokens, adapter, salts, media } = self;
        *domain == Domain::Deployment
            && *public_tokens == 0
            && adapter.is_none()
            && salts.is_empty()
            && media.is_empty()
    }

    /// Checks every bound for a prompt of `prompt_len` tokens, and brings ranges in order.
    ///
    /// # Errors
    /// [`Error::InvalidInput`] with the first field that breaks one.
    pub fn validate(&mut self, prompt_len: usize) -> Result<()> {
        if let Domain::Tenant(name) = &self.domain {
            check_name("domain", name)?;
        }
        if let Some(adapter) = &self.adapter {
            check_name("adapter", &adapter.name)?;
            check_most("adapter", adapter.path.len(), MAX_NAME, "bytes of path")?;
        }
        check_most("public_tokens", self.public_tokens, prompt_len, "tokens, the prompt")?;
        check_most("cache_salt", self.salts.len(), MAX_SALTS, "ranges")?;
        check_most("media", self.media.len(), MAX_MEDIA, "items")?;
        for Salt { start, end, salt } in &self.salts {
            check_name("cache_salt", salt)?;
            check_range("cache_salt", *start, if *end == usize::MAX { prompt_len } else { *end }, prompt_len)?;
        }
        for Media { start, end, id } in &self.media {
            check_name("media", id)?;
            check_range("media", *start, *end, prompt_len)?;
        }
        self.salts.sort();
        self.media.sort();
        if let Some(pair) = self.media.windows(2).find(|pair| pair[1].start < pair[0].end) {
            let bound = format!("must begin at or behind {}, where the item before it ends", pair[0].end);
            return Err(Error::InvalidInput { field: "media", value: pair[1].start as i128, bound });
        }
        Ok(())
    }
}

/// The fields of one chain, checked. Made by [`BlockHasher::chain`](crate::block_hash::BlockHasher::chain) only. A chain without
/// fields allocates nothing; a copy shares them.
#[derive(Clone, Debug)]
pub struct Chain {
    /// Parent of the first block, before the version of the weights.
    pub(crate) root: Key,
    pub(crate) extras: Option<Arc<Extras>>,
    /// Whose share its blocks count to, from which block on: see [`DomainShare`](crate::shares::DomainShare).
    owner: u8,
    owned_from: u32,
}

/// What is particular to some blocks of a chain.
#[derive(Clone, Debug)]
pub(crate) struct Extras {
    /// First block that is not wholly public, and the domain that enters from there on.
    private: Option<(usize, Domain)>,
    /// For vLLM's keys, which have it in every block.
    adapter: Option<Adapter>,
    /// In order of their start.
    salts: Vec<Salt>,
    /// In order, apart.
    media: Vec<Media>,
}

impl Chain {
    pub(crate) fn new(root: Key, identity: Identity, block_size: usize, adapter_in_blocks: bool) -> Self {
        let Identity { domain, public_tokens, adapter, salts, media } = identity;
        let is_split =
            public_tokens > 0 && domain != Domain::Public && !mutant::is_on(Mutant::TenantAfterPublicForgotten);
        let private = is_split.then(|| (public_tokens / block_size, domain));
        let adapter = adapter.filter(|_| adapter_in_blocks);
        let is_ordinary = private.is_none() && adapter.is_none() && salts.is_empty() && media.is_empty();
        let extras = (!is_ordinary).then(|| Arc::new(Extras { private, adapter, salts, media }));
        Chain { root, extras, owner: 0, owned_from: 0 }
    }

    /// A chain without fields.
    pub(crate) fn plain(root: Key) -> Self {
        Chain { root, extras: None, owner: 0, owned_from: 0 }
    }

    /// The same; its blocks from `first` on belong to `owner`.
    pub(crate) fn owned(mut self, owner: u8, first: usize) -> Self {
        (self.owner, self.owned_from) = (owner, first as u32);
        self
    }

    /// Whose share block `at` counts to.
    pub(crate) fn owner(&self, at: usize) -> u8 {
        if at >= self.owned_from as usize { self.owner } else { PUBLIC }
    }
}

impl Extras {
    /// What is particular to block `at`, in the order in which it is written.
    pub(crate) fn fields(&self, at: usize, block_size: usize) -> impl Iterator<Item = Field<'_>> {
        let (start, end) = (at * block_size, (at + 1) * block_size);
        let private = self.private.as_ref().filter(|(first, _)| at >= *first);
        let domain = private.and_then(|(_, domain)| match domain {
            Domain::Public => None,
            Domain::Deployment => Some(Field::Deployment),
            Domain::Tenant(name) => Some(Field::Tenant(name)),
        });
        let is_salted =
            move |salt: &&Salt| salt.start < end && start < salt.end && !mutant::is_on(Mutant::SaltForgotten);
        let only_first = mutant::is_on(Mutant::SaltInFirstBlockOnly) && at > 0;
        let salts = self.salts.iter().filter(move |salt| is_salted(salt) && !only_first);
        let media = self.media_in(start, end).iter().map(move |item| {
            let len = (item.end - item.start) as u64;
            Field::Media { offset: offset(item, start), len, id: &item.id }
        });
        domain.into_iter().chain(salts.map(|salt| Field::Salt(&salt.salt))).chain(media)
    }

    /// The same as vLLM has it: the adapter in every block, media where they touch, the salt of the prompt in its first block.
    pub(crate) fn vllm_extras(&self, at: usize, block_size: usize) -> Vec<Extra<'_>> {
        let start = at * block_size;
        let adapter = self.adapter.iter().map(|adapter| Extra::Lora { name: &adapter.name, path: &adapter.path });
        let media = self.media_in(start, start + block_size).iter();
        let salts = self.salts.iter().filter(|_| at == 0 || mutant::is_on(Mutant::VllmSaltInEveryBlock));
        adapter
            .chain(media.map(|item| Extra::Media { id: &item.id, offset: offset(item, start) }))
            .chain(salts.map(|salt| Extra::Salt(&salt.salt)))
            .collect()
    }

    /// Items that touch the tokens `start..end`.
    fn media_in(&self, start: usize, end: usize) -> &[Media] {
        if mutant::is_on(Mutant::MediaForgotten) {
            return &[];
        }
        let first = self.media.partition_point(|item| item.end <= start);
        let behind = self.media.partition_point(|item| item.start < end);
        &self.media[first..behind.max(first)]
    }
}

/// Where an item begins, counted from the first token of a block.
fn offset(item: &Media, block_start: usize) -> i64 {
    if mutant::is_on(Mutant::MediaWithoutOffset) { 0 } else { item.start as i64 - block_start as i64 }
}

fn check_name(field: &'static str, name: &[u8]) -> Result<()> {
    if (1..=MAX_NAME).contains(&name.len()) {
        return Ok(());
    }
    let bound = format!("bytes: must be 1..={MAX_NAME}");
    Err(Error::InvalidInput { field, value: name.len() as i128, bound })
}

fn check_most(field: &'static str, value: usize, most: usize, of_what: &str) -> Result<()> {
    if value <= most {
        return Ok(());
    }
    Err(Error::InvalidInput { field, value: value as i128, bound: format!("must be at most {most} {of_what}") })
}

fn check_range(field: &'static str, start: usize, end: usize, prompt_len: usize) -> Result<()> {
    if start < end && end <= prompt_len {
        return Ok(());
    }
    let (value, bound) = if end > prompt_len {
        (end, format!("a range must end at or before {prompt_len}, the end of the prompt"))
    } else {
        (start, format!("a range must begin before its end, {end}"))
    };
    Err(Error::InvalidInput { field, value: value as i128, bound })
}

impl fmt::Debug for Domain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Domain::Public => write!(f, "Public"),
            Domain::Deployment => write!(f, "Deployment"),
            Domain::Tenant(name) => write!(f, "Tenant({:?})", String::from_utf8_lossy(name)),
        }
    }
}

/// A salt is a secret: only its range is shown.
impl fmt::Debug for Salt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Salt({}..{})", self.start, self.end)
    }
}
