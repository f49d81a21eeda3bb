//! Which page goes when room is needed. Ids and numbers only; one algorithm a file.

pub mod next_use;
