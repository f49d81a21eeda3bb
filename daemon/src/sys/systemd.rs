//! What passes between the daemon and systemd: sockets that it opened for us, and notes on how we are.
//!
//! The notes are texts in datagrams (`sd_notify(3)`), sent without waiting: a manager that does not read them is not
//! waited for. Without systemd there is nobody to tell, and nothing is done.
#![expect(unsafe_code, reason = "inherited descriptors come as numbers")]

use std::ffi::OsString;
use std::fmt::Display;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram, UnixListener};
use std::time::Duration;

use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use nix::sys::socket::{SockType, getsockopt, sockopt};
use nix::time::{ClockId, clock_gettime};

/// The first descriptor that systemd passes.
const FIRST: RawFd = 3;
/// Name of the socket that metrics are served on, in `FileDescriptorName=`.
pub const METRICS_NAME: &str = "metrics";

/// Tells the service manager how we are.
#[derive(Debug, Default)]
pub struct Notifier {
    target: Option<(UnixDatagram, SocketAddr)>,
    watchdog: Option<Duration>,
}

impl Notifier {
    /// One that tells nobody.
    #[must_use]
    pub fn silent() -> Self {
        Self::default()
    }

    /// One that tells whom the environment names.
    #[must_use]
    pub fn from_environment() -> Self {
        Self::of(|name| std::env::var_os(name))
    }

    fn of(variable: impl Fn(&str) -> Option<OsString>) -> Self {
        let target = variable("NOTIFY_SOCKET").and_then(|path| {
            let address = match path.as_bytes() {
                [b'@', name @ ..] => SocketAddr::from_abstract_name(name),
                _ => SocketAddr::from_pathname(&path),
            };
            let socket = UnixDatagram::unbound();
            let opened = address.and_then(|address| Ok((socket?, address)));
            let opened = opened.and_then(|opened| opened.0.set_nonblocking(true).map(|()| opened));
            opened.inspect_err(|error| tracing::warn!("NOTIFY_SOCKET is of no use: {error}")).ok()
        });
        let number = |name: &str| -> Option<u64> { variable(name)?.to_str()?.parse().ok() };
        let ours = number("WATCHDOG_PID").is_none_or(|pid| pid == u64::from(std::process::id()));
        let watchdog = number("WATCHDOG_USEC").filter(|us| ours && *us > 0);
        Self { target, watchdog: watchdog.map(Duration::from_micros) }
    }

    /// The longest that it may hear nothing of us; `None`: it does not watch.
    #[must_use]
    pub fn watchdog(&self) -> Option<Duration> {
        self.target.as_ref().and(self.watchdog)
    }

    fn say(&self, note: &str) {
        let Some((socket, address)) = &self.target else { return };
        if let Err(error) = socket.send_to_addr(note.as_bytes(), address) {
            tracing::debug!("cannot tell the service manager: {error}");
        }
    }

    /// Requests can be served.
    pub fn ready(&self) {
        self.say("READY=1");
    }

    /// The configuration is being read again; [`Self::ready`] ends that.
    pub fn reloading(&self) {
        let now = clock_gettime(ClockId::CLOCK_MONOTONIC).map(Duration::from);
        let us = now.unwrap_or_default().as_micros();
        self.say(&format!("RELOADING=1\nMONOTONIC_USEC={us}"));
    }

    /// The daemon stops.
    pub fn stopping(&self) {
        self.say("STOPPING=1\nSTATUS=Stopping: what moves ends");
    }

    /// The daemon turns.
    pub fn alive(&self) {
        self.say("WATCHDOG=1");
    }

    /// What it does, in one line for people.
    pub fn status(&self, line: impl Display) {
        self.say(&format!("STATUS={}", line.to_string().replace('\n', " ")));
    }
}

/// Sockets that systemd listens on for us.
#[derive(Debug, Default)]
pub struct Inherited {
    /// For clients.
    pub clients: Option<UnixListener>,
    /// For metrics.
    pub metrics: Option<UnixListener>,
}

/// What systemd passed can't be used.
#[derive(Debug, thiserror::Error)]
pub enum InheritError {
    /// Not a listening Unix stream socket.
    #[error(
        "descriptor {fd} ({name:?}) from systemd is no listening Unix stream socket: the socket unit needs ListenStream= with a path"
    )]
    NotASocket {
        /// Which.
        fd: RawFd,
        /// As named by systemd.
        name: String,
    },
    /// Two for one purpose.
    #[error(
        "systemd passed two sockets for {purpose}: one ListenStream= for clients, and one with FileDescriptorName=metrics at most"
    )]
    Two {
        /// What for.
        purpose: &'static str,
    },
}

/// The number of descriptors passed to this process, and their names.
fn passed(variable: impl Fn(&str) -> Option<OsString>, pid: u32) -> Vec<(RawFd, String)> {
    let number = |name: &str| -> Option<u32> { variable(name)?.to_str()?.parse().ok() };
    if number("LISTEN_PID") != Some(pid) {
        // For a process before us, whose environment we have.
        return Vec::new();
    }
    let count = number("LISTEN_FDS").unwrap_or(0).min(64);
    let names = variable("LISTEN_FDNAMES").unwrap_or_default();
    let names = names.to_string_lossy().into_owned();
    let mut names = names.split(':').map(str::to_owned);
    (FIRST..).take(count as usize).map(|fd| (fd, names.next().unwrap_or_default())).collect()
}

