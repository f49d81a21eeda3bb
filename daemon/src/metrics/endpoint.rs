//! The thread that answers `/metrics`, `/healthz` and `/readyz`, on a TCP port, a Unix socket, or both.
//!
//! One thread, a few connections at once, each for one request and for seconds at most: a peer that is slow, or says too
//! much, costs its own connection. When all are taken, the oldest goes.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::board::{Board, Phase};
use super::exposition;
use super::http::{self, HEAD_BYTES_MAX, Head, Status};
use crate::sys::waker::Waker;

/// Connections at once.
const CONNECTIONS_MAX: usize = 16;
/// From the first to the last byte of an exchange.
const CONNECTION_LIFE: Duration = Duration::from_secs(5);
/// How long a scrape waits for the reactor's newest numbers, before it takes the last ones.
const FRESH_WAIT: Duration = Duration::from_millis(500);
/// After `accept` failed.
const ACCEPT_REST: Duration = Duration::from_millis(100);

/// The running thread. Stops when dropped.
#[derive(Debug)]
pub struct Endpoint {
    stopping: Arc<AtomicBool>,
    waker: Waker,
    thread: Option<std::thread::JoinHandle<()>>,
    address: Option<SocketAddr>,
}

impl Endpoint {
    /// Answers on these sockets from now on.
    ///
    /// # Errors
    /// The system's: no thread, no descriptor.
    pub fn start(
        board: Arc<Board>,
        tcp: Option<TcpListener>,
        unix: Option<UnixListener>,
    ) -> io::Result<Self> {
        let address = tcp.as_ref().map(TcpListener::local_addr).transpose()?;
        let listeners: Vec<_> =
            tcp.map(Listening::Tcp).into_iter().chain(unix.map(Listening::Unix)).collect();
        listeners.iter().try_for_each(Listening::set_nonblocking)?;
        let waker = Waker::new()?;
        let stopping = Arc::new(AtomicBool::new(false));
        let server = Server {
            board,
            listeners,
            connections: Vec::new(),
            stopping: Arc::clone(&stopping),
            waker: waker.clone(),
        };
        let thread = std::thread::Builder::new().name("metrics".to_owned());
        let thread = Some(thread.spawn(move || server.run())?);
        Ok(Self { stopping, waker, thread, address })
    }

    /// The TCP port, if there is one.
    #[must_use]
    pub fn address(&self) -> Option<SocketAddr> {
        self.address
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        self.stopping.store(true, Ordering::Release);
        self.waker.wake();
        if let Some(Err(_panic)) = self.thread.take().map(std::thread::JoinHandle::join) {
            tracing::error!("the thread of the metrics panicked");
        }
    }
}

#[derive(Debug)]
enum Listening {
    Tcp(TcpListener),
    Unix(UnixListener),
}

#[derive(Debug)]
enum Stream {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl Listening {
    fn set_nonblocking(&self) -> io::Result<()> {
        match self {
            Self::Tcp(listener) => listener.set_nonblocking(true),
            Self::Unix(listener) => listener.set_nonblocking(true),
        }
    }

    fn accept(&self) -> io::Result<Stream> {
        let stream = match self {
            Self::Tcp(listener) => Stream::Tcp(listener.accept()?.0),
            Self::Unix(listener) => Stream::Unix(listener.accept()?.0),
        };
        match &stream {
            Stream::Tcp(stream) => stream.set_nonblocking(true)?,
            Stream::Unix(stream) => stream.set_nonblocking(true)?,
        }
        Ok(stream)
    }
}

impl AsFd for Listening {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Tcp(listener) => listener.as_fd(),
            Self::Unix(listener) => listener.as_fd(),
        }
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Tcp(stream) => stream.as_fd(),
            Self::Unix(stream) => stream.as_fd(),
        }
    }
}

impl Stream {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Tcp(stream) => stream.read(bytes),
            Self::Unix(stream) => stream.read(bytes),
        }
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::Tcp(stream) => stream.write(bytes),
            Self::Unix(stream) => stream.write(bytes),
        }
    }

    fn end_writing(&self) -> io::Result<()> {
        match self {
            Self::Tcp(stream) => stream.shutdown(Shutdown::Write),
            Self::Unix(stream) => stream.shutdown(Shutdown::Write),
        }
    }
}

