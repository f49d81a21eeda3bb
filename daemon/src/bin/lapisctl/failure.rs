//! Why a command failed, with its exit status and what to do next.

use std::borrow::Cow;
use std::error::Error;
use std::io;
use std::path::PathBuf;

use lapis::Code;
use lapis::model::ModelError;
use lapisd::config::{ConfigError, Size, Subject};
use lapisd::reactor::StartError;

use crate::replay::trace::TraceError;
use crate::stream::reference::ReferenceError;

/// The exit statuses, as scripts see them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Exit {
    /// It failed, or bytes were wrong.
    Failure = 1,
    /// Wrong usage; clap ends with the same.
    Usage = 2,
    /// No daemon answers.
    Unreachable = 3,
    /// This user may not.
    Denied = 4,
    /// The model isn't there.
    NotFound = 5,
    /// The tiers are too small, or full.
    OutOfCapacity = 6,
}

/// A command failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Failure {
    /// The model's files.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The daemon or the way to it.
    #[error(transparent)]
    Client(#[from] lapis::Error),
    /// The embedded daemon's configuration.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The embedded daemon does not start.
    #[error("cannot start an embedded daemon")]
    Start(#[source] StartError),
    /// The model's file, read to check the tiers.
    #[error(transparent)]
    Reference(#[from] ReferenceError),
    /// A trace of accesses.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// Flags for an embedded daemon, where another is used.
    #[error(
        "{flags} would configure an embedded daemon, but the daemon at {} runs already",
        socket.display()
    )]
    TierFlags {
        /// The flags given.
        flags: String,
        /// Where it listens.
        socket: PathBuf,
    },
    /// The demonstration model can't be kept.
    #[error("cannot {action} {}", path.display())]
    Cache {
        /// What was tried, as a verb.
        action: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// No directory for the demonstration model.
    #[error(
        "there is no place for a demonstration model: none of LAPIS_CACHE, XDG_CACHE_HOME and HOME is set"
    )]
    NoCache,
    /// The disk is too full for the demonstration model.
    #[error("the demonstration model needs {needed}, but {} has {free} free", path.display())]
    DiskFull {
        /// The cache directory.
        path: PathBuf,
        /// Bytes of the model.
        needed: Size,
        /// Bytes there are.
        free: Size,
    },
    /// There is no such quota.
    #[error("{subject} has no quota")]
    NoQuota {
        /// Whose.
        subject: Subject,
    },
    /// Nobody says how large the tiers are.
    #[error("no daemon at {} says how large VRAM and RAM are, and no --vram does", socket.display())]
    NoSizes {
        /// Where no daemon is.
        socket: PathBuf,
    },
    /// It isn't there, or is none of this user's.
    #[error("there is no session {session} that this user may see")]
    NoSession {
        /// Its number.
        session: u64,
    },
    /// The engine can't run the model on a machine of these sizes.
    #[error("a daemon of these sizes can't run this model")]
    Prediction(#[source] lapis_proto::message::Refused),
    /// The result can't be printed.
    #[error("cannot write to standard output")]
    Output(#[source] io::Error),
    /// Bytes in VRAM were not those of the file. The report says which.
    #[error("{tensors} came out wrong")]
    Mismatch {
        /// How many, with the noun.
        tensors: String,
    },
}

impl Failure {
    /// The exit status.
    pub(crate) fn exit(&self) -> Exit {
        match self {
            Failure::Model(error) => model_exit(error),
            Failure::Client(error) => client_exit(error),
            Failure::Trace(error) => trace_exit(error),
            Failure::NoQuota { .. }
            | Failure::NoSession { .. }
            | Failure::Config(ConfigError::NoSuchName { .. }) => Exit::NotFound,
            Failure::Config(_)
            | Failure::TierFlags { .. }
            | Failure::NoCache
            | Failure::NoSizes { .. } => Exit::Usage,
            Failure::Reference(error) if error.source.kind() == io::ErrorKind::PermissionDenied => {
                Exit::Denied
            }
            Failure::DiskFull { .. } | Failure::Prediction(_) => Exit::OutOfCapacity,
            Failure::Start(_)
            | Failure::Reference(_)
            | Failure::Cache { .. }
            | Failure::Output(_)
            | Failure::Mismatch { .. } => Exit::Failure,
        }
    }

    /// What to do next, where the message does not say it already.
    pub(crate) fn next(&self) -> Option<Cow<'static, str>> {
        Some(match self {
            Failure::Model(_) if self.exit() == Exit::NotFound => {
                "name a .safetensors or .gguf file or a directory that holds one; \
                 `lapisctl stream` without a model makes one to try"
                    .into()
            }
            Failure::Client(error) => return client_next(error),
            Failure::Config(error) => error.fix(),
            Failure::Start(_) => {
                "start a daemon by itself to see its log: `lapisd --vram 128MiB --ram 256MiB`"
                    .into()
            }
            Failure::TierFlags { .. } => {
                "leave them out, or add --embedded to use a daemon of its own".into()
            }
            Failure::Cache { .. } | Failure::NoCache | Failure::DiskFull { .. } => {
                "set LAPIS_CACHE to a directory with 512 MiB of space, or name a model".into()
            }
            Failure::Mismatch { .. } => {
                "if the file was not changed meanwhile, report it with the output of \
                 `lapisctl stream -o json` and the daemon's log"
                    .into()
            }
            Failure::NoSession { .. } => "see the sessions there are with `lapisctl wss`".into(),
            Failure::NoSizes { .. } => "say how much VRAM there is, such as `--vram 24GiB`".into(),
            Failure::Prediction(_) => "try a larger --vram".into(),
            Failure::NoQuota { .. } => "see the quotas there are with `lapisctl quota show`".into(),
            Failure::Trace(TraceError::Line { .. } | TraceError::Empty { .. }) => {
                "see what a trace looks like with `lapisctl replay --help`".into()
            }
            Failure::Model(_) | Failure::Trace(_) | Failure::Reference(_) | Failure::Output(_) => {
                return None;
            }
        })
    }

    /// The message with its causes, each once: some messages quote their cause already.
    pub(crate) fn chain(&self) -> String {
        let mut text = self.to_string();
        let mut cause = self.source();
        while let Some(error) = cause {
            let message = error.to_string();
            if !text.contains(&message) {
                text.push_str(": ");
                text.push_str(&message);
            }
            cause = error.source();
        }
        text
    }
}

