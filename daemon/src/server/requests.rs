//! From a frame to a request: the body is decoded, and what is a matter of form is refused.

use std::os::fd::OwnedFd;

use lapis_proto::code::Code;
use lapis_proto::frame::Frame;
use lapis_proto::message as wire;
use lapis_proto::message::{Kind, RANGES_PER_REQUEST_MAX, Refused};

use crate::engine::event::Request;
use crate::engine::refusal::plain;

/// A request, or the file that has to be opened for one.
#[derive(Debug)]
pub enum Parsed {
    /// For the engine.
    Request(Request),
    /// The store must take the descriptor first.
    OpenFile(OwnedFd, wire::OpenFile),
}

/// Reads a request.
///
/// # Errors
/// The refusal to answer with; the connection goes on, for the frame itself was whole.
pub fn parse(mut frame: Frame<'_>) -> Result<Parsed, Refused> {
    let kind = frame.header.kind;
    let refused = |error: &dyn std::fmt::Display| plain(Code::BadRequest, &error.to_string());
    macro_rules! body {
        ($message:ty) => {
            frame.decode::<$message>().map_err(|error| refused(&error))?
        };
    }
    let request = match kind {
        Kind::Allocate => Request::Allocate { size: body!(wire::Allocate).size },
        Kind::OpenFile => {
            let body = body!(wire::OpenFile);
            let fd = frame.fds.pop().ok_or_else(|| refused(&"OpenFile carries the open file"))?;
            return Ok(Parsed::OpenFile(fd, body));
        }
        Kind::Free => Request::Free(body!(wire::Free).allocation),
        Kind::Map => Request::Map(body!(wire::Map)),
        Kind::Unmap => {
            let ids = body!(wire::Unmap).mappings;
            if ids.len() > RANGES_PER_REQUEST_MAX {
                let message = format!("at most {RANGES_PER_REQUEST_MAX} mappings end at once");
                return Err(refused(&message));
            }
            Request::Unmap(ids)
        }
        Kind::Prefetch => Request::Prefetch(body!(wire::Prefetch)),
        Kind::CancelPrefetch => Request::CancelPrefetch(body!(wire::CancelPrefetch).ranges),
        Kind::SetPlan => Request::SetPlan(body!(wire::SetPlan)),
        Kind::Advise => Request::Advise(body!(wire::Advise)),
        Kind::Flush => Request::Flush(body!(wire::Flush)),
        Kind::SetQuota => Request::SetQuota(body!(wire::SetQuota).quota),
        Kind::ListQuotas => {
            let wire::ListQuotas {} = body!(wire::ListQuotas);
            Request::ListQuotas
        }
        Kind::SetTier => Request::SetTier(body!(wire::SetTier)),
        Kind::Stat => {
            let wire::Stat {} = body!(wire::Stat);
            Request::Stat
        }
        Kind::WorkingSet => Request::WorkingSet(body!(wire::WorkingSet).session),
        Kind::Bye => {
            let wire::Bye {} = body!(wire::Bye);
            Request::Bye
        }
        Kind::Revoked => Request::Revoked(body!(wire::Revoked).frames),
        Kind::Hello
        | Kind::Welcome
        | Kind::Refused
        | Kind::Allocated
        | Kind::Done
        | Kind::Mapped
        | Kind::Stats
        | Kind::Quotas
        | Kind::WorkingSets
        | Kind::Frames
        | Kind::Revoke => {
            let message = format!("{kind:?} is not a request that may come here");
            return Err(refused(&message));
        }
    };
    Ok(Parsed::Request(request))
}
