//! Descriptors between processes: how long memory lives, who can import it.

use std::os::fd::{AsFd, OwnedFd};

use crate::Outcome;
use crate::card::Card;
use crate::role::{Exporter, Role, look};
use crate::rows::Said;
use crate::setup::Setup;

const PIECE: usize = 2 << 20;

pub(crate) fn run(_: &Setup, said: &Said) -> Outcome {
    let mut exporter = Exporter::start(&[(PIECE, 1)])?;
    let fd = exporter.piece()?.fd;
    let importers = [0, 1].map(|_| Role::start(&["import"], fd.try_clone()?, &[]));
    let mut importers_said = Vec::new();
    for importer in importers {
        importers_said.push(importer?.ends()?);
    }
    let both = importers_said.iter().all(|(right, _)| *right);
    let texts: Vec<String> = importers_said.into_iter().map(|(_, text)| text).collect();
    said.check("one descriptor, two importers", both, texts.join("; "));

    exporter.kill()?;
    let card = Card::open()?;
    match look(&card, fd.as_fd(), 1 << 20) {
        Ok(()) => {
            said.ok("descriptor after its exporter's SIGKILL", "imported, the bytes are right");
        }
        Err(error) => said.failed("descriptor after its exporter's SIGKILL", error),
    }
    hidden(&card, said, &fd)
}

/// What a process gets that may not see the GPU.
fn hidden(card: &Card, said: &Said, fd: &OwnedFd) -> Outcome {
    let nothing = std::fs::File::open("/dev/null")?;
    let none = [("CUDA_VISIBLE_DEVICES", "")];
    let (_, text) = Role::start(&["start"], nothing.into(), &none)?.ends()?;
    said.ok("start with all GPUs hidden", text);
    let row = "import where only another GPU is visible";
    if card.count()? < 2 {
        said.skipped(row, "there is one GPU");
        return Ok(());
    }
    let other = [("CUDA_VISIBLE_DEVICES", "1")];
    let (imported, text) = Role::start(&["import"], fd.try_clone()?, &other)?.ends()?;
    // That it is refused is what the client library tells users by.
    said.check(row, !imported, text);
    Ok(())
}
