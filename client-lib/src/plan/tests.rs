use super::*;
use crate::testing::{PAGE, Received, recording};

fn uses(plan: &SetPlan) -> Vec<Vec<(u64, u32, u32, Access)>> {
    let one =
        |used: &PlanUse| (used.range.allocation.0, used.range.first, used.range.count, used.access);
    plan.steps.iter().map(|step| step.uses.iter().map(one).collect()).collect()
}

#[test]
fn plans_are_told_in_pages_and_taken_back() {
    let (client, daemon) = recording();
    let (four, two) =
        (client.allocate(4 * PAGE).expect("a"), client.allocate(2 * PAGE).expect("b"));
    let steps = [
        vec![(&four, 0..PAGE, Access::Read), (&four, PAGE..PAGE + 1, Access::Read)],
        vec![(&four, 7..7, Access::Read)],
        // Not all of its page: what is around it must survive.
        vec![(&two, 0..PAGE, Access::Overwrite), (&four, 5..6, Access::Write)],
        vec![(&two, 0..PAGE - 1, Access::Overwrite)],
    ];
    let first = client.plan(&steps, true).expect("said");
    let second = client.plan(&steps[..1], false).expect("said");
    drop(first);
    drop((second, four, two, client));
    let told = daemon.join().expect("no panic");
    let told: Vec<SetPlan> = told.iter().map(Received::decode).collect();
    assert_eq!(
        uses(&told[0]),
        [
            vec![(4, 0, 2, Access::Read)],
            vec![(4, 0, 1, Access::Write), (2, 0, 1, Access::Overwrite)],
            vec![(2, 0, 1, Access::Write)],
        ]
    );
    assert!(told[0].cyclic && !told[1].cyclic);
    assert_ne!(told[0].plan, told[1].plan);
    let over: Vec<_> = told[2..].iter().map(|plan| (plan.plan, plan.steps.len())).collect();
    assert_eq!(over, [(told[0].plan, 0), (told[1].plan, 0)]);
}
