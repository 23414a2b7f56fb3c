//! The same prompt from several who may not share it, or only a part of it: how much each of them finds.

use blocktable_core::chain::{Adapter, Domain, Identity, Media, Salt};
use blocktable_core::config::Config;
use blocktable_core::request::Limits;

use crate::broken::{Checked, ensure};
use crate::driver::Driver;

pub fn tenant(name: &str) -> Identity {
    Identity::of(Domain::Tenant(name.as_bytes().into()))
}

pub fn plain() -> Identity {
    Identity::of(Domain::Deployment)
}

pub fn salted(start: usize, end: usize, salt: &str) -> Identity {
    Identity { salts: vec![Salt { start, end, salt: salt.as_bytes().into() }], ..plain() }
}

pub fn adapted(name: &str, load: u64) -> Identity {
    let adapter = Adapter { name: name.as_bytes().into(), load, path: Box::default() };
    Identity { adapter: Some(adapter), ..plain() }
}

pub fn pictured(start: usize, end: usize, id: &str) -> Identity {
    Identity { media: vec![Media { start, end, id: id.as_bytes().into() }], ..plain() }
}

pub fn scene() -> Driver {
    Driver::new(config())
}

fn config() -> Config {
    Config {
        max_num_seqs: 8,
        max_num_batched_tokens: 512,
        max_waiting: 16,
        event_buffer_size: 64,
        explain_misses: true,
        ..Config::new(80, 4, 1009, 64)
    }
}

pub fn tokens(family: u32, len: u32) -> Vec<u32> {
    (0..len).map(|i| (family * 331 + i * 17) % 1009).collect()
}

/// Runs one request to its end; the prompt tokens that it found, and what it answered.
pub fn ask(driver: &mut Driver, identity: &Identity, prompt: &[u32], max_tokens: u32) -> Checked<(usize, Vec<u32>)> {
    let limits = Limits { max_tokens, ..Limits::default() };
    let id = driver.submit_as(identity.clone(), prompt.to_vec(), limits)?.expect("it fits");
    driver.drain()?;
    let client = &driver.clients[&id];
    Ok((client.cached.expect("it was admitted"), client.outputs().to_vec()))
}

/// Asks in turn on one scheduler; each must find so many tokens.
fn in_turn(what: &str, prompt: &[u32], turns: &[(Identity, usize)]) -> Checked {
    let turns: Vec<_> = turns.iter().map(|(identity, wanted)| (identity.clone(), prompt, *wanted)).collect();
    all_in_turn(what, scene(), &turns)
}

/// The same with a prompt for each turn.
fn all_in_turn(what: &str, mut driver: Driver, turns: &[(Identity, &[u32], usize)]) -> Checked {
    for (at, (identity, prompt, wanted)) in turns.iter().enumerate() {
        let (cached, _) = ask(&mut driver, identity, prompt, 3)?;
        ensure(cached == *wanted, "shared", || format!("{what}, turn {at}: {cached} tokens found, not {wanted}"))?;
    }
    Ok(())
}

/// 18 tokens are four full blocks; 10 of them are public: two whole blocks. Both orders.
pub fn tenants_share_what_is_public_and_nothing_else() -> Checked {
    let prompt = tokens(1, 18);
    let public = |name| Identity { public_tokens: 10, ..tenant(name) };
    for (one, other) in [("a", "b"), ("b", "a")] {
        in_turn("tenants", &prompt, &[(tenant(one), 0), (tenant(other), 0), (tenant(one), 16), (tenant(other), 16)])?;
        in_turn(
            "a public range",
            &prompt,
            &[(public(one), 0), (public(other), 8), (public(one), 16), (public(other), 16)],
        )?;
        in_turn("public and not", &prompt, &[(public(one), 0), (tenant(one), 0), (tenant(other), 0)])?;
    }
    let unnamed = Identity { public_tokens: 10, ..plain() };
    in_turn(
        "a deployment beside tenants",
        &prompt,
        &[(unnamed.clone(), 0), (public("a"), 8), (unnamed, 16), (plain(), 0)],
    )
}

