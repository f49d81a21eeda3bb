//! Figures of several rounds, and how they are shown.

use std::fmt;

/// One measured thing beside its limit.
#[derive(Debug)]
pub(crate) struct Line {
    name: &'static str,
    unit: &'static str,
    beside: &'static str,
    ours: Vec<f64>,
    limit: Vec<f64>,
}

impl Line {
    fn ratios(&self) -> Vec<f64> {
        self.ours.iter().zip(&self.limit).map(|(ours, limit)| ours / limit).collect()
    }
}

/// All lines, in the order of their first figures.
#[derive(Debug, Default)]
pub(crate) struct Table {
    lines: Vec<Line>,
}

impl Table {
    /// One round's pair.
    pub(crate) fn add(
        &mut self,
        name: &'static str,
        unit: &'static str,
        beside: &'static str,
        ours: f64,
        limit: f64,
    ) {
        let index = self.lines.iter().position(|line| line.name == name).unwrap_or_else(|| {
            self.lines.push(Line { name, unit, beside, ours: Vec::new(), limit: Vec::new() });
            self.lines.len() - 1
        });
        self.lines[index].ours.push(ours);
        self.lines[index].limit.push(limit);
    }

    /// The same for programs.
    pub(crate) fn json(&self) -> String {
        let line = |line: &Line| {
            serde_json::json!({
                "name": line.name, "unit": line.unit, "beside": line.beside,
                "ours": line.ours, "limit": line.limit, "ratio": line.ratios(),
                "ratio_median": spread(&line.ratios()).1,
            })
        };
        let lines: Vec<_> = self.lines.iter().map(line).collect();
        serde_json::json!({ "schema": 1, "lines": lines }).to_string()
    }
}

/// Minimum, median, maximum.
fn spread(values: &[f64]) -> (f64, f64, f64) {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let last = sorted.len().saturating_sub(1);
    (sorted[0], sorted[last / 2], sorted[last])
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{:<38} {:>9} {:>9}  {:<12} {:>6} {:>6} {:>6}",
            "", "ours", "limit", "", "min", "ratio", "max"
        )?;
        for line in &self.lines {
            let (ours, limit) = (spread(&line.ours).1, spread(&line.limit).1);
            let (min, median, max) = spread(&line.ratios());
            writeln!(
                f,
                "{:<38} {ours:>9.2} {limit:>9.2}  {:<12} {min:>6.2} {median:>6.2} {max:>6.2}",
                line.name,
                format!("{} {}", line.unit, line.beside),
            )?;
        }
        Ok(())
    }
}