/// Where an exchange is.
#[derive(Debug)]
enum Stage {
    Reading(Vec<u8>),
    /// A reply, and how much of it is sent.
    Writing(Vec<u8>, usize),
    /// All is sent; what the peer may still say is thrown away, so that closing loses it nothing.
    Draining,
}

#[derive(Debug)]
struct Connection {
    stream: Stream,
    stage: Stage,
    ends: Instant,
}

impl Connection {
    fn awaits(&self) -> PollFlags {
        match self.stage {
            Stage::Reading(_) | Stage::Draining => PollFlags::POLLIN,
            Stage::Writing(..) => PollFlags::POLLOUT,
        }
    }

    /// Goes on until it is over, or its peer has to be waited for, which is an error.
    fn turn(&mut self, board: &Board) -> io::Result<()> {
        loop {
            match &mut self.stage {
                Stage::Reading(received) => {
                    let mut bytes = [0; 1024];
                    let room = (HEAD_BYTES_MAX - received.len()).min(bytes.len());
                    let count = self.stream.read(&mut bytes[..room])?;
                    if count == 0 {
                        return Ok(());
                    }
                    received.extend_from_slice(&bytes[..count]);
                    if let Some(reply) = answer(board, received) {
                        self.stage = Stage::Writing(reply, 0);
                    }
                }
                Stage::Writing(reply, sent) => {
                    *sent += self.stream.write(&reply[*sent..])?;
                    if *sent == reply.len() {
                        self.stream.end_writing()?;
                        self.stage = Stage::Draining;
                    }
                }
                Stage::Draining => {
                    if self.stream.read(&mut [0; 1024])? == 0 {
                        return Ok(());
                    }
                }
            }
        }
    }

    /// Whether it goes on.
    fn goes_on(&mut self, board: &Board) -> bool {
        match self.turn(board) {
            Err(error) => matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted),
            Ok(()) => false,
        }
    }
}

/// The reply, once the request is whole.
fn answer(board: &Board, received: &[u8]) -> Option<Vec<u8>> {
    const TEXT: &str = "text/plain; charset=utf-8";
    let (path, body) = match http::head(received) {
        Head::Partial => return None,
        Head::Bad(status) => return Some(http::reply(status, TEXT, status.line(), true)),
        Head::Get { path, body } => (path, body),
    };
    let health = |health: Result<(), String>| match health {
        Ok(()) => http::reply(Status::Ok, TEXT, "ok\n", body),
        Err(reason) => http::reply(Status::Unavailable, TEXT, &format!("{reason}\n"), body),
    };
    Some(match path {
        "/metrics" => {
            // While the tiers are made there is no reactor to ask.
            let starting = board.phase() == Phase::Starting;
            let snapshot = board.fresh(if starting { Duration::ZERO } else { FRESH_WAIT });
            let text = exposition::text(board, &snapshot);
            http::reply(Status::Ok, exposition::CONTENT_TYPE, &text, body)
        }
        "/healthz" => health(board.health().alive),
        "/readyz" => health(board.health().ready),
        "/" => http::reply(Status::Ok, TEXT, "lapisd: /metrics /healthz /readyz\n", body),
        _ => {
            http::reply(Status::NotFound, TEXT, "there are /metrics, /healthz and /readyz\n", body)
        }
    })
}

struct Server {
    board: Arc<Board>,
    listeners: Vec<Listening>,
    connections: Vec<Connection>,
    stopping: Arc<AtomicBool>,
    waker: Waker,
}

impl Server {
    fn run(mut self) {
        while !self.stopping.load(Ordering::Acquire) {
            let ready = match self.wait() {
                Ok(ready) => ready,
                Err(nix::errno::Errno::EINTR) => continue,
                Err(error) => return tracing::error!("metrics: cannot wait for sockets: {error}"),
            };
            let now = Instant::now();
            let mut index = self.listeners.len();
            let board = &self.board;
            self.connections.retain_mut(|connection| {
                let ready = ready[index];
                index += 1;
                connection.ends > now && (!ready || connection.goes_on(board))
            });
            for index in (0..self.listeners.len()).filter(|index| ready[*index]) {
                self.accept(index);
            }
        }
    }

