//! The RAM tier's memory: anonymous mappings in chunks, cut into frames of a page and 4 KiB.
