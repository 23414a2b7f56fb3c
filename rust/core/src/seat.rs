//! A place for a live request.
//!
//! Before: submit. After: the scheduler knows the request by its seat, which is somebody else's after its end. Whether it is taken stands
//! in the first cache line of the request, where each step looks anyway; `Option<Request>` has no room for that but in the last one.

use std::fmt;

use crate::request::Request;

/// A place for a live request: as an `Option` of one.
pub(crate) struct Seat(Request);

impl Seat {
    /// A seat that nobody has.
    pub fn empty() -> Self {
        Seat(Request::nobody())
    }

    /// Whose it is.
    #[inline(always)]
    pub fn as_ref(&self) -> Option<&Request> {
        (!self.0.is_nobody()).then_some(&self.0)
    }

    /// The same, to change it.
    #[inline(always)]
    pub fn as_mut(&mut self) -> Option<&mut Request> {
        if self.0.is_nobody() { None } else { Some(&mut self.0) }
    }

    /// The first lines of whose it is, or of nobody, who has no row to plan and whose epoch is no entry's.
    #[inline(always)]
    pub fn line(&self) -> &Request {
        &self.0
    }

    /// The same, to change them if it is somebody's.
    #[inline(always)]
    pub fn line_mut(&mut self) -> &mut Request {
        &mut self.0
    }

    /// Gives it to `request`.
    pub fn give(&mut self, request: Request) {
        self.0 = request;
    }

    /// Takes whose it is away.
    pub fn take(&mut self) -> Option<Request> {
        if self.0.is_nobody() { None } else { Some(std::mem::replace(&mut self.0, Request::nobody())) }
    }
}

impl fmt::Debug for Seat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.as_ref().fmt(f)
    }
}
