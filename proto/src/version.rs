//! Protocol versions. One constant per change, with what it changed; both sides speak the highest they share.

/// The first version.
pub const VERSION_1: u16 = 1;

/// Oldest version this crate speaks.
pub const VERSION_MIN: u16 = VERSION_1;
/// Newest version this crate speaks.
pub const VERSION: u16 = VERSION_1;
/// Version in the header of every handshake message, for ever.
pub const VERSION_OF_HANDSHAKE: u16 = VERSION_1;

/// The peers share no version.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "the client speaks protocol versions {client_min} to {client_max}, the daemon {VERSION_MIN} to {VERSION}: \
     install the same release of both"
)]
pub struct VersionUnsupported {
    /// Lowest the client offered.
    pub client_min: u16,
    /// Highest the client offered.
    pub client_max: u16,
}

/// The highest version in both the client's range and ours.
///
/// # Errors
/// [`VersionUnsupported`] when there is none, or the client's range is empty.
pub fn negotiate(client_min: u16, client_max: u16) -> Result<u16, VersionUnsupported> {
    let lowest = client_min.max(VERSION_MIN);
    let highest = client_max.min(VERSION);
    if lowest <= highest && client_min <= client_max {
        Ok(highest)
    } else {
        Err(VersionUnsupported { client_min, client_max })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_highest_shared_version_is_taken() {
        assert_eq!(negotiate(1, 1), Ok(1));
        assert_eq!(negotiate(0, 9), Ok(1));
        for (client_min, client_max) in [(2, 3), (0, 0), (1, 0), (2, 1), (65535, 65535)] {
            let refused = negotiate(client_min, client_max);
            assert_eq!(refused, Err(VersionUnsupported { client_min, client_max }));
        }
    }
}
