//! Harness shared by the tests of Lapis as a whole.
