//! Model files.
