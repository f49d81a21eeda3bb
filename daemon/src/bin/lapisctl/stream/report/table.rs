//! The report for people.

use std::fmt::Write;

use super::{Outcome, PassKind, Report};
use crate::text::{self, Table};

/// Mismatches that the table lists; the JSON has all that were kept.
const MISMATCHES_SHOWN: usize = 10;

impl Report {
    /// As tables.
    pub(crate) fn table(&self) -> String {
        let mut out = String::new();
        self.write_subject(&mut out);
        out.push('\n');
        self.write_passes(&mut out);
        out.push('\n');
        self.write_moved(&mut out);
        out.push('\n');
        self.write_summary(&mut out);
        out
    }

    fn write_subject(&self, out: &mut String) {
        let (model, daemon) = (&self.model, &self.daemon);
        let parts = if model.parts > model.layers {
            format!(" in {} parts", model.parts)
        } else {
            String::new()
        };
        // Writing to a String can't fail; so everywhere below.
        let _infallible = writeln!(
            out,
            "model   {}: {}, {}, {}{parts}",
            model.path.display(),
            text::bytes(model.bytes),
            text::count(model.tensors as u64, "tensor", "tensors"),
            text::count(model.layers as u64, "layer", "layers"),
        );
        let place = if daemon.embedded {
            "embedded".to_owned()
        } else {
            format!("at {}", daemon.socket.display())
        };
        let _infallible = writeln!(
            out,
            "daemon  lapisd {}, {place}: {} device, VRAM {}, RAM {}, NVMe {}, pages of {}",
            daemon.version,
            daemon.device,
            text::bytes(daemon.vram_bytes),
            text::bytes(daemon.ram_bytes),
            text::bytes(daemon.nvme_bytes),
            text::bytes(daemon.page_size_bytes),
        );
    }

    fn write_passes(&self, out: &mut String) {
        let mut heading = vec![
            "pass",
            "time",
            "stalled",
            "verifying",
            "throughput",
            "VRAM hits",
            "RAM hits",
            "misses",
        ];
        let with_compute = self.compute.is_some();
        if with_compute {
            heading.extend(["ideal", "efficiency"]);
        }
        let mut table = Table::new(&heading);
        for (index, pass) in self.passes.iter().enumerate() {
            let mut cells = vec![
                format!("{} {}", index + 1, pass.kind.name()),
                text::time(pass.time),
                text::time(pass.stalled),
                if pass.kind == PassKind::Verify {
                    text::time(pass.verifying)
                } else {
                    "-".to_owned()
                },
                text::rate(pass.bytes_per_s),
                pass.hits.vram_pages.to_string(),
                pass.hits.ram_pages.to_string(),
                pass.hits.miss_pages.to_string(),
            ];
            if with_compute {
                cells.push(pass.ideal.map_or("-".to_owned(), text::time));
                cells.push(pass.efficiency.map_or("-".to_owned(), percent));
            }
            table.row(cells);
        }
        table.write(out);
    }

    fn write_moved(&self, out: &mut String) {
        let moved = &self.moved;
        let mut table = Table::new(&["hop", "moved"]);
        for (hop, bytes) in [
            ("file to RAM", moved.file_to_ram_bytes),
            ("RAM to VRAM", moved.ram_to_vram_bytes),
            ("VRAM to RAM", moved.vram_to_ram_bytes),
            ("RAM to spill", moved.ram_to_spill_bytes),
            ("spill to RAM", moved.spill_to_ram_bytes),
        ] {
            table.row([hop.to_owned(), text::bytes(bytes)]);
        }
        table.write(out);
        if self.daemon.shared {
            out.push_str("other sessions were open: the bytes moved include theirs\n");
        }
    }

    fn write_summary(&self, out: &mut String) {
        let prefetch = &self.prefetch;
        let _infallible = writeln!(
            out,
            "prefetch  {} pages useful, {} late, {} wasted",
            prefetch.useful_pages, prefetch.late_pages, prefetch.wasted_pages
        );
        let _infallible = writeln!(out, "stalled   {}", text::time(self.stalled));
        if let Some(compute) = &self.compute {
            let _infallible = writeln!(
                out,
                "compute   {} a layer, {} a pass; best rate to VRAM {}; efficiency {}",
                text::time(compute.layer),
                text::time(compute.pass),
                text::rate(compute.best_bytes_per_s),
                percent(compute.efficiency),
            );
        }
        for mismatch in self.mismatches.iter().take(MISMATCHES_SHOWN) {
            let _infallible = writeln!(
                out,
                "mismatch  pass {}, {}: {} differ, from byte {} to byte {} of the tensor",
                mismatch.pass,
                mismatch.tensor,
                text::count(mismatch.count, "byte", "bytes"),
                mismatch.first,
                mismatch.last,
            );
        }
        let hidden = self.mismatches.len().saturating_sub(MISMATCHES_SHOWN);
        if hidden > 0 {
            let _infallible = writeln!(out, "mismatch  and {hidden} more: see -o json");
        }
        let _infallible = match self.result {
            Outcome::Unverified => writeln!(out, "result    not verified (--no-verify)"),
            Outcome::Ok => writeln!(
                out,
                "result    ok: verified {} x {}",
                text::count(self.verified.tensors as u64, "tensor", "tensors"),
                text::count(self.verified.passes as u64, "pass", "passes"),
            ),
            Outcome::Mismatch => writeln!(
                out,
                "result    MISMATCH: {} of {} right in all {}",
                self.verified.tensors,
                text::count(self.model.tensors as u64, "tensor", "tensors"),
                text::count(self.verified.passes as u64, "pass", "passes"),
            ),
        };
    }
}

fn percent(share: f64) -> String {
    format!("{:.1} %", share * 100.0)
}