fn model_exit(error: &ModelError) -> Exit {
    match error {
        ModelError::Io { source, .. } => match source.kind() {
            io::ErrorKind::NotFound => Exit::NotFound,
            io::ErrorKind::PermissionDenied => Exit::Denied,
            io::ErrorKind::StorageFull => Exit::OutOfCapacity,
            _ => Exit::Failure,
        },
        ModelError::NoModel { .. } | ModelError::ShardMissing { .. } => Exit::NotFound,
        ModelError::Ambiguous { .. } => Exit::Usage,
        _ => Exit::Failure,
    }
}

fn trace_exit(error: &TraceError) -> Exit {
    match error {
        TraceError::Open { source, .. } | TraceError::Read { source, .. } => match source.kind() {
            io::ErrorKind::NotFound => Exit::NotFound,
            io::ErrorKind::PermissionDenied => Exit::Denied,
            _ => Exit::Failure,
        },
        TraceError::Line { .. } | TraceError::Empty { .. } => Exit::Failure,
    }
}

fn client_exit(error: &lapis::Error) -> Exit {
    match error {
        lapis::Error::Connect { source, .. }
            if source.kind() == io::ErrorKind::PermissionDenied =>
        {
            Exit::Denied
        }
        lapis::Error::Connect { .. }
        | lapis::Error::NotLapis { .. }
        | lapis::Error::Disconnected => Exit::Unreachable,
        lapis::Error::Open { source, .. } => match source.kind() {
            io::ErrorKind::NotFound => Exit::NotFound,
            io::ErrorKind::PermissionDenied => Exit::Denied,
            _ => Exit::Failure,
        },
        lapis::Error::Model(error) => model_exit(error),
        lapis::Error::TooLarge { .. } => Exit::OutOfCapacity,
        lapis::Error::Refused(refused) => match refused.code {
            Code::NotPermitted => Exit::Denied,
            Code::OverCapacity
            | Code::OverQuota
            | Code::OutOfMemory
            | Code::TooMany
            | Code::TimedOut => Exit::OutOfCapacity,
            Code::ShuttingDown | Code::DeviceLost => Exit::Unreachable,
            _ => Exit::Failure,
        },
        _ => Exit::Failure,
    }
}

fn is_over_quota(error: &lapis::Error) -> bool {
    matches!(error, lapis::Error::Refused(refused) if refused.code == Code::OverQuota)
}

