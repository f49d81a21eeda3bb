//! `lapisctl stream`: walks through a model's layers as an inference engine does, and checks every byte.

pub(crate) mod demo;
mod pace;
mod pass;
mod progress;
pub(crate) mod reference;
mod report;
pub(crate) mod schedule;
mod verify;

use std::path::PathBuf;
use std::time::Duration;

use lapis::model::{Checkpoint, ModelFiles};
use lapis::{DeviceKind, Stats};
use lapisd::config::Host;

use crate::connect::{Daemon, Target};
use crate::failure::Failure;
use crate::output::{self, Format};
use crate::text;
use pass::Runner;
use progress::Progress;
use report::{
    Compute, DaemonReport, Hits, ModelReport, Moved, Outcome, PassKind, PassReport, Prefetched,
    Report, SCHEMA, Verified,
};
use schedule::Schedule;

/// Streams a model through the tiers, layer by layer
///
/// The passes are declared as a plan, by which the daemon fetches and evicts. Each pass walks through the layers in
/// order: map this one, check every tensor where it lies in VRAM against a plain read of the file, unmap. The plain reads go around the page cache, and their time is
/// shown as `verifying`, never as `stalled`.
///
/// Without MODEL a 512 MiB model is made once, in $LAPIS_CACHE or ~/.cache/lapis. Without a daemon, one is started
/// inside this command with VRAM and RAM smaller than that model, so that all tiers have work.
///
/// With --compute-ms the GPU is simulated: each layer stays mapped for that long. A first pass checks the bytes, a
/// second one streams without compute to measure the rate, then come the timed passes, without checks, and one more
/// check. Efficiency is the ideal time over the actual time of the timed passes. The ideal is the longer of the
/// compute of all layers and the transfer to VRAM of the bytes that the pass moved, at the best rate that any pass
/// without checks reached: what would be left if compute and transfer overlapped perfectly. With --link-bandwidth
/// that rate is known and is used instead if it is higher.
#[derive(Debug, clap::Args)]
pub(crate) struct Stream {
    /// A .safetensors or .gguf file, a .safetensors.index.json, or a directory that holds one
    model: Option<PathBuf>,
    /// Passes through the model; with --compute-ms the timed ones
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    passes: u32,
    /// Prefetch so many layers ahead instead of declaring the passes as a plan; 0: neither
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(0..=1024))]
    prefetch: Option<u32>,
    /// Simulated compute of each layer, in milliseconds
    #[arg(long, value_name = "MS", value_parser = milliseconds)]
    compute_ms: Option<Duration>,
    /// Do not compare the bytes with the file
    #[arg(long)]
    no_verify: bool,
    /// How to print the report
    #[arg(short, long, value_enum, value_name = "FORMAT", default_value_t = Format::Table)]
    output: Format,
    /// No progress bar and no notes
    #[arg(short, long)]
    quiet: bool,
    #[command(flatten)]
    target: Target,
}

impl Stream {
    pub(crate) fn run(&self) -> Result<(), Failure> {
        let host = Host::of_process();
        let mut progress = Progress::new(self.quiet);
        // A model that isn't there is noticed before a daemon is started, and a daemon that isn't there before a
        // model is made.
        let named = self.model.as_deref().map(ModelFiles::open).transpose()?;
        let cache = || demo::cache_dir(&host);
        let daemon = self.target.connect(cache, &host, |text| progress.note(text))?;
        let files = match named {
            Some(files) => files,
            None => demo::model(&cache()?, &Checkpoint::default(), &host, &progress)?,
        };
        let report = self.measure(files, &daemon, &mut progress)?;
        drop(progress);
        output::print(&match self.output {
            Format::Table => report.table(),
            Format::Json => output::json(&report),
        })?;
        match report.result {
            Outcome::Ok | Outcome::Unverified => Ok(()),
            Outcome::Mismatch => {
                let wrong = report.model.tensors - report.verified.tensors;
                Err(Failure::Mismatch { tensors: text::count(wrong as u64, "tensor", "tensors") })
            }
        }
    }

    /// All passes.
    fn measure(
        &self,
        files: ModelFiles,
        daemon: &Daemon,
        progress: &mut Progress,
    ) -> Result<Report, Failure> {
        let client = &daemon.client;
        let model = client.open_model_files(files)?;
        let welcome = client.welcome();
        // Half, so that this part can be held while the next one arrives; more fits no request.
        let pages_max = u64::from(welcome.mapped_pages_max / 2).clamp(1, PAGES_PER_PART_MAX);
        let files = model.files();
        let made = files.shards().first().map(|shard| shard.path.clone());
        let schedule = Schedule::new(files, welcome.page_size, pages_max);
        let kinds = self.kinds();
        progress.start(schedule.bytes() * kinds.len() as u64);
        let before = client.stats()?;
        let plan = match self.prefetch {
            None => Some(model.plan_parts(schedule.steps.iter().map(|step| &step.part), true)?),
            Some(_) => None,
        };
        let mut runner = Runner::new(client, &model, &schedule, self, kinds.len());
        let mut passes = Vec::new();
        for kind in &kinds {
            let text = format!("pass {}/{} {}", passes.len() + 1, kinds.len(), kind.name());
            progress.pass(text);
            passes.push(runner.pass(*kind, progress)?);
        }
        let after = client.stats()?;
        drop(plan);
        let (verified, mismatches) = runner.finish();
        let compute = self.compute_ms.map(|layer| {
            let layers = u32::try_from(schedule.layers).unwrap_or(u32::MAX);
            let link = self.target.tiers.link_bandwidth.map(|rate| rate.bytes_per_s() as f64);
            Compute::judge(layer, layers, link, &mut passes)
        });
        Ok(Report {
            schema: SCHEMA,
            result: self.outcome(files, verified),
            model: ModelReport {
                path: self.model.clone().or(made).unwrap_or_default(),
                bytes: files.bytes(),
                tensors: files.tensors().len(),
                layers: schedule.layers,
                parts: schedule.steps.len(),
            },
            daemon: daemon_report(daemon, &before, &after),
            moved: Moved::between(&before.total, &after.total),
            hits: Hits::between(&before.session, &after.session),
            prefetch: Prefetched::between(&before.total, &after.total),
            stalled: passes.iter().map(|pass: &PassReport| pass.stalled).sum(),
            passes,
            verified,
            compute,
            mismatches,
        })
    }

