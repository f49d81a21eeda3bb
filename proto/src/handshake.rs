//! The first two messages of a connection: `Hello` from the client, `Welcome` or `Refused` from the daemon.
//!
//! Their bytes never change, so that peers of any two versions can at least tell each other so.

use crate::code::Code;
use crate::message::{CLIENT_NAME_BYTES_MAX, Hello, Refused};
use crate::version::{VERSION, VERSION_MIN, VersionUnsupported, negotiate};

/// Feature bits this crate knows. None exist yet.
pub const FEATURES: u64 = 0;

/// A `Hello` of this crate's versions and features. The name is cut at [`CLIENT_NAME_BYTES_MAX`] bytes.
#[must_use]
pub fn hello(client_name: &str) -> Hello {
    let end = (0..=client_name.len().min(CLIENT_NAME_BYTES_MAX))
        .rev()
        .find(|end| client_name.is_char_boundary(*end))
        .unwrap_or(0);
    Hello {
        version_min: VERSION_MIN,
        version_max: VERSION,
        features: FEATURES,
        client_name: client_name[..end].to_owned(),
    }
}

/// What a `Hello` agrees on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Agreed {
    /// The version both sides speak from here on.
    pub version: u16,
    /// Feature bits both sides know.
    pub features: u64,
}

/// Checks a client's `Hello`.
///
/// # Errors
/// The refusal to send before closing: no version in common, or too long a name.
pub fn accept(hello: &Hello) -> Result<Agreed, Refused> {
    let version =
        negotiate(hello.version_min, hello.version_max).map_err(|error| version_refused(&error))?;
    if hello.client_name.len() > CLIENT_NAME_BYTES_MAX {
        return Err(Refused {
            code: Code::BadRequest,
            object: 0,
            asked: u64::try_from(hello.client_name.len()).unwrap_or(u64::MAX),
            in_use: 0,
            limit: CLIENT_NAME_BYTES_MAX as u64,
            message: format!("the client's name has more than {CLIENT_NAME_BYTES_MAX} bytes"),
        });
    }
    Ok(Agreed { version, features: hello.features & FEATURES })
}

/// The refusal that answers a `Hello` with no version in common.
#[must_use]
pub fn version_refused(error: &VersionUnsupported) -> Refused {
    Refused {
        code: Code::VersionUnsupported,
        object: 0,
        asked: u64::from(error.client_max),
        in_use: 0,
        limit: u64::from(VERSION),
        message: error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_name_is_cut_between_characters() {
        let name = format!("{}äz", "a".repeat(63));
        assert_eq!(hello(&name).client_name, "a".repeat(63));
        assert_eq!(hello("short").client_name, "short");
    }

    #[test]
    fn hello_is_accepted_or_refused_with_numbers() {
        let ours = hello("test");
        assert_eq!(
            accept(&Hello { features: u64::MAX, ..ours.clone() }),
            Ok(Agreed { version: 1, features: 0 })
        );
        let refused = accept(&Hello { version_min: 2, version_max: 7, ..ours.clone() });
        let refused = refused.expect_err("no shared version");
        assert_eq!((refused.code, refused.asked, refused.limit), (Code::VersionUnsupported, 7, 1));
        let refused = accept(&Hello { client_name: "x".repeat(65), ..ours });
        assert_eq!(refused.map_err(|refused| refused.code), Err(Code::BadRequest));
    }
}
