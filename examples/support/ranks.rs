//! The ranks of a run: threads of this process, or the processes of an MPI job, that train one model
//! together, each on data of its own.

use std::error::Error;
use std::ops::Deref;
use std::process::ExitCode;
use std::str::FromStr;

use clap::Parser;
use optimisers::{CommunicationError, Communicator, LocalRank, Setup, ranks};

/// Which ranks there are, by the option `--ranks`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ranks {
    /// So many threads of this process.
    Threads(usize),
    /// The processes that `mpirun` has started.
    #[cfg(feature = "mpi")]
    Mpi,
}

impl FromStr for Ranks {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match (text, text.parse()) {
            #[cfg(feature = "mpi")]
            ("mpi", _) => Ok(Ranks::Mpi),
            #[cfg(not(feature = "mpi"))]
            ("mpi", _) => Err("this build knows no MPI: build with --features mpi".to_string()),
            (_, Ok(count @ 1..=1024)) => Ok(Ranks::Threads(count)),
            _ => Err("expected a number from 1 to 1024, or mpi".to_string()),
        }
    }
}

/// One rank's handle of all.
#[derive(Clone, Debug)]
pub(crate) enum World {
    Threads(LocalRank),
    #[cfg(feature = "mpi")]
    Mpi(optimisers::mpi::World),
}

impl Deref for World {
    type Target = dyn Communicator;

    fn deref(&self) -> &Self::Target {
        match self {
            World::Threads(world) => world,
            #[cfg(feature = "mpi")]
            World::Mpi(world) => world,
        }
    }
}

impl World {
    /// A set-up that divides the state among these ranks.
    pub(crate) fn setup(&self) -> Setup {
        match self {
            World::Threads(world) => Setup::over(world),
            #[cfg(feature = "mpi")]
            World::Mpi(world) => Setup::over(world),
        }
    }

    /// Whether this rank speaks for all.
    pub(crate) fn is_first(&self) -> bool {
        self.rank() == 0
    }

    /// What each rank brings, in their order. All have to call it.
    pub(crate) fn of_all<const N: usize>(&self, own: [u8; N]) -> Result<Vec<[u8; N]>, CommunicationError> {
        let mut all = vec![own; self.size()];
        self.fill(&own, &mut all)?;
        Ok(all)
    }

    /// The bytes that each rank brings, of any length. All have to call it.
    // Not every example has need of it where there is no MPI.
    #[cfg_attr(not(feature = "mpi"), allow(dead_code))]
    pub(crate) fn bytes_of_all(&self, own: &[u8]) -> Result<Vec<Vec<u8>>, CommunicationError> {
        let lengths = self.of_all(own.len().to_le_bytes())?;
        let mut all: Vec<Vec<u8>> = lengths
            .into_iter()
            .map(|length| vec![0; usize::from_le_bytes(length)])
            .collect();
        self.fill(own, &mut all)?;
        all[self.rank()] = own.to_vec();
        Ok(all)
    }

    fn fill<B: AsMut<[u8]>>(&self, own: &[u8], all: &mut [B]) -> Result<(), CommunicationError> {
        let mut from: Vec<Vec<&mut [u8]>> = all.iter_mut().map(|bytes| vec![bytes.as_mut()]).collect();
        from[self.rank()].clear();
        self.gather(&[own], &mut from)
    }
}

/// The options of the program. What is wrong with them is said once: all processes of a job have the same.
pub(crate) fn options<A: Parser>() -> A {
    // As Open MPI, others with PMIx, and MPICH tell a process its rank before MPI is initialised.
    let is_other = |name| std::env::var(name).is_ok_and(|rank| rank != "0");
    A::try_parse().unwrap_or_else(|error| {
        if ["OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK"]
            .into_iter()
            .any(is_other)
        {
            // The first failure ends the job, and that is to be the one of rank 0.
            std::process::exit(0);
        }
        error.exit()
    })
}

/// Runs a program on each rank, and returns what is to be the exit code. What goes wrong is said once.
///
/// `prepare` refuses what can be refused before there is anything to do together. It is told a rank and the
/// number of ranks, and called once in each process: for all ranks that are threads of it.
pub(crate) fn on_each<P: Sync>(
    ranks: Ranks,
    prepare: impl FnOnce(usize, usize) -> Result<P, Box<dyn Error>>,
    run: impl Fn(&P, World) -> Result<ExitCode, Box<dyn Error>> + Sync,
) -> ExitCode {
    let result = match ranks {
        Ranks::Threads(count) => {
            prepare(0, count).and_then(|prepared| on_threads(count, |world| run(&prepared, world)))
        }
        #[cfg(feature = "mpi")]
        Ranks::Mpi => on_processes(prepare, run),
    };
    result.unwrap_or_else(|error| {
        eprintln!("error: {error}");
        ExitCode::FAILURE
    })
}

/// What the first rank returns. If any fails, what they say about it: those that wait for one that has left
/// say so.
fn on_threads(
    count: usize,
    run: impl Fn(World) -> Result<ExitCode, Box<dyn Error>> + Sync,
) -> Result<ExitCode, Box<dyn Error>> {
    let run = |world| run(World::Threads(world)).map_err(|error| error.to_string());
    let results: Vec<Result<ExitCode, String>> = std::thread::scope(|scope| {
        let threads: Vec<_> = ranks(count)
            .into_iter()
            .map(|world| scope.spawn(|| run(world)))
            .collect();
        threads
            .into_iter()
            .map(|thread| {
                thread
                    .join()
                    .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            })
            .collect()
    });
    let (codes, errors): (Vec<_>, Vec<_>) = results.into_iter().partition(Result::is_ok);
    match all_said(errors.into_iter().filter_map(Result::err)) {
        Some(errors) => Err(errors.into()),
        None => Ok(codes.into_iter().flatten().next().unwrap_or(ExitCode::SUCCESS)),
    }
}

/// What this process's rank returns. A failure that not all ranks have at once ends the whole job here, as
/// others may be waiting for this rank.
#[cfg(feature = "mpi")]
fn on_processes<P>(
    prepare: impl FnOnce(usize, usize) -> Result<P, Box<dyn Error>>,
    run: impl Fn(&P, World) -> Result<ExitCode, Box<dyn Error>>,
) -> Result<ExitCode, Box<dyn Error>> {
    optimisers::mpi::run(|world| {
        let world = World::Mpi(world);
        let prepared = prepare(world.rank(), world.size());
        let own = prepared
            .as_ref()
            .err()
            .map(ToString::to_string)
            .unwrap_or_default();
        let errors = world
            .bytes_of_all(own.as_bytes())?
            .into_iter()
            .filter(|error| !error.is_empty());
        match (
            prepared,
            all_said(errors.map(|error| String::from_utf8_lossy(&error).into_owned())),
        ) {
            (Ok(prepared), None) => run(&prepared, world.clone()).inspect_err(|_| {
                // Most errors are the same on all ranks. The first says its own, and ends the job before the
                // others are here.
                if !world.is_first() {
                    std::thread::sleep(std::time::Duration::from_secs(5));
                }
            }),
            (_, errors) => {
                if let Some(errors) = errors.filter(|_| world.is_first()) {
                    eprintln!("error: {errors}");
                }
                Ok(ExitCode::FAILURE)
            }
        }
    })
}

/// The errors, each of them once; none if there are none.
fn all_said(errors: impl Iterator<Item = String>) -> Option<String> {
    let mut different: Vec<String> = Vec::new();
    for error in errors {
        if !different.contains(&error) {
            different.push(error);
        }
    }
    (!different.is_empty()).then(|| different.join("; "))
}
