//! The machine that is played, from `FAKE_CUDA_*` in the environment. The table of them is in the crate's documentation.

use std::collections::BTreeMap;
use std::path::PathBuf;

/// Where devices are when `FAKE_CUDA_DIR` doesn't say. In memory, as VRAM is.
const DIRECTORY_DEFAULT: &str = "/dev/shm/lapis-fake-cuda";
/// Most devices.
const DEVICES_MAX: u64 = 64;

/// How the devices' memory and the host's are joined.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unified {
    /// A card with memory of its own.
    No,
    /// A GPU that shares the host's memory.
    Integrated,
    /// A card that reads pageable host memory through the host's page tables.
    Coherent,
}

/// All settings.
#[derive(Clone, Debug)]
pub(crate) struct Config {
    pub(crate) directory: PathBuf,
    /// Physical number of each device that this process sees, by ordinal.
    pub(crate) visible: Vec<u32>,
    pub(crate) memory: u64,
    pub(crate) granularity: u64,
    pub(crate) unified: Unified,
    pub(crate) version: i32,
    /// Answers of `cuDeviceGetAttribute` that are set by hand.
    pub(crate) attributes: BTreeMap<u32, i32>,
    /// Whether new memory is full of 0xA5 in place of zeros.
    pub(crate) poison: bool,
    /// Whether the CPU can reach device memory at its device address.
    pub(crate) host_access: bool,
}

/// Where devices, gates and faults are kept.
pub(crate) fn directory() -> PathBuf {
    std::env::var_os("FAKE_CUDA_DIR").map_or_else(|| DIRECTORY_DEFAULT.into(), PathBuf::from)
}

impl Config {
    /// Reads the environment; the error says which variable is wrong.
    pub(crate) fn from_environment() -> Result<Self, String> {
        let devices = number("FAKE_CUDA_DEVICES", 1)?;
        if devices > DEVICES_MAX {
            return Err(format!("FAKE_CUDA_DEVICES: at most {DEVICES_MAX}"));
        }
        let devices = u32::try_from(devices).expect("checked above");
        let granularity = number("FAKE_CUDA_GRANULARITY", 2 << 20)?;
        if !granularity.is_power_of_two() || granularity < 4096 {
            return Err("FAKE_CUDA_GRANULARITY: a power of two from 4096 on".to_owned());
        }
        let version = number("FAKE_CUDA_VERSION", 13_010)?;
        Ok(Self {
            directory: directory(),
            visible: match std::env::var("CUDA_VISIBLE_DEVICES") {
                Ok(list) => visible(&list, devices),
                Err(_) => (0..devices).collect(),
            },
            memory: number("FAKE_CUDA_MEMORY", 1 << 30)?,
            granularity,
            unified: unified()?,
            version: i32::try_from(version).map_err(|_| "FAKE_CUDA_VERSION: too large")?,
            attributes: attributes()?,
            poison: number("FAKE_CUDA_POISON", 0)? != 0,
            host_access: number("FAKE_CUDA_HOST_ACCESS", 1)? != 0,
        })
    }
}

fn text(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|text| !text.is_empty())
}

/// A count, or a size with KiB, MiB or GiB.
fn number(name: &str, default: u64) -> Result<u64, String> {
    let Some(text) = text(name) else { return Ok(default) };
    let units = [("KiB", 10), ("MiB", 20), ("GiB", 30), ("", 0)];
    let (digits, shift) = units
        .iter()
        .find_map(|(unit, shift)| Some((text.strip_suffix(unit)?, *shift)))
        .expect("every text ends in nothing");
    let number = digits.trim().parse::<u64>().ok().and_then(|n| n.checked_mul(1 << shift));
    number.ok_or_else(|| format!("{name}={text}: not a number or a size such as 64MiB"))
}

fn unified() -> Result<Unified, String> {
    match text("FAKE_CUDA_UNIFIED").as_deref() {
        None | Some("0" | "no") => Ok(Unified::No),
        Some("1" | "integrated") => Ok(Unified::Integrated),
        Some("coherent") => Ok(Unified::Coherent),
        Some(other) => Err(format!("FAKE_CUDA_UNIFIED={other}: no, integrated or coherent")),
    }
}

/// `102=0,103=0`.
fn attributes() -> Result<BTreeMap<u32, i32>, String> {
    let Some(list) = text("FAKE_CUDA_ATTRIBUTES") else { return Ok(BTreeMap::new()) };
    let one = |item: &str| {
        let (attribute, value) = item.split_once('=')?;
        Some((attribute.trim().parse().ok()?, value.trim().parse().ok()?))
    };
    list.split(',')
        .map(|item| one(item).ok_or_else(|| format!("FAKE_CUDA_ATTRIBUTES: {item}: not N=VALUE")))
        .collect()
}

/// As the driver reads `CUDA_VISIBLE_DEVICES`: indices or UUIDs, up to the first that there isn't.
fn visible(list: &str, devices: u32) -> Vec<u32> {
    let find = |item: &str| {
        (0..devices).find(|device| item == device.to_string() || item == uuid_text(*device))
    };
    let mut found = Vec::new();
    for device in list.split(',').map_while(|item| find(item.trim())) {
        if found.contains(&device) {
            return Vec::new();
        }
        found.push(device);
    }
    found
}

/// The UUID of a device: the same in every process.
pub(crate) fn uuid(physical: u32) -> [u8; 16] {
    let mut uuid = *b"lapis-fake-\0\0\0\0\0";
    uuid[12..].copy_from_slice(&physical.to_be_bytes());
    uuid
}

/// As nvidia-smi prints it.
fn uuid_text(physical: u32) -> String {
    let hex: String = uuid(physical).iter().map(|byte| format!("{byte:02x}")).collect();
    format!("GPU-{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
}
