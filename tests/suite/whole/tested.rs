//! The result of a test.

use support::tested::Tested;

#[test]
fn a_failure_has_the_place_of_its_question_mark() {
    let fails = || -> Tested {
        Err("no number")?;
        Ok(())
    };
    let line = line!() - 3;
    let failure = format!("{:?}", fails().expect_err("a failure"));
    assert!(
        failure.contains(&format!("tested.rs:{line}:")) && failure.ends_with(": no number"),
        "{failure}"
    );
}
