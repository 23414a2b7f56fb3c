//! What a caller says of a prompt beside its tokens, from Python's values. Only conversion: bounds of meaning are the core's.

use blocktable_core::chain::{Adapter, Domain, Identity, Media, Salt};
use blocktable_core::shares::DomainShare;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyString, PyTuple};

use crate::error::invalid;
use crate::tokens::{count, number};

/// The arguments that say it, as they came; those that are `None` say nothing.
pub struct Said<'a, 'py> {
    pub domain: Option<&'a Bound<'py, PyAny>>,
    pub public_tokens: Option<&'a Bound<'py, PyAny>>,
    pub adapter: Option<&'a Bound<'py, PyAny>>,
    pub cache_salt: Option<&'a Bound<'py, PyAny>>,
    pub media: Option<&'a Bound<'py, PyAny>>,
}

impl Said<'_, '_> {
    /// What it means. Without a domain it is that of a deployment without tenants.
    pub fn identity(self) -> PyResult<Identity> {
        let Said { domain, public_tokens, adapter, cache_salt, media } = self;
        Ok(Identity {
            domain: domain.map_or(Ok(Domain::Deployment), |given| text("domain", given).map(Domain::Tenant))?,
            public_tokens: public_tokens
                .map_or(Ok(0), |given| count("public_tokens", given).map(|count| count as usize))?,
            adapter: adapter.map(read_adapter).transpose()?,
            salts: cache_salt.map_or(Ok(Vec::new()), read_salts)?,
            media: media.map_or(Ok(Vec::new()), read_media)?,
        })
    }
}

/// (name, load number) or (name, load number, path).
fn read_adapter(given: &Bound<'_, PyAny>) -> PyResult<Adapter> {
    let bound = "must be (name, load number) or (name, load number, path)";
    let parts = given.cast::<PyTuple>().map_err(|_| invalid(given.py(), "adapter", given, bound))?;
    let path = match parts.len() {
        2 => Box::default(),
        3 => text("adapter", &parts.get_item(2)?)?,
        _ => return Err(invalid(given.py(), "adapter", given, bound)),
    };
    let load = number("adapter", &parts.get_item(1)?)?;
    Ok(Adapter { name: text("adapter", &parts.get_item(0)?)?, load, path })
}

/// One text for the whole prompt and what follows, or (start, end, text) for each salted range.
fn read_salts(given: &Bound<'_, PyAny>) -> PyResult<Vec<Salt>> {
    if given.is_instance_of::<PyString>() {
        return Ok(vec![Salt { start: 0, end: usize::MAX, salt: text("cache_salt", given)? }]);
    }
    let bound = "must be a text, or a list of (start, end, text)";
    ranges("cache_salt", given, bound, |start, end, salt| Salt { start, end, salt })
}

fn read_media(given: &Bound<'_, PyAny>) -> PyResult<Vec<Media>> {
    ranges("media", given, "must be a list of (start, end, id)", |start, end, id| Media { start, end, id })
}

fn ranges<T>(
    field: &str,
    given: &Bound<'_, PyAny>,
    bound: &str,
    make: impl Fn(usize, usize, Box<[u8]>) -> T,
) -> PyResult<Vec<T>> {
    let wrong = || invalid(given.py(), field, given, bound);
    if !given.is_instance_of::<PyList>() && !given.is_instance_of::<PyTuple>() {
        return Err(wrong());
    }
    let mut made = Vec::new();
    for item in given.try_iter()? {
        let item = item?;
        let Ok(parts) = item.cast::<PyTuple>() else { return Err(wrong()) };
        if parts.len() != 3 {
            return Err(wrong());
        }
        let (start, end) = (count(field, &parts.get_item(0)?)?, count(field, &parts.get_item(1)?)?);
        made.push(make(start as usize, end as usize, text(field, &parts.get_item(2)?)?));
    }
    Ok(made)
}

/// Shares of the pool: a dict from a tenant's name to blocks.
pub fn domain_shares(object: &Bound<'_, PyAny>) -> PyResult<Vec<DomainShare>> {
    let bound = "must be a dict from a domain to a number of blocks, or None";
    let dict = object.cast::<PyDict>().map_err(|_| invalid(object.py(), "domain_shares", object, bound))?;
    let share = |(domain, blocks): (Bound<'_, PyAny>, Bound<'_, PyAny>)| {
        Ok(DomainShare { domain: text("domain_shares", &domain)?, blocks: count("domain_shares", &blocks)? })
    };
    dict.iter().map(share).collect()
}

fn text(field: &str, given: &Bound<'_, PyAny>) -> PyResult<Box<[u8]>> {
    unicode(field, given).map(|text| text.as_bytes().into())
}

/// A text from outside.
pub fn unicode<'a>(field: &str, given: &'a Bound<'_, PyAny>) -> PyResult<&'a str> {
    let Ok(string) = given.cast::<PyString>() else { return Err(invalid(given.py(), field, given, "must be a text")) };
    string.to_str().map_err(|_| invalid(given.py(), field, "", "must be valid Unicode"))
}
