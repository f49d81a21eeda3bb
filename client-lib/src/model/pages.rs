//! Which pages of its allocation a byte range of a shard touches.

use std::ops::Range;

use super::ModelFiles;

/// Maps byte ranges of a model's shards to pages of their allocations. An allocation starts at its shard's data, so
/// page `k` holds the bytes from `data_offset + k * page_size` on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PageGrid {
    page_size: u64,
    data_offsets: Vec<u64>,
}

impl PageGrid {
    /// A grid of pages of `page_size` bytes (0 counts as 1) for shards whose data start at these bytes.
    pub fn new(page_size: u64, data_offsets: Vec<u64>) -> PageGrid {
        PageGrid { page_size: page_size.max(1), data_offsets }
    }

    /// The pages that a range of a shard's file touches; an empty range touches none. What is before the data
    /// counts as the data's first byte, an unknown shard as one whose data start at 0.
    pub fn pages(&self, shard: usize, range: &Range<u64>) -> Range<u64> {
        let offset = self.data_offset(shard);
        let start = range.start.saturating_sub(offset) / self.page_size;
        if range.is_empty() {
            return start..start;
        }
        start..range.end.saturating_sub(offset).div_ceil(self.page_size)
    }

    /// The byte of the shard's file at which a page starts.
    pub fn page_start(&self, shard: usize, page: u64) -> u64 {
        self.data_offset(shard).saturating_add(page.saturating_mul(self.page_size))
    }

    /// The pages that byte ranges touch, as few and long runs as can be, by shard and page. The ranges may be in any
    /// order and overlap.
    pub fn runs(&self, ranges: &[(usize, Range<u64>)]) -> Vec<(usize, Range<u64>)> {
        let mut pages: Vec<(usize, Range<u64>)> =
            ranges.iter().map(|(shard, range)| (*shard, self.pages(*shard, range))).collect();
        pages.retain(|(_, run)| !run.is_empty());
        pages.sort_by_key(|(shard, run)| (*shard, run.start, run.end));
        let mut runs: Vec<(usize, Range<u64>)> = Vec::new();
        for (shard, run) in pages {
            match runs.last_mut() {
                Some((last, before)) if *last == shard && run.start <= before.end => {
                    before.end = before.end.max(run.end);
                }
                _ => runs.push((shard, run)),
            }
        }
        runs
    }

    /// How many pages byte ranges touch; one that several touch counts once.
    pub fn count(&self, ranges: &[(usize, Range<u64>)]) -> u64 {
        self.runs(ranges).iter().map(|(_, run)| run.end - run.start).sum()
    }

    fn data_offset(&self, shard: usize) -> u64 {
        self.data_offsets.get(shard).copied().unwrap_or(0)
    }
}

impl ModelFiles {
    /// The page grid of this model's shards.
    pub fn page_grid(&self, page_size: u64) -> PageGrid {
        PageGrid::new(page_size, self.shards().iter().map(|shard| shard.data_offset).collect())
    }
}
