//! Finding the daemon's socket, connecting to it, and the handshake.

use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use lapis_proto::code::Code;
use lapis_proto::codec;
use lapis_proto::fds;
use lapis_proto::frame::FrameReader;
use lapis_proto::handshake;
use lapis_proto::ids::RequestId;
use lapis_proto::kind::Kind;
use lapis_proto::message::{Refused, Welcome};
use lapis_proto::version::{VERSION, VERSION_MIN};
use nix::errno::Errno;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, UnixAddr, connect, socket};

use crate::client::Client;
use crate::error::{Error, ProtocolError};
use crate::session::Session;

/// Where the system's daemon listens.
const SOCKET_OF_SYSTEM: &str = "/run/lapis/lapis.sock";
/// Smallest page size that is believed: the hardware's.
const PAGE_SIZE_MIN: u64 = 4096;
/// Largest page size that is believed.
const PAGE_SIZE_MAX: u64 = 1 << 32;
/// Open files left to the rest of the program when the limit is raised.
const OPEN_FILES_SPARE: u64 = 512;

/// How to connect.
#[derive(Debug, Clone)]
pub struct ConnectOptions {
    /// The daemon's socket; `None` for [`default_socket`].
    pub socket: Option<PathBuf>,
    /// Name for the daemon's log, cut at 64 bytes; the program's name by default.
    pub name: String,
    /// How long to wait for the connection and the daemon's welcome; at least a millisecond.
    pub timeout: Duration,
    /// Whether to raise this process's soft limit of open files so that each VRAM frame can have one; the hard
    /// limit is never passed. On by default.
    pub raise_open_files: bool,
    /// The CUDA driver's library; `None` for `$LAPIS_LIBCUDA`, else the one that the system finds. It is used from the first allocation on,
    /// and only if the daemon's device is a CUDA device.
    pub libcuda: Option<PathBuf>,
}

impl Default for ConnectOptions {
    fn default() -> ConnectOptions {
        let program = std::env::args_os().next().map(PathBuf::from);
        let name = program
            .as_deref()
            .and_then(Path::file_name)
            .map_or_else(|| "unnamed".to_owned(), |name| name.to_string_lossy().into_owned());
        ConnectOptions {
            socket: None,
            name,
            timeout: Duration::from_secs(10),
            raise_open_files: true,
            libcuda: None,
        }
    }
}

impl ConnectOptions {
    /// Connects.
    ///
    /// # Errors
    /// [`Error::Connect`] with what to do about it, [`Error::NotLapis`], or [`Error::Refused`], e.g. with
    /// [`Code::VersionUnsupported`].
    pub fn connect(&self) -> Result<Client, Error> {
        let path = self.socket.clone().unwrap_or_else(default_socket);
        let timeout = self.timeout.max(Duration::from_millis(1));
        let failed = |source: io::Error| Error::Connect {
            hint: hint_for(&source),
            path: path.clone(),
            source,
        };
        let stream = dial(&path, timeout).map_err(failed)?;
        let (events, theirs) =
            UnixStream::pair().map_err(|source| Error::Io { call: "socketpair", source })?;
        let hello = Hello { stream: &stream, events: theirs.into(), name: &self.name };
        let (welcome, reader) = match hello.exchange() {
            Ok(answer) => answer,
            Err(Failure::Socket(source)) => return Err(failed(source)),
            Err(Failure::Refused(refused)) => return Err(Error::Refused(refused)),
            Err(Failure::Protocol(source)) => return Err(Error::NotLapis { path, source }),
        };
        stream
            .set_read_timeout(None)
            .and_then(|()| stream.set_write_timeout(None))
            .map_err(|source| Error::Io { call: "setsockopt", source })?;
        if self.raise_open_files {
            raise_open_files(u64::from(welcome.vram_frames));
        }
        let named = std::env::var_os("LAPIS_LIBCUDA").filter(|name| !name.is_empty());
        let libcuda = self.libcuda.clone().or_else(|| named.map(PathBuf::from));
        Ok(Client::of(Arc::new(Session::start((stream, reader), events, welcome, libcuda)?)))
    }
}

/// The socket used when none is named: `$LAPIS_SOCKET`, else `$XDG_RUNTIME_DIR/lapis.sock` if it exists, else
/// `/run/lapis/lapis.sock`.
#[must_use]
pub fn default_socket() -> PathBuf {
    socket_from(std::env::var_os("LAPIS_SOCKET"), std::env::var_os("XDG_RUNTIME_DIR"))
}

