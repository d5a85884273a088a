//! Ranks that are processes of an MPI job, on slices:
//! `cargo test -p optimisers-plain --features mpi --test mpi`.

use std::path::PathBuf;
use std::process::Command;

use optimisers::mpi::{World, run};
use optimisers::{Communicator, Error};
use optimisers_plain::{all_rules, alone, hash, is_divided, of_rank, stored};

/// The folder of a job, which its ranks know from their environment.
const FOLDER: &str = "OPTIMISERS_PLAIN_FOLDER";

fn main() {
    if std::env::var_os(FOLDER).is_some() {
        return run(ranks_are_one_process).expect("ranks that agree");
    }
    // Two or four times a number, divided again, is the number.
    for ranks in [2, 4] {
        let folder = tempfile::tempdir().expect("a folder");
        let mut job = Command::new("mpirun");
        job.args(["--oversubscribe", "--bind-to", "none", "-n", &ranks.to_string()])
            .arg(std::env::current_exe().expect("this program"));
        // Where tests run as root, as in containers, Open MPI wants to hear that this is meant.
        job.envs([
            ("OMPI_ALLOW_RUN_AS_ROOT", "1"),
            ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"),
            ("RAYON_NUM_THREADS", "1"),
        ]);
        let status = job
            .env(FOLDER, folder.path())
            .status()
            .expect("`mpirun` (Debian: openmpi-bin)");
        assert!(status.success(), "{ranks} ranks: {status}");
        println!("test ranks_are_one_process::{ranks}_ranks ... ok");
    }
}

/// The parameters of all ranks, and the file that they save, are those of one process.
fn ranks_are_one_process(world: World) -> Result<(), Error> {
    let folder = PathBuf::from(std::env::var_os(FOLDER).expect("a job has a folder"));
    for (name, rule) in all_rules() {
        for (store, optimiser) in stored(&|| rule.clone())
            .into_iter()
            .filter(|(store, _)| is_divided(store))
        {
            let path = folder.join(format!("{name}, {store}").replace('/', " "));
            let (parameters, file) = alone(optimiser.clone());
            assert_eq!(
                of_rank(&world, optimiser, &path),
                parameters,
                "{name}, {store}, rank {}",
                world.rank()
            );
            assert_eq!(
                hash(&std::fs::read(&path).expect("the file")),
                file,
                "{name}, {store}"
            );
        }
    }
    Ok(())
}