    /// What each pass is for.
    fn kinds(&self) -> Vec<PassKind> {
        let passes = self.passes as usize;
        let check = if self.no_verify { None } else { Some(PassKind::Verify) };
        if self.compute_ms.is_none() {
            return vec![check.unwrap_or(PassKind::Stream); passes];
        }
        let timed = std::iter::repeat_n(PassKind::Compute, passes);
        check.into_iter().chain([PassKind::Stream]).chain(timed).chain(check).collect()
    }

    fn outcome(&self, files: &ModelFiles, verified: Verified) -> Outcome {
        if self.no_verify {
            Outcome::Unverified
        } else if verified.tensors == files.tensors().len() {
            Outcome::Ok
        } else {
            Outcome::Mismatch
        }
    }
}

/// Pages of one mapping; the protocol carries no more.
const PAGES_PER_PART_MAX: u64 = 65_536;

fn daemon_report(daemon: &Daemon, before: &Stats, after: &Stats) -> DaemonReport {
    let welcome = daemon.client.welcome();
    DaemonReport {
        version: welcome.daemon_version.clone(),
        embedded: daemon.is_embedded(),
        socket: daemon.socket.clone(),
        device: match welcome.device {
            DeviceKind::Sim => "sim",
            DeviceKind::Cuda => "cuda",
        },
        page_size_bytes: welcome.page_size,
        vram_bytes: after.vram.capacity,
        ram_bytes: after.ram.capacity,
        nvme_bytes: after.nvme.capacity,
        shared: before.sessions.max(after.sessions) > 1,
    }
}

/// A time in milliseconds, with a fraction if need be.
pub(crate) fn milliseconds(text: &str) -> Result<Duration, String> {
    let refused = || format!("`{text}` is no time in milliseconds from 0 to 1000000, such as 2.5");
    let millis: f64 = text.parse().map_err(|_| refused())?;
    if !(0.0..=1e6).contains(&millis) {
        return Err(refused());
    }
    Duration::try_from_secs_f64(millis / 1e3).map_err(|_| refused())
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Cli {
        #[command(flatten)]
        stream: Stream,
    }

    fn parse(arguments: &[&str]) -> Result<Stream, String> {
        let arguments = std::iter::once(&"stream").chain(arguments);
        Cli::try_parse_from(arguments).map(|cli| cli.stream).map_err(|error| error.to_string())
    }

    #[test]
    fn the_defaults_are_as_documented() {
        let stream = parse(&[]).unwrap();
        assert_eq!((stream.model, stream.passes, stream.prefetch), (None, 2, None));
        assert_eq!(
            (stream.output, stream.no_verify, stream.compute_ms),
            (Format::Table, false, None)
        );
    }

    #[test]
    fn flags_are_read() {
        let stream = parse(&[
            "m.gguf",
            "--passes",
            "3",
            "--compute-ms",
            "2.5",
            "-o",
            "json",
            "--vram",
            "64MiB",
        ])
        .unwrap();
        assert_eq!(stream.model, Some("m.gguf".into()));
        assert_eq!(stream.compute_ms, Some(Duration::from_micros(2500)));
        assert_eq!(stream.output, Format::Json);
        for bad in [
            &["--passes", "0"][..],
            &["--compute-ms", "-1"],
            &["--compute-ms", "nan"],
            &["--compute-ms", "1e7"],
            &["--embedded", "--socket", "/s"],
            &["--vram", "x"],
            &["-o", "xml"],
        ] {
            assert!(parse(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn timed_passes_stand_between_checks() {
        use PassKind::{Compute, Stream, Verify};
        let kinds = |arguments: &[&str]| parse(arguments).unwrap().kinds();
        assert_eq!(kinds(&[]), [Verify, Verify]);
        assert_eq!(kinds(&["--no-verify"]), [Stream, Stream]);
        assert_eq!(kinds(&["--compute-ms", "1"]), [Verify, Stream, Compute, Compute, Verify]);
        assert_eq!(
            kinds(&["--compute-ms", "1", "--no-verify", "--passes", "1"]),
            [Stream, Compute]
        );
    }
}
