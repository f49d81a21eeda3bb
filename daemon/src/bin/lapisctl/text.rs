//! Numbers and tables for people.

use std::fmt::Write;
use std::time::Duration;

/// Bytes with the unit that keeps one to four digits before the point: `1.50 GiB`.
pub(crate) fn bytes(count: u64) -> String {
    const UNITS: [&str; 5] = ["KiB", "MiB", "GiB", "TiB", "PiB"];
    if count < 1024 {
        return format!("{count} B");
    }
    let mut value = count as f64;
    let mut unit = "B";
    for next in UNITS {
        if value < 1024.0 {
            break;
        }
        value /= 1024.0;
        unit = next;
    }
    format!("{value:.2} {unit}")
}

/// Time with the unit that suits it: `12.3 ms`, `1.234 s`, `75.2 s`.
pub(crate) fn time(time: Duration) -> String {
    let seconds = time.as_secs_f64();
    if time < Duration::from_millis(1) {
        format!("{} us", time.as_micros())
    } else if time < Duration::from_secs(1) {
        format!("{:.1} ms", seconds * 1e3)
    } else if time < Duration::from_secs(10) {
        format!("{seconds:.3} s")
    } else {
        format!("{seconds:.1} s")
    }
}

/// Bytes a second: `12.34 GB/s`; `-` for no time or no bytes.
pub(crate) fn rate(bytes_per_s: Option<f64>) -> String {
    match bytes_per_s {
        Some(rate) if rate < 1e9 => format!("{:.1} MB/s", rate / 1e6),
        Some(rate) => format!("{:.2} GB/s", rate / 1e9),
        None => "-".to_owned(),
    }
}

/// A count with its noun: `1 pass`, `2 passes`.
pub(crate) fn count(number: u64, one: &str, many: &str) -> String {
    format!("{number} {}", if number == 1 { one } else { many })
}

/// Rows of cells; the first row is the heading. The first column is aligned to the left, all others to the right.
#[derive(Debug, Default)]
pub(crate) struct Table {
    rows: Vec<Vec<String>>,
}

impl Table {
    pub(crate) fn new(heading: &[&str]) -> Table {
        let mut table = Table::default();
        table.row(heading.iter().map(|cell| (*cell).to_owned()));
        table
    }

    pub(crate) fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        self.rows.push(cells.into_iter().collect());
    }

    pub(crate) fn write(&self, out: &mut String) {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let width = |column: usize| {
            let cells = self.rows.iter().filter_map(|row| row.get(column));
            cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..columns).map(width).collect();
        for row in &self.rows {
            let mut line = String::new();
            for (column, (cell, width)) in row.iter().zip(&widths).enumerate() {
                // Writing to a String can't fail.
                let _infallible = if column == 0 {
                    write!(line, "{cell:<width$}")
                } else {
                    write!(line, "  {cell:>width$}")
                };
            }
            out.push_str(line.trim_end());
            out.push('\n');
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_have_a_unit_that_fits() {
        assert_eq!(bytes(0), "0 B");
        assert_eq!(bytes(1023), "1023 B");
        assert_eq!(bytes(1536), "1.50 KiB");
        assert_eq!(bytes(536_870_912), "512.00 MiB");
        assert_eq!(bytes(u64::MAX), "16384.00 PiB");
    }

    #[test]
    fn times_have_a_unit_that_fits() {
        assert_eq!(time(Duration::from_micros(999)), "999 us");
        assert_eq!(time(Duration::from_micros(12_345)), "12.3 ms");
        assert_eq!(time(Duration::from_millis(1234)), "1.234 s");
        assert_eq!(time(Duration::from_millis(75_250)), "75.2 s");
    }

    #[test]
    fn rates_are_decimal() {
        assert_eq!(rate(Some(12_345_678_901.0)), "12.35 GB/s");
        assert_eq!(rate(Some(999_000_000.0)), "999.0 MB/s");
        assert_eq!(rate(None), "-");
    }

    #[test]
    fn columns_are_aligned() {
        let mut table = Table::new(&["hop", "bytes", "pages"]);
        table.row(["file to RAM".to_owned(), "1 B".to_owned(), "1".to_owned()]);
        table.row(["x".to_owned(), "1.50 GiB".to_owned()]);
        let mut out = String::new();
        table.write(&mut out);
        assert_eq!(
            out,
            "hop             bytes  pages\n\
             file to RAM       1 B      1\n\
             x            1.50 GiB\n"
        );
    }
}