    /// Waits until something can go on, and says what: of the listeners, then of the connections.
    fn wait(&self) -> nix::Result<Vec<bool>> {
        let mut fds = vec![PollFd::new(self.waker.as_fd(), PollFlags::POLLIN)];
        fds.extend(self.listeners.iter().map(|l| PollFd::new(l.as_fd(), PollFlags::POLLIN)));
        fds.extend(self.connections.iter().map(|c| PollFd::new(c.stream.as_fd(), c.awaits())));
        let next = self.connections.iter().map(|connection| connection.ends).min();
        let wait = next.map(|ends| ends.saturating_duration_since(Instant::now()));
        let timeout = wait.map_or(PollTimeout::NONE, |wait| {
            // Not a moment too early, or it would spin.
            let ms = wait.as_millis().saturating_add(1);
            i32::try_from(ms).ok().and_then(|ms| ms.try_into().ok()).unwrap_or(PollTimeout::MAX)
        });
        poll(&mut fds, timeout)?;
        Ok(fds[1..].iter().map(|fd| fd.any().unwrap_or(true)).collect())
    }

    fn accept(&mut self, index: usize) {
        let stream = match self.listeners[index].accept() {
            Ok(stream) => stream,
            Err(error) if error.kind() == ErrorKind::WouldBlock => return,
            Err(error) => {
                tracing::warn!("metrics: cannot accept a connection: {error}");
                // Out of descriptors, most likely, which does not end at once.
                std::thread::park_timeout(ACCEPT_REST);
                return;
            }
        };
        if self.connections.len() == CONNECTIONS_MAX {
            self.connections.remove(0);
        }
        let ends = Instant::now() + CONNECTION_LIFE;
        self.connections.push(Connection { stream, stage: Stage::Reading(Vec::new()), ends });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn start() -> (Endpoint, Arc<Board>) {
        let board = Arc::new(Board::new(Waker::new().unwrap()));
        let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
        (Endpoint::start(Arc::clone(&board), Some(tcp), None).unwrap(), board)
    }

    fn exchange(endpoint: &Endpoint, request: &[u8]) -> String {
        let mut stream = TcpStream::connect(endpoint.address().unwrap()).unwrap();
        // The reply may come, and the peer go, before all is said.
        let _said = stream.write_all(request);
        let mut reply = String::new();
        stream.read_to_string(&mut reply).unwrap();
        reply
    }

    #[test]
    fn requests_are_answered_whatever_they_are() {
        let (endpoint, board) = start();
        let get =
            |path: &str| exchange(&endpoint, format!("GET {path} HTTP/1.1\r\n\r\n").as_bytes());
        assert!(get("/healthz").ends_with("\r\n\r\nok\n"));
        assert!(get("/readyz").starts_with("HTTP/1.1 503 "));
        board.enter(Phase::Serving);
        assert!(get("/readyz").starts_with("HTTP/1.1 200 "));
        assert!(get("/metrics").contains("\nlapis_build_info{"));
        assert!(get("/nothing").starts_with("HTTP/1.1 404 "));
        let post = exchange(&endpoint, b"POST /metrics HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc");
        assert!(post.starts_with("HTTP/1.1 405 "), "{post}");
        let long = exchange(&endpoint, &[b'x'; 2 * HEAD_BYTES_MAX]);
        assert!(long.starts_with("HTTP/1.1 431 "), "{long}");
    }

    #[test]
    fn peers_that_say_nothing_hold_nobody_up() {
        let (endpoint, _board) = start();
        let address = endpoint.address().unwrap();
        let silent: Vec<_> =
            (0..3 * CONNECTIONS_MAX).map(|_| TcpStream::connect(address).unwrap()).collect();
        let mut slow = TcpStream::connect(address).unwrap();
        slow.write_all(b"GET /hea").unwrap();
        assert!(exchange(&endpoint, b"GET /healthz HTTP/1.0\r\n\r\n").ends_with("ok\n"));
        slow.write_all(b"lthz HTTP/1.0\r\n\r\n").unwrap();
        let mut reply = String::new();
        slow.read_to_string(&mut reply).unwrap();
        assert!(reply.ends_with("ok\n"), "{reply}");
        drop(silent);
    }
}
