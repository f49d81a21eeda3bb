//! The bytes of a mapping, on every device: where they are if the CPU can reach them, and a copy if not.

use std::borrow::Cow;

use lapis::Mapping;

/// The bytes of a range.
///
/// # Panics
/// When the device does not give them.
#[must_use]
pub fn read(mapping: &Mapping, range: usize) -> Cow<'_, [u8]> {
    if mapping.device_ptr(range).is_none() {
        return Cow::Borrowed(mapping.bytes(range));
    }
    let mut copy = vec![0; mapping.length(range)];
    mapping.copy_to_host(range, 0, &mut copy).expect("the device gives its bytes");
    Cow::Owned(copy)
}

/// Changes the bytes of a range, all of them.
///
/// # Panics
/// When the mapping is for reading, or the device does not take them.
pub fn edit(mapping: &mut Mapping, range: usize, change: impl FnOnce(&mut [u8])) {
    if mapping.device_ptr(range).is_none() {
        return change(mapping.bytes_mut(range));
    }
    let mut copy = read(mapping, range).into_owned();
    change(&mut copy);
    mapping.copy_from_host(range, 0, &copy).expect("the device takes its bytes");
}
