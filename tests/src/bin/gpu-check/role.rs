//! The other process of a probe: what it has to do with is its standard input.

use std::io::{IoSlice, IoSliceMut, Read};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use lapis::cuda::driver::Driver;
use nix::cmsg_space;
use nix::sys::socket::{ControlMessage, ControlMessageOwned, MsgFlags, recvmsg, sendmsg};

use crate::Outcome;
use crate::card::Card;

/// What exporters fill their memory with.
pub(crate) const PATTERN: u8 = 0x5C;
/// Bytes that importers compare.
const COMPARED: usize = 1 << 20;

/// Plays a role, and says what came of it in one line.
pub(crate) fn play(arguments: &[String]) -> ExitCode {
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let outcome = match arguments.as_slice() {
        ["export", pieces @ ..] => export(pieces),
        ["import"] => import(),
        ["start"] => start(),
        _ => Err("no such role".into()),
    };
    match outcome {
        Ok(text) => {
            println!("{text}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            println!("{error}");
            ExitCode::FAILURE
        }
    }
}

/// Makes and exports pieces, each given as `BYTES*COUNT`, sends each with what it cost, and keeps them until its input ends.
fn export(pieces: &[&str]) -> Outcome<String> {
    let card = Card::open()?;
    let mut socket = UnixStream::from(std::io::stdin().as_fd().try_clone_to_owned()?);
    for piece in pieces {
        let (bytes, count) = piece.split_once('*').ok_or("BYTES*COUNT")?;
        let (bytes, count): (usize, usize) = (bytes.parse()?, count.parse()?);
        for _ in 0..count {
            let started = Instant::now();
            let handle = card.create(bytes)?;
            let created = started.elapsed();
            let started = Instant::now();
            let fd = card.export(handle)?;
            let exported = started.elapsed();
            let address = card.place(bytes, handle)?;
            card.fill(address, bytes, PATTERN)?;
            send(&socket, [created, exported], &fd)?;
        }
    }
    let _ended = socket.read(&mut [0])?;
    Ok("done".to_owned())
}

fn send(socket: &UnixStream, took: [Duration; 2], fd: &OwnedFd) -> Outcome {
    let nanos = took.map(|took| u64::try_from(took.as_nanos()).unwrap_or(u64::MAX).to_le_bytes());
    let fds = [fd.as_raw_fd()];
    let rights = [ControlMessage::ScmRights(&fds)];
    let bytes = nanos.concat();
    sendmsg::<()>(socket.as_raw_fd(), &[IoSlice::new(&bytes)], &rights, MsgFlags::empty(), None)?;
    Ok(())
}

/// Takes in the memory that standard input is the descriptor of, and looks at it.
fn import() -> Outcome<String> {
    let card = Card::open()?;
    look(&card, std::io::stdin().as_fd(), COMPARED)?;
    Ok("the bytes are right".to_owned())
}

/// Takes memory in that an exporter filled, and sees that its bytes are right.
pub(crate) fn look(card: &Card, fd: BorrowedFd<'_>, bytes: usize) -> Outcome {
    let handle = card.import(fd)?;
    // Pieces of this size or more are all that is exported.
    let size = bytes.max(card.granularity()?);
    let address = card.place(size, handle)?;
    let right = card.read(address, bytes)?.iter().all(|byte| *byte == PATTERN);
    card.remove(address, size, handle)?;
    if right { Ok(()) } else { Err("the bytes are wrong".into()) }
}

/// Starts the driver, and says how many GPUs it sees.
fn start() -> Outcome<String> {
    let driver = Driver::start(None);
    driver?;
    Ok(format!("starts, with {} GPUs", Card::open()?.count()?))
}

/// A process in a role; killed when dropped.
pub(crate) struct Role(Child);

impl Role {
    pub(crate) fn start(
        arguments: &[&str],
        stdin: OwnedFd,
        settings: &[(&str, &str)],
    ) -> Outcome<Role> {
        let mut command = Command::new(std::env::current_exe()?);
        command.arg("--role").args(arguments).envs(settings.iter().copied());
        Ok(Role(command.stdin(stdin).stdout(Stdio::piped()).spawn()?))
    }

    /// What it said, and whether that was what it was to do.
    pub(crate) fn ends(mut self) -> Outcome<(bool, String)> {
        let mut text = String::new();
        if let Some(mut stdout) = self.0.stdout.take() {
            stdout.read_to_string(&mut text)?;
        }
        let status = self.0.wait()?;
        let said = text.trim();
        let text = if said.is_empty() { status.to_string() } else { said.to_owned() };
        Ok((status.success(), text))
    }

    /// Kills it, and waits until it is gone.
    pub(crate) fn kill(mut self) -> Outcome {
        self.0.kill()?;
        self.0.wait()?;
        Ok(())
    }
}

impl Drop for Role {
    fn drop(&mut self) {
        // It may be gone already.
        let _killed = self.0.kill();
        let _waited = self.0.wait();
    }
}

/// One exported piece, and what it cost.
pub(crate) struct Piece {
    pub(crate) fd: OwnedFd,
    pub(crate) created: Duration,
    pub(crate) exported: Duration,
}

/// A process that exports pieces, and what they come through.
pub(crate) struct Exporter {
    socket: UnixStream,
    role: Role,
}

impl Exporter {
    pub(crate) fn start(pieces: &[(usize, usize)]) -> Outcome<Exporter> {
        let (socket, other) = UnixStream::pair()?;
        let pieces: Vec<String> =
            pieces.iter().map(|(bytes, count)| format!("{bytes}*{count}")).collect();
        let mut arguments = vec!["export"];
        arguments.extend(pieces.iter().map(String::as_str));
        let role = Role::start(&arguments, other.into(), &[])?;
        Ok(Exporter { socket, role })
    }

    /// The next piece.
    pub(crate) fn piece(&mut self) -> Outcome<Piece> {
        let mut bytes = [0; 16];
        let mut space = cmsg_space!([std::os::fd::RawFd; 1]);
        let mut into = [IoSliceMut::new(&mut bytes)];
        let flags = MsgFlags::MSG_CMSG_CLOEXEC;
        let message = recvmsg::<()>(self.socket.as_raw_fd(), &mut into, Some(&mut space), flags)?;
        let (length, mut fd) = (message.bytes, None);
        for control in message.cmsgs()? {
            if let ControlMessageOwned::ScmRights(fds) = control {
                fd = fds.first().copied();
            }
        }
        let Some(fd) = fd.filter(|_| length == 16) else {
            return Err(format!("the exporter: {}", self.why()).into());
        };
        let (created, exported) = bytes.split_at(8);
        let nanos = |bytes: &[u8]| bytes.try_into().map(u64::from_le_bytes).unwrap_or(0);
        let [created, exported] =
            [created, exported].map(|bytes| Duration::from_nanos(nanos(bytes)));
        Ok(Piece { fd: owned(fd), created, exported })
    }

    /// What it ended of.
    fn why(&mut self) -> String {
        let mut text = String::new();
        if let Some(mut stdout) = self.role.0.stdout.take() {
            let _said = stdout.read_to_string(&mut text);
        }
        text.trim().to_owned()
    }

    pub(crate) fn kill(self) -> Outcome {
        self.role.kill()
    }
}

#[expect(unsafe_code, reason = "takes a descriptor over")]
fn owned(fd: i32) -> OwnedFd {
    // SAFETY: the kernel just made it for us, by the message that brought it.
    unsafe { OwnedFd::from_raw_fd(fd) }
}
