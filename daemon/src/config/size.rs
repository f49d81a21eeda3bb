//! Byte counts as people write them: `24GiB`, `1.5GiB`, `2GB`, `4096`, `80%`.

use std::fmt;
use std::str::FromStr;

use serde::de::{Deserialize, Deserializer, Error as _, Visitor};
use serde::{Serialize, Serializer};

/// Suffixes and their bytes.
const UNITS: [(&str, u64); 9] = [
    ("TiB", 1 << 40),
    ("GiB", 1 << 30),
    ("MiB", 1 << 20),
    ("KiB", 1 << 10),
    ("TB", 1_000_000_000_000),
    ("GB", 1_000_000_000),
    ("MB", 1_000_000),
    ("kB", 1_000),
    ("B", 1),
];

/// A number of bytes. Prints exactly, in the largest unit that makes it a whole number: `1536MiB`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Size(u64);

impl Size {
    /// So many bytes.
    #[must_use]
    pub const fn from_bytes(bytes: u64) -> Size {
        Size(bytes)
    }

    /// So many times 1024 bytes.
    #[must_use]
    pub const fn kib(count: u32) -> Size {
        Size((count as u64) << 10)
    }

    /// So many times 1024 KiB.
    #[must_use]
    pub const fn mib(count: u32) -> Size {
        Size((count as u64) << 20)
    }

    /// So many times 1024 MiB.
    #[must_use]
    pub const fn gib(count: u32) -> Size {
        Size((count as u64) << 30)
    }

    /// Bytes.
    #[must_use]
    pub const fn bytes(self) -> u64 {
        self.0
    }
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let whole = |(_, unit): &&(&str, u64)| self.0 >= *unit && self.0.is_multiple_of(*unit);
        match UNITS.iter().filter(whole).max_by_key(|(_, unit)| *unit) {
            Some((name, unit)) => f.pad(&format!("{}{name}", self.0 / unit)),
            None => f.pad(&format!("{}B", self.0)),
        }
    }
}

/// Why a text is no size.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SizeError {
    /// It does not start with a number.
    #[error("`{text}` is no size; write a number and a unit, such as 24GiB, 512MiB or 4096")]
    NotANumber {
        /// As given.
        text: String,
    },
    /// The number is followed by something else than a unit.
    #[error("`{unit}` is no unit; use {hint}")]
    UnknownUnit {
        /// As given.
        unit: String,
        /// What was probably meant.
        hint: &'static str,
    },
    /// More bytes than 64 bits hold.
    #[error("`{text}` is more than 16777215TiB")]
    TooLarge {
        /// As given.
        text: String,
    },
    /// A percentage that is not from 1 to 100.
    #[error("`{text}` is no share; write 1% to 100%")]
    Share {
        /// As given.
        text: String,
    },
    /// A rate of nothing.
    #[error("at a rate of `{text}` nothing would ever arrive; write one such as 25GB/s")]
    RateZero {
        /// As given.
        text: String,
    },
}

impl FromStr for Size {
    type Err = SizeError;

    fn from_str(text: &str) -> Result<Size, SizeError> {
        let text = text.trim();
        let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
        let (number, unit) = text.split_at(end);
        let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
        let not_a_number = || SizeError::NotANumber { text: text.to_owned() };
        // Nine digits behind the point resolve a byte of a GiB; more are noise, and would overflow below.
        if whole.is_empty() || number.ends_with('.') || fraction.len() > 9 {
            return Err(not_a_number());
        }
        let unit = unit_bytes(unit.trim())?;
        let too_large = || SizeError::TooLarge { text: text.to_owned() };
        // 64 bits are checked here and again at the end, so the products in between fit 128.
        let whole = u128::from(whole.parse::<u64>().map_err(|_| too_large())?);
        let mut bytes = whole * u128::from(unit);
        if !fraction.is_empty() {
            let digits = fraction.parse::<u32>().map_err(|_| not_a_number())?;
            let scale = (0..fraction.len()).fold(1_u128, |scale, _| scale * 10);
            bytes += u128::from(digits) * u128::from(unit) / scale;
        }
        u64::try_from(bytes).map(Size).map_err(|_| too_large())
    }
}

