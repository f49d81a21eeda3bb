//! Which page goes when room is needed, and which one to fetch ahead. Ids and numbers only; one algorithm a file.

pub mod learner;
pub mod next_use;
pub mod order;
pub mod pace;
pub mod plan;