fn client_next(error: &lapis::Error) -> Option<Cow<'static, str>> {
    Some(match client_exit(error) {
        Exit::Unreachable => {
            "start lapisd; `lapisctl stream --embedded` alone needs none, and starts one of its own".into()
        }
        Exit::Denied if matches!(error, lapis::Error::Connect { .. }) => {
            "or use a daemon of your own: `lapisctl stream --embedded`".into()
        }
        Exit::Denied if matches!(error, lapis::Error::Refused(_)) => {
            "run it as root, or as a member of the daemon's admin_group".into()
        }
        Exit::OutOfCapacity if is_over_quota(error) => {
            "see whose limits are met with `lapisctl quota show`".into()
        }
        Exit::OutOfCapacity => {
            "see what uses the tiers with `lapisctl status`; an embedded daemon can have larger ones: \
             `lapisctl stream --embedded --vram 1GiB --ram 2GiB`"
                .into()
        }
        Exit::Failure | Exit::Usage | Exit::Denied | Exit::NotFound => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(code: Code) -> Failure {
        let message = "no room".to_owned();
        let refused = lapis::Refused { code, object: 0, asked: 0, in_use: 0, limit: 0, message };
        Failure::Client(lapis::Error::Refused(refused))
    }

    fn connect(kind: io::ErrorKind) -> Failure {
        let (path, hint) = (PathBuf::from("/run/lapis/lapis.sock"), "start lapisd");
        Failure::Client(lapis::Error::Connect { path, source: kind.into(), hint })
    }

    fn model(kind: io::ErrorKind) -> Failure {
        Failure::Model(ModelError::Io { path: "/m".into(), action: "open it", source: kind.into() })
    }

    fn trace(kind: io::ErrorKind) -> Failure {
        Failure::Trace(TraceError::Open { path: "/t".into(), source: kind.into() })
    }

    #[test]
    fn statuses_are_as_documented() {
        let cases = [
            (connect(io::ErrorKind::NotFound), 3),
            (connect(io::ErrorKind::ConnectionRefused), 3),
            (connect(io::ErrorKind::PermissionDenied), 4),
            (Failure::Client(lapis::Error::Disconnected), 3),
            (refused(Code::NotPermitted), 4),
            (refused(Code::OverCapacity), 6),
            (refused(Code::OutOfMemory), 6),
            (refused(Code::OverQuota), 6),
            (refused(Code::FileChanged), 1),
            (model(io::ErrorKind::NotFound), 5),
            (model(io::ErrorKind::PermissionDenied), 4),
            (model(io::ErrorKind::StorageFull), 6),
            (Failure::Model(ModelError::NoModel { path: "/m".into() }), 5),
            (Failure::Model(ModelError::UnknownFormat { path: "/m".into() }), 1),
            (Failure::Config(ConfigError::ShareOfSim), 2),
            (Failure::Config(ConfigError::NoSuchName { kind: "user", name: "bob".to_owned() }), 5),
            (Failure::NoQuota { subject: Subject::EachUser }, 5),
            (trace(io::ErrorKind::NotFound), 5),
            (trace(io::ErrorKind::PermissionDenied), 4),
            (trace(io::ErrorKind::Other), 1),
            (Failure::Trace(TraceError::Empty { path: "/t".into() }), 1),
            (Failure::Mismatch { tensors: "1 tensor".to_owned() }, 1),
        ];
        for (failure, status) in cases {
            assert_eq!(failure.exit() as u8, status, "{failure}");
        }
    }

    #[test]
    fn causes_are_told_once() {
        let failure = connect(io::ErrorKind::NotFound);
        assert_eq!(
            failure.chain(),
            "can't connect to /run/lapis/lapis.sock: entity not found; start lapisd"
        );
        assert_eq!(model(io::ErrorKind::NotFound).chain(), "/m: cannot open it: entity not found");
    }

    #[test]
    fn who_meets_a_quota_is_led_to_the_quotas() {
        let next = refused(Code::OverQuota).next().unwrap();
        assert_eq!(next, "see whose limits are met with `lapisctl quota show`");
        let next = refused(Code::OverCapacity).next().unwrap();
        assert!(next.contains("`lapisctl status`"), "{next}");
    }

    #[test]
    fn no_command_but_stream_is_said_to_start_a_daemon() {
        let unreachable = connect(io::ErrorKind::NotFound).next().unwrap();
        assert!(unreachable.contains("`lapisctl stream --embedded`"), "{unreachable}");
        assert!(!unreachable.contains("this command"), "{unreachable}");
        let full = refused(Code::OverCapacity).next().unwrap();
        assert!(full.contains("`lapisctl stream --embedded --vram"), "{full}");
    }

    #[test]
    fn a_missing_model_leads_to_the_demonstration() {
        let next = model(io::ErrorKind::NotFound).next().unwrap();
        assert!(next.contains("`lapisctl stream` without a model makes one to try"), "{next}");
        assert_eq!(model(io::ErrorKind::Other).next(), None);
    }
}
