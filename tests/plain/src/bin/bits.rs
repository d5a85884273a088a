//! Prints the lines of [`optimisers_plain::bits`].

fn main() {
    optimisers_plain::bits::lines()
        .iter()
        .for_each(|line| println!("{line}"));
}
