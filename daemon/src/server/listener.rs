//! The listening socket: made with the right mode, never taken from a live daemon, removed at the end.

use std::io;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use tokio::net::UnixListener;

/// The socket can't be had.
#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    /// Another daemon answers there.
    #[error(
        "socket {path} is in use by a running daemon; stop it, or choose another with --socket"
    )]
    InUse {
        /// Where.
        path: PathBuf,
    },
    /// Something that is no socket is there.
    #[error("{path} exists and is not a socket; choose another with --socket")]
    NotASocket {
        /// Where.
        path: PathBuf,
    },
    /// The system refuses.
    #[error(
        "cannot {what} socket {path}: {source}; check that its directory exists and is writable"
    )]
    Io {
        /// What was tried.
        what: &'static str,
        /// Where.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

/// A listening socket at a path.
#[derive(Debug)]
pub struct Listener {
    listener: UnixListener,
    path: PathBuf,
    /// Unless it is somebody else's.
    _file: Option<SocketFile>,
}

impl Listener {
    /// Binds. A socket left by a dead daemon is replaced.
    ///
    /// # Errors
    /// [`ListenError`].
    pub fn bind(path: &Path, mode: u32) -> Result<Self, ListenError> {
        let (listener, file) = bind(path, mode)?;
        let listener =
            listener.set_nonblocking(true).and_then(|()| UnixListener::from_std(listener));
        let io = |source| ListenError::Io { what: "watch", path: path.to_owned(), source };
        Ok(Self { listener: listener.map_err(io)?, path: path.to_owned(), _file: Some(file) })
    }

    /// Takes over a socket that somebody else listens on, and whose file is his.
    ///
    /// # Errors
    /// [`ListenError::Io`].
    pub fn adopt(listener: std::os::unix::net::UnixListener) -> Result<Self, ListenError> {
        let path = listener.local_addr().ok();
        let path = path.as_ref().and_then(|address| address.as_pathname()).map(Path::to_owned);
        let path = path.unwrap_or_default();
        let listener =
            listener.set_nonblocking(true).and_then(|()| UnixListener::from_std(listener));
        let io = |source| ListenError::Io { what: "watch", path: path.clone(), source };
        Ok(Self { listener: listener.map_err(io)?, path, _file: None })
    }

    /// Where it listens.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The listening end.
    #[must_use]
    pub fn socket(&self) -> &UnixListener {
        &self.listener
    }
}

/// A socket's file; removed when dropped.
#[derive(Debug)]
pub struct SocketFile(PathBuf);

impl Drop for SocketFile {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_file(&self.0) {
            tracing::warn!("cannot remove socket {}: {error}", self.0.display());
        }
    }
}

/// A listening socket, and its file. One left by a dead daemon is replaced.
///
/// # Errors
/// [`ListenError`].
pub fn bind(
    path: &Path,
    mode: u32,
) -> Result<(std::os::unix::net::UnixListener, SocketFile), ListenError> {
    let io = |what| {
        let path = path.to_owned();
        move |source| ListenError::Io { what, path, source }
    };
    remove_stale(path)?;
    let listener = std::os::unix::net::UnixListener::bind(path).map_err(io("create"))?;
    let file = SocketFile(path.to_owned());
    let permissions = std::fs::Permissions::from_mode(mode);
    std::fs::set_permissions(path, permissions).map_err(io("set the mode of"))?;
    Ok((listener, file))
}

fn remove_stale(path: &Path) -> Result<(), ListenError> {
    let io = |what| move |source| ListenError::Io { what, path: path.to_owned(), source };
    let metadata = match std::fs::symlink_metadata(path) {
        Ok(metadata) => metadata,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(io("look at")(error)),
    };
    if !std::os::unix::fs::FileTypeExt::is_socket(&metadata.file_type()) {
        return Err(ListenError::NotASocket { path: path.to_owned() });
    }
    match UnixStream::connect(path) {
        Ok(_) => Err(ListenError::InUse { path: path.to_owned() }),
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
            std::fs::remove_file(path).map_err(io("remove the stale"))
        }
        Err(error) => Err(io("try")(error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn runtime() -> tokio::runtime::Runtime {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
    }

    #[test]
    fn live_sockets_are_kept_stale_ones_replaced_and_files_left_alone() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("lapis.sock");
        let runtime = runtime();
        let _guard = runtime.enter();
        let first = Listener::bind(&path, 0o600).unwrap();
        let mode = std::fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        assert!(matches!(Listener::bind(&path, 0o600), Err(ListenError::InUse { .. })));
        drop(first);
        assert!(!path.exists());
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        drop(Listener::bind(&path, 0o600).unwrap());
        std::fs::write(&path, "precious").unwrap();
        assert!(matches!(Listener::bind(&path, 0o600), Err(ListenError::NotASocket { .. })));
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "precious");
    }
}