/// Bytes of a unit; none means bytes.
fn unit_bytes(unit: &str) -> Result<u64, SizeError> {
    if unit.is_empty() {
        return Ok(1);
    }
    if let Some((_, bytes)) = UNITS.iter().find(|(name, _)| name.eq_ignore_ascii_case(unit)) {
        return Ok(*bytes);
    }
    let hint = match unit.to_ascii_lowercase().as_str() {
        "k" => "KiB (1024 bytes) or kB (1000)",
        "m" => "MiB (1024 KiB) or MB (1000 kB)",
        "g" => "GiB (1024 MiB) or GB (1000 MB)",
        "t" => "TiB (1024 GiB) or TB (1000 GB)",
        _ => "B, KiB, MiB, GiB, TiB, kB, MB, GB or TB",
    };
    Err(SizeError::UnknownUnit { unit: unit.to_owned(), hint })
}

/// A size, or a share of what there is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Amount {
    /// So many bytes.
    Fixed(Size),
    /// Percent of what is available, 1 to 100.
    Share(u8),
}

impl Amount {
    /// Bytes, if so many are available.
    #[must_use]
    pub fn of(self, available: u64) -> Size {
        match self {
            Amount::Fixed(size) => size,
            // Divided first by 100 would lose up to 99 bytes a percent; 128 bits lose nothing.
            Amount::Share(percent) => {
                let bytes = u128::from(available) * u128::from(percent) / 100;
                Size(u64::try_from(bytes).unwrap_or(available))
            }
        }
    }
}

impl From<Size> for Amount {
    fn from(size: Size) -> Amount {
        Amount::Fixed(size)
    }
}

impl fmt::Display for Amount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Amount::Fixed(size) => size.fmt(f),
            Amount::Share(percent) => write!(f, "{percent}%"),
        }
    }
}

impl FromStr for Amount {
    type Err = SizeError;

    fn from_str(text: &str) -> Result<Amount, SizeError> {
        let Some(percent) = text.trim().strip_suffix('%') else {
            return text.parse().map(Amount::Fixed);
        };
        match percent.trim_end().parse::<u8>() {
            Ok(percent @ 1..=100) => Ok(Amount::Share(percent)),
            _ => Err(SizeError::Share { text: text.to_owned() }),
        }
    }
}

/// Bytes a second: a size, with or without `/s` behind it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Rate(u64);

impl Rate {
    /// So many bytes a second.
    #[must_use]
    pub const fn from_bytes_per_s(bytes: u64) -> Rate {
        Rate(bytes)
    }

    /// Bytes a second.
    #[must_use]
    pub const fn bytes_per_s(self) -> u64 {
        self.0
    }
}

impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/s", Size(self.0))
    }
}

impl FromStr for Rate {
    type Err = SizeError;

    fn from_str(text: &str) -> Result<Rate, SizeError> {
        let text = text.trim();
        match text.strip_suffix("/s").unwrap_or(text).parse()? {
            Size(0) => Err(SizeError::RateZero { text: text.to_owned() }),
            Size(bytes) => Ok(Rate(bytes)),
        }
    }
}

/// Reads and writes a type as its text in files; a plain number means bytes.
macro_rules! serde_as_text {
    ($($name:ident)*) => {
        $(impl Serialize for $name {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<$name, D::Error> {
                deserializer.deserialize_any(TextOrBytes)?.parse().map_err(D::Error::custom)
            }
        })*
    };
}

serde_as_text!(Size Amount Rate);

/// Text, or a number as text.
struct TextOrBytes;

