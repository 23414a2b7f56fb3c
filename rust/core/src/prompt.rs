//! The tokens of a prompt with the keys of their full blocks. Only a hasher makes it, so that keys, chain and tokens cannot disagree.

use crate::chain::{Chain, Domain, Identity};
use crate::ids::{Key, TokenId};
use crate::trail::Trail;

/// What a submit brings.
#[derive(Clone, Debug)]
pub struct Prompt {
    pub(crate) tokens: Vec<TokenId>,
    pub(crate) keys: Vec<Key>,
    pub(crate) chain: Chain,
    /// What explains its misses, if that is wanted.
    pub(crate) trail: Option<Box<Trail>>,
    /// Of the weights for which the keys were made.
    pub(crate) generation: u32,
    /// What was said of it, if that is more than that it is the deployment's.
    pub(crate) said: Option<Box<Identity>>,
}

impl Prompt {
    /// Its tokens.
    #[must_use]
    pub fn tokens(&self) -> &[TokenId] {
        &self.tokens
    }

    /// The keys of its full blocks.
    #[must_use]
    pub fn keys(&self) -> &[Key] {
        &self.keys
    }

    /// What was said of it beside its tokens.
    #[must_use]
    pub fn identity(&self) -> Identity {
        self.said.as_ref().map_or_else(|| Identity::of(Domain::Deployment), |said| Identity::clone(said))
    }

    /// What its keys depend on beside the tokens.
    #[must_use]
    pub fn chain(&self) -> &Chain {
        &self.chain
    }
}
