//! A curve in plain characters.

use super::Point;
use crate::text;

/// Lines of the plot.
const HEIGHT: usize = 11;
/// Columns left of it.
const MARGIN: usize = 7;
const WIDTH_MIN: usize = 20;
const WIDTH_MAX: usize = 160;

/// Draws hit ratios by size, and where VRAM is. Sizes are even steps from nothing to the largest.
pub(super) fn draw(curve: &[Point], vram_bytes: u64, width: usize, out: &mut String) {
    let columns = width.clamp(WIDTH_MIN, WIDTH_MAX) - MARGIN - 1;
    let largest = curve.last().map_or(0, |point| point.bytes).max(1);
    let size_of = |column: usize| largest as f64 * (column + 1) as f64 / columns as f64;
    let ratio_at = |bytes: f64| {
        let below = curve.iter().rfind(|point| point.bytes as f64 <= bytes);
        below.map_or(0.0, |point| point.hit_ratio)
    };
    let ratios: Vec<f64> = (0..columns).map(|column| ratio_at(size_of(column))).collect();
    let vram = (0..columns).find(|column| size_of(*column) >= vram_bytes as f64);
    for line in (0..HEIGHT).rev() {
        let level = line as f64 / (HEIGHT - 1) as f64;
        let half = 0.5 / (HEIGHT - 1) as f64;
        let label = if line % 5 == 0 { format!("{level:.1}") } else { String::new() };
        let cells = ratios.iter().enumerate().map(|(column, ratio)| {
            if *ratio >= level + half {
                if vram == Some(column) { '|' } else { '.' }
            } else if *ratio >= level - half {
                '*'
            } else if vram == Some(column) {
                '|'
            } else {
                ' '
            }
        });
        let cells: String = cells.collect();
        out.push_str(format!("{label:>5} |{}", cells.trim_end()).trim_end());
        out.push('\n');
    }
    out.push_str(&format!("      +{}\n", "-".repeat(columns)));
    let end = text::bytes(largest);
    let gap = columns.saturating_sub(end.len() + 1);
    out.push_str(&format!("       0{}{end}\n", " ".repeat(gap)));
    if vram.is_some() {
        out.push_str(&format!("       | VRAM, {}\n", text::bytes(vram_bytes)));
    }
}
