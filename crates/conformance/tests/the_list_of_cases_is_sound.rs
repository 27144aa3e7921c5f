//! Every point of the design has cases, and every case name is unique.

use hapax_conformance::cases;

#[test]
fn every_point_has_cases_and_every_case_its_own_name() {
    for point in 0..=11 {
        assert!(cases().iter().any(|case| case.point == point), "point {point}");
    }
    let mut names: Vec<_> = cases().iter().map(|case| case.name).collect();
    names.sort_unstable();
    assert!(names.windows(2).all(|pair| pair[0] != pair[1]));
}
