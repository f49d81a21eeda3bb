//! What the model does not show: panics.

use std::os::fd::AsFd;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::waker::Waker;
use super::workers::Workers;

#[test]
#[should_panic(expected = "a bug in a job")]
fn a_job_that_panics_is_the_owners_panic() {
    let waker = Waker::new().unwrap();
    let run = |()| -> () { panic!("a bug in a job") };
    let mut workers = Workers::new("job", 1, 1, &waker, run).unwrap();
    workers.submit(|| ()).unwrap();
    let mut readable = [PollFd::new(waker.as_fd(), PollFlags::POLLIN)];
    assert_eq!(poll(&mut readable, PollTimeout::NONE), Ok(1));
    workers.poll(&mut Vec::new());
}
