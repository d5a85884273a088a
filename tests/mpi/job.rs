//! Jobs of this program under `mpirun`.

use std::fmt;
use std::fs::{self, File};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus};
use std::time::{Duration, Instant};

const CASE: &str = "OPTIMISERS_MPI_CASE";
const FOLDER: &str = "OPTIMISERS_MPI_FOLDER";

/// How long a job may take.
const LIMIT: Duration = Duration::from_secs(100);

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
        f.write_str(if *self == Transport::Tcp { "tcp" } else { "shared_memory" })
    }
}

pub struct Job {
    command: Command,
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
    pub fn new(case: &str, ranks: usize) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let mut command = Command::new("mpirun");
        command.args(["--oversubscribe", "--bind-to", "none", "-n", &ranks.to_string()]);
        // Where tests run as root, as in containers, Open MPI wants to hear that this is meant.
        command.envs([("OMPI_ALLOW_RUN_AS_ROOT", "1"), ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"), ("RAYON_NUM_THREADS", "1"), (CASE, case)]);
        command.env(FOLDER, folder.path());
        Job { command, folder }
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
        self.command.arg(std::env::current_exe().expect("this program"));
        let said = File::create(self.folder.path().join("said")).expect("a file");
        self.command.stdout(said.try_clone().expect("a handle")).stderr(said).process_group(0);
        let child = self.command.spawn().expect("`mpirun` (Debian: openmpi-bin)");
        Running { child, started: Instant::now(), folder: self.folder }
    }

    /// Whether all ranks come to a good end.
    pub fn passes(self) -> Result<(), String> {
        let Finished { status, said, .. } = self.start().finish(LIMIT)?;
        if status.success() { Ok(()) } else { Err(format!("{status}\n{said}")) }
    }
}

impl Running {
    /// Waits until `mpirun` has ended, and all its ranks with it.
    pub fn finish(mut self, limit: Duration) -> Result<Finished, String> {
        let said = |folder: &Path| fs::read_to_string(folder.join("said")).unwrap_or_default();
        let status = loop {
            if let Some(status) = self.child.try_wait().expect("a child") {
                break status;
            }
            if self.started.elapsed() > limit {
                let group = format!("-{}", self.child.id());
                let _ = Command::new("kill").args(["-9", "--", &group]).status();
                let _ = self.child.wait();
                pids(self.folder.path()).into_iter().for_each(kill);
                return Err(format!("not at an end after {limit:?}\n{}", said(self.folder.path())));
            }
            std::thread::sleep(Duration::from_millis(5));
        };
        let ended = Instant::now();
        while let Some(left) = pids(self.folder.path()).into_iter().find(|pid| is_alive(*pid)) {
            if ended.elapsed() > Duration::from_secs(5) {
                return Err(format!("process {left} is left\n{}", said(self.folder.path())));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(Finished { status, said: said(self.folder.path()), folder: self.folder })
    }
}

/// Notes which process this rank is.
pub fn note_pid(rank: usize) {
    let (folder, pid) = (folder(), std::process::id().to_string());
    fs::write(folder.join(format!("{rank}.new")), pid).expect("a file");
    fs::rename(folder.join(format!("{rank}.new")), folder.join(format!("{rank}.pid"))).expect("a file");
}

/// The ranks that have noted which process they are.
pub fn pids(folder: &Path) -> Vec<u32> {
    let files = fs::read_dir(folder).expect("the folder").map(|entry| entry.expect("an entry").path());
    let notes = files.filter(|path| path.extension().is_some_and(|extension| extension == "pid"));
    notes.filter_map(|path| fs::read_to_string(path).ok()?.parse().ok()).collect()
}

pub fn kill(pid: u32) {
    let _ = Command::new("kill").args(["-9", &pid.to_string()]).status();
}

fn is_alive(pid: u32) -> bool {
    let state = fs::read_to_string(format!("/proc/{pid}/stat")).ok();
    state.and_then(|state| state.rsplit(") ").next().map(|rest| !rest.starts_with(['Z', 'X']))).unwrap_or(false)
}
