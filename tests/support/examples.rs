//! The examples as programs, for the tests that run them.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Options of the gpt example for a network that trains in a blink, on a short text.
pub const TINY: [&str; 14] = [
    "--layers",
    "1",
    "--width",
    "16",
    "--context",
    "16",
    "--batch",
    "4",
    "--warm-up",
    "3",
    "--text",
    "text.txt",
    "--sample",
    "20",
];

/// An example, built from the sources as they are: a test that is run alone does not build it. With the
/// profile, folder and features of the test there is nothing to do where a whole `cargo test` has built it.
pub fn program(name: &str) -> PathBuf {
    let test = std::env::current_exe().expect("the path of this test");
    let folder = test.ancestors().nth(2).expect("the folder of the profile");
    let profile = match folder
        .file_name()
        .and_then(|name| name.to_str())
        .expect("the name of the profile")
    {
        "debug" => "dev",
        name => name,
    };
    let mut cargo = Command::new(env!("CARGO"));
    cargo
        .args(["build", "--quiet", "--example", name, "--profile", profile])
        .current_dir(root());
    cargo
        .arg("--target-dir")
        .arg(folder.parent().expect("the folder of all profiles"));
    for (feature, has) in [("cuda", cfg!(feature = "cuda")), ("mpi", cfg!(feature = "mpi"))] {
        if has {
            cargo.args(["--features", feature]);
        }
    }
    let built = cargo.output().expect("cargo runs");
    assert!(
        built.status.success(),
        "{cargo:?}: {}",
        String::from_utf8_lossy(&built.stderr)
    );
    folder
        .join("examples")
        .join(format!("{name}{}", std::env::consts::EXE_SUFFIX))
}

/// The folder of the crate.
pub fn root() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
}

/// A folder with the text.
pub fn folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let readme = root().join("README.md");
    fs::copy(readme, folder.path().join("text.txt")).expect("a text");
    folder
}