/// Takes over the sockets that systemd passed. To be called once, before any other descriptor is opened.
///
/// # Errors
/// [`InheritError`]: they are not what we need.
pub fn inherit() -> Result<Inherited, InheritError> {
    let mut inherited = Inherited::default();
    for (fd, name) in passed(|name| std::env::var_os(name), std::process::id()) {
        let wrong = |name: &str| InheritError::NotASocket { fd, name: name.to_owned() };
        if fcntl_is_closed(fd) {
            return Err(wrong(&name));
        }
        // SAFETY: the descriptor is open, as just seen, and by the protocol it is this process's own to take: it was
        // opened for LISTEN_PID, which is us, and this runs once, before anything else could have got its number.
        let owned = unsafe { OwnedFd::from_raw_fd(fd) };
        let listener = listener(owned).ok_or_else(|| wrong(&name))?;
        let (place, purpose) = if name == METRICS_NAME {
            (&mut inherited.metrics, "metrics")
        } else {
            (&mut inherited.clients, "clients")
        };
        if place.replace(listener).is_some() {
            return Err(InheritError::Two { purpose });
        }
    }
    Ok(inherited)
}

fn fcntl_is_closed(fd: RawFd) -> bool {
    // SAFETY: F_GETFD takes no pointer and changes nothing; a number that is no descriptor is answered with EBADF.
    unsafe { libc::fcntl(fd, libc::F_GETFD) < 0 }
}

/// The listening Unix stream socket that a descriptor is, if it is one.
fn listener(fd: OwnedFd) -> Option<UnixListener> {
    let is_stream = getsockopt(&fd, sockopt::SockType).is_ok_and(|kind| kind == SockType::Stream);
    let listens = getsockopt(&fd, sockopt::AcceptConn).unwrap_or(false);
    if !is_stream || !listens || fcntl(&fd, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC)).is_err() {
        return None;
    }
    let listener = UnixListener::from(fd);
    // Fails for other families.
    listener.local_addr().ok()?;
    Some(listener)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn environment(pairs: &[(&str, &str)]) -> impl Fn(&str) -> Option<OsString> {
        let pairs: Vec<(String, OsString)> =
            pairs.iter().map(|(name, value)| ((*name).to_owned(), value.into())).collect();
        move |name| pairs.iter().find(|(known, _)| known == name).map(|(_, value)| value.clone())
    }

    #[test]
    fn notes_arrive_and_without_a_socket_nobody_is_told() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("notify");
        let manager = UnixDatagram::bind(&path).unwrap();
        let path = path.to_str().unwrap();
        let notifier =
            Notifier::of(environment(&[("NOTIFY_SOCKET", path), ("WATCHDOG_USEC", "250")]));
        assert_eq!(notifier.watchdog(), Some(Duration::from_micros(250)));
        let heard = || {
            let mut note = [0; 256];
            let count = manager.recv(&mut note).unwrap();
            String::from_utf8(note[..count].to_vec()).unwrap()
        };
        notifier.ready();
        assert_eq!(heard(), "READY=1");
        notifier.status("two\nlines");
        assert_eq!(heard(), "STATUS=two lines");
        notifier.reloading();
        assert!(heard().starts_with("RELOADING=1\nMONOTONIC_USEC="));
        // Nobody reads any more: it goes on all the same.
        for _ in 0..10_000 {
            notifier.alive();
        }
        let another = [("NOTIFY_SOCKET", path), ("WATCHDOG_USEC", "250"), ("WATCHDOG_PID", "1")];
        let another = environment(&another);
        assert_eq!(Notifier::of(another).watchdog(), None);
        let silent = Notifier::of(environment(&[("WATCHDOG_USEC", "250")]));
        assert_eq!(silent.watchdog(), None);
        silent.ready();
    }

    #[test]
    fn descriptors_are_for_the_process_that_they_are_for() {
        let set = [("LISTEN_PID", "7"), ("LISTEN_FDS", "2"), ("LISTEN_FDNAMES", "lapis:metrics")];
        assert_eq!(passed(environment(&set), 8), []);
        assert_eq!(passed(environment(&set), 7), [(3, "lapis".into()), (4, "metrics".into())]);
        assert_eq!(passed(environment(&[("LISTEN_PID", "7"), ("LISTEN_FDS", "x")]), 7), []);
        let many = passed(environment(&[("LISTEN_PID", "7"), ("LISTEN_FDS", "4000000000")]), 7);
        assert_eq!(many.len(), 64);
    }

    #[test]
    fn only_listening_unix_sockets_are_taken() {
        let directory = tempfile::tempdir().unwrap();
        let unix = UnixListener::bind(directory.path().join("s")).unwrap();
        assert!(listener(unix.into()).is_some());
        let tcp = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        assert!(listener(tcp.into()).is_none());
        let (one, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        assert!(listener(one.into()).is_none());
        let datagram = UnixDatagram::unbound().unwrap();
        assert!(listener(datagram.into()).is_none());
        assert!(listener(std::fs::File::open("/dev/null").unwrap().into()).is_none());
    }
}