fn socket_from(named: Option<OsString>, runtime: Option<OsString>) -> PathBuf {
    if let Some(named) = named.filter(|named| !named.is_empty()) {
        return named.into();
    }
    let of_user = runtime.filter(|runtime| !runtime.is_empty());
    of_user
        .map(|runtime| PathBuf::from(runtime).join("lapis.sock"))
        .filter(|path| path.exists())
        .unwrap_or_else(|| SOCKET_OF_SYSTEM.into())
}

/// Connects within `timeout`, which also bounds each read and write until it is taken off.
fn dial(path: &Path, timeout: Duration) -> io::Result<UnixStream> {
    let address = UnixAddr::new(path)?;
    let fd = socket(AddressFamily::Unix, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?;
    let stream = UnixStream::from(fd);
    // The write timeout also ends a connect that waits for room in the listener's queue.
    stream.set_write_timeout(Some(timeout))?;
    stream.set_read_timeout(Some(timeout))?;
    loop {
        match connect(stream.as_raw_fd(), &address) {
            Ok(()) => return Ok(stream),
            Err(Errno::EINTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
}

/// The client's side of the handshake.
struct Hello<'a> {
    stream: &'a UnixStream,
    events: OwnedFd,
    name: &'a str,
}

/// Why a handshake failed.
enum Failure {
    Socket(io::Error),
    Protocol(ProtocolError),
    Refused(Refused),
}

impl<E: Into<ProtocolError>> From<E> for Failure {
    fn from(error: E) -> Failure {
        Failure::Protocol(error.into())
    }
}

impl Hello<'_> {
    fn exchange(self) -> Result<(Welcome, FrameReader), Failure> {
        let mut bytes = Vec::new();
        codec::encode(RequestId(1), &handshake::hello(self.name), 1, &mut bytes)?;
        fds::send_all(self.stream, &bytes, &[self.events.as_fd()]).map_err(Failure::Socket)?;
        drop(self.events);
        let mut reader = FrameReader::new();
        loop {
            let Some(frame) = reader.next_frame()? else {
                if reader.receive(self.stream).map_err(Failure::Socket)? == 0 {
                    return Err(ProtocolError::Closed.into());
                }
                continue;
            };
            if frame.header.kind == Kind::Refused {
                return Err(Failure::Refused(frame.decode()?));
            }
            let welcome: Welcome = frame.decode()?;
            check(&welcome)?;
            return Ok((welcome, reader));
        }
    }
}

fn check(welcome: &Welcome) -> Result<(), Failure> {
    if !(VERSION_MIN..=VERSION).contains(&welcome.version) {
        return Err(Failure::Refused(Refused {
            code: Code::VersionUnsupported,
            object: 0,
            asked: u64::from(VERSION),
            in_use: 0,
            limit: u64::from(welcome.version),
            message: format!(
                "the daemon chose protocol version {}, this client speaks {VERSION_MIN} to {VERSION}",
                welcome.version
            ),
        }));
    }
    let found = welcome.page_size;
    if !found.is_power_of_two() || !(PAGE_SIZE_MIN..=PAGE_SIZE_MAX).contains(&found) {
        return Err(ProtocolError::PageSize { found }.into());
    }
    Ok(())
}

/// What to do about a failed connection.
fn hint_for(source: &io::Error) -> &'static str {
    match source.kind() {
        io::ErrorKind::NotFound => {
            "no such socket: start lapisd, or set LAPIS_SOCKET to its socket"
        }
        io::ErrorKind::ConnectionRefused => {
            "nothing listens there any more: start lapisd, or set LAPIS_SOCKET to its socket"
        }
        io::ErrorKind::PermissionDenied => {
            "this user may not use the socket: join the group that owns it (see `ls -l`) and log in again, or have \
             the daemon's socket_mode let others in"
        }
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
            "the daemon didn't answer in time: see its log, or wait longer"
        }
        _ => "see that the path is lapisd's socket, and the daemon's log",
    }
}

