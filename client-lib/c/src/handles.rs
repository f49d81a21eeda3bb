//! Handles: names of our objects, which C code holds in place of pointers to them.
//!
//! A handle is a number that looks like an address which no process can have. Each is given out once, so that one whose
//! object was closed is never taken for a newer one's. A fork has none of its parent's handles: its table is new, for a
//! thread of the parent may have had the old one locked.

use std::collections::BTreeMap;
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};
use std::sync::{Arc, Once, PoisonError, RwLock};

use lapis::{Allocation, Client, Plan, Recording};

use crate::code::lapis_code;
use crate::last::Failure;
use crate::mapping::Mapped;
use crate::model::Opened;

/// Bits 47 to 63 of an address are all the same; these aren't.
const MARK: u64 = 0x1a95 << 48;
const NUMBER: u64 = (1 << 48) - 1;

/// The number of the next handle.
static NEXT: AtomicU64 = AtomicU64::new(1);
/// Handles below this are of the process that this one was forked from.
static FORKED: AtomicU64 = AtomicU64::new(0);
/// Null until it is used first, and again after a fork.
static TABLE: AtomicPtr<Table> = AtomicPtr::new(ptr::null_mut());

/// A tree: valgrind takes what a hash table points to, which is not its start, for possibly lost.
type Table = RwLock<BTreeMap<u64, Object>>;

/// What a handle names.
#[derive(Debug, Clone)]
pub(crate) enum Object {
    Client(Arc<Client>),
    Allocation(Arc<Allocation>),
    Mapping(Arc<Mapped>),
    Model(Arc<Opened>),
    Plan(Arc<Plan>),
    Recording(Arc<Recording>),
}

impl Object {
    fn kind(&self) -> &'static str {
        match self {
            Object::Client(_) => Client::KIND,
            Object::Allocation(_) => Allocation::KIND,
            Object::Mapping(_) => Mapped::KIND,
            Object::Model(_) => Opened::KIND,
            Object::Plan(_) => Plan::KIND,
            Object::Recording(_) => Recording::KIND,
        }
    }
}

/// A type that has handles.
pub(crate) trait Named: Sized {
    /// What the header calls it.
    const KIND: &'static str;

    fn into_object(self: Arc<Self>) -> Object;
    fn from_object(object: Object) -> Option<Arc<Self>>;
}

macro_rules! named {
    ($($type:ty, $variant:ident, $kind:literal;)*) => {
        $(impl Named for $type {
            const KIND: &'static str = $kind;

            fn into_object(self: Arc<Self>) -> Object {
                Object::$variant(self)
            }

            fn from_object(object: Object) -> Option<Arc<Self>> {
                match object {
                    Object::$variant(object) => Some(object),
                    _ => None,
                }
            }
        })*
    };
}

named! {
    Client, Client, "lapis_client";
    Allocation, Allocation, "lapis_allocation";
    Mapped, Mapping, "lapis_mapping";
    Opened, Model, "lapis_model";
    Plan, Plan, "lapis_plan";
    Recording, Recording, "lapis_recording";
}

/// A handle for an object.
pub(crate) fn insert<T: Named, H>(object: T) -> *mut H {
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let mut table = table().write().unwrap_or_else(PoisonError::into_inner);
    table.insert(number, Arc::new(object).into_object());
    ptr::without_provenance_mut(usize::try_from(MARK | number).expect("addresses have 64 bits"))
}

/// The object of a handle.
pub(crate) fn get<T: Named, H>(handle: *const H) -> Result<Arc<T>, Failure> {
    let number = number_of::<T, H>(handle)?;
    let table = table().read().unwrap_or_else(PoisonError::into_inner);
    let object = table.get(&number).cloned();
    drop(table);
    typed(object, number)
}

/// Takes the object of a handle, which is none any more. `None` for NULL.
pub(crate) fn close<T: Named, H>(handle: *const H) -> Result<Option<Arc<T>>, Failure> {
    take(handle, false)
}

/// As [`close`], unless another thread uses the object.
pub(crate) fn end<T: Named, H>(handle: *const H) -> Result<Option<T>, Failure> {
    let taken: Option<Arc<T>> = take(handle, true)?;
    Ok(taken.and_then(Arc::into_inner))
}

fn take<T: Named, H>(handle: *const H, unused: bool) -> Result<Option<Arc<T>>, Failure> {
    if handle.is_null() {
        return Ok(None);
    }
    let number = number_of::<T, H>(handle)?;
    let mut table = table().write().unwrap_or_else(PoisonError::into_inner);
    let object: Arc<T> = typed(table.get(&number).cloned(), number)?;
    // The table's, and this one. Nobody gets another from the table meanwhile.
    if unused && Arc::strong_count(&object) > 2 {
        let message = format!("another thread is in a call with this {}", T::KIND);
        return Err(Failure::new(lapis_code::LAPIS_BUSY, message));
    }
    table.remove(&number);
    Ok(Some(object))
}

fn number_of<T: Named, H>(handle: *const H) -> Result<u64, Failure> {
    let bad = |what: &str| {
        let message = format!("{what} where a {} belongs", T::KIND);
        Err(Failure::new(lapis_code::LAPIS_BAD_HANDLE, message))
    };
    let address = handle.addr() as u64;
    let number = address & NUMBER;
    match address {
        0 => bad("NULL"),
        _ if address & !NUMBER != MARK || number >= NEXT.load(Ordering::Relaxed) => {
            bad("something that no call returned")
        }
        _ => Ok(number),
    }
}

fn typed<T: Named>(object: Option<Object>, number: u64) -> Result<Arc<T>, Failure> {
    let bad = |message| Failure::new(lapis_code::LAPIS_BAD_HANDLE, message);
    let Some(object) = object else {
        if number < FORKED.load(Ordering::Relaxed) {
            return Err(lapis::Error::Forked.into());
        }
        return Err(bad(format!("a handle that was closed where a {} belongs", T::KIND)));
    };
    let kind = object.kind();
    T::from_object(object).ok_or_else(|| bad(format!("a {kind} where a {} belongs", T::KIND)))
}

fn table() -> &'static Table {
    static WATCH: Once = Once::new();
    WATCH.call_once(|| {
        // SAFETY: `forget` is a function for as long as this library is loaded, which is until the process ends
        // (install.sh links with -z nodelete). It fails only without memory; then a fork is still told by its pid.
        let _ = unsafe { libc::pthread_atfork(None, None, Some(forget)) };
    });
    let found = TABLE.load(Ordering::Acquire);
    let found = if found.is_null() { create() } else { found };
    // SAFETY: the pointer comes from `Box::into_raw`, and the box is never freed.
    unsafe { &*found }
}

fn create() -> *mut Table {
    let new = Box::into_raw(Box::new(Table::default()));
    let null = ptr::null_mut();
    match TABLE.compare_exchange(null, new, Ordering::AcqRel, Ordering::Acquire) {
        Ok(_) => new,
        Err(other) => {
            // SAFETY: it comes from `Box::into_raw`, and nobody else has seen it.
            drop(unsafe { Box::from_raw(new) });
            other
        }
    }
}

/// In a child of `fork`: all handles are the parent's. Their objects stay as they are, for what holds them may be locked.
extern "C" fn forget() {
    FORKED.store(NEXT.load(Ordering::Relaxed), Ordering::Relaxed);
    TABLE.store(ptr::null_mut(), Ordering::Release);
}
