//! On the fake driver.
