//! What needs no daemon. The rest is tested by `tests/abi.rs`, from C.

use std::ffi::CStr;
use std::ptr;

use lapis::{Code, Error, Refused};

use crate::client::lapis_client;
use crate::code::lapis_code;
use crate::last::{self, Failure};
use crate::{guard, lapis_client_close};

fn message() -> String {
    let error = last::last();
    // SAFETY: it is never NULL, and lasts until the next failure.
    unsafe { CStr::from_ptr(error.message) }.to_str().expect("UTF-8").to_owned()
}

#[test]
fn every_code_of_the_daemon_has_the_same_number_here() {
    for code in Code::ALL {
        assert_eq!(lapis_code::of(*code) as u32, u32::from(code.number()), "{code:?}");
    }
}

#[test]
fn a_refusal_keeps_its_numbers() {
    let message = "no room".to_owned();
    let code = Code::OverQuota;
    let refused = Refused { code, object: 1, asked: 2, in_use: 3, limit: 4, message };
    assert_eq!(last::keep(Error::Refused(refused).into()), lapis_code::LAPIS_OVER_QUOTA);
    let error = last::last();
    assert_eq!((error.object, error.asked, error.in_use, error.limit), (1, 2, 3, 4));
    assert!(error.retryable);
}

#[test]
fn a_panic_is_an_error_with_its_message() {
    let code = guard(|| panic!("the \0 roof"));
    assert_eq!(code, lapis_code::LAPIS_BUG);
    assert_eq!(self::message(), "a fault of liblapis: the  roof; please report it");
    assert_eq!(guard(|| Ok(())), lapis_code::LAPIS_OK);
    assert_eq!(last::last().code, lapis_code::LAPIS_BUG, "success leaves it");
}

#[test]
fn the_last_error_is_the_threads_own() {
    guard(|| Err(Failure::argument("mine")));
    std::thread::spawn(|| assert_eq!(last::last().code, lapis_code::LAPIS_OK))
        .join()
        .expect("no panic");
    assert_eq!(message(), "mine");
}

#[test]
fn what_is_no_handle_is_told() {
    assert_eq!(lapis_client_close(ptr::null_mut()), lapis_code::LAPIS_OK);
    let local = 5_u64;
    for handle in [(&raw const local).cast_mut().cast(), ptr::without_provenance_mut(usize::MAX)] {
        let handle: *mut lapis_client = handle;
        assert_eq!(lapis_client_close(handle), lapis_code::LAPIS_BAD_HANDLE);
        assert_eq!(message(), "something that no call returned where a lapis_client belongs");
    }
}