/// Makes room for a descriptor per VRAM frame, as far as the hard limit goes. Where it doesn't, mapping so many
/// frames fails later, and says so.
fn raise_open_files(frames: u64) {
    let Ok((soft, hard)) = getrlimit(Resource::RLIMIT_NOFILE) else { return };
    let wanted = frames.saturating_add(OPEN_FILES_SPARE).min(hard);
    if wanted > soft {
        // As above: a failure shows when it matters.
        let _ = setrlimit(Resource::RLIMIT_NOFILE, wanted, hard);
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::Write;
    use std::os::unix::net::UnixListener;

    use super::*;
    use crate::testing::Peer;

    fn connect_to(path: &Path) -> Error {
        let timeout = Duration::from_secs(5);
        let options = ConnectOptions { socket: Some(path.into()), timeout, ..Default::default() };
        options.connect().expect_err("no daemon there")
    }

    #[test]
    fn who_may_not_use_the_socket_is_told_how_the_daemon_lets_him_in() {
        let hint = hint_for(&io::ErrorKind::PermissionDenied.into());
        assert!(hint.contains("the group that owns it (see `ls -l`)"), "{hint}");
        assert!(hint.contains("socket_mode"), "{hint}");
    }

    #[test]
    fn the_socket_is_named_or_the_users_or_the_systems() {
        let directory = tempfile::tempdir().expect("a directory");
        let runtime = || Some(directory.path().into());
        let system = PathBuf::from("/run/lapis/lapis.sock");
        assert_eq!(socket_from(Some("/a/b".into()), runtime()), PathBuf::from("/a/b"));
        assert_eq!(socket_from(None, None), system);
        assert_eq!(socket_from(Some("".into()), runtime()), system);
        fs::write(directory.path().join("lapis.sock"), "").expect("written");
        assert_eq!(socket_from(None, runtime()), directory.path().join("lapis.sock"));
    }

    #[test]
    fn a_missing_or_stale_socket_says_where_and_what_to_do() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("s");
        let error = connect_to(&path);
        assert!(
            matches!(&error, Error::Connect { source, .. } if source.kind() == io::ErrorKind::NotFound)
        );
        let text = error.to_string();
        assert!(text.starts_with(&format!("can't connect to {}: ", path.display())), "{text}");
        assert!(text.ends_with("start lapisd, or set LAPIS_SOCKET to its socket"), "{text}");

        drop(UnixListener::bind(&path).expect("bound"));
        let error = connect_to(&path);
        assert!(
            matches!(&error, Error::Connect { source, .. } if source.kind() == io::ErrorKind::ConnectionRefused)
        );
        let long = PathBuf::from("/tmp/".to_owned() + &"x".repeat(200));
        assert!(matches!(connect_to(&long), Error::Connect { .. }));
    }

    /// Accepts one client and does as told with it.
    fn with_listener(act: impl FnOnce(UnixStream) + Send + 'static) -> Error {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("s");
        let listener = UnixListener::bind(&path).expect("bound");
        let thread = std::thread::spawn(move || act(listener.accept().expect("a client").0));
        let error = connect_to(&path);
        thread.join().expect("no panic");
        error
    }

    #[test]
    fn a_stranger_on_the_socket_is_told_apart() {
        let error = with_listener(|mut stream| {
            stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").expect("written");
            // Keeps the socket until the client has hung up.
            let _ = Peer::new(stream).receive();
        });
        assert!(
            matches!(error, Error::NotLapis { source: ProtocolError::Frame(_), .. }),
            "{error}"
        );
        let error = with_listener(|stream| {
            Peer::new(stream).receive();
        });
        assert!(matches!(error, Error::NotLapis { source: ProtocolError::Closed, .. }), "{error}");
    }

    #[test]
    fn a_refusal_arrives_with_its_code() {
        let error = with_listener(|stream| {
            let mut peer = Peer::new(stream);
            let hello = peer.receive().expect("a hello");
            assert_eq!(hello.kind, Kind::Hello);
            assert_eq!(hello.fds.len(), 1);
            let error = lapis_proto::version::negotiate(5, 6).expect_err("unsupported");
            peer.reply(hello.request, &handshake::version_refused(&error));
        });
        assert_eq!(error.code(), Some(Code::VersionUnsupported));
    }

    #[test]
    fn senseless_welcomes_are_refused() {
        let sized = |page_size| {
            let error = with_listener(move |stream| {
                let mut peer = Peer::new(stream);
                let hello = peer.receive().expect("a hello");
                peer.reply(hello.request, &Welcome { page_size, ..crate::testing::welcome(4) });
            });
            assert!(
                matches!(error, Error::NotLapis { source: ProtocolError::PageSize { found }, .. } if found == page_size),
                "{error}"
            );
        };
        sized(0);
        sized(2048);
        sized(65537);
        sized(1 << 40);
        let error = with_listener(|stream| {
            let mut peer = Peer::new(stream);
            let hello = peer.receive().expect("a hello");
            peer.reply(hello.request, &Welcome { version: 9, ..crate::testing::welcome(4) });
        });
        assert_eq!(error.code(), Some(Code::VersionUnsupported));
    }
}
