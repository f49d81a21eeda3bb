//! What survives in the store: model files in all their versions, and the spill.

use std::collections::BTreeMap;
use std::rc::Rc;

use lapisd::engine::ids::FileId;
use lapisd::store::FileIdentity;

use super::random::Random;

/// A file's bytes at one time.
#[derive(Debug, Clone)]
pub(super) struct Version {
    /// What `fstat` says.
    pub(super) identity: FileIdentity,
    /// All of it.
    pub(super) bytes: Rc<[u8]>,
}

/// A page-sized piece of the spill.
#[derive(Debug)]
pub(super) struct Slot {
    /// What a read gives.
    pub(super) bytes: Vec<u8>,
    /// What the last write that succeeded answered.
    pub(super) checksum: Option<u64>,
    /// An operation uses it.
    pub(super) claimed: bool,
}

/// Files and spill.
#[derive(Debug)]
pub(super) struct Disk {
    /// The newest version of each file.
    files: Vec<Version>,
    open: BTreeMap<FileId, (usize, Version)>,
    /// The spill.
    pub(super) slots: Vec<Slot>,
    /// Nothing can be written before this time.
    pub(super) full_until: u64,
    random: Random,
}

impl Disk {
    /// Files of these sizes with bytes of their own, and an unwritten spill.
    #[must_use]
    pub(super) fn new(seed: u64, sizes: &[u64], slots: u32, page_size: usize) -> Self {
        let mut random = Random::new(seed, 0xD1);
        let files = sizes.iter().zip(1..).map(|(size, inode)| {
            let identity = FileIdentity { device: 1, inode, size: *size, mtime_ns: 1, ctime_ns: 1 };
            Version { identity, bytes: random_bytes(&mut random, *size) }
        });
        let files = files.collect();
        let slot = |_| Slot { bytes: vec![0xEE; page_size], checksum: None, claimed: false };
        let slots = (0..slots).map(slot).collect();
        Self { files, open: BTreeMap::new(), slots, full_until: 0, random }
    }

    /// Whether a slot holds these bytes.
    #[must_use]
    pub(super) fn holds(&self, bytes: &[u8]) -> bool {
        self.slots.iter().any(|slot| slot.checksum.is_some() && slot.bytes == bytes)
    }

    /// How many files there are.
    #[must_use]
    pub(super) fn files_count(&self) -> usize {
        self.files.len()
    }

    /// A file as it is now.
    #[must_use]
    pub(super) fn present(&self, index: usize) -> &Version {
        &self.files[index]
    }

    /// Opens a file under an id.
    pub(super) fn open(&mut self, file: FileId, index: usize) -> Version {
        let version = self.files[index].clone();
        self.open.insert(file, (index, version.clone()));
        version
    }

    /// Closes it.
    ///
    /// # Panics
    /// If it is not open.
    pub(super) fn close(&mut self, file: FileId) {
        assert!(self.open.remove(&file).is_some(), "{file:?} is closed and was not open");
    }

    /// Files that are open.
    #[must_use]
    pub(super) fn open_count(&self) -> usize {
        self.open.len()
    }

    /// An open file: as it was when opened, and as it is now.
    ///
    /// # Panics
    /// If it is not open.
    #[must_use]
    pub(super) fn find(&self, file: FileId) -> (&Version, &Version) {
        let (index, opened) =
            self.open.get(&file).unwrap_or_else(|| panic!("{file:?} is read and not open"));
        (opened, &self.files[*index])
    }

    /// Overwrites some file in place, or cuts it.
    pub(super) fn change_file(&mut self, truncate: bool) {
        let index = self.random.index(self.files.len());
        let file = &mut self.files[index];
        let identity = &mut file.identity;
        identity.mtime_ns += 1;
        identity.ctime_ns += 1;
        if truncate {
            identity.size = self.random.between(identity.size / 2, identity.size);
        }
        file.bytes = random_bytes(&mut self.random, identity.size);
    }

    /// Flips a bit of some slot that holds a page. Answers whether there was one.
    pub(super) fn flip_bit(&mut self) -> bool {
        let written: Vec<_> =
            (0..self.slots.len()).filter(|slot| self.slots[*slot].checksum.is_some()).collect();
        if written.is_empty() {
            return false;
        }
        let slot = &mut self.slots[self.random.pick(&written)];
        let byte = self.random.index(slot.bytes.len());
        slot.bytes[byte] ^= 1 << self.random.below(8);
        true
    }
}

fn random_bytes(random: &mut Random, size: u64) -> Rc<[u8]> {
    let mut bytes = vec![0; usize::try_from(size).expect("files are small")];
    random.fill(&mut bytes);
    bytes.into()
}
