//! Jobs under `mpirun`, of this program and of examples.

use std::fmt;
use std::fs::{self, File};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus};
use std::time::{Duration, Instant};

const CASE: &str = "OPTIMISERS_MPI_CASE";
const FOLDER: &str = "OPTIMISERS_MPI_FOLDER";

/// How long a job may take.
pub const LIMIT: Duration = Duration::from_secs(100);

/// A test's name, and the test.
pub type Test = (String, Box<dyn Fn() -> Result<(), String>>);

/// What this process is to do, if it is a rank.
pub fn case() -> Option<String> {
    std::env::var(CASE).ok()
}

/// A folder that all ranks of the job see.
pub fn folder() -> PathBuf {
    std::env::var_os(FOLDER).expect("a job has a folder").into()
}

/// How bytes travel.
#[derive(Clone, Copy, PartialEq)]
pub enum Transport {
    SharedMemory,
    Tcp,
}

impl fmt::Display for Transport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if *self == Transport::Tcp {
            "tcp"
        } else {
            "shared_memory"
        })
    }
}

pub struct Job {
    command: Command,
    program: PathBuf,
    arguments: Vec<String>,
    pub folder: tempfile::TempDir,
}

/// A job that is under way.
pub struct Running {
    child: Child,
    started: Instant,
    pub folder: tempfile::TempDir,
}

pub struct Finished {
    pub status: ExitStatus,
    /// What all ranks and `mpirun` said.
    pub said: String,
    pub folder: tempfile::TempDir,
}

impl Job {
    /// A case of this program, with a folder of its own.
    pub fn new(case: &str, ranks: usize) -> Self {
        let program = std::env::current_exe().expect("this program");
        Job::of(&program, &[], ranks, tempfile::tempdir().expect("a folder")).with(CASE, case)
    }

    /// A program in a folder.
    pub fn of(program: &Path, arguments: &[&str], ranks: usize, folder: tempfile::TempDir) -> Self {
        let mut command = Command::new("mpirun");
        command
            .args(["--oversubscribe", "--bind-to", "none", "-n", &ranks.to_string()])
            .current_dir(folder.path());
        // Where tests run as root, as in containers, Open MPI wants to hear that this is meant.
        command.envs([
            ("OMPI_ALLOW_RUN_AS_ROOT", "1"),
            ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"),
            ("RAYON_NUM_THREADS", "1"),
        ]);
        command.env(FOLDER, folder.path());
        Job {
            command,
            program: program.to_path_buf(),
            arguments: arguments.iter().map(ToString::to_string).collect(),
            folder,
        }
    }

    pub fn over(mut self, transport: Transport) -> Self {
        if transport == Transport::Tcp {
            self.command.args(["--mca", "btl", "tcp,self"]);
        }
        self
    }

    pub fn with(mut self, name: &str, value: &str) -> Self {
        self.command.env(name, value);
        self
    }

    pub fn start(mut self) -> Running {
        self.command.arg(&self.program).args(&self.arguments);
        let said = File::create(self.folder.path().join("said")).expect("a file");
        self.command
            .stdout(said.try_clone().expect("a handle"))
            .stderr(said)
            .process_group(0);
        let child = self.command.spawn().expect("`mpirun` (Debian: openmpi-bin)");
        Running {
            child,
            started: Instant::now(),
            folder: self.folder,
        }
    }

    /// Whether all ranks come to a good end.
    pub fn passes(self) -> Result<(), String> {
        let Finished { status, said, .. } = self.start().finish(LIMIT)?;
        if status.success() {
            Ok(())
        } else {
            Err(format!("{status}\n{said}"))
        }
    }
}

impl Running {
    /// What all ranks and `mpirun` have said until now.
    pub fn said(&self) -> String {
        fs::read_to_string(self.folder.path().join("said")).unwrap_or_default()
    }

    /// Waits until `mpirun` has ended, and all its ranks with it.
    pub fn finish(mut self, limit: Duration) -> Result<Finished, String> {
        let status = loop {
            if let Some(status) = self.child.try_wait().expect("a child") {
                break status;
            }
            if self.started.elapsed() > limit {
                let group = format!("-{}", self.child.id());
                let _ = Command::new("kill").args(["-9", "--", &group]).status();
                let _ = self.child.wait();
                pids(self.folder.path())
                    .into_iter()
                    .for_each(|pid| send("KILL", pid));
                return Err(format!("not at an end after {limit:?}\n{}", self.said()));
            }
            std::thread::sleep(Duration::from_millis(5));
        };
        let ended = Instant::now();
        while let Some(left) = pids(self.folder.path()).first() {
            if ended.elapsed() > Duration::from_secs(5) {
                return Err(format!("process {left} is left\n{}", self.said()));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(Finished {
            status,
            said: self.said(),
            folder: self.folder,
        })
    }
}

/// The processes of the ranks of the job in this folder, in their order: `mpirun` tells each in its
/// environment.
pub fn pids(folder: &Path) -> Vec<u32> {
    let job = format!("{FOLDER}={}", folder.display());
    let rank = |process: &Path| {
        // A process that has ended, or is not ours, shows none.
        let environment = fs::read_to_string(process.join("environ")).ok()?;
        let rank = environment
            .split('\0')
            .find_map(|variable| variable.strip_prefix("OMPI_COMM_WORLD_RANK="))?;
        environment
            .split('\0')
            .any(|variable| variable == job)
            .then_some(rank.parse::<usize>().ok()?)
    };
    let processes = fs::read_dir("/proc")
        .expect("the processes")
        .filter_map(|entry| Some(entry.ok()?.path()));
    let pid = |process: PathBuf| Some((rank(&process)?, process.file_name()?.to_str()?.parse().ok()?));
    let mut ranks: Vec<(usize, u32)> = processes.filter_map(pid).collect();
    ranks.sort();
    ranks.into_iter().map(|(_, pid)| pid).collect()
}

pub fn send(signal: &str, pid: u32) {
    let _ = Command::new("kill")
        .args(["-s", signal, &pid.to_string()])
        .status();
}