/// A prompt that parts from another's in the middle of a block copies rows of public blocks and of blocks of its own tenant, and none
/// of another's. 10 tokens are public: the block that holds the last two of them is private. Both orders.
pub fn tenants_copy_no_row_of_private_blocks() -> Checked {
    let prompt = tokens(1, 18);
    let parts_at = |at: usize| [&prompt[..at], &tokens(5, 8)].concat();
    let (in_private, in_public) = (parts_at(10), parts_at(6));
    for (one, other) in [("a", "b"), ("b", "a")] {
        let as_one = || Identity { public_tokens: 10, ..tenant(one) };
        let as_other = || Identity { public_tokens: 10, ..tenant(other) };
        let turns = [
            (as_one(), &prompt[..], 0),
            (as_other(), &in_private, 8),
            (as_one(), &in_private, 10),
            (as_other(), &prompt, 10),
            (as_other(), &in_public, 6),
            (as_one(), &in_public, 8),
        ];
        let driver = Driver::new(Config { enable_partial_hits: true, ..config() });
        all_in_turn("rows", driver, &turns)?;
    }
    Ok(())
}

/// A salt that a client sends does not bring it into another domain, and keeps others of its own out.
pub fn a_salt_narrows_and_never_widens() -> Checked {
    let prompt = tokens(1, 18);
    let whole = |salt| salted(0, usize::MAX, salt);
    in_turn("salts", &prompt, &[(whole("x"), 0), (whole("y"), 0), (plain(), 0), (whole("x"), 16), (whole("y"), 16)])?;
    let of = |name, salt| Identity { domain: tenant(name).domain, ..whole(salt) };
    in_turn(
        "the salt of another tenant",
        &prompt,
        &[(of("a", "x"), 0), (of("b", "x"), 0), (of("a", "x"), 16), (tenant("a"), 0)],
    )?;
    let tail = |salt| salted(9, 18, salt);
    in_turn("a salted tail", &prompt, &[(tail("x"), 0), (tail("y"), 8), (plain(), 8), (tail("x"), 16), (plain(), 16)])?;
    let middle = |salt| salted(5, 6, salt);
    in_turn("a salted word", &prompt, &[(middle("x"), 0), (plain(), 4), (middle("x"), 16), (middle("y"), 4)])
}

/// Who loads an adapter anew computes anew; its name is no salt.
pub fn adapters_are_apart() -> Checked {
    let prompt = tokens(1, 18);
    let turns = [
        (adapted("x", 1), 0),
        (adapted("y", 1), 0),
        (adapted("x", 2), 0),
        (plain(), 0),
        (salted(0, usize::MAX, "x"), 0),
        (adapted("x", 1), 16),
        (adapted("x", 2), 16),
    ];
    in_turn("adapters", &prompt, &turns)
}

/// The blocks before an item are shared; those that it touches depend on what it is and where it begins.
pub fn media_are_apart_from_where_they_begin() -> Checked {
    let prompt = tokens(1, 18);
    let turns = [
        (pictured(6, 11, "cat"), 0),
        (pictured(6, 11, "dog"), 4),
        (pictured(7, 12, "cat"), 4),
        (plain(), 4),
        (pictured(6, 11, "cat"), 16),
        (pictured(8, 11, "cat"), 8),
    ];
    in_turn("media", &prompt, &turns)
}

/// The whole prompt is public; what a tenant was answered is not, but the tenant finds it in its next turn.
pub fn answers_belong_to_who_asked() -> Checked {
    let prompt = tokens(1, 8);
    let public = |name| Identity { public_tokens: 8, ..tenant(name) };
    let mut driver = scene();
    let (_, answer) = ask(&mut driver, &public("a"), &prompt, 6)?;
    let next_turn: Vec<u32> = [&prompt[..], &answer[..5]].concat();
    for (name, wanted) in [("b", 8), ("a", 12)] {
        let (cached, _) = ask(&mut driver, &public(name), &next_turn, 2)?;
        ensure(cached == wanted, "shared", || format!("{name} finds {cached} tokens of the next turn, not {wanted}"))?;
    }
    Ok(())
}
