//! Which GPU: by its number among those that a process sees, or by its UUID, which is the same in every process.

use std::fmt;
use std::str::FromStr;

use serde::de::{Deserialize, Deserializer, Visitor};
use serde::{Serialize, Serializer};

/// What `nvidia-smi -L` puts before a UUID.
const PREFIXES: [&str; 2] = ["GPU-", "MIG-"];

/// A GPU as people name it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GpuChoice {
    /// Its number among those that this process sees.
    Ordinal(u32),
    /// Its UUID.
    Uuid([u8; 16]),
}

/// A text names no GPU.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{text}` is no GPU; write a number such as 0, or a UUID as `nvidia-smi -L` prints it")]
pub struct GpuChoiceError {
    text: String,
}

impl fmt::Display for GpuChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            GpuChoice::Ordinal(ordinal) => write!(f, "{ordinal}"),
            GpuChoice::Uuid(uuid) => {
                f.write_str("GPU-")?;
                for (index, byte) in uuid.iter().enumerate() {
                    let dash = if matches!(index, 4 | 6 | 8 | 10) { "-" } else { "" };
                    write!(f, "{dash}{byte:02x}")?;
                }
                Ok(())
            }
        }
    }
}

impl FromStr for GpuChoice {
    type Err = GpuChoiceError;

    fn from_str(text: &str) -> Result<GpuChoice, GpuChoiceError> {
        let text = text.trim();
        if let Ok(ordinal) = text.parse() {
            return Ok(GpuChoice::Ordinal(ordinal));
        }
        let error = || GpuChoiceError { text: text.to_owned() };
        let bare = PREFIXES.iter().find_map(|prefix| text.strip_prefix(prefix)).unwrap_or(text);
        let digits: String = bare.chars().filter(|c| *c != '-').collect();
        if digits.len() != 32 || !digits.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return Err(error());
        }
        let number = u128::from_str_radix(&digits, 16).map_err(|_| error())?;
        Ok(GpuChoice::Uuid(number.to_be_bytes()))
    }
}

impl Serialize for GpuChoice {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for GpuChoice {
    /// A text, or a number.
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<GpuChoice, D::Error> {
        struct Either;
        impl Visitor<'_> for Either {
            type Value = GpuChoice;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a GPU's number or UUID")
            }

            fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<GpuChoice, E> {
                text.parse().map_err(E::custom)
            }

            fn visit_i64<E: serde::de::Error>(self, number: i64) -> Result<GpuChoice, E> {
                self.visit_str(&number.to_string())
            }
        }
        deserializer.deserialize_any(Either)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gpus_are_numbers_or_uuids() {
        let text = "GPU-0001a203-0405-0607-0809-0a0b0c0d0eff";
        let uuid = [0, 1, 0xa2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 255];
        assert_eq!(text.parse(), Ok(GpuChoice::Uuid(uuid)));
        assert_eq!(GpuChoice::Uuid(uuid).to_string(), text);
        assert_eq!("MIG-0001A203-0405-0607-0809-0A0B0C0D0EFF".parse(), Ok(GpuChoice::Uuid(uuid)));
        assert_eq!("0001a203-0405-0607-0809-0a0b0c0d0eff".parse(), Ok(GpuChoice::Uuid(uuid)));
        assert_eq!("3".parse(), Ok(GpuChoice::Ordinal(3)));
        for text in ["", "-1", "first", "GPU-0", "GPU-0001a203-0405-0607-0809-0a0b0c0d0ef\u{e9}"] {
            let error = text.parse::<GpuChoice>().unwrap_err().to_string();
            assert!(error.starts_with(&format!("`{text}` is no GPU; ")), "{error}");
        }
    }
}
