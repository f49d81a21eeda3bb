use std::sync::Arc;

use super::claims::{Claimed, Claims, Exclusive, Shared};

struct Two(Claims);

impl Claimed for Two {
    fn claims(&self) -> &Claims {
        &self.0
    }
}

#[test]
fn readers_share_and_writers_do_not() {
    let two = Arc::new(Two(Claims::new(2)));
    let reader = Shared::new(&two, 0).unwrap();
    let other_reader = Shared::new(&two, 0).unwrap();
    assert!(Exclusive::new(&two, 0).is_none());
    let writer = Exclusive::new(&two, 1).unwrap();
    assert!(Exclusive::new(&two, 1).is_none());
    assert!(Shared::new(&two, 1).is_none());
    drop(reader);
    assert!(Exclusive::new(&two, 0).is_none(), "one reader is left");
    drop(other_reader);
    assert!(Exclusive::new(&two, 0).is_some());
    drop(writer);
    assert!(Shared::new(&two, 1).is_some());
}

#[test]
fn a_frame_that_does_not_exist_cannot_be_claimed() {
    let two = Arc::new(Two(Claims::new(2)));
    assert!(Shared::new(&two, 2).is_none());
    assert!(Exclusive::new(&two, u32::MAX).is_none());
}
