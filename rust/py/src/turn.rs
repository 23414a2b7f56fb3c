//! What Python says of tenants and of a request's turn, for the core.

use blocktable_core::policy::PolicyKind;
use blocktable_core::queue_rules::QueueRules;
use blocktable_core::rank::Turn;
use blocktable_core::tenants::TenantRules;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyDict};

use crate::error::invalid;
use crate::tokens::{count, number};

/// The rules of the waiting line as keyword arguments.
pub struct SaidRules<'a, 'py> {
    pub policy: &'a str,
    pub ageing_us: Option<&'a Bound<'py, PyAny>>,
    pub latest_deadline_us: Option<&'a Bound<'py, PyAny>>,
    pub prefix_band: Option<&'a Bound<'py, PyAny>>,
    pub max_pass: Option<&'a Bound<'py, PyAny>>,
    pub watermark: Option<&'a Bound<'py, PyAny>>,
    pub estimate_growth: bool,
    pub no_evict: bool,
    pub preempt_for_waiting: bool,
    pub max_waiting_tokens: Option<&'a Bound<'py, PyAny>>,
    pub max_waiting_blocks: Option<&'a Bound<'py, PyAny>>,
    pub tenants: Option<&'a Bound<'py, PyAny>>,
    pub other_tenants: Option<&'a Bound<'py, PyAny>>,
}

impl SaidRules<'_, '_> {
    /// The same for the core; what was not said is the core's default.
    pub fn rules(&self, py: Python<'_>) -> PyResult<QueueRules> {
        let mut rules = QueueRules::default();
        let names = PolicyKind::ALL.map(PolicyKind::name).join(", ");
        rules.policy = PolicyKind::named(self.policy)
            .ok_or_else(|| invalid(py, "policy", self.policy, &format!("must be one of {names}")))?;
        set("ageing_us", &mut rules.ageing_us, self.ageing_us, number)?;
        set("latest_deadline_us", &mut rules.latest_deadline_us, self.latest_deadline_us, number)?;
        set("prefix_band", &mut rules.prefix_band, self.prefix_band, count)?;
        set("max_pass", &mut rules.max_pass, self.max_pass, count)?;
        set("watermark", &mut rules.watermark, self.watermark, count)?;
        (rules.estimate_growth, rules.no_evict) = (self.estimate_growth, self.no_evict);
        rules.preempt_for_waiting = self.preempt_for_waiting;
        set("max_waiting_tokens", &mut rules.max_waiting_tokens, self.max_waiting_tokens, number)?;
        set("max_waiting_blocks", &mut rules.max_waiting_blocks, self.max_waiting_blocks, number)?;
        if let Some(given) = self.other_tenants {
            rules.other_tenants = tenant_rules("other_tenants", given, TenantRules::default())?;
        }
        if let Some(given) = self.tenants {
            let bound = "must be a dict of tenants and what each may have";
            let Ok(given) = given.cast::<PyDict>() else { return Err(invalid(py, "tenants", given, bound)) };
            for (name, value) in given {
                let name: String =
                    name.extract().map_err(|_| invalid(py, "tenants", &name, "names must be strings"))?;
                rules.tenants.push((name.into(), tenant_rules("tenants", &value, rules.other_tenants)?));
            }
        }
        Ok(rules)
    }
}

fn set<T>(
    field: &str,
    to: &mut T,
    given: Option<&Bound<'_, PyAny>>,
    read: fn(&str, &Bound<'_, PyAny>) -> PyResult<T>,
) -> PyResult<()> {
    if let Some(given) = given {
        *to = read(field, given)?;
    }
    Ok(())
}

/// What one tenant may have: a dict, of which what is missing is as in `base`.
fn tenant_rules(field: &str, given: &Bound<'_, PyAny>, base: TenantRules) -> PyResult<TenantRules> {
    let py = given.py();
    let bound = "must be a dict with keys of: weight, hard_blocks, soft_blocks, max_waiting, max_waiting_tokens, max_waiting_blocks";
    let Ok(said) = given.cast::<PyDict>() else { return Err(invalid(py, field, given, bound)) };
    let mut rules = base;
    for (key, value) in said {
        match key.extract::<&str>() {
            Ok("weight") => rules.weight = count("weight", &value)?,
            Ok("hard_blocks") => rules.hard_blocks = count("hard_blocks", &value)?,
            Ok("soft_blocks") => rules.soft_blocks = count("soft_blocks", &value)?,
            Ok("max_waiting") => rules.max_waiting = number("max_waiting", &value)?,
            Ok("max_waiting_tokens") => rules.max_waiting_tokens = number("max_waiting_tokens", &value)?,
            Ok("max_waiting_blocks") => rules.max_waiting_blocks = number("max_waiting_blocks", &value)?,
            _ => return Err(invalid(py, field, key, bound)),
        }
    }
    Ok(rules)
}

/// Sequences beside the first that a request of `n` has.
pub fn siblings(n: Option<&Bound<'_, PyAny>>) -> PyResult<u32> {
    let Some(given) = n else { return Ok(0) };
    count("n", given)?.checked_sub(1).ok_or_else(|| invalid(given.py(), "n", given, "must be at least 1"))
}

/// A request's turn.
pub fn turn(
    priority: Option<&Bound<'_, PyAny>>,
    deadline_us: Option<&Bound<'_, PyAny>>,
    queue_deadline_us: Option<&Bound<'_, PyAny>>,
) -> PyResult<Turn> {
    let mut turn = Turn::default();
    if let Some(given) = priority {
        let bound = "must be an int of -2147483648..=2147483647";
        let read = || given.extract::<i32>().ok().filter(|_| !given.is_instance_of::<PyBool>());
        turn.priority = read().ok_or_else(|| invalid(given.py(), "priority", given, bound))?;
    }
    set("deadline_us", &mut turn.deadline_us, deadline_us, number)?;
    set("queue_deadline_us", &mut turn.queue_deadline_us, queue_deadline_us, number)?;
    Ok(turn)
}

/// What one tenant may have, for Python: what has no limit is left out.
pub fn told<'py>(py: Python<'py>, rules: &TenantRules) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("weight", rules.weight)?;
    let blocks = [("hard_blocks", rules.hard_blocks), ("soft_blocks", rules.soft_blocks)];
    for (name, value) in blocks.into_iter().filter(|&(_, value)| value != u32::MAX) {
        dict.set_item(name, value)?;
    }
    let waiting = [
        ("max_waiting", rules.max_waiting),
        ("max_waiting_tokens", rules.max_waiting_tokens),
        ("max_waiting_blocks", rules.max_waiting_blocks),
    ];
    for (name, value) in waiting.into_iter().filter(|&(_, value)| value != u64::MAX) {
        dict.set_item(name, value)?;
    }
    Ok(dict)
}
