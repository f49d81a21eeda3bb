//! Client library of Lapis.
pub mod model;