impl Visitor<'_> for TextOrBytes {
    type Value = String;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a size such as \"24GiB\", or a number of bytes")
    }

    fn visit_str<E>(self, text: &str) -> Result<String, E> {
        Ok(text.to_owned())
    }

    fn visit_i64<E>(self, bytes: i64) -> Result<String, E> {
        Ok(bytes.to_string())
    }

    fn visit_u64<E>(self, bytes: u64) -> Result<String, E> {
        Ok(bytes.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(text: &str) -> Result<u64, SizeError> {
        text.parse::<Size>().map(Size::bytes)
    }

    #[test]
    fn sizes_are_read() {
        assert_eq!(bytes("24GiB"), Ok(25_769_803_776));
        assert_eq!(bytes("512MiB"), Ok(536_870_912));
        assert_eq!(bytes("1.5GiB"), Ok(1_610_612_736));
        assert_eq!(bytes("4096"), Ok(4096));
        assert_eq!(bytes("64KiB"), Ok(65_536));
        assert_eq!(bytes("2GB"), Ok(2_000_000_000));
        assert_eq!(bytes(" 2 tib "), Ok(2_199_023_255_552));
        assert_eq!(bytes("0.1KiB"), Ok(102));
        assert_eq!(bytes("1.25GiB"), Ok(1_342_177_280));
        assert_eq!(bytes("18446744073709551615"), Ok(u64::MAX));
    }

    #[test]
    fn what_is_no_size_is_refused_with_a_reason() {
        let text = |text: &str| bytes(text).map_err(|error| error.to_string());
        assert_eq!(
            text("12XB"),
            Err("`XB` is no unit; use B, KiB, MiB, GiB, TiB, kB, MB, GB or TB".to_owned())
        );
        assert_eq!(
            text("24G"),
            Err("`G` is no unit; use GiB (1024 MiB) or GB (1000 MB)".to_owned())
        );
        for not_a_number in ["", "GiB", "-1", ".5GiB", "1.GiB", "1..5GiB", "1.2.3", "1.0000000001B"]
        {
            let error = bytes(not_a_number).unwrap_err();
            assert!(matches!(error, SizeError::NotANumber { .. }), "{not_a_number}: {error}");
        }
        for large in ["16777216TiB", "18446744073709551616", "18446744073709551615.5KiB"] {
            assert!(matches!(bytes(large), Err(SizeError::TooLarge { .. })), "{large}");
        }
    }

    #[test]
    fn sizes_print_exactly_and_read_back() {
        for (count, text) in [
            (25_769_803_776, "24GiB"),
            (1_610_612_736, "1536MiB"),
            (4096, "4KiB"),
            (2_000_000_000, "2GB"),
            (1000, "1kB"),
            (1025, "1025B"),
            (0, "0B"),
        ] {
            assert_eq!(Size::from_bytes(count).to_string(), text);
            assert_eq!(bytes(text), Ok(count));
        }
    }

    #[test]
    fn shares_are_of_what_there_is() {
        assert_eq!("80%".parse(), Ok(Amount::Share(80)));
        assert_eq!("1GiB".parse(), Ok(Amount::Fixed(Size::gib(1))));
        assert_eq!(Amount::Share(80).of(1_000_000_001).bytes(), 800_000_000);
        assert_eq!(Amount::Share(100).of(u64::MAX).bytes(), u64::MAX);
        assert_eq!(Amount::Fixed(Size::kib(3)).of(1).bytes(), 3072);
        for bad in ["0%", "101%", "%", "12.5%", "-1%"] {
            assert!(matches!(bad.parse::<Amount>(), Err(SizeError::Share { .. })), "{bad}");
        }
    }

    #[test]
    fn rates_may_say_per_second() {
        assert_eq!("25GB/s".parse::<Rate>().map(Rate::bytes_per_s), Ok(25_000_000_000));
        assert_eq!("25GB".parse::<Rate>().map(Rate::bytes_per_s), Ok(25_000_000_000));
        assert_eq!(Rate::from_bytes_per_s(25_000_000_000).to_string(), "25GB/s");
    }

    #[test]
    fn a_rate_of_nothing_is_refused() {
        for bad in ["0", "0B/s", "0.1B/s"] {
            assert!(matches!(bad.parse::<Rate>(), Err(SizeError::RateZero { .. })), "{bad}");
        }
    }
}
